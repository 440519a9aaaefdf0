"""`tensor_utils.cumsum` against `torch.cumsum`."""

from __future__ import annotations

import pytest
import torch
from neuronx_distributed.utils.tensor_utils import cumsum


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_running_sums(dtype: torch.dtype, device: str) -> None:
    x = torch.randint(-8, 8, (300, 5)).to(dtype)
    found = cumsum(x.to(device), tril_size=128)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), torch.cumsum(x.double(), 0).to(dtype))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"cumsum needs a 2-d tensor, got one of shape \[3\]; use torch.cumsum"):
        cumsum(torch.ones(3))
    with pytest.raises(NotImplementedError, match=r"cumsum\(dim=1\): only dim 0 is supported"):
        cumsum(torch.ones(3, 3), dim=1)

"""`flash_attention` of tensors that are divided over a mesh: values, gradients, and how all of them lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.custom_kernel import FlashAttention, SPMDFlashAttention, flash_attention

from tests.torch_bridge.spmd.test_annotations import placed

_XLAC: Any = torch_xla._XLAC
SPEC = ("data", "model", None, None)


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("how", ["tuple", "text", "global mesh", "function"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_divided(how: str, with_bias: bool, mesh: xs.Mesh) -> None:
    torch.manual_seed(0)
    values = [torch.randn(4, 2, 6, 8) for _ in range(3)]
    bias = torch.randn(4, 2, 6, 6) if with_bias else None
    weights = torch.randn(4, 2, 6, 8)
    expected, found = ([t.clone().to(device).requires_grad_() for t in values] for device in ("cpu", "xla"))
    reference = flash_attention(*expected, True, sm_scale=0.3, ab=bias)
    (reference * weights).sum().backward()
    ab = None if bias is None else bias.to("xla")
    xs.set_global_mesh(mesh)
    options: dict[str, Any] = {
        "tuple": {"partition_spec": SPEC, "mesh": mesh},
        "text": {"partition_spec": str(SPEC), "mesh": str(mesh)},
        "global mesh": {"partition_spec": SPEC},
    }.get(how, {})
    if how == "function":
        made = SPMDFlashAttention.apply(*found, True, None, None, 0.3, ab, SPEC, mesh)
    else:
        made = flash_attention(*found, True, sm_scale=0.3, ab=ab, **options)
    (made * weights.to("xla")).sum().backward()
    torch_xla.sync()
    torch.testing.assert_close(made.cpu(), reference, rtol=1e-4, atol=1e-5)
    assert placed(made) == (1, 1, 6, 8) and _XLAC._get_xla_sharding_spec(made) == "{devices=[4,2,1,1]0,1,2,3,4,5,6,7}"
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]
        assert placed(mine.grad) == (1, 1, 6, 8)  # type: ignore[arg-type]
    assert FlashAttention is SPMDFlashAttention


def test_a_mesh_as_text(mesh: xs.Mesh) -> None:
    again = xs.Mesh.from_str(str(mesh))
    assert again is not None and again.shape() == mesh.shape() and again.device_ids.tolist() == mesh.device_ids.tolist()
    assert xs.Mesh.from_str("") is None and repr(mesh) == "Mesh({'data': 4, 'model': 2})"
    unnamed = xs.Mesh.from_str(str(xs.get_1d_mesh()))
    assert unnamed is not None and unnamed.axis_names is None
    with pytest.raises(ValueError, match=r"Mesh.from_str takes what str\(mesh\) gives, got 'Mesh\(4\)'"):
        xs.Mesh.from_str("Mesh(4)")
    with pytest.raises(ValueError, match="mesh_shape .* holds 8 devices, device_ids has 2"):
        xs.Mesh.from_str("{'device_ids': [0, 1], 'mesh_shape': (8,), 'axis_names': None}")

"""In-place variants and `out=` of every op with samples write what the CPU writes, and count the writes where it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

import torch_bridge

torch_bridge.register()

LEFT_OUT = (
    "batch_norm",
    "_scaled_mm",
    "eigh",
    "svd",
    "geqrf",
    "ormqr",
    "lu_factor",
    "ldl_factor",
    "lobpcg",
    "empty",
    "resize",
    "sparse",
    "addbmm",
)
"""Parts of names: torch's CPU crashes (`native_batch_norm`), results have several right values, or no values at all;
`addbmm_` of one element resizes it."""
RANDOM = ("normal", "multinomial", "uniform", "dropout", "rrelu", "geometric", "exponential", "cauchy", "bernoulli", "rand", "poisson")
SAMPLES = 3
OPS = [
    pytest.param(op, id=f"{op.name}.{op.variant_test_name}".rstrip("."))
    for op in op_db
    if (op.supports_out or op.inplace_variant) and not any(part in op.name for part in (*LEFT_OUT, *RANDOM))
]


def on(device: str, tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(device), tree)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def written(function: Callable[..., Any], given: tuple[Any, dict[str, Any]]) -> list[tuple[torch.Tensor, bool]]:
    """All tensors after a call, with whether each counts a write."""
    before = [t._version for t in tensors(given)]
    function(*given[0], **given[1])
    return [(t.cpu(), t._version > version) for t, version in zip(tensors(given), before, strict=True)]


def agree(name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    try:
        expected = written(function, on("cpu", (args, kwargs)))
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return
    for (value, counted), (wanted, must_count) in zip(written(function, on("xla", (args, kwargs))), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda m: f"{name}: {m}")
        assert counted or not must_count, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough(keep=24)
@pytest.mark.parametrize("op", OPS)
def test_what_is_written(op: OpInfo) -> None:
    if torch.float32 not in op.supported_dtypes("cpu"):
        pytest.skip("it has no samples of float32")
    for sample in list(op.sample_inputs("cpu", torch.float32, requires_grad=False))[:SAMPLES]:
        if "device" in sample.kwargs:  # it makes tensors
            continue
        args = (sample.input, *sample.args)
        if op.inplace_variant is not None:
            agree(f"{op.name}_", op.inplace_variant, args, sample.kwargs)
        if op.supports_out:
            out = pytree.tree_map_only(torch.Tensor, torch.empty_like, op(*args, **sample.kwargs))
            named = {**sample.kwargs, "out": tuple(out) if isinstance(out, (tuple, list)) else out}
            agree(f"{op.name}.out", op, args, named)

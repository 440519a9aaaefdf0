"""Reads of attributes of tensors: facts that the arguments' shapes and dtypes decide, what may not be looked at, and what a script has put there."""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.guards.conditions import MISSING
from torch_bridge.guards.observer import Observer
from torch_bridge.guards.values import is_a
from torch_bridge.recorder.tensor import XLATensor

_TENSOR_FACTS = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "T",
        "mT",
        "H",
        "mH",
        "real",
        "imag",
        "layout",
        "itemsize",
        "nbytes",
        "is_sparse",
        "is_cuda",
        "is_cpu",
        "is_xla",
        "is_meta",
        "is_quantized",
        "is_mkldnn",
        "is_nested",
        "is_mps",
        "is_xpu",
        "is_ipu",
        "is_vulkan",
        "data",
        "names",
        "__class__",
        "__name__",
        "is_leaf_",
        "is_mtia",
        "is_maia",
        "is_hpu",
    ]
)
_TENSOR_HIDES = {
    "grad_fn": "how a tensor was computed (.grad_fn)",
    "is_leaf": "how a tensor was computed (.is_leaf)",
    "_version": "how often a tensor was written (._version)",
    "grad": ".grad of a tensor",
    "_grad": ".grad of a tensor",
    "output_nr": "how a tensor was computed (.output_nr)",
    "_backward_hooks": "the hooks of a tensor",
    "retains_grad": "whether a tensor retains its gradient",
    "_base": "what a tensor is a view of (._base)",
    "__dict__": "the attributes of a tensor",
    "_is_param": "whether a tensor is a parameter",
}


def attribute_of_tensor(observer: Observer, x: torch.Tensor, name: str) -> Any:
    if name in _TENSOR_FACTS:
        return getattr(x, name)
    if name in _TENSOR_HIDES:
        observer.refuse(f"it looks at {_TENSOR_HIDES[name]}")
        return getattr(x, name, MISSING)
    if hasattr(torch._C.TensorBase, name) or hasattr(torch.Tensor, name):
        observer.lookup(torch.Tensor, name)
        return getattr(x, name)
    if is_a(x, XLATensor) and not observer.conditions.has_tensor(x):  # made by the run, or an argument, which has no attributes (`replay`)
        return getattr(x, name, MISSING)
    held = vars(x)
    value = observer.entry(x, held, name, f"an attribute {name} of a tensor")
    return getattr(x, name, MISSING) if value is MISSING else value

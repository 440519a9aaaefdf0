"""What a module's forward can change besides recording ops, looked at before and after: random generators of the host, its arguments, gradients."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.replay.tape import NotRepeatable


class Before:
    """How things are before a call. arguments: (args, kwargs) as the forward gets them; held: tensors of the module."""

    def __init__(self, arguments: Any, held: Sequence[XLATensor]):
        self._arguments = arguments
        self._leaves, self._spec = _pytree.tree_flatten(arguments)
        self._tensors = [x for x in self._leaves if isinstance(x, XLATensor)]
        self._held = [t for t in held if t.requires_grad]
        self._facts = [_facts(t) for t in self._tensors]
        self._grads = self._grads_now()
        self._random = _random_states()

    def check(self) -> None:
        """Raises NotRepeatable if a call changed something that playing its ops would not change."""
        for name, before, now in zip(_GENERATORS, self._random, _random_states(), strict=True):
            if before is not None and before != now:
                raise NotRepeatable(f"it draws from {name}; draw on the device (torch.rand(..., device=x.device)), or outside the module")
        leaves, spec = _pytree.tree_flatten(self._arguments)
        if spec != self._spec or any(a is not b for a, b in zip(leaves, self._leaves, strict=True)):
            raise NotRepeatable("it changes a list or dict that it was given")
        for t, before in zip(self._tensors, self._facts, strict=True):
            now = _facts(t)
            for what, a, b in zip(_FACTS, before, now, strict=True):
                if a is not b and a != b:
                    raise NotRepeatable(f"it changes {what} of an argument of shape {list(t.shape)}")
        if any(a is not b for a, b in zip(self._grads, self._grads_now(), strict=True)):
            raise NotRepeatable("it sets .grad of a parameter or argument: it runs a backward pass inside")

    def _grads_now(self) -> list[Any]:
        return [t.grad for t in (*self._tensors, *self._held) if t.is_leaf]


_FACTS = (
    "the memory",
    "the shape",
    "requires_grad",
    "the history (an in-place op on a tensor with gradients)",
    "the hooks",
    "an attribute",
)


def _facts(t: XLATensor) -> tuple[Any, ...]:
    hooks = tuple(t._backward_hooks or ())
    return id(t._storage), t._layout, t.requires_grad, t.grad_fn, (hooks, t.retains_grad), tuple(t.__dict__)


_GENERATORS = ("Python's random", "numpy.random", "torch's CPU generator")


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), _numpy_state(), torch.default_generator.get_state().numpy().tobytes()


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return (name, keys.tobytes(), *rest)


def shares_memory(layouts: Iterable[Any]) -> bool:
    """Whether two of these views of one storage may have an element in common."""
    views = list(layouts)
    return any(_meet(a, b) for k, a in enumerate(views) for b in views[:k])


def _meet(a: Any, b: Any) -> bool:
    if not a.numel or not b.numel:
        return False
    if a.stride != b.stride or a.dtype != b.dtype:
        return True
    dims = sorted(((s, n, m) for s, n, m in zip(a.stride, a.size, b.size, strict=True) if n > 1 or m > 1), reverse=True)
    reach = 0
    for stride, n, m in reversed(dims):
        if stride <= reach:
            return True
        reach += stride * (max(n, m) - 1)
    return _reachable(b.offset - a.offset, dims)


def _reachable(delta: int, dims: Sequence[tuple[int, int, int]]) -> bool:
    """Whether `delta` is a sum of stride * (i - j) with i and j in the dims' sizes."""
    if not dims:
        return delta == 0
    (stride, n, m), *rest = dims
    steps = {delta // stride, -(-delta // stride)}
    return any(-m < step < n and _reachable(delta - step * stride, rest) for step in steps)

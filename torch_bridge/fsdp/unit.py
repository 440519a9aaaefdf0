"""What one wrapper does around its module's forward and backward: gather the parameters, let go of them, reduce gradients.

    forward    shards -> barrier (after the inputs exist) -> all-gather -> the module's attributes -> forward -> attributes are taken away
    backward   shards -> barrier (after the results' gradients exist) -> all-gather -> saved tensors; gradients -> reduce-scatter -> `shard.grad`

XLA frees a value after its last reader. So that no reader in the backward pass keeps what the forward pass gathered, saved tensors that are views of a gathered
parameter are not saved: `Use` notes which view it was, and takes the same one of what the backward pass gathers. The barriers keep XLA from finding that both
gathers are the same, and from gathering all units at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from torch_bridge.fsdp.shards import Place, Shared
from torch_bridge.ir.layout import Layout
from torch_bridge.recorder.tensor import XLATensor, make
from torch_bridge.runtime import steps

Call = Callable[..., Any]


def _call(module: nn.Module, *args: object, **kwargs: object) -> Any:
    return module(*args, **kwargs)


@dataclass(eq=False)
class Unit:
    """The parameters of one wrapper, and how they are treated.

    dtype: to compute in; reshards: let go of gathered parameters between forward and backward; wide_reduce: add up gradients in float32; before, after: what
    gradients are divided by, before and after the sum over ranks; in_forward, in_backward: barriers; marks: a step ends after each backward pass;
    synchronizes: gradients are reduced now (not under `no_sync`).
    """

    shared: Sequence[Shared]
    dtype: torch.dtype
    wide_reduce: bool
    before: float
    after: float
    in_forward: bool
    in_backward: bool
    reshards: bool
    marks: bool
    synchronizes: bool = True
    running: int = field(default=0, init=False)

    def settled(self) -> bool:
        """Whether backward passes do no more than reduce gradients: no `no_sync`, and nothing left from one."""
        return self.synchronizes and all(s.unsent is None for s in self.shared)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, how: Call = _call) -> Any:
        """`module(*args, **kwargs)` with gathered parameters. how: calls it, as `how(module, *args, **kwargs)`."""
        if self.running and not _in_backward():  # it calls itself
            return how(module, *args, **kwargs)
        args, kwargs = self._cast((args, kwargs))
        use = Use(self)
        with self._running(), use.forward((args, kwargs)):
            out = how(module, *args, **kwargs)
        use.follow(out)
        return out

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _cast(self, given: Any) -> Any:
        if self.dtype == torch.float32:
            return given
        return _pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, given)

    def gathered(self, after: Sequence[torch.Tensor], barrier: bool) -> list[list[torch.Tensor]]:
        """The parameters of each shared tensor, without a history, available once the tensors `after` are."""
        with torch.no_grad():
            shards: list[torch.Tensor] = [s.shard.detach() for s in self.shared]
            if barrier and shards:
                from torch_bridge.fsdp.apart import apart

                shards = apart(shards, after)
            return [s.split(s.layout.gather(t, self.dtype)) for s, t in zip(self.shared, shards, strict=True)]

    def reduced(self, shared: Shared, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The gradient of a shard, from this rank's gradients of the full parameters; None under `no_sync`, which keeps them."""
        grad = shared.whole_gradient(grads)
        if self.wide_reduce:
            grad = grad.to(torch.float32)
        if shared.unsent is not None:
            grad, shared.unsent = shared.unsent + grad, None
        if not self.synchronizes:
            shared.unsent = grad
            return None
        return shared.layout.reduce(grad, self.before, self.after).to(shared.shard.dtype)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


class _Join(torch.autograd.Function):
    """From a shard to the parameters that were gathered from it; backward, their gradients are reduced to the shard's."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, unit: Unit, shared: Shared, *full: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.shared = unit, shared
        return tuple(t.detach() for t in full)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        found = None if all(g is None for g in grads) else ctx.unit.reduced(ctx.shared, grads)
        return (found, None, None, *[None] * len(grads))


class Use:
    """One forward pass of a unit, and the backward passes through it."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self._places: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._versions = [s.shard._version for s in unit.shared]
        self._task = -1
        self._begun = False
        self._full: list[list[torch.Tensor]] = []

    @contextlib.contextmanager
    def forward(self, given: Any) -> Iterator[None]:
        """The module has its parameters, gathered after what it is given."""
        unit = self.unit
        after = [t for t in _pytree.tree_leaves(given) if isinstance(t, XLATensor)]
        full = unit.gathered(after, unit.in_forward)
        hidden = _put(unit, _with_history(unit, full))
        hooks: Any = contextlib.nullcontext()
        if unit.reshards and torch.is_grad_enabled() and not _in_backward():
            for k, tensors in enumerate(full):
                for i, t in enumerate(tensors):
                    storage = t._storage  # type: ignore[attr-defined]
                    self._places.setdefault(id(storage), (weakref.ref(storage), k, i))
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        elif torch.is_grad_enabled():
            self._full = full
        del full, after
        try:
            with hooks:
                yield
        finally:
            _take_back(hidden)

    def follow(self, out: Any) -> None:
        """Gather again when the first gradient of a result arrives."""
        if torch.is_grad_enabled() and not _in_backward():
            for t in _pytree.tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.requires_grad and t.grad_fn is not None:
                    t.register_hook(self._arrived)

    # -- saved tensors --------------------------------------------------------------------------------

    def _pack(self, t: torch.Tensor) -> Any:
        found = self._places.get(id(t._storage)) if isinstance(t, XLATensor) else None
        if found is None or found[0]() is not t._storage:  # type: ignore[attr-defined]
            return t
        return found[1], found[2], t._layout  # type: ignore[attr-defined]

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        k, i, layout = packed
        self._arrived()
        return _view(self._full[k][i], layout)

    # -- the backward pass ----------------------------------------------------------------------------

    def _arrived(self, *grads: torch.Tensor) -> None:
        if not self._begun or self._task != torch._C._current_graph_task_id():
            self._begin(grads)

    def _begin(self, grads: Sequence[torch.Tensor]) -> None:
        """Gather for this backward pass. The module has its parameters until it ends: activation checkpoints inside run its forward again."""
        self._begun, self._task = True, torch._C._current_graph_task_id()
        if not self._full:
            self._gather_again(grads)
        if self._task < 0:  # somebody looks at a saved tensor
            return
        with torch.enable_grad():
            _put(self.unit, _with_history(self.unit, self._full))
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end)

    def _gather_again(self, grads: Sequence[torch.Tensor]) -> None:
        unit = self.unit
        if any(s.shard._version != version for s, version in zip(unit.shared, self._versions, strict=True)):
            raise RuntimeError(
                "the parameters of an XlaFullyShardedDataParallel module were changed between its forward and its backward pass (optimizer.step(), "
                "load_state_dict), which would compute with the new ones: run backward() first, or pass reshard_after_forward=False"
            )
        self._full = unit.gathered(grads, unit.in_backward)

    def _end(self) -> None:
        self._full, self._begun = [], False
        for piece in (piece for s in self.unit.shared for piece in s.pieces):
            _take_back([(place, piece.stand_in) for place in piece.places])
        if self.unit.marks:
            steps.mark()


def _view(t: torch.Tensor, layout: Layout) -> torch.Tensor:
    return make(layout, t._storage)  # type: ignore[attr-defined]


def _with_history(unit: Unit, full: Sequence[Sequence[torch.Tensor]]) -> list[Sequence[torch.Tensor]]:
    """Where gradients are wanted, tensors whose gradients become the shards'."""
    if not torch.is_grad_enabled():
        return list(full)
    return [
        _Join.apply(s.shard, unit, s, *tensors) if s.shard.requires_grad else tensors for s, tensors in zip(unit.shared, full, strict=True)
    ]


def _put(unit: Unit, full: Sequence[Sequence[torch.Tensor]]) -> list[tuple[Place, Any]]:
    """Give modules their parameters; what they had in the places."""
    hidden = []
    for s, tensors in zip(unit.shared, full, strict=True):
        for piece, t in zip(s.pieces, tensors, strict=True):
            for place in piece.places:
                hidden.append((place, vars(place.module)[place.name]))
                setattr(place.module, place.name, t)
    return hidden


def _take_back(hidden: Sequence[tuple[Place, Any]]) -> None:
    for place, before in reversed(hidden):
        setattr(place.module, place.name, before)

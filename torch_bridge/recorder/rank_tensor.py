"""CPU tensors that differ by rank, in a process that runs the script once for several ranks.

`torch.ones(2) * rank`, `weight.chunk(n)[rank]`, `batch.narrow(0, rank * n, n)` and `torch.tensor([rank])` are a `RankTensor`: one CPU tensor for each
hosted rank, on which every operation works as on one. On its way to xla each rank gets its own. What reads it as plain values (`print`, `item`, `numpy`, a
file) gets the first hosted rank's, as of an xla tensor.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from torch_bridge import source
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.recorder import first_rank_files, rank_array, rank_random

if TYPE_CHECKING:
    from torch_bridge.recorder.tensor import XLATensor

aten = torch.ops.aten


class RankTensor(torch.Tensor):
    """A CPU tensor for each hosted rank. parts: in the order of the hosted ranks, alike in shape, dtype and strides. axes: mesh axes along which they may
    differ; None: any. shared: they lie in a tensor that all ranks share, and cannot be written through."""

    first: torch.Tensor
    shared: bool
    _axes: list[tuple[str, ...] | None]
    """One entry, which tensors that lie in one memory have in common: a write to a view makes the whole differ."""
    _parts: tuple[torch.Tensor, ...] | Callable[[], Sequence[torch.Tensor]]

    @staticmethod
    def __new__(cls, parts: Sequence[torch.Tensor], axes: tuple[str, ...] | None = None, shared: bool = False) -> RankTensor:
        kinds = {(tuple(p.shape), p.dtype) for p in parts}
        if len(kinds) > 1:
            shown = ", ".join(f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)}" for p in parts[:4])
            raise rank_numbers.PlainNumberNeeded(
                f"This process runs the script once for {len(parts)} ranks, and a CPU tensor would be {shown} for rank 0, 1, ...: pad it to one shape, "
                "use int(rank) if rank 0's number is meant, or start one process per rank with torchrun."
            )
        if parts[0].layout != torch.strided:
            raise rank_numbers.PlainNumberNeeded(
                f"a sparse tensor ({parts[0].layout}) would differ by rank, and only dense ones can: make it dense first (to_dense()), or start one process "
                "per rank with torchrun."
            )
        return cls._around(parts[0], tuple(parts), axes, shared)

    @classmethod
    def _around(cls, first: torch.Tensor, parts: Any, axes: tuple[str, ...] | None, shared: bool) -> RankTensor:
        made: RankTensor = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), storage_offset=first.storage_offset(), dtype=first.dtype, device=first.device
        )
        made.first, made._parts, made._axes, made.shared = first, parts, [axes], shared
        return made

    @classmethod
    def later(cls, first: torch.Tensor, parts: Callable[[], Sequence[torch.Tensor]], axes: tuple[str, ...] | None) -> RankTensor:
        """One whose parts are asked for when somebody computes with them; `first` is the first one."""
        return cls._around(first, parts, axes, False)

    @property
    def axes(self) -> tuple[str, ...] | None:
        """Mesh axes along which the parts may differ; None: any."""
        return self._axes[0]

    @axes.setter
    def axes(self, axes: tuple[str, ...] | None) -> None:
        self._axes[0] = axes

    def sharing(self, other: RankTensor) -> RankTensor:
        """This tensor, which lies in the memory of another one."""
        self._axes = other._axes
        return self

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Each hosted rank's tensor."""
        if not isinstance(self._parts, tuple):
            self._parts = (self.first, *self._parts()[1:])
        return self._parts

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        return rank_numbers.hooks().tensor_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})

    def uploaded(self) -> XLATensor:
        """An xla tensor with each rank's own values; at a place (`mesh.places`), of the ranks there."""
        from torch_bridge.recorder import uploads  # JAX

        part = dict(zip((world.current().within or world.current()).hosted, self.parts, strict=True))
        known = self.axes if self.axes is not None and set(self.axes) <= set(world.current().axes) else None
        return uploads.from_ranks(part.__getitem__, known)

    # -- read as plain values ---------------------------------------------------------------------------

    def item(self) -> Any:
        """The first hosted rank's number, which remembers the others'."""
        return rank_numbers.item(tuple(p.item() for p in self.parts))

    def tolist(self) -> Any:
        """The first hosted rank's values, which remember the others'."""
        return rank_array.nested([p.tolist() for p in self.parts])

    def numpy(self, *, force: bool = False) -> Any:
        """An array that differs by rank, with memory of its own: what is written there is not written to the tensor."""
        return rank_array.made([p.numpy(force=force).copy() for p in self.parts])

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return rank_array.made([p.__array__(*args, **kwargs).copy() for p in self.parts])

    def data_ptr(self) -> int:
        """Where the first hosted rank's values lie: what libraries that write files read."""
        self._note()
        return self.first.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The first hosted rank's memory."""
        return self.first.untyped_storage()

    def storage(self) -> Any:
        """The first hosted rank's memory."""
        return self.first.storage()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return self.first.__dlpack__(*args, **kwargs)

    def _note(self) -> None:
        """Say once that what reads memory gets the first hosted rank's values."""
        first_rank_files.note(f"shape {list(self.shape)} on the CPU, different on each rank")

    def __bool__(self) -> bool:
        return bool(self.item() if self.dtype == torch.bool else rank_numbers.item(tuple(bool(p) for p in self.parts)))

    def __int__(self) -> int:
        rank_numbers.plain([int(p) for p in self.parts])
        return int(self.first)

    def __index__(self) -> int:
        found = self.first.__index__()
        values = tuple(p.__index__() for p in self.parts)
        if any(v != found for v in values):
            rank_numbers.asked_for_index(values)
        return found

    def __float__(self) -> float:
        return float(self.item())

    def __repr__(self, *, tensor_contents: object = None) -> Any:  # type: ignore[override]
        return repr(self.first)

    def __format__(self, spec: str) -> str:
        return format(self.first, spec)

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        self._note()
        return self.first.__reduce_ex__(proto)

    def __copy__(self) -> RankTensor:
        return RankTensor(self.parts, self.axes, self.shared).sharing(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankTensor:
        if id(self) in memo:
            return memo[id(self)]
        made = memo[id(self)] = RankTensor([p.clone() for p in self.parts], self.axes)
        made.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made._is_param = True
        return made


# -- what each rank has ------------------------------------------------------------------------------


def check_writable(t: RankTensor) -> None:
    if t.shared:
        raise rank_numbers.PlainNumberNeeded(
            f"a write to each rank's part (of shape {list(t.shape)}) of a CPU tensor that all ranks share: clone() the part first, write to the whole tensor "
            "(x[start:end] = values), or move it to xla (x.to('xla')[rank]) where ranks have their own"
        )


def on_each(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], generators: Sequence[Any] = ()) -> list[Any]:
    """What it gives for each hosted rank. All draw the same random numbers, as processes with one seed do; each its own after a seed that differs by rank."""
    found = [*generators, *(x for x in tree_leaves((args, kwargs)) if isinstance(x, torch._C.Generator))]
    return rank_random.on_each(lambda place: func(*own(args, place), **own(kwargs, place)), found)


def own(given: object, place: int) -> Any:
    """Nested arguments as the hosted rank at this place has them."""
    return tree_map(functools.partial(_own, place), given)


def _own(place: int, x: object) -> Any:
    """What the hosted rank at this place has of an argument."""
    if isinstance(x, RankTensor):
        return x.parts[place]
    if isinstance(x, slice):
        return slice(*(_own(place, end) for end in (x.start, x.stop, x.step)))
    if isinstance(x, np.ndarray):
        return rank_array.own(x, place)
    return rank_numbers.own(x, place)


def varied_axes(leaves: Sequence[Any]) -> tuple[str, ...] | None:
    """Mesh axes along which results of these may differ."""
    found: set[str] = set()
    for x in leaves:
        if isinstance(x, slice):
            inner = varied_axes((x.start, x.stop, x.step))
        elif isinstance(x, RankTensor):
            inner = x.axes
        elif rank_numbers.is_item(x) or rank_array.is_ranked(x):
            inner = None
        else:
            values = rank_numbers.values_of(x)
            inner = () if values is None else world.axes_of_table(values)
        if inner is None:
            return None
        found.update(inner)
    return tuple(a for a in world.current().axes if a in found)


def memory(leaves: Sequence[Any]) -> set[int]:
    """Where the memory lies that all ranks share of some arguments: plain tensors, and parts of them."""
    found = [x.first if isinstance(x, RankTensor) and x.shared else x for x in leaves if isinstance(x, torch.Tensor)]
    return {_start(x) for x in found if not isinstance(x, RankTensor)} - {0}


def _start(t: torch.Tensor) -> int:
    """Of a tensor's memory; 0 for one without, such as what torch.func wraps."""
    if t.layout != torch.strided or t.device.type != "cpu" or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return 0
    return t.untyped_storage().data_ptr()


def join(results: list[Any], axes: tuple[str, ...] | None, shared: set[int]) -> Any:
    """One result for what each rank got: tensors, numbers, and lists of them. shared: `memory` of what they were computed from."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        if torch._C._functorch.is_functorch_wrapped_tensor(first):
            raise rank_numbers.PlainNumberNeeded(
                "a CPU tensor that differs by rank meets, within torch.func, one of which the function is transformed: give it to the function as an argument "
                "(torch.func.grad(f)(x, part)), move both to xla first, or start one process per rank with torchrun."
            )
        own = [t.detach().resolve_conj().resolve_neg() for t in results]
        return RankTensor(own, axes, _start(own[0]) in shared)
    if isinstance(first, (list, tuple)):
        if len({len(r) for r in results}) > 1:
            raise rank_numbers.refuse([len(r) for r in results])
        made = [join(list(row), axes, shared) for row in zip(*results, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    if isinstance(first, (bool, int, float)):
        return rank_numbers.item(tuple(results))
    if all(r is first or r == first for r in results):
        return first
    raise rank_numbers.refuse(results)


# -- ops ------------------------------------------------------------------------------------------------


def _dispatch(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op on tensors some of which differ by rank: one that the recorder sees, one that moves them to xla, one that writes, or one that gives new ones."""
    from torch_bridge.recorder import tensor  # JAX

    leaves = tree_leaves((args, kwargs))
    if any(isinstance(x, tensor.XLATensor) for x in leaves):
        return tensor.dispatch(func, args, kwargs)
    if func._can_decompose():  # in inference mode torch itself has not
        return func.decompose(*args, **kwargs)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "xla":
        return _to_xla(func, args, kwargs)
    written = [a for argument, a in _bound(func, args, kwargs) if argument.alias_info is not None and argument.alias_info.is_write]
    if written:
        return _write(func, args, kwargs, [t for a in written for t in tree_leaves(a) if isinstance(t, torch.Tensor)])
    return _make(func, args, kwargs, leaves)


def _make(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]) -> Any:
    """An op that gives new tensors or views, from each rank's inputs. leaves: all arguments, flattened."""
    axes = None if torch.Tag.nondeterministic_seeded in func.tags else varied_axes(leaves)
    found = join(on_each(func, args, kwargs), axes, memory(leaves))
    if isinstance(found, torch.SymBool) or rank_numbers.is_item(found):  # what calls here takes Python's own numbers only
        _say_plain(rank_numbers.per_rank(found))
        return rank_numbers.first(found)
    given = {_start(x.first): x for x in leaves if isinstance(x, RankTensor)}
    for t in tree_leaves(found):
        if isinstance(t, RankTensor) and t.numel() and _start(t.first) in given:
            t.sharing(given[_start(t.first)])
    return found


_said: set[str] = set()


def _say_plain(values: Sequence[Any]) -> None:
    """torch itself asks for a plain number, as `one_hot` does for the number of classes."""
    line = source.user_line()
    if line in _said:
        return
    _said.add(line)
    shown = ", ".join(map(str, values[:4])) + (", ..." if len(values) > 4 else "")
    rank_numbers.report(
        f"{line}: torch asks for one plain number of a CPU tensor that differs by rank ({shown} for rank 0, 1, ...) and gets rank 0's, for all ranks. Give the "
        "number yourself (num_classes=...), move the tensor to xla first, or start one process per rank with torchrun.",
        4,
    )


def _to_xla(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`.to("xla")`: each rank its own."""
    if func is not aten._to_copy.default:
        assert "_like" in func.name() or "::new_" in func.name(), func
        return func(*own(args, 0), **kwargs)  # a new tensor of that shape: `torch.zeros_like(x, device="xla")`
    found = args[0].uploaded()
    dtype = kwargs.get("dtype")
    return found if dtype is None or dtype == found.dtype else found.to(dtype)


def _bound(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The schema's arguments with what was given for them."""
    arguments = func._schema.arguments
    return [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]


def _write(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[torch.Tensor]) -> Any:
    """An op that writes: to tensors that differ by rank, or a copy of one as the whole content of a plain CPU tensor, which then remembers it."""
    if all(isinstance(t, RankTensor) for t in targets):
        for t in targets:
            check_writable(t)  # type: ignore[arg-type]
        leaves = tree_leaves((args, kwargs))
        results = write_each(targets, leaves, lambda: on_each(func, args, kwargs))  # type: ignore[arg-type]
        return _returned(func, results, targets, leaves)
    if func is aten.copy_.default and targets[0].shape == args[1].shape:
        from torch_bridge.recorder import uploads  # JAX

        given: RankTensor = args[1]
        target = targets[0].detach()
        uploads.remember(target, RankTensor([p.to(target.dtype) for p in given.parts], given.axes).uploaded())
        _say_shared(targets[0])
        target.copy_(given.parts[0])  # after that: a note that the bytes do not agree with counts for nothing
        return args[0]
    raise rank_numbers.PlainNumberNeeded(
        f"{func} would write values that differ by rank into a CPU tensor (of shape {list(targets[0].shape)}) that all "
        f"{len(_first(args, kwargs).parts)} ranks of this process share: make the tensor on xla, or start one process per rank with torchrun."
    )


def _returned(func: torch._ops.OpOverload, results: list[Any], targets: list[torch.Tensor], leaves: Sequence[Any]) -> Any:
    """What an op that writes to these targets returns: the targets, or something new (a norm that writes its running statistics)."""
    returns = func._schema.returns
    if not returns:
        return None
    if any(r.alias_info is not None for r in returns):
        return targets[0] if len(targets) == 1 else tuple(targets)
    return join(results, varied_axes(leaves), memory(leaves))


def _say_shared(t: torch.Tensor) -> None:
    """A plain tensor gets each rank's values, and something else lies in its memory."""
    rank_numbers.report(
        f"{source.user_line()} copies values that differ by rank into a CPU tensor (of shape {list(t.shape)}) in whose memory other tensors or arrays lie: "
        "moved to xla each rank has its own, but on the CPU all work with rank 0's. Make a new tensor of the values, or write to the whole one.",
        3,
    )


def write_each(targets: Sequence[RankTensor], leaves: Sequence[Any], write: Callable[[], Any]) -> Any:
    """What `write()` gives, which writes some of these leaves into tensors that differ by rank: they may differ along more axes then, and until it ends along
    any."""
    varied = varied_axes(leaves)
    for t in targets:
        t.axes = None
    written = write()
    axes = None if rank_random.of(None) is not None else varied
    for t in targets:
        t.axes = axes
    return written


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankTensor:
    return next(x for x in tree_leaves((args, kwargs)) if isinstance(x, RankTensor))


# -- plain tensors that ranks have their own of from now on ---------------------------------------------


def become(t: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Let a plain CPU tensor, which is written as a whole, differ by rank from now on. Where other tensors share its memory it remembers the other ranks'
    values instead, until it is written again: moved to xla, each rank has its own."""
    if not _swapped(t, parts, None):
        with torch.no_grad():
            return t.copy_(RankTensor(parts))
    return t


def divide(t: torch.Tensor) -> bool:
    """Let each rank have its own of a plain CPU tensor, which is about to be written: whether it can (nothing else lies in its memory)."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.device.type != "cpu" or t.layout != torch.strided:
        return False
    if (
        torch._C._functorch.is_functorch_wrapped_tensor(t)
        or torch._is_functional_tensor(t)
        or (torch.is_grad_enabled() and t.requires_grad)
    ):
        return False
    return _swapped(t, [t.detach().clone() for _ in world.current().hosted], ())


def rebind(t: torch.Tensor, value: torch.Tensor) -> None:
    """`t.data = value` where one of the two differs by rank."""
    hosted = world.current().hosted
    made = copy.copy(value) if isinstance(value, RankTensor) else RankTensor([value.clone() for _ in hosted], ())
    if not _exchange(t, made):
        raise rank_numbers.PlainNumberNeeded(
            f"a tensor of shape {list(t.shape)} would differ by rank, and a graph holds it: assign before it is used, or make a new parameter of the value"
        )


_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Whose `.data` a tensor is. (An attribute would be pickled with it.)"""


def note_data(t: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Remember whose `.data` a tensor is; returns it."""
    _OWNERS[data] = t
    return data


def _swapped(t: torch.Tensor, parts: Sequence[torch.Tensor], axes: tuple[str, ...] | None) -> bool:
    owner = _OWNERS.pop(t, None)  # torch exchanges no tensor with a weak reference
    if owner is not None and type(owner) in (torch.Tensor, torch.nn.Parameter) and _start(owner) == _start(t) and owner.shape == t.shape:
        if owner.stride() != t.stride() or not owner.is_leaf or owner._base is not None or not _alone(t, 1):
            return False
        made = RankTensor(parts, axes)
        return _exchange(owner, copy.copy(made)) and _exchange(t, made)
    return t.is_leaf and _alone(t) and _exchange(t, RankTensor(parts, axes))


def _exchange(t: torch.Tensor, made: RankTensor) -> bool:
    """Let one tensor be the other from now on, with its own name, hooks and gradient."""
    made.requires_grad_(t.requires_grad)
    if isinstance(t, torch.nn.Parameter):
        made._is_param = True
    kept = ("first", "_parts", "_axes", "shared")
    hooks = t._backward_hooks, t._post_accumulate_grad_hooks
    if any(hooks):
        made._backward_hooks, made._post_accumulate_grad_hooks = hooks
    made.__dict__.update({name: x for name, x in t.__dict__.items() if name not in kept})
    with torch.no_grad():
        grad = t.grad if t.is_leaf else None
        if grad is not None and grad.shape == made.shape and grad.dtype == made.dtype:
            made.grad = grad
    try:
        torch.utils.swap_tensors(t, made)
    except RuntimeError:  # somebody in C++ holds it
        return False
    return True


def _alone(t: torch.Tensor, others: int = 0) -> bool:
    """Whether no other tensor lies in the same memory, or so many."""
    storage = t.untyped_storage()
    own = storage.resizable() and storage.nbytes() == t.numel() * t.element_size()  # that of an array of NumPy's cannot be resized
    if t._base is not None and _is_only_base(t):
        others += 1
    return own and torch._C._storage_Use_Count(storage._cdata) <= 2 + others


def _is_only_base(t: torch.Tensor) -> bool:
    """Whether nobody but this view of it (`torch.arange(8).view(4, 2)`) holds a tensor any more."""
    return t._base is not None and sys.getrefcount(t._base) <= _REFERENCES  # no variable: whether one counts depends on Python's version


_REFERENCES = 2

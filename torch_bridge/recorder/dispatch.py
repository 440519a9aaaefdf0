"""Where every aten op on an xla tensor arrives, and how it becomes a node, a view, or a host computation.

`dispatch` looks up the call's signature (overload, layouts of its tensors, constants) in a cache. On a hit, recording is: read the
inputs' ids, append a node, wrap the outputs. On a miss `_plan_call` asks torch's meta kernels for the result shapes and decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from torch_bridge import lowerings
from torch_bridge.errors import locate
from torch_bridge.ir import number_families
from torch_bridge.ir.entry import Entry, Lift, Slot
from torch_bridge.ir.layout import Layout, base_of_meta, layout, of_meta
from torch_bridge.ir.segment import LOCK, Segment
from torch_bridge.ir.view_entries import flat
from torch_bridge.mesh import abstract_arrays, places, random_state, rank_numbers
from torch_bridge.recorder import argument_checks, cpu_draws, fallback, known_masks, overlaps, placed, script_kernels
from torch_bridge.recorder.copies import upload
from torch_bridge.recorder.schema import LIFTED, NOT_SCALAR, Info, info
from torch_bridge.recorder.shape_inference import DROPPED, NeedsHost, infer, infer_from_lowering, to_meta
from torch_bridge.recorder.tensor import XLATensor, fresh, make, point, read
from torch_bridge.runtime.session import STATE

aten = torch.ops.aten


Op = torch._ops.OpOverload
Args = tuple[Any, ...]
Kwargs = dict[str, Any] | None
Special = Callable[..., Any]
SPECIAL: dict[int, Special] = {}
"""Ops with their own recording rule, by id of the overload: `special(func, args, kwargs)`."""


def special(*ops: torch._ops.OpOverload) -> Callable[[Special], Special]:
    """Give overloads their own recording rule."""

    def register(fn: Special) -> Special:
        for op in ops:
            assert id(op) not in SPECIAL, op
            SPECIAL[id(op)] = fn
        return fn

    return register


_AUTOGRAD = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")


def composite(op: torch._ops.OpOverload, rule: Callable[..., Any]) -> None:
    """Have a rule called with the arguments of an op that torch makes of other ops: with autograd, and in inference mode, where the op comes here whole."""
    _AUTOGRAD.impl(op, rule)
    special(op)(lambda func, args, kwargs: rule(*args, **kwargs))


class Call:
    """What to do for one signature: how to record it and how to wrap its results."""

    __slots__ = ("draws", "entry", "returns", "run", "view_layouts", "writes")

    def __init__(self, run: Callable[..., Any], entry: Entry | None = None, returns: Any = None):
        self.run = run
        self.entry = entry
        self.returns = returns
        self.view_layouts: Any = None
        self.writes: list[tuple[int, int]] = []
        self.draws = entry is not None and entry.rng

    @property
    def again(self) -> bool:
        """Whether another one may take its place: no node has its entry."""
        return self.run is _run_view or (self.entry is not None and number_families.moves(self.entry))


def dispatch(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Record (or run) one aten call that involves an xla tensor."""
    with LOCK:
        rule = SPECIAL.get(id(func))
        return record_for_ranks(func, args, kwargs) if rule is None else rule(func, args, kwargs or {})


def record_for_ranks(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """The general rule, also if numbers among the arguments differ by rank."""
    try:
        return record(func, args, kwargs)
    except _Ranked:
        pass  # outside, so that an error shows no trace of this one
    return rank_numbers.hooks().record(func, args, kwargs or {})


def record(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """The general rule."""
    call_info = info(func)
    if call_info.kernel is not None:
        return script_kernels.run(func, call_info.kernel, args, kwargs)
    if call_info.lists and places.in_use():
        apart = placed.by_place(record, call_info, args, kwargs)
        if apart is not NotImplemented:
            return apart
    key: list[Any] = [func._schema.name]
    tensors: list[XLATensor] = []
    numbers: list[Any] = []
    scalar_at = call_info.scalar_at
    is_view = call_info.is_view
    for i, a in enumerate(args):
        kind = type(a)
        if kind is XLATensor:
            key.append(a._layout if is_view else a._layout.anchor)
            tensors.append(a)
        elif kind is float or kind is int:
            scalar = scalar_at[i]
            if scalar == LIFTED:
                key.append(kind)
                numbers.append(a)
            elif scalar:
                key.append((kind, a))
            else:
                key.append(a)
        else:
            _describe(a, scalar_at[i], key, tensors, numbers)
    if kwargs:
        scalars = call_info.scalar
        for name, a in kwargs.items():
            key.append(name)
            _describe(a, scalars.get(name, NOT_SCALAR), key, tensors, numbers)
    if torch.get_default_dtype() is not torch.float32:
        key.append(torch.get_default_dtype())
    frozen = tuple(key)
    call = call_info.cache.get(frozen)
    if call is None:
        call = _plan_call(call_info, args, kwargs or {}, frozen)
    if call_info.mutated and len(tensors) > 1:
        if STATE.session.cpu_constants is not None and any(type(t) is not XLATensor for t in _targets(call_info, args, kwargs)):
            return record(func, *_written_on_xla(call_info, args, kwargs or {}))
        shared = overlaps.check(func, args, kwargs, tensors, frozen)
        if shared and call_info.lists:
            done = placed.in_turn(record, call_info, args, kwargs)
            if done is not NotImplemented:
                return done
    if call_info.writes_lists:
        _count_versions(_targets(call_info, args, kwargs))
    return call.run(call, func, args, kwargs, tensors, numbers)


def _count_versions(written: list[XLATensor]) -> None:
    if not torch.is_inference_mode_enabled() and any(t.is_inference() for t in written):
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed: write to a clone, or under torch.inference_mode()"
        )
    torch.autograd.graph.increment_version(written)


def _written_on_xla(call_info: Info, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that writes to CPU tensors while a module is captured, with what these are in its graph."""
    constants = STATE.session.cpu_constants
    assert constants is not None
    targets = {id(t): t if type(t) is XLATensor else constants.target(t) for t in _targets(call_info, args, kwargs)}
    return tree_map(lambda x: targets.get(id(x), x), (args, kwargs))


def _describe(a: Any, scalar: int, key: list[Any], tensors: list[XLATensor], numbers: list[Any]) -> None:
    """Append an argument to the signature: layouts for tensors, types for numbers that may change, values for the rest."""
    kind = type(a)
    if isinstance(a, XLATensor):
        key.append(a._layout.anchor)
        tensors.append(a)
    elif kind is float or kind is int:
        if scalar == LIFTED:
            key.append(kind)
            numbers.append(a)
        else:
            value = a if a == a else "nan"
            key.append((kind, value) if scalar else value)
    elif kind is list or kind is tuple:
        key.append(len(a))
        for x in a:
            _describe(x, scalar, key, tensors, numbers)
    elif kind is bool:
        key.append((bool, a))
    elif isinstance(a, torch.Tensor):
        t = _accept_cpu(a, key)
        key.append(t._layout)
        tensors.append(t)
    elif isinstance(a, torch.Generator):
        pass
    elif isinstance(a, _SYMBOLIC) or rank_numbers.is_item(a):
        raise _Ranked
    else:
        key.append(a)


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Ranked(Exception):
    """A number among the arguments differs by rank."""


def _accept_cpu(t: torch.Tensor, key: list[Any]) -> XLATensor:
    """A 0-d CPU tensor next to xla tensors counts as a number, and some ops take small CPU integers, as with any device; the rest is an error, but in a module
    on the CPU that is captured."""
    if t.device.type == "cpu":
        constants = STATE.session.cpu_constants
        if constants is not None:
            return constants.of(t)
        if t.dim() == 0 or (key[0] in _TAKE_CPU_INTEGERS and not t.dtype.is_floating_point):
            return upload(t)
    if t.device.type == "meta" and STATE.session.cpu_constants is not None:
        raise RuntimeError(
            f"the forward takes a tensor of shape {list(t.shape)} on meta, which has no values and is no parameter or buffer of the module (at {_where()}): "
            "make it on the CPU, or register it as a buffer and give its values with the weights"
        )
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, xla:0 and {t.device}! "
        f"A tensor of shape {list(t.shape)} is on {t.device}: move it with .to('xla') (at {_where()})."
    )


def _where() -> str:
    from torch_bridge import source

    return source.user_line(2)


_TAKE_CPU_INTEGERS = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_ctc_loss"})
"""Ops whose index or length arguments may stay on the CPU in torch."""


# -- the miss path: decide what a signature does ---------------------------------------------------


def _plan_call(call_info: Info, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[Any, ...]) -> Call:
    call = _decide(call_info, args, kwargs)
    return call_info.cache.add(key, call)


def _decide(call_info: Info, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    func = call_info.op
    target = call_info.functional
    found = lowerings.lookup(target) if target is not None else None
    if call_info.composite:
        return Call(_run_composite)
    if not call_info.is_view and found is None and (target is None or not fallback.has_decomposition(target)):
        return Call(_run_on_host)
    try:
        out = infer(func, args, kwargs)
    except NeedsHost:
        if found is None or fallback.is_data_dependent(func):
            return Call(_run_on_host)
        out = None if call_info.mutated else infer_from_lowering(found, args, kwargs)
    except Exception as error:
        raise locate(error, func, args) from None
    if call_info.is_view:
        call = Call(_run_view)
        call.view_layouts = tree_map(of_meta, out)
        call.returns = call_info.view_of
        return call
    assert target is not None
    if call_info.mutated:
        return _plan_mutation(call_info, target, found, args, kwargs)
    outs: list[Layout | None] = []
    returns = _describe_results(out, outs)
    entry = _entry(target, found, args, kwargs, tuple(outs), _paths(returns))
    return Call(_run_functional, entry, returns)


def _describe_results(out: object, outs: list[Layout | None]) -> Any:
    """Base layouts of the results in order, and how to nest them: an index, None, a Python value or a tuple/list."""
    if isinstance(out, torch.Tensor):
        outs.append(base_of_meta(out))
        return len(outs) - 1
    if isinstance(out, (list, tuple)):
        return [_describe_results(o, outs) for o in out]
    return _Constant(out)


def _paths(returns: object, at: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
    """Where each result sits in what the op returns."""
    if isinstance(returns, int):
        return (at,)
    if isinstance(returns, list):
        return tuple(p for i, r in enumerate(returns) for p in _paths(r, (*at, i)))
    return ()


class _Constant:
    """A result that is no tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def _entry(
    target: torch._ops.OpOverload,
    found: lowerings.Lowering | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outs: tuple[Layout | None, ...],
    paths: tuple[tuple[int, ...], ...],
    casts: Sequence[torch.dtype | None] = (),
) -> Entry:
    counts = [0, 0]
    inputs: list[Layout] = []
    lift = found is not None and found.lift
    scalar = info(target).scalar
    names = info(target).names

    def template(x: object, is_scalar: bool) -> Any:
        if isinstance(x, torch.Tensor):
            counts[0] += 1
            inputs.append(flat(of_meta(x)))
            return Slot(counts[0] - 1)
        if isinstance(x, (list, tuple)):
            return [template(y, is_scalar) for y in x]
        if lift and is_scalar and type(x) in (int, float):
            counts[1] += 1
            return Lift(counts[1] - 1, type(x))
        return x

    targs = tuple(template(a, names[i] in scalar) for i, a in enumerate(args))
    tkwargs = {n: template(a, n in scalar) for n, a in kwargs.items() if n not in DROPPED}
    draws = found is not None and found.rng and not _never_drops(names, args, kwargs)
    entry = Entry(target, targs, tkwargs, outs, casts, draws)
    entry.paths = paths
    if not counts[1]:
        number_families.join(entry, inputs)
    return entry


def _never_drops(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a random op that is told not to be one: attention with dropout 0."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" in names and not given.get("dropout_p")


class _Mutation(NamedTuple):
    """An in-place or out= call in its functional form.

    args, kwargs: of that form. targets: the tensors that its last results are written into; they are among its arguments unless `is_out`.
    `x.add_(y)` is `add(x, y)` with the target x, `torch.add(x, y, out=z)` the same with the target z.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: list[XLATensor]
    is_out: bool


_IN_DTYPE_OF_OUT = frozenset(
    {aten.sum.IntList_out, aten.prod.int_out, aten.cumsum.out, aten.cumprod.out, aten.cumsum_.default, aten.cumprod_.default}
)
"""What computes in the dtype of the tensor that it writes to, if none is given."""


def _functional_form(call_info: Info, target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Mutation:
    out_names = {a.name for a in call_info.args if a.is_out}
    fargs = tuple(a for a, name in zip(args, call_info.names, strict=False) if name not in out_names)
    fkwargs = {n: a for n, a in kwargs.items() if n not in out_names}
    fkwargs |= _own_defaults(call_info, target, len(fargs), fkwargs)
    targets = _targets(call_info, args, kwargs)
    if call_info.takes_dtype_of_out or (call_info.op in _IN_DTYPE_OF_OUT and fkwargs.get("dtype") is None):
        fkwargs["dtype"] = targets[0].dtype
    return _Mutation(fargs, fkwargs, targets, bool(out_names))


def _plan_mutation(
    call_info: Info, target: torch._ops.OpOverload, found: lowerings.Lowering | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call:
    """In-place and out= ops: record the functional op, then write its last results into the mutated tensors. The results before them are new tensors."""
    form = _functional_form(call_info, target, args, kwargs)
    try:
        out = infer(target, form.args, form.kwargs)
    except NeedsHost:
        if found is None or form.is_out or len(target._schema.returns) != len(call_info.mutated):
            return Call(_run_on_host)
        overwritten = [tree_map(to_meta, _argument(call_info, i, args, kwargs)) for i in call_info.mutated]  # which are the results
        out = overwritten if len(overwritten) > 1 else overwritten[0]
    results: list[Layout | None] = []
    returns = _describe_results(out, results)
    n_new = len(results) - len(form.targets)
    written = [_written_as(result, t.dtype) for result, t in zip(results[n_new:], form.targets, strict=True)]
    outs = (*results[:n_new], *(of for of, _ in written))
    casts = (*[None] * n_new, *(cast for _, cast in written))
    entry = _entry(target, found, form.args, form.kwargs, outs, _paths(returns), casts if any(casts) else ())
    call = Call(_run_out if form.is_out else _run_mutation, entry)
    if n_new:
        call.returns = returns[:n_new] if isinstance(returns, list) else returns
        if call_info.n_returns == 1 and isinstance(call.returns, list):
            call.returns = call.returns[0]
    return call


def _written_as(result: Layout | None, held: torch.dtype) -> tuple[Layout, torch.dtype | None]:
    """The layout in which a result is written into a tensor that holds a dtype, and what it is converted to for that."""
    assert result is not None, "an op that writes gives a value for each tensor that it writes to"
    return layout(result.size, None, 0, held), _cast(result.dtype, held)


def _cast(made: torch.dtype, held: torch.dtype) -> torch.dtype | None:
    """The dtype that a result is converted to on its way into a tensor, None if it has it; torch's meta kernels let floats into integers."""
    argument_checks.fits_into(made, held)
    return held if made != held else None


def _own_defaults(call_info: Info, target: torch._ops.OpOverload, given: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Defaults of an in-place op that its functional form does not have (`bernoulli_(p=0.5)`; torch leaves out an argument that equals it)."""
    defaults = {a.name: a.default_value for a in call_info.op._schema.arguments if a.has_default_value()}
    rest = target._schema.arguments[given:]
    return {a.name: defaults[a.name] for a in rest if not a.has_default_value() and a.name in defaults and a.name not in kwargs}


def _targets(call_info: Info, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[XLATensor]:
    """The tensors that a call writes to, in order."""
    given = [_argument(call_info, i, args, kwargs) for i in call_info.mutated]
    return given if len(given) == 1 and isinstance(given[0], torch.Tensor) else _tensors_of(given)


def _tensors_of(x: object) -> list[Any]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in _tensors_of(y)]
    return []


# -- the hit paths --------------------------------------------------------------------------------


def _run_composite(call: Call, func: Op, args: Args, kwargs: Kwargs, tensors: list[XLATensor], numbers: list[Any]) -> Any:
    argument_checks.check(func, args, kwargs or {})
    return func.decompose(*args, **(kwargs or {}))


def _run_on_host(call: Call, func: Op, args: Args, kwargs: Kwargs, tensors: list[XLATensor], numbers: list[Any]) -> Any:
    call_info = info(func)
    call_info.kernel = script_kernels.find(func)  # it may have been registered since
    if call_info.kernel is not None:
        return script_kernels.run(func, call_info.kernel, args, kwargs)
    script_kernels.check_cpu(func)
    found = known_masks.recorded(func, args)
    return fallback.on_host(func, args, kwargs or {}) if found is None else found


def _run_view(call: Call, func: Op, args: Args, kwargs: Kwargs, tensors: list[XLATensor], numbers: list[Any]) -> Any:
    source = args[call.returns]
    view = call.view_layouts
    base = source._layout
    if base.conj or base.neg:
        view = tree_map(lambda v: layout(v.size, v.stride, v.offset, v.dtype, base.conj, base.neg), view)
    inference = source.is_inference()
    if torch.is_inference_mode_enabled() is not inference:
        with torch.inference_mode(inference):  # a view of a normal tensor is one too, and so with an inference tensor
            return tree_map(lambda v: make(v, source._storage), view)
    if type(view) is Layout:
        return make(view, source._storage)
    return [make(v, source._storage) for v in view]


def _emit(call: Call, tensors: list[XLATensor], numbers: list[Any], kwargs: dict[str, Any] | None) -> tuple[Segment, int]:
    segment = STATE.session.current
    ids = []
    for t in tensors:
        storage = t._storage
        if storage.segment is segment and t._layout is storage.layout and segment.watch is None:
            ids.append(storage.vid)
        else:
            ids.append(segment.read(storage, t._layout))
    entry = call.entry
    assert entry is not None
    draw = draw_for(kwargs) if call.draws else None
    return segment, segment.emit(entry, tuple(ids), tuple(numbers), draw)


def draw_for(kwargs: dict[str, Any] | None) -> tuple[Any, ...]:
    """(seed, offset[, mesh axes]) of the next random draw, from `generator=` if the call names one."""
    generator = kwargs.get("generator") if kwargs else None
    return random_state.of_generator(generator).take()


def _run_functional(call: Call, func: Op, args: Args, kwargs: Kwargs, tensors: list[XLATensor], numbers: list[Any]) -> Any:
    segment, vid = _emit(call, tensors, numbers, kwargs)
    returns = call.returns
    if returns == 0:
        return fresh(segment, call.entry.outs[0], vid)  # type: ignore[union-attr, arg-type]
    made = [fresh(segment, o, vid + i) for i, o in enumerate(call.entry.outs)]  # type: ignore[union-attr]
    return _nest(returns, made)


def _nest(returns: Any, made: list[Any]) -> Any:
    if isinstance(returns, int):
        return made[returns]
    if isinstance(returns, _Constant):
        return returns.value
    return tuple(_nest(r, made) for r in returns)


def _run_mutation(call: Call, func: Op, args: Args, kwargs: Kwargs, tensors: list[XLATensor], numbers: list[Any]) -> Any:
    if call.draws and len(tensors) == 1 and cpu_draws.is_marked(tensors[0]) and not abstract_arrays.active():
        return cpu_draws.draw(func, args, kwargs)
    segment, vid = _emit(call, tensors, numbers, kwargs)
    call_info = info(func)
    entry = call.entry
    assert entry is not None
    targets = _targets(call_info, args, kwargs)
    first = entry.n_outs - len(targets)
    for k, t in enumerate(targets):
        segment.write_view(t._storage, t._layout, vid + first + k)
    made = [fresh(segment, entry.outs[i], vid + i) for i in range(first)]  # type: ignore[arg-type]
    if call.returns is not None:
        return _nest(call.returns, made)
    if not call_info.n_returns:
        return None
    back = [_argument(call_info, i, args, kwargs) for i in call_info.alias_returns if i is not None]
    return back[0] if len(back) == 1 else tuple(back)


def _argument(call_info: Info, i: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    return args[i] if i < len(args) else (kwargs or {}).get(call_info.names[i])


def _run_out(call: Call, func: Op, args: Args, kwargs: Kwargs, tensors: list[XLATensor], numbers: list[Any]) -> Any:
    """out= variants: the mutated tensors are not inputs, and take the result's shape."""
    call_info = info(func)
    outs = _targets(call_info, args, kwargs)
    out_ids = {id(t) for t in outs}
    n_inputs = len(tensors) - len(outs)
    # Outs come last in every schema, so the inputs are the tensors before them.
    assert all(id(t) in out_ids for t in tensors[n_inputs:])
    segment, vid = _emit(call, tensors[:n_inputs], numbers, kwargs)
    entry = call.entry
    assert entry is not None
    for k, t in enumerate(outs):
        made = entry.outs[k]
        assert made is not None
        if made.size != t._layout.size:
            resize(t, made.size)
        segment.write_view(t._storage, t._layout, vid + k)
    if not call_info.n_returns:
        return None
    return outs[0] if len(outs) == 1 else tuple(outs)


# -- shared helpers -------------------------------------------------------------------------------


def record_op(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Record a functional op from inside a special rule."""
    return record(op, args, kwargs)


def resize(t: XLATensor, size: tuple[int, ...]) -> None:
    """`resize_` to a contiguous size, keeping the storage's elements in order; new ones are zero."""
    segment = STATE.session.current
    new = layout(size, None, t._layout.offset, t._layout.dtype)
    storage = t._storage
    needed = new.offset + math.prod(size)
    if needed > storage.layout.numel:
        old = storage.layout
        grown = layout((needed,), None, 0, old.dtype)
        if storage.constant and not storage.fill:
            storage.layout = grown
        else:
            flat = make(layout((old.numel,), (1,), 0, old.dtype), storage)
            vid = read(record_op(aten.constant_pad_nd.default, flat, [0, needed - old.numel], 0))
            segment.grow(storage, grown, vid)
    point(t, new, storage)

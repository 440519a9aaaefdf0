"""JAX functions on xla tensors: a call is one op of the graph, which becomes what the function does."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.tree_util import PyTreeDef

from torch_bridge import _compat
from torch_bridge.compiler import kept_inputs
from torch_bridge.ir import dtypes
from torch_bridge.lowerings import lowering
from torch_bridge.runtime import backend

backend.ensure()

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("call_jax(Tensor[] tensors, str name) -> Tensor[]")
_OP = torch.ops.torch_bridge.call_jax.default

_TRACED: dict[str, Any] = {}
"""What a function does for arguments of some shapes (a closed jaxpr), by a name that other processes give it, too."""
_Seen = dict[Any, tuple[str, Any]]
_SEEN: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()
"""Per function: what it was called with, and then (the name, the structure of the results)."""


def call(fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """`fn(*args, **kwargs)` with JAX arrays in place of the xla tensors in (nests of) arguments; arrays in the result are xla tensors.

    Other arguments are constants. fn is traced, once for each combination of shapes, dtypes and constants: it must be pure. It is traced with the user's own
    setting of `jax_enable_x64`, or with 64 bits where a tensor has 64. No gradients pass: see `differentiable`. ValueError for tensors elsewhere.
    """
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs or {})))
    places = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    tensors = [leaves[k] for k in places]
    elsewhere = sorted({str(t.device) for t in tensors if t.device.type != "xla"})
    if elsewhere:
        raise ValueError(f"a JAX function is called with xla tensors, got one on {', '.join(elsewhere)}; move it with .to('xla')")
    name, results = _traced(fn, leaves, places, tree)
    with torch.no_grad():
        found = _OP([t.detach() for t in tensors], name)
    return jax.tree.unflatten(results, found)


def _traced(fn: Callable[..., Any], leaves: list[Any], places: list[int], tree: PyTreeDef) -> tuple[str, Any]:
    """The name of a call, and the structure of its results."""
    facts = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves]
    key = (tree, tuple(facts), _compat.x64_enabled())
    try:
        seen = _SEEN.setdefault(fn, {})
        found = seen.get(key)
    except TypeError:  # a function or a constant that cannot be a key
        return _trace(fn, leaves, places, tree)
    if found is None:
        found = seen[key] = _trace(fn, leaves, places, tree)
    return found


def _trace(fn: Callable[..., Any], leaves: list[Any], places: list[int], tree: PyTreeDef) -> tuple[str, Any]:
    structures: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for k, x in zip(places, arrays, strict=True):
            filled[k] = x
        args, kwargs = jax.tree.unflatten(tree, filled)
        results, structure = jax.tree.flatten(fn(*args, **kwargs))
        structures.append(structure)
        return results

    shapes = [jax.ShapeDtypeStruct(tuple(leaves[k].shape), dtypes.to_jax(leaves[k].dtype)) for k in places]
    with _compat.enable_x64() if any(s.dtype.itemsize == 8 for s in shapes) else contextlib.nullcontext():
        closed = jax.make_jaxpr(flat)(*shapes)
    name = _name(closed)
    _TRACED[name] = closed
    return name, structures[0]


def _name(closed: ClosedJaxpr) -> str:
    """A digest of what a jaxpr does. It does not start JAX's devices, which a lowering would, before the script has said how many ranks it wants."""
    with np.printoptions(threshold=sys.maxsize, precision=17):
        text = str(closed.jaxpr)
    if " at 0x" in text or "callback" in text:  # what another process does not share
        text += uuid.uuid4().hex
    digest = hashlib.sha256(text.encode())
    for x in _constants(closed):
        array = np.asarray(x)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:32]


def _constants(x: Any) -> Iterator[Any]:
    """The arrays that a jaxpr and those inside it hold, which its text leaves out."""
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from _constants(y)
    elif hasattr(x, "eqns"):
        yield from getattr(x, "consts", ())
        for eqn in x.eqns:
            yield from _constants(list(eqn.params.values()))


@lowering(_OP, entrywise=False)
def _call_jax(tensors: Sequence[jax.Array], name: str) -> list[jax.Array]:
    return jaxpr_as_fun(_TRACED[name])(*tensors)


def _shapes(tensors: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    return [torch.empty(a.shape, dtype=dtypes.to_torch(a.dtype), device="meta") for a in _TRACED[name].out_avals]


_library.impl("call_jax", _shapes, "Meta")
kept_inputs.EFFECTS[_OP] = lambda args: bool(_TRACED[args[1]].effects)  # jax.debug.print, io_callback


# -- gradients ------------------------------------------------------------------------------------


def differentiable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The JAX function as one of xla tensors that gradients pass through, by `jax.vjp`; what its backward pass needs of the forward is computed anew, and
    merged by the compiler where both are in one step.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        structure: list[Any] = []
        results = _Call.apply(fn, tree, structure, *leaves)
        return jax.tree.unflatten(structure[0], results)

    return called


def _inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _pulled_back(fn: Callable[..., Any], tree: PyTreeDef, wanted: tuple[int, ...], leaves: list[Any], grads: list[Any]) -> Any:
    """Gradients of the leaves at some places, from those of the inexact results."""

    def of(*chosen: Any) -> list[Any]:
        filled = list(leaves)
        for k, x in zip(wanted, chosen, strict=True):
            filled[k] = x
        args, kwargs = jax.tree.unflatten(tree, filled)
        return [x for x in map(jnp.asarray, jax.tree.leaves(fn(*args, **kwargs))) if _inexact(x)]

    return jax.vjp(of, *(leaves[k] for k in wanted))[1](grads)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Any], tree: PyTreeDef, structure: list[Any], *leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        results, found = jax.tree.flatten(call(fn, args, kwargs))
        structure.append(found)
        ctx.fn, ctx.tree = fn, tree
        ctx.constants = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        ctx.places = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(*(leaves[k] for k in ctx.places))
        ctx.exact = [not (r.is_floating_point() or r.is_complex()) for r in results]
        ctx.mark_non_differentiable(*(r for r, exact in zip(results, ctx.exact, strict=True) if exact))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = list(ctx.constants)
        for k, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            leaves[k] = x
        wanted = tuple(k for k in ctx.places if ctx.needs_input_grad[k + 3])
        given = [g for g, exact in zip(grads, ctx.exact, strict=True) if not exact]
        found = dict(zip(wanted, call(_pulled_back, (ctx.fn, ctx.tree, wanted, leaves, given)), strict=True))
        return (None, None, None, *(found.get(k) for k in range(len(leaves))))

"""torch modules as pure JAX functions (`to_jax`) and as Flax modules (`to_nnx`)."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_unflatten

from torch_bridge import _compat
from torch_bridge.compiler import interpret
from torch_bridge.config import library_fusions
from torch_bridge.export import graph_capture
from torch_bridge.ir import dtypes
from torch_bridge.recorder import subgraph
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import transfer
from torch_bridge.runtime.transfer import to_array

library_fusions.single_products_only()  # before the caller's own jax.jit compiles

Arrays = dict[str, Any]


class JaxFunction:
    """A torch module as a pure function: `out, new_buffers = f(params, buffers, rng, *inputs, **kwargs)`.

    params, buffers: dicts from the module's names (`named_parameters()`, `named_buffers()`) to arrays; `f.params` and `f.buffers` are the
    module's own values, in JAX. rng: a `jax.random.key` for dropout and other random ops, or None if there are none. inputs: arrays (or Python
    constants) in the module's order. out: the module's result with JAX arrays for tensors (objects that are not plain containers, such as key-value
    caches, become None); new_buffers: `buffers` with what the forward updated (batch-norm statistics). Nothing of the module is changed.

    Works under `jax.jit`, `jax.grad`, `jax.vmap`. The module is captured once per input signature (shapes, dtypes, train/eval modes). Where the
    caller's JAX has no 64-bit types, int32 inputs count as torch's int64 and 64-bit results come back as 32-bit.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self._captured: dict[Any, fx.GraphModule] = {}
        fixed = getattr(module, "signature", None)
        self._fixed = module if isinstance(fixed, graph_capture.Signature) and isinstance(module, fx.GraphModule) else None

    @property
    def params(self) -> Arrays:
        """The module's parameters as JAX arrays (`jax.ShapeDtypeStruct`s for meta weights)."""
        return {n: _array(p) for n, p in self.module.named_parameters()}

    @property
    def buffers(self) -> Arrays:
        """The module's buffers as JAX arrays."""
        return {n: _array(b) for n, b in self.module.named_buffers()}

    def __call__(self, params: Arrays, buffers: Arrays, rng: Any, *inputs: Any, **kwargs: Any) -> tuple[Any, Arrays]:
        narrow = not _compat.x64_enabled()
        flat, spec = tree_flatten((inputs, kwargs))
        arrays = [x for x in flat if _is_array(x)]
        with _compat.enable_x64():
            graph = self._graph(flat, spec, narrow)
            signature: Any = graph.signature
            _check_names("params", params, signature.params)
            _check_names("buffers", buffers, signature.buffers)
            _check_updates(signature)
            metas = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder" and n.target != "draws"]
            values = [params[n] for n in signature.params] + [buffers[n] for n in signature.buffers] + arrays
            supplied = [_as_placeholder(v, m) for v, m in zip(values, metas, strict=True)]
            if any(n.op == "placeholder" and n.target == "draws" for n in graph.graph.nodes):
                supplied.append(None)
            results = interpret.run(graph.graph, supplied, _keys(rng), transfer.attributes_of(graph))
            if narrow:
                results = [_narrowed(r) for r in results]
        _register_containers(signature.outs_spec)
        own = signature.n_outs
        out = tree_unflatten([results[o] if isinstance(o, subgraph.Place) else o for o in signature.outs], signature.outs_spec)
        return out, {**buffers, **dict(zip(signature.mutated, results[own:], strict=True))}

    def _graph(self, flat: list[Any], spec: Any, narrow: bool) -> fx.GraphModule:
        if self._fixed is not None:
            return self._fixed
        training = tuple(m.training for m in self.module.modules())
        key = (spec, tuple(_signature(x) for x in flat), training, narrow)
        found = self._captured.get(key)
        if found is None:
            args, kwargs = tree_unflatten([_meta_input(x, narrow) if _is_array(x) else x for x in flat], spec)
            found = self._captured[key] = graph_capture.capture(self.module, *args, **kwargs)
        return found


def to_jax(module: torch.nn.Module) -> JaxFunction:
    """A pure JAX function of (params, buffers, rng, *inputs) for a module or a graph from `torch_bridge.capture`. See `JaxFunction`."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"to_jax takes an nn.Module or a captured GraphModule, got {type(module).__name__}; wrap a function in a module's forward"
        )
    if _compat.jax_started():
        library_fusions.warn_if_fused()
    return JaxFunction(module)


def _register_containers(spec: Any) -> None:
    """Teach JAX the container types of a result (Hugging Face's ModelOutput classes), so that `jax.jit` can return them."""
    kind = spec.type
    if kind is not None and kind not in _KNOWN_CONTAINERS:
        _KNOWN_CONTAINERS.add(kind)
        node = SUPPORTED_NODES.get(kind)
        if node is not None:
            with contextlib.suppress(ValueError):  # JAX knows it already
                jax.tree_util.register_pytree_node(kind, node.flatten_fn, lambda context, leaves: node.unflatten_fn(list(leaves), context))
    for child in spec.children():
        _register_containers(child)


_KNOWN_CONTAINERS: set[Any] = {dict, list, tuple, None}


def _array(t: torch.Tensor) -> Any:
    if t.device.type == "meta":
        return jax.ShapeDtypeStruct(tuple(t.shape), _jax_dtype(t.dtype))
    array = to_array(t.detach().cpu() if isinstance(t, XLATensor) else t)
    return array if _compat.x64_enabled() else _narrowed(array)


def _jax_dtype(dtype: torch.dtype) -> Any:
    wide = dtypes.to_jax(dtype)
    return wide if _compat.x64_enabled() else _NARROW.get(wide, wide)


_NARROW = {
    jnp.dtype(wide): jnp.dtype(narrow)
    for wide, narrow in (("int64", "int32"), ("uint64", "uint32"), ("float64", "float32"), ("complex128", "complex64"))
}


def _narrowed(x: Any) -> Any:
    return x.astype(_NARROW[x.dtype]) if x.dtype in _NARROW else x


def _is_array(x: object) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


def _signature(x: Any) -> Any:
    return ("array", tuple(x.shape), str(x.dtype)) if _is_array(x) else (type(x), x)


def _meta_input(x: Any, narrow: bool) -> torch.Tensor:
    dtype = x.dtype if isinstance(x.dtype, torch.dtype) else dtypes.to_torch(x.dtype)
    if narrow and dtype == torch.int32:
        dtype = torch.int64
    return torch.empty(tuple(x.shape), dtype=dtype, device="meta")


def _as_placeholder(value: Any, meta: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        value = to_array(value.detach().cpu())
    if tuple(value.shape) != tuple(meta.shape):
        raise ValueError(
            f"this graph was captured for an input of shape {tuple(meta.shape)}, got {tuple(value.shape)}; capture again for other shapes"
        )
    dtype = dtypes.to_jax(meta.dtype)
    same_kind = jnp.issubdtype(value.dtype, jnp.integer) == jnp.issubdtype(dtype, jnp.integer)
    return dtypes.cast(value, dtype) if same_kind else value


def _check_names(what: str, given: Arrays, wanted: list[str]) -> None:
    missing, extra = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    if missing or extra:
        raise ValueError(
            f"{what} must have exactly the module's names; missing: {missing or 'none'}, unexpected: {extra or 'none'}. Start from to_jax(module).{what}."
        )


def _check_updates(signature: graph_capture.Signature) -> None:
    updated = [n for n in signature.mutated if n in signature.params]
    if updated:
        raise ValueError(
            f"the forward updates parameters ({', '.join(updated)}), and a JAX function of params and buffers returns new buffers alone: "
            "register as buffers what changes from call to call"
        )


def _keys(rng: Any) -> interpret.KeyOf:
    def key_of(node: fx.Node) -> Any:
        if rng is None:
            source = node.meta.get("source")
            raise ValueError(f"{node.target} draws random numbers (at {source}): pass rng=jax.random.key(...), or call module.eval() first")
        return jax.random.fold_in(rng, node.meta["draw"])

    return key_of

"""A recorded program in eager torch on the CPU: node by node, by torch's own kernels, on the arrays' memory.

Random ops draw what the compiled program would draw, and ops of ours that torch has no kernel for are compiled one by one. For `cold_shapes`.
"""

from __future__ import annotations

import contextlib
import operator
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from torch_bridge import metrics
from torch_bridge.compiler import interpret, xla_options
from torch_bridge.config import freed_memory
from torch_bridge.ir import dtypes
from torch_bridge.ir.graph import KINDS, number, results_of
from torch_bridge.lowerings import dropout, embedding_bag, random_keys
from torch_bridge.precision import precision_mode
from torch_bridge.runtime.transfer import from_numpy, to_numpy

if TYPE_CHECKING:
    from torch_bridge.compiler.program_spec import ProgramSpec

aten = torch.ops.aten


TRIM_EVERY = 16
"""Executions after which freed memory goes back to the system: each has blocks of other sizes, and the gaps add up to gigabytes."""


def run(spec: ProgramSpec, args: Sequence[Any]) -> list[Any]:
    """What a program gives for these arguments, computed by torch: arrays in the order in which they leave."""
    metrics.count("ColdShapeExecute")
    with _plainly():
        found = _Run(spec, args).results()
    if metrics.COUNTERS["ColdShapeExecute"] % TRIM_EVERY == 0:
        freed_memory.trim()
    return found


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """A block in which torch computes, and nothing of the script's or ours takes part."""
    with _disable_current_modes(), torch.no_grad(), torch.amp.autocast("cpu", enabled=False):
        yield


_GO_BY_STRIDES = frozenset(
    {
        aten.view.default,
        aten.view.dtype,
        aten._unsafe_view.default,
        aten.as_strided.default,
        aten.as_strided_scatter.default,
        aten.view_as_complex.default,
    }
)
"""Ops that torch computes by how its tensors lie in memory: values of a graph lie as contiguous ones."""


_OWN_SIDE_RESULTS = frozenset(
    {aten._ctc_loss.default, aten._ctc_loss.Tensor, aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor}
)
"""Ops whose forward hands its backward results of other shapes in our lowering than in torch's kernel: both go through the lowering."""


class _Run:
    """One execution. values: by node, CPU tensors (or lists of them) and Python numbers, as long as somebody reads them; arrays: by tensor, the array that has
    its memory."""

    def __init__(self, spec: ProgramSpec, args: Sequence[Any]):
        self._spec = spec
        self._values: dict[fx.Node, Any] = {}
        self._arrays: Any = WeakIdKeyDictionary()
        self._inputs = list(args)
        ports = spec.ports
        placeholders = [n for n in spec.graph.nodes if n.op == "placeholder"]
        for port, stacked, array in zip(ports.inputs, ports.stacked_inputs, args, strict=False):
            given = self._tensor(array)
            for row, place in enumerate(port):
                self._values[placeholders[place]] = given[row] if stacked else given
        extras = map(np.asarray, args[len(ports.inputs) :])
        self._packed: dict[str, np.ndarray] = {n.target: x for n, x in zip(placeholders[len(spec.inputs) :], extras, strict=False)}

    def results(self) -> list[Any]:
        """What leaves through each port."""
        ports, values = self._spec.ports, self._values
        last = interpret.last_uses(self._spec.graph)
        for node in self._spec.graph.nodes:
            if node.op == "output":
                break
            if node.op == "call_function":
                values[node] = self._computed(node)
            for dead in last.get(node, ()):
                values.pop(dead, None)
        found = [values[n] for n in results_of(self._spec.graph)]
        outs = [
            torch.stack([found[k] for k in port]) if stacked else found[port[0]]
            for port, stacked in zip(ports.outputs, ports.stacked_outputs, strict=True)
        ]
        given = set(map(id, self._inputs))
        return [self._array(outs[at], given) for at in ports.order]

    def _computed(self, node: fx.Node) -> Any:
        target: Any = node.target
        if target is number:
            _, index, kind = args = node.args
            return KINDS[str(kind)](self._packed[args[0].target][index])  # type: ignore[union-attr, index]
        args, kwargs = self._arguments(node)
        if target is operator.getitem:
            return _conform(args[0][args[1]], node)
        if target is aten.native_dropout.default and args[2] is not False and 0 < args[1] < 1 and args[0].numel() < 2**32:
            return _dropout(args[0], args[1], self._packed["draws"][node.meta["draw"]])
        if "draw" in node.meta or target.namespace == "torch_bridge" or target in _OWN_SIDE_RESULTS or not _has_kernel(target):
            return self._by_jax(node)
        if target in _GO_BY_STRIDES:
            args = (args[0].contiguous(), *args[1:])
        try:
            value = _conform(target(*args, **kwargs), node)
            return _with_bags(value, target, args) if target in _OF_BAGS else value
        except Exception:  # not for this dtype, or an index out of range, which programs clamp
            return self._by_jax(node)

    def _arguments(self, node: fx.Node) -> Any:
        return fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)

    def _by_jax(self, node: fx.Node) -> Any:
        """One op through its lowering, compiled by itself."""
        values: list[Any] = []

        def described(of: fx.Node) -> Any:
            value = self._values[of]
            values.append(value)
            return _like(value)

        key = (node.target, repr(fx.node.map_arg((node.args, node.kwargs), described)))
        made = _BY_JAX.pop(key, None)
        if made is None:
            kinds = [None if isinstance(v, torch.Tensor) else type(v) for v in values]
            made = jax.jit(lambda given, row: _lowered(node, kinds, given, row), compiler_options=xla_options.without_graph())
            metrics.count("ColdShapeOpCompile")
        _BY_JAX[key] = made
        while len(_BY_JAX) > _MOST:
            _BY_JAX.popitem(last=False)
        row = self._packed["draws"][node.meta["draw"]] if "draw" in node.meta else None
        return self._tensors(made([self._array(v) if isinstance(v, torch.Tensor) else np.asarray(v) for v in values], row))

    def _tensors(self, found: Any) -> Any:
        if found is None:
            return None
        return type(found)(map(self._tensors, found)) if isinstance(found, (list, tuple)) else self._tensor(found)

    def _tensor(self, array: Any) -> torch.Tensor:
        """An array's memory as a tensor, which nobody writes to."""
        try:
            found = torch.from_dlpack(array.block_until_ready())
        except (BufferError, RuntimeError, TypeError, ValueError):  # a dtype that DLPack does not know
            found = from_numpy(np.array(array))
        self._arrays[found] = array
        return found

    def _array(self, t: torch.Tensor, given: set[int] | None = None) -> jax.Array:
        """A tensor's values as an array: the one that it is made of, or a copy. given: arrays that somebody else has got already, or will give away."""
        known = self._arrays.get(t)
        if known is None or (given is not None and id(known) in given):
            return jnp.array(to_numpy(t), copy=True)
        if given is not None:
            given.add(id(known))
        return known


def _conform(value: Any, node: fx.Node) -> Any:
    """With the dtype that the graph says (as `interpret` does it)."""
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor):
        if value.shape != expected.shape:
            raise AssertionError(
                f"eager torch gives shape {tuple(value.shape)} for {node.target}, and the graph says {tuple(expected.shape)}"
            )
        return value if value.dtype == expected.dtype else value.to(expected.dtype)
    return value


_KERNELS: dict[Any, bool] = {}


def _has_kernel(op: Any) -> bool:
    """Whether torch computes an op on the CPU."""
    found = _KERNELS.get(op)
    if found is None:
        keys = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
        found = _KERNELS[op] = any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)
    return found


# -- bags of embeddings: the kernel on the CPU leaves out what only other devices' gradients need --

_OF_BAGS = frozenset({aten._embedding_bag.default, aten._embedding_bag_forward_only.default})


def _with_bags(found: Sequence[torch.Tensor], op: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Results of `_embedding_bag` as its lowering gives them: the bag of each index, the bags' sizes, and the maxima's indices, if there are maxima."""
    given: list[Any] = [*args, *(argument.default_value for argument in op._schema.arguments[len(args) :])]
    indices, offsets, mode, padding = given[1], given[2], given[4], given[8]
    bags = torch.searchsorted(offsets, torch.arange(len(indices), dtype=offsets.dtype), right=True) - 1
    sizes = torch.bincount(bags[indices != padding], minlength=len(offsets))
    return found[0], bags.to(indices.dtype), sizes.to(indices.dtype), found[3] if mode == embedding_bag.MAX else found[3].new_empty(0)


# -- dropout, as `lowerings.dropout` does it, bit for bit -----------------------------------------


def _dropout(x: torch.Tensor, p: float, row: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Its mask is a hash of key and element, which numpy computes as fast. row: seed and offset, as programs take them."""
    high0, low0, high1, low1 = row.astype(np.uint64).reshape(4, 1)
    bits = random_keys.bits_of(high0 << np.uint64(32) | low0, high1 << np.uint64(32) | low1)
    low, high = bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)
    keep = torch.from_numpy(dropout.hashed(np.arange(x.numel(), dtype=np.uint32), low, high) >= dropout.threshold_of(p)).view(x.shape)
    return aten.native_dropout_backward.default(x, keep, dropout.keep_scale(p)), keep


# -- ops that are compiled by themselves ----------------------------------------------------------

_BY_JAX: OrderedDict[Any, Any] = OrderedDict()
_MOST = 256
"""Those that are kept."""


def _lowered(node: fx.Node, kinds: Sequence[type | None], given: Sequence[Any], row: Any) -> Any:
    values = [x if kind is None else dtypes.Scalar(kind, x) for kind, x in zip(kinds, given, strict=True)]
    return interpret.evaluate(node, values, lambda: interpret.key_of_row(row, node), mode=precision_mode.PLAIN)


def _like(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)

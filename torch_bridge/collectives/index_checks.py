"""Indices that are out of range, which the device clamps or drops as the hardware does: found and named, if `NXD_JAX_CHECK_INDICES` asks for it.

So are masks that select another number of places than there are values for them, of which the last would be repeated, or some left out.

Before a segment runs, each of its ops that takes indices gets a node beside it, which counts the indices outside the allowed range; after the run the counts
are read. So modules that are played from recordings are checked too, each rank's own indices are, and nothing is there where nobody asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_bridge.collectives.collective_ops import emit
from torch_bridge.compiler import program_spec
from torch_bridge.compiler.trace import Trace
from torch_bridge.ir import dtypes
from torch_bridge.ir.entry import Entry
from torch_bridge.ir.graph import fill, lifted_kinds
from torch_bridge.ir.layout import layout
from torch_bridge.ir.segment import Results, Segment, Storage
from torch_bridge.ir.view_entries import step_entry
from torch_bridge.lowerings import lowering
from torch_bridge.mesh import sharding, spmd, world
from torch_bridge.recorder import expected_indices
from torch_bridge.recorder.dispatch import composite
from torch_bridge.recorder.schema import info
from torch_bridge.recorder.subgraph import AbstractLeaf
from torch_bridge.recorder.tensor import XLATensor, fresh
from torch_bridge.runtime import session
from torch_bridge.runtime.observers import Observer
from torch_bridge.source import NOWHERE, Source

MOST_NAMED = 8
"""Ops that one error names."""

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("check_indices(Tensor index, int low, int end, int? ignored, str layer, str of) -> Tensor")
_library.define("check_selected(Tensor mask, int low, int end) -> Tensor")
check_indices = torch.ops.torch_bridge.check_indices.default
check_selected = torch.ops.torch_bridge.check_selected.default


def _meta(index: torch.Tensor, low: int, end: int, ignored: int | None, layer: str = "", of: str = "") -> torch.Tensor:
    return index.new_empty((3,), dtype=torch.int64)


def _cpu(index: torch.Tensor, low: int, end: int, ignored: int | None, layer: str = "", of: str = "") -> torch.Tensor:
    wrong = ((index < low) | (index >= end)).flatten()
    if ignored is not None:
        wrong &= index.flatten() != ignored
    at = wrong.int().argmax()
    return torch.stack([wrong.sum(), index.flatten()[at].long(), at])


def _meta_selected(mask: torch.Tensor, low: int, end: int) -> torch.Tensor:
    return mask.new_empty((3,), dtype=torch.int64)


def _cpu_selected(mask: torch.Tensor, low: int, end: int) -> torch.Tensor:
    found = mask.count_nonzero()
    return torch.stack([((found < low) | (found >= end)).long(), found, torch.zeros_like(found)])


_library.impl("check_selected", _meta_selected, "Meta")
_library.impl("check_selected", _cpu_selected, "CPU")
_library.impl("check_indices", _meta, "Meta")
_library.impl("check_indices", _cpu, "CPU")


@lowering(check_indices, lift=False)
def _check_indices(index: Any, low: int, end: int, ignored: int | None, layer: str = "", of: str = "") -> Any:
    """[how many are outside low .. end - 1 and are not `ignored`, the first of them, its place in the flat index]."""
    given = index.reshape(-1).astype(jnp.int64)
    wrong = (given < low) | (given >= end)
    if ignored is not None:
        wrong &= given != ignored
    at = jnp.argmax(wrong)
    return jnp.stack([jnp.sum(wrong, dtype=jnp.int64), given[at], at.astype(jnp.int64)])


@lowering(check_selected, lift=False)
def _check_selected(mask: Any, low: int, end: int) -> Any:
    """[1 if the number of places that a mask selects is outside low .. end - 1, that number, 0]."""
    found = jnp.count_nonzero(mask).astype(jnp.int64)
    wrong = (found < low) | (found >= end)
    return jnp.stack([wrong.astype(jnp.int64), found, jnp.zeros((), jnp.int64)])


# -- what ops allow --------------------------------------------------------------------------------


class Value(NamedTuple):
    """A tensor argument of a recorded op: its id in the segment, shape and dtype."""

    vid: int
    size: tuple[int, ...]
    dtype: torch.dtype


class Range(NamedTuple):
    """What an op allows of some indices: `low` to `end - 1`, and `ignored`. of: what they index, in words.

    selected: the indices are a mask, and it is the number of places it selects that must be in the range; of: for what.
    """

    indices: Value
    low: int
    end: int
    of: str
    ignored: int | None = None
    selected: bool = False


Given = dict[str, Any]
Rule = Callable[[Given], Iterator[Range]]


def _along(x: Value, dim: int, index: Value, negative: bool) -> Iterator[Range]:
    size = x.size[dim] if x.size else 1
    yield Range(index, -size if negative else 0, size, f"dim {dim % max(len(x.size), 1)} of {_shown(x)}")


def _by_dim(negative: bool) -> Rule:
    return lambda given: _along(given["self"], given["dim"], given["index"], negative)


def _rows(weight: str) -> Rule:
    return lambda given: _along(given[weight], 0, given["indices"], False)


def _flat(given: Given) -> Iterator[Range]:
    size = math.prod(given["self"].size)
    yield Range(given["index"], -size, size, f"the {size} elements of {_shown(given['self'])}")


def _is_mask(index: Value) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _by_index_tensors(given: Given) -> Iterator[Range]:
    dim = 0
    for index in given["indices"]:
        if index is not None and _is_mask(index):
            dim += len(index.size)  # a mask covers as many dims as it has
            continue
        if index is not None:
            yield from _along(given["self"], dim, index, True)
        dim += 1


def _put(given: Given) -> Iterator[Range]:
    """As `_by_index_tensors`; and what one mask selects has as many values, or one for all."""
    yield from _by_index_tensors(given)
    places = [(dim, index) for dim, index in enumerate(given["indices"]) if index is not None]
    if len(places) != 1 or not _is_mask(places[0][1]):
        return
    (before, mask), values = places[0], given["values"].size
    shape = (1,) * (len(given["self"].size) - len(mask.size) + 1 - len(values)) + values
    if shape[before] != 1:
        yield Range(mask, shape[before], shape[before] + 1, f"values {_shown(given['values'])}", selected=True)


def _masked(given: Given) -> Iterator[Range]:
    """A mask may select as many places as the source has elements; each of its own counts for all that it is broadcast to."""
    x, mask, source = given["self"], given["mask"], given["source"]
    times = math.prod(np.broadcast_shapes(x.size, mask.size)) // max(math.prod(mask.size), 1)
    most = math.prod(source.size) // max(times, 1)
    of = f"a source {_shown(source)}" + (f", and each is taken {times} times" if times > 1 else "")
    yield Range(mask, 0, most + 1, of, selected=True)


def _classes(given: Given) -> Iterator[Range]:
    x = given["self"]
    classes = x.size[1] if len(x.size) > 1 else x.size[0] if x.size else 1
    yield Range(given["target"], 0, classes, f"the {classes} classes of {_shown(x)}", given.get("ignore_index"))


def _weight_rows(given: Given) -> Iterator[Range]:
    weight = given["linear_weight"]
    yield Range(given["target"], 0, weight.size[0], f"the classes of {_shown(weight)}", given["ignore_index"])


def _padded_classes(given: Given) -> Iterator[Range]:
    classes = given["self"].size[-1] if given["self"].size else 1
    yield Range(given["target"], -1, classes, f"the {classes} classes of {_shown(given['self'])}")


RULES: dict[str, Rule] = {
    "embedding": _rows("weight"),
    "embedding_renorm": _rows("self"),
    "_embedding_bag": _rows("weight"),
    "_embedding_bag_forward_only": _rows("weight"),
    "index_select": _by_dim(False),
    "index_add": _by_dim(False),
    "index_copy": _by_dim(False),
    "index_fill": _by_dim(True),
    "index_reduce": _by_dim(False),
    "gather": _by_dim(False),
    "scatter": _by_dim(False),
    "scatter_add": _by_dim(False),
    "scatter_reduce": _by_dim(False),
    "take": _flat,
    "put": _flat,
    "index": _by_index_tensors,
    "index_put": _put,
    "_index_put_impl": _put,
    "masked_scatter": _masked,
    "nll_loss_forward": _classes,
    "nll_loss2d_forward": _classes,
    "_linear_cross_entropy_batch_chunked": _weight_rows,
    "_linear_cross_entropy_batch_chunked_no_reduction": _weight_rows,
    "multi_margin_loss": _classes,
    "multilabel_margin_loss_forward": _padded_classes,
}
"""By the name of the functional op: what it allows, as torch's CPU kernels do (which of them let negative numbers count from the end, too)."""


def _shown(x: Value) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.size)}"


def one_hot(numbers: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """torch makes it of comparisons, in which no index is left to check."""
    out: torch.Tensor = torch.ops.aten.one_hot.default._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, numbers, num_classes)
    classes = out.shape[-1]
    expected_indices.expect("aten.one_hot", numbers, classes, f"{classes} classes")
    return out


composite(torch.ops.aten.one_hot.default, one_hot)


# -- around each run -------------------------------------------------------------------------------


class Check(NamedTuple):
    """A check that runs with a segment or a traced program: where its result goes (a Storage, of a traced program None), and what to say."""

    result: Any
    op: str
    source: Source | str
    range: Range


def install() -> None:
    """Check the indices of everything that runs from now on."""
    expected_indices.check_with(expect)
    session.check_with(CHECKS)


def expect(layer: str, index: torch.Tensor, end: int, of: str, ignored: int | None) -> None:
    """For `expected_indices`: record the check itself."""
    if isinstance(index, XLATensor) and index.numel():
        emit(check_indices, (index.detach(),), (0, end, ignored, layer, of))


class IndexChecks(Observer):
    """Adds its checks to each segment that is about to run, and reads their results after it."""

    reads_values = True

    def __init__(self) -> None:
        self._checks: list[Check] = []

    def preparing(self, segment: Segment) -> None:
        """Add the checks of a segment."""
        self._checks = added(segment)

    def executed(self, trace: Trace, live: Results) -> None:
        """IndexError if a run had indices out of range; it names the ops in the order in which they were recorded. The tensors keep their values."""
        checks = list(self._checks)
        self._checks.clear()
        hosted = world.current().hosted
        refuse([(c, _by_rank(c.result.array)) for c in checks if c.result.array is not None], hosted)


CHECKS = IndexChecks()
"""Of this process."""


def asked() -> bool:
    """Whether indices are checked."""
    return CHECKS in session.CHECKS


def added(segment: Segment) -> list[Check]:
    """The checks of a segment, which has nodes for them from now on."""
    sources = segment.sources if segment.predicted is None else segment.predicted.sources
    values = _values(segment)
    known: set[tuple[Any, ...]] = set()
    checks, first = [], 0
    for i, node in enumerate(list(segment.nodes)):
        source = sources[i] if i < len(sources) else NOWHERE
        for found in _ranges(node, values):
            key = (found.indices.vid, found.low, found.end, found.ignored, found.selected)
            if key not in known and 0 not in found.indices.size:
                known.add(key)
                checks.append(_check(segment, node[0], source, found, first))
        first += node[0].n_outs
    return checks


def refuse(results: Sequence[tuple[Check, Sequence[np.ndarray]]], hosted: Sequence[int]) -> None:
    """Raise IndexError, naming the checks that found something on one of the hosted ranks."""
    wrong = [line for check, by_rank in results for line in _told(check, by_rank, hosted)]
    if wrong:
        more = f"\n... and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise IndexError(
            "\n".join(wrong[:MOST_NAMED])
            + more
            + "\nWithout this check the device clamps such an index, drops what would be written, or repeats values. "
            "This is known when the program has run, so weights and states may be updated by now: NEURON_USE_EAGER_DEBUG_MODE=1 raises at the line itself. "
            "(Checked because of NXD_JAX_CHECK_INDICES or NEURON_USE_EAGER_DEBUG_MODE.)"
        )


def _values(segment: Segment) -> Callable[[int], Value]:
    """What is known of a value by its id."""
    outs = [out for node in segment.nodes for out in node[0].outs]

    def value(vid: int) -> Value:
        if vid < 0:
            leaf = segment.leaves[-vid - 1]
            if isinstance(leaf, AbstractLeaf):
                return Value(vid, tuple(leaf.layout.size), leaf.layout.dtype)
            aval = program_spec.local_aval(segment, -vid - 1)
            return Value(vid, tuple(aval.shape), dtypes.to_torch(aval.dtype))
        out = outs[vid]
        assert out is not None
        return Value(vid, out.size, out.dtype)

    return value


def _ranges(node: tuple[Any, ...], value: Callable[[int], Value]) -> Iterator[Range]:
    entry, *inputs = node
    if entry.op is check_indices:
        low, end, ignored, _, of = entry.args[1:]
        yield Range(value(inputs[0]), low, end, of, ignored)
        return
    rule = RULES.get(_name(entry))
    if rule is not None:
        args, kwargs = fill((entry.args, entry.kwargs), [value(v) for v in inputs], [0] * len(lifted_kinds(entry)))
        yield from rule({**dict(zip(info(entry.op).names, args, strict=False)), **kwargs})


def _name(entry: Entry) -> str:
    return entry.op._schema.name.partition("::")[2]


def _check(segment: Segment, entry: Entry, source: Source, found: Range, first: int) -> Check:
    """The check of some indices of an op whose first result is `first`: a node of its own, if the op is not a check itself."""
    if entry.op is check_indices:
        assert entry.outs[0] is not None
        result = Storage(entry.outs[0])
        segment.write(result, first)
        return Check(result, entry.args[4], source, found)
    index = layout(found.indices.size, None, 0, found.indices.dtype)
    if found.selected:
        made = step_entry(check_selected, (index,), (found.low, found.end))
    else:
        made = step_entry(check_indices, (index,), (found.low, found.end, found.ignored, "", ""))
    assert made.outs[0] is not None
    result = fresh(segment, made.outs[0], segment.emit(made, (found.indices.vid,)))._storage
    return Check(result, entry.op._schema.name.replace("::", "."), source, found)


def _by_rank(array: jax.Array) -> list[np.ndarray]:
    """The result on each hosted rank."""
    return sharding.blocks(array, (3,)) if sharding.active() else [np.asarray(spmd.whole(array))]


def _told(check: Check, results: Sequence[np.ndarray], hosted: Sequence[int]) -> list[str]:
    """One line if indices are out of range on any rank."""
    bad = [k for k, result in enumerate(results) if result[0]]
    if not bad:
        return []
    count, value, at = (int(n) for n in results[bad[0]])
    allowed = check.range
    size = allowed.indices.size
    if allowed.selected:
        wanted = f"{allowed.end - 1}" if allowed.low == allowed.end - 1 else f"{allowed.low} to {allowed.end - 1}"
        ranks = _ranks_of(bad, results, hosted)
        return [f"{check.op}: the mask, {_shown(allowed.indices)}, selects {value}{ranks}: {wanted} fit ({allowed.of}), at {check.source}."]
    place = list(map(int, np.unravel_index(at, size))) if size else []
    ranks = _ranks_of(bad, results, hosted)
    besides = f" or {allowed.ignored}" if allowed.ignored is not None else ""
    total = math.prod(size)
    return [
        f"{check.op}: index {value} is out of range{ranks}: {allowed.low} to {allowed.end - 1}{besides} are allowed ({allowed.of}). It is at {place} of the "
        f"indices, {_shown(allowed.indices)}, of which {count} of {total} are out of range, at {check.source}."
    ]


def _ranks_of(bad: Sequence[int], results: Sequence[np.ndarray], hosted: Sequence[int]) -> str:
    if len(results) == 1:
        return ""
    return f" on rank {hosted[bad[0]]}" if len(bad) == 1 else f" on ranks {_listed([hosted[k] for k in bad])}"


def _listed(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers[:MOST_NAMED]))
    return text + (f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else "")

"""Data loaders in a process that hosts several ranks: every rank gets the samples it would get alone.

A sampler, batch sampler, dataset or loader that was told its rank (`DistributedSampler(rank=xm.get_ordinal())`, or any object that keeps a rank in an
attribute) is copied for each distinct rank; the copies are read side by side, and a batch arrives as xla tensors and numbers with each rank's own values.
A loader that knows no rank gives every rank the same batch, as it would in separate processes, unless its sampler draws after a seed that differs by rank: then
there is a copy for each rank that draws differently. Each copy sees the random states of torch, Python and NumPy as
if it were alone (in the main thread; torch's in any). So are datasets and loaders that were made for each rank (`each_rank_factories`). Limits: a rank that was
turned into a plain number before (`int(rank)`, `indices[rank::n]` while building the dataset) cannot be told apart.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from torch_bridge import nested
from torch_bridge.collectives import joins
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.per_rank import each_rank_factories
from torch_bridge.per_rank.each_rank_factories import each_of, vars_of
from torch_bridge.per_rank.host_random_states import RandomStates
from torch_bridge.recorder import rank_tensor
from torch_bridge.recorder.rank_tensor import RankTensor
from torch_bridge.runtime import backend

_DEPTH = 5
_PLAIN = (str, bytes, int, float, bool, type(None), torch.Tensor, torch.nn.Module, torch.Generator, type)


class _Part(NamedTuple):
    """The key of a rank's part of a CPU tensor that differs by rank."""

    rank: int


def rank_table(obj: object) -> tuple[Any, ...] | None:
    """Each rank's key of what it would read: equal keys mean the same samples. None if the loader knows no rank."""
    found: list[tuple[Any, ...]] = []
    _collect(obj, found, set(), 0)
    return None if not found else tuple(tuple(values[r] for values in found) for r in range(world.size()))


def _collect(obj: object, found: list[tuple[Any, ...]], seen: set[int], depth: int) -> None:
    values = rank_numbers.values_of(obj)
    each = each_of(obj)
    if each is not None and id(obj) not in seen:
        found.append(each.keys)
    if values is not None:
        found.append(values)
    elif isinstance(obj, RankTensor):
        found.append(tuple(map(_Part, range(world.size()))))
    elif depth < _DEPTH and not isinstance(obj, _PLAIN) and id(obj) not in seen:
        seen.add(id(obj))
        for part in _parts(obj).values():
            _collect(part, found, seen, depth + 1)


def _generators(obj: object, seen: set[int], depth: int = 0) -> list[torch.Generator]:
    """The random generators that a loader and what it holds draw from, torch's default one not among them."""
    if id(obj) in seen:
        return []
    if isinstance(obj, torch.Generator):
        seen.add(id(obj))
        return [obj]
    if depth >= _DEPTH or isinstance(obj, _PLAIN):
        return []
    seen.add(id(obj))
    return [g for part in _parts(obj).values() for g in _generators(part, seen, depth + 1)]


class TorchStates:
    """Torch's random state, and that of generators that a loader was given."""

    def __init__(self, loader: Any):
        self._generators = _generators(loader, {id(torch.default_generator)})

    def get(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(g.get_state() for g in self._generators)]

    def set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for generator, state in zip(self._generators, states[1:], strict=True):
            generator.set_state(state)


def _parts(obj: object) -> dict[Any, Any]:
    """What to look at inside an object: attributes of loaders, samplers, datasets and other plain objects; short lists and dicts."""
    if isinstance(obj, (list, tuple)):
        return dict(enumerate(obj)) if len(obj) <= 16 else {}
    if isinstance(obj, dict):
        return obj if len(obj) <= 64 else {}
    if isinstance(obj, (DataLoader, Sampler, BatchSampler, Dataset)) or hasattr(obj, "__iter__") or hasattr(obj, "__getitem__"):
        return vars_of(obj)
    return {}


def own(obj: object, rank: int, memo: dict[int, Any] | None = None, depth: int = 0) -> Any:
    """The object as this rank alone would have made it: every number for each rank replaced by its own. Parts without one are shared."""
    memo = {} if memo is None else memo
    values = rank_numbers.values_of(obj)
    if values is not None:
        return values[rank]
    if isinstance(obj, RankTensor):
        return rank_tensor.own(obj, world.current().hosted.index(rank))
    if depth >= _DEPTH or isinstance(obj, _PLAIN):
        return obj
    if id(obj) in memo:
        return memo[id(obj)]
    each = each_of(obj)
    if each is not None:
        each.follow(obj)
        other = each.of(rank, obj)
        if other is not obj:
            memo[id(obj)] = own(other, rank, memo, depth)
            return memo[id(obj)]
    parts = _parts(obj)
    memo[id(obj)] = obj
    changed = {k: new for k, part in parts.items() if (new := own(part, rank, memo, depth + 1)) is not part}
    if not changed:
        return obj
    if isinstance(obj, (list, tuple)):
        made: Any = [changed.get(k, part) for k, part in parts.items()]
        made = made if isinstance(obj, list) else tuple(made)
    elif isinstance(obj, dict):
        made = {**obj, **changed}
    else:
        made = copy.copy(obj)
        made.__dict__.update(changed)
    memo[id(obj)] = made
    return made


class RankBatches(Iterator[Any]):
    """Iterates over one copy of a loader for each distinct rank, and puts their batches together as xla tensors.

    by_draws: ranks are distinct for what they draw alone, so that batches may turn out to be the same.
    """

    def __init__(self, loader: Any, table: tuple[Any, ...], by_draws: bool = False):
        self._table = table
        self._by_draws = by_draws
        self._on_cpu = not by_draws and all(isinstance(part, _Part) for key in table for part in key)
        self._random = RandomStates([table[rank] for rank in world.current().hosted], _generators(loader, {id(torch.default_generator)}))
        self._iterators: dict[Any, Iterator[Any]] = {}
        self._given = 0
        self._random.begin()
        for rank in world.current().hosted:
            if table[rank] not in self._iterators:
                with self._random.of(table[rank]):
                    self._iterators[table[rank]] = _original_iter(own(loader, rank))
        self._random.end()

    def __next__(self) -> Any:
        batches: dict[Any, Any] = {}
        self._random.begin()
        for key, iterator in self._iterators.items():
            with self._random.of(key), contextlib.suppress(StopIteration):
                batches[key] = next(iterator)
        self._random.end()
        if len(batches) < len(self._iterators):  # ranks with fewer batches end the epoch for all: collectives need everyone
            if batches:
                self._warn(set(batches))
            raise StopIteration
        self._given += 1
        if self._by_draws and _alike(list(batches.values())):
            return next(iter(batches.values()))
        return combine(batches, self._table, self._on_cpu)

    def _warn(self, going_on: set[Any]) -> None:
        short, long = ([r for r in world.current().hosted if (self._table[r] in going_on) is more] for more in (False, True))
        joins.epoch_ends(short, long)
        warnings.warn(
            f"ranks {short} have {self._given} batches and ranks {long} have more, which are left out: all ranks compute together, so the epoch ends for all. "
            "Give all of them equally many samples (DistributedSampler pads)",
            stacklevel=2,
        )


def combine(batches: dict[Any, Any], table: tuple[Any, ...], on_cpu: bool = False) -> Any:
    """One nested batch of xla tensors from each distinct rank's own batch of CPU tensors; on_cpu: of CPU tensors, those that differ by rank."""
    backend.ensure()
    from torch_bridge.recorder import sharded

    hosted = world.current().hosted
    axes = world.axes_of_table(table)
    first = batches[table[world.first()]]
    leaves = {key: nested.collect(batch, _is_tensor) for key, batch in batches.items()}
    counts = {len(found) for found in leaves.values()}
    if len(counts) != 1:
        raise ValueError(f"ranks got batches with different numbers of tensors: {sorted(counts)}")
    placed: list[torch.Tensor] = []
    for k in range(counts.pop()):
        shapes = {tuple(found[k].shape) for found in leaves.values()}
        if len(shapes) != 1:
            raise ValueError(
                f"ranks got batches of different shapes {sorted(shapes)}: all ranks compute together and need equal batches. Use drop_last=True, "
                "or pad to one length"
            )
        if on_cpu:
            own_parts = [rank_tensor.own(leaves[table[r]][k], place) for place, r in enumerate(hosted)]
            placed.append(own_parts[0] if all(map(torch.equal, own_parts, own_parts[:1] * len(hosted))) else RankTensor(own_parts))
            continue
        drawn = any(isinstance(found[k], rank_tensor.RankTensor) for found in leaves.values())  # for each rank, in a copy that several read
        placed.append(
            sharded.from_ranks(lambda r: rank_tensor.own(leaves[table[r]][k], hosted.index(r)), None if drawn else axes)  # noqa: B023  # called at once
        )
    return _with_numbers(nested.replace(first, _is_tensor, placed), [batches[table[r]] for r in hosted])


def _with_numbers(batch: Any, each: list[Any]) -> Any:
    """A batch in which numbers that differ by rank are each rank's own. each: of every hosted rank, alike but for tensors."""
    if type(batch) in (bool, int, float):
        return rank_numbers.item(tuple(each)) if all(type(x) is type(batch) for x in each) else batch
    if isinstance(batch, dict) and all(isinstance(x, dict) and x.keys() == batch.keys() for x in each):
        changed = {k: new for k, part in batch.items() if (new := _with_numbers(part, [x[k] for x in each])) is not part}
        if not changed:
            return batch
        made = copy.copy(batch)
        made.update(changed)
        return made
    if isinstance(batch, (list, tuple)) and all(isinstance(x, (list, tuple)) and len(x) == len(batch) for x in each):
        parts = [_with_numbers(part, list(theirs)) for part, *theirs in zip(batch, *each, strict=True)]
        if all(new is part for new, part in zip(parts, batch, strict=True)):
            return batch
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def _alike(batches: list[Any]) -> bool:
    """Whether all have the same tensors."""
    first, *others = [nested.collect(batch, _is_tensor) for batch in batches]
    return all(len(own) == len(first) and all(map(torch.equal, own, first)) for own in others)


def _table_of_draws(loader: DataLoader[Any]) -> tuple[Any, ...] | None:
    """As `rank_table`, of a loader that knows no rank and whose sampler may draw; None if all ranks draw alike."""
    if not world.is_local() or isinstance(loader.dataset, IterableDataset) or _is_in_order(loader):
        return None
    states = RandomStates((), _generators(loader, {id(torch.default_generator)}))
    alike = states.first_alike()
    return None if alike is None else tuple((k,) for k in alike)


def _is_in_order(loader: DataLoader[Any]) -> bool:
    """Whether it reads all rows one after another."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return type(loader.sampler) is SequentialSampler
    return type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler


_original_iter = DataLoader.__iter__


def _iter(self: DataLoader[Any]) -> Any:
    if len(world.current().hosted) > 1:
        table = rank_table(self)
        if table is not None:
            return RankBatches(self, table)
        if (table := _table_of_draws(self)) is not None:
            return RankBatches(self, table, by_draws=True)
    return _original_iter(self)


def install() -> None:
    """Make `DataLoader`s aware of ranks (those without a rank are as before)."""
    DataLoader.__iter__ = _iter  # type: ignore[method-assign]
    each_rank_factories.install()

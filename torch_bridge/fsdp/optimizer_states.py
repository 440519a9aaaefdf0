"""Optimizer state of shards: joined to that of whole parameters, by name, and cut again for another number of ranks or other options.

A whole state is {"state": {name: {key: tensor or number}}, "param_groups": [{..., "params": [names]}]}, with the names that parameters have in the module
without wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_bridge.fsdp import naming
from torch_bridge.fsdp.shards import Shared

Whole = dict[str, Any]
Split = Callable[[str, Sequence[torch.Tensor]], dict[str, torch.Tensor]]
"""(a parameter's entry in a sharded state dict, every rank's part) -> what it consists of, by name in the module without wrappers."""


class Unnamed(ValueError):
    """Optimizer state without names of parameters."""


def names_in(optimizer: Any, entries: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """`optim_info` of shard metadata: the entry of each of an optimizer's parameters in the state dict, in the optimizer's order.

    entries: the module's `named_parameters()`. Raises ValueError for an optimizer of other parameters."""
    known = {id(p): name for name, p in entries}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    others = sum(id(p) not in known for p in params)
    if others:
        raise ValueError(
            f"{others} of the optimizer's {len(params)} parameters are not in this module: make the optimizer after wrapping, of the outermost wrapper's "
            "parameters()"
        )
    return [known[id(p)] for p in params]


def joined(states: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any], split: Split) -> Whole:
    """The whole state from every rank's `optimizer.state_dict()`. Raises ValueError where it cannot be told which parameter is which, for ranks that do not
    have the same entries or numbers, and for state of another shape than its shard (Adafactor's factors of rows and columns)."""
    groups = states[0]["param_groups"]
    entries = _entries(groups, metadata)
    whole: Whole = {"state": {}, "param_groups": []}
    places: list[list[str]] = []
    for number, entry in enumerate(entries):
        per_rank = [s["state"].get(number, {}) for s in states]
        places.append(_names(entry, metadata, split))
        for key in per_rank[0]:
            for name, value in _whole_value(entry, key, [s.get(key) for s in per_rank], metadata, split).items():
                whole["state"].setdefault(name, {})[key] = value
    for group in groups:
        own = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        whole["param_groups"].append({**own, "params": [name for number in group["params"] for name in places[number]]})
    return whole


def _entries(groups: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> list[str]:
    count = sum(len(group["params"]) for group in groups)
    said = metadata.get("optim_info")
    if said is None and all("param_names" in group for group in groups):
        said = [name for group in groups for name in group["param_names"]]
    if said is None or len(said) != count:
        raise Unnamed(
            f"the optimizer's state does not say which of its {count} parameters is which: save model.get_shard_metadata(optimizer), or make the optimizer of "
            "model.named_parameters()"
        )
    return list(said)


def _shape(entry: str, metadata: Mapping[str, Any]) -> torch.Size | None:
    """The whole shape of a shard; None for a parameter that all ranks have whole."""
    found = naming.unit_and_shard(entry)
    if found is None:
        return None
    info = metadata["shard_info"].get(found[0], {}).get(found[1])
    if info is None:
        raise ValueError(f"{entry} is not in the shard metadata: the optimizer's state is of another model")
    return torch.Size(info["_orig_size"])


def _names(entry: str, metadata: Mapping[str, Any], split: Split) -> list[str]:
    size = _shape(entry, metadata)
    return [naming.plain(entry)] if size is None else list(split(entry, [torch.empty(size.numel(), device="meta")]))


def _whole_value(entry: str, key: str, values: Sequence[Any], metadata: Mapping[str, Any], split: Split) -> dict[str, Any]:
    size = _shape(entry, metadata)
    first = values[0]
    if any((v is None) != (first is None) for v in values):
        raise ValueError(f"state {key!r} of {entry} is not in every rank's file: they are of different steps")
    if size is None:
        return {naming.plain(entry): first}
    if isinstance(first, torch.Tensor) and first.dim():
        if len(values) * first.numel() < size.numel() or any(v.shape != first.shape for v in values):
            raise ValueError(
                f"state {key!r} of {entry} has shape {list(first.shape)}, which is no part of {list(size)} for each of {len(values)} ranks: what this "
                "optimizer keeps of a shard cannot be joined. Save the model alone, and begin with new optimizer state"
            )
        return dict(split(entry, list(values)))
    if any(bool(v != first) for v in values):
        raise ValueError(f"state {key!r} of {entry} differs from rank to rank, and is no part of the parameter: it cannot be joined")
    return {name: _own(first) for name in _names(entry, metadata, split)}


def _own(value: Any) -> Any:
    """A step count of a parameter's own: optimizers count in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _by_entry(key: str, value: object, shared: Shared) -> bool:
    """Whether a state has a number for each of the parameter's."""
    return isinstance(value, torch.Tensor) and value.shape == shared.pieces[0].size and (value.dim() > 0 or key != "step")


# -- cutting --------------------------------------------------------------------------------------


def cut(whole: Mapping[str, Any], optimizer: Any, shards: Mapping[int, tuple[Shared, Sequence[str]]], plain: Mapping[int, str]) -> Whole:
    """What `optimizer.load_state_dict` takes, from a whole state.

    shards: by id of a shard, what it is of and the names of its pieces; plain: by id, the names of parameters that all ranks have whole. Raises ValueError for
    parameters that the whole state does not know, or has in other groups."""
    groups, state, number = [], {}, 0
    for k, group in enumerate(optimizer.param_groups):
        numbers: list[int] = []
        names: list[str] = []
        for p in group["params"]:
            shared, own = shards.get(id(p), (None, [plain.get(id(p), "")]))
            found = _cut_one(whole["state"], shared, own)
            if found:
                state[number] = found
            numbers.append(number)
            names.extend(own)
            number += 1
        groups.append({**_options(whole["param_groups"], names, k), "params": numbers})
    return {"state": state, "param_groups": groups}


def _options(groups: Sequence[Mapping[str, Any]], names: Sequence[str], number: int) -> dict[str, Any]:
    known = {name for group in groups for name in group["params"]}
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(
            f"the optimizer's state has nothing of {', '.join(name or 'a parameter that is not in the model' for name in missing[:5])}: it is of another model"
        )
    chosen = [group for group in groups if set(names) <= set(group["params"])]
    if not chosen:
        raise ValueError(
            f"parameters of group {number} were in several groups when the state was saved: make the optimizer with the same groups"
        )
    return {k: v for k, v in chosen[0].items() if k != "params"}


def _cut_one(state: Mapping[str, Any], shared: Shared | None, names: Sequence[str]) -> dict[str, Any]:
    """The state of one parameter of the optimizer."""
    parts = [state[name] for name in names if name in state]
    if len(parts) not in (0, len(names)):
        raise ValueError(
            f"the optimizer's state has {len(parts)} of {len(names)} parameters that are one vector here (flatten_parameters=True)"
        )
    found: dict[str, Any] = {}
    for key in parts[0] if parts else ():
        values = [part[key] for part in parts]
        if shared is None or not _by_entry(key, values[0], shared):
            found[key] = _own(values[0])
            continue
        flat = values[0] if not shared.is_flat else torch.cat([v.reshape(-1) for v in values])
        with torch.no_grad():
            found[key] = shared.layout.cut(flat.to("xla"))
    return found

"""The numbers that a pipeline's parameters have in NxD's files of optimizers: each pipeline rank counts its own from 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxd_jax import _wrapper
from nxd_jax.checkpoint import contents, pipeline_ranks
from torch_bridge import nested


def by_rank(optimizer: Any, state: Mapping[str, Any], model: Any) -> list[tuple[Mapping[str, Any], list[list[bool]]]]:
    """An optimizer's state as each pipeline rank has it, and for each of its groups which parameters are of experts; of ranks that other processes host,
    something. All processes call it."""
    whole = _Numbered(optimizer, state, model)
    flags = dict(enumerate(flag for own in contents.are_experts(optimizer) for flag in own))
    return [(_renumbered(whole.state, own), [[flags.get(k, False) for k in group] for group in own]) for own in whole.by_rank()]


def check(optimizer: Any, state: Mapping[str, Any], model: Any) -> None:
    """Raise ValueError for a pipeline's optimizer whose parameters are not known."""
    given = isinstance(optimizer, Mapping)
    params = [] if given else [p for group in contents.inner(optimizer).param_groups for p in group["params"]]
    if _wrapper.pipeline_of(model) is None:
        if any(pipeline_ranks.rank_of(t) is not None for t in params or nested.collect(state, torch.is_tensor)):
            raise ValueError(
                "NxD's files have the optimizer of each pipeline rank, and which parameters that has is in the model: pass model= as well"
            )
        return
    if given:
        raise ValueError("the state dict of a pipeline's optimizer does not say which parameters are which: give the optimizer itself")
    names = contents.names_of(model)
    foreign = sum(p not in names for p in params)
    if foreign:
        raise ValueError(f"{foreign} of the optimizer's {len(params)} parameters are not the model's: give the model that it was made for")


class _Numbered:
    """A pipeline's optimizer by names, with the state of weights that ranks here read and that lie with other processes.

    state: by number; groups: of names; number: of a name; first: for each name of a weight the one that it goes by.
    """

    def __init__(self, optimizer: Any, state: Mapping[str, Any], model: Any):
        self._model = model
        self._tensors = contents.state_of(model, saving=False)
        names = contents.names_of(model)
        self.state = dict(state)
        self.groups = [[names[p] for p in group["params"]] for group in contents.inner(optimizer).param_groups]
        self.number = {name: k for k, name in enumerate(name for group in self.groups for name in group)}
        self.first = {name: names[t] for name, t in self._tensors.items() if isinstance(t, torch.Tensor) and t in names}
        pipeline = _wrapper.pipeline_of(model)
        self._order = [] if pipeline is None else pipeline.names_in_order()
        self._lent = pipeline_ranks.lent_to(model, self._of)
        self._take(self._lent)

    def _of(self, name: str) -> Any:
        """What belongs to a parameter: the number of its group, and its state."""
        k = self.number.get(name)
        group = next((g for g, own in enumerate(self.groups) if name in own), None)
        return group, {key: self.state[key][k] for key in _BY_NUMBER if k in self.state.get(key, {})}

    def _take(self, lent: Mapping[str, Any]) -> None:
        """Add what came from other processes."""
        known: dict[int, str] = {}
        for name, value in lent.items():
            self.first[name] = known.setdefault(id(value), name)
            group, states = value
            if self.first[name] != name or group is None:
                continue
            self.number[name] = len(self.number)
            for key, own in states.items():
                self.state[key] = {**self.state.get(key, {}), self.number[name]: own}
            self.groups[group] = self._with(self.groups[group], name)

    def _with(self, group: Sequence[str], name: str) -> list[str]:
        """A group with one more name, in order if it was."""
        number = {n: k for k, n in enumerate(self._order)}

        def place(n: str) -> int:
            return number.get(n, len(number))

        return sorted([*group, name], key=place) if list(group) == sorted(group, key=place) else [*group, name]

    def by_rank(self) -> list[list[list[int]]]:
        """For each pipeline rank, for each group: the numbers of its parameters, in the rank's order."""
        names = pipeline_ranks.names_of(self._model, {**self._tensors, **self._lent})
        assert names is not None
        local = [[self.first[name] for name in own if name in self.first] for own in names]
        return [[[self.number[n] for n in pipeline_ranks.numbered(group, own, self._order)] for group in self.groups] for own in local]


_BY_NUMBER = ("state", "base_state", "shape_info", "sharded_master_weights")


def _renumbered(state: Mapping[str, Any], groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """An optimizer's state with some of its parameters, numbered anew."""
    new = {old: k for k, old in enumerate(old for group in groups for old in group)}
    found = dict(state)
    for key in _BY_NUMBER:
        if key in state:
            found[key] = {new[old]: state[key][old] for old in new if old in state[key]}
    found["param_groups"] = [
        {**group, "params": [new[old] for old in own]} for group, own in zip(state["param_groups"], groups, strict=True)
    ]
    return found

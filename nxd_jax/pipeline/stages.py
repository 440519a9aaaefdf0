"""The stages of a model as modules with connections: what each takes from the batch and from stages before, and what it gives to later ones."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from nxd_jax.pipeline.traced_state import TracedState


class FromBatch(NamedTuple):
    """An argument of a stage: an input of the model, by name."""

    name: str


class FromStage(NamedTuple):
    """An argument of a stage: what a stage before gives, its result at a position (None: all that it gives)."""

    stage: int
    position: int | None = None


@dataclass
class Stage:
    """A part of the model.

    Attributes:
        index: its number, from 0.
        module: called with `args`; a stage of a traced model, or of a list of layers.
        args: where its arguments come from (`FromBatch`, `FromStage`); anything else is a constant.
        names: dotted names in the whole model of its parameters, by the parameter's `id`.
        consumers: which of its results later stages take, as (position, stage).
        checked: whether somebody has looked for tensors of other stages that it reads (`foreign`).
    """

    index: int
    module: nn.Module
    args: tuple[Any, ...]
    names: dict[int, str] = field(default_factory=dict)
    consumers: list[tuple[int | None, int]] = field(default_factory=list)
    checked: bool = False

    @property
    def inputs(self) -> list[str]:
        """Names of the model's inputs that it reads."""
        return [arg.name for arg in self.args if isinstance(arg, FromBatch)]

    def results(self, given: Any) -> Iterator[tuple[int | None, Any]]:
        """What it gives that somebody takes, each once, of what its module returned."""
        for position in dict.fromkeys(position for position, _ in self.consumers):
            yield position, given if position is None else given[position]


class Worked(NamedTuple):
    """Of a stage whose passes could be direct: the program of its forward pass, and what is read later of its inputs and results (numbered behind them).

    later: what the backward pass of weights reads of all that the one of inputs took and gave: these, gradients that arrived, and its results.
    adding: how backward passes go on after the first one (`known_passes.Adding`), None if that is not known.
    """

    program: weakref.ref[Any]
    needed: frozenset[int]
    later: frozenset[int]
    adding: Any = None


class Known:
    """For which stages passes could be direct in earlier steps (`direct`), by number.

    failures: steps in a row with some that had to be computed again; unlike: stages whose backward passes went on otherwise than an earlier step had shown.
    """

    def __init__(self) -> None:
        self.of: dict[int, Worked] = {}
        self.failures = 0
        self.unlike: set[int] = set()


@dataclass
class Stages:
    """All stages of a model.

    Attributes:
        output: what the model returns, a structure with `FromStage` and `FromBatch` in the place of values.
        replicas: by stage, its copies of weights that lie with other stages; None until weights have been placed.
        known: what steps know of earlier ones.
        placed: the parameters as modules of the stages held them when they were placed.
        called: modules of the model that are nodes of its graph, by name. Whoever puts another one there wants the model traced anew.
        state: what the model reads between these; None in manual mode.
    """

    stages: list[Stage]
    output: Any
    replicas: list[list[Any]] | None = None
    known: Known = field(default_factory=Known)
    placed: list[nn.Parameter] = field(default_factory=list)
    called: dict[str, nn.Module] = field(default_factory=dict)
    state: TracedState | None = None

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, index: int) -> Stage:
        return self.stages[index]

    def are_of(self, model: nn.Module) -> bool:
        """Whether the model has the modules still that were traced."""
        try:
            return all(model.get_submodule(name) is module for name, module in self.called.items())
        except AttributeError:
            return False

    def output_stages(self) -> set[int]:
        """Stages that what the model returns comes from."""
        return {found.stage for found in _leaves(self.output) if isinstance(found, FromStage)}


def of_traced(partitioned: fx.GraphModule) -> Stages:
    """The stages of what `partition.partition_traced_model` made. Connections are direct: a value goes to every stage that takes it."""
    found: list[Stage] = []
    place: dict[fx.Node, Any] = {}
    output: Any = None
    for node in partitioned.graph.nodes:
        if node.op == "placeholder":
            place[node] = FromBatch(str(node.target))
        elif node.op == "call_module":
            args = tuple(fx.node.map_aggregate(arg, lambda x: place[x] if isinstance(x, fx.Node) else x) for arg in node.args)
            found.append(Stage(len(found), partitioned.get_submodule(node.target), args))
            place[node] = FromStage(len(found) - 1)
        elif node.op == "call_function" and node.target is operator.getitem:
            place[node] = FromStage(place[node.args[0]].stage, node.args[1])
        elif node.op == "get_attr":
            place[node] = operator.attrgetter(str(node.target))(partitioned)
        elif node.op == "output":
            output = fx.node.map_aggregate(node.args[0], lambda x: place[x] if isinstance(x, fx.Node) else x)
        else:
            raise AssertionError(f"{node.op} {node.target} between stages")
    return _connected(found, output)


def in_a_row(modules: Sequence[nn.Module], first: Any) -> Stages:
    """Stages of which each takes what the one before gives (manual mode). first: the arguments of the first."""
    found = [Stage(k, module, tuple(first) if not k else (FromStage(k - 1),)) for k, module in enumerate(modules)]
    return _connected(found, FromStage(len(found) - 1))


def _connected(stages: list[Stage], output: Any) -> Stages:
    for stage in stages:
        for arg in _leaves(stage.args):
            if isinstance(arg, FromStage):
                stages[arg.stage].consumers.append((arg.position, stage.index))
    for arg in _leaves(output):
        if isinstance(arg, FromStage):
            stages[arg.stage].consumers.append((arg.position, len(stages)))
    return Stages(stages, output)


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=_is_source)


def _is_source(x: object) -> bool:
    return isinstance(x, (FromBatch, FromStage))


def filled(tree: Any, value: Mapping[Any, Any]) -> Any:
    """A structure with values in the places of `FromBatch` and `FromStage`."""
    return pytree.tree_map(lambda x: value[x] if _is_source(x) else x, tree, is_leaf=_is_source)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in a value."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]

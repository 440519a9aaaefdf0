"""A step of a pipeline: the actions of a schedule, each recorded on its stage's cores and run at once.

A stage's weights lie at its place (`torch_bridge.mesh.places`), so what is recorded with them runs there. Values that go from stage to stage are moved, not
recorded: autograd sees a stage alone, from inputs without a history to outputs whose gradients arrive from later stages. JAX dispatches in the order of
actions and waits for nothing; a device starts an action as soon as its inputs are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx.node import base_types
from torch.utils import _pytree as pytree

from nxd_jax.pipeline.schedules import Action, Kind, Schedule, run
from nxd_jax.pipeline.schedules.simulate import Stuck
from nxd_jax.pipeline.stages import FromBatch, FromStage, Stage, Stages, filled, tensors
from torch_bridge.mesh import places
from torch_bridge.mesh.places import Place
from torch_bridge.recorder import placed
from torch_bridge.runtime import executor

Loss = Callable[[Any], torch.Tensor]


def in_order(schedule: Schedule) -> list[Action]:
    """All actions of a schedule in an order in which one process can dispatch them: by the time at which they start."""
    timeline = run(schedule)
    assert not isinstance(timeline, Stuck), schedule.name
    tasks = [(task.start, rank, task.action) for rank, found in enumerate(timeline.tasks) for task in found]
    return [action for _, _, action in sorted(tasks, key=lambda task: task[:2])]


class Replica(NamedTuple):
    """A weight of one stage that another one uses, too: there it has a copy of its own in every step. holders: modules with the names they have it under."""

    weight: nn.Parameter
    copy: nn.Parameter
    holders: list[tuple[nn.Module, str]]


class Held(NamedTuple):
    """What a stage keeps of a micro-batch until its backward pass.

    sources: its inputs that take gradients, with where they came from (stage, position, which tensor of that value).
    edges: where backward starts, by (position, which tensor); the loss, in the last stage, by None.
    """

    sources: list[tuple[torch.Tensor, tuple[int, int | None, int]]]
    edges: dict[tuple[int | None, int] | None, GradientEdge | torch.Tensor]


class Step:
    """One step: what is on its way between stages, and what they keep.

    Args:
        stages: of the model.
        homes: by stage, its place; None without several ranks.
        replicas: by stage, its copies of weights that belong to other stages.
        batch: by micro-batch, the inputs by name.
        loss: finds the loss in what the model returns; None: it has none.
        autocast: contexts in which stages run forward.
    """

    def __init__(
        self,
        stages: Stages,
        homes: Sequence[Place | None],
        replicas: Sequence[Sequence[Replica]],
        batch: Sequence[Mapping[str, Any]],
        loss: Loss | None,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    ):
        self.stages = stages
        self.homes = homes
        self.replicas = replicas
        self.batch = batch
        self.loss = loss
        self.autocast = autocast
        self.given: dict[tuple[int, FromStage], Any] = {}
        self.readers: dict[tuple[int, FromStage], int] = {}
        self.held: dict[tuple[int, int], Held] = {}
        self.grads: dict[tuple[int, int], dict[tuple[int | None, int], torch.Tensor]] = {}
        self.waiting: dict[tuple[int, int], tuple[executor.Deferred | None, list[nn.Parameter], list[torch.Tensor]]] = {}
        self.outputs: dict[int, Any] = {}
        self.last = len(stages) - 1

    # -- forward --------------------------------------------------------------------------------------

    def forward(self, index: int, mb: int, train: bool = True) -> None:
        """The forward pass of a stage."""
        stage = self.stages[index]
        sources: list[tuple[torch.Tensor, tuple[int, int | None, int]]] = []
        values = {arg: self._argument(stage, arg, mb, sources, train) for arg in dict.fromkeys(_sources(stage.args))}
        with self._weights(index), self.autocast(), torch.set_grad_enabled(train):
            given = stage.module(*filled(stage.args, values))
        edges: dict[tuple[int | None, int] | None, GradientEdge | torch.Tensor] = {}
        for position, value in stage.results(given):
            for k, t in enumerate(tensors(value)):
                if t.requires_grad:
                    edges[position, k] = get_gradient_edge(t)
            self._give(mb, FromStage(index, position), value)
        if index == self.last:
            found = filled(self.stages.output, {arg: self._output(arg, mb) for arg in dict.fromkeys(_sources(self.stages.output))})
            if self.loss is not None:
                with self.autocast(), torch.set_grad_enabled(train):
                    loss = self.loss(found)
                self.outputs[mb] = loss.detach()
                if train:
                    edges = {None: loss / len(self.batch)}
            else:
                self.outputs[mb] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, found)
        if train:
            self.held[index, mb] = Held(sources, edges)
        executor.sync()

    def _argument(self, stage: Stage, arg: Any, mb: int, sources: list[Any], train: bool) -> Any:
        """The value of an argument at the stage's place: a tensor of a stage before without its history."""
        if isinstance(arg, FromBatch):
            return self._uploaded(arg, mb, stage.index)
        value = self._take(mb, arg)
        leaves, spec = pytree.tree_flatten(value)
        position = 0
        for k, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            leaves[k] = self._moved(leaf, stage.index)
            if leaf.requires_grad and train:
                leaves[k] = leaves[k].requires_grad_()
                sources.append((leaves[k], (arg.stage, arg.position, position)))
            position += 1
        return pytree.tree_unflatten(leaves, spec)

    def _give(self, mb: int, name: FromStage, value: Any) -> None:
        """Keep a result until the last stage that takes it has it. Raises TypeError for an object that may hide tensors."""
        for leaf in pytree.tree_leaves(value):
            if not (leaf is None or isinstance(leaf, base_types)):
                raise TypeError(
                    f"stage {name.stage} of the pipeline hands on an object of type {type(leaf).__name__}: stages take tensors, numbers, strings, and tuples, "
                    "lists and dicts of them. Let the layer return those"
                )
        self.given[mb, name] = value
        consumers = {stage for position, stage in self.stages[name.stage].consumers if position == name.position}
        self.readers[mb, name] = len(consumers)

    def _take(self, mb: int, name: FromStage) -> Any:
        self.readers[mb, name] -= 1
        return self.given[mb, name] if self.readers[mb, name] else self.given.pop((mb, name))

    def _output(self, arg: Any, mb: int) -> Any:
        """A value that the model returns: in the last stage with its history, else at the last stage's place without."""
        if isinstance(arg, FromBatch):
            return self._uploaded(arg, mb, self.last)
        value = self._take(mb, arg)
        if arg.stage == self.last:
            return value
        return pytree.tree_map_only(torch.Tensor, lambda t: self._moved(t, self.last), value)

    def _uploaded(self, arg: FromBatch, mb: int, index: int) -> Any:
        """An input of the model at a stage's place."""
        return pytree.tree_map_only(torch.Tensor, lambda t: self._upload(t, index), self.batch[mb][arg.name])

    def _upload(self, t: torch.Tensor, index: int) -> torch.Tensor:
        if t.device.type == "xla":
            return self._moved(t.detach(), index)
        with places.at(self.homes[index]):
            return t.to("xla")

    def _moved(self, t: torch.Tensor, index: int) -> torch.Tensor:
        home = self.homes[index]
        if t.device.type != "xla" or home is None:
            return t.detach()
        return t.detach() if placed.place_of(t) == home else placed.moved(t, home)

    @contextlib.contextmanager
    def _weights(self, index: int) -> Iterator[None]:
        """A block in which a stage has its own copies of other stages' weights."""
        for replica in self.replicas[index]:
            for module, name in replica.holders:
                module._parameters[name] = replica.copy
        try:
            yield
        finally:
            for replica in self.replicas[index]:
                for module, name in replica.holders:
                    module._parameters[name] = replica.weight

    # -- backward -------------------------------------------------------------------------------------

    def backward(self, index: int, mb: int) -> None:
        """The backward pass of a stage: gradients of its weights are added up, those of its inputs go to the stages that made them."""
        held = self.held.pop((index, mb))
        arrived = self.grads.pop((index, mb), {})
        roots, grads = self._roots(held, arrived)
        if roots:
            with self._weights(index):
                torch.autograd.backward(roots, grads)
        found = [(t.grad, source) for t, source in held.sources if t.grad is not None]
        executor.sync()
        for grad, (stage, position, k) in found:
            assert grad is not None
            self._return(grad, stage, mb, (position, k))

    @staticmethod
    def _roots(held: Held, arrived: Mapping[tuple[int | None, int], torch.Tensor]) -> tuple[list[Any], list[torch.Tensor | None]]:
        """Where the backward pass of a stage starts, with the gradients there (None for the loss)."""
        chosen = {name: edge for name, edge in held.edges.items() if name is None or name in arrived}
        return list(chosen.values()), [None if name is None else arrived[name] for name in chosen]

    def input_backward(self, index: int, mb: int) -> None:
        """The part of a stage's backward pass that the gradients of its inputs need; the rest waits for `weight_backward`.

        Hooks of weights would run twice, so a stage that has some does all of it now.
        """
        with self._weights(index):
            weights = [p for p in self.stages[index].module.parameters() if p.requires_grad]
        if any(p._backward_hooks for p in weights):
            self.backward(index, mb)
            self.waiting[index, mb] = None, [], []
            return
        held = self.held.pop((index, mb))
        roots, grads = self._roots(held, self.grads.pop((index, mb), {}))
        inputs = [t for t, _ in held.sources]
        with self._weights(index):
            found = (
                torch.autograd.grad(roots, [*inputs, *weights], grads, allow_unused=True) if roots else [None] * len([*inputs, *weights])
            )
        given = [(grad, source) for grad, (_, source) in zip(found, held.sources, strict=False) if grad is not None]
        kept = [(p, grad) for p, grad in zip(weights, found[len(inputs) :], strict=True) if grad is not None]
        deferred = executor.sync_first([grad._storage for grad, _ in given])  # type: ignore[attr-defined]
        self.waiting[index, mb] = deferred, [p for p, _ in kept], [grad for _, grad in kept]
        for grad, (stage, position, k) in given:
            self._return(grad, stage, mb, (position, k))

    def weight_backward(self, index: int, mb: int) -> None:
        """The rest of a stage's backward pass: gradients of its weights are added up."""
        deferred, weights, grads = self.waiting.pop((index, mb))
        if deferred is not None:
            deferred.run()
        if weights:
            torch.autograd.backward([p.view_as(p) for p in weights], grads)
            executor.sync()

    def _return(self, grad: torch.Tensor, stage: int, mb: int, name: tuple[int | None, int]) -> None:
        """Hand a gradient to the stage whose result it belongs to; those of several readers are added up there."""
        there = self.grads.setdefault((stage, mb), {})
        moved = self._moved(grad, stage)
        there[name] = there[name] + moved if name in there else moved

    # -- the whole step -------------------------------------------------------------------------------

    def train(self, actions: Sequence[Action]) -> None:
        """Do these actions."""
        for stage, kind, mb in actions:
            if kind is Kind.FORWARD:
                self.forward(stage, mb)
            elif kind is Kind.BACKWARD:
                self.backward(stage, mb)
            elif kind is Kind.INPUT_BACKWARD:
                self.input_backward(stage, mb)
            else:
                self.weight_backward(stage, mb)

    def evaluate(self) -> None:
        """All micro-batches forward through all stages."""
        for mb in range(len(self.batch)):
            for stage in self.stages:
                self.forward(stage.index, mb, train=False)


def _sources(tree: Any) -> list[Any]:
    found = pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, (FromBatch, FromStage)))
    return [x for x in found if isinstance(x, (FromBatch, FromStage))]

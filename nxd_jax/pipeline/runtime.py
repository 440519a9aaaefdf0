"""A step of a pipeline: the actions of a schedule, each recorded on its stage's cores and run at once.

A stage's weights lie at its place (`torch_bridge.mesh.places`), so what is recorded with them runs there. Values that go from stage to stage are moved, not
recorded: autograd sees a stage alone, from inputs without a history to outputs whose gradients arrive from later stages. JAX dispatches in the order of
actions and waits for nothing; a device starts an action as soon as its inputs are there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx.node import base_types
from torch.utils import _pytree as pytree

from nxd_jax.pipeline import foreign, observers
from nxd_jax.pipeline.direct import Direct
from nxd_jax.pipeline.draws import Draws
from nxd_jax.pipeline.exchange import Exchange
from nxd_jax.pipeline.known_passes import Given, Kept, Rest, Source, Taken
from nxd_jax.pipeline.made import Made, MadeTensor, Result
from nxd_jax.pipeline.schedules import Action, Kind, Schedule, run
from nxd_jax.pipeline.schedules.simulate import Stuck
from nxd_jax.pipeline.stages import FromBatch, FromStage, Known, Stage, Stages, filled, tensors
from nxd_jax.pipeline.watch import Watch
from torch_bridge.mesh import messages, places
from torch_bridge.mesh.places import Place
from torch_bridge.recorder import copies, placed
from torch_bridge.replay import accumulate_grad, module_calls, nested_grad
from torch_bridge.runtime import executor

AHEAD = 1 << 20
"""Bytes of one input that may be uploaded before the micro-batches that need them."""

Loss = Callable[[Any], torch.Tensor]
Names = tuple[Any, ...]
Gradient = torch.Tensor | MadeTensor
"""Of a result of a stage: a direct pass leaves it as an array."""


def in_order(schedule: Schedule) -> list[Action]:
    """All actions of a schedule in an order in which one process can dispatch them: by the time at which they start."""
    timeline = run(schedule)
    assert not isinstance(timeline, Stuck), schedule.name
    tasks = [(task.start, rank, task.action) for rank, found in enumerate(timeline.tasks) for task in found]
    return [action for _, _, action in sorted(tasks, key=lambda task: task[:2])]


class Replica(NamedTuple):
    """A weight of one stage that another one uses, too: there it has a copy of its own in every step.

    weight: what the owner has (in a process that has no part of its stage, something of its shape); copy: None in a process that has no part of the
    reader's stage; holders: modules with the names they have it under; name: in the whole model; owner, reader: the two stages.
    """

    weight: nn.Parameter
    copy: nn.Parameter | None
    holders: list[tuple[nn.Module, str]]
    name: str
    owner: int
    reader: int


class Held(NamedTuple):
    """What a stage keeps of a micro-batch until its backward pass.

    sources: its inputs that take gradients, with where they came from (stage, position, which tensor of that value).
    edges: where backward starts, by (position, which tensor); the loss, in the last stage, by None.
    """

    sources: list[tuple[torch.Tensor, Source]]
    edges: dict[tuple[int | None, int] | None, GradientEdge | torch.Tensor]


class Waiting(NamedTuple):
    """What a recorded backward pass of a stage's inputs leaves for that of its weights: what is still to run, and gradients by weight. watch: of the pass."""

    deferred: executor.Deferred | None
    weights: list[nn.Parameter]
    grads: list[torch.Tensor]
    watch: Watch


class Step:
    """One step: what is on its way between stages, and what they keep.

    Args:
        stages: of the model.
        homes: by stage, its place; None without several ranks.
        replicas: by stage, its copies of weights that belong to other stages.
        batch: by micro-batch, the inputs by name.
        loss: finds the loss in what the model returns; None: it has none.
        autocast: contexts in which stages run forward.
        exchange: with stages of other processes; None if this process hosts all ranks.
    """

    def __init__(
        self,
        stages: Stages,
        homes: Sequence[Place | None],
        replicas: Sequence[Sequence[Replica]],
        batch: Sequence[Mapping[str, Any]],
        loss: Loss | None,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
        exchange: Exchange | None = None,
    ):
        self.stages = stages
        self.homes = homes
        self.replicas = replicas
        self.batch = batch
        self.loss = loss
        self.autocast = autocast
        self.given: dict[tuple[int, FromStage], Any] = {}
        self.readers: dict[tuple[int, FromStage], int] = {}
        self.held: dict[tuple[int, int], Held | Kept] = {}
        self.grads: dict[tuple[int, int], dict[tuple[int | None, int], Gradient]] = {}
        self.waiting: dict[tuple[int, int], Waiting | Rest] = {}
        self.outputs: dict[int, Any] = {}
        self.reentrant: dict[int, bool] = {}
        self.last = len(stages) - 1
        self.exchange = exchange
        self.here = [home is None or messages.hosted(home) for home in homes]
        self.uploads: dict[tuple[tuple[str, int, bool], int], Any] = {}
        """Inputs that are uploaded before their passes (`_uploaded`)."""
        self.draws = Draws()
        self.direct = Direct({}, {}, Known(), self.draws.seed, False)
        """Passes that need not be recorded; none until `may_be_direct`."""

    def _apart(self, stage: int, other: int) -> bool:
        """Whether values of one stage have to be sent to get to another."""
        a, b = self.homes[stage], self.homes[other]
        return self.exchange is not None and a is not None and b is not None and a != b and not messages.within_process(a, b)

    # -- forward --------------------------------------------------------------------------------------

    def forward(self, index: int, mb: int, train: bool = True) -> None:
        """The forward pass of a stage. Its inputs have no history, so its backward pass is its own."""
        with module_calls.with_its_own_backward():
            self._forward(index, mb, train)

    def _forward(self, index: int, mb: int, train: bool) -> None:
        stage = self.stages[index]
        received: dict[FromStage, Any] = {}
        values = {arg: self._argument(stage, arg, mb, train, received) for arg in dict.fromkeys(_sources(stage.args))}
        self._bring(values, index)
        taken = Taken(
            values, {arg: self._uploaded(arg, mb, index, True) for arg in (self._returned_inputs() if index == self.last else ())}
        )
        direct = self.direct.forward(index, mb, taken) if train else None
        held, given = self._recorded(stage, mb, taken, train, received) if direct is None else direct
        if train:
            self.held[index, mb] = held
        for name, readers, value in given.near:
            self.given[mb, name], self.readers[mb, name] = value, readers
        if index == self.last:
            self.outputs[mb] = given.output
        for name, to, value in given.far:
            self._send(_forward_name(name, to), mb, value, index, to)

    def _recorded(self, stage: Stage, mb: int, taken: Taken, train: bool, received: Mapping[FromStage, Any]) -> tuple[Held, Given]:
        """A forward pass that is recorded: what it keeps for its backward pass, and what it hands on."""
        index = stage.index
        taken = taken.with_tensors()
        sources = taken.sources()
        watch = self.direct.watch(index, mb)
        with self._weights(index), self.autocast(), torch.set_grad_enabled(train), self.draws.of(index, mb):
            home = None if stage.checked else self.homes[index]
            buffers = [] if home is None else foreign.arrays_of_buffers(stage)
            placed.compute_at(self.homes[index])
            found = stage.module(*taken.arguments(stage.args))
            if home is not None:
                foreign.check(stage, home, buffers, tensors(found), [t for t, _ in sources])
                stage.checked = True
        edges: dict[tuple[int | None, int] | None, GradientEdge | torch.Tensor] = {}
        given = Given([], [])
        for position, value in stage.results(found):
            for k, t in enumerate(tensors(value)):
                if t.requires_grad:
                    edges[position, k] = get_gradient_edge(t)
            self._give(FromStage(index, position), value, given)
        if index == self.last:
            output, loss = self._returned(mb, taken.returned, given, received, train)
            given = given._replace(output=output)
            if loss is not None and train:
                edges = {None: _learning(loss) / len(self.batch)}
        with watch.running():
            executor.sync()
        if train:
            watch.learn_forward(taken, [source for _, source in sources], given)
        return Held(sources, edges), given

    def _returned_inputs(self) -> list[FromBatch]:
        """Inputs of the model that it returns, or that its loss is made of."""
        return [arg for arg in dict.fromkeys(_sources(self.stages.output)) if isinstance(arg, FromBatch)]

    def _returned(
        self, mb: int, inputs: Mapping[Any, Any], given: Given, received: Mapping[FromStage, Any], train: bool
    ) -> tuple[Any, torch.Tensor | None]:
        """In the last stage: the micro-batch's loss, or what the model returns if it has none; and the loss with its history."""
        values = {**inputs, **{name: value for name, _, value in given.near}}
        given.near.clear()  # nobody else reads what the last stage gives
        for arg in _sources(self.stages.output):
            if arg not in values:
                values[arg] = self._output(arg, mb, received)
        found = filled(self.stages.output, values)
        if self.loss is None:
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, found), None
        with self.autocast(), torch.set_grad_enabled(train):
            loss = self.loss(found)
        return loss.detach(), loss

    def _send(self, name: str, mb: int, value: Any, stage: int, to: int) -> None:
        home, target = self.homes[stage], self.homes[to]
        assert self.exchange is not None and home is not None and target is not None
        self.exchange.send(name, mb, value, home, target)

    def _receive(self, name: str, mb: int, stage: int, to: int) -> Any:
        home, target = self.homes[stage], self.homes[to]
        assert self.exchange is not None and home is not None and target is not None
        return self.exchange.receive(name, mb, home, target)

    def _argument(self, stage: Stage, arg: Any, mb: int, train: bool, received: dict[FromStage, Any]) -> Any:
        """The value of an argument at the stage's place: a tensor of a stage before without its history. received: what came from another process.

        What a direct pass has made is not moved yet (`_bring`).
        """
        if isinstance(arg, FromBatch):
            return self._uploaded(arg, mb, stage.index)
        apart = self._apart(arg.stage, stage.index)
        value = received[arg] = self._receive(_forward_name(arg, stage.index), mb, arg.stage, stage.index) if apart else self._take(mb, arg)
        if type(value) is Made:
            return value

        def taken(t: torch.Tensor) -> torch.Tensor:
            moved = t.detach() if apart else self._moved(t, stage.index)
            return moved.requires_grad_(t.requires_grad and train)

        return pytree.tree_map_only(torch.Tensor, taken, value)

    def _give(self, name: FromStage, value: Any, given: Given) -> None:
        """Add a result to what a stage hands on: to stages of this process that take it, and what is to be sent to stages in others.

        Raises TypeError for an object that may hide tensors, unless it stays there: what the model returns may be of any class.
        """
        leaves = [] if name.stage == self.last else pytree.tree_leaves(value)
        for leaf in leaves:
            if not (leaf is None or isinstance(leaf, base_types)):
                raise TypeError(
                    f"stage {name.stage} of the pipeline hands on an object of type {type(leaf).__name__}: stages take tensors, numbers, strings, and tuples, "
                    "lists and dicts of them. Let the layer return those"
                )
        near, far = self._consumers(name)
        if near:
            given.near.append((name, near, value))
        if far:
            own = pytree.tree_map_only(torch.Tensor, _owned, value)
            given.far.extend((name, stage, own) for stage in far)

    def _consumers(self, name: FromStage) -> tuple[int, list[int]]:
        """How many readers of a result get it in this process, and the stages to which it is sent. What the model returns is read by the last stage."""
        found = {stage for position, stage in self.stages[name.stage].consumers if position == name.position}
        far = sorted({min(stage, self.last) for stage in found if self._apart(name.stage, min(stage, self.last))})
        return sum(not self._apart(name.stage, min(stage, self.last)) for stage in found), far

    def _take(self, mb: int, name: FromStage) -> Any:
        self.readers[mb, name] -= 1
        return self.given[mb, name] if self.readers[mb, name] else self.given.pop((mb, name))

    def _output(self, arg: FromStage, mb: int, received: Mapping[FromStage, Any]) -> Any:
        """A value of another stage that the model returns, at the last stage's place without its history."""
        if self._apart(arg.stage, self.last):
            value = received[arg] if arg in received else self._receive(_forward_name(arg, self.last), mb, arg.stage, self.last)
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)
        value = self._take(mb, arg)
        return pytree.tree_map_only(torch.Tensor, lambda t: self._moved(t, self.last), value.value() if type(value) is Made else value)

    def _uploaded(self, arg: FromBatch, mb: int, index: int, returned: bool = False) -> Any:
        """An input of the model at a stage's place. returned: for what the model returns or makes the loss of, not for the stage's module.

        Where passes are direct, small ones are uploaded for all later micro-batches at once: between passes, each takes several times as long. Not where
        arrays are counted by the action that makes them.
        """
        name = arg.name, index, returned
        if (found := self.uploads.pop((name, mb), None)) is not None:
            return found
        ahead = (
            self.direct.ready and not observers.count_arrays() and sum(_size_on_host(x[arg.name]) for x in self.batch[mb + 1 :]) <= AHEAD
        )
        for k in range(mb + 1, len(self.batch) if ahead else 0):
            if (name, k) not in self.uploads:
                self.uploads[name, k] = self._uploaded_now(arg, k, index)
        return self._uploaded_now(arg, mb, index)

    def _uploaded_now(self, arg: FromBatch, mb: int, index: int) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: self._upload(t, index), self.batch[mb][arg.name])

    def _upload(self, t: torch.Tensor, index: int) -> torch.Tensor:
        if t.device.type == "xla":
            return self._moved(t.detach(), index)
        with places.at(self.homes[index]):
            return (
                copies.upload(t) if type(t) is torch.Tensor and not t.requires_grad else t.to("xla")
            )  # the same, without a call of torch's

    def _moved(self, t: torch.Tensor, index: int) -> torch.Tensor:
        home = self.homes[index]
        if t.device.type != "xla" or home is None:
            return t.detach()
        there = placed.place_of(t)
        if there == home:
            return t.detach()
        if there is not None:
            observers.moved(there, home, t.numel() * t.element_size())
        return placed.moved(t, home)

    def _bring(self, values: dict[Any, Any], index: int) -> None:
        """Move what direct passes have made to a stage's place, all in one call. values: of its arguments; those that are moved are replaced."""
        home = self.homes[index]
        apart = [(arg, value) for arg, value in values.items() if type(value) is Made and self.homes[arg.stage] != home]
        if home is None or not apart:
            return
        for arg, value in apart:
            self._tell_moved(value.tree.results, arg.stage, index)
        moved = iter(placed.arrays_at([array for _, value in apart for array in value.arrays], home))
        for arg, value in apart:
            values[arg] = Made(value.tree, list(itertools.islice(moved, len(value.arrays))), moved=True)

    def _tell_moved(self, results: Sequence[Result], index: int, to: int) -> None:
        """Tell who observes that a stage's results go to another one."""
        there, home = self.homes[index], self.homes[to]
        if observers.observed() and there is not None and home is not None:
            for result in results:
                observers.moved(there, home, result.view.numel * result.view.dtype.itemsize)

    @contextlib.contextmanager
    def _weights(self, index: int) -> Iterator[None]:
        """A block in which a stage has its own copies of other stages' weights."""
        before = [(module, name, module._parameters[name]) for replica in self.replicas[index] for module, name in replica.holders]
        for replica in self.replicas[index]:
            for module, name in replica.holders:
                module._parameters[name] = replica.copy
        try:
            yield
        finally:
            for module, name, parameter in before:
                module._parameters[name] = parameter

    # -- backward -------------------------------------------------------------------------------------

    def backward(self, index: int, mb: int) -> None:
        """The backward pass of a stage: gradients of its weights are added up, those of its inputs go to the stages that made them."""
        held, (names, arrived) = self.held.pop((index, mb)), self._arrived(index, mb)
        if isinstance(held, Kept):
            found = self.direct.backward(index, mb, held, names, list(arrived.values()))
            if found is not None:
                self._return_all(index, mb, found)
                return
        self._backward(index, mb, self._again(index, mb, held), names, arrived)

    def _backward(self, index: int, mb: int, held: Held, names: Names, arrived: Mapping[Any, Gradient]) -> None:
        """One that is recorded."""
        arrived = _as_tensors(arrived)
        roots, grads = self._roots(held, arrived)
        with self._weights(index):
            watch = self.direct.watch(index, mb, self._learned_weights(index), list(arrived.values()))
            if roots:
                placed.compute_at(self.homes[index])
                torch.autograd.backward(roots, grads)
        found = self._leaving(index, [(t.grad, source) for t, source in held.sources if t.grad is not None])
        with watch.running():
            executor.sync()
        watch.learn_backward(names, held.sources, found)
        self._return_all(index, mb, found)

    def _learning_weights(self, index: int) -> list[nn.Parameter]:
        """Of a stage, with its own copies of others' (`_weights`)."""
        return [p for p in self.stages[index].module.parameters() if p.requires_grad]

    def _learned_weights(self, index: int) -> list[nn.Parameter]:
        """The same if passes are learned from, else none: nobody asks."""
        return self._learning_weights(index) if self.direct.on else []

    def _again(self, index: int, mb: int, kept: Held | Kept) -> Held:
        """What a recorded forward pass keeps. One that was direct is computed again, as its backward pass has to be recorded."""
        if isinstance(kept, Held):
            return kept
        self.direct.failed(index)
        with module_calls.with_its_own_backward():
            return self._recorded(self.stages[index], mb, kept.taken, True, {})[0]

    @staticmethod
    def _roots(held: Held, arrived: Mapping[tuple[int | None, int], torch.Tensor]) -> tuple[list[Any], list[torch.Tensor | None]]:
        """Where the backward pass of a stage starts, with the gradients there (None for the loss)."""
        chosen = {name: edge for name, edge in held.edges.items() if name is None or name in arrived}
        return list(chosen.values()), [None if name is None else arrived[name] for name in chosen]

    def input_backward(self, index: int, mb: int) -> None:
        """The part of a stage's backward pass that the gradients of its inputs need; the rest waits for `weight_backward`.

        Hooks of weights would run twice, and reentrant checkpoints refuse parts of a backward pass: a stage that has some does all of it now.
        """
        held, (names, arrived) = self.held.pop((index, mb)), self._arrived(index, mb)
        if isinstance(held, Kept):
            done = self.direct.input_backward(index, mb, held, names, list(arrived.values()))
            if done is not None:
                returned, self.waiting[index, mb] = done
                self._return_all(index, mb, returned)
                return
        held = self._again(index, mb, held)
        with self._weights(index):
            weights = self._learning_weights(index)
        if any(p._backward_hooks for p in weights) or self._has_reentrant_checkpoints(index, held):
            self._backward(index, mb, held, names, arrived)
            return
        tensors = _as_tensors(arrived)
        watch = self.direct.watch(index, mb, weights, list(tensors.values()))
        found = self._gradients(index, held, tensors, weights)
        inputs = len(held.sources)
        given = self._leaving(index, [(grad, source) for grad, (_, source) in zip(found, held.sources, strict=False) if grad is not None])
        kept = [(p, grad) for p, grad in zip(weights, found[inputs:], strict=True) if grad is not None]
        handed = {id(grad._storage) for grad, _ in given}  # type: ignore[attr-defined]
        kept = [(p, grad.clone() if id(grad._storage) in handed else grad) for p, grad in kept]
        with watch.running():
            deferred = executor.sync_first([grad._storage for grad, _ in given])  # type: ignore[attr-defined]
        watch.learn_input_backward(names, held.sources, given, [grad for _, grad in kept], {} if deferred is None else deferred.passed)
        self.waiting[index, mb] = Waiting(deferred, [p for p, _ in kept], [grad for _, grad in kept], watch)
        self._return_all(index, mb, given)

    def _gradients(self, index: int, held: Held, arrived: Mapping[Any, torch.Tensor], weights: Sequence[nn.Parameter]) -> list[Any]:
        """Recorded: gradients of a stage's inputs, then of its weights; None where there is none."""
        roots, grads = self._roots(held, arrived)
        wanted = [*(t for t, _ in held.sources), *weights]
        placed.compute_at(self.homes[index])
        with self._weights(index):
            return list(torch.autograd.grad(roots, wanted, grads, allow_unused=True)) if roots else [None] * len(wanted)

    def _has_reentrant_checkpoints(self, index: int, held: Held) -> bool:
        """Whether a stage uses `torch.utils.checkpoint` with `use_reentrant=True`, or one of the functions made after it.

        Looked up once in a step, but for modules that are played: a call that is recorded again has such checkpoints in a graph of its own.
        """
        if index in self.reentrant:
            return self.reentrant[index]
        nodes = list(nested_grad.nodes_below(edge.node if isinstance(edge, GradientEdge) else edge.grad_fn for edge in held.edges.values()))
        calls = [outs for node in nodes if (outs := module_calls.inside(node)) is not None]
        found = any(node.name().endswith("CheckpointFunctionBackward") for node in nodes) or any(map(nested_grad.reentrant, calls))
        if found or not calls:
            self.reentrant[index] = found
        return found

    def weight_backward(self, index: int, mb: int) -> None:
        """The rest of a stage's backward pass: gradients of its weights are added up."""
        waiting = self.waiting.pop((index, mb), None)
        if waiting is None:  # all of it was done with the gradients of inputs
            return
        if isinstance(waiting, Rest):
            if self.direct.weight_backward(index, mb, waiting):
                return
            waiting = self._rest_again(index, mb, waiting)
            if waiting is None:
                return
        with self._weights(index):
            watch = self.direct.watch(index, mb, self._learned_weights(index))
        with watch.running():
            if waiting.deferred is not None:
                waiting.deferred.run()
            held = [grad._storage.held for grad in waiting.grads]  # type: ignore[attr-defined]
            if waiting.weights:
                if not accumulate_grad.add(waiting.weights, waiting.grads):
                    torch.autograd.backward([p.view_as(p) for p in waiting.weights], waiting.grads)
                executor.sync()
        watch.learn_weight_backward(waiting.watch, waiting.grads, held)

    def _rest_again(self, index: int, mb: int, rest: Rest) -> Waiting | None:
        """The gradients of weights after a direct backward pass of inputs, where the rest has to be recorded: all of it is computed again.

        None where they are added up already, as reentrant checkpoints refuse anything else.
        """
        held = self._again(index, mb, rest.kept)
        with self._weights(index):
            weights = self._learning_weights(index)
        watch = self.direct.watch(index, mb)
        arrived = _as_tensors(dict(zip(rest.names, rest.arrived, strict=False))) if index != self.last else {}
        if self._has_reentrant_checkpoints(index, held):
            with self._weights(index):
                torch.autograd.backward(*self._roots(held, arrived))
            executor.sync()
            return None
        found = self._gradients(index, held._replace(sources=[]), arrived, weights)
        kept = [(p, grad) for p, grad in zip(weights, found, strict=True) if grad is not None]
        executor.sync()
        return Waiting(None, [p for p, _ in kept], [grad for _, grad in kept], watch)

    def _leaving(self, index: int, found: Sequence[tuple[Any, Source]]) -> list[tuple[torch.Tensor, Source]]:
        """Gradients of inputs of a stage, those that are sent to other processes with their memory for themselves."""
        return [(placed.own(grad) if self._apart(source[0], index) else grad, source) for grad, source in found]

    def _return_all(self, index: int, mb: int, found: Sequence[tuple[Gradient, Source]]) -> None:
        """Hand the gradients of a stage's inputs to the stages that gave these; those of several readers are added up there."""
        far: dict[FromStage, list[tuple[int, torch.Tensor]]] = {
            arg: [] for arg in _sources(self.stages[index].args) if isinstance(arg, FromStage) and self._apart(arg.stage, index)
        }
        made: dict[int, list[tuple[MadeTensor, Source]]] = {}
        for grad, source in found:
            stage, position, k = source
            if FromStage(stage, position) in far:
                far[FromStage(stage, position)].append((k, _as_tensor(grad)))
            elif type(grad) is MadeTensor:
                made.setdefault(stage, []).append((grad, source))
            else:
                self._add(stage, mb, (position, k), self._moved(_as_tensor(grad), stage))
        for stage, grads in made.items():
            arrays, home = [grad.array for grad, _ in grads], self.homes[stage]
            if home is not None and home != self.homes[index]:
                self._tell_moved([grad.of for grad, _ in grads], index, stage)
                arrays = placed.arrays_at(arrays, home)
            for (grad, (_, position, k)), array in zip(grads, arrays, strict=True):
                self._add(stage, mb, (position, k), MadeTensor(grad.of, array))
        for arg, sent in far.items():
            self._send(_backward_name(arg, index), mb, sent, index, arg.stage)

    def _arrived(self, index: int, mb: int) -> tuple[Names, dict[tuple[int | None, int], Gradient]]:
        """The gradients of a stage's results, those from other processes too; and names of where its backward pass begins (None: the loss)."""
        for position, stage in dict.fromkeys(self.stages[index].consumers):
            if stage <= self.last and self._apart(index, stage):
                for k, grad in self._receive(_backward_name(FromStage(index, position), stage), mb, stage, index):
                    self._add(index, mb, (position, k), grad)
        there = self.grads.pop((index, mb), {})
        found = {name: there[name] for name in sorted(there, key=str)}
        return (None,) if index == self.last else tuple(found), found

    def _add(self, stage: int, mb: int, name: tuple[int | None, int], grad: Gradient) -> None:
        there = self.grads.setdefault((stage, mb), {})
        if name not in there:
            there[name] = grad
            return
        there[name] = _as_tensor(there[name]) + _as_tensor(grad)
        if self.direct.on:
            executor.sync()  # by itself: the sum is no part of the pass that is recorded next, nor of what that puts off

    # -- the whole step -------------------------------------------------------------------------------

    def train(self, actions: Sequence[Action]) -> None:
        """Do those of these actions whose stage this process has a part of."""
        for action in actions:
            if self.here[action.stage]:
                with observers.action(action):
                    self._do(action)

    def may_be_direct(self, actions: Sequence[Action]) -> None:
        """Have passes that are like earlier ones of this step run without being recorded, where that is sound. actions: all of the step.

        Only for a loss that no code of the script's makes.
        """
        mine = {home is None or messages.within_process(home, home) for home, here in zip(self.homes, self.here, strict=True) if here}
        own = self.stages.output_stages() <= {self.last}
        modules = {stage.index: stage.module for stage in self.stages if self.here[stage.index]}
        orders = {index: (_order(actions, index, Kind.BACKWARD), _order(actions, index, Kind.INPUT_BACKWARD)) for index in modules}
        self.direct = Direct(modules, orders, self.stages.known, self.draws.seed, mine == {True} and own and self.loss is not None)

    def _do(self, action: Action) -> None:
        stage, kind, mb = action
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
                if self.here[stage.index]:
                    self.forward(stage.index, mb, train=False)


def _size_on_host(value: Any) -> int:
    """Bytes of the tensors in an input; more than may be uploaded ahead if there is another one than on the CPU."""
    found = tensors(value)
    return sum(t.numel() * t.itemsize for t in found) if all(t.device.type == "cpu" for t in found) else AHEAD + 1


def _order(actions: Sequence[Action], index: int, kind: Kind) -> list[int]:
    """The micro-batches for which a stage has such an action, in their order."""
    return [action.microbatch for action in actions if action.stage == index and action.kind is kind]


def _sources(tree: Any) -> list[Any]:
    found = pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, (FromBatch, FromStage)))
    return [x for x in found if isinstance(x, (FromBatch, FromStage))]


def _learning(loss: torch.Tensor) -> torch.Tensor:
    """A loss that takes gradients. Raises RuntimeError for another."""
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss takes no gradients in the last stage of the pipeline: an earlier stage makes it, it is detached, or all weights are frozen. Cut the "
            "model so that its last stage makes the loss, of values that it computes or is given"
        )
    return loss


def _forward_name(arg: FromStage, to: int) -> str:
    return f"F {arg.stage} {arg.position} {to}"


def _backward_name(arg: FromStage, reader: int) -> str:
    return f"B {arg.stage} {arg.position} {reader}"


def _as_tensor(grad: Gradient) -> torch.Tensor:
    return grad.tensor() if type(grad) is MadeTensor else grad  # type: ignore[return-value]


def _as_tensors(grads: Mapping[Any, Gradient]) -> dict[Any, torch.Tensor]:
    return {name: _as_tensor(grad) for name, grad in grads.items()}


def _owned(t: torch.Tensor) -> torch.Tensor:
    """What is sent of a tensor of a stage; a tensor on the CPU is refused when it is."""
    return placed.own(t).requires_grad_(t.requires_grad) if t.device.type == "xla" else t

"""Passes of stages as one call of a program each, where the first micro-batches of a step have shown that this is all they are.

Recording a pass, even one that is played (`torch_bridge.replay`), and looking its program up takes several times as long as JAX's call. So each step records
the first passes of every stage, and `watch` learns from them what its programs take and give (`torch_bridge.replay.rerun`). Later passes of the step call
these programs: same numbers, no autograd, and no tensors: what they make goes to other stages as arrays (`made`).

Whatever a script changes between steps is seen. Two things are taken from one step to the next: for which stages this worked, and how gradients are added to
those that the first backward pass has made (`known_passes.Adding`), if it has made them by the same program from the same inputs as in that step.

It takes part only where no code of the script's runs in a step: all stages are played, no hooks on weights, no loss function of the script's. A backward
pass that turns out to be another one computes its forward pass again, in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxd_jax.pipeline.known_passes import RECORDED, Given, Kept, KnownBackward, Learned, Orders, Rest, Source, Taken
from nxd_jax.pipeline.made import MadeTensor
from nxd_jax.pipeline.stages import Known, Worked
from nxd_jax.pipeline.sums import sums_of, unhooked
from nxd_jax.pipeline.watch import Watch
from torch_bridge.identity import same
from torch_bridge.replay import rerun
from torch_bridge.replay.player import Player
from torch_bridge.replay.rerun import Rerun

FAILURES = 3
"""Steps in a row in which direct forward passes may be computed again, their backward passes being others, before all are recorded for good."""

Gradients = list[tuple[MadeTensor, Source]]
"""Gradients of a stage's inputs, with where these came from."""


class Direct:
    """The direct passes of one step.

    Args:
        modules: of the stages that this process has a part of, by their numbers.
        orders: by stage, the micro-batches in the order of their backward passes: those with a whole one, and those with one of inputs and one of weights.
        known: of the steps before.
        seed: of the random numbers of a stage's pass over a micro-batch.
        possible: whether no code of the script's runs in the step beside the modules.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        orders: Mapping[int, Orders],
        known: Known,
        seed: Callable[[int, int], int],
        possible: bool,
    ):
        self.known = known
        self.seed = seed
        self.players = {k: found for k, module in modules.items() if type(found := module.__dict__.get("forward")) is Player}
        self.learned = {k: Learned(orders[k], _recorded(orders[k], known.of.get(k))) for k in modules}
        self.on = possible and known.failures < FAILURES and len(self.players) == len(modules) and rerun.usual()
        """Whether passes of this step are learned from."""
        self._failed = False
        self.ready = self.on and known.of.keys() >= modules.keys()
        """Whether forward passes may be direct: it worked for all stages in an earlier step, and has in this one so far."""

    def watch(self, stage: int, micro_batch: int, parameters: Sequence[nn.Parameter] = (), arrived: Sequence[Any] = ()) -> Watch:
        """A pass is about to be recorded. parameters: whose gradients it adds up, if it is a backward pass; arrived: the gradients that it starts with."""
        return Watch(self, stage, micro_batch, parameters, arrived)

    def forward(self, stage: int, micro_batch: int, taken: Taken) -> tuple[Kept, Given] | None:
        """A forward pass; None, and nothing is done, where it has to be recorded."""
        learned = self.learned.get(stage)
        known = learned.forward if learned is not None and self.ready and micro_batch not in learned.recorded else None
        if known is None or not rerun.usual():
            return None
        inputs = known.inputs(taken)
        found = None if inputs is None else known.program.run(inputs, self.draws(known.program, stage, micro_batch))
        if inputs is None or found is None:
            return None
        player = self.players[stage]
        player.calls += 1
        player.played += 1
        near = [(name, readers, tree.made(found)) for name, readers, tree in known.given.near]
        far = [(name, to, tree.made(found).value()) for name, to, tree in known.given.far]
        given = Given(near, far, known.given.output.made(found).value())
        results = [held if k in known.needed else None for k, held in enumerate(found, len(inputs))]
        return Kept(taken, inputs, known.sources, results), given

    def backward(self, stage: int, micro_batch: int, kept: Kept, names: tuple[Any, ...], arrived: Sequence[Any]) -> Gradients | None:
        """The gradients of its inputs with where these came from; those of weights are added up. None, and nothing is done, if it is none that is known.

        names: of the results whose gradients have arrived.
        """
        known = self.learned[stage].backward
        if known is None or not same(sums_of(known.parameters), known.sums) or not unhooked(known.parameters):
            return None
        made = self._gradients(known, stage, micro_batch, kept, names, arrived)
        if made is not None:
            torch.autograd.graph.increment_version(known.bumped)
        return None if made is None else made[0]

    def input_backward(
        self, stage: int, micro_batch: int, kept: Kept, names: tuple[Any, ...], arrived: Sequence[Any]
    ) -> tuple[Gradients, Rest] | None:
        """The same without gradients of weights, and what is left for those."""
        known = self.learned[stage].inputs
        made = None if known is None else self._gradients(known, stage, micro_batch, kept, names, arrived)
        if made is None:
            return None
        grads, arrays = made
        worked = self.known.of.get(stage)
        if worked is not None:
            arrays = [array if k in worked.later else None for k, array in enumerate(arrays)]
        return grads, Rest(kept._replace(results=[]), names, list(arrived), arrays)

    def weight_backward(self, stage: int, micro_batch: int, rest: Rest) -> bool:
        """Add up the gradients of weights. False, and nothing is done, if how is not known."""
        known = self.learned[stage].weights
        if known is None or not rerun.usual() or not same(sums_of(known.parameters), known.sums) or not unhooked(known.parameters):
            return False
        found = known.program.run(rest.arrays, self.draws(known.program, stage, micro_batch))
        if found is None:
            return False
        arrays = rest.arrays + found
        if known.add.run([arrays[k] for k in known.grads]) is None:
            return False
        torch.autograd.graph.increment_version(known.bumped)
        return True

    def _gradients(
        self, known: KnownBackward, stage: int, micro_batch: int, kept: Kept, names: tuple[Any, ...], arrived: Sequence[Any]
    ) -> tuple[Gradients, list[Any]] | None:
        """Run the program of a backward pass: gradients of inputs with where these came from; and all arrays that it took and gave."""
        gradients = known.arrays(names, arrived) if rerun.usual() else None
        if gradients is None:
            return None
        slots = [*kept.inputs, *kept.results, *gradients]
        found = [] if known.program is None else known.program.run(slots, self.draws(known.program, stage, micro_batch))
        if found is None:
            return None
        self.players[stage].played_backward += 1
        self.known.failures = 0
        return [(MadeTensor(of, found[of.number]), kept.sources[k]) for k, of in known.returned], slots + found

    def draws(self, program: Rerun, stage: int, micro_batch: int) -> list[rerun.Draw]:
        """The random numbers of a pass."""
        seed = self.seed(stage, micro_batch) if program.draws else 0
        return [(seed, offset) for _, offset in program.draws]

    def failed(self, stage: int) -> None:
        """A direct forward pass has a backward pass that is not known."""
        if not self._failed:
            self.known.failures += 1
        self._failed = True
        self.forget(stage)

    def forget(self, stage: int) -> None:
        """Record the passes of this step from here on, and those of this stage in the next one, too."""
        self.known.of.pop(stage, None)
        self.ready = False


def _recorded(orders: Orders, worked: Worked | None) -> set[int]:
    """The micro-batches whose passes are recorded."""
    whole, parted = orders
    return {*whole[: RECORDED if worked is None or worked.adding is None else 1], *parted[:RECORDED]}

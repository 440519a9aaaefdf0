"""What a program takes and gives: arrays, or stacks of several leaves or results (`fold_repeats`); which inputs it takes over, and in which order
results leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

Port = tuple[int, ...]


@dataclass
class Ports:
    """inputs: by port, the places among the used leaves that come in through it; outputs: by port, the places among the results. stacked_inputs,
    stacked_outputs: by port, whether it is one array of which these are the rows. donated: input ports whose buffers the program takes over; order: output
    ports as its function returns them.
    """

    inputs: list[Port]
    outputs: list[Port]
    stacked_inputs: list[bool]
    stacked_outputs: list[bool]
    donated: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, leaves: int, results: int, stacks_in: Sequence[Port] = (), stacks_out: Sequence[Port] = ()) -> Ports:
        """Ports for that many leaves and results, of which these come and go stacked: those first."""
        inside = {i for port in stacks_in for i in port}
        outside = {k for port in stacks_out for k in port}
        alone = [(i,) for i in range(leaves) if i not in inside]
        away = [(k,) for k in range(results) if k not in outside]
        return cls(
            [*stacks_in, *alone],
            [*stacks_out, *away],
            [True] * len(stacks_in) + [False] * len(alone),
            [True] * len(stacks_out) + [False] * len(away),
        )

    def pair(self, updates: dict[int, int]) -> None:
        """Decide what to donate and the order of results, in which JAX (first come, first served among equal shapes) gives each input its own new value.

        updates: for a leaf that may be taken over, the result that is its new value. A weight that took over another weight's buffer would have to be copied
        first: both are read until the end of the step.
        """
        port_of = {port: at for at, port in enumerate(self.outputs)}
        pairs: dict[int, int] = {}
        for at, port in enumerate(self.inputs):
            target = port_of.get(tuple(updates.get(i, -1) for i in port))
            if target is not None and target not in pairs.values() and self.stacked_inputs[at] == self.stacked_outputs[target]:
                pairs[at] = target
        taken = set(pairs.values())
        self.donated = tuple(pairs)
        self.order = (*pairs.values(), *(at for at in range(len(self.outputs)) if at not in taken))

    def shapes(self, leaves: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The shape of every input, from those of the used leaves."""
        return [
            (len(port), *leaves[port[0]]) if many else leaves[port[0]] for port, many in zip(self.inputs, self.stacked_inputs, strict=True)
        ]

    def input_specs(self, leaves: Sequence[PartitionSpec]) -> list[PartitionSpec]:
        """The label of every input, from those of the used leaves."""
        return [_spec(leaves[port[0]], many) for port, many in zip(self.inputs, self.stacked_inputs, strict=True)]

    def output_specs(self, results: Sequence[PartitionSpec]) -> list[PartitionSpec]:
        """The label of every output, in the order in which they leave, from those of the results."""
        return [_spec(results[self.outputs[at][0]], self.stacked_outputs[at]) for at in self.order]

    def results(self, arrays: Sequence[Any]) -> list[Any]:
        """What the function returned, by result: an array, or a row of one."""
        from torch_bridge.mesh.stacked_arrays import Stack

        found: list[Any] = [None] * sum(map(len, self.outputs))
        for at, array in zip(self.order, arrays, strict=True):
            port = self.outputs[at]
            if self.stacked_outputs[at]:
                for k, row in zip(port, Stack(array).rows(), strict=True):
                    found[k] = row
            else:
                found[port[0]] = array
        return found


def _spec(of: PartitionSpec, stacked: bool) -> PartitionSpec:
    return PartitionSpec(None, *of) if stacked else of

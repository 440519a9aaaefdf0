"""What a program takes and gives: arrays, or stacks of several leaves or results (`fold_repeats`); which inputs it takes over, and in which order
results leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

Port = tuple[int, ...]


@dataclass(frozen=True)
class Ports:
    """What a program's function takes and returns.

    Attributes:
        inputs: by port, the places among the program's inputs that come in through it.
        outputs: by port, the places among its results that leave through it.
        stacked_inputs, stacked_outputs: by port, whether it is one array of which these are the rows.
        donated: input ports whose buffers the program takes over.
        order: output ports as the function returns them.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    stacked_inputs: tuple[bool, ...]
    stacked_outputs: tuple[bool, ...]
    donated: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, inputs: int, results: int, stacks_in: Sequence[Port] = (), stacks_out: Sequence[Port] = ()) -> Ports:
        """Ports for that many inputs and results, of which these come and go stacked: those first."""
        inside = {i for port in stacks_in for i in port}
        outside = {k for port in stacks_out for k in port}
        alone = [(i,) for i in range(inputs) if i not in inside]
        away = [(k,) for k in range(results) if k not in outside]
        return cls(
            (*stacks_in, *alone),
            (*stacks_out, *away),
            (True,) * len(stacks_in) + (False,) * len(alone),
            (True,) * len(stacks_out) + (False,) * len(away),
        )

    def paired(self, updates: dict[int, int]) -> Ports:
        """With what is donated, and the order of results in which JAX (first come, first served among equal shapes) gives each input its own new value.

        updates: for an input that may be taken over, the result that is its new value. A weight that took over another weight's buffer would have to be copied
        first: both are read until the end of the step.
        """
        port_of = {port: at for at, port in enumerate(self.outputs)}
        pairs: dict[int, int] = {}
        for at, port in enumerate(self.inputs):
            target = port_of.get(tuple(updates.get(i, -1) for i in port))
            if target is not None and target not in pairs.values() and self.stacked_inputs[at] == self.stacked_outputs[target]:
                pairs[at] = target
        taken = set(pairs.values())
        order = (*pairs.values(), *(at for at in range(len(self.outputs)) if at not in taken))
        return replace(self, donated=tuple(pairs), order=order)

    def shapes(self, inputs: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The shape of every input port, from those of the inputs."""
        return [
            (len(port), *inputs[port[0]]) if many else inputs[port[0]] for port, many in zip(self.inputs, self.stacked_inputs, strict=True)
        ]

    def input_specs(self, inputs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
        """The label of every input port, from those of the inputs."""
        return [_spec(inputs[port[0]], many) for port, many in zip(self.inputs, self.stacked_inputs, strict=True)]

    def output_specs(self, results: Sequence[PartitionSpec]) -> list[PartitionSpec]:
        """The label of every output, in the order in which they leave, from those of the results."""
        return [_spec(results[self.outputs[at][0]], self.stacked_outputs[at]) for at in self.order]

    def output_shardings(self, results: Sequence[Any]) -> list[Any]:
        """The sharding of every output, in the order in which they leave, from those of the results; None where nobody asks for one."""
        return [_sharding(results[self.outputs[at][0]], self.stacked_outputs[at]) for at in self.order]

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


def _sharding(of: NamedSharding | None, stacked: bool) -> NamedSharding | None:
    return of if of is None or not stacked else NamedSharding(of.mesh, _spec(of.spec, True))


def _spec(of: PartitionSpec, stacked: bool) -> PartitionSpec:
    return PartitionSpec(None, *of) if stacked else of

"""`neuronx_distributed.trace.spmd`: the model that the older builder makes. (The original has another class under the name `NxDModel` here.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxd_jax.trace import resharding
from torch_bridge.aot import facts, files
from torch_bridge.aot.model import Model, Program

KIND = "NxDModelExecutor"


class NxDModel:
    """`spmd.NxDModel`: programs by tag, with the weights and states that they share. An executor's `nxd_model`."""

    def __init__(self, programs: Mapping[str, Program], weights: list[dict[str, torch.Tensor]] | None = None):
        self.programs = Model()
        self.routes: dict[tuple[tuple[int, ...], ...], str] = {}
        for tag, program in programs.items():
            self.programs.add(tag, program)
            self._route(tag, program)
        self._given = weights

    @property
    def weights(self) -> list[dict[str, torch.Tensor]] | None:
        """Each rank's weights, as they are on the devices if those of all ranks are here; None if there are none."""
        return (self.programs.held() or None) if self._given is None else self._given

    def _route(self, tag: str, program: Program) -> None:
        """Raises ValueError for a second program with the same shapes (the original lets the last one win)."""
        shapes = tuple(t.shape for t in program.facts.inputs)
        if shapes in self.routes:
            raise ValueError(
                f"{tag!r} and {self.routes[shapes]!r} take inputs of the same shapes, {[list(s) for s in shapes]}, and calls are routed by shapes: give one of "
                "them inputs of other shapes, or use neuronx_distributed.ModelBuilder, whose models take model_name"
            )
        self.routes[shapes] = tag

    @property
    def ready(self) -> bool:
        """Whether it can be called."""
        return self.programs.started

    def initialize(self, weights: Sequence[Mapping[str, torch.Tensor]], start_rank_tensor: torch.Tensor | None = None) -> None:
        """Give each rank its weights (`shard_checkpoint`'s dicts, of another number of ranks, too), compile, and let states begin.

        start_rank_tensor: int32 [1], the first rank of this process; it hosts all, so 0.
        """
        self._check_start(start_rank_tensor)
        size = self.programs.ranks.size
        own = resharding.suited(weights, self.programs.weights, size, range(size))
        with self.programs.compiling():
            self.programs.set_weights([own[rank] for rank in self.programs.where.hosted])
        self._given = [dict(state) for state in own] if len(own) > len(self.programs.where.hosted) else None
        self.programs.start()

    def initialize_with_saved_weights(self, start_rank_tensor: torch.Tensor | None = None) -> None:
        """The same with the weights that were saved with the model. Raises RuntimeError if there are none."""
        weights = self.weights
        if weights is None:
            raise RuntimeError(
                "the model was saved without weights (trace(initialize_model_weights=False)): call initialize(weights, start_rank_tensor)"
            )
        self.initialize(weights, start_rank_tensor)

    def _check_start(self, start: torch.Tensor | None) -> None:
        first = 0 if start is None else int(start.reshape(-1)[0])
        if first != self.programs.where.hosted[0]:
            raise ValueError(f"start_rank_tensor says {first}, and this process computes for ranks {list(self.programs.where.hosted)}")


class NxDModelExecutor(torch.nn.Module):
    """`spmd.NxDModelExecutor`: called with positional CPU tensors, it runs the program that was traced for their shapes, and returns rank 0's result.

    `nxd_model.initialize(weights, start_rank_tensor)` or `nxd_model.initialize_with_saved_weights(start_rank_tensor)` come first. Each program returns what its
    own module returned (the original gives all of them the structure of the first). `torch.jit.save` and `torch.jit.load` keep it.
    """

    original_name = "NxDModelExecutor"

    def __init__(self, nxd_model: NxDModel):
        super().__init__()
        self.nxd_model = nxd_model

    def forward(self, *inputs: torch.Tensor, **named: Any) -> Any:
        """Raises TypeError for what is no tensor or has a name, RuntimeError before the weights are there, ValueError for shapes without a program."""
        model = self.nxd_model
        if named:
            raise TypeError(
                f"a traced model takes tensors in the order of its example_inputs, without names, got {', '.join(f'{n}=' for n in named)}"
            )
        other = next((k for k, t in enumerate(inputs) if not isinstance(t, torch.Tensor)), None)
        if other is not None:
            raise TypeError(
                f"input {other} of a traced model must be a tensor, got {type(inputs[other]).__name__}: what the forward took as a tuple or "
                "list goes in as its tensors, one by one, and numbers are part of the program"
            )
        if not model.ready:
            raise RuntimeError(
                "the model has no weights yet: call nxd_model.initialize(weights, start_rank_tensor), or initialize_with_saved_weights"
            )
        shapes = tuple(tuple(t.shape) for t in inputs)
        if shapes not in model.routes:
            known = "; ".join(f"{[list(s) for s in known]} -> {tag}" for known, tag in model.routes.items())
            raise ValueError(f"no program was traced for inputs of shapes {[list(s) for s in shapes]}: there are {known}")
        tag = model.routes[shapes]
        arrays = model.programs.run(tag, inputs)
        return facts.build(model.programs.programs[tag].facts.outs, model.programs.results(tag, arrays, model.programs.where.hosted[0]))

    def save(self, f: Any, _extra_files: dict[str, Any] | None = None) -> None:
        """What `torch.jit.save` calls."""
        files.save(f, KIND, self.nxd_model.programs.programs, self.nxd_model.weights, {}, _extra_files)

    def save_to_buffer(self, _extra_files: dict[str, Any] | None = None) -> bytes:
        """What `torch.jit.save` calls for a buffer."""
        return files.in_memory(lambda path: self.save(path, _extra_files))


def loaded(opened: files.Opened) -> NxDModelExecutor:
    """What `torch.jit.load` gives for the file of an executor."""
    weights = opened.weights(range(opened.ranks)) if opened.ranks else None
    return NxDModelExecutor(NxDModel(opened.programs, weights))

"""What a stage is told to do in a step of a pipeline schedule. Tasks are values: they compare, hash and print by what they say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, repr=False)
class PipelineTask:
    """One thing that a rank does with a micro-batch. Equal: of one class, with the same three fields.

    mb: number of the micro-batch, from 0. model_chunk: which of the rank's chunks (stages), from 0. graph_break: False if NxD does not end its graph after the
    task, because the next one is compiled together with it; it does not change what is computed.
    """

    mb: int
    model_chunk: int = 0
    graph_break: bool = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}_microbatch_{self.mb}_modelchunk_{self.model_chunk}_graphbreak_{self.graph_break}"


class ForwardPreprocessTask(PipelineTask):
    """`scheduler.ForwardPreprocessTask`: get the chunk's inputs, from the batch (the first stage) or from the stage before."""


class ForwardStepTask(PipelineTask):
    """`scheduler.ForwardStepTask`: run the chunk forward."""


class ForwardPostprocessTask(PipelineTask):
    """`scheduler.ForwardPostprocessTask`: send the chunk's outputs to the next stage."""


class BackwardPreprocessTask(PipelineTask):
    """`scheduler.BackwardPreprocessTask`: get the gradients of the chunk's outputs from the next stage."""


class BackwardStepTask(PipelineTask):
    """`scheduler.BackwardStepTask`: run the chunk backward; gradients of weights add up."""


class BackwardPostprocessTask(PipelineTask):
    """`scheduler.BackwardPostprocessTask`: send the gradients of the chunk's inputs to the stage before."""


class ReduceGradsTask(PipelineTask):
    """`scheduler.ReduceGradsTask`: reduce gradients over data-parallel ranks and stages that share weights. Of no micro-batch or chunk: both are -1."""

    def __init__(self) -> None:
        super().__init__(mb=-1, model_chunk=-1)

    def __repr__(self) -> str:
        return type(self).__name__

"""`neuronx_distributed.pipeline.scheduler`: what a pipeline rank does, step by step. Plain Python: nothing is computed or sent here.

P is the number of ranks (`stages`), r one of them (`stage_id`), M the number of micro-batches, v the number of chunks of the model on a rank; chunk c of rank r
is stage c * P + r of the model. Ranks form a ring: after the last one, the model goes on with the next chunk of rank 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from nxd_jax.pipeline.tasks import (
    BackwardPostprocessTask,
    BackwardPreprocessTask,
    BackwardStepTask,
    ForwardPostprocessTask,
    ForwardPreprocessTask,
    ForwardStepTask,
    PipelineTask,
    ReduceGradsTask,
)

__all__ = [
    "BackwardPostprocessTask",
    "BackwardPreprocessTask",
    "BackwardStepTask",
    "ForwardPostprocessTask",
    "ForwardPreprocessTask",
    "ForwardStepTask",
    "InferenceSchedule",
    "PipeSchedule",
    "PipelineTask",
    "ReduceGradsTask",
    "Train1F1BSchedule",
    "TrainInterleavedSchedule",
    "TrainSchedule",
]


class PipeSchedule(ABC):
    """`scheduler.PipeSchedule`: the tasks of one rank, as an iterable of steps, each a list of tasks. Subclasses say them in `steps`.

    num_microbatches, stages: 1 or more. stage_id: the rank, 0 to stages - 1. Raises ValueError for other numbers.
    """

    def __init__(self, num_microbatches: int, stages: int, stage_id: int):
        _check_counts(num_microbatches=num_microbatches, stages=stages)
        if not 0 <= stage_id < stages:
            raise ValueError(
                f"stage_id={stage_id}: {stages} stages are numbered 0 to {stages - 1}; pass the pipeline rank "
                "(parallel_state.get_pipeline_model_parallel_rank()), and as stages the size of the pipeline, not the stages of the model"
            )
        self.num_microbatches = num_microbatches
        self.stages = stages
        self.stage_id = stage_id

    @abstractmethod
    def steps(self) -> Iterator[list[PipelineTask]]:
        """The rank's tasks: a list for each step, empty where the rank is idle."""

    def __iter__(self) -> Iterator[list[PipelineTask]]:
        return self.steps()

    @property
    def stage(self) -> int:
        """This rank."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of ranks."""
        return self.stages

    @property
    def is_first_stage(self) -> bool:
        """Whether this is rank 0."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last rank."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.num_microbatches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages


class InferenceSchedule(PipeSchedule):
    """`scheduler.InferenceSchedule`: forward only. A step is one micro-batch in one chunk: its inputs, the forward, its outputs.

    All ranks have all three tasks; after the model's last stage, `ForwardPostprocessTask` has nobody to send to.

    num_model_chunks (not in NxD, which has tasks for chunk 0 only): 1 or more. All chunks run, P micro-batches in one, then the same in the next. With more
    than one, a send must not wait for its receive.
    """

    def __init__(self, num_microbatches: int, stages: int, stage_id: int, *, num_model_chunks: int = 1):
        super().__init__(num_microbatches, stages, stage_id)
        _check_counts(num_model_chunks=num_model_chunks)
        self.num_model_chunks = num_model_chunks

    def steps(self) -> Iterator[list[PipelineTask]]:
        """M * v steps."""
        for first in range(0, self.num_microbatches, self.stages):
            for chunk in range(self.num_model_chunks):
                for mb in range(first, min(first + self.stages, self.num_microbatches)):
                    yield [ForwardPreprocessTask(mb, chunk), ForwardStepTask(mb, chunk), ForwardPostprocessTask(mb, chunk)]


class _OneChunk(PipeSchedule):
    """Training with one chunk on a rank. Only the ends have something to leave out: nothing is sent past them or comes from behind them."""

    def _forward_sent(self, mb: int) -> list[PipelineTask]:
        return [] if self.is_last_stage else [ForwardPostprocessTask(mb)]

    def _gradient_received(self, mb: int) -> list[PipelineTask]:
        return [] if self.is_last_stage else [BackwardPreprocessTask(mb)]

    def _gradient_sent(self, mb: int) -> list[PipelineTask]:
        return [] if self.is_first_stage else [BackwardPostprocessTask(mb)]


class Train1F1BSchedule(_OneChunk):
    """`scheduler.Train1F1BSchedule`: a few forwards, then one forward and one backward in turn, then the backwards that are left.

    A rank keeps the activations of min(P - r, M) micro-batches at most. M may be smaller than P.
    """

    @property
    def num_warmup_steps(self) -> int:
        """The number of forwards before the first pair: min(P - r - 1, M)."""
        return min(self.stages - self.stage_id - 1, self.num_microbatches)

    def steps(self) -> Iterator[list[PipelineTask]]:
        """2 * M + 1 steps: a forward or a backward each, `ReduceGradsTask` in the last. In pairs, a gradient is received before the output is sent."""
        count, warmup = self.num_microbatches, self.num_warmup_steps
        for mb in range(warmup):
            yield [ForwardPreprocessTask(mb), ForwardStepTask(mb), *self._forward_sent(mb)]
        for mb in range(warmup, count):
            yield [ForwardPreprocessTask(mb), ForwardStepTask(mb)]
            yield self._backward(mb - warmup, self._forward_sent(mb))
        for mb in range(count - warmup, count):
            yield self._backward(mb, [])
        yield [ReduceGradsTask()]

    def _backward(self, mb: int, sent: list[PipelineTask]) -> list[PipelineTask]:
        return [*self._gradient_received(mb), *sent, BackwardStepTask(mb), *self._gradient_sent(mb)]


class TrainSchedule(_OneChunk):
    """`scheduler.TrainSchedule`, deprecated: the tasks of `Train1F1BSchedule` in the same order, with empty steps where the rank waits.

    Steps of all ranks keep time: a forward or a backward takes one, and what it made is sent in the next. Use `Train1F1BSchedule`.
    """

    def steps(self) -> Iterator[list[PipelineTask]]:
        """2 * (M + P - 1) steps, `ReduceGradsTask` at the end of the last."""
        count = 2 * (self.num_microbatches + self.stages - 1)
        for step in range(count):
            forward = (step - self.stage_id) % 2 == 0
            tasks = self._forward_step(step) if forward else self._backward_step(step)
            yield [*tasks, ReduceGradsTask()] if step == count - 1 else tasks

    def _forward_step(self, step: int) -> list[PipelineTask]:
        mb, sent = self._forward_at(step), self._backward_at(step - 1)
        tasks = self._gradient_sent(sent) if self._valid_micro_batch(sent) else []
        return [*tasks, ForwardPreprocessTask(mb), ForwardStepTask(mb)] if self._valid_micro_batch(mb) else tasks

    def _backward_step(self, step: int) -> list[PipelineTask]:
        mb, sent = self._backward_at(step), self._forward_at(step - 1)
        here = self._valid_micro_batch(mb)
        tasks = self._gradient_received(mb) if here else []
        tasks += self._forward_sent(sent) if self._valid_micro_batch(sent) else []
        return [*tasks, BackwardStepTask(mb)] if here else tasks

    def _forward_at(self, step: int) -> int:
        """Micro-batches enter rank 0 every other step, and take one step for a rank."""
        return (step - self.stage_id) // 2

    def _backward_at(self, step: int) -> int:
        """The first one is back at rank 0 after P steps to the last rank and P - 1 on the way back."""
        return (step - (2 * self.stages - 1 - self.stage_id)) // 2


_Pairs = tuple[tuple[type[PipelineTask], type[PipelineTask]], ...]

# Where a send waits for its receive, two neighbours must go through their messages in one order, and not all ranks may wait for the next one: the last rank
# sends first and the others follow it round the ring, or odd ranks send and even ones receive. A rank that is its own neighbour sends before it receives.
_INNER: _Pairs = ((ForwardPreprocessTask, BackwardPostprocessTask), (ForwardPostprocessTask, BackwardPreprocessTask))
_LAST: _Pairs = ((ForwardPostprocessTask, BackwardPreprocessTask), (ForwardPreprocessTask, BackwardPostprocessTask))
_EVEN: _Pairs = ((ForwardPreprocessTask, ForwardPostprocessTask), (BackwardPostprocessTask, BackwardPreprocessTask))
_ODD: _Pairs = ((ForwardPostprocessTask, ForwardPreprocessTask), (BackwardPreprocessTask, BackwardPostprocessTask))
_ALONE: _Pairs = ((ForwardPostprocessTask, BackwardPostprocessTask), (ForwardPreprocessTask, BackwardPreprocessTask))


class TrainInterleavedSchedule(PipeSchedule):
    """`scheduler.TrainInterleavedSchedule`: 1F1B with several chunks on a rank; P micro-batches go through a chunk, then through the next.

    After the last chunk come the next P micro-batches; backwards take the chunks from the last. If M is P, all forwards come before all backwards.
    num_model_chunks: v, 1 or more. fused_send_recv: messages in pairs, of which the first has graph_break False. fused_fwd_bwd: the same for the forward and
    the backward of a step. Both are without effect if M is P. use_odd_even_scheduler: even ranks receive while odd ranks send, and the other way round (NxD's
    pipeline asks for it if M is P). Raises ValueError if P does not divide M.
    """

    def __init__(
        self,
        num_microbatches: int,
        num_model_chunks: int,
        stages: int,
        stage_id: int,
        fused_send_recv: bool = False,
        fused_fwd_bwd: bool = False,
        use_odd_even_scheduler: bool = False,
    ):
        super().__init__(num_microbatches, stages, stage_id)
        _check_counts(num_model_chunks=num_model_chunks)
        if num_microbatches % stages:
            less, more = num_microbatches // stages * stages, -(-num_microbatches // stages) * stages
            raise ValueError(
                f"num_microbatches={num_microbatches}, stages={stages}: the interleaved schedule takes a multiple of stages; take "
                f"{f'{less} or {more}' if less else more} micro-batches, or one chunk on a rank (virtual_pipeline_size=1, Train1F1BSchedule), "
                "which takes any number"
            )
        self.num_model_chunks = num_model_chunks
        self.fused_send_recv = fused_send_recv and num_microbatches > stages
        self.fused_fwd_bwd = fused_fwd_bwd and num_microbatches > stages
        self.use_odd_even_scheduler = use_odd_even_scheduler

    @property
    def num_warmup_steps(self) -> int:
        """The number of forwards before the first backward's step: (P - r - 1) * 2 + (v - 1) * P; if M is P, all v * M."""
        if self.num_microbatches == self.stages:
            return self.num_microbatches * self.num_model_chunks
        return (self.stages - self.stage_id - 1) * 2 + (self.num_model_chunks - 1) * self.stages

    def steps(self) -> Iterator[list[PipelineTask]]:
        """A forward, a backward or both, then what this step sends and what the next needs; `ReduceGradsTask` in a step of its own."""
        for step in range(self.num_microbatches * self.num_model_chunks + self.num_warmup_steps):
            first: list[PipelineTask] = [] if step else [ForwardPreprocessTask(0)]
            yield [*first, *self._compute(step), *self._messages(step)]
        yield [ReduceGradsTask()]

    def _compute(self, step: int) -> list[PipelineTask]:
        return _fused({ForwardStepTask: self._forward(step), BackwardStepTask: self._backward(step)}, self.fused_fwd_bwd)

    def _messages(self, step: int) -> list[PipelineTask]:
        """Receives of the next step and sends of this one. The model's first and last stage have no gradients to send and to get; the last sends nothing on."""
        first, last = (0, 0), (self.stages - 1, self.num_model_chunks - 1)
        wanted: dict[type[PipelineTask], tuple[int, int] | None] = {
            ForwardPreprocessTask: self._forward(step + 1),
            ForwardPostprocessTask: self._unless_at(last, self._forward(step)),
            BackwardPreprocessTask: self._unless_at(last, self._backward(step + 1)),
            BackwardPostprocessTask: self._unless_at(first, self._backward(step)),
        }
        return [task for pair in self._order() for task in _fused({kind: wanted[kind] for kind in pair}, self.fused_send_recv)]

    def _order(self) -> _Pairs:
        if self.stages == 1:
            return _ALONE
        if self.use_odd_even_scheduler:
            return _ODD if self.stage_id % 2 else _EVEN
        return _LAST if self.is_last_stage else _INNER

    def _forward(self, step: int) -> tuple[int, int] | None:
        """Micro-batch and chunk of a step's forward, if it has one."""
        if not 0 <= step < self.num_microbatches * self.num_model_chunks:
            return None
        group, place = divmod(step, self.stages * self.num_model_chunks)
        return group * self.stages + place % self.stages, place // self.stages

    def _backward(self, step: int) -> tuple[int, int] | None:
        """Micro-batch and chunk of a step's backward: the order of the forwards, with chunks counted from the last."""
        found = self._forward(step - self.num_warmup_steps)
        return found and (found[0], self.num_model_chunks - 1 - found[1])

    def _unless_at(self, end: tuple[int, int], found: tuple[int, int] | None) -> tuple[int, int] | None:
        """What was found, if its stage is not this end (rank and chunk) of the model."""
        return None if found and (self.stage_id, found[1]) == end else found


def _fused(wanted: dict[type[PipelineTask], tuple[int, int] | None], fused: bool) -> list[PipelineTask]:
    """The wanted tasks in order. Of a fused pair, the first has no graph break; one that is alone keeps it."""
    there = [(kind, found) for kind, found in wanted.items() if found is not None]
    pair = fused and len(there) == 2
    return [kind(mb, chunk, graph_break=not (pair and place == 0)) for place, (kind, (mb, chunk)) in enumerate(there)]


def _check_counts(**counts: int) -> None:
    wrong = [f"{name}={count}" for name, count in counts.items() if count < 1]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: a schedule needs 1 or more of each; pass 1 where there is no division")

"""The work of a transformer's training step by arithmetic, from its sizes and its layout."""

from __future__ import annotations

import math

from nxd_jax.inspect.estimate import arithmetic, experts
from nxd_jax.inspect.estimate.layout import Layout, repeated
from nxd_jax.inspect.estimate.models import Transformer
from nxd_jax.inspect.estimate.work import Work
from nxd_jax.pipeline import schedules
from nxd_jax.pipeline.schedules import Schedule

RECOMPUTE = ("none", "selective", "full")
ITEMSIZE = {"bfloat16": 2, "float32": 4}


def transformer_work(
    model: Transformer,
    *,
    seq: int,
    global_batch: int,
    micro_batch: int = 1,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    sequence_parallel: bool = True,
    zero1: bool = True,
    recompute: str = "none",
    flash: bool = False,
    precision: str = "bfloat16",
    reduce_dtype: str = "bfloat16",
    gradient_dtype: str = "float32",
    master_weights: bool = True,
    schedule: str | Schedule = "1f1b",
    chunks: int | None = None,
    ep: int = 1,
    capacity_factor: float | None = None,
) -> Work:
    """The work of a training step with AdamW, on a core of the pipeline's last stage (which has the head besides its layers, so the others wait for it).

    seq: tokens of a sequence. global_batch: sequences of a step. micro_batch: sequences that a rank takes at a time. tp, pp, dp: ranks of each kind.
    sequence_parallel: norms and residuals are split along the sequence among the tp ranks (an all-gather and a reduce-scatter in place of an all-reduce).
    zero1: optimizer states are split among the dp ranks (ZeRO-1). recompute: what the backward pass computes again: "none", "selective" (the attention
    between the projections), "full" (every layer). flash: blockwise attention, whose scores never go to HBM and whose backward pass computes them again.
    precision: of weights and activations, "bfloat16" or "float32". reduce_dtype: of the reduce-scatters and all-reduces along tp. gradient_dtype: of gradients
    while micro-batches add up, and of their reduction. master_weights: whether the optimizer keeps float32 weights besides (else moments in `precision`).
    schedule: of the pipeline, by name or one's own (`nxd_jax.pipeline.schedules`). chunks: stages of a pipeline rank (NxD's virtual_pipeline_size); default:
    the fewest that the schedule has. ep: data-parallel ranks that hold different experts, so that dp / ep hold the same ones. capacity_factor: of experts;
    None: they take all tokens.

    The formulas, for a micro-batch of T tokens, per core, with q, kv, f the widths of attention and MLP, s = seq:

    - products of a layer, forward: 2 T (layer's parameters) / tp, and for attention 4 T s q / tp (all scores, causal or not); backward twice that, with
      blockwise attention 2.5 times. The head: 2 T h V / tp, backward twice that. Fewer K/V heads than tp ranks are computed by several ranks. Computing
      the layer again leaves out its last product.
    - collectives along tp of a layer, each of T h values in all: forward two all-gathers and two reduce-scatters, backward four (two of them gather the
      inputs again) and two; computing the layer again, two and one. The head: two all-gathers and a reduce-scatter; the embedding, without a pipeline: one
      of each. Without sequence parallelism there are all-reduces in place of the reduce-scatters and no all-gathers. The loss: three all-reduces of T
      float32 values.
    - along pp: two permutes for each micro-batch and chunk, of T h values (a rank's share with sequence parallelism). A rank is idle as long as the schedule
      says, if the two parts of the backward pass take as long as the forward pass each (the first twice as long if it computes the layer again).
    - along dp, once: a reduce-scatter of the gradients and an all-gather of the weights' shards (ZeRO-1), or an all-reduce. With sequence parallelism the
      gradients of the norms are all-reduced along tp.
    - a layer with experts: products of R rows with the weights of one expert, forward 2 R (its parameters) / tp, backward twice that, R being T k, or with a
      capacity all slots; all experts taken to be equally busy. Besides, the router on every rank, and shared experts as MLPs. Along tp one all-gather fewer in
      the backward pass, and all-reduces of the gradients of rows and of weights [T, E] in place of the reduce-scatter. Along ep, with a capacity, two
      all-to-alls of R h values forward and two backward; without, an all-gather of the tokens (and of their experts and weights) and a reduce-scatter of the
      results, backward the other way round: the products of the T k ep pairs that a rank sees then are only those for its own experts. Gradients of experts
      are reduced over dp / ep ranks.

    Raises ValueError for sizes that do not divide, and for unknown words.
    """
    _check(model, seq, global_batch, micro_batch, tp, pp, dp, recompute, (precision, reduce_dtype, gradient_dtype))
    _check_experts(model, ep, dp, capacity_factor)
    e, g = ITEMSIZE[precision], ITEMSIZE[gradient_dtype]
    # bytes of the optimizer's state for each parameter: moments and master weights read and written, the weight written
    states = 3 * 2 * 4 + e if master_weights else 3 * 2 * e
    microbatches = global_batch // (dp * micro_batch)
    timeline = _timeline(schedule, pp, microbatches, chunks, recompute == "full") if pp > 1 else None
    held = 1 if timeline is None else timeline.schedule.stages // pp
    if pp * held > model.layers:
        stages = f"pp={pp} stages" if held == 1 else f"{pp * held} stages (pp={pp}, {held} chunks each)"
        raise ValueError(f"transformer_work: {stages} for {model.layers} layers of {model.name}; a stage has at least one")
    lay = Layout(
        seq=seq,
        tokens=micro_batch * seq,
        microbatches=microbatches,
        tp=tp,
        pp=pp,
        dp=dp,
        sp=tp if sequence_parallel else 1,
        e=e,
        dtype=precision,
        flash=flash,
        layer_recompute=recompute == "full",
        attention_recompute=recompute == "full" or (recompute == "selective" and not flash),
        reduce_size=ITEMSIZE[reduce_dtype],
        gradient_size=g,
        state_bytes=states + g,
        zero1=zero1,
        chunks=held,
        ep=ep,
        capacity_factor=capacity_factor,
    )
    layers = math.ceil(model.layers / pp)
    n = lay.microbatches
    with_experts = experts.layers_with_experts(model, layers)
    phases = [
        repeated(p, n * count)
        for count, has_experts in ((layers - with_experts, False), (with_experts, True))
        for p in (arithmetic.layer(model, lay, has_experts) if count else ())
    ]
    phases.append(repeated(arithmetic.head(model, lay), n))
    sent = arithmetic.along_tp(model, lay, layers) + arithmetic.along_ep(model, lay, layers) + arithmetic.along_pp(model, lay)
    return Work(
        name=f"{model.name}, TP {tp} PP {pp} DP {dp}{f' EP {ep}' if ep > 1 else ''}, {seq} tokens, batch {global_batch}",
        axes={"pp": pp, "dp": dp, "tp": tp} if ep == 1 else {"pp": pp, "dp": dp // ep, "ep": ep, "tp": tp},
        phases=tuple(phases),
        collectives=tuple(sent),
        update=(arithmetic.optimizer(model, lay, layers),),
        reductions=tuple(arithmetic.reductions(model, lay, layers)),
        stages=pp,
        microbatches=n,
        sequences=global_batch,
        tokens=global_batch * seq,
        schedule_bubble=None if timeline is None else _bubble(timeline),
    )


def _timeline(schedule: str | Schedule, pp: int, microbatches: int, chunks: int | None, recompute: bool) -> schedules.Timeline:
    """Of the schedule that is meant, refused if it is not for this pipeline."""
    plan = schedule if isinstance(schedule, Schedule) else schedules.make(schedule, pp, microbatches, chunks)
    if plan.ranks != pp or plan.stages % pp:
        raise ValueError(f"transformer_work: the schedule {plan.name} has {plan.stages} stages on {plan.ranks} ranks, the layout pp={pp}")
    return schedules.check(plan, microbatches, times=schedules.Times(input_backward=2.0 if recompute else 1.0))


def _bubble(timeline: schedules.Timeline) -> float:
    """How long the idlest rank waits, as a part of the time that it computes."""
    idle = max(map(timeline.idle, range(timeline.schedule.ranks)))
    return idle / (timeline.end - idle)


def _check(
    model: Transformer, seq: int, batch: int, micro: int, tp: int, pp: int, dp: int, recompute: str, dtypes: tuple[str, ...]
) -> None:
    low = {k: v for k, v in dict(seq=seq, global_batch=batch, micro_batch=micro, tp=tp, pp=pp, dp=dp).items() if v < 1}
    if low:
        raise ValueError(f"transformer_work: sizes are at least 1, got {low}")
    if recompute not in RECOMPUTE:
        raise ValueError(f"transformer_work: recompute={recompute!r} must be one of {', '.join(map(repr, RECOMPUTE))}")
    unknown = [d for d in dtypes if d not in ITEMSIZE]
    if unknown:
        raise ValueError(f"transformer_work: {unknown[0]!r} is no dtype that is known here; use one of {', '.join(map(repr, ITEMSIZE))}")
    if batch % (dp * micro):
        raise ValueError(
            f"transformer_work: global_batch={batch} is no multiple of dp * micro_batch = {dp} * {micro}; each rank takes whole micro-batches"
        )
    if model.heads % tp:
        raise ValueError(
            f"transformer_work: {model.heads} heads of {model.name} cannot be shared out to tp={tp} ranks; tp must divide them"
        )


def _check_experts(model: Transformer, ep: int, dp: int, capacity_factor: float | None) -> None:
    if not model.experts and (ep != 1 or capacity_factor is not None):
        raise ValueError(f"transformer_work: {model.name} has no experts; leave out ep and capacity_factor")
    if ep < 1 or dp % ep:
        raise ValueError(
            f"transformer_work: ep={ep} must divide dp={dp}: expert-parallel ranks are data-parallel ranks that hold different experts"
        )
    if model.experts % ep:
        raise ValueError(
            f"transformer_work: {model.experts} experts of {model.name} cannot be shared out to ep={ep} ranks; ep must divide them"
        )

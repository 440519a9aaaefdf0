"""The estimate: its work against arithmetic and a recorded step, its rule term by term, its page against what it gives now."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import published

import nxd_jax
from nxd_jax.inspect.collectives import Collective, summary
from nxd_jax.inspect.costs import costs
from nxd_jax.inspect.estimate import (
    BERT_LARGE,
    DOCUMENTED,
    GLM45_AIR,
    GPT_175B,
    LLAMA2_7B,
    LLAMA2_70B,
    LLAMA31_8B,
    MIXTRAL_8X7B,
    PEAK,
    QWEN3_30B_A3B,
    Phase,
    Transformer,
    Work,
    estimate,
    program_work,
    transformer_work,
)
from nxd_jax.inspect.tables import plain
from nxd_jax.pipeline import schedules
from nxd_jax.topology import Topology
from tests.nxd_jax.inspect import mixture
from tests.nxd_jax.inspect.llama import Job

ROOT = Path(__file__).resolve().parents[3]
NODE = Topology("trn1.32xlarge")
LLAMA = dict(seq=4096, global_batch=64)


# -- the work of a transformer ------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "billions"), [(LLAMA2_7B, 6.74), (LLAMA2_70B, 68.98), (LLAMA31_8B, 8.03), (GPT_175B, 174.6)])
def test_parameters(model: Transformer, billions: float):
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(("tp", "dp"), [(1, 8), (8, 1), (4, 2)])
def test_products_are_six_times_parameters_times_tokens_and_attention(tp: int, dp: int):
    work = transformer_work(LLAMA2_7B, tp=tp, dp=dp, **LLAMA)
    m, tokens = LLAMA2_7B, 64 * 4096
    used = m.parameters - m.vocabulary * m.hidden  # the embedding is a look-up
    assert work.tokens == tokens
    assert work.flops["bfloat16"] * work.cores == pytest.approx(6 * used * tokens + 12 * m.layers * m.hidden * 4096 * tokens)


def test_recomputation_adds_a_forward_pass_of_what_it_covers():
    none, selective, full = (
        transformer_work(LLAMA2_7B, tp=8, recompute=r, **LLAMA).flops["bfloat16"] for r in ("none", "selective", "full")
    )
    m, tokens = LLAMA2_7B, 64 * 4096
    attention = 4 * m.layers * tokens * 4096 * m.hidden / 8
    assert selective - none == pytest.approx(attention)
    assert full - selective == pytest.approx(2 * tokens * m.layers * (m.layer_parameters - m.hidden * m.ffn) / 8)


def test_ranks_with_fewer_heads_than_they_are_compute_a_head_each():
    wide = dataclasses.replace(LLAMA31_8B, kv_heads=32)
    linear = [transformer_work(m, tp=32, **LLAMA).phases[0].flops for m in (LLAMA31_8B, wide)]
    assert linear[0] == linear[1]


def test_blockwise_attention_keeps_scores_out_of_memory():
    plain_, flash = (transformer_work(LLAMA2_7B, tp=8, flash=f, **LLAMA).phases[1] for f in (False, True))
    assert flash.bytes < plain_.bytes / 10
    assert flash.flops == plain_.flops * 3.5 / 3


def test_pipeline_stages_share_the_layers_and_send_activations():
    work = transformer_work(LLAMA2_7B, tp=8, pp=4, dp=2, **LLAMA)
    assert (work.stages, work.microbatches, work.bubble) == (4, 32, 3 / 32)
    (permute,) = [c for c in work.collectives if c.kind == "permute"]
    assert (permute.count, permute.bytes) == (64, 64 * 4096 * 4096 * 2 // 8)
    assert work.axes == {"pp": 4, "dp": 2, "tp": 8} and work.cores == 64


@pytest.mark.parametrize(
    ("layout", "bubble", "permutes"),
    [
        (dict(schedule="gpipe"), 3 / 32, 64),
        (dict(schedule="interleaved"), 3 / 64, 128),
        (dict(schedule="interleaved", chunks=4), 3 / 128, 256),
        (dict(schedule="zb_h1"), 1 / 32, 64),
        (dict(schedule="zbv"), 1 / 64, 128),
        (dict(schedule="1f1b", recompute="full"), 3 / 32, 64),
        (dict(schedule="zb_h1", recompute="full"), 3 * (1 + 2 - 1) / (32 * 4), 64),
        (dict(schedule=schedules.make("gpipe", 4, 32)), 3 / 32, 64),
    ],
)
def test_schedules_of_a_pipeline(layout: dict[str, Any], bubble: float, permutes: int) -> None:
    work = transformer_work(LLAMA2_7B, tp=8, pp=4, dp=2, **layout, **LLAMA)
    assert work.bubble == pytest.approx(bubble)
    (permute,) = [c for c in work.collectives if c.kind == "permute"]
    assert permute.count == permutes
    (term,) = [t for t in estimate(work, Topology("trn1.32xlarge", nodes=2)).terms if t.name == "pipeline bubble"]
    assert term.seconds > 0


@cache
def recorded(job: Job) -> tuple[Any, Any]:
    """Costs and collectives of a step on TP 8 x DP 4."""
    with nxd_jax.abstract_run(32, instance="trn1.32xlarge") as run:
        job.step(*job.build())
        report = run.report()
        program = max(run.programs, key=lambda p: p.ops)
        return costs(program.jaxpr), report.programs[0].collectives


JOBS = {
    "checkpoints, sequence parallel, ZeRO-1": Job(sequence_parallel=True, zero1=True, checkpoints=True),
    "none of them": Job(),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_recorded_llama_does_what_the_formulas_say(job: Job):
    model = Transformer("tiny", job.layers, job.hidden, job.heads, job.ffn, job.vocabulary, gated=True, rope=True, norm="rms")
    work = transformer_work(
        model,
        seq=job.seq,
        global_batch=4 * job.batch,
        micro_batch=job.batch,
        tp=job.tp,
        dp=4,
        sequence_parallel=job.sequence_parallel,
        zero1=job.zero1,
        recompute="full" if job.checkpoints else "none",
        reduce_dtype="float32",
        gradient_dtype="float32" if job.zero1 else "bfloat16",
    )
    found, sent = recorded(job)
    attention = 4 * job.batch * job.seq**2 * job.hidden // job.tp * job.layers
    assert found.flops == work.flops["bfloat16"] + attention  # the bridge's attention computes its forward pass again in the backward pass
    expected = {(c.kind, c.axes): c.bytes for c in summary((*work.collectives, *work.reductions))}
    seen = {(c.kind, c.axes): c.bytes for c in sent}
    norm = {("all-reduce", ("tp",)): 8, ("all-reduce", ("dp",)): 4 if job.zero1 else 0}  # squares of the gradients' norm
    assert seen == {key: expected.get(key, 0) + norm.get(key, 0) for key in {*expected, *seen}}


def test_the_work_of_a_recorded_program():
    found, sent = recorded(JOBS["none of them"])
    work = program_work(found, sent, {"dp": 4, "tp": 8}, name="tiny", sequences=8)
    assert work.flops == {"bfloat16": found.flops} and work.hbm_bytes == found.bytes
    result = estimate(work, NODE)
    assert {"forward", "backward", "outside", "all-reduce along tp", "all-reduce along dp"} == {t.name for t in result.terms}
    assert result.sequences_per_second == 8 / result.seconds


# -- experts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [(MIXTRAL_8X7B, 46.70, 12.88), (QWEN3_30B_A3B, 30.53, 3.35), (GLM45_AIR, 106.9, 13.42), (LLAMA2_7B, 6.74, 6.74)],
)
def test_parameters_of_experts(model: Transformer, billions: float, active: float):
    """Published: 46.7 B and 12.9 B, 30.5 B and 3.3 B, 106 B and 12 B (which leaves the embedding out)."""
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.002)


@pytest.mark.parametrize("ep", [1, 4])
def test_only_what_is_routed_is_computed(ep: int):
    """Six times the parameters that a token meets, and attention; routers are computed by every tensor-parallel rank."""
    m, tokens, tp = MIXTRAL_8X7B, 64 * 4096, 8
    work = transformer_work(m, tp=tp, dp=4, ep=ep, **LLAMA)
    router = m.layers * m.experts * m.hidden
    used = m.active_parameters - m.vocabulary * m.hidden - router
    assert work.flops["bfloat16"] * work.cores == pytest.approx(6 * used * tokens + 12 * m.layers * m.hidden * 4096 * tokens)
    assert work.flops["float32"] * work.cores == pytest.approx(6 * router * tokens * tp)
    (experts,) = [p for p in work.phases if p.name == "experts"]
    assert experts.flops == 6 * m.layers * 16 * 4096 * 2 * m.mlp_parameters(m.ffn) / tp  # 16 sequences of a rank


def test_slots_are_computed_whether_used_or_not():
    half, all_, more = (
        next(p.flops for p in transformer_work(MIXTRAL_8X7B, tp=8, capacity_factor=f, **LLAMA).phases if p.name == "experts")
        for f in (0.5, 1.0, 4.0)
    )
    assert (half * 2, more) == (all_, all_)  # a factor of E / k or more keeps all tokens, and needs no slots


def test_experts_elsewhere_take_less_memory_and_send_tokens():
    one, four = (transformer_work(MIXTRAL_8X7B, tp=8, dp=4, ep=ep, **LLAMA) for ep in (1, 4))
    expert = MIXTRAL_8X7B.layers * 8 * MIXTRAL_8X7B.mlp_parameters(MIXTRAL_8X7B.ffn) / 8
    assert (one.update[0].elements - four.update[0].elements) / 12 == 0  # a quarter of all experts either way, ZeRO-1 or not
    assert four.axes == {"pp": 1, "dp": 1, "ep": 4, "tp": 8} and four.cores == one.cores
    grads = (
        {c.axes: c.bytes for c in one.reductions if c.kind == "reduce-scatter"},
        {c.axes: c.bytes for c in four.reductions if c.kind == "reduce-scatter"},
    )
    assert grads[0][("dp",)] - grads[1][("ep",)] == 4 * expert and ("dp",) not in grads[1]
    assert {c.kind for c in four.collectives if c.axes == ("ep",)} == {"all-gather", "reduce-scatter"}
    slots = transformer_work(MIXTRAL_8X7B, tp=8, dp=4, ep=4, capacity_factor=1.25, **LLAMA)
    (exchange,) = [c for c in slots.collectives if c.axes == ("ep",)]
    assert exchange.kind == "all-to-all" and exchange.count == 4 * 32 * 16
    assert exchange.bytes == exchange.count * 8 * 1280 * 4096 * 2
    text = str(estimate(slots, NODE))
    assert "all-to-all along ep" in text and "dispatch to experts" in text and "TP 8 PP 1 DP 4 EP 4" in text


def test_the_last_stages_have_the_layers_with_experts():
    dense = dataclasses.replace(GLM45_AIR, dense_layers=GLM45_AIR.layers - 4)
    work = transformer_work(dense, tp=4, pp=2, dp=4, **LLAMA)
    whole = transformer_work(GLM45_AIR, tp=4, pp=2, dp=4, **LLAMA)
    routed = [next(p.flops for p in w.phases if p.name == "router") for w in (work, whole)]
    assert routed[0] * 23 == routed[1] * 4


@cache
def recorded_mixture(job: mixture.Job) -> tuple[Any, Any]:
    """Costs and collectives of a step on 16 cores."""
    with nxd_jax.abstract_run(16) as run:
        job.step(*job.build())
        report = run.report()
        program = max(run.programs, key=lambda p: p.ops)
        return costs(program.jaxpr), report.programs[0].collectives


MIXTURES = {
    "dropless": mixture.Job(),
    "slots, sequence parallel, ZeRO-1, EP 2": mixture.Job(ep=2, factor=1.0, sequence_parallel=True, zero1=True),
    "dropless, EP 2": mixture.Job(ep=2),
    "shared, after a dense layer, ZeRO-1, EP 4": mixture.Job(ep=4, dense=1, zero1=True),
    "checkpoints, slots, EP 2": mixture.Job(ep=2, factor=0.5, checkpoints=True),
    "checkpoints, dropless, shared, sequence parallel, EP 2": mixture.Job(ep=2, dense=0, checkpoints=True, sequence_parallel=True),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("job", MIXTURES.values(), ids=MIXTURES)
def test_a_recorded_mixture_does_what_the_formulas_say(job: mixture.Job):
    sizes = dict(gated=True, rope=True, norm="rms", experts=job.experts, top_k=2, expert_ffn=job.ffn)
    more = {} if job.dense is None else dict(shared_experts=1, dense_layers=job.dense)
    model = Transformer("tiny", job.layers, job.hidden, job.heads, 2 * job.ffn, job.vocabulary, **sizes, **more)
    dp = 16 // job.tp
    work = transformer_work(
        model,
        seq=job.seq,
        global_batch=dp * job.batch,
        micro_batch=job.batch,
        tp=job.tp,
        dp=dp,
        ep=job.ep,
        capacity_factor=job.factor,
        sequence_parallel=job.sequence_parallel,
        zero1=job.zero1,
        recompute="full" if job.checkpoints else "none",
        precision="float32",
        reduce_dtype="float32",
    )
    found, sent = recorded_mixture(job)
    attention = 4 * job.batch * job.seq**2 * job.hidden // job.tp * job.layers
    # without a capacity the graph has the rows of all ranks in it, and the loop over blocks ends where those of a rank's own experts do
    experts = next(p.flops for p in work.phases if p.name == "experts")
    unseen = experts * (job.ep - 1) if job.factor is None else 0
    assert found.flops == sum(work.flops.values()) + attention + unseen
    expected = {(c.kind, c.axes): c.bytes for c in summary((*work.collectives, *work.reductions))}
    seen = {(c.kind, c.axes): c.bytes for c in sent}
    data = tuple(axis for axis in ("dp", "ep") if work.axes.get(axis, 1) > 1)
    # what the gradients' norm adds up: squares of divided parameters and of copies, those of experts apart if ranks hold different ones
    norm = {
        ("all-reduce", ("tp",)): 16 if job.ep > 1 else 8,
        ("all-reduce", data if job.zero1 else ("ep",)): 4 if job.zero1 or job.ep > 1 else 0,
    }
    assert {key: size for key, size in seen.items() if size} == {
        key: total for key in {*expected, *norm} if (total := expected.get(key, 0) + norm.get(key, 0))
    }


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (dict(tp=3), r"32 heads of Llama 2 7B cannot be shared out to tp=3 ranks"),
        (dict(dp=3), r"global_batch=64 is no multiple of dp \* micro_batch = 3 \* 1"),
        (dict(pp=64), r"pp=64 stages for 32 layers"),
        (
            dict(pp=16, schedule="interleaved", chunks=3),
            r"48 stages \(pp=16, 3 chunks each\) for 32 layers of Llama 2 7B; a stage has at least one",
        ),
        (dict(pp=4, schedule="zbw"), r"there is no pipeline schedule 'zbw' \(did you mean 'zbv'\?\)"),
        (dict(pp=4, schedule=schedules.make("1f1b", 2, 64)), r"the schedule 1f1b has 2 stages on 2 ranks, the layout pp=4"),
        (dict(pp=4, schedule=schedules.make("1f1b", 4, 8)), r"1f1b is for 8 micro-batches, and the step has num_microbatches=64"),
        (dict(dp=0), r"sizes are at least 1, got {'dp': 0}"),
        (dict(recompute="some"), r"recompute='some' must be one of 'none', 'selective', 'full'"),
        (dict(ep=2), "Llama 2 7B has no experts; leave out ep and capacity_factor"),
        (dict(capacity_factor=1.0), "Llama 2 7B has no experts; leave out ep and capacity_factor"),
        (dict(precision="float8"), r"'float8' is no dtype that is known here; use one of 'bfloat16', 'float32'"),
    ],
)
def test_layouts_that_make_no_sense(wrong: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        transformer_work(LLAMA2_7B, **{**LLAMA, **wrong})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (dict(dp=4, ep=3), "ep=3 must divide dp=4: expert-parallel ranks are data-parallel ranks that hold different experts"),
        (dict(dp=16, ep=16), "8 experts of Mixtral 8x7B cannot be shared out to ep=16 ranks; ep must divide them"),
    ],
)
def test_experts_that_cannot_be_shared_out(wrong: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        transformer_work(MIXTRAL_8X7B, **{**LLAMA, **wrong})


def test_sizes_that_make_no_sense():
    with pytest.raises(ValueError, match="top_k=9 must be in 1..8, the number of experts"):
        dataclasses.replace(MIXTRAL_8X7B, top_k=9)
    with pytest.raises(
        ValueError, match="top_k, expert_ffn, shared_experts and dense_layers are of models with experts; give experts, too"
    ):
        dataclasses.replace(LLAMA2_7B, dense_layers=1)
    with pytest.raises(ValueError, match="dense_layers=33 of 32 layers"):
        dataclasses.replace(MIXTRAL_8X7B, dense_layers=33)
    with pytest.raises(ValueError, match="norm='batch' must be one of 'rms', 'layer'"):
        dataclasses.replace(LLAMA2_7B, norm="batch")
    with pytest.raises(ValueError, match="stages=0 and microbatches=1 must both be at least 1"):
        Work("", {"tp": 1}, (), stages=0)


# -- the rule -----------------------------------------------------------------------------------------

CORE = NODE.peak_flops_per_core(), 128 * (1.12e9 + 1.4e9), NODE.hbm_bandwidth_per_core


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_phase_takes_as_long_as_its_slowest_engine(limit: int):
    seconds = [0.5, 0.5, 0.5]
    seconds[limit] = 2.0
    flops, elements, size = (s * rate for s, rate in zip(seconds, CORE, strict=True))
    result = estimate(Work("one", {"tp": 1}, (Phase("all", flops, elements, size),)), NODE, constants=PEAK)
    (term,) = result.terms
    assert term.seconds == pytest.approx(2.0) and term.limit == ("tensor", "vector", "memory")[limit]
    assert result.seconds == result.peak_seconds == pytest.approx(result.overlapped_seconds)


def test_constants_make_each_engine_slower():
    phases = tuple(Phase(str(i), *(rate if i == j else 0.0 for j, rate in enumerate(CORE))) for i in range(3))
    result = estimate(Work("three", {"tp": 1}, phases), NODE)
    assert [t.seconds for t in result.terms] == pytest.approx([1 / 0.9, 1 / 0.9, 1 / 0.6])
    assert result.seconds == pytest.approx(2 / 0.9 + 1 / 0.6)
    assert result.peak_seconds == pytest.approx(3.0) and result.overlapped_seconds == pytest.approx(1.0)
    assert result.utilisation == pytest.approx(1 / result.seconds)


def test_logical_cores_of_two_have_twice_the_engines():
    work = Work("one", {"tp": 1}, (Phase("all", elements=1e12),))
    one, two = (estimate(work, Topology("trn2.48xlarge", lnc=lnc)).seconds for lnc in (1, 2))
    assert one == pytest.approx(2 * two) and one == pytest.approx(1e12 / (128 * 2.16e9 * 0.9))


def test_a_collective_takes_its_hops_the_busiest_link_and_the_network():
    gather = Collective(kind="all-gather", axes=("tp",), ranks=8, count=10, bytes=10 * 2**20)
    reduce = Collective(kind="all-reduce", axes=("dp",), ranks=8, count=1, bytes=2**20)
    work = Work("two", {"dp": 8, "tp": 8}, (), (gather,), reductions=(reduce,))
    within, between = estimate(work, Topology("trn1.32xlarge", nodes=2)).terms
    assert within.latency == pytest.approx(10 * 7 * 2e-6)
    assert within.wire == pytest.approx(7 * 10 * 2**20 / 96e9 / DOCUMENTED.wire)
    assert between.once and between.latency == pytest.approx(2 * (3 * 2e-6 + 15e-6))
    links = 2 * (3 / 4) * 2**20 * 2 / 96e9  # two groups on each link
    network = 32 * 2 * (1 / 2) * 2**20 / 4 / 1e11
    assert between.wire == pytest.approx((links + network) / DOCUMENTED.wire)
    assert between.seconds == between.wire + between.latency


def test_groups_that_are_not_known_take_one_link():
    odd = Collective(kind="all-reduce", axes=("tp",), ranks=2, count=1, bytes=96 * 10**6)
    (term,) = estimate(Work("odd", {"tp": 8}, (), (odd,)), NODE, constants=PEAK).terms
    assert term.wire == pytest.approx(1e-3)


def test_the_bubble_lengthens_the_micro_batches_and_not_the_update():
    phase = Phase("all", CORE[0])
    work = Work("pipe", {"pp": 4}, (phase,), update=(dataclasses.replace(phase, name="optimizer"),), stages=4, microbatches=6)
    result = estimate(work, NODE, constants=PEAK)
    assert [(t.name, t.seconds) for t in result.terms] == [("all", 1.0), ("pipeline bubble", 0.5), ("optimizer", 1.0)]
    assert result.overlapped_seconds == pytest.approx(2.5)
    assert "optimizer, once" in str(result)


def test_machines_that_do_not_do():
    with pytest.raises(ValueError, match=r"for 64 cores, .* has 32; take more nodes"):
        estimate(transformer_work(LLAMA2_7B, tp=8, dp=8, **LLAMA), NODE)
    with pytest.raises(ValueError, match=r"no document states a network for trn2.3xlarge; choose an instance with EFA"):
        estimate(transformer_work(BERT_LARGE, dp=8, seq=128, global_batch=64), Topology("trn2.3xlarge", nodes=2))
    with pytest.raises(ValueError, match="Trainium1 has no documented peak for float64"):
        estimate(Work("", {"tp": 1}, (Phase("all", 1.0, dtype="float64"),)), NODE)


def test_shown_and_saved():
    result = estimate(transformer_work(LLAMA2_7B, tp=8, dp=4, **LLAMA), NODE)
    text = str(result)
    for part in ("linear layers", "all-gather along tp", "all-reduce along tp, once", "sequences/s", "at their peaks", "1 x trn1.32xlarge"):
        assert part in text
    assert "<table" in result._repr_html_()
    assert json.loads(json.dumps(plain(result)))["terms"][0]["name"] == "linear layers"
    assert result.overlapped_seconds < result.peak_seconds < result.seconds
    assert sum(t.seconds for t in result.terms) == result.seconds


# -- the page -----------------------------------------------------------------------------------------


def test_the_page_has_what_comes_out_now():
    page = (ROOT / "docs" / "explanation" / "estimate.md").read_text()
    assert published.filled(page) == page, "docs/explanation/estimate.md is out of date: python benchmarks/published.py --write"
    with pytest.raises(ValueError, match=r"must have the marks <!-- published: begin --> and <!-- published: end --> once"):
        published.filled("no marks")


def test_the_median_error_is_within_a_quarter_and_no_constant_is_fitted():
    rows = published.compared()
    assert len(rows) == 17 and published.median_error(rows) < 0.25
    assert {c.estimate.constants for c in rows} == {DOCUMENTED}


def test_the_bound_is_a_bound():
    """Nothing that was measured is faster than the machine could be by this."""
    assert all(c.overlapped > c.row.throughput for c in published.compared())

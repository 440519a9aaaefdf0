"""The collectives of a Llama step on TP 8 x DP 4 are those that arithmetic predicts, row by row."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest
import torch

import nxd_jax
from nxd_jax import inspect
from nxd_jax.inspect.collectives import Collective
from tests.nxd_jax.inspect.llama import Job

DP = 4
JOBS = {
    "plain": Job(),
    "sequence-parallel": Job(sequence_parallel=True),
    "zero1": Job(zero1=True),
    "sequence-parallel-zero1": Job(sequence_parallel=True, zero1=True),
    "checkpoints": Job(sequence_parallel=True, zero1=True, checkpoints=True),
    "float32, 3 layers": Job(layers=3, dtype=torch.float32, batch=1),
}


def predicted(job: Job) -> Counter[tuple[Any, ...]]:
    """What Megatron's tensor parallelism, ZeRO-1 and gradient clipping send, worked out from the sizes."""
    tokens = job.batch * job.seq
    name = str(job.dtype).removeprefix("torch.")
    whole, part = tokens * job.hidden, tokens * job.hidden // job.tp
    rows: Counter[tuple[Any, ...]] = Counter()
    sizes: dict[tuple[Any, ...], int] = {}

    def send(kind: str, axis: str, dtype: str, phase: str, module: str, elements: int, times: int = 1) -> None:
        key = kind, (axis,), dtype, phase, module
        rows[key] += times
        sizes[key] = sizes.get(key, 0) + times * elements * {"bfloat16": 2, "float32": 4}[dtype]

    reduce = "reduce-scatter" if job.sequence_parallel else "all-reduce"
    again = 2 if job.checkpoints else 1  # a checkpointed layer gathers once more when its forward pass is recomputed
    layers = [f"model.layers.{i}" for i in range(job.layers)]
    # row-parallel layers reduce their results in float32 (NxD's reduce_dtype), the embedding in its own dtype
    send(reduce, "tp", name, "forward", "model.embed_tokens", whole)
    for layer in layers:
        for module in ("self_attn.o_proj", "mlp.down_proj"):
            send(reduce, "tp", "float32", "forward", f"{layer}.{module}", whole)
        if job.checkpoints:  # the first reduction of a layer is made again for the MLP; nothing needs the second
            send(reduce, "tp", "float32", "backward", f"{layer}.self_attn.o_proj", whole)
    # column-parallel layers reduce the gradients of their inputs
    for module in ["lm_head", *(f"{layer}.{m}" for layer in layers for m in ("self_attn.qkv_proj", "mlp.gate_up_proj"))]:
        send(reduce, "tp", "float32", "backward", module, whole)
        if job.sequence_parallel:  # and gather their inputs, again for the gradients of their weights
            send("all-gather", "tp", name, "forward", module, part)
            send("all-gather", "tp", name, "backward", module, part, 1 if module == "lm_head" else again)
    if job.sequence_parallel:  # gradients of what was scattered are gathered
        for module in ["model.embed_tokens", *(f"{layer}.{m}" for layer in layers for m in ("self_attn.o_proj", "mlp.down_proj"))]:
            send("all-gather", "tp", name, "backward", module, part)
    # parallel cross entropy: the largest logit; the target's logit with the sum of exponentials
    send("all-reduce", "tp", "float32", "forward", "LlamaForCausalLM", tokens)
    send("all-reduce", "tp", "float32", "forward", "LlamaForCausalLM", 2 * tokens)
    shapes = job.shapes()
    elements = {module: math.prod(shape) for module, shape in shapes.items()}
    if job.zero1:  # gradients in float32, padded to a multiple of the ranks; updated weights in their own dtype
        send("reduce-scatter", "dp", "float32", "outside", "", sum(elements.values()))
        send("all-gather", "dp", name, "outside", "", sum(elements.values()) // DP)
        send("all-reduce", "dp", "float32", "outside", "", 1)  # the gradients' norm
    else:
        send("all-reduce", "dp", name, "outside", "", sum(elements.values()), 1)
        rows["all-reduce", ("dp",), name, "outside", ""] = len(elements)
    if job.sequence_parallel:  # norms see a part of the sequence each
        for module in shapes:
            if "norm" in module:
                send("all-reduce", "tp", "float32" if job.zero1 else name, "outside", "", job.hidden)
    send("all-reduce", "tp", "float32", "outside", "", 2)  # squares for the norm: of parameters that are divided, and of copies
    return Counter({(*key, sizes[key]): count for key, count in rows.items()})


def found(table: inspect.Table[Collective]) -> Counter[tuple[Any, ...]]:
    """Rows without their source lines."""
    counts: Counter[tuple[Any, ...]] = Counter()
    sizes: Counter[tuple[Any, ...]] = Counter()
    for c in table:
        key = c.kind, c.axes, c.dtype, c.phase, c.module
        counts[key] += c.count
        sizes[key] += c.bytes
    return Counter({(*key, sizes[key]): count for key, count in counts.items()})


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("name", JOBS)
def test_rows_are_what_arithmetic_predicts(name: str) -> None:
    job = JOBS[name]
    with nxd_jax.abstract_run(job.tp * DP):
        job.step(*job.build())
        step = inspect.look()
        assert found(step.collectives) == predicted(job)
        for c in step.collectives:
            assert c.ranks == {"tp": job.tp, "dp": DP}[c.axes[0]]
            assert c.line.startswith("modeling_llama_nxd.py:") == bool(c.module)
            assert c.line.startswith("llama.py:") != bool(c.module)


def test_layers_in_a_loop_count_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folded program's table has stars for the numbers of layers, and the same sums."""
    job = Job(layers=4, sequence_parallel=True)
    tables = []
    for fold in ("0", "2"):
        monkeypatch.setenv("NXD_JAX_FOLD", fold)
        with nxd_jax.abstract_run(job.tp * DP):
            job.step(*job.build())
            tables.append(inspect.look().collectives)
    plain, folded = tables
    assert any(c.module == "model.layers.*.mlp.down_proj" for c in folded)

    def sums(table: inspect.Table[Collective]) -> dict[Any, int]:
        total: Counter[Any] = Counter()
        for c in table:
            total[c.kind, c.axes, c.dtype, c.phase, re.sub(r"\.[0-9*]+\.", ".*.", c.module)] += c.bytes
        return dict(total)

    assert sums(folded) == sums(plain)


def test_bytes_on_the_wire() -> None:
    rows = {
        kind: Collective(kind, ("tp",), 8, 1, 800).wire_bytes
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute")
    }
    assert rows == {"all-reduce": 1400, "all-gather": 5600, "reduce-scatter": 700, "all-to-all": 700, "permute": 800}


def test_one_rank_sends_nothing() -> None:
    step = inspect.look(torch.nn.Linear(4, 4), torch.zeros(2, 4))
    assert not step.collectives.rows
    assert str(step.collectives) == "Collectives\n(nothing)\nno rank communicates"

"""The memory of one core in a training step, by arithmetic: what stays, and the activations of the micro-batches on their way.

Of a layer and a token, with h hidden, q, kv, f the widths of attention and MLP on a core, the forward pass keeps: 4 h (shared out with sequence
parallelism), 2 q + 2 kv, and 4 f (without a gate 2 f); without blockwise attention also the probabilities of all heads. What is computed again is not
kept, and is there for one layer at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from nxd_jax.inspect.estimate.experts import rows
from nxd_jax.inspect.estimate.layout import Layout
from nxd_jax.topology import Topology
from nxd_jax.training.config.setup import Setup, in_flight, kv_width

MOMENTS = {"sgd": 0, "adafactor": 0, "adagrad": 1, "rmsprop": 1}
"""Values that optimizers keep of each parameter; others keep two."""

SLACK = 0.9
"""Part of a core's memory that a layout may fill: programs, collectives and fragments take the rest."""


@dataclass(frozen=True)
class Memory:
    """Bytes on a core of the stage that takes most. stage: which. activations: of all micro-batches on their way. working: of the layer that is computed."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    hbm: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working

    @property
    def fits(self) -> bool:
        return self.total <= SLACK * self.hbm


def of(setup: Setup, topology: Topology) -> Memory:
    """Of the stage that takes most."""
    stages = sorted({0, setup.pp - 1, max(range(setup.pp), key=lambda k: setup.stages[k])})
    return max((_of_stage(setup, k, topology.hbm_per_core) for k in stages), key=lambda m: m.total)


def checkpoint_bytes(setup: Setup) -> float:
    """Bytes of a checkpoint: weights, and the optimizer's state once."""
    m = setup.model
    count = m.parameters + setup.positions * m.hidden
    states = MOMENTS.get(setup.optimizer, 2) * _state_size(setup) + (4 if setup.masters else 0)
    return count * (setup.itemsize + states)


def parameters(setup: Setup, stage: int) -> tuple[float, float]:
    """On a core of a stage: those of routed experts, and others."""
    m, layers = setup.model, setup.stages[stage]
    q, kv = m.q_size / setup.tp, kv_width(setup)
    others = layers * (m.hidden * (q + 2 * kv) + q * m.hidden + 2 * m.hidden)
    routed = layers * (m.layers - m.dense_layers) / m.layers if m.experts else 0
    of_experts = routed * m.experts / setup.ep * m.mlp_parameters(m.expert_width) / setup.tp
    others += routed * m.experts * m.hidden + (layers - routed) * m.mlp_parameters(m.ffn) / setup.tp
    if stage == 0:
        others += setup.positions * m.hidden
    table = m.vocabulary * m.hidden / setup.tp
    last = stage == setup.pp - 1
    others += table * ((stage == 0) + (last and not (m.tied and setup.pp == 1)))
    return of_experts, others + (m.hidden if last else 0)


def _of_stage(setup: Setup, stage: int, hbm: float) -> Memory:
    of_experts, others = parameters(setup, stage)
    count = of_experts + others
    shares = setup.dp * setup.cp if setup.zero1 else 1
    mine = others / shares + of_experts / (shares / setup.ep if setup.zero1 else 1)
    copies = (4 if setup.masters else setup.itemsize) if setup.zero1 else 0
    states = MOMENTS.get(setup.optimizer, 1 if setup.optimizer == "sgd" and setup.momentum else 2) * _state_size(setup)
    kept, once = _layer(setup)
    return Memory(
        stage=stage,
        weights=count * setup.itemsize,
        gradients=count * (4 if setup.wide_gradients else setup.itemsize),
        optimizer=mine * (copies + states),
        activations=in_flight(setup, stage) * setup.stages[stage] * kept,
        working=max(once, _logits(setup) if stage == setup.pp - 1 else 0.0),
        hbm=hbm,
    )


def _state_size(setup: Setup) -> int:
    return 4 if setup.masters or setup.itemsize == 4 or setup.optimizer == "adamw_fp32OptState" else 2


def _logits(setup: Setup) -> float:
    """Logits, and in float32 those and their gradient."""
    return setup.tokens * setup.model.vocabulary / setup.tp * (setup.itemsize + 8)


def _layer(setup: Setup) -> tuple[float, float]:
    """Bytes that a layer keeps of a micro-batch, and bytes that are there while it is computed."""
    m, t, e = setup.model, setup.tokens, setup.itemsize
    shared = t * m.hidden / setup.sp
    q, kv = t * m.q_size / setup.tp, t * kv_width(setup)
    parts = {"inputs": 2 * shared, "norms": 2 * shared, "attention": 2 * q + 2 * kv, "scores": _scores(setup) / e, **_mlp(setup)}
    gone = {name for name, found in _DROPPED.items() if setup.recomputed and set(found) & set(setup.recomputed)}
    if setup.flash or "CoreAttention" in setup.recomputed:
        gone.add("scores")
    gathered = 2 * t * m.hidden
    once = sum(parts[name] for name in gone if not (name == "scores" and setup.flash)) + gathered
    if setup.full:
        return e * shared, e * (sum(v for name, v in parts.items() if not (name == "scores" and setup.flash)) + gathered)
    return e * sum(v for name, v in parts.items() if name not in gone), e * once


_DROPPED = {
    "norms": ("LlamaRMSNorm", "MixtralRMSNorm"),
    "wide": ("LlamaMLP", "MoE", "NeuronSwitchMLP"),
    "product": ("LlamaMLP", "ActivationMultiplyMLP", "MoE", "NeuronSwitchMLP"),
    "rows": ("MoE", "NeuronSwitchMLP"),
}
"""What recomputing a module of these names takes off."""


def _scores(setup: Setup) -> float:
    """Bytes of attention probabilities, in float32 and in the dtype of activations."""
    return setup.model.heads / setup.tp * setup.tokens * setup.seq * (4 + setup.itemsize)


def _mlp(setup: Setup) -> dict[str, float]:
    """Values of the MLP, or of experts and the rows that are sent to them."""
    m = setup.model
    if not m.experts:
        f = setup.tokens * m.ffn / setup.tp
        return {"wide": (2 if m.gated else 1) * f, "product": (2 if m.gated else 1) * f}
    sent = rows(m, layout(setup))
    f = sent * m.expert_width / setup.tp
    return {"wide": 2 * f, "product": 2 * f, "rows": 2.0 * sent * m.hidden}


def layout(setup: Setup) -> Layout:
    """As the formulas of `nxd_jax.inspect.estimate` take it."""
    return Layout(
        seq=setup.seq,
        tokens=setup.tokens,
        microbatches=setup.microbatches,
        tp=setup.tp,
        pp=setup.pp,
        dp=setup.dp,
        sp=setup.sp,
        e=setup.itemsize,
        dtype="float32" if setup.itemsize == 4 else "bfloat16",
        flash=setup.flash,
        layer_recompute=setup.full,
        attention_recompute=setup.full or "CoreAttention" in setup.recomputed,
        reduce_size=4 if setup.reduce_float32 else setup.itemsize,
        gradient_size=4 if setup.wide_gradients else setup.itemsize,
        state_bytes=0.0,
        zero1=setup.zero1,
        chunks=setup.vpp,
        ep=setup.ep,
        capacity_factor=setup.capacity_factor,
    )

"""The formulas of `transformer_work`: what a core computes and sends, from sizes and layout."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.estimate.models import Transformer
from nxd_jax.inspect.estimate.work import Phase

NORM_PASSES = {"rms": 3, "layer": 4}
"""Passes over the hidden states for a norm: statistics, scaling, weight, and for LayerNorm the mean."""
ROPE_PASSES = 3
"""Passes over q and k: times the cosine, times the sine, their sum."""
DROPOUT_PASSES = 2
"""Drawing the mask and applying it."""
SOFTMAX_PASSES = 4
"""Passes over attention scores: scale and mask (as they leave the accumulators), maximum, exponential with its sum, division."""
SCORE_TOUCHES = 4, 7
"""How often scores or probabilities go to or from HBM, forward and backward, if attention is not blockwise: written by the product, read and written by
the softmax, read by the product; backward: probabilities read and their gradient written by products, both read and one written by the softmax, read by two."""
LOSS_PASSES = 4
"""Passes over the logits: maximum, exponential with its sum, and two for the gradient."""
OPTIMIZER_PASSES = 12
"""Passes over each parameter for AdamW: two moments, bias corrections, root, division, decay, update, norm of the gradient, casts."""


@dataclass(frozen=True)
class Layout:
    """What the arithmetic needs besides the sizes. tokens: of a micro-batch. sp: ranks that share the norms and residuals. e: bytes of an activation. chunks:
    stages of a pipeline rank.
    """

    seq: int
    tokens: int
    microbatches: int
    tp: int
    pp: int
    dp: int
    sp: int
    e: int
    dtype: str
    flash: bool
    layer_recompute: bool
    attention_recompute: bool
    reduce_size: int
    gradient_size: int
    state_bytes: float
    zero1: bool
    chunks: int = 1


def repeated(p: Phase, n: int) -> Phase:
    """A phase n times."""
    return Phase(p.name, n * p.flops, n * p.elements, n * p.bytes, p.dtype)


# -- what a core computes, for one micro-batch --------------------------------------------------------


def _kv(m: Transformer, lay: Layout) -> float:
    """Width of k on a core; a head at least."""
    return max(m.kv_size / lay.tp, m.q_size / m.heads)


def _widths(m: Transformer, lay: Layout) -> tuple[float, float]:
    """Of a core, all matrices of a layer together: parameters, and columns of their outputs."""
    q, kv, f, h = m.q_size / lay.tp, _kv(m, lay), m.ffn / lay.tp, m.hidden
    first = (2 if m.gated else 1) * f
    return h * (q + 2 * kv) + q * h + h * first + f * h, (q + 2 * kv) + h + first + h


def linear(m: Transformer, lay: Layout) -> Phase:
    """The matrix products with weights of a layer. Their results leave the accumulators in one pass of the vector engines."""
    weights, outputs = _widths(m, lay)
    inputs = 2 * m.hidden + m.q_size / lay.tp + m.ffn / lay.tp
    again = lay.layer_recompute * (weights - m.hidden * m.ffn / lay.tp)  # nothing needs the layer's last product again
    operands = (3 + lay.layer_recompute) * (inputs + outputs) * lay.tokens * lay.e
    reads = (2 * weights + again) * lay.e
    gradients = weights * (lay.e + 2 * lay.gradient_size)  # written by the product, then added to what is there
    evicted = lay.tokens * (outputs * (1 + lay.layer_recompute) + inputs) + weights
    return Phase("linear layers", 2 * lay.tokens * (3 * weights + again), evicted, operands + reads + gradients, lay.dtype)


def attention(m: Transformer, lay: Layout) -> Phase:
    """Everything between the projections: the rotation of q and k, scores, softmax, the values' average."""
    q, kv = m.q_size / lay.tp, _kv(m, lay)
    scores = m.heads / lay.tp * lay.seq * lay.tokens
    forward, backward = 1 + lay.attention_recompute, 2.5 if lay.flash else 2.0
    dropout = DROPOUT_PASSES if m.dropout else 0
    softmax = (forward + (1 if lay.flash else 0)) * (SOFTMAX_PASSES + dropout) + SOFTMAX_PASSES + dropout
    moved = 0.0 if lay.flash else scores * (forward * (SCORE_TOUCHES[0] + dropout) + SCORE_TOUCHES[1] + dropout) * lay.e
    ends = lay.tokens * (2 * q + 2 * kv) * lay.e * (forward + 2)
    rope = lay.tokens * (q + kv) * (1 + lay.layer_recompute + 1) if m.rope else 0.0
    flops = 4 * lay.tokens * lay.seq * q * (forward + backward)
    return Phase("attention", flops, scores * softmax + ROPE_PASSES * rope, moved + ends + 2 * lay.e * rope, lay.dtype)


def elementwise(m: Transformer, lay: Layout) -> Phase:
    """Norms, residuals, dropout and the activation function of a layer; the backward pass does twice as much as the forward pass."""
    shared = lay.tokens * m.hidden / lay.sp
    wide = lay.tokens * m.ffn / lay.tp
    dropout = DROPOUT_PASSES if m.dropout else 0
    passes = 2 * shared * (NORM_PASSES[m.norm] + 1 + dropout) + wide * (2 if m.gated else 1)
    touched = 2 * shared * (2 + 3) + wide * (3 if m.gated else 2)
    times = 3 + lay.layer_recompute
    return Phase("norms, residuals, activation", 0.0, times * passes, times * touched * lay.e, lay.dtype)


def head(m: Transformer, lay: Layout) -> Phase:
    """The head and the loss, with float32 logits."""
    weights = m.hidden * m.vocabulary / lay.tp + m.head_hidden * m.hidden**2 / lay.tp
    logits = lay.tokens * m.vocabulary / lay.tp
    moved = logits * (2 * 4 + 4 * lay.e) + 3 * lay.tokens * m.hidden * lay.e + weights * (3 * lay.e + 2 * lay.gradient_size)
    return Phase("head and loss", 3 * 2 * lay.tokens * weights, logits * (1 + LOSS_PASSES), moved, lay.dtype)


def _held(m: Transformer, lay: Layout, layers: int) -> float:
    """Parameters on a core: its layers, and the embedding or the head (both without a pipeline, unless they are tied)."""
    tables = 1 if m.tied or lay.pp > 1 else 2
    return layers * _widths(m, lay)[0] + (tables * m.vocabulary * m.hidden + m.head_hidden * m.hidden**2) / lay.tp + _norms(m, layers)


def _norms(m: Transformer, layers: int) -> int:
    """Weights of norms on a core; every rank has them whole."""
    return (2 * layers + 1) * m.hidden


def optimizer(m: Transformer, lay: Layout, layers: int) -> Phase:
    """The update of the parameters that a core is responsible for, once a step."""
    mine = _held(m, lay, layers) / (lay.dp if lay.zero1 else 1)
    return Phase("optimizer", 0.0, mine * OPTIMIZER_PASSES, mine * lay.state_bytes, "float32")


# -- what a core sends --------------------------------------------------------------------------------


def _collective(kind: str, axis: str, ranks: int, count: float, each: float, dtype_size: int) -> list[Collective]:
    dtype = {2: "bfloat16", 4: "float32"}[dtype_size]
    if ranks < 2 or not count:
        return []
    return [Collective(kind=kind, axes=(axis,), ranks=ranks, count=round(count), bytes=round(count * each * dtype_size), dtype=dtype)]


def along_tp(m: Transformer, lay: Layout, layers: int) -> list[Collective]:
    """What tensor and sequence parallelism send in all micro-batches of a step."""
    tp, n, values = lay.tp, lay.microbatches, lay.tokens * m.hidden
    again = lay.layer_recompute
    loss = _collective("all-reduce", "tp", tp, 3 * n, lay.tokens, 4)
    kind = "all-reduce" if lay.sp == 1 else "reduce-scatter"
    embedded = lay.pp == 1  # the last of several stages has no embedding
    gathers = 0 if lay.sp == 1 else layers * (6 + 2 * again) + 2 + embedded
    return [
        *_collective("all-gather", "tp", tp, n * gathers, values / tp, lay.e),
        *_collective(kind, "tp", tp, n * (layers * (4 + again) + 1), values, lay.reduce_size),
        *_collective(kind, "tp", tp, n * embedded, values, lay.e),
        *loss,
    ]


def along_pp(m: Transformer, lay: Layout) -> list[Collective]:
    """Activations and their gradients between stages, in a step."""
    return _collective("permute", "pp", lay.pp, 2 * lay.chunks * lay.microbatches, lay.tokens * m.hidden / lay.sp, lay.e)


def reductions(m: Transformer, lay: Layout, layers: int) -> list[Collective]:
    """What happens once a step: gradients are added up, updated weights gathered."""
    held = _held(m, lay, layers)
    norms = _collective("all-reduce", "tp", lay.tp, 1, _norms(m, layers), lay.gradient_size) if lay.sp > 1 else []
    if not lay.zero1:
        return [*norms, *_collective("all-reduce", "dp", lay.dp, 1, held, lay.gradient_size)]
    return [
        *norms,
        *_collective("reduce-scatter", "dp", lay.dp, 1, held, lay.gradient_size),
        *_collective("all-gather", "dp", lay.dp, 1, held / lay.dp, lay.e),
    ]

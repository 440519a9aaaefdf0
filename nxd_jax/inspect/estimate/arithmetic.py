"""The formulas of `transformer_work`: what a core computes and sends, from sizes and layout."""

from __future__ import annotations

from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.estimate import experts
from nxd_jax.inspect.estimate.layout import Layout, Products, collective, phase_of
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


# -- what a core computes, for one micro-batch --------------------------------------------------------


def _kv(m: Transformer, lay: Layout) -> float:
    """Width of k on a core; a head at least."""
    return max(m.kv_size / lay.tp, m.q_size / m.heads)


def _widths(m: Transformer, lay: Layout) -> tuple[float, float, float]:
    """Of a core, the matrices of a layer's attention together: parameters, columns of their outputs, and of their inputs."""
    q, kv, h = m.q_size / lay.tp, _kv(m, lay), m.hidden
    return h * (q + 2 * kv) + q * h, (q + 2 * kv) + h, h + q


def linear(m: Transformer, lay: Layout, width: int) -> Phase:
    """The matrix products with weights of a layer: of its attention, and of an MLP of a width (0: there is none)."""
    weights, outputs, inputs = _widths(m, lay)
    f = width / lay.tp
    if width:
        weights += m.mlp_parameters(width) / lay.tp
        outputs += (2 if m.gated else 1) * f + m.hidden
        inputs += m.hidden + f
    again = lay.layer_recompute * (weights - m.hidden * f)  # nothing needs the layer's last product again
    return phase_of("linear layers", lay, lay.tokens, Products(weights, weights, outputs, inputs, again, again))


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


def elementwise(m: Transformer, lay: Layout, wide: float) -> Phase:
    """Norms, residuals, dropout and the activation function of a layer; the backward pass does twice as much as the forward pass. wide: values between the two
    products of its MLP."""
    shared = lay.tokens * m.hidden / lay.sp
    dropout = DROPOUT_PASSES if m.dropout else 0
    passes = 2 * shared * (NORM_PASSES[m.norm] + 1 + dropout) + wide * (2 if m.gated else 1)
    touched = 2 * shared * (2 + 3) + wide * (3 if m.gated else 2)
    times = 3 + lay.layer_recompute
    return Phase("norms, residuals, activation", 0.0, times * passes, times * touched * lay.e, lay.dtype)


def layer(m: Transformer, lay: Layout, with_experts: bool) -> list[Phase]:
    """All of a layer."""
    if not with_experts:
        return [linear(m, lay, m.ffn), attention(m, lay), elementwise(m, lay, lay.tokens * m.ffn / lay.tp)]
    shared = m.shared_experts * m.expert_width
    wide = (experts.rows(m, lay) * m.expert_width + lay.tokens * shared) / lay.tp
    routed = [experts.routed(m, lay), experts.dispatched(m, lay), experts.computed(m, lay)]
    return [linear(m, lay, shared), attention(m, lay), *routed, elementwise(m, lay, wide)]


def head(m: Transformer, lay: Layout) -> Phase:
    """The head and the loss, with float32 logits."""
    weights = m.hidden * m.vocabulary / lay.tp + m.head_hidden * m.hidden**2 / lay.tp
    logits = lay.tokens * m.vocabulary / lay.tp
    moved = logits * (2 * 4 + 4 * lay.e) + 3 * lay.tokens * m.hidden * lay.e + weights * (3 * lay.e + 2 * lay.gradient_size)
    return Phase("head and loss", 3 * 2 * lay.tokens * weights, logits * (1 + LOSS_PASSES), moved, lay.dtype)


def _held(m: Transformer, lay: Layout, layers: int) -> tuple[float, float]:
    """Parameters on a core, of routed experts and others: its layers, and the embedding or the head (both without a pipeline, unless they are tied)."""
    tables = 1 if m.tied or lay.pp > 1 else 2
    with_experts = experts.layers_with_experts(m, layers)
    mlps = (layers - with_experts) * m.ffn + with_experts * m.shared_experts * m.expert_width
    others = (
        layers * _widths(m, lay)[0] + (m.mlp_parameters(mlps) + tables * m.vocabulary * m.hidden + m.head_hidden * m.hidden**2) / lay.tp
    )
    return with_experts * experts.held(m, lay), others + _norms(m, layers) + with_experts * m.experts * m.hidden


def _norms(m: Transformer, layers: int) -> int:
    """Weights of norms on a core; every rank has them whole."""
    return (2 * layers + 1) * m.hidden


def optimizer(m: Transformer, lay: Layout, layers: int) -> Phase:
    """The update of the parameters that a core is responsible for, once a step."""
    of_experts, others = _held(m, lay, layers)
    mine = of_experts / (lay.dp // lay.ep) + others / lay.dp if lay.zero1 else of_experts + others
    return Phase("optimizer", 0.0, mine * OPTIMIZER_PASSES, mine * lay.state_bytes, "float32")


# -- what a core sends --------------------------------------------------------------------------------


def along_tp(m: Transformer, lay: Layout, layers: int) -> list[Collective]:
    """What tensor and sequence parallelism send in all micro-batches of a step."""
    tp, n, values = lay.tp, lay.microbatches, lay.tokens * m.hidden
    again = lay.layer_recompute
    with_experts = experts.layers_with_experts(m, layers)
    dense = layers - with_experts
    loss = collective("all-reduce", ("tp",), tp, 3 * n, lay.tokens, 4)
    kind = "all-reduce" if lay.sp == 1 else "reduce-scatter"
    embedded = lay.pp == 1  # the last of several stages has no embedding
    gathers = 0 if lay.sp == 1 else dense * (6 + 2 * again) + 2 + embedded
    return [
        *collective("all-gather", ("tp",), tp, n * gathers, values / tp, lay.e),
        *collective(kind, ("tp",), tp, n * (dense * (4 + again) + 1), values, lay.reduce_size),
        *collective(kind, ("tp",), tp, n * embedded, values, lay.e),
        *experts.along_tp(m, lay, with_experts),
        *loss,
    ]


def along_ep(m: Transformer, lay: Layout, layers: int) -> list[Collective]:
    """What expert parallelism sends in all micro-batches of a step."""
    return experts.along_ep(m, lay, experts.layers_with_experts(m, layers))


def along_pp(m: Transformer, lay: Layout) -> list[Collective]:
    """Activations and their gradients between stages, in a step."""
    return collective("permute", ("pp",), lay.pp, 2 * lay.chunks * lay.microbatches, lay.tokens * m.hidden / lay.sp, lay.e)


def reductions(m: Transformer, lay: Layout, layers: int) -> list[Collective]:
    """What happens once a step: gradients are added up, updated weights gathered; of experts over the ranks that hold the same ones."""
    of_experts, others = _held(m, lay, layers)
    norms = collective("all-reduce", ("tp",), lay.tp, 1, _norms(m, layers), lay.gradient_size) if lay.sp > 1 else []
    if lay.ep == 1:
        return [*norms, *_reduced(lay, ("dp",), lay.dp, of_experts + others)]
    return [
        *norms,
        *_reduced(lay, ("dp",), lay.dp // lay.ep, of_experts),
        *_reduced(lay, ("dp", "ep") if lay.dp > lay.ep else ("ep",), lay.dp, others),
    ]


def _reduced(lay: Layout, axes: tuple[str, ...], ranks: int, held: float) -> list[Collective]:
    if not lay.zero1:
        return collective("all-reduce", axes, ranks, 1, held, lay.gradient_size)
    return [
        *collective("reduce-scatter", axes, ranks, 1, held, lay.gradient_size),
        *collective("all-gather", axes, ranks, 1, held / ranks, lay.e),
    ]

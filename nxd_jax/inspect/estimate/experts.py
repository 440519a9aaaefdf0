"""The formulas of `transformer_work` for layers with experts: what a core computes and sends for them.

T tokens of a micro-batch, h hidden, E experts, k of a token. A core computes R rows in a layer with experts, if these are equally busy:
T k without a capacity, E C with one (C slots of each expert for each rank, used or not). Expert-parallel ranks hold E / ep experts and compute as many rows.
"""

from __future__ import annotations

from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.estimate.layout import Layout, Products, collective, phase_of
from nxd_jax.inspect.estimate.models import Transformer
from nxd_jax.inspect.estimate.work import Phase
from nxd_jax.modules.moe.capacity import expert_capacity

DISPATCH_PASSES = 2, 4
"""Passes over the rows for bringing tokens to experts and back, forward and backward: weighed and added up; the gradient weighed, multiplied with the row and
added up for the weight's gradient, and added up for the token."""
DISPATCH_TOUCHES = 4, 7
"""How often rows go to or from HBM for it: read and written as they are gathered, read for the sum; and for the gradients of both."""
INDEX_SIZE = 8
"""Bytes of the number of an expert."""


def layers_with_experts(m: Transformer, layers: int) -> int:
    """How many of the last `layers` layers have experts."""
    return min(layers, m.layers - m.dense_layers) if m.experts else 0


def drops(m: Transformer, lay: Layout) -> bool:
    """Whether experts have a capacity: a positive factor that is not so large that it keeps all tokens."""
    return lay.capacity_factor is not None and 0 < lay.capacity_factor < m.experts / m.top_k


def rows(m: Transformer, lay: Layout) -> int:
    """R: rows of tokens that a core's experts compute in a layer, slots that nobody uses included."""
    if not drops(m, lay):
        return lay.tokens * m.top_k
    assert lay.capacity_factor is not None
    return m.experts * expert_capacity(lay.tokens, m.top_k, lay.capacity_factor, m.experts)


def held(m: Transformer, lay: Layout) -> float:
    """Parameters of a layer's experts on a core."""
    return m.experts // lay.ep * m.mlp_parameters(m.expert_width) / lay.tp


def computed(m: Transformer, lay: Layout) -> Phase:
    """The products of routed experts in a layer: of the rows that are routed. (Their last one is computed again, too, as its results are weighed.)"""
    f = m.expert_width / lay.tp
    first = (2 if m.gated else 1) * f
    one = m.mlp_parameters(m.expert_width) / lay.tp
    whole = held(m, lay)
    again = lay.layer_recompute
    return phase_of("experts", lay, rows(m, lay), Products(one, whole, first + m.hidden, m.hidden + f, again * one, again * whole))


def routed(m: Transformer, lay: Layout) -> Phase:
    """The router's product, which every tensor-parallel rank computes for all tokens in float32."""
    weights = m.hidden * m.experts
    moved = (3 + lay.layer_recompute) * lay.tokens * (m.hidden + m.experts) * 4 + weights * (2 + 3) * 4
    return Phase("router", 2 * lay.tokens * weights * (3 + lay.layer_recompute), 6.0 * lay.tokens * m.experts, moved, "float32")


def dispatched(m: Transformer, lay: Layout) -> Phase:
    """Tokens to rows and back."""
    values = rows(m, lay) * m.hidden
    times = 1 + lay.layer_recompute
    passes = times * DISPATCH_PASSES[0] + DISPATCH_PASSES[1]
    touched = times * DISPATCH_TOUCHES[0] + DISPATCH_TOUCHES[1]
    return Phase("dispatch to experts", 0.0, values * passes, values * touched * lay.e, lay.dtype)


# -- what a core sends --------------------------------------------------------------------------------


def along_ep(m: Transformer, lay: Layout, count: int) -> list[Collective]:
    """Tokens to the ranks that hold their experts and back, in `count` layers with experts, all micro-batches."""
    n, again = count * lay.microbatches, lay.layer_recompute
    if drops(m, lay):
        return collective("all-to-all", ("ep",), lay.ep, n * (4 + 2 * again), rows(m, lay) * m.hidden, lay.e)
    tokens, weights = lay.tokens * m.hidden, lay.tokens * m.top_k
    return [
        *collective("all-gather", ("ep",), lay.ep, n * (2 + again), tokens, lay.e),
        *collective("all-gather", ("ep",), lay.ep, n * (1 + again), weights, lay.e),
        *collective("all-gather", ("ep",), lay.ep, n * (1 + again), weights, INDEX_SIZE),
        *collective("reduce-scatter", ("ep",), lay.ep, 2 * n, lay.ep * tokens, lay.e),
        *collective("reduce-scatter", ("ep",), lay.ep, n, lay.ep * weights, lay.e),
    ]


def along_tp(m: Transformer, lay: Layout, count: int) -> list[Collective]:
    """What tensor-parallel ranks send for `count` layers with experts (the rest of them included), all micro-batches."""
    n, again, values = count * lay.microbatches, lay.layer_recompute, lay.tokens * m.hidden
    kind = "all-reduce" if lay.sp == 1 else "reduce-scatter"
    return [
        *collective("all-gather", ("tp",), lay.sp, n * (5 + 2 * again), values / lay.tp, lay.e),
        *collective(kind, ("tp",), lay.tp, n * (2 + again), values, lay.reduce_size),  # of attention
        *collective(kind, ("tp",), lay.tp, n, values, lay.e),
        *collective("all-reduce", ("tp",), lay.tp, n, values, lay.reduce_size),  # the tokens' gradient
        *collective("all-reduce", ("tp",), lay.tp, n, lay.tokens * m.experts, lay.e),  # the weights' gradient
        *collective("all-reduce", ("tp",), lay.tp, 2 * n * bool(m.shared_experts), values, lay.reduce_size),  # of gate and up
    ]

"""Attention over a sequence that is cut into equal runs, one for each rank of a ring: keys and values travel round it, block by block.

Rank r holds queries and keys r * S to (r + 1) * S. At step s it works with the keys and values of rank r - s, and with `causal` sits out when
those come later in the sequence. No rank ever holds more than two runs of keys and values. In the backward pass the gradients of keys and values
travel with them and arrive home after a whole turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from torch_bridge.lowerings import random_keys
from torch_bridge.lowerings.kernels import flash_attention as flash
from torch_bridge.lowerings.kernels.flash_attention import Options, delta_of, merged, rows

Pair = tuple[jax.Array, jax.Array]
T = TypeVar("T")


@dataclass(frozen=True)
class Ring:
    """Inside `shard_map`: index, this rank's place (a traced scalar); shift, which sends a tree of arrays to the next rank; count, of ranks."""

    index: Callable[[], Any]
    shift: Callable[[Any], Any]
    count: int


def along(axes: tuple[str, ...], count: int) -> Ring:
    """The ring along mesh axes."""
    pairs = [(i, (i + 1) % count) for i in range(count)]
    return Ring(lambda: lax.axis_index(axes), lambda tree: jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), tree), count)


def _key(seed: jax.Array, step: int | jax.Array, o: Options) -> jax.Array | None:
    return random_keys.fold_in(flash.unpack_key(seed), step) if o.dropout_p else None


def _when_earlier(ring: Ring, step: int | jax.Array, o: Options, work: Callable[[T], T], carry: T) -> T:
    """`work(carry)` where the visiting keys come from earlier in the sequence; all do if attention looks both ways."""
    return lax.cond(ring.index() >= step, work, lambda c: c, carry) if o.causal else work(carry)


def forward(q: jax.Array, k: jax.Array, v: jax.Array, seed: jax.Array, o: Options, ring: Ring) -> tuple[jax.Array, jax.Array]:
    """Output [N, S, E] and logsumexp [N, S] of this rank's queries, in the opmath dtype."""
    both_ways = o._replace(causal=False)

    def turn(carry: tuple[Pair, Pair], step: jax.Array) -> tuple[tuple[Pair, Pair], None]:
        visiting, result = carry
        visiting = ring.shift(visiting)

        def work(so_far: Pair) -> Pair:
            return _merge(so_far, flash.forward(q, visiting[0], visiting[1], both_ways, _key(seed, step, o)))

        return (visiting, _when_earlier(ring, step, o, work, result)), None

    own = flash.forward(q, k, v, o, _key(seed, 0, o))
    result: tuple[jax.Array, jax.Array] = lax.scan(turn, ((k, v), own), jnp.arange(1, ring.count, dtype=jnp.int32))[0][1]
    return result


def _merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention over two sets of keys from attention over each."""
    logsumexp = jnp.logaddexp(a[1], b[1])
    return sum(out * jnp.exp(own - logsumexp)[..., None] for out, own in (a, b)), logsumexp  # type: ignore[return-value]


def backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    logsumexp: jax.Array,
    delta: jax.Array,
    seed: jax.Array,
    o: Options,
    ring: Ring,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of this rank's q, k and v in the opmath dtype."""

    def pull(visiting: Pair, o_step: Options, step: int | jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return flash.backward(grad, q, visiting[0], visiting[1], logsumexp, delta, o_step, _key(seed, step, o))

    def turn(carry: tuple[tuple[Pair, Pair], jax.Array], step: jax.Array) -> tuple[tuple[tuple[Pair, Pair], jax.Array], None]:
        travelling, dq = carry
        visiting, grads = ring.shift(travelling)

        def work(so_far: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return jax.tree.map(jnp.add, so_far, pull(visiting, o._replace(causal=False), step))

        dq, *grads = _when_earlier(ring, step, o, work, (dq, *grads))
        return ((visiting, tuple(grads)), dq), None

    dq, dk, dv = pull((k, v), o, 0)
    ((_, away), dq), _ = lax.scan(turn, (((k, v), (dk, dv)), dq), jnp.arange(1, ring.count, dtype=jnp.int32))
    dk, dv = ring.shift(away)
    return dq, dk, dv


# -- one function with its gradient -----------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array, seed: jax.Array, o: Options, ring: Ring) -> tuple[jax.Array, jax.Array]:
    """This rank's part of attention over the whole sequence: q, k [B, H, S, D], v [B, H, S, E] -> output [B, H, S, E] in the dtype of q, logsumexp
    [B, H, S] in the opmath dtype (no gradient goes through it). S is the length of one rank's run. See `flash_attention` for seed.
    """
    out, logsumexp = forward(merged(q), merged(k), merged(v), seed, o, ring)
    return out.reshape(*q.shape[:3], v.shape[3]).astype(q.dtype), logsumexp.reshape(q.shape[:3])


def gradients(
    grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, logsumexp: jax.Array, seed: jax.Array, o: Options, ring: Ring
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v of `ring_attention`, from its results."""
    delta = delta_of(grad, out)
    found = backward(merged(grad), merged(q), merged(k), merged(v), rows(logsumexp), rows(delta), seed, o, ring)
    dq, dk, dv = (g.reshape(x.shape).astype(x.dtype) for g, x in zip(found, (q, k, v), strict=True))
    return dq, dk, dv


def _keep(q: jax.Array, k: jax.Array, v: jax.Array, seed: jax.Array, o: Options, ring: Ring) -> tuple[Pair, tuple[jax.Array, ...]]:
    out, logsumexp = ring_attention(q, k, v, seed, o, ring)
    return (out, logsumexp), (q, k, v, out, logsumexp, seed)


def _pull(o: Options, ring: Ring, kept: tuple[jax.Array, ...], cotangents: Pair) -> tuple[jax.Array | None, ...]:
    q, k, v, out, logsumexp, seed = kept
    return (*gradients(cotangents[0], q, k, v, out, logsumexp, seed, o, ring), None)


ring_attention.defvjp(_keep, _pull)

__all__ = ["Options", "Ring", "along", "backward", "forward", "gradients", "ring_attention"]

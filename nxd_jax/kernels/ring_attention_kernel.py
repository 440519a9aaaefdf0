"""`neuronx_distributed.kernels.ring_attention_kernel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nxd_jax.kernels.flash_attn import _attend
from nxd_jax.parallel_layers import parallel_state

Lists = list[list[int]]


def nki_ring_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rank_id: Any,
    src_tgt_pairs: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Any = None,
) -> torch.Tensor:
    """Attention over a sequence that context-parallel ranks hold equal runs of: this rank's [batch, heads, length, head_dim].

    q, k, v: [batch, heads, length, head_dim], length that of one rank's run; rank r of a ring holds the r-th run. causal: by place in the whole
    sequence. rank_id is accepted (each rank knows its own). src_tgt_pairs: [source, target] global ranks of a step round every ring, as
    `parallel_state.get_context_model_parallel_src_tgt_pairs()` gives them, also nested by ring; None or empty: the context-parallel groups. The
    rest is as in `nki_flash_attn_func`.

    Any length works; the original wants multiples of 1024. Raises ValueError if the pairs are not rings of one size, and RuntimeError without pairs
    before parallel_state is initialised.
    """
    rings = _rings(_flat(src_tgt_pairs)) if src_tgt_pairs else parallel_state.get_context_model_parallel_group(as_list=True)
    return _attend(q, k, v, causal, softmax_scale, dropout_p, seed, ring=rings)


def _flat(pairs: Any) -> Lists:
    """[[0, 1], [1, 0]] or [[[0, 1], [1, 0]], ...] as a list of pairs."""
    if all(isinstance(p, Sequence) and p and isinstance(p[0], Sequence) for p in pairs):
        return [list(pair) for ring in pairs for pair in ring]
    return [list(pair) for pair in pairs]


def _rings(pairs: Lists) -> Lists:
    """The members of each ring, the holder of the first run first."""
    known = parallel_state.get_context_model_parallel_group(as_list=True) if parallel_state.model_parallel_is_initialized() else []
    if sorted(pairs) == sorted([a, b] for group in known for a, b in zip(group, [*group[1:], group[0]], strict=True)):
        return known
    following: dict[int, int] = {p[0]: p[1] for p in pairs if len(p) == 2}
    if len(following) != len(pairs) or set(following) != set(following.values()):
        raise ValueError(
            f"src_tgt_pairs={pairs} are no rings: every rank must be the source of one [source, target] pair and the target of one, as "
            "parallel_state.get_context_model_parallel_src_tgt_pairs() returns them"
        )
    rings: Lists = []
    while following:
        start = min(following)
        ring, at = [start], following.pop(start)
        while at != start:
            ring.append(at)
            at = following.pop(at)
        rings.append(sorted(ring))
    return rings

"""Flash and ring attention as ops of the graph, and as torch functions with gradients.

The ops keep the logsumexp and the seed of the dropout mask for their backward ops. Import this after `backend.ensure()` (which brings JAX up).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from torch_bridge.collectives import collective_ops
from torch_bridge.lowerings import AxesRule, lowering
from torch_bridge.lowerings.kernels import flash_attention, ring_attention
from torch_bridge.lowerings.kernels.flash_attention import Options, pack_key
from torch_bridge.lowerings.kernels.ring_attention import Ring
from torch_bridge.lowerings.types import Array, Key
from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh import world
from torch_bridge.precision.precision_mode import PLAIN, Mode
from torch_bridge.recorder import cpu_attention

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define(
    "flash_attention(Tensor q, Tensor k, Tensor v, Tensor? seed, float dropout_p, bool causal, float scale) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "flash_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor seed, float dropout_p, bool causal, "
    "float scale) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor? seed, float dropout_p, bool causal, float scale, int count, str groups) -> "
    "(Tensor, Tensor, Tensor)"
)
_library.define(
    "ring_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor seed, float dropout_p, bool causal, "
    "float scale, int count, str groups) -> (Tensor, Tensor, Tensor)"
)
ops = torch.ops.torch_bridge


# -- shapes, and the CPU ----------------------------------------------------------------------------


def _forward_meta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide), q.new_empty((), dtype=torch.int64)


def _backward_meta(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _forward_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: torch.Tensor | None, dropout_p: float, causal: bool, scale: float
) -> Any:
    """For recorded graphs that run in eager torch."""
    out, logsumexp, *_ = cpu_attention.forward(q, k, v, None, dropout_p, causal, scale=scale)
    return out, logsumexp, torch.zeros((), dtype=torch.int64)


def _backward_cpu(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    seed: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float,
) -> Any:
    rest: Any = ([True] * 3, out, logsumexp, out, out, 0, 0, dropout_p, causal, seed, seed)
    return cpu_attention.backward(grad, q, k, v, None, *rest, scale=scale)[:3]


def _alone(*_: object) -> Any:
    raise RuntimeError("a graph with ring attention runs on xla only: on one CPU there are no other ranks to exchange keys with")


for _name in ("flash_attention", "ring_attention"):
    _library.impl(_name, _forward_meta, "Meta")
    _library.impl(f"{_name}_backward", _backward_meta, "Meta")
_library.impl("flash_attention", _forward_cpu, "CPU")
_library.impl("flash_attention_backward", _backward_cpu, "CPU")
_library.impl("ring_attention", _alone, "CPU")
_library.impl("ring_attention_backward", _alone, "CPU")


# -- what they become -----------------------------------------------------------------------------


def _seed(seed: Array | None, key: Key | None) -> Any:
    """What the dropout mask is drawn from: the caller's number if there is one."""
    if seed is not None:
        return seed.astype(jnp.int64).reshape(())
    return jnp.zeros((), jnp.int64) if key is None else pack_key(key)


@lowering(ops.flash_attention.default, rng=True, mode=True)
def _flash_attention(
    q: Array,
    k: Array,
    v: Array,
    seed: Array | None,
    dropout_p: float,
    causal: bool,
    scale: float,
    *,
    key: Key | None = None,
    mode: Mode = PLAIN,
) -> Any:
    seed = _seed(seed, key)
    return (*flash_attention.flash_attention(q, k, v, seed, Options(scale, causal, dropout_p, mode=mode)), seed)


@lowering(ops.flash_attention_backward.default, mode=True)
def _flash_attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    logsumexp: Array,
    seed: Array,
    dropout_p: float,
    causal: bool,
    scale: float,
    *,
    mode: Mode = PLAIN,
) -> Any:
    return flash_attention.gradients(grad, q, k, v, out, logsumexp, seed, Options(scale, causal, dropout_p, mode=mode))


@functools.cache
def _ring(text: str, count: int, epoch: int) -> Ring:
    """The ring that groups name: along mesh axes, or through explicit members."""
    lines = collective_ops.lines(text)
    if lines.members is None:
        return ring_attention.along(lines.axes, count)
    pairs = [(a, b) for group in lines.places or [] for a, b in zip(group, [*group[1:], group[0]], strict=True)]
    return Ring(lines.index, lambda tree: jax.tree.map(lambda x: jax.lax.ppermute(x, lines.axes, pairs), tree), count)


@lowering(ops.ring_attention.default, collective=True, axes=AxesRule.ADDS, rng=True)
def _ring_attention(
    q: Array,
    k: Array,
    v: Array,
    seed: Array | None,
    dropout_p: float,
    causal: bool,
    scale: float,
    count: int,
    groups: str,
    *,
    key: Key | None = None,
) -> Any:
    seed = _seed(seed, key)
    ring = _ring(groups, count, world.current().epoch)
    return (*ring_attention.ring_attention(q, k, v, seed, Options(scale, causal, dropout_p), ring), seed)


@lowering(ops.ring_attention_backward.default, collective=True, axes=AxesRule.ADDS)
def _ring_attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    logsumexp: Array,
    seed: Array,
    dropout_p: float,
    causal: bool,
    scale: float,
    count: int,
    groups: str,
) -> Any:
    ring = _ring(groups, count, world.current().epoch)
    return ring_attention.gradients(grad, q, k, v, out, logsumexp, seed, Options(scale, causal, dropout_p), ring)


# -- gradients, and the torch function ----------------------------------------------------------------


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, _, *ctx.constants = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(name: str) -> None:
    """Tie an op to its backward op: recorded tensors and graphs that run in eager torch have gradients alike. The logsumexp carries none."""
    backward_op = getattr(ops, f"{name}_backward").default

    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        return *backward_op(grad, *ctx.saved_tensors, *ctx.constants), *[None] * (1 + len(ctx.constants))

    torch.library.register_autograd(f"torch_bridge::{name}", backward, setup_context=_keep, lib=_library)


_differentiate("flash_attention")
_differentiate("ring_attention")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    ring: Any = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v of q [B, H, S, D], k [B, H, T, D], v [B, H, T, E]: [B, H, S, E] in their dtype, with memory linear in the lengths.

    causal: query s sees keys t <= s. scale: default 1/sqrt(D). dropout_p: of the weights. seed: int or one-element tensor that the dropout mask
    depends on alone; default: a draw from the device's random state. ring: groups (lists of ranks or a process group) whose ranks hold equal runs
    of one sequence, in group order; queries then see the keys of the whole sequence (`causal` by place in it). CPU tensors take torch's own
    attention, and can have no ring of several ranks. Raises ValueError for shapes that do not fit or a dropout_p outside [0, 1].
    """
    check(q, k, v, dropout_p)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    among = None if ring is None else rank_groups.resolve(ring)
    constants: tuple[Any, ...] = (float(dropout_p), bool(causal), scale)
    if among is not None and among.size > 1:
        if q.shape != k.shape:
            raise ValueError(f"ring attention needs q and k of one shape, got {list(q.shape)} and {list(k.shape)}")
        if q.device.type != "xla":
            raise ValueError(f"ring attention: ranks exchange keys and values on xla, got tensors on {q.device}; move them with .to('xla')")
        constants += (among.size, among.text)
        return ops.ring_attention(q, k, v, _seed_tensor(seed, q), *constants)[0]
    if q.device.type != "xla":
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=causal, scale=scale)
    return ops.flash_attention(q, k, v, _seed_tensor(seed, q), *constants)[0]


def _seed_tensor(seed: Any, like: torch.Tensor) -> torch.Tensor | None:
    if seed is None:
        return None
    return torch.as_tensor(seed, dtype=torch.int64).reshape(()).to(like.device)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float) -> None:
    """Raise ValueError for tensors that attention cannot take."""
    fits = (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[:2] == k.shape[:2] == v.shape[:2]
        and q.shape[3] == k.shape[3]
        and k.shape[2] == v.shape[2]
    )
    if not fits or not q.dtype == k.dtype == v.dtype:
        shown = ", ".join(f"{name} {t.dtype}{list(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
        raise ValueError(
            f"attention needs q, k and v of one dtype, [batch, heads, length, head_dim] with equal batch and heads, got {shown}; "
            "repeat the K/V heads of grouped-query attention first"
        )
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be a probability, got {dropout_p}")

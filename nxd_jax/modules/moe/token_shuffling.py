"""`neuronx_distributed.modules.moe.token_shuffling`: tokens of neighbouring data-parallel ranks are mixed before experts are chosen.

The tokens of one rank resemble each other and would crowd at few experts. Each rank puts its tokens in a random order and sends every member of its group
(`parallel_state.initialize_token_shuffle_group`) an equal run of them; after the experts everything goes back.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from nxd_jax.tensor_parallel import layer_groups, parallel_groups, regions, shuffle_groups
from torch_bridge.collectives import functional
from torch_bridge.mesh import groups as rank_groups


def token_shuffle(hidden_states: torch.Tensor, seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of all ranks of the group, of the same shape, and the order in which this rank sent its own: int64 [T], what `token_unshuffle` takes.

    hidden_states: [..., H], such as [S, B, H] or [B, S, H]; T is the product of all dims but the last. seed: draw the order from it, without touching
    the random state of the step (NxD seeds the process with it, so that dropout repeats too); None: draw on from the device's. Tensor-parallel ranks,
    which may hold the same tokens, use one order even after a seed that differs by rank.

    Raises ValueError if T does not divide by the group's size, RuntimeError if there is no token shuffle group.
    """
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    _check_divides(tokens.shape[0])
    order = _drawn(tokens, seed)
    sent = _Ordered.apply(tokens, order, torch.argsort(order))
    return _exchanged(sent).reshape(hidden_states.shape), order


def token_unshuffle(permuted_states: torch.Tensor, permutation: torch.Tensor) -> torch.Tensor:
    """Each token back to its rank and place.

    permuted_states: [..., H] as `token_shuffle` gave them, with any work done on each token. permutation: what it returned. Raises ValueError if they
    have different numbers of tokens.
    """
    tokens = permuted_states.reshape(-1, permuted_states.shape[-1])
    if permutation.shape != tokens.shape[:1]:
        raise ValueError(
            f"permutation has shape {tuple(permutation.shape)} for {tokens.shape[0]} tokens: pass the one that token_shuffle returned with them"
        )
    back = _Ordered.apply(_exchanged(tokens), torch.argsort(permutation), permutation)
    return back.reshape(permuted_states.shape)


class _Ordered(torch.autograd.Function):
    """Rows in another order; the gradient's rows go back by the inverse order, which adds nothing up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def _check_divides(tokens: int) -> None:
    size = layer_groups.size(shuffle_groups.group())
    if tokens % size:
        raise ValueError(
            f"{tokens} tokens cannot be sent in equal runs to the {size} ranks of a token shuffle group; change the batch or the group"
        )


def _drawn(tokens: torch.Tensor, seed: int | None) -> torch.Tensor:
    """A random order of the tokens, the same on all ranks of a tensor-parallel group."""
    device = tokens.device
    generator = None if seed is None else torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        order = torch.argsort(torch.rand(tokens.shape[0], device=device, generator=generator))
        among = rank_groups.resolve(parallel_groups.group("tp"))
        if among.size > 1:
            functional.broadcast_from([order], 0, among)
    return order


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    """Run k of the rows goes to member k of the group: its own way back, and that of the gradient."""
    group = shuffle_groups.group()
    swap = functools.partial(_swapped, count=layer_groups.size(group))
    return regions.region(x, group, swap, swap)


def _swapped(x: torch.Tensor, count: int, process_group: Any) -> torch.Tensor:
    return functional.all_to_all(x, 0, 0, count, process_group)

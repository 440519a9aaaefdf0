"""Tokens go to other ranks and come back, and so do gradients; who is in a group; what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nxd_jax.modules.moe.token_shuffling import token_shuffle, token_unshuffle
from nxd_jax.parallel_layers import parallel_state
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import collectives_run, own, per_rank

S, B, H = 4, 3, 2
T = S * B


def tokens(count: int, by: int = 1) -> list[torch.Tensor]:
    """[S, B, H] of each rank, all numbers different; runs of `by` ranks have the same."""
    return [torch.arange(T * H, dtype=torch.float32).reshape(S, B, H) + 1000 * (r // by) for r in range(count)]


def expected(values: list[torch.Tensor], orders: list[torch.Tensor], groups: list[list[int]]) -> list[torch.Tensor]:
    """What each rank holds after the shuffle, by its definition."""
    sent = [v.reshape(T, H)[order] for v, order in zip(values, orders, strict=True)]
    found = list(sent)
    for group in groups:
        for k, r in enumerate(group):
            found[r] = torch.cat([sent[m].chunk(len(group))[k] for m in group])
    return [f.reshape(S, B, H) for f in found]


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("seed", [None, 7])
def test_there_and_back(nxd: Nxd, size: int, seed: int | None) -> None:
    nxd(8, tp=2)
    parallel_state.initialize_token_shuffle_group(size)
    values = tokens(8, by=2)
    x = own(values).requires_grad_()
    shuffled, order = token_shuffle(x, seed)
    orders = per_rank(order)
    assert order.dtype == torch.int64 and not order.requires_grad
    assert all(torch.equal(o.sort().values, torch.arange(T)) for o in orders)
    wanted = expected(values, orders, parallel_state.get_token_shuffle_group(as_list=True))
    for found, want in zip(per_rank(shuffled), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0)
    back = token_unshuffle(shuffled.square(), order)
    for found, value in zip(per_rank(back), values, strict=True):
        torch.testing.assert_close(found, value.square(), rtol=0, atol=0)
    scales = [torch.randn(S, B, H, generator=torch.Generator().manual_seed(r)) for r in range(8)]
    (back * own(scales)).sum().backward()
    for found, value, scale in zip(per_rank(x.grad), values, scales, strict=True):
        torch.testing.assert_close(found, 2 * value * scale)


def test_gradients_of_the_shuffle_alone(nxd: Nxd) -> None:
    """They go back by the inverse: a weight on what a rank received belongs to the token that its owner sent."""
    nxd(4)
    parallel_state.initialize_token_shuffle_group(2)
    x = own(tokens(4)).requires_grad_()
    shuffled, order = token_shuffle(x)
    marks = own([torch.full((S, B, H), float(r)) for r in range(4)])
    (shuffled * marks).sum().backward()
    for r, (grad, own_order) in enumerate(zip(per_rank(x.grad), per_rank(order), strict=True)):
        receivers = torch.empty(T)
        receivers[own_order] = torch.cat([torch.full((T // 2,), float(m)) for m in (r // 2 * 2, r // 2 * 2 + 1)])
        torch.testing.assert_close(grad.reshape(T, H), receivers[:, None].expand(T, H))


def test_seeds(nxd: Nxd) -> None:
    """A seed gives one order and leaves the random state of the step alone; without one it is drawn on."""
    nxd(4)
    parallel_state.initialize_token_shuffle_group(2)
    x = own(tokens(4))
    torch.manual_seed(1)
    plain = torch.rand(3, device="xla").cpu()
    torch.manual_seed(1)
    first, again, other = (token_shuffle(x, seed)[1].cpu() for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.rand(3, device="xla").cpu(), plain)
    drawn = [token_shuffle(x)[1].cpu() for _ in range(2)]
    assert not torch.equal(drawn[0], drawn[1])
    torch.manual_seed(1)
    torch.rand(3, device="xla")
    assert torch.equal(token_shuffle(x)[1].cpu(), drawn[0])


def test_a_seed_for_each_rank(nxd: Nxd) -> None:
    """Data-parallel ranks have orders of their own, tensor-parallel ranks, which hold the same tokens, one."""
    nxd(8, tp=2)
    parallel_state.initialize_token_shuffle_group(4)
    import torch_xla.core.xla_model as xm

    for seed in (None, 3 + xm.get_ordinal()):
        torch.manual_seed(3 + xm.get_ordinal())
        values = tokens(8, by=2)
        shuffled, order = token_shuffle(own(values), seed)
        orders = per_rank(order)
        assert all(torch.equal(orders[r], orders[r + 1]) for r in range(0, 8, 2))
        assert not any(torch.equal(orders[r], orders[q]) for r in range(0, 8, 2) for q in range(0, r, 2))
        wanted = expected(values, orders, parallel_state.get_token_shuffle_group(as_list=True))
        for found, want, value, back in zip(per_rank(shuffled), wanted, values, per_rank(token_unshuffle(shuffled, order)), strict=True):
            torch.testing.assert_close(found, want, rtol=0, atol=0)
            torch.testing.assert_close(back, value, rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_activation_checkpoint_draws_the_same_again(nxd: Nxd, use_reentrant: bool) -> None:
    nxd(4)
    parallel_state.initialize_token_shuffle_group(2)
    places = torch.randn(S, B, H).to("xla")
    orders = []

    def block(x: torch.Tensor) -> torch.Tensor:
        shuffled, order = token_shuffle(x)
        orders.append(order)
        return token_unshuffle(torch.tanh(shuffled / 1000) * places, order)

    def run(checkpointed: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(2)
        x = own(tokens(4)).requires_grad_()
        y = checkpoint(block, x, use_reentrant=use_reentrant) if checkpointed else block(x)
        y.square().sum().backward()
        return per_rank(y), per_rank(x.grad)

    plain, checkpointed = run(False), run(True)
    assert len(orders) == 3 and torch.equal(orders[1].cpu(), orders[2].cpu())
    for a, b in zip(plain[0] + plain[1], checkpointed[0] + checkpointed[1], strict=True):
        torch.testing.assert_close(a, b)


def test_collectives(nxd: Nxd) -> None:
    nxd(4)
    parallel_state.initialize_token_shuffle_group(4)
    shuffled, _ = token_shuffle(own(tokens(4)))
    assert collectives_run() == {"all_to_all": 1}
    assert shuffled.shape == (S, B, H)


def test_alone(nxd: Nxd) -> None:
    """A group of one only puts tokens in another order, on the CPU too."""
    nxd(1)
    parallel_state.initialize_token_shuffle_group(1)
    (x,) = tokens(1)
    for device in ("cpu", "xla"):
        given = x.to(device, torch.bfloat16).requires_grad_()
        shuffled, order = token_shuffle(given)
        assert torch.equal(shuffled.reshape(T, H), given.reshape(T, H)[order]) and not torch.equal(shuffled, given)
        back = token_unshuffle(shuffled, order)
        assert torch.equal(back, given) and back.dtype == torch.bfloat16
        (back * x.to(device)).sum().backward()
        assert given.grad is not None
        torch.testing.assert_close(given.grad.cpu().float(), x.bfloat16().float())
    rows = torch.randn(5, 3)
    shuffled, order = token_shuffle(rows, seed=0)
    assert torch.equal(token_unshuffle(shuffled, order), rows)


def test_groups_within_stages(nxd: Nxd) -> None:
    nxd(16, tp=2, pp=2)
    parallel_state.initialize_token_shuffle_group(2)
    groups = [[0, 2], [4, 6], [1, 3], [5, 7], [8, 10], [12, 14], [9, 11], [13, 15]]
    assert parallel_state.get_token_shuffle_replica_groups() == parallel_state.get_token_shuffle_group(as_list=True) == groups
    with pytest.raises(
        AssertionError, match="token shuffle groups of 2 ranks exist, cannot make groups of 4: .*destroy_token_shuffle_group"
    ):
        parallel_state.initialize_token_shuffle_group(4)


def test_errors(nxd: Nxd) -> None:
    nxd(6)
    x = own(tokens(6))
    with pytest.raises(RuntimeError, match=r"not initialized: call parallel_state.initialize_token_shuffle_group\(size\) first"):
        token_shuffle(x)
    parallel_state.initialize_token_shuffle_group(3)
    with pytest.raises(ValueError, match="10 tokens cannot be sent in equal runs to the 3 ranks of a token shuffle group"):
        token_shuffle(torch.ones(5, 2, H).to("xla"))
    shuffled, order = token_shuffle(x)
    with pytest.raises(ValueError, match=r"permutation has shape \(12,\) for 6 tokens: pass the one that token_shuffle returned"):
        token_unshuffle(shuffled[:2], order)

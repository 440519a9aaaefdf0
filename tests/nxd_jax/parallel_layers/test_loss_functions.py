"""Losses of logits cut over the vocabulary, against torch's on the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.loss_functions import DistributedLogprob, from_parallel_logits_to_logprobs, parallel_cross_entropy
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

V = 24


def cut(full: torch.Tensor, tp: int) -> torch.Tensor:
    """Each tensor-parallel rank's part of the vocabulary, as a leaf."""
    part = full.shape[-1] // tp
    return sharded.from_ranks(lambda r: full[..., r % tp * part : (r % tp + 1) * part].contiguous(), ["tp"]).requires_grad_()


def whole(t: torch.Tensor, tp: int) -> torch.Tensor:
    """The parts of the ranks of a tensor-parallel group side by side; all groups must hold the same."""
    parts = sharded.shards(t)
    joined = [torch.cat(parts[k : k + tp], -1) for k in range(0, len(parts), tp)]
    assert all(torch.equal(j, joined[0]) for j in joined)
    return joined[0]


def same(t: torch.Tensor) -> torch.Tensor:
    """The value that all ranks share."""
    parts = sharded.shards(t)
    assert all(torch.equal(p, parts[0]) for p in parts)
    return parts[0]


def reference(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    flat = F.cross_entropy(logits.reshape(-1, V).float(), target.reshape(-1), reduction="none", label_smoothing=smoothing)
    return flat.reshape(target.shape)


@pytest.mark.core(keep=4)
@pytest.mark.thorough(keep=10)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(6,), (2, 5), (2, 3, 2)])
@pytest.mark.parametrize(("size", "tp"), [(4, 4), (4, 2), (1, 1)])
def test_cross_entropy(nxd: Nxd, size: int, tp: int, shape: tuple[int, ...], smoothing: float) -> None:
    nxd(size, tp=tp)
    full = (3 * torch.randn(*shape, V)).requires_grad_()
    target = torch.randint(0, V, shape)
    target.view(-1)[1] = -100
    weights = torch.randn(shape)
    expected = reference(full, target, smoothing)
    expected.backward(weights)
    logits = cut(full.detach(), tp)
    loss = parallel_cross_entropy(logits, target.to("xla"), label_smoothing=smoothing)
    loss.backward(weights.to("xla"))
    assert logits.grad is not None and full.grad is not None
    torch.testing.assert_close(same(loss), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole(logits.grad, tp), full.grad, rtol=1e-4, atol=1e-5)
    assert same(loss).view(-1)[1] == 0
    assert torch.equal(whole(logits, tp), full.detach())  # NxD writes to its argument


def test_half_precision_is_computed_in_float32(nxd: Nxd) -> None:
    nxd(2, tp=2)
    full = (5 * torch.randn(7, V)).bfloat16()
    target = torch.randint(0, V, (7,))
    wide = full.float().requires_grad_()
    expected = F.cross_entropy(wide, target, reduction="none")
    expected.sum().backward()
    logits = cut(full, 2)
    loss = parallel_cross_entropy(logits, target.to("xla"))
    loss.sum().backward()
    assert loss.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == torch.bfloat16 and wide.grad is not None
    torch.testing.assert_close(same(loss), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole(logits.grad, 2), wide.grad.bfloat16())


def test_double_logits_keep_their_precision(nxd: Nxd) -> None:
    nxd(2, tp=2)
    full = torch.randn(7, V, dtype=torch.float64)
    target = torch.randint(0, V, (7,))
    loss = parallel_cross_entropy(cut(full, 2), target.to("xla"))
    torch.testing.assert_close(same(loss), F.cross_entropy(full, target, reduction="none"), rtol=1e-12, atol=1e-12)


def test_large_logits_do_not_overflow(nxd: Nxd) -> None:
    nxd(2, tp=2)
    full = 1e4 * torch.randn(7, V)
    target = torch.randint(0, V, (7,))
    loss = parallel_cross_entropy(cut(full, 2), target.to("xla"))
    torch.testing.assert_close(same(loss), F.cross_entropy(full, target, reduction="none"))


def test_another_ignore_index(nxd: Nxd) -> None:
    nxd(2, tp=2)
    full, target = torch.randn(3, V), torch.tensor([4, 0, 0])
    loss = parallel_cross_entropy(cut(full, 2), target.to("xla"), ignore_index=0)
    torch.testing.assert_close(same(loss), F.cross_entropy(full, target, reduction="none", ignore_index=0))


def test_data_parallel_ranks_have_their_own_losses(nxd: Nxd) -> None:
    nxd(4, tp=2)
    full = torch.randn(2, 5, V)
    target = torch.randint(0, V, (2, 5))
    logits = sharded.from_ranks(lambda r: full[r // 2, :, r % 2 * 12 : (r % 2 + 1) * 12].contiguous(), ["dp", "tp"])
    loss = parallel_cross_entropy(logits, sharded.from_ranks(lambda r: target[r // 2], ["dp"]))
    assert sharded.varying(loss).axes == ("dp",)
    for rank, own in enumerate(sharded.shards(loss)):
        torch.testing.assert_close(own, F.cross_entropy(full[rank // 2], target[rank // 2], reduction="none"))


def test_on_the_cpu_in_a_world_of_one(nxd: Nxd) -> None:
    nxd(1)
    full, target = torch.randn(3, V, requires_grad=True), torch.randint(0, V, (3,))
    torch.testing.assert_close(parallel_cross_entropy(full, target), F.cross_entropy(full, target, reduction="none"))


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("tp", [1, 4])
def test_logprobs(nxd: Nxd, tp: int, inference: bool) -> None:
    nxd(4, tp=tp)
    full = torch.randn(2, 6, V, requires_grad=True)
    target = torch.randint(0, V, (2, 6))
    expected = full.log_softmax(-1)[:, :-1].gather(-1, target[:, 1:, None]).squeeze(-1)
    weights = torch.randn(2, 5)
    expected.backward(weights)
    logits = cut(full.detach(), tp)
    found = from_parallel_logits_to_logprobs(logits, target.to("xla"), inference=inference)
    found.backward(weights.to("xla"))
    assert found.shape == (2, 5) and logits.grad is not None and full.grad is not None
    torch.testing.assert_close(same(found), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole(logits.grad, tp), full.grad, rtol=1e-4, atol=1e-5)


def test_logprobs_by_either_name_of_the_logits(nxd: Nxd) -> None:
    nxd(2, tp=2)
    logits, target = cut(torch.randn(2, 6, V), 2), torch.randint(0, V, (2, 6)).to("xla")
    by_place = same(from_parallel_logits_to_logprobs(logits, target).detach())
    assert torch.equal(same(from_parallel_logits_to_logprobs(vocab_parallel_logits=logits, target=target).detach()), by_place)
    assert torch.equal(same(from_parallel_logits_to_logprobs(logits=logits, target=target, inference=False).detach()), by_place)
    for given in (
        {},
        {"target": target},
        {"vocab_parallel_logits": logits},
        {"vocab_parallel_logits": logits, "logits": logits, "target": target},
    ):
        with pytest.raises(TypeError, match=r"needs vocab_parallel_logits \(or logits, which is the same, but not both\) and target"):
            from_parallel_logits_to_logprobs(**given)


def test_logprobs_of_targets_outside_the_vocabulary(nxd: Nxd) -> None:
    nxd(2, tp=2)
    logits = cut(torch.randn(3, V), 2)
    found = DistributedLogprob.apply(logits, torch.tensor([-100, 3, V]).to("xla"), False)
    found.sum().backward()
    assert logits.grad is not None
    gradient = whole(logits.grad, 2)
    assert same(found)[0] == same(found)[2] == 0 and same(found)[1] < 0
    assert not gradient[0].any() and not gradient[2].any() and gradient[1].any()


def test_errors(nxd: Nxd) -> None:
    nxd(2, tp=2)
    logits = torch.randn(2, 3, V // 2, device="xla")
    with pytest.raises(ValueError, match=r"need targets of shape \[2, 3\], got \[2\]"):
        parallel_cross_entropy(logits, torch.zeros(2, dtype=torch.int64, device="xla"))
    with pytest.raises(ValueError, match="label_smoothing must be between 0 and 1, got 1.5"):
        parallel_cross_entropy(logits, torch.zeros(2, 3, dtype=torch.int64, device="xla"), 1.5)
    with pytest.raises(ValueError, match=r"logits are on xla:0 and targets on cpu: move one with .to\("):
        parallel_cross_entropy(logits, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"targets must be token numbers, got torch.float32"):
        parallel_cross_entropy(logits, torch.zeros(2, 3, device="xla"))


def test_needs_parallel_state() -> None:
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        parallel_cross_entropy(torch.randn(2, 4), torch.zeros(2, dtype=torch.int64))

"""Seeds, `fork_rng`, generators: reproducible and re-seedable on device xla, beside torch's own CPU state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torch_bridge
from torch_bridge import metrics

torch_bridge.register()

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(8, device="xla"),
    "randn": lambda: torch.randn(8, device="xla"),
    "randint": lambda: torch.randint(0, 1 << 40, (8,), device="xla"),
    "randperm": lambda: torch.randperm(50, device="xla"),
    "rand_like": lambda: torch.rand_like(torch.empty(8, device="xla")),
    "normal_": lambda: torch.empty(8, device="xla").normal_(),
    "uniform_": lambda: torch.empty(8, device="xla").uniform_(-1, 1),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5, device="xla")),
    "multinomial": lambda: torch.multinomial(torch.ones(1000, device="xla"), 8),
    "dropout": lambda: nn.functional.dropout(torch.ones(64, device="xla")),
    "init": lambda: nn.init.kaiming_uniform_(torch.empty(4, 4, device="xla")),
}


@pytest.mark.core(keep=2)
@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("name", DRAWS)
def test_manual_seed_reproduces_and_draws_differ(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert not torch.equal(draw(), first)


def test_a_new_seed_or_draw_does_not_recompile() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        torch.rand(5, device="xla").sum().item()
        if seed == 0:
            compiled = metrics.COUNTERS["UncachedCompile"]
    assert metrics.COUNTERS["UncachedCompile"] == compiled


def test_the_cpu_state_is_torchs_own() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    torch.rand(100, device="xla")
    assert torch.equal(torch.rand(3), expected)


def test_device_state_can_be_read_and_set() -> None:
    torch.xla.manual_seed(11)
    assert torch.xla.initial_seed() == 11
    state = torch.xla.get_rng_state()
    first = torch.rand(4, device="xla")
    torch.xla.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="xla"), first)
    with pytest.raises(TypeError, match="get_rng_state"):
        torch.xla.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_fork_rng_restores_both_states() -> None:
    torch.manual_seed(1)
    torch.rand(2, device="xla")
    with torch.random.fork_rng(devices=[0], device_type="xla"):
        inside = torch.rand(4, device="xla"), torch.rand(4)
        torch.manual_seed(99)
    assert torch.equal(torch.rand(4, device="xla"), inside[0])
    assert torch.equal(torch.rand(4), inside[1])


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_generators_seed_ops_on_the_device(device: str) -> None:
    generator = torch.Generator(device=device)
    assert generator.device.type == device
    assert isinstance(generator, torch.Generator)
    assert generator.manual_seed(7) is generator
    assert generator.initial_seed() == 7
    before = torch.xla.get_rng_state()
    draws = [
        lambda: torch.rand(6, device="xla", generator=generator),
        lambda: torch.randint(9, (30,), device="xla", generator=generator),
        lambda: torch.randperm(40, device="xla", generator=generator),
        lambda: torch.empty(6, device="xla").normal_(generator=generator),
        lambda: torch.bernoulli(torch.full((50,), 0.5, device="xla"), generator=generator),
        lambda: torch.multinomial(torch.ones(500, device="xla"), 5, generator=generator),
        lambda: torch.normal(torch.zeros(6, device="xla"), 1.0, generator=generator),
    ]
    for draw in draws:
        generator.manual_seed(7)
        first, second = draw(), draw()
        generator.manual_seed(7)
        assert torch.equal(draw(), first)
        state = generator.get_state()
        assert torch.equal(draw(), second)
        generator.set_state(state)
        assert torch.equal(draw(), second)
        assert not torch.equal(first, second)
    assert torch.equal(torch.xla.get_rng_state(), before)
    assert generator.seed() == generator.initial_seed() != 7


def test_generators_are_independent_and_can_be_copied() -> None:
    first, second = torch.Generator("xla").manual_seed(1), torch.Generator("xla").manual_seed(2)
    a = torch.rand(5, device="xla", generator=first)
    torch.rand(5, device="xla", generator=second)
    twins = [copy.deepcopy(first), pickle.loads(pickle.dumps(first)), first.clone_state()]
    expected = torch.rand(5, device="xla", generator=first)
    assert not torch.equal(a, expected)
    for twin in twins:
        assert twin.device.type == "xla"
        assert torch.equal(torch.rand(5, device="xla", generator=twin), expected)


def test_generators_of_the_cpu_are_torchs_own() -> None:
    generator = torch.Generator()
    assert isinstance(generator, torch._C.Generator) and isinstance(torch.Generator("cpu"), torch._C.Generator)
    twins = [copy.deepcopy(generator.manual_seed(3)), pickle.loads(pickle.dumps(generator)), generator.clone_state()]
    expected = torch.rand(3, generator=generator)
    for twin in twins:
        assert twin.device.type == "cpu" and torch.equal(torch.rand(3, generator=twin), expected)
    assert not torch.equal(
        torch.rand(3, generator=twins[0].manual_seed(4)), torch.rand(3, generator=twins[1].set_state(generator.get_state()))
    )
    assert type(twins[0].seed()) is int
    assert isinstance(torch.default_generator, torch.Generator)
    assert issubclass(type(generator), torch.Generator)
    assert not isinstance(3, torch.Generator)
    with pytest.raises(RuntimeError, match="nope"):
        torch.Generator("nope")


class Block(nn.Module):
    """Something with dropout to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x)).tanh()


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoint_recomputes_with_the_same_dropout_mask(use_reentrant: bool, preserve: bool) -> None:
    """With `preserve_rng_state` the gradients are those without checkpointing, bit for bit."""

    def gradients(recompute: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = nn.ModuleList([Block(), Block()]).to("xla")
        x = torch.randn(4, 16, device="xla", requires_grad=True)
        torch.manual_seed(42)
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=use_reentrant, preserve_rng_state=preserve) if recompute else block(y)
        y.square().sum().backward()
        torch.rand(1, device="xla").item()
        return [x.grad.cpu(), *(p.grad.cpu() for p in blocks.parameters())]

    plain, again = gradients(False), gradients(True)
    if preserve:
        torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-6)
    else:
        assert not torch.allclose(again[0], plain[0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_sequential(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).to("xla")
    x = torch.ones(2, 4, device="xla", requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad.cpu(), None
    checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), expected)


def test_dropout_masks_of_steps_differ_and_backward_uses_the_forward_mask() -> None:
    x = torch.ones(200, device="xla", requires_grad=True)
    y = nn.functional.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert not torch.equal(nn.functional.dropout(x, 0.5), y)
    assert 60 < int((y > 0).sum()) < 140

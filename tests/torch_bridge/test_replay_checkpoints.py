"""`torch_bridge.optimize` of modules with activation checkpoints and dropout inside: the backward pass draws the forward's numbers again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

import torch_bridge
from tests.torch_bridge.decoders import WORDS
from tests.torch_bridge.replaying import batch, bits, compile_fast, descend, parity, player, trained  # noqa: F401
from torch_bridge.runtime import executor


class Block(nn.Module):
    """A layer with dropout on both sides, under a checkpoint. keep: whether the checkpoint restores the random state."""

    def __init__(self, keep: bool = True, reentrant: bool = False, of: Callable[..., Any] = checkpoint):
        super().__init__()
        self.options = {"preserve_rng_state": keep, "use_reentrant": reentrant}
        self.of = of
        self.net = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.of(self.net, x, **self.options)
        return found


def _deep(of: Callable[..., Any] = checkpoint) -> nn.Module:
    """Reentrant checkpoints behind a layer: torch wants an input with gradients."""
    return nn.Sequential(nn.Linear(6, 6), Block(reentrant=True, of=of), nn.Dropout(0.2), Block(reentrant=True, of=of))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), nn.Dropout(0.4), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.blocks, x, use_reentrant=False)
        return found + torch.rand_like(found)


class _Twice(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(torch.tanh(self.net(x)))
        return found


MODULES: dict[str, Callable[[], nn.Module]] = {
    "one": Block,
    "several, and draws between them": lambda: nn.Sequential(nn.Dropout(0.2), Block(), nn.Dropout(0.2), Block(), nn.Linear(6, 6)),
    "one in another": Nested,
    "other numbers in the backward pass": lambda: Block(keep=False),
    "reentrant": _deep,
    "reentrant, of torch_xla": lambda: _deep(torch_xla.utils.checkpoint.checkpoint),
    "reentrant, twice the same weights": lambda: _Twice(_deep()),
    "reentrant and not": lambda: nn.Sequential(_deep(), Block()),
    "without dropout in evaluation": lambda: Block().eval(),
}


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("name", MODULES)
def test_the_same_numbers(name: str) -> None:
    parity(MODULES[name], steps=8)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("seeded", ["each step the same", "before each step", "between forward and backward"])
def test_scripts_that_seed(seeded: str) -> None:
    def step(module: nn.Module, k: int) -> Any:
        if seeded != "between forward and backward":
            torch.manual_seed(3 if "same" in seeded else k)
        loss = module(batch(k)).square().mean()
        module.zero_grad()
        if seeded == "between forward and backward":
            torch.manual_seed(k)
        loss.backward()
        descend(module)
        return [loss, torch.rand(2, device="xla")]

    parity(Block, step, steps=8)


def test_seeding_that_hides_what_is_drawn_again() -> None:
    """A fresh draw and one of the forward's cannot be told apart: op by op."""

    def step(module: nn.Module, k: int) -> Any:
        torch.manual_seed(3)
        loss = module(batch(k)).square().mean()
        torch.manual_seed(3)
        module.zero_grad()
        loss.backward()
        descend(module)
        return loss

    parity(Block, step, played=False, off="draws random numbers from a generator or a random state of its own")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("make", [Block, _deep])
def test_several_backward_passes_and_calls_between(make: Callable[[], nn.Module]) -> None:
    """Passes in another order than the calls, one of them twice, and after the step of the forward pass."""

    def step(module: nn.Module, k: int) -> Any:
        first, second = (module(batch(k + i)).square().mean() for i in (0, 100))
        module.zero_grad()
        if k % 2:
            executor.sync()
        second.backward(retain_graph=True)
        second.backward()
        first.backward()
        descend(module)
        return [first, second]

    parity(make, step, steps=10, close=True)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("arguments", [True, False])
def test_reentrant_among_other_gradients(arguments: bool) -> None:
    """`.grad` that is there already, parameters without gradients, hooks for when one is there, gradients of the argument, several micro batches."""
    seen: list[str] = []

    def step(module: Any, k: int) -> Any:
        if k == 1:
            for name, p in module.named_parameters():
                p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
        module[1].net[1].bias.requires_grad_(k < 4)
        seen.clear()
        module.zero_grad()
        x = (batch(k) * 1.0).requires_grad_(arguments)
        if arguments:
            x = x * 2
            x.retain_grad()
        out = module(x)
        (out.square().mean() + 0.01 * module[0].weight.sum()).backward()
        module(batch(k + 50)).square().mean().backward()
        descend(module)
        return [out, x.grad, sorted(seen)]

    parity(_deep, step, steps=9, close=True)


def test_asking_for_single_gradients_is_torchs_error() -> None:
    """As without `optimize`, recorded, played and computed again."""
    module = torch_bridge.optimize(_deep().to("xla"))
    for k in range(6):
        loss = module(batch(k)).sum()
        if k != 4:
            loss.backward()
    assert player(module).played
    with pytest.raises(RuntimeError, match="incompatible with"):
        torch.autograd.grad(module(batch(0)).sum(), list(module.parameters()), create_graph=True)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_bert_as_it_is(dtype: torch.dtype | None) -> None:
    """transformers' dropout and gradient checkpointing; with and without autocast."""

    def make() -> nn.Module:
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        module: Any = BertForSequenceClassification(BertConfig(vocab_size=WORDS, **sizes))  # type: ignore[arg-type]
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        made: nn.Module = module.train()
        return made

    def step(module: nn.Module, k: int) -> Any:
        words = torch.randint(0, WORDS, (2, 6), generator=torch.Generator().manual_seed(k)).to("xla")
        with torch.autocast("xla", dtype, enabled=dtype is not None):
            loss = module(input_ids=words, labels=words[:, 0] % 2).loss
        module.zero_grad()
        loss.backward()
        descend(module)
        return loss

    parity(make, step, steps=8)


def test_gradients_of_gradients_and_unknown_passes() -> None:
    """What was not recorded is computed again, with the forward's numbers."""
    torch.manual_seed(0)
    module = torch_bridge.optimize(Block().to("xla"))
    plain = Block().to("xla")
    plain.load_state_dict(module.state_dict())

    def penalty(module: nn.Module, k: int) -> Any:
        torch.manual_seed(k)
        x = batch(k).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=k > 5)
        return bits([slope, x.grad])

    for k in range(9):
        assert penalty(module, k) == penalty(plain, k)
    assert player(module).played


class Scaled(nn.Module):
    """What it computes under a checkpoint depends on an attribute."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) * self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def test_what_a_checkpoint_reads_is_changed_before_the_backward_pass() -> None:
    """Eager torch goes on with the new value; a played call cannot, and says so."""
    module = torch_bridge.optimize(Scaled().to("xla"))
    for k in range(5):
        module(batch(k)).square().mean().backward()
    assert player(module).played
    loss = module(batch(6)).square().mean()
    module.scale = 3.0
    with pytest.raises(RuntimeError, match=r"its forward has been given another state: .*scale.*torch_bridge.restore"):
        loss.backward()

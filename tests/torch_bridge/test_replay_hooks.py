"""`torch_bridge.optimize` of modules with hooks inside: the known kinds are played, others are called, and said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import torch_bridge
from tests.torch_bridge.decoders import WORDS, llama
from tests.torch_bridge.replaying import batch, bits, compile_fast, descend, parity, player, run  # noqa: F401


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)  # type: ignore[arg-type]
    )


def words(k: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 6), generator=torch.Generator().manual_seed(k)).to("xla")


def _trained(module: nn.Module, k: int) -> Any:
    labels = words(k) if "Causal" in type(module).__name__ or "LM" in type(module).__name__ else words(k)[:, 0] % 2
    loss = module(input_ids=words(k), labels=labels).loss
    module.zero_grad()
    loss.backward()
    descend(module)
    return loss


def _checkpointed(make: Callable[[], nn.Module], frozen: bool = False) -> Callable[[], nn.Module]:
    """As transformers' Trainer has it: with a hook on the embeddings."""

    def made() -> nn.Module:
        module: Any = make()
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        module.enable_input_require_grads()
        assert module.get_input_embeddings()._forward_hooks
        if frozen:
            module.get_input_embeddings().requires_grad_(False)
        return module.train()

    return made


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", [bert, llama])
def test_gradient_checkpointing_of_transformers(make: Callable[[], nn.Module], frozen: bool) -> None:
    parity(_checkpointed(make, frozen), _trained)


def _require(module: Any, input: Any, output: Any) -> None:
    output.requires_grad_(True)


@pytest.mark.parametrize("hook", [_require, lambda m, i, o: o.requires_grad_(True), lambda mod, args, out: out.requires_grad_()])
def test_a_script_of_its_own_does_the_same(hook: Any) -> None:
    """As PEFT's page has it. The layer before is frozen."""

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        module[0].requires_grad_(False)
        module[0].register_forward_hook(hook)
        return module

    parity(make)


def _double(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


def _freezes(module: Any, args: Any, out: torch.Tensor) -> None:
    out.requires_grad_(False)


SEEN: list[Any] = []


def _notes(module: Any, args: Any, out: torch.Tensor) -> None:
    SEEN.append(len(args))


@pytest.mark.parametrize("hook", [_double, _freezes])
def test_hooks_that_do_nothing_else_are_played(hook: Any) -> None:
    """A forward hook is code like any other."""
    module = torch_bridge.optimize(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to("xla"))
    with torch.no_grad():
        plain = bits(module(batch(0)))
        handle = module[0].register_forward_hook(hook)
        found = [bits(module(batch(0))) for _ in range(8)]
        assert found == found[:1] * 8 and (found[0] == plain) == (hook is not _double) and player(module).played
        handle.remove()
        assert bits(module(batch(0))) == plain


def test_other_hooks_are_called_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """They may do anything: op by op while they are there, played again when they are gone."""
    hook = _notes
    SEEN.clear()
    module = torch_bridge.optimize(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to("xla"))
    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_bridge"):
        expected = bits(module(batch(0)))
        handle = module[0].register_forward_hook(hook)
        for _ in range(8):
            assert bits(module(batch(0))) == expected
        assert player(module).played == 0 and SEEN == [1] * 8
        handle.remove()
        for _ in range(4):
            assert bits(module(batch(0))) == expected
        assert player(module).played
    said = [record.getMessage() for record in caplog.records]
    assert said == ["torch_bridge.optimize: Sequential is recorded op by op while there is: a hook on 0"]


def test_what_else_stands_in_the_way_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """An argument of a class of the script's: said, not just slow. A large tensor on the CPU that the forward does not read does no harm."""

    class Options:
        scale = 2.0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.table = torch.zeros(1 << 15)

        def forward(self, x: torch.Tensor, options: Any = None) -> torch.Tensor:
            return self.layer(x) * (options.scale if options else 1.0)

    module: Any = torch_bridge.optimize(Net().to("xla"))
    options = Options()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_bridge"):
        for k in range(6):
            module(batch(k))
        module.table = None
        for k in range(6):
            module(batch(k), options)
        for k in range(4):
            module(batch(k))
    assert player(module).played and [record.getMessage().partition("while there is: ")[2] for record in caplog.records] == [
        "an argument of type Options",
    ]

"""`torch_bridge.optimize` and modules that ask for small integers in their forward: played where the answers are those of a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import torch_bridge
from tests.torch_bridge.decoders import WORDS, gpt2, llama
from tests.torch_bridge.replaying import Ruled, batch, compile_fast, descend, parity, player  # noqa: F401
from torch_bridge import metrics
from torch_bridge.replay.player import OTHERS
from torch_bridge.replay.recordings import ANSWERS
from torch_bridge.runtime import executor


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16
    )
    return BertForMaskedLM(config)


def _padded(k: int, short: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, mask and labels; short: the second row ends early, elsewhere for every k."""
    words = torch.randint(1, WORDS, (2, 6), generator=torch.Generator().manual_seed(k))
    mask = torch.ones_like(words)
    if short:
        mask[1, 3 + k % 3 :] = 0
    return words.to("xla"), mask.to("xla"), words.masked_fill(mask == 0, -100).to("xla")


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("make", [llama, gpt2, bert])
@pytest.mark.parametrize("short", [lambda k: False, lambda k: True, lambda k: k % 3 == 2], ids=["full", "padded", "both"])
def test_attention_masks(make: Callable[[], nn.Module], short: Callable[[int], bool]) -> None:
    """A decoder takes another way where no row is padded: each of both is recorded, and played."""

    def step(m: nn.Module, k: int) -> Any:
        words, mask, labels = _padded(k, short(k))
        loss = m(input_ids=words, attention_mask=mask, labels=labels).loss
        m.zero_grad()
        loss.backward()
        descend(m)
        return loss

    module = parity(make, step, steps=14)
    assert player(module).played >= 14 - 2 * 3 - 1  # one is recorded again and compared


class Small(Ruled):
    """With a counter among its buffers."""

    def __init__(self, rule: Callable[..., Any]):
        super().__init__(rule)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))


def _counts(m: Any, x: Any, y: Any, *others: Any) -> Any:
    m.steps += 1
    return y * 3 if m.steps % 4 == 0 else y


def _two_answers(m: Any, x: Any, y: Any, mask: Any) -> Any:
    if mask.any():
        y = y * 2
        if (mask.sum(1) > 2).all():
            y = y + 1
    return y


ASKS: dict[str, Callable[..., Any]] = {
    "a mask": lambda m, x, y, mask: y * 2 if mask.all() else y,
    "a mask's view": lambda m, x, y, mask: y * 2 if mask.t()[1:, :2].all() else y,
    "one element": lambda m, x, y, mask: y * (1 + int(mask[0, 0])),
    "a number for a shape": lambda m, x, y, mask: y[: 2 + int(mask[:, 0].max())],
    "one answer after another": _two_answers,
    "a counter among the buffers": _counts,
    "with a constant from the host": lambda m, x, y, mask: (
        y * 2 if (mask[0] == torch.tensor([1, 1, 1, 1, 1, 0], device=x.device)).all() else y
    ),
    "a number in an f-string": lambda m, x, y, mask: y * len(f"{mask.sum():>{20 + mask[0, 0]}}" + "|".join([f"{mask.sum()}"] * 2)),
    "a number's text": lambda m, x, y, mask: y * float(format(mask[:, 0].sum(), "d") + "{:d}".format(mask[1:, 5].sum())),  # noqa: UP032
    "an index from the host": lambda m, x, y, mask: y * 2 if 0 in mask[:, [-1, 0]] else y,
}
MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "from the host": lambda mask: mask.to("xla"),
    "made on the device": lambda mask: (mask.to("xla") * 2 - 1) > 0,
    "a view": lambda mask: torch.cat([mask, mask]).to("xla")[4:],
    "full of one number": lambda mask: torch.ones(4, 6, dtype=torch.long, device="xla"),
}


def _mask(k: int) -> torch.Tensor:
    mask = torch.ones(4, 6, dtype=torch.long)
    if k % 4 == 1:
        mask[0, 0] = mask[0, 5] = 0
    if k % 4 == 2:
        mask[2, 2:] = 0
    return mask


@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize("given", MASKS)
@pytest.mark.parametrize("name", ASKS)
def test_answers_that_differ_now_and_then(name: str, given: str) -> None:
    def step(m: nn.Module, k: int) -> Any:
        x = batch(k).requires_grad_()
        out = m(x, MASKS[given](_mask(k)))
        m.zero_grad()
        out.square().sum().backward()
        descend(m)
        return [out, x.grad]

    parity(lambda: Small(ASKS[name]), step, steps=16)


def test_a_mask_that_changes_in_place() -> None:
    mask: list[torch.Tensor] = []

    def step(m: nn.Module, k: int) -> Any:
        if k == 0:
            mask[:] = [torch.ones(4, 6, dtype=torch.bool).to("xla")]
        if k % 5 == 4:
            mask[0].logical_not_()
        out = m(batch(k), mask[0])
        m.zero_grad()
        out.square().sum().backward()
        descend(m)
        return out

    parity(lambda: Small(ASKS["a mask"]), step, steps=16)


def test_the_step_stays_whole() -> None:
    """Neither to record a branch nor to decide it takes a program of its own."""
    torch.manual_seed(0)
    m = torch_bridge.optimize(Small(ASKS["a mask"]).to("xla"))
    executor.sync()
    ran = metrics.EXECUTE_TIME.count
    for k in range(10):
        m(batch(k), _mask(k).to("xla")).square().sum().backward()
        descend(m)
        m.zero_grad()
        executor.sync()
    assert metrics.EXECUTE_TIME.count == ran + 10
    assert player(m).played


def test_too_many_answers() -> None:
    """A few kinds are kept; where most calls are of others, the module is recorded op by op, and says so."""

    def step(m: nn.Module, k: int) -> Any:
        out = m(batch(k), torch.tensor([1 + k % (1 << 7)]).to("xla"))
        m.zero_grad()
        out.sum().backward()
        descend(m)
        return out

    rule = lambda m, x, y, count: y * (count + 1)[0].item()  # noqa: E731
    parity(lambda: Small(rule), step, steps=ANSWERS + 4, played=False)
    parity(lambda: Small(rule), step, steps=ANSWERS + OTHERS + 2, played=False, off="the values that it asks for")


def test_a_value_that_takes_the_device() -> None:
    rule = lambda m, x, y, mask: y * 2 if y.sum() > 0 else y  # noqa: E731

    def step(m: nn.Module, k: int) -> Any:
        out = m(batch(k), _mask(k).to("xla"))
        m.zero_grad()
        out.square().sum().backward()
        return out

    parity(lambda: Small(rule), step, played=False, off="it reads a tensor's value")


class Asking(torch.autograd.Function):
    """Asks for a value in its backward pass."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return (grad if (mask * 2).all() else grad * 3), None


def test_a_value_asked_for_in_the_backward_pass() -> None:
    def step(m: nn.Module, k: int) -> Any:
        x = batch(k).requires_grad_()
        out = m(x, _mask(k).to("xla"))
        m.zero_grad()
        out.square().sum().backward()
        return [out, x.grad]

    parity(
        lambda: Small(lambda m, x, y, mask: Asking.apply(y, mask)),
        step,
        played=False,
        off="in its backward pass, it reads a tensor's value",
    )

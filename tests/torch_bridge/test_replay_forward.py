"""What scripts ask of `module.forward` beside calling it, once it is played."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge
from tests.torch_bridge.decoders import WORDS, llama
from tests.torch_bridge.replaying import batch, bits, compile_fast, player  # noqa: F401


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        """A layer, scaled."""
        return self.layer(x) * scale


def test_it_looks_like_the_method() -> None:
    plain = Net()
    module = torch_bridge.optimize(copy.deepcopy(plain))
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert inspect.getsource(module.forward) == inspect.getsource(plain.forward) and inspect.getdoc(module.forward) == "A layer, scaled."
    assert module.forward.__name__ == "forward" and module.forward.__qualname__ == "Net.forward" and module.forward.__self__ is module
    assert module.forward.__code__.co_varnames[:3] == ("self", "x", "mask") and module.forward.__annotations__["scale"] == "float"
    copied: Any = copy.deepcopy(module)
    assert copied.forward.__self__ is copied and inspect.signature(copied.forward) == inspect.signature(plain.forward)
    assert inspect.signature(torch_bridge.restore(module).forward) == inspect.signature(plain.forward)


def test_a_forward_of_the_instance() -> None:
    module = Net()
    module.forward = functools.partial(module.forward, scale=3.0)  # type: ignore[method-assign]
    expected = inspect.signature(module.forward)
    assert inspect.signature(torch_bridge.optimize(module).forward) == expected


def test_what_a_method_does_not_have() -> None:
    found: Any = torch_bridge.optimize(Net()).forward
    assert not hasattr(found, "__len__") and not hasattr(found, "__array__") and not hasattr(found, "__func__")
    with pytest.raises(AttributeError, match="'Player' object has no attribute 'weights'"):
        found.weights  # noqa: B018


def test_a_module_that_is_gone() -> None:
    found: Any = torch_bridge.optimize(Net()).forward
    with pytest.raises(ReferenceError, match="Hold the module, not module.forward alone"):
        found(torch.ones(2, 6))


def test_wrapping_as_accelerate_does() -> None:
    """Who wraps the forward wraps what is called: it is still played."""
    module: Any = torch_bridge.optimize(Net().eval().to("xla"))
    played = player(module)
    inner = module.forward.__func__ if hasattr(module.forward, "__func__") else module.forward
    module.forward = torch.autocast("xla", torch.bfloat16)(inner)
    with torch.no_grad():
        for k in range(5):
            assert module(batch(k)).dtype == torch.bfloat16
    assert played.played


def test_generate_sees_the_attention_mask() -> None:
    """transformers asks the signature whether a model takes a mask; padded prompts go on as they do without `optimize`."""
    torch.manual_seed(0)
    plain = llama().to("xla").eval()
    module = copy.deepcopy(plain)
    torch_bridge.optimize(module)
    words = torch.randint(3, WORDS, (2, 6), generator=torch.Generator().manual_seed(0))
    words[0, :3] = 1

    def generated(model: Any) -> Any:
        how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 1, "return_dict_in_generate": True, "output_logits": True}
        return bits(model.generate(words.to("xla"), **how).logits)

    assert generated(module) == generated(plain)

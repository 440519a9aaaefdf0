"""`torch_bridge.optimize`: what modules return beside tensors, above all the caches that transformers' decoders return by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache, DynamicLayer

import torch_bridge
from tests.torch_bridge.decoders import WORDS, gpt2, llama
from tests.torch_bridge.replaying import batch, compile_fast, descend, parity, player  # noqa: F401
from torch_bridge import metrics
from torch_bridge.replay import output_trees
from torch_bridge.runtime import executor


def t5() -> nn.Module:
    config = T5Config(vocab_size=WORDS, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def words(k: int, length: int = 6) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, length), generator=torch.Generator().manual_seed(k)).to("xla")


def _trained(module: nn.Module, k: int) -> Any:
    loss = module(input_ids=words(k), labels=words(k)).loss
    module.zero_grad()
    loss.backward()
    descend(module)
    return loss


def _caches_in_the_loss(module: nn.Module, k: int) -> Any:
    """Gradients through the keys and values that are returned."""
    out = module(input_ids=words(k), labels=words(k))
    cache = out.past_key_values
    assert type(cache) is DynamicCache and cache.get_seq_length() == 6 and all(type(layer) is DynamicLayer for layer in cache.layers)
    module.zero_grad()
    (out.loss + sum(layer.keys.square().mean() + layer.values.mean() for layer in cache.layers)).backward()
    descend(module)
    return [out.loss, [layer.keys for layer in cache.layers]]


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("make", [gpt2, t5, llama])
def test_decoders_with_their_default_configuration(make: Callable[[], nn.Module]) -> None:
    parity(make, _trained)


def test_gradients_through_a_cache() -> None:
    parity(llama, _caches_in_the_loss)


def test_another_cache_for_each_call() -> None:
    """A later call leaves the caches of earlier ones as they are, and generation goes on from a played one."""
    torch.manual_seed(0)
    plain = llama().to("xla").eval()
    optimized = torch_bridge.optimize(llama().to("xla").eval())
    optimized.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for k in range(5):
            first, second = optimized(words(k)).past_key_values, optimized(words(k + 1)).past_key_values
            executor.sync()
        assert player(optimized).played
        assert first is not second and first.layers[0] is not second.layers[0]
        for k, cache in ((4, first), (5, second)):
            expected = plain(words(k))
            assert torch.equal(cache.layers[1].values.cpu(), expected.past_key_values.layers[1].values.cpu())
            going_on = plain(words(9, 1), past_key_values=expected.past_key_values).logits
            assert torch.equal(optimized(words(9, 1), past_key_values=cache).logits.cpu(), going_on.cpu())
            assert cache.get_seq_length() == 7


class Keeps(nn.Module):
    """Returns a cache: its own, or a new one twice."""

    def __init__(self, own: bool):
        super().__init__()
        self.net = nn.Linear(6, 6)
        self.cache = DynamicCache() if own else None

    def forward(self, x: torch.Tensor) -> Any:
        y = self.net(x)
        if self.cache is not None:
            return y, self.cache
        new = DynamicCache()
        return y, new, new


@pytest.mark.parametrize("own, reason", [(True, "it returns an object that was there before"), (False, "an object of class DynamicCache")])
def test_objects_that_somebody_else_may_hold(own: bool, reason: str) -> None:
    """Whoever compares identities would see new ones."""

    def step(module: nn.Module, k: int) -> Any:
        y, *caches = module(batch(k))
        module.zero_grad()
        y.square().mean().backward()
        assert caches[0] is (module.cache if own else caches[1])
        return y

    parity(lambda: Keeps(own), step, played=False, off=reason)


class Empties(nn.Module):
    """Joins what it computes with nothing, made on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = torch.tensor([], device=x.device), torch.empty(0, 6).to(x.device), torch.zeros(2, 0, 6).to(x.device).reshape(0, 6)
        return torch.cat([nothing[0], self.net(x), *nothing[1:]])


def test_tensors_without_elements_from_the_host() -> None:
    parity(Empties)


def test_taking_apart_and_putting_together() -> None:
    cache = DynamicCache()
    for k in range(2):
        cache.update(torch.ones(1, 1, 2, 2, device="xla") * k, torch.zeros(1, 1, 2, 2, device="xla"), k)
    y = torch.ones(2, device="xla")
    tensors, rest, how, _ = output_trees.taken_apart({"y": y, "cache": cache, "again": (y, None, 3)}, {})
    assert len(tensors) == 5 and output_trees.unknown(rest) is None
    made = output_trees.put_together([t + 1 for t in tensors], [], rest, how)
    assert made["y"] is made["again"][0] and made["again"][1:] == (None, 3)
    new = made["cache"]
    assert type(new) is DynamicCache and new is not cache and new.layers is not cache.layers and vars(new).keys() == vars(cache).keys()
    assert (
        torch.equal(new.layers[1].keys.cpu(), torch.full((1, 1, 2, 2), 2.0))
        and new.layers[1].is_initialized
        and new.layers[1].keys.dtype == torch.float32
    )
    assert len(output_trees.taken_apart(made, {}).opened) == 1 + 1 + 2  # the cache, its list of layers, the layers


class Odd:
    pass


def test_other_objects_stay_as_they_are() -> None:
    odd = Odd()
    twice = torch.ones(1)
    rest = output_trees.taken_apart([odd, torch.ones(1)], {}).rest
    assert rest[0] is odd and output_trees.unknown(rest) is Odd
    assert output_trees.unknown(output_trees.taken_apart([twice, torch.ones(1)], {}).rest) is None
    assert output_trees.unknown(output_trees.taken_apart([twice, twice], {}).rest) is torch.Tensor
    cache = DynamicCache()
    cache.extra = {"a": [odd]}  # type: ignore[attr-defined]
    assert output_trees.unknown(output_trees.taken_apart(cache, {}).rest) is Odd


def mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        output_router_logits=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return MixtralForCausalLM(config)


def _hidden_states(m: nn.Module, k: int) -> Any:
    """Collected by hooks that the first such call puts on the layers, and asked for in two of three calls."""
    out = m(input_ids=words(k), labels=words(k), output_hidden_states=k % 3 != 1)
    hidden = out.hidden_states or ()
    assert len(hidden) == (0 if k % 3 == 1 else 3)
    m.zero_grad()
    (out.loss + sum(h.square().mean() for h in hidden)).backward()
    descend(m)
    return [out.loss, list(hidden)]


def test_router_logits_that_hooks_collect() -> None:
    parity(mixtral, _trained, steps=8)


def test_hidden_states_that_hooks_collect() -> None:
    module = parity(llama, _hidden_states, steps=18)
    assert player(module).played >= 6


@pytest.mark.switched_on("NXD_JAX_REPLAY")
def test_a_played_layer_inside_a_model_that_collects() -> None:
    """Its hook has to be called, so it is recorded op by op there, and played where nothing is collected."""

    def step(m: nn.Module, k: int) -> Any:
        if k < 2 or 8 <= k < 10:
            return _hidden_states(m, k)
        loss = m(input_ids=words(k), labels=words(k), use_cache=False).loss
        m.zero_grad()
        loss.backward()
        descend(m)
        return loss

    parity(llama, step, steps=14, part=lambda m: m.model.layers[0])


def test_a_hook_of_the_scripts_beside_those() -> None:
    """Another hook on a layer is called in every call."""
    seen = []

    def step(m: nn.Module, k: int) -> Any:
        if k == 9:
            m.model.layers[0].register_forward_hook(lambda *_: seen.append(k))
        return _hidden_states(m, k)

    parity(llama, step, steps=18)
    assert len(seen) == 2 * 9


def test_a_first_call_keeps_nothing() -> None:
    """Its step has the program of all later ones: no tensor that it made is held by what was noted of it."""
    torch.manual_seed(0)
    module = torch_bridge.optimize(llama().to("xla"))
    mask = torch.ones(words(0).shape, dtype=torch.long).to("xla")
    metrics.clear_counters()
    for k in range(5):
        module(input_ids=words(k), labels=words(k), attention_mask=mask).loss.backward()
        executor.sync()
        module.zero_grad()
    assert player(module).played and metrics.COUNTERS.get("UncachedCompile", 0) == 1

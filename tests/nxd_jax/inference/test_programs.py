"""Prompts and the tokens after them, through traced programs with a KV cache, give what transformers' eager model gives for the whole text."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch

from nxd_jax.inference import building
from nxd_jax.inference.config import InferenceConfig
from nxd_jax.inference.mixture import mixture
from nxd_jax.tensor_parallel.head_plans import GQA
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.inference import small


class Case(NamedTuple):
    """A model on ranks."""

    kind: str
    tp: int
    changes: dict[str, Any] = {}
    gqa: GQA | None = None
    buckets: tuple[tuple[int, ...], tuple[int, ...]] = ((6, 12), (10, 24))
    options: dict[str, Any] = {}


CASES = {
    "qwen2-8-fewer-heads": Case("qwen2", 8, {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 2}),
    "gpt2-1": Case("gpt2", 1),
    "gpt2-2": Case("gpt2", 2, {"tie_word_embeddings": False, "n_inner": None}),
    "gpt2-4-fewer-heads": Case("gpt2", 4, {"num_attention_heads": 6, "hidden_size": 96}),
    "gpt2-4-fused-qkv": Case("gpt2", 4, {"num_attention_heads": 6, "hidden_size": 96}, options={"fused_qkv": True}),
    "llama-1": Case("llama", 1),
    "llama-2": Case("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "llama-4": Case("llama", 4),
    "llama-8": Case("llama", 8),
    "llama-2-mha-of-3": Case("llama", 2, {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 3}),
    "llama-4-as-mha": Case("llama", 4, gqa=GQA.CONVERT_TO_MHA),
    "mixtral-2": Case("mixtral", 2, {"sliding_window": 6}, buckets=((12,), (24,))),
    "llama-4-rope-llama3": Case(
        "llama",
        4,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral-2-window": Case("mistral", 2),
    "mixtral-1": Case("mixtral", 1),
    "mixtral-4": Case("mixtral", 4),
    "mixtral-2-one-expert-a-token": Case("mixtral", 2, {"num_experts_per_tok": 1}),
    "mixtral-1-ep-2": Case("mixtral", 1, options={"ep_degree": 2}),
    "mixtral-2-ep-4": Case("mixtral", 2, options={"ep_degree": 4}, buckets=((12,), (24,))),
    "llama-4-flash-decoding": Case("llama", 4, options={"flash_decoding_enabled": True}),
    "qwen2-8-flash-decoding": Case(
        "qwen2",
        8,
        {"num_attention_heads": 6, "hidden_size": 96, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        options={"flash_decoding_enabled": True, "fused_qkv": True},
    ),
    "qwen2-1": Case("qwen2", 1),
    "qwen2-2-window": Case("qwen2", 2, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
}


@pytest.mark.core(keep=2)
@pytest.mark.thorough(keep=10)
@pytest.mark.parametrize("name", CASES)
def test_prompts_and_later_tokens(name: str) -> None:
    """Rows are padded on the right, on the left and in the middle. They go to lines in another order and from one bucket to the next; then a line gets
    another text."""
    case = CASES[name]
    model = small.model(case.kind, **case.changes)
    options = InferenceConfig(
        tp_degree=case.tp,
        batch_size=3,
        ctx_batch_size=2,
        seq_len=24,
        max_context_length=12,
        context_buckets=case.buckets[0],
        decode_buckets=case.buckets[1],
        gqa=case.gqa,
        **case.options,
    )
    ours = building.build(model.config, options, model.state_dict())
    ours.to_neuron()
    right, left, other = small.prompts([8, 7, 4])
    texts: dict[int, list[int]] = {2: right, 0: left}
    found = ours(**padded([(right, "right"), (left, "left")], 12), seq_ids=torch.tensor([2, 0]))
    close(found, [small.logits(model, right)[-1], small.logits(model, left)[-1]])
    for step in range(4):
        if step == 2:
            texts[1] = other
            found = ours(**padded([(other, "left"), (other, "both")], case.buckets[0][0]), seq_ids=torch.tensor([1, 1]))
            close(found, [small.logits(model, other)[-1]] * 2)
        for text in texts.values():
            text.append(small.prompts([1], seed=len(text))[0][0])
        ids, places = torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        for line, text in texts.items():
            ids[line, 0], places[line] = text[-1], len(text) - 1
        slots = next(n for n in case.buckets[1] if max(places) < n)
        found = ours(input_ids=ids, position_ids=places, model_name=f"decode_{slots}")
        lines = sorted(texts)
        close(found[lines, 0], [small.logits(model, texts[line])[-1] for line in lines])


@pytest.mark.core(keep=0)
def test_long_prompts_go_blockwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from nxd_jax.inference import attention

    monkeypatch.setattr(attention, "FLASH_FROM", 16)
    model = small.model("llama")
    ours = building.build(model.config, InferenceConfig(tp_degree=2, seq_len=24, max_context_length=16), model.state_dict())
    ours.to_neuron()
    (text,) = small.prompts([13])
    close(ours(**padded([(text, "left")], 16)), [small.logits(model, text)[-1]])
    text.append(9)
    close(ours(input_ids=torch.tensor([[9]]), position_ids=torch.tensor([13]))[0], [small.logits(model, text)[-1]])


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize(
    ("kind", "tp"), [("llama", 2), ("llama", 1), ("llama", 4), ("mixtral", 1), ("mixtral", 4), ("gpt2", 2), ("qwen2", 4), ("mistral", 2)]
)
def test_bfloat16(kind: str, tp: int) -> None:
    """As near to float32, with the same weights, as eager bfloat16 is.

    All experts are each token's: among fewer, rounding makes a token's choice another one where two experts are about as good, in eager torch, too.
    """
    changes: dict[str, Any] = {"num_experts_per_tok": 4} if kind == "mixtral" else {}
    model = small.model(kind, num_hidden_layers=3, **changes).bfloat16()
    exact = copy.deepcopy(model).float()
    options = InferenceConfig(tp_degree=tp, batch_size=4, seq_len=24, max_context_length=16, torch_dtype=torch.bfloat16)
    ours = building.build(model.config, options, model.state_dict())
    ours.to_neuron()
    texts = small.prompts([16] * 4)
    found = [ours(**padded([(text, "right") for text in texts], 16), seq_ids=torch.arange(4))]
    for place in range(16, 19):
        for text in texts:
            text.append(place)
        found.append(ours(input_ids=torch.full((4, 1), place), position_ids=torch.full((4,), place))[:, 0])
    expected, theirs = (torch.stack([small.logits(one, text)[15:] for text in texts]).float() for one in (exact, model))
    off, theirs_off = (float((logits - expected).norm()) for logits in (torch.stack(found, 1), theirs))
    assert found[0].dtype == torch.float32 and 0 < off < 1.5 * theirs_off, off / theirs_off


def test_experts_are_chosen_by_logits_of_the_models_dtype() -> None:
    """As transformers' router does: its product in bfloat16, the choice in float32 and wider."""
    model = small.model("mixtral").bfloat16()
    with NxDParallelState(world_size=1):
        router = mixture(model.config, {"dtype": torch.bfloat16, "device": "cpu"}).router
    router.load_state_dict({"linear_router.weight": model.model.layers[0].mlp.gate.weight})
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits, _, chosen = router(x)
    theirs, _, theirs_chosen = model.model.layers[0].mlp.gate(x)
    assert logits.dtype == torch.bfloat16 and torch.equal(logits, theirs)
    assert torch.equal(chosen, theirs_chosen)


def test_dtypes_by_name() -> None:
    """As config.json has them."""
    for name in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert InferenceConfig(torch_dtype=name) == InferenceConfig(torch_dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert InferenceConfig.from_json(InferenceConfig(torch_dtype=torch.float16).to_json()).torch_dtype is torch.float16
    for wrong in ("bf16", "int8", torch.float8_e4m3fn, 16):
        with pytest.raises(ValueError, match=f"torch_dtype={wrong!r} must be torch.bfloat16, .* or the name of one of these"):
            InferenceConfig(torch_dtype=wrong)  # type: ignore[arg-type]


def test_experts_that_do_not_divide() -> None:
    config = small.model("mixtral").config
    with pytest.raises(ValueError, match="experts of intermediate_size 64 must be divided by 3 tensor-parallel ranks"):
        building.build(config, InferenceConfig(tp_degree=3), {})
    with pytest.raises(ValueError, match="4 experts must be divided by ep_degree=3: choose another number"):
        building.build(config, InferenceConfig(ep_degree=3), {})
    with pytest.raises(
        ValueError, match="ep_degree=2 shares out experts, and a llama model has none: leave it 1, and raise tp_degree instead"
    ):
        building.build(small.model("llama").config, InferenceConfig(ep_degree=2), {})


def padded(rows: list[tuple[list[int], str]], length: int) -> dict[str, torch.Tensor]:
    """Rows with the side that they are padded on, filled with tokens that must not matter."""
    ids, mask = torch.full((len(rows), length), 7), torch.zeros(len(rows), length, dtype=torch.int64)
    for k, (row, side) in enumerate(rows):
        place = {"right": range(len(row)), "left": range(length - len(row), length), "both": [0, *range(length - len(row) + 1, length)]}[
            side
        ]
        ids[k, list(place)], mask[k, list(place)] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def close(found: torch.Tensor, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=1e-4)

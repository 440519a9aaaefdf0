"""A KV cache in float8: what it keeps, how far that is off, and how many bytes it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nxd_jax.inference import InferenceConfig, KVCacheManager, LanguageModel, generation, model_files
from nxd_jax.quantization import KVQuantizationConfig
from nxd_jax.quantization.schemes import rounded
from tests.nxd_jax.inference import small

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Rounded(transformers.DynamicCache):
    """transformers' cache with numbers that float8 has; a prompt is read without rounding."""

    dtype = E4M3

    def update(self, k: Any, v: Any, layer_idx: int, *args: Any, **more: Any) -> Any:
        first = self.get_seq_length(layer_idx) == 0
        found = super().update(*(rounded(t, self.dtype).to(t.dtype) for t in (k, v)), layer_idx, *args, **more)
        return (k, v) if first else found


def rounded_logits(theirs: Any, text: list[int], prompt: int) -> torch.Tensor:
    """transformers' logits of the last token of the prompt and of each token after it, one call for each."""
    cache, found = Rounded(), []
    with torch.no_grad():
        for ids in (text[:prompt], *([t] for t in text[prompt:])):
            found.append(theirs(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1])
    return torch.stack(found)


@pytest.mark.parametrize(("dtype", "step", "largest"), [(E4M3, 2**-4, 240.0), (E5M2, 2**-3, 57344.0)])
def test_what_is_kept(dtype: torch.dtype, step: float, largest: float) -> None:
    """Off by half a step of the format's mantissa; above its bound it is the bound."""
    cache = KVCacheManager(1, 2, 2, 8, 4, torch.bfloat16, quantization=KVQuantizationConfig(quant_dtype=dtype))
    assert {(t.dtype, t.nbytes) for t in cache.past_key_values} == {(dtype, 2 * 2 * 8 * 4)}
    k, v = torch.randn(2, 2, 6, 4).bfloat16(), torch.randn(2, 2, 6, 4).bfloat16() * 20
    k[0, 0, 0], v[1, 1, 5] = 1e30, -1e30
    cache.fill(0, k[:, :, :5], v[:, :, :5])
    cache.append(0, k[:, :, 5:], v[:, :, 5:], torch.full((2, 1), 5))
    for found, given in zip(cache.get_cache(0, 6), (k, v), strict=True):
        assert found.dtype == torch.bfloat16
        expected = given.double().clamp(-largest, largest)
        off = (found.double() - expected).abs()
        assert (off <= expected.abs() * step + 2**-10).all() and off.max() > 0
    assert cache.get_cache(0)[0][0, 0, 0, 0] == largest and cache.get_cache(0)[1][1, 1, 5, 0] == -largest


@pytest.mark.core(keep=1)
@pytest.mark.parametrize(("split", "slots"), [(False, 24), (True, 24 // 2 + 1)])
def test_programs(split: bool, slots: int, tmp_path: Path) -> None:
    """Four ranks with a copy of a K/V head each, or a part of its slots and one to spare: logits are those of transformers with a rounded cache, near the
    exact ones, in a quarter of the bytes."""
    theirs = small.folder(tmp_path, "llama")
    kept: dict[str, Any] = {"kv_quant_config": KVQuantizationConfig(), "flash_decoding_enabled": split}
    options = InferenceConfig(tp_degree=4, batch_size=2, seq_len=24, max_context_length=8, **kept)
    model = LanguageModel.from_pretrained(tmp_path, options)
    (text,) = small.prompts([12])
    found = [model.prefill([text[:8]], [1])[0]]
    found += [model.decode([0, token], [0, 8 + k])[1] for k, token in enumerate(text[8:])]
    expected = rounded_logits(theirs, text, 8)
    torch.testing.assert_close(torch.stack(found), expected, atol=1e-4, rtol=1e-4)
    exact = small.logits(theirs, text)[7:]
    off = ((torch.stack(found) - exact).norm(dim=1) / exact.norm(dim=1)).tolist()
    assert off[0] < 1e-5 and 1e-4 < max(off) < 0.25
    cache = [model.nxd_model.read_from_neuron_buffer(f"kv_mgr.past_key_values.{k}", rank) for k in range(4) for rank in range(4)]
    layers, heads = 2, 4
    assert {t.dtype for t in cache} == {E4M3}
    assert sum(t.nbytes for t in cache) == 2 * layers * options.batch_size * heads * slots * 16


@pytest.mark.core(keep=0)
def test_in_a_file(tmp_path: Path) -> None:
    small.folder(tmp_path, "qwen2")
    options = InferenceConfig(
        tp_degree=2, seq_len=24, max_context_length=8, torch_dtype=torch.bfloat16, kv_quant_config=KVQuantizationConfig(quant_dtype=E5M2)
    )
    model = LanguageModel.from_pretrained(tmp_path, options)
    prompts = small.prompts([5, 8])
    answers = generation.generate(model, prompts, 6)
    model_files.save(model, tmp_path / "model.pt")
    again = model_files.load(tmp_path / "model.pt")
    assert again.options == options and again.options.kv_quant_config == KVQuantizationConfig(quant_dtype=E5M2)
    assert generation.generate(again, prompts, 6) == answers
    assert again.nxd_model.read_from_neuron_buffer("kv_mgr.past_key_values.0", 1).dtype == E5M2


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (torch.float8_e4m3fn, TypeError, "kv_quant_config must be a KVQuantizationConfig or None, got dtype"),
        (KVQuantizationConfig(direct_cast=False), NotImplementedError, "a KV cache with scales, is not supported: leave direct_cast=True"),
        (
            KVQuantizationConfig(quant_dtype=torch.int8),
            ValueError,
            "KVQuantizationConfig(quant_dtype=torch.int8) must be one of torch.float8_e4m3fn, torch.float8_e5m2",
        ),
    ],
)
def test_what_is_refused(given: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        InferenceConfig(kv_quant_config=given)
    assert words in str(error.value)
    with pytest.raises(kind):
        KVCacheManager(1, 1, 1, 4, 4, quantization=given)

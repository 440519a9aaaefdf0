"""Decoders with int8 and float8 weights: logits are those of the dequantized model and near the exact ones, and files have the bytes that one counts."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_jax.inference import InferenceConfig, LanguageModel, LoraServingConfig, dtype_names, model_files
from nxd_jax.quantization.quantization_config import QuantizationType, QuantizedDtype
from nxd_jax.quantization.schemes import Scheme
from tests.nxd_jax.inference import small

DTYPES = {"int8": torch.int8, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
STEPS = {"f8e4m3": 2**-4, "f8e5m2": 2**-3}
LEAST = {"int8": 0.5, "f8e4m3": 2**-10, "f8e5m2": 2**-17}
"""The largest error of a number: of float8 so much of the number itself, and beside that so many scales, half of the least step."""


def dequantized(theirs: Any, dtype: str, kind: str) -> None:
    """Give a transformers model the weights that ours stand for."""
    scheme = Scheme(QuantizationType(kind), DTYPES[dtype], None if kind == "per_tensor_symmetric" else 0)
    for name, layer in theirs.named_modules():
        if "." in name and isinstance(layer, torch.nn.Linear):
            exact = layer.weight.detach().clone()
            numbers, scale = scheme.quantize(exact)
            layer.weight.data = scheme.dequantize(numbers, scale, torch.float32)
            off, of_number = (layer.weight - exact).abs(), 0 if dtype == "int8" else exact.abs() * STEPS[dtype]
            assert (off <= of_number + scale * LEAST[dtype] + 1e-6).all()


def found_logits(folder: Path, text: list[int], **options: Any) -> tuple[LanguageModel, torch.Tensor]:
    """Of a prompt of 8 tokens and each that follows."""
    model = LanguageModel.from_pretrained(folder, InferenceConfig(seq_len=24, max_context_length=8, **options))
    found = [model.prefill([text[:8]], [0])[0], *(model.decode([t], [8 + k])[0] for k, t in enumerate(text[8:]))]
    return model, torch.stack(found)


CASES = [
    ("int8", "per_channel_symmetric", 2, {}),
    ("f8e4m3", "per_channel_symmetric", 1, {"fused_qkv": True}),
    ("f8e4m3", "per_tensor_symmetric", 2, {}),
    ("int8", "per_tensor_symmetric", 1, {}),
    ("f8e5m2", "per_channel_symmetric", 4, {}),
]


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("dtype", "kind", "tp", "more"), CASES)
def test_logits(dtype: str, kind: str, tp: int, more: dict[str, Any], tmp_path: Path) -> None:
    """On ranks that split heads and pad the MLP, and on four that have copies of a K/V head."""
    theirs = small.folder(tmp_path, "llama")
    (text,) = small.prompts([11])
    exact = small.logits(theirs, text)[7:]
    dequantized(theirs, dtype, kind)
    said: dict[str, Any] = {"quantized": True, "quantization_type": kind, "quantization_dtype": dtype}
    _, found = found_logits(tmp_path, text, tp_degree=tp, **said, **more)
    torch.testing.assert_close(found, small.logits(theirs, text)[7:], atol=1e-4, rtol=1e-4)
    off = float((found - exact).norm() / exact.norm())
    assert 1e-4 < off < {"int8": 0.1, "f8e4m3": 0.25, "f8e5m2": 0.5}[dtype], off


def test_the_file_has_the_bytes_that_one_counts(tmp_path: Path) -> None:
    """A byte for each number of a linear layer and four for each of its outputs; embedding, head and norms in float32. It gives the same logits when loaded."""
    small.folder(tmp_path, "llama")
    (text,) = small.prompts([9])
    model, found = found_logits(tmp_path, text, quantized=True, quantization_type="per_channel_symmetric")
    model_files.save(model, tmp_path / "model.pt")
    linear = [(64, 64), (32, 64), (32, 64), (64, 64), (90, 64), (90, 64), (64, 90)]  # q, k, v, o, gate, up, down: outputs, inputs
    counted = 2 * sum(o * i + 4 * o for o, i in linear) + 4 * (2 * small.VOCABULARY * 64 + (2 * 2 + 1) * 64)
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        (member,) = [i for i in archive.infolist() if i.filename.endswith(".safetensors") and "/weights/" in i.filename]
        header = int.from_bytes(archive.read(member)[:8], "little")
    assert member.file_size - 8 - header == counted
    loaded = model_files.load(tmp_path / "model.pt")
    assert loaded.options == model.options and torch.equal(loaded.prefill([text[:8]], [0])[0], found[0])


@pytest.mark.core(keep=0)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kind", ["mixtral", "gpt2", "qwen2"])
def test_other_families(kind: str, tmp_path: Path) -> None:
    """Experts, biases, tied embeddings: near the exact logits, with a byte for each number."""
    theirs = small.folder(tmp_path, kind)
    (text,) = small.prompts([11])
    exact = small.logits(theirs, text)[7:]
    model, found = found_logits(tmp_path, text, tp_degree=2, quantized=True, quantization_type="per_channel_symmetric")
    off = float((found - exact).norm() / exact.norm())
    assert 1e-4 < off < 0.2, off
    small_ones = [n for n, t in model.nxd_model.weights[0].items() if t.dtype == torch.int8]
    assert any("mlp" in n for n in small_ones) and any("self_attn" in n for n in small_ones) and not any("lm_head" in n for n in small_ones)


def test_what_is_refused() -> None:
    for error, given, said in (
        (
            ValueError,
            {"quantization_type": "blockwise_symmetric"},
            "quantization_type='blockwise_symmetric' must be one of per_tensor_symmetric",
        ),
        (ValueError, {"quantization_dtype": "int4"}, "quantization_dtype='int4' must be one of int8, f8e4m3, f8e4m3fn, float8_e4m3, "),
        (ValueError, {"quantization_dtype": torch.float16}, "quantization_dtype=torch.float16 must be one of int8, f8e4m3"),
        (NotImplementedError, {"quantized_checkpoints_path": "q.pt"}, "weights are quantized as they are read from the model's own folder"),
        (NotImplementedError, {"lora_config": LoraServingConfig(max_loras=1)}, "layers with room for adapters have float weights"),
    ):
        with pytest.raises(error, match=said):
            InferenceConfig(quantized=True, **given)


def test_names_of_dtypes() -> None:
    """NxD's, torch's and dtypes are the same, also in a file."""
    for given, name in (
        ("float8_e4m3", "f8e4m3"),
        ("float8_e4m3fn", "f8e4m3"),
        ("F8E4M3FN", "f8e4m3"),
        (torch.float8_e4m3fn, "f8e4m3"),
        ("torch.float8_e5m2", "f8e5m2"),
        (torch.int8, "int8"),
    ):
        options = InferenceConfig(quantized=True, quantization_dtype=given)
        assert options.quantization_dtype == name and InferenceConfig.from_json(options.to_json()) == options
    for name, short in dtype_names.QUANTIZED.items():
        assert QuantizedDtype.get_dtype(short) is getattr(torch, dtype_names.TORCH[dtype_names.quantized(name)])


def test_folders_that_are_quantized_already(tmp_path: Path) -> None:
    """Their scales stand in tensors of other names, without which numbers mean nothing."""
    small.folder(tmp_path, "llama")
    (file,) = tmp_path.glob("*.safetensors")
    tensors, name = load_file(file), "model.layers.0.self_attn.q_proj.weight"
    for dtype in (torch.float8_e4m3fn, torch.int8):
        numbers = torch.ones(tensors[name].shape).to(dtype)
        save_file({**tensors, name: numbers, f"{name}_scale": torch.ones(1)}, file, metadata={"format": "pt"})
        words = f"{name} of the model's files is {str(dtype).removeprefix('torch.')}, of a quantized checkpoint: save the model in float32"
        with pytest.raises(NotImplementedError, match=re.escape(words)):
            LanguageModel.from_pretrained(tmp_path, InferenceConfig(seq_len=8))

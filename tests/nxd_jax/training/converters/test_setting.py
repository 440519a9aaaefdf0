"""What flags, config.json and YAML files say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_jax.training.converters import arguments
from nxd_jax.training.converters.setting import setting
from tests.nxd_jax.training.converters import jobs
from tests.nxd_jax.training.converters.test_stages import config

BASE = "--output_dir out --convert_from_full_state"
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
}


def parsed(words: str = "") -> Any:
    return arguments.parse(f"{BASE} {words}".split())


def test_true_and_false_are_what_they_say() -> None:
    """The original's `--qkv_linear False` is True, and --hw_backend must be given."""
    args = parsed("--qkv_linear False --fuse_qkv true --save_xser")
    assert (args.qkv_linear, args.fuse_qkv, args.save_xser, args.load_xser, args.hw_backend) == (False, True, True, False, None)
    for word in ("maybe", ""):
        with pytest.raises(SystemExit):
            arguments.parse([*BASE.split(), "--qkv_linear", word])


def test_one_conversion_at_a_time() -> None:
    for words, said in (("--output_dir x", "got none"), (f"{BASE} --convert_to_xser", "got --convert_from_full_state, --convert_to_xser")):
        with pytest.raises(ValueError, match=f"exactly one of --convert_from_full_state.* must be given, {said}"):
            arguments.direction(arguments.parse(words.split()))


def test_a_flag_says_more_than_a_yaml_file(tmp_path: Path) -> None:
    hub = jobs.hub(tmp_path / "hub")
    strategy = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    file = config(tmp_path, hub, {**strategy, "kv_replicator": 2}, {"num_layers": 3, "qkv_linear": True})
    found = setting(parsed(f"--nxdt_yaml_config {file}"), {})
    assert (found.layout.tp, found.layout.pp, found.layout.vpp, found.layout.copies, found.layout.qkv_linear) == (4, 2, 2, 2, True)
    assert found.layout.fuse_qkv and found.sizes.layers == 3 and found.config["num_hidden_layers"] == 3 and found.backend is None
    found = setting(parsed(f"--nxdt_yaml_config {file} --tp_size 1 --kv_size_multiplier 1 --pp_size 1 --fuse_qkv False"), {})
    assert (found.layout.tp, found.layout.copies, found.layout.pp, found.layout.fuse_qkv) == (1, 1, 1, False)
    for devices, backend in ((32, "trn1"), (64, "trn2")):
        file = config(tmp_path, hub, {**strategy, "kv_replicator": 2}, trainer={"devices": devices})
        found = setting(parsed(f"--nxdt_yaml_config {file}"), {})
        assert (found.backend, found.layout.neighbours) == (backend, backend == "trn2")
    file = config(tmp_path, hub, {"tensor_model_parallel_size": 8})
    assert setting(parsed(f"--nxdt_yaml_config {file}"), {}).layout.copies == 4  # as the model takes them then


def test_a_yaml_file_for_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes without a config.json; the vocabulary is padded, and cut again. Nothing is written to the current directory."""
    hub = jobs.hub(tmp_path / "hub", num_key_value_heads=4, vocab_size=125)
    model = {
        "num_layers": 4,
        "num_attention_heads": 8,
        "num_kv_heads": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "make_vocab_size_divisible_by": 8,
        "share_embeddings_and_output_weights": False,
        "model_config": None,
        "layernorm_epsilon": 1e-6,
    }
    file = config(tmp_path, hub, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, model, model_source="megatron")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    nxdt = jobs.into(hub, tmp_path / "nxdt", f"--nxdt_yaml_config {file}")
    assert not any((tmp_path / "here").iterdir())
    words = torch.cat([jobs.rank(nxdt, r)["language_model.embedding.word_embeddings.weight"] for r in range(2)])
    assert words.shape == (128, 64) and not words[125:].any()
    back = jobs.back(nxdt, tmp_path / "back", f"--config {hub}/config.json --model_style megatron")
    jobs.same(jobs.weights(back), jobs.weights(hub))
    other = tmp_path / "config.json"
    other.write_text(json.dumps(json.loads((hub / "config.json").read_text()) | {"vocab_size": 100}))
    with pytest.raises(ValueError, match="has 128 rows, and vocab_size=100 padded to a multiple of 16 has fewer"):
        jobs.back(nxdt, tmp_path / "no", f"--nxdt_yaml_config {file} --config {other}")
    back = jobs.back(nxdt, tmp_path / "padded", f"--nxdt_yaml_config {file}")
    assert jobs.weights(back)["lm_head.weight"].shape == (128, 64)
    said = json.loads((back / "config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLM"] and said["num_key_value_heads"] == 4 and said["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        (
            {},
            "--tp_size 3",
            r"num_attention_heads=8 is no multiple of --tp_size 3; vocab_size=128 .*; 2 K/V heads.*no --kv_size_multiplier fits",
        ),
        ({}, "--tp_size 4", "2 K/V heads, 1 times each, do not fit 8 heads on --tp_size 4 ranks: use --kv_size_multiplier 2 or 4"),
        ({}, "--tp_size 4 --kv_size_multiplier 3", "use --kv_size_multiplier 2 or 4"),
        ({}, "--tp_size 4 --model_style megatron", "has no copies of K/V heads: 2 must be a multiple of --tp_size 4"),
        ({}, "--ep_size 2", "--ep_size 2 does not divide the model's 0 experts"),
        ({"num_local_experts": 4}, "--ep_size 3", "--ep_size 3 does not divide the model's 4 experts"),
        ({}, "--pp_size 3 --virtual_pp_size 2", "4 layers cannot make --pp_size 3 x --virtual_pp_size 2 stages"),
        ({}, "--tp_size 0", "numbers of ranks and copies must be positive"),
        ({}, "--n_layers 8", "--n_layers 8 and .*config.json with 4 layers"),
        ({"hidden_size": None}, "", "must give num_hidden_layers, .* as positive numbers, and hidden_size=None"),
        ({"hidden_size": 60}, "", "hidden_size=60 is no multiple of num_attention_heads=8, and there is no head_dim"),
        ({"num_key_value_heads": 3}, "", "num_attention_heads=8 is no multiple of num_key_value_heads=3"),
        ({"attention_bias": True}, "--model_style megatron", "only models without biases are converted"),
    ],
)
def test_what_does_not_come_out_even(changes: dict[str, Any], words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    torch.save({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.pt")
    with pytest.raises((ValueError, NotImplementedError), match=said):
        jobs.into(tmp_path / "model.pt", tmp_path / "out", f"--config {tmp_path}/config.json {words}")


def test_experts_of_a_yaml_file(tmp_path: Path) -> None:
    hub = jobs.hub(tmp_path / "hub", **jobs.EXPERTS)
    file = config(tmp_path, hub, {}, {"moe": {"num_experts": 8, "top_k": 4}})
    found = setting(parsed(f"--nxdt_yaml_config {file}"), {})
    assert found.sizes.experts == 8 and found.config["num_experts_per_tok"] == 4
    with pytest.raises(ValueError, match=r"missing: model.layers.0.block_sparse_moe.experts.4.w1.weight"):
        jobs.into(hub, tmp_path / "out", f"--nxdt_yaml_config {file}")
    file = config(tmp_path, hub, {}, {"moe": {"frequency": 2}})
    with pytest.raises(NotImplementedError, match="model.moe.frequency=2: Hugging Face's Mixtral has experts in every layer"):
        setting(parsed(f"--nxdt_yaml_config {file}"), {})


def test_where_sizes_are_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model's sizes are not known: give its config.json"):
        setting(parsed(), {})
    with pytest.raises(ValueError, match="--config .*no.json: there is no such file"):
        setting(parsed(f"--config {tmp_path}/no.json"), {})
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold an object with sizes"):
        setting(parsed(f"--config {tmp_path}"), {})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        setting(parsed(f"--config {tmp_path}"), {})
    assert setting(parsed(), CONFIG).sizes.head_dim == 8


def test_the_originals_yaml_converter(tmp_path: Path) -> None:
    from neuronx_distributed.scripts.yaml_converter import convert_yaml_to_json

    file = tmp_path / "conf.yaml"
    file.write_text("model: {num_layers: 2, num_attention_heads: 4, hidden_size: 32, num_kv_heads: 2, moe: {num_experts: 8, top_k: 2}}\n")
    found = json.loads(Path(convert_yaml_to_json(str(file), str(tmp_path / "made.json"))).read_text())
    assert found["num_hidden_layers"] == 2 and found["num_key_value_heads"] == 2 and found["num_local_experts"] == 8
    file.write_text("model: {model_config: x.json}\n")
    with pytest.raises(ValueError, match="has no num_layers, num_attention_heads, hidden_size, and no model_config"):
        convert_yaml_to_json(str(file), str(tmp_path / "made.json"))

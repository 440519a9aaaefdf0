"""Hugging Face to NxD Training and back: bit for bit what it was, for every kind of projection, layout and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_jax.checkpoint.safetensors_files import INDEX
from tests.nxd_jax.training.converters import jobs

MHA = {"num_key_value_heads": 8}
RANKS = "--tp_size 4 --pp_size 2"
CASES: list[tuple[dict[str, Any], str]] = [
    (MHA, f"{RANKS} --fuse_qkv True"),
    ({}, f"{RANKS} --kv_size_multiplier 2 --qkv_linear True --fuse_qkv True"),
    (jobs.EXPERTS, f"{RANKS} --kv_size_multiplier 2 --qkv_linear True --ep_size 2"),
    (MHA, RANKS),
    (MHA, f"{RANKS} --qkv_linear True --fuse_qkv True"),
    ({}, f"{RANKS} --kv_size_multiplier 2 --qkv_linear True --hw_backend trn2"),
    ({"num_key_value_heads": 4}, f"{RANKS} --kv_size_multiplier 2 --qkv_linear True --fuse_qkv True --save_xser True"),
    ({**jobs.EXPERTS, **MHA}, f"{RANKS} --fuse_qkv True --save_xser True --ep_size 4"),
    ({"num_key_value_heads": 4}, f"{RANKS} --fuse_qkv True"),
    ({"num_key_value_heads": 4}, "--tp_size 4 --kv_size_multiplier 2 --hw_backend trn2 --fuse_qkv True"),
    ({"attention_bias": True, "mlp_bias": True}, f"{RANKS} --kv_size_multiplier 2 --fuse_qkv True"),
    ({"attention_bias": True, **MHA}, f"{RANKS} --coalesce_qkv True"),
    ({"tie_word_embeddings": True}, "--tp_size 2 --pp_size 2 --virtual_pp_size 2"),
    ({"head_dim": 16, "half": True}, "--tp_size 2 --qkv_linear True"),
    (MHA, f"{RANKS} --model_style megatron"),
    ({"num_key_value_heads": 4}, f"{RANKS} --model_style megatron --save_xser True"),
    ({**jobs.EXPERTS, **MHA}, f"{RANKS} --model_style megatron --ep_size 2"),
    ({**MHA, "tie_word_embeddings": True}, "--tp_size 4 --model_style megatron"),
]


@pytest.mark.core(keep=4)
@pytest.mark.parametrize(("sizes", "flags"), CASES, ids=lambda x: "-".join(x.split()) if isinstance(x, str) else "")
def test_bit_for_bit(sizes: dict[str, Any], flags: str, tmp_path: Path) -> None:
    hub = jobs.hub(tmp_path / "hub", **sizes)
    nxdt = jobs.into(hub, tmp_path / "nxdt", flags)
    style = "--model_style megatron" if "megatron" in flags else ""
    found = jobs.back(nxdt, tmp_path / "back", f"--config {hub}/config.json {style}")
    jobs.same(jobs.weights(found), jobs.weights(hub))
    assert json.loads((found / "config.json").read_text()) == json.loads((hub / "config.json").read_text())


def test_files_that_are_read(tmp_path: Path) -> None:
    """Shards, pytorch_model*.bin with and without an index, one torch file with a key, transformers' own state dict, and buffers of older files."""
    hub = jobs.hub(tmp_path / "hub", **jobs.EXPERTS)
    want, config = jobs.weights(hub), (hub / "config.json").read_text()
    sources = {name: tmp_path / name for name in ("shards", "bin", "bins", "file.pt", "state.bin")}
    nxdt = jobs.into(hub, tmp_path / "nxdt", "--tp_size 2")
    jobs.back(nxdt, sources["shards"], f"--config {hub}/config.json --max_shard_gb 0.0002")
    index = json.loads((sources["shards"] / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1 and index["weight_map"].keys() == want.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in want.values())
    for name in ("bin", "bins"):
        sources[name].mkdir()
        (sources[name] / "config.json").write_text(config)
    torch.save(want | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, sources["bin"] / "pytorch_model.bin")
    names = sorted(want)
    halves = {"pytorch_model-00001-of-00002.bin": names[:20], "pytorch_model-00002-of-00002.bin": names[20:]}
    for file, own in halves.items():
        torch.save({name: want[name] for name in own}, sources["bins"] / file)
    (sources["bins"] / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {n: f for f, own in halves.items() for n in own}})
    )
    jobs.back(nxdt, sources["file.pt"], f"--config {hub}/config.json")
    assert jobs.torch.load(sources["file.pt"]).keys() == want.keys()
    torch.save({"model": jobs.model(**jobs.EXPERTS).state_dict(), "step": 3}, sources["state.bin"])
    for name, source in sources.items():
        jobs.into(source, tmp_path / f"from {name}".replace(" ", "_"), f"--tp_size 2 --config {hub}/config.json")
        jobs.same(jobs.rank(tmp_path / f"from_{name}", 1), jobs.rank(nxdt, 1))
    (sources["bins"] / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(FileNotFoundError, match="names 2 files, pytorch_model-00002-of-00002.bin missing"):
        jobs.into(sources["bins"], tmp_path / "no")


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("flags", ["--tp_size 2 --ep_size 2", "--tp_size 2 --pp_size 2"])
def test_xser_and_plain_files(flags: str, tmp_path: Path) -> None:
    """The original's crash: a missing argument. Values, marks of experts and what reads them stay."""
    hub = jobs.hub(tmp_path / "hub", **jobs.EXPERTS)
    plain = jobs.into(hub, tmp_path / "plain", flags)
    line = jobs.run(f"--convert_to_xser --input_dir {plain}/model --output_dir {tmp_path / 'xser'}")
    assert "4 ranks' files as xser" in line
    tensors = sorted((tmp_path / "xser" / "model").glob("*.tensors"))
    assert len(tensors) == 4
    if "ep" in flags:  # what is not of experts is with the first expert-parallel rank
        counts = [len(list(folder.iterdir())) for folder in tensors]
        assert counts[:2] == counts[:1] * 2 and counts[2:] == [8, 8]
    jobs.run(f"--convert_from_xser --input_dir {tmp_path / 'xser'} --output_dir {tmp_path / 'again'}")
    experts = "ep" in flags
    for e in range(2 if experts else 1):
        for t in range(2):
            for p in range(1 if experts else 2):
                jobs.same(jobs.rank(tmp_path / "again", t, p, e, experts), jobs.rank(plain, t, p, e, experts))
    for name in ("xser", "again"):
        found = jobs.back(tmp_path / name, tmp_path / f"hub_of_{name}", f"--config {hub}/config.json")
        jobs.same(jobs.weights(found), jobs.weights(hub))

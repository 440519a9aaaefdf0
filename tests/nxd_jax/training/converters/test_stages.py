"""Which pipeline rank has which layer: shared out as NxD does, or between the cuts of a YAML file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.nxd_jax.training.converters import jobs


def config(folder: Path, hub: Path, strategy: dict[str, Any], model: dict[str, Any] | None = None, **top: Any) -> Path:
    """A YAML file of NxD Training for a Hugging Face model."""
    found = {
        "model_source": "hf",
        "trainer": {"devices": 8},
        "distributed_strategy": strategy,
        "model": {"model_config": str(hub / "config.json"), "fuse_qkv": True, **(model or {})},
        **top,
    }
    file = folder / "conf.yaml"
    file.write_text(yaml.safe_dump(found))
    return file


def layers(nxdt: Path, pp: int) -> list[list[int]]:
    """The layers in the file of each pipeline rank."""
    found = []
    for rank in range(pp):
        numbers = [re.search(r"layers\.(\d+)\.", name) for name in jobs.rank(nxdt, 0, rank)]
        found.append(sorted({int(m[1]) for m in numbers if m}))
    return found


@pytest.mark.parametrize(
    ("count", "flags", "want"),
    [
        (5, "--pp_size 2", [[0, 1], [2, 3, 4]]),
        (7, "--pp_size 3", [[0, 1], [2, 3], [4, 5, 6]]),
        (5, "--pp_size 2 --virtual_pp_size 2", [[0, 2], [1, 3, 4]]),
    ],
)
def test_shared_out(count: int, flags: str, want: list[list[int]], tmp_path: Path) -> None:
    hub = jobs.hub(tmp_path / "hub", num_hidden_layers=count)
    nxdt = jobs.into(hub, tmp_path / "nxdt", flags)
    assert layers(nxdt, len(want)) == want
    first, last = jobs.rank(nxdt, 0, 0), jobs.rank(nxdt, 0, len(want) - 1)
    ends = {"model.norm.weight", "lm_head.weight"}
    assert "model.embed_tokens.weight" in first and not ends & first.keys()
    assert ends <= last.keys() and "model.embed_tokens.weight" not in last
    jobs.same(jobs.weights(jobs.back(nxdt, tmp_path / "back", f"--config {hub}/config.json")), jobs.weights(hub))


def test_cuts_of_a_yaml_file(tmp_path: Path) -> None:
    """The original leaves them aside: the shipped file for 70B on trn2 (18/39/60) cannot be converted there."""
    hub = jobs.hub(tmp_path / "hub", num_hidden_layers=6)
    strategy = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "kv_replicator": 1}
    file = config(tmp_path, hub, strategy, {"pipeline_cuts": ["model.layers.0", "model.layers.3"], "qkv_linear": True})
    nxdt = jobs.into(hub, tmp_path / "nxdt", f"--nxdt_yaml_config {file}")
    assert layers(nxdt, 3) == [[0], [1, 2, 3], [4, 5]]
    assert "model.layers.0.self_attn.qkv_proj.weight_qkv" in jobs.rank(nxdt, 1)
    for cuts, said in ((["model.layers.3", "model.layers.0"], "in order"), (["model.layers.5", "model.layers.1"], "below layer 5")):
        file = config(tmp_path, hub, strategy, {"pipeline_cuts": cuts})
        with pytest.raises(ValueError, match=said):
            jobs.into(hub, tmp_path / "no", f"--nxdt_yaml_config {file}")
    file = config(tmp_path, hub, strategy, {"pipeline_cuts": ["model.layers.x", "model.layers.0"]})
    with pytest.raises(ValueError, match="is no name of a layer, such as model.layers.17"):
        jobs.into(hub, tmp_path / "no", f"--nxdt_yaml_config {file}")


def test_tied_embeddings_are_on_both_ends(tmp_path: Path) -> None:
    hub = jobs.hub(tmp_path / "hub", tie_word_embeddings=True)
    nxdt = jobs.into(hub, tmp_path / "nxdt", "--pp_size 2")
    first, last = jobs.rank(nxdt, 0, 0)["model.embed_tokens.weight"], jobs.rank(nxdt, 0, 1)["lm_head.weight"]
    assert torch.equal(first, last) and torch.equal(first, jobs.weights(hub)["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match="is not model.embed_tokens.weight, and config.json has tie_word_embeddings: true"):
        path = nxdt / "model" / "dp_rank_00_tp_rank_00_pp_rank_01.pt"
        data = torch.load(path)
        torch.save({**data, "lm_head.weight": data["lm_head.weight"] + 1}, path)
        jobs.back(nxdt, tmp_path / "back", f"--config {hub}/config.json")

"""Base weights loaded after the adapters of a checkpoint; state dicts given as `lora_ckpt`; single files; names of the original."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nxd_jax as nxd_api
from nxd_jax.modules.lora import LoraConfig, LoraEmbedding, LoraModel, get_lora_model
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lora.models import stir
from tests.nxd_jax.lora.test_model import TARGETS, Block, made, results, same

RESET = "start at zero again: their effect may be in the weights. To have both, load the adapters after the base, or with load_lora_from_ckpt=True"


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lora_adapter`, where configurations go by default, is in the test's own folder."""
    monkeypatch.chdir(tmp_path)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(ids))


IDS = torch.tensor([1, 4, 0])


def small(seed: int = 0, stirred: int | None = 3, **options: Any) -> LoraModel:
    torch.manual_seed(seed)
    model = LoraModel(Net(), LoraConfig(**{"lora_rank": 2, "lora_alpha": 4, "target_modules": ["embedding", "linear"]} | options))
    if stirred is not None:
        stir(model, stirred)
    return model


def base_of(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Net().state_dict()


def dense(base: dict[str, Any], adapter: dict[str, Any], scale: float = 2.0) -> torch.Tensor:
    """The result for IDS in plain torch, of an adapter with the names of the original."""
    table = base["embedding.weight"] + scale * (adapter["embedding.lora_embedding_B"] @ adapter["embedding.lora_embedding_A"]).t()
    weight = base["linear.weight"] + scale * adapter["linear.lora_B.weight"] @ adapter["linear.lora_A.weight"]
    return F.linear(F.embedding(IDS, table), weight, adapter.get("linear.bias", base["linear.bias"]))


def original(rows: int = 5, wide: int = 4, r: int = 2) -> dict[str, torch.Tensor]:
    """An adapter's state dict as the original writes it."""
    g = torch.Generator().manual_seed(8)
    return {
        "embedding.lora_embedding_A": torch.randn(r, rows, generator=g),
        "embedding.lora_embedding_B": torch.randn(wide, r, generator=g),
        "linear.lora_A.weight": torch.randn(r, wide, generator=g),
        "linear.lora_B.weight": torch.randn(3, r, generator=g),
    }


def out(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS)
        return found


# -- base weights after the adapters ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["state dict", "load_checkpoint"])
def test_adapters_of_a_checkpoint_survive(nxd: Nxd, tmp_path: pathlib.Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    nxd(2, tp=2)
    source = made(bias="lora_only", modules_to_save=["head"], lora_save_dir="c", save_lora_config_adapter=True)
    with torch.no_grad():
        for name, t in source.tensors().items():
            if t.requires_grad and ".lora_" not in name:
                t.add_(0.5)
    nxd_api.save_checkpoint("c", tag="adapter", model=source)
    torch.manual_seed(0)
    base = Block().to("xla")
    nxd_api.save_checkpoint("c", tag="base", model=base)

    torch.manual_seed(5)
    config = LoraConfig(load_lora_from_ckpt=True, lora_save_dir="c", lora_load_tag="adapter")
    model = get_lora_model(Block().to("xla"), config)
    assert isinstance(model, LoraModel) and model.is_checkpoint_loaded and not same(model, source)
    with caplog.at_level(logging.INFO, "nxd_jax"):
        if how == "state dict":
            assert not any(model.load_state_dict(base.state_dict(), strict=True))
        else:
            nxd_api.load_checkpoint("c", tag="base", model=model)
    assert same(model, source) and not same(model, base)
    assert "the adapters stay what the checkpoint made them" in caplog.text and "zero again" not in caplog.text


def test_adapters_against_plain_torch(tmp_path: pathlib.Path) -> None:
    source, base = small(), base_of()
    source.save_lora("d", "t")
    layer = source._layers["linear"]
    assert isinstance(source.embedding, LoraEmbedding)
    adapter = {
        "embedding.lora_embedding_A": source.embedding.lora_embedding_A.detach(),
        "embedding.lora_embedding_B": source.embedding.lora_embedding_B.detach(),
        "linear.lora_A.weight": layer.lora_A.weight.detach(),
        "linear.lora_B.weight": layer.lora_B.weight.detach(),
    }
    model = small(seed=6, stirred=None, load_lora_from_ckpt=True, lora_save_dir="d", lora_load_tag="t")
    for _ in range(2):
        model.load_state_dict(base)
        torch.testing.assert_close(out(model), dense(base, adapter))
    other = base_of(9)
    model.load_state_dict(other)
    torch.testing.assert_close(out(model), dense(other, adapter))


def test_merged_and_trained_here(caplog: pytest.LogCaptureFixture) -> None:
    """Adapters of this run start anew, and all of them for weights that say that they are merged."""
    base = base_of()
    model = small()
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        model.load_state_dict(base)
    assert RESET in caplog.text and not model.is_checkpoint_loaded
    torch.testing.assert_close(out(model), F.linear(F.embedding(IDS, base["embedding.weight"]), base["linear.weight"], base["linear.bias"]))

    source = small(save_lora_base=True, merge_lora=True)
    want = out(source)
    merged = dict(source.state_dict()) | {"lora_config": source.lora_config.to_dict() | {"lora_alpha": 16}}
    small().save_lora("d")
    model = small(load_lora_from_ckpt=True, lora_save_dir="d", stirred=None)
    assert model.is_checkpoint_loaded
    model.load_state_dict(merged)
    torch.testing.assert_close(out(model), want)


def test_strict_with_biases_that_train() -> None:
    """The base alone has the biases, but is not to have adapters."""
    model = small(bias="all")
    base = base_of(4)
    assert not any(model.load_state_dict(base, strict=True))
    assert torch.equal(model.tensors()["linear.bias"], base["linear.bias"])


# -- lora_ckpt -------------------------------------------------------------------------------------------


def test_a_state_dict_as_lora_ckpt() -> None:
    """As scripts of the original put one there: `load_state_dict` loads the base, then it."""
    base, adapter = base_of(), original()
    model = small(seed=5)
    assert model.lora_ckpt is None
    model.lora_ckpt, model.is_checkpoint_loaded = adapter, True
    found = model.load_state_dict()
    assert not found.missing_keys and not found.unexpected_keys
    torch.testing.assert_close(out(model), dense(base_of(5), adapter))
    stir(model)
    found = model.load_state_dict(base)
    assert not found.missing_keys and not found.unexpected_keys
    torch.testing.assert_close(out(model), dense(base, adapter))

    stirred = small(save_lora_base=True)
    model.lora_ckpt = stirred.state_dict()
    assert not any(model.load_state_dict(None, strict=True))
    assert torch.equal(out(model), out(stirred))
    model.lora_ckpt = {"lora_config": LoraConfig(lora_rank=7).to_dict()} | adapter
    with pytest.raises(ValueError, match="the adapters of lora_ckpt have lora_rank=7"):
        model.load_state_dict()


def test_lora_ckpt_and_load_checkpoint(nxd: Nxd) -> None:
    nxd(2, tp=2)
    source = made()
    torch.manual_seed(0)
    nxd_api.save_checkpoint("c", tag="base", model=Block().to("xla"))
    model = made(seed=5, stirred=None)
    model.lora_ckpt, model.is_checkpoint_loaded = source.state_dict(), True
    nxd_api.load_checkpoint("c", tag="base", model=model)
    assert same(model, source)


# -- load_lora -------------------------------------------------------------------------------------------


def test_load_lora_of_a_file() -> None:
    source = small()
    source.save_lora("d", "t")
    for path in ("d/t/adapter_model.pt", pathlib.Path("d/t"), "d/t/other.pt"):
        if str(path).endswith("other.pt"):
            torch.save(source.state_dict(), path)
        model = small(stirred=8)
        assert not any(model.load_lora(ckpt_path=path))
        assert torch.equal(out(model), out(source)) and model.is_checkpoint_loaded
    with pytest.raises(FileNotFoundError, match="no LoRA checkpoint d/none.pt: ckpt_path must be a file with a state dict, or a folder"):
        source.load_lora(ckpt_path="d/none.pt")
    source.lora_config.lora_alpha = 3
    with pytest.raises(ValueError, match="the adapters of d/t/adapter_model.pt have lora_rank=2, lora_alpha=4"):
        small(lora_alpha=3).load_lora("d", None, "d/t/adapter_model.pt")


@pytest.mark.parametrize("name", ["base.pt", "base.safetensors"])
def test_load_lora_of_the_base(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """adapter_only=False: adapters of another checkpoint stay beside the base's weights; else these are taken for merged ones."""
    from safetensors.torch import save_file

    base, adapter = base_of(), original()
    (save_file if name.endswith("safetensors") else torch.save)(base, name)
    torch.save(adapter, "adapter.pt")
    model = small(seed=5)
    model.load_lora(ckpt_path="adapter.pt")
    model.load_lora(ckpt_path=name, adapter_only=False)
    torch.testing.assert_close(out(model), dense(base, adapter))
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        model.load_lora(ckpt_path=name)
    assert "zero again" in caplog.text
    torch.testing.assert_close(out(model), F.linear(F.embedding(IDS, base["embedding.weight"]), base["linear.weight"], base["linear.bias"]))


def test_load_lora_of_files_of_ranks(nxd: Nxd) -> None:
    from tests.nxd_jax.lora.test_storage import rank_files

    nxd(2, tp=2)
    source = made(save_lora_config_adapter=True, merge_sharded_lora=False)
    rank_files(source, pathlib.Path("c"))
    model = made(stirred=8)
    model.load_lora(ckpt_path="c/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    assert same(model, source)


# -- embeddings of the original ------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix, rows", [("", 5), ("module.", 5), ("base_model.model.", 2)])
def test_adapters_of_embeddings(prefix: str, rows: int) -> None:
    """A table of as many rows as the rank is turned, too."""
    torch.manual_seed(0)
    net = Net()
    net.embedding = nn.Embedding(rows, 4)
    base = {name: t.clone() for name, t in net.state_dict().items()}
    model = LoraModel(net, LoraConfig(lora_rank=2, lora_alpha=4, target_modules=["embedding", "linear"]))
    adapter = original(rows)
    assert not any(model.load_state_dict({prefix + name: t for name, t in adapter.items()}, strict=True))
    table = base["embedding.weight"] + 2 * (adapter["embedding.lora_embedding_B"] @ adapter["embedding.lora_embedding_A"]).t()
    ids = IDS % rows
    torch.testing.assert_close(model.embedding(ids).detach(), F.embedding(ids, table))
    assert torch.equal(model.embedding.lora_embedding_A, adapter["embedding.lora_embedding_A"])
    assert model.embedding.lora_embedding_B is model.embedding.lora_B.weight
    assert model.linear.lora_embedding_A is None and model.linear.lora_embedding_B is None


def test_adapters_of_embeddings_for_ranks_and_in_files(nxd: Nxd) -> None:
    nxd(2, tp=2)
    g = torch.Generator().manual_seed(1)
    source = made()
    a, b = torch.randn(2, 8, generator=g), torch.randn(4, 2, generator=g)
    state = {n: t for n, t in source.state_dict().items() if not n.startswith("embed.")}
    state |= {"embed.lora_embedding_A": a, "embed.lora_embedding_B": b}
    base = results(source.embed.base_layer.to("xla"))
    torch.save(state | {"lora_config": source.lora_config.to_dict()}, "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    model = get_lora_model(Block().to("xla"), LoraConfig(load_lora_from_ckpt=True, lora_save_dir="."))
    assert isinstance(model, LoraModel) and model.lora_config.target_modules == TARGETS
    model.load_state_dict({"embed.weight": source.tensors()["embed.weight"]})
    want = base + 2 * F.embedding(torch.tensor([[1, 2, 7], [0, 5, 3]]), (b @ a).t())
    torch.testing.assert_close(results(model.embed), want, rtol=1e-4, atol=1e-5)

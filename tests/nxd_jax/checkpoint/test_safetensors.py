"""Hugging Face folders in and out of models of any layout, and the format itself against the safetensors package."""

from __future__ import annotations

import json
import pathlib
import struct

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nxd_jax.checkpoint import name_maps, safetensors_files
from nxd_jax.checkpoint.name_maps import Heads, NameMap
from nxd_jax.checkpoint.orbax_files import DamagedCheckpointError
from nxd_jax.checkpoint.safetensors_files import Hub, Planned
from tests.nxd_jax.checkpoint import job
from tests.nxd_jax.checkpoint.hub_model import ATTENTION, CONFIG, MLP, SIZE, Tiny, folder, weights
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert sorted(a) == sorted(b)
    assert [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])] == []


# -- the format ----------------------------------------------------------------------------------------

KINDS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
KINDS += [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]


def samples() -> dict[str, torch.Tensor]:
    found = {str(d): torch.arange(6).reshape(2, 3).to(torch.float32).to(d) for d in KINDS}
    return {**found, "number": torch.tensor(2.5), "none": torch.empty(0, 3)}


def planned(tensors: dict[str, torch.Tensor]) -> list[Planned]:
    return [Planned(n, tuple(t.shape), t.dtype, lambda t=t: t) for n, t in tensors.items()]  # type: ignore[misc]


def test_what_is_written_the_package_reads(tmp_path: pathlib.Path) -> None:
    files = safetensors_files.write(tmp_path, planned(samples()), config={"a": 1})
    assert [f.name for f in files] == ["model.safetensors"] and json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
    equal(load_file(files[0]), samples())
    with safe_open(files[0], "pt") as f:
        assert f.metadata() == {"format": "pt"}


def test_what_the_package_writes_is_read(tmp_path: pathlib.Path) -> None:
    save_file(samples(), tmp_path / "x.safetensors")
    hub = Hub(tmp_path / "x.safetensors")
    equal({n: hub.read(n) for n in hub.entries}, samples())
    hub.read("number").add_(1)
    assert hub.read("number") == 2.5  # the file stays


def test_several_files_by_size(tmp_path: pathlib.Path) -> None:
    tensors = {f"t{k}": torch.full((4,), float(k)) for k in range(5)}
    safetensors_files.write(tmp_path, planned(tensors), max_bytes=40)
    files = safetensors_files.write(tmp_path, planned(tensors), max_bytes=32)
    assert [f.name for f in files] == [f"model-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 80}, "weight_map": {f"t{k}": files[k // 2].name for k in range(5)}}
    hub = Hub(tmp_path)
    equal({n: hub.read(n) for n in hub.entries}, tensors)
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"names 3 files, model-00002-of-00003.safetensors missing"):
        Hub(tmp_path)
    safetensors_files.write(tmp_path, planned(tensors))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]


def test_tensors_are_read_once_and_in_order(tmp_path: pathlib.Path) -> None:
    order: list[int] = []

    def read(k: int) -> torch.Tensor:
        order.append(k)
        return torch.full((2,), float(k))

    tensors = [Planned(f"t{k}", (2,), torch.float32, lambda k=k: read(k)) for k in range(3)]  # type: ignore[misc]
    safetensors_files.write(tmp_path, tensors)
    assert order == [0, 1, 2]


def test_damaged_and_missing_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no .safetensors file and holds none"):
        Hub(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8)}, path)
    whole = path.read_bytes()
    for data, message in (
        (whole[:-4], "do not hold a as its header says"),
        (b"abc", "3 bytes cannot hold a header"),
        (struct.pack("<Q", 2) + b"xx", "its header cannot be read"),
    ):
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match=message):
            Hub(path)
    path.write_bytes(whole)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DamagedCheckpointError, match=r"config.json is damaged"):
        _ = Hub(tmp_path).config
    with pytest.raises(ValueError, match=r"cannot hold a \(torch.complex128\): convert them first \(dtype=\)"):
        safetensors_files.write(tmp_path, planned({"a": torch.zeros(1, dtype=torch.complex128)}))


# -- models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "tp", "fuse"), [(1, 1, True), (2, 2, False), (4, 2, True)])
def test_llama_both_ways(nxd: Nxd, tmp_path: pathlib.Path, world: int, tp: int, fuse: bool) -> None:
    full = weights()
    nxd(world, tp=tp)
    model = Tiny(fuse=fuse).to("xla")
    safetensors_files.load_model(folder(tmp_path / "in", full), model, "llama")
    found = job.weights(model)
    assert torch.equal(
        found["model.layers.0.mlp.gate_up_proj.weight"], torch.cat([full[f"{MLP}gate_proj.weight"], full[f"{MLP}up_proj.weight"]])
    )
    assert torch.equal(found["model.layers.0.self_attn.qkv_proj.bias_k"], full[f"{ATTENTION}k_proj.bias"])
    files = safetensors_files.save_model(model, tmp_path / "out", "llama", tmp_path / "in/config.json", max_bytes=1000)
    assert len(files) > 1 and json.loads((tmp_path / "out/config.json").read_text()) == CONFIG
    equal({n: t for f in files for n, t in load_file(f).items()}, full)


def test_query_heads_follow_the_copies_of_their_kv_heads(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    """4 ranks, 2 K/V heads held twice (K0 K1 K0 K1): a rank's two query heads must be among the four that its K/V head serves."""
    full = weights()
    nxd(4, tp=4)
    model = Tiny(copies=2).to("xla")
    safetensors_files.load_model(folder(tmp_path / "in", full), model, "llama")
    fused = model.model.layers[0].self_attn.qkv_proj.weight_qkv
    output = model.model.layers[0].self_attn.o_proj.weight
    head = lambda name, k: full[f"{ATTENTION}{name}_proj.weight"][k * SIZE : (k + 1) * SIZE]  # noqa: E731
    for rank, (own, out) in enumerate(zip(sharded.shards(fused.detach()), sharded.shards(output.detach()), strict=True)):
        kv = rank % 2
        heads = [4 * kv + 2 * (rank // 2), 4 * kv + 2 * (rank // 2) + 1]
        expected = torch.cat([head("q", heads[0]), head("q", heads[1]), head("k", kv), head("v", kv)])
        assert torch.equal(own, expected)
        columns = [h * SIZE + j for h in heads for j in range(SIZE)]
        assert torch.equal(out, full[f"{ATTENTION}o_proj.weight"][:, columns])
    safetensors_files.save_model(model, tmp_path / "out", "llama", CONFIG)
    equal(load_file(tmp_path / "out/model.safetensors"), full)
    with pytest.raises(
        ValueError, match=r"2 ranks hold each K/V head, so query heads have another order .* config.json \(config=\) must say"
    ):
        safetensors_files.save_model(model, tmp_path / "out", "llama")


def test_heads_that_stand_side_by_side() -> None:
    assert Heads(8, 2, copies=2, tp=4, neighbours=True).order() == list(range(8))
    assert Heads(8, 2, copies=2, tp=4).order() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert Heads(8, 2).order() == list(range(8))
    with pytest.raises(ValueError, match=r"8 query heads and 2 K/V heads 3 times do not divide over 4"):
        Heads(8, 2, copies=3, tp=4).order()


def test_tied_weights(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    full = weights()
    del full["lm_head.weight"]
    path = folder(tmp_path / "in", full, {**CONFIG, "tie_word_embeddings": True})
    nxd(2, tp=2)
    for tied in (True, False):
        model = Tiny(tied=tied).to("xla")
        safetensors_files.load_model(path, model, "llama")
        assert torch.equal(job.weights(model).get("lm_head.weight", full["model.embed_tokens.weight"]), full["model.embed_tokens.weight"])
    model = Tiny(tied=True).to("xla")
    safetensors_files.load_model(path, model, "llama")
    safetensors_files.save_model(model, tmp_path / "out", "llama", CONFIG, dtype=torch.bfloat16)
    found = load_file(tmp_path / "out/model.safetensors")
    equal(found, {n: t.bfloat16() for n, t in full.items()})


# -- names ---------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)


def test_patterns_functions_and_maps_of_ones_own(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    tensors = {"body.1.w": torch.ones(2, 3), "body.2.w": torch.ones(2, 2), "extra": torch.ones(1)}
    folder(tmp_path, tensors)
    patterns = {r"body\.1\.w": "one.weight", r"body\.2\.w": "two.weight", "extra": None}
    for mapping in (patterns, lambda n: {"body.1.w": "one.weight", "body.2.w": "two.weight"}.get(n)):
        model = Pair()
        safetensors_files.load_model(tmp_path, model, mapping)
        assert bool((model.one.weight == 1).all()) and bool((model.two.weight == 1).all())
    files = safetensors_files.save_model(model, tmp_path / "out", {r"^(.*)\.weight$": r"body.\1"})
    assert sorted(load_file(files[0])) == ["body.one", "body.two"]
    with pytest.raises(ValueError, match=r"x would be made of one.weight and of two.weight"):
        safetensors_files.save_model(model, tmp_path / "out", lambda n: "x")


def test_a_map_that_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_maps, "_MAPS", dict(name_maps._MAPS))
    name_maps.register("fused", lambda heads: name_maps.Suffixes({"both": ("a", "b")}))
    found = name_maps.resolve("fused")
    assert [m.name for m in found.to_hub(["x.both"])] == ["x.a", "x.b"] and name_maps.known() == ["fused", "llama"]
    assert [(m.name, m.sources) for m in found.from_hub(["x.b", "x.a", "c"])] == [("x.both", ("x.a", "x.b")), ("c", ("c",))]
    with pytest.raises(ValueError, match=r"x.a is there, but not x.b: x.both is made of both"):
        found.from_hub(["x.a"])
    with pytest.raises(ValueError, match="there is a name map 'fused' already"):
        name_maps.register("fused", name_maps.llama)
    with pytest.raises(ValueError, match="there is no name map 'gpt', only fused, llama"):
        name_maps.resolve("gpt")
    with pytest.raises(TypeError, match="mapping must be a name, a dict of regular expressions, a function or a NameMap, got int"):
        name_maps.resolve(3)
    assert type(name_maps.resolve(None)) is NameMap


def test_names_and_shapes_must_agree(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    folder(tmp_path, {"one.weight": torch.ones(3, 2), "more": torch.ones(1)})
    model = Pair()
    before = model.one.weight.detach().clone()
    with pytest.raises(RuntimeError) as caught:
        safetensors_files.load_model(tmp_path, model)
    for text in (
        "one.weight has shape [3, 2] in the files, [2, 3] in the model",
        "missing in the files: two.weight",
        "unexpected in the files: more",
        "mapping= translates names",
        "strict=False ignores",
    ):
        assert text in str(caught.value)
    assert torch.equal(model.one.weight, before)
    folder(tmp_path, {"one.weight": torch.ones(2, 3)})
    safetensors_files.load_model(tmp_path, model, strict=False)
    assert bool((model.one.weight == 1).all())


def test_values_of_each_rank_are_no_folder(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    model = nn.Module()
    model.register_buffer("own", sharded.from_ranks(lambda r: torch.full((2,), float(r))))
    with pytest.raises(ValueError, match=r"own is different on each rank: a Hugging Face folder holds one value of each tensor"):
        safetensors_files.save_model(model, tmp_path)
    folder(tmp_path, {"own": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"own is different on each rank: no one value fills it"):
        safetensors_files.load_model(tmp_path, model)

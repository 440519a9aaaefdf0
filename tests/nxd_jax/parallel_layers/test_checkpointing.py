"""parallel_layers.save and load: the files, what is in them, and models that get it back."""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

from nxd_jax import parallel_layers
from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.optimizer import NeuronZero1Optimizer
from nxd_jax.parallel_layers import checkpointing, parallel_state
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_jax.tensor_parallel import rank_files
from nxd_jax.utils.full_weights import gather_full
from tests.nxd_jax.checkpoint import pipeline_job
from tests.nxd_jax.conftest import Nxd
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded


class Model(nn.Module):
    """Every kind of parameter, a buffer and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(8, 6)
        self.qkv = GQAQKVColumnParallelLinear(
            6, [8, 4], bias=False, kv_size_multiplier=min(2, parallel_state.get_tensor_model_parallel_size())
        )
        self.up = ColumnParallelLinear(6, 16, gather_output=False, stride=2)
        self.down = RowParallelLinear(16, 6, input_is_parallel=True)
        self.norm = nn.LayerNorm(6)
        self.head = ColumnParallelLinear(6, 8, bias=False, gather_output=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.norm(self.down(torch.relu(self.up(x))) + x)


def make(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().to("xla")


def own(t: torch.Tensor) -> list[torch.Tensor]:
    return sharded.shards(t.detach())


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for s, t in pairs for x, y in zip(own(s), own(t), strict=True))


def files(path: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


# -- files -------------------------------------------------------------------------------------------


def test_a_file_for_every_tensor_and_pipeline_rank(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(8, tp=2, pp=2)
    model = make()
    parallel_layers.save({"model": model.state_dict(), "step": 4}, tmp_path)
    assert files(tmp_path) == [f"tp_rank_{t:02d}_pp_rank_{p:02d}/checkpoint.pt" for t in range(2) for p in range(2)]
    for t, rank in ((0, 0), (1, 1)):
        read = torch.load(tmp_path / f"tp_rank_{t:02d}_pp_rank_00" / "checkpoint.pt", weights_only=True)
        assert read["step"] == 4 and list(read["model"]) == list(model.state_dict())
        assert type(read["model"]) is collections.OrderedDict
        for name, value in model.state_dict().items():
            assert read["model"][name].device.type == "cpu" and torch.equal(read["model"][name], own(value)[rank])


def test_a_file_for_every_data_parallel_rank_too(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(4, tp=2)
    moments = sharded.from_ranks(lambda r: torch.full((2,), float(r)))
    parallel_layers.save({"optimizer": {"m": moments}, "rank": parallel_state.get_data_parallel_rank()}, tmp_path, master_dp_only=False)
    assert files(tmp_path) == [f"tp_rank_{t:02d}_pp_rank_00_dp_rank_{d:02d}/checkpoint.pt" for t in range(2) for d in range(2)]
    read = torch.load(tmp_path / "tp_rank_01_pp_rank_00_dp_rank_01" / "checkpoint.pt", weights_only=True)
    assert read["optimizer"]["m"].tolist() == [3.0, 3.0] and read["rank"] == 1 and type(read["rank"]) is int
    back = parallel_layers.load(tmp_path, master_dp_only=False)
    assert [t[0].item() for t in own(back["optimizer"]["m"])] == [0.0, 1.0, 2.0, 3.0]
    assert sharded.varying(back["optimizer"]["m"]).axes == ("dp", "tp")
    assert str(back["rank"]) == "0" and own(torch.zeros((), device="xla") + back["rank"])[3].item() == 1.0


def test_xser_layout(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    layer = ColumnParallelLinear(2, 4)
    parallel_layers.save({"model": layer.to("xla").state_dict(), "cpu": torch.arange(2), "epoch": 1}, tmp_path, save_xser=True)
    assert files(tmp_path) == sorted(
        f"tp_rank_{t:02d}_pp_rank_00{tail}" for t in range(2) for tail in ("", ".tensors/tensor_0.pt", ".tensors/tensor_1.pt")
    )
    references = torch.load(tmp_path / "tp_rank_01_pp_rank_00", weights_only=False)
    assert type(references["model"]["weight"]).__module__ == "torch_xla.utils.serialization"
    assert references["cpu"].tolist() == [0, 1] and references["epoch"] == 1
    assert torch.equal(torch.load(tmp_path / "tp_rank_01_pp_rank_00.tensors" / "tensor_0.pt"), own(layer.weight)[1])
    back = parallel_layers.load(tmp_path, load_xser=True)
    assert back["cpu"].device.type == "cpu" and {t.device.type for t in back["model"].values()} == {"xla"}
    assert all(torch.equal(a, b) for a, b in zip(own(back["model"]["weight"]), own(layer.weight), strict=True))
    assert parallel_layers.load(tmp_path, load_xser=True, weights_only=True)["epoch"] == 1


@pytest.mark.parametrize("first, second", [(False, True), (True, False), (True, True), (False, False)])
def test_saving_again_replaces_what_was_there(nxd: Nxd, tmp_path: pathlib.Path, first: bool, second: bool) -> None:
    nxd(2, tp=2)
    a, b = make(0), make(1)
    parallel_layers.save({"model": a.state_dict(), "more": torch.ones(9, device="xla")}, tmp_path, save_xser=first)
    parallel_layers.save({"model": b.state_dict()}, tmp_path, save_xser=second)
    parallel_layers.load(tmp_path, a, load_xser=second)
    assert equal(a, b)
    assert not [f for f in files(tmp_path) if "unfinished" in f]


def test_copies_on_the_cpu_keep_every_rank(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    model = make(0)
    parallel_layers.save({"model": {name: t.cpu() for name, t in model.state_dict().items()}}, tmp_path)
    again = make(1)
    parallel_layers.load(tmp_path, again)
    assert equal(model, again)


def test_an_interrupted_save_leaves_no_half_file(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    parallel_layers.save({"model": {"w": torch.ones(2)}}, tmp_path)
    with pytest.raises(Exception, match="pickle|local object"):
        parallel_layers.save({"model": {"w": lambda: 0}}, tmp_path)
    assert parallel_layers.load(tmp_path)["model"]["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("xser", [False, True])
def test_down_cast_bf16(nxd: Nxd, tmp_path: pathlib.Path, xser: bool) -> None:
    nxd(2, tp=2)
    data = {
        "xla": torch.rand(3, device="xla"),
        "cpu": torch.rand(3),
        "double": torch.rand(2, dtype=torch.double),
        "int": torch.arange(2, device="xla"),
    }
    parallel_layers.save(data, tmp_path, save_xser=xser, down_cast_bf16=True)
    back = parallel_layers.load(tmp_path, load_xser=xser)
    assert [back[k].dtype for k in data] == [torch.bfloat16, torch.bfloat16, torch.double, torch.int64]
    assert torch.equal(back["xla"].cpu(), data["xla"].cpu().bfloat16())
    assert data["cpu"].dtype == torch.float32


def test_experts_of_other_ranks_are_not_lost_in_silence(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, ep=2)
    with pytest.warns(UserWarning, match="experts of expert parallel rank 0 only: pass master_dp_only=False"):
        parallel_layers.save({}, tmp_path)


@pytest.mark.parametrize(
    "cp, master_dp_only, text",
    [
        (1, True, r"of the first of 4 data-parallel ranks only, and each has its own part: pass master_dp_only=False, to load too"),
        (2, True, r"of the first of 2 data-parallel ranks and 2 context-parallel ranks only, .*: use neuronx_distributed.save_checkpoint"),
        (2, False, r"of the first of 2 context-parallel ranks only, .*: use neuronx_distributed.save_checkpoint"),
    ],
)
def test_parts_of_other_ranks_are_not_lost_in_silence(nxd: Nxd, tmp_path: pathlib.Path, cp: int, master_dp_only: bool, text: str) -> None:
    nxd(4, cp=cp)
    optimizer = NeuronZero1Optimizer([torch.nn.Parameter(torch.ones(8, device="xla"))], torch.optim.Adam)
    data = {"epoch": 1, "optimizers": [optimizer.state_dict()]}
    with pytest.raises(ValueError, match=text):
        parallel_layers.save(data, tmp_path, master_dp_only=master_dp_only)
    if cp == 1:
        parallel_layers.save(data, tmp_path, master_dp_only=False)


def test_context_parallel_ranks_share_a_file(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(4, tp=2, cp=2)
    parallel_layers.save({"model": make().state_dict()}, tmp_path, master_dp_only=False)
    assert [f.split("/")[0] for f in files(tmp_path)] == ["tp_rank_00_pp_rank_00_dp_rank_00", "tp_rank_01_pp_rank_00_dp_rank_00"]


def test_a_world_of_one(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    a, b = make(0), make(1)
    parallel_layers.save({"model": a.state_dict()}, tmp_path)
    parallel_layers.load(tmp_path, b)
    assert equal(a, b)


def test_without_model_parallel_groups(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="model parallel groups are not initialized"):
        parallel_layers.save({}, tmp_path)


def test_ensure_directory_exists(tmp_path: pathlib.Path) -> None:
    checkpointing.ensure_directory_exists(tmp_path / "a" / "b" / "c.pt")
    assert (tmp_path / "a" / "b").is_dir()
    checkpointing.ensure_directory_exists("c.pt")


# -- models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize("sizes", [{"size": 8, "tp": 4}, {"size": 2, "tp": 2}])
def test_a_model_gets_its_values_back(nxd: Nxd, tmp_path: pathlib.Path, sizes: dict[str, int], xser: bool) -> None:
    nxd(**sizes)
    a, b = make(0), make(1)
    before = {name: (p, sharded.varying(p), getattr(p, "partition_dim", None)) for name, p in b.named_parameters()}
    parallel_layers.save({"model": a.state_dict(), "epoch": 7}, tmp_path, save_xser=xser)
    rest = parallel_layers.load(tmp_path, b, load_xser=xser)
    assert rest == {"epoch": 7}
    assert equal(a, b)
    assert b.head.weight is b.embed.weight
    for name, p in b.named_parameters():
        assert p is before[name][0] and sharded.varying(p) == before[name][1] and getattr(p, "partition_dim", None) == before[name][2]


def test_a_shared_parameter_keeps_its_label_if_its_parts_are_equal(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(4, tp=4)
    layer = ColumnParallelLinear(4, 8, gather_output=False, init_method=nn.init.ones_).to("xla")
    parallel_layers.save(layer.state_dict(), tmp_path)
    assert parallel_layers.load(tmp_path, layer, model_key=None) is None
    assert sharded.varying(layer.weight).axes == ("tp",) and sharded.varying(layer.bias).axes == ("tp",)
    with torch.no_grad():
        layer.weight.add_(parallel_state.get_tensor_model_parallel_rank())  # would be drift of a parameter that ranks share
    assert [t[0, 0].item() for t in own(layer.weight)] == [1.0, 2.0, 3.0, 4.0]


def test_training_continues_bit_for_bit(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(4, tp=2)
    ids = torch.randint(0, 8, (3, 4)).to("xla")

    def train(model: Model, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        loss = torch.zeros((), device="xla")
        for _ in range(2):
            optimizer.zero_grad()
            loss = (model(ids) ** 3).sum()
            loss.backward()
            optimizer.step()
        return loss.detach().cpu()

    a, b = make(0), make(1)
    opt_a, opt_b = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (a, b))
    train(a, opt_a)
    train(b, opt_b)
    parallel_layers.save({"model": a.state_dict(), "opt": opt_a.state_dict()}, tmp_path)
    rest = parallel_layers.load(tmp_path, b)
    assert set(rest) == {"opt"}
    parallel_layers.load(tmp_path, model_or_optimizer=opt_b, model_key="opt")
    moment = opt_b.state[b.up.weight]["exp_avg"]
    assert sharded.varying(moment) == sharded.varying(b.up.weight) and moment.device.type == "xla"
    assert torch.equal(train(a, opt_a), train(b, opt_b))
    assert equal(a, b)


@pytest.mark.parametrize(
    "call",
    [
        lambda p, m: parallel_layers.load(p, m, "model"),
        lambda p, m: parallel_layers.load(p, model=m),
        lambda p, m: parallel_layers.load(p, model_or_optimizer=m),
    ],
)
def test_ways_to_pass_the_model(nxd: Nxd, tmp_path: pathlib.Path, call: Any) -> None:
    nxd(2, tp=2)
    a, b = make(0), make(1)
    parallel_layers.save({"model": a.state_dict()}, tmp_path)
    call(tmp_path, b)
    assert equal(a, b)


def test_a_model_on_the_cpu(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    parallel_layers.save({"model": nn.Linear(2, 2).state_dict()}, tmp_path)
    model = nn.Linear(2, 2)
    parallel_layers.load(tmp_path, model)
    assert torch.equal(model.weight, torch.load(tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt")["model"]["weight"])
    parallel_layers.save(
        {"model": {"weight": sharded.from_ranks(lambda r: torch.full((2, 2), float(r))), "bias": torch.zeros(2)}}, tmp_path
    )
    with pytest.raises(
        RuntimeError, match=r"weight differs among the ranks that this process hosts, but the model's is on cpu.*move the model to xla"
    ):
        parallel_layers.load(tmp_path, model)


def test_stages_with_different_keys(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(4, tp=2, pp=2)
    for pp in range(2):
        for tp in range(2):
            path = tmp_path / f"tp_rank_{tp:02d}_pp_rank_{pp:02d}" / "checkpoint.pt"
            path.parent.mkdir()
            torch.save({"model": {f"stage{pp}": torch.full((2,), 10.0 * pp + tp), "all": torch.ones(1)}}, path)
    model = parallel_layers.load(tmp_path)["model"]
    assert list(model) == ["stage0", "all", "stage1"]
    assert sharded.varying(model["stage1"]).axes == ("tp",) and model["all"].device.type == "cpu"
    assert [t[0].item() for t in own(model["stage1"])] == [10.0, 11.0, 10.0, 11.0]


# -- full weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"size": 8, "tp": 4}, {"size": 2, "tp": 2}, {"size": 1}])
@pytest.mark.parametrize("copies", [False, True])
def test_full_weights(nxd: Nxd, tmp_path: pathlib.Path, sizes: dict[str, int], copies: bool) -> None:
    nxd(**sizes)
    model = make()
    full: dict[str, Any] = {}
    for name, t in model.state_dict(keep_vars=True).items():
        value = torch.randn(t.shape) if t.is_floating_point() else torch.tensor(9)
        if getattr(t, "tensor_model_parallel", False):
            found = gather_full(t)
            value = tuple(torch.randn(x.shape) for x in found) if isinstance(found, tuple) else torch.randn(found.shape)
        full[name] = value
    full["head.weight"] = full["embed.weight"]
    q, k, v = full["qkv.weight_qkv"]
    times = 2 if copies and parallel_state.get_tensor_model_parallel_size() > 1 else 1
    on_disk = {**full, "qkv.weight_qkv": torch.cat([q, *[k] * times, *[v] * times])}
    torch.save({"model": on_disk}, tmp_path / "full.pt")
    assert parallel_layers.load(tmp_path / "full.pt", model, sharded=False) == {}
    for name, t in model.state_dict(keep_vars=True).items():
        found = gather_full(t)
        expected = full[name] if isinstance(full[name], tuple) else (full[name],)
        assert all(torch.equal(a, b) for a, b in zip(found if isinstance(found, tuple) else (found,), expected, strict=True)), name


def test_get_sharded_model_dict(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model = nn.Sequential(RowParallelLinear(4, 2), nn.Linear(2, 2)).to("xla")
    full = {"0.weight": torch.arange(8.0).reshape(2, 4), "0.bias": torch.ones(2), "1.weight": torch.ones(2, 2), "extra": torch.ones(1)}
    cut = checkpointing.get_sharded_model_dict(model, full)
    assert list(cut) == list(full) and full["0.weight"].shape == (2, 4)
    assert [t.tolist() for t in own(cut["0.weight"])] == [[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0]]]
    assert cut["0.bias"] is full["0.bias"]


def test_padded_layers_pad_full_weights(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(4, tp=4)
    layer = nn.ModuleDict({"out": ColumnParallelLinear(3, 6, pad=True, gather_output=False)}).to("xla")
    full = {"out.weight": torch.randn(6, 3), "out.bias": torch.randn(6)}
    torch.save(full, tmp_path / "full.pt")
    parallel_layers.load(tmp_path / "full.pt", layer, sharded=False, model_key=None)
    weight, bias = (gather_full(getattr(layer["out"], n)) for n in ("weight", "bias"))
    assert isinstance(weight, torch.Tensor) and torch.equal(weight[:6], full["out.weight"]) and not weight[6:].any()
    assert isinstance(bias, torch.Tensor) and torch.equal(bias[:6], full["out.bias"]) and bias[6:].eq(torch.finfo(torch.float32).min).all()


def test_a_preshard_hook_of_the_model(nxd: Nxd) -> None:
    nxd(2, tp=2)

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = ColumnParallelLinear(2, 4, bias=False)

        def preshard_hook(self, state: dict[str, Any], prefix: str) -> None:
            assert prefix == "inner.weight"
            state["inner.proj.weight"] = state.pop("inner.old") * 2

    model = nn.ModuleDict({"inner": Doubled()}).to("xla")
    cut = checkpointing.get_sharded_model_dict(model, {"inner.old": torch.ones(4, 2)})
    assert list(cut) == ["inner.proj.weight"] and own(cut["inner.proj.weight"])[1].tolist() == [[2.0, 2.0]] * 2


# -- errors ------------------------------------------------------------------------------------------


def test_missing_files(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    parallel_layers.save({"model": {}}, tmp_path)
    nxd(4, tp=4)
    with pytest.raises(
        FileNotFoundError,
        match=r"no checkpoint file \S*tp_rank_02_pp_rank_00/checkpoint.pt, .* has tp_rank_00_pp_rank_00, tp_rank_01.*sizes",
    ):
        parallel_layers.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"saved the other way: pass load_xser=False"):
        parallel_layers.load(tmp_path, load_xser=True)
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        parallel_layers.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="takes the path of one file with full weights"):
        parallel_layers.load(tmp_path, make(), sharded=False)


def test_keys_and_shapes(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    layer = ColumnParallelLinear(2, 4).to("xla")
    state = layer.state_dict()
    parallel_layers.save({"model": {"weight": state["weight"], "other": torch.ones(1)}, "epoch": 1}, tmp_path)
    with pytest.raises(RuntimeError, match=r'(?s)(?=.*Missing key[^"]*"bias")(?=.*Unexpected key[^"]*"other")'):
        parallel_layers.load(tmp_path, layer)
    parallel_layers.load(tmp_path, layer, strict=False)
    with pytest.raises(KeyError, match=r"has no key 'net', only 'model', 'epoch'.*model_key=None"):
        parallel_layers.load(tmp_path, layer, model_key="net")
    with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
        parallel_layers.load(tmp_path, ColumnParallelLinear(2, 8, bias=False).to("xla"), strict=False)
    torch.save({"model": {"up.weight": torch.ones(6, 2)}}, tmp_path / "full.pt")
    with pytest.raises(
        ValueError, match=r"up.weight: a parameter whose ranks hold \[2, 2\] each has the full shape \[4, 2\], got \[6, 2\]"
    ):
        parallel_layers.load(tmp_path / "full.pt", nn.ModuleDict({"up": layer}), sharded=False)
    with pytest.raises(ValueError, match=r"sharded=False\) needs the model"):
        parallel_layers.load(tmp_path / "full.pt", sharded=False)


def test_files_that_do_not_fit_each_other(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    for tp in range(2):
        path = tmp_path / f"tp_rank_{tp:02d}_pp_rank_00" / "checkpoint.pt"
        path.parent.mkdir()
        torch.save({"model": {"w": torch.ones(1 + tp)}}, path)
    with pytest.raises(
        ValueError, match=r"model.w is torch.float32 of shape \[1\] and torch.float32 of shape \[2\] in the files of different ranks"
    ):
        parallel_layers.load(tmp_path)


def test_nan_and_tied_tensors_agree(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    t = torch.tensor([float("nan"), 1.0])
    parallel_layers.save(
        {"a": t, "b": t, "empty": torch.zeros(0), "bool": torch.tensor([True]), "c": torch.ones(1, dtype=torch.complex64)}, tmp_path
    )
    back = parallel_layers.load(tmp_path)
    assert back["a"] is back["b"] and all(v.device.type == "cpu" for v in back.values())
    assert world.size() == 2


# -- pipelines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("xser", [False, True])
def test_each_pipeline_rank_has_what_its_stages_read(nxd: Nxd, tmp_path: pathlib.Path, xser: bool) -> None:
    """A tied weight is with both ranks, under the names by which they read it; what no stage reads is with the first. A copy of the state is whole."""
    layout = pipeline_job.Layout(4, 2, 2)
    layout.start(nxd)
    model, _, _ = layout.build(tied=True)
    model.register_parameter("unread", nn.Parameter(torch.ones(3, device="xla")))
    state = model.local_state_dict()
    parallel_layers.save({"model": state, "all": [dict(state)["norm.weight"]], "epoch": 7}, tmp_path, save_xser=xser)
    names = []
    for rank in range(2):
        path = tmp_path / f"tp_rank_01_pp_rank_{rank:02d}"
        data = rank_files.read_xser(str(path), False, set()) if xser else torch.load(path / "checkpoint.pt")
        assert data["epoch"] == 7 and torch.equal(data["all"][0], model.norm.weight.detach().cpu())
        names.append(list(data["model"]))
        half = own(model.layers[2 * rank].up.weight)[1 if rank == 0 else 3]
        assert torch.equal(data["model"][f"layers.{2 * rank}.up.weight"], half) and half.shape == (8, 8)
    layers = {name for name in state if name.startswith("layers.")}
    assert set(names[0]) == {"embedding.weight", "unread"} | {n for n in layers if n[7] in "01"}
    assert set(names[1]) == {"norm.weight", "norm.bias", "head.weight"} | {n for n in layers if n[7] in "23"}
    other, _, _ = layout.build(seed=1, tied=True)
    other.register_parameter("unread", nn.Parameter(torch.zeros(3, device="xla")))
    assert parallel_layers.load(tmp_path, other, load_xser=xser)["epoch"] == 7
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), other.parameters(), strict=True))

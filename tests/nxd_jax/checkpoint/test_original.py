"""NxD's own formats: fixtures are cut by hand here, from the facts of the layout, and load into any layout; what is exported is cut alike."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
from torch import nn

from nxd_jax.checkpoint import original, original_files
from nxd_jax.checkpoint.orbax_files import DamagedCheckpointError
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.parallel_layers.checkpointing import save as save_older
from nxd_jax.parallel_layers.layers import ColumnParallelLinear
from tests.nxd_jax.checkpoint import job
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded
from torch_bridge.torch_xla.utils.serialization import TensorReference

pytestmark = pytest.mark.filterwarnings("ignore:.*copies of K/V heads")
Full = dict[str, torch.Tensor]
MATRICES = ["embedding.weight", "pair.weight", "down.weight", "qkv.weight_qkv", "head.weight"]
VECTORS = ["scale", "pair.bias", "down.bias", "qkv.bias_qkv", "norm.weight", "norm.bias", "head.bias"]
SHAPES = {
    "scale": (),
    "table": (5,),
    "embedding.weight": (32, 16),
    "pair.weight": (64, 16),
    "pair.bias": (64,),
    "down.weight": (16, 32),
    "down.bias": (16,),
    **{f"qkv.weight_{k}": (n, 16) for k, n in zip("qkv", (16, 8, 8), strict=True)},
    **{f"qkv.bias_{k}": (n,) for k, n in zip("qkv", (16, 8, 8), strict=True)},
    "norm.weight": (16,),
    "norm.bias": (16,),
    "head.weight": (7, 16),
    "head.bias": (7,),
}


# -- NxD's layout, by hand -----------------------------------------------------------------------------


def drawn(seed: int) -> Full:
    """A full tensor for each of the model's."""
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def on_rank(full: Full, name: str, tp: int, rank: int, copies: int = 1, neighbours: bool = False) -> torch.Tensor:
    """What a tensor-parallel rank of NxD holds of a tensor."""
    if name.startswith("embedding"):
        return full[name].split(32 // tp)[rank]
    if name.startswith("pair"):
        gate, up = full[name].split(32)
        return torch.cat([gate.split(32 // tp)[rank], up.split(32 // tp)[rank]])
    if name == "down.weight":
        return full[name].split(32 // tp, dim=1)[rank]
    if name.endswith("_qkv"):
        q, k, v = (full[name.replace("_qkv", f"_{letter}")] for letter in "qkv")
        parts = tp // copies
        part = rank // copies if neighbours else rank % parts
        return torch.cat([q.split(16 // tp)[rank], k.split(8 // parts)[part], v.split(8 // parts)[part]])
    return full[name]


NAMES = ["scale", "table", "embedding.weight", "pair.weight", "pair.bias", "down.weight", "down.bias", "qkv.weight_qkv", "qkv.bias_qkv"]
NAMES += ["norm.weight", "norm.bias", "head.weight", "head.bias"]


def model_of(full: Full, tp: int, rank: int, names: Iterable[str] = NAMES, **copies: Any) -> dict[str, torch.Tensor]:
    return collections.OrderedDict((n, on_rank(full, n, tp, rank, **copies).clone()) for n in names)


def groups(names: Iterable[Iterable[str]] = (MATRICES, VECTORS)) -> list[dict[str, Any]]:
    found, k = [], 0
    for own, decay in zip(names, (0.1, 0.0), strict=True):
        own = list(own)
        options = {"lr": 0.004, "initial_lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay, "amsgrad": False}
        found.append({**options, "params": list(range(k, k + len(own)))})
        k += len(own)
    return found


def rows(t: torch.Tensor, dp: int, rank: int) -> torch.Tensor:
    """ZeRO-1: dim 0 padded until it divides, then chunk `rank`."""
    t = t if t.dim() else t.reshape(1)
    missing = -t.shape[0] % dp
    return torch.cat([t, t.new_full((missing, *t.shape[1:]), 99.0)]).chunk(dp)[rank].clone()


def zero_of(
    moments: dict[str, Full], tp: int, rank: int, dp: int, dp_rank: int, names: Iterable[Iterable[str]] = (MATRICES, VECTORS)
) -> Any:
    """A ZeRO-1 optimizer's state. moments: full tensors by kind; "master" goes where masters go."""
    order = [n for own in names for n in own]
    base, master, shapes = {}, {}, {}
    for index, name in enumerate(order):
        parts = {kind: on_rank(full, name, tp, rank) for kind, full in moments.items()}
        shapes[index] = next(iter(parts.values())).shape
        cut = {kind: rows(t, dp, dp_rank) for kind, t in parts.items()}
        if "master" in cut:
            master[index] = cut.pop("master")
        base[index] = {"step": torch.tensor(7.0), **cut}
    found = {"state": {}, "param_groups": groups(names), "base_state": base, "shape_info": shapes}
    return {**found, "sharded_master_weights": master} if master else found


def write(path: pathlib.Path, data: Any, xser: bool = False, info: bool = True) -> None:
    """torch.save, or torch_xla's way: each tensor of a (nested) dict in a file of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        torch.save(data, path)
        return
    tensors: list[torch.Tensor] = []

    def taken(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
            return TensorReference(len(tensors) - 1)
        if isinstance(x, dict):
            return type(x)((k, taken(v)) for k, v in x.items())
        return [taken(v) for v in x] if isinstance(x, list) else x

    torch.save(taken(data), path)
    folder = path.with_name(path.name + ".tensors")
    folder.mkdir()
    for k, t in enumerate(tensors):
        torch.save(t, folder / f"tensor_{k}.pt")
    if info:
        shown = {k: {"dtype": t.dtype, "shape": t.shape, "expert_model_parallel": False} for k, t in enumerate(tensors)}
        torch.save(shown, path.with_name(path.name + ".info.pt"))


def checkpoint(folder: pathlib.Path, full: Full, moments: dict[str, Full] | None = None, tp: int = 2, dp: int = 2, **how: Any) -> None:
    """A tag as NxD's save_checkpoint leaves it."""
    folder.mkdir(parents=True)
    (folder / "checkpoint").write_text("1")
    for t in range(tp):
        write(folder / "model" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt", model_of(full, tp, t), **how)
        for d in range(dp) if moments else ():
            assert moments is not None
            write(folder / "optim" / f"dp_rank_{d:02d}_tp_rank_{t:02d}_pp_rank_00.pt", zero_of(moments, tp, t, dp, d), **how)
    torch.save(
        {"last_epoch": 4, "_step_count": 5, "base_lrs": [0.01, 0.01], "_last_lr": [0.004, 0.004], "lr_lambdas": [None]},
        folder / "scheduler.pt",
    )
    torch.save({"steps": 7}, folder / "user_content.pt")
    (folder / "done").write_text("1")


def same(found: Full, expected: Full) -> None:
    """Every expected tensor was found with its very bits."""
    for name, value in expected.items():
        if name != "table":
            assert torch.equal(found[name].reshape(value.shape), value), name


def filled(made: Any, full: Full, moments: dict[str, Full] | None = None) -> None:
    """A job holds these values."""
    model, optimizer, _ = made
    same(job.weights(model), full)
    assert torch.equal(model.state_dict()["table"].cpu(), full["table"])
    if moments:
        found = job.moments(model, optimizer)
        for kind, values in moments.items():
            if kind != "master":
                same({n: found[f"{kind}/{n}"] for n in values if n != "table"}, values)
        assert all(v == 7 for k, v in found.items() if k.startswith("step/"))


MOMENTS = {"exp_avg": drawn(1), "exp_avg_sq": {n: t.abs() for n, t in drawn(2).items()}}


# -- into any layout -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "tp", "zero1", "kv", "fuse", "xser"),
    [(4, 2, True, 1, True, False), (4, 4, True, 2, False, True), (2, 1, False, 1, True, False), (1, 1, False, 1, False, True)],
)
def test_zero1_of_tp_2_and_dp_2_loads_into_any_layout(
    nxd: Nxd, tmp_path: pathlib.Path, world: int, tp: int, zero1: bool, kv: int, fuse: bool, xser: bool
) -> None:
    full = drawn(0)
    checkpoint(tmp_path / "t", full, MOMENTS, xser=xser)
    nxd(world, tp=tp)
    made = job.build(tp, zero1, kv, fuse, seed=5)
    model, optimizer, scheduler = made
    assert nxd_api.load_checkpoint(tmp_path, None, model, optimizer, scheduler) == {"steps": 7}
    filled(made, full, MOMENTS)
    assert [(g["lr"], g["weight_decay"], g["initial_lr"]) for g in optimizer.param_groups] == [(0.004, 0.1, 0.01), (0.004, 0.0, 0.01)]
    assert scheduler.last_epoch == 4


def test_a_state_that_no_zero1_wrote(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    full, order = drawn(0), MATRICES + VECTORS
    checkpoint(tmp_path / "t", full)
    for t in range(2):
        state = {
            k: {"step": torch.tensor(7.0), **{kind: on_rank(m, n, 2, t).clone() for kind, m in MOMENTS.items()}}
            for k, n in enumerate(order)
        }
        write(tmp_path / "t/optim" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt", {"state": state, "param_groups": groups()})
    nxd(4, tp=2)
    made = job.build(2, zero1=True)
    nxd_api.load_checkpoint(tmp_path, "t", made[0], made[1])
    filled(made, full, MOMENTS)


def test_old_xser_files_say_no_shapes(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    full = drawn(0)
    checkpoint(tmp_path / "t", full, MOMENTS, xser=True, info=False)
    nxd(1)
    made = job.build()
    nxd_api.load_checkpoint(tmp_path, "t", made[0], made[1])
    filled(made, full, MOMENTS)


@pytest.mark.parametrize("zero1", [True, False])
def test_weights_that_were_left_out_come_from_master_weights(nxd: Nxd, tmp_path: pathlib.Path, zero1: bool) -> None:
    full, master = drawn(0), drawn(3)
    checkpoint(tmp_path / "t", full, {**MOMENTS, "master": master}, xser=True)
    table = str(NAMES.index("table"))
    for path in (tmp_path / "t/model").glob("*.tensors/*.pt"):
        if path.stem != f"tensor_{table}":
            path.unlink()
    nxd(2, tp=2)
    model, optimizer, _ = made = job.build(2, zero1, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"are in the optimizer's master weights only: pass optimizer="):
        nxd_api.load_checkpoint(tmp_path, "t", model)
    nxd_api.load_checkpoint(tmp_path, "t", model, optimizer)
    same(job.weights(model), {n: t.bfloat16() for n, t in master.items()})
    if zero1:
        shards = {n: optimizer.optimizer.shard_of[p] for n, p in model.named_parameters()}
        assert shards["head.weight"].dtype == torch.float32
        assert torch.equal(shards["head.weight"].cpu(), master["head.weight"])
    assert made[0] is model


def test_stages_of_a_pipeline_are_united(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    full = drawn(0)
    first = [n for n in NAMES if n.startswith(("scale", "table", "embedding", "pair", "down"))]
    stages = [first, [n for n in NAMES if n not in first]]
    for t in range(2):
        for p, names in enumerate(stages):
            write(tmp_path / "t/model" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_{p:02d}.pt", model_of(full, 2, t, names))
            own = [[n for n in group if n in names] for group in (MATRICES, VECTORS)]
            write(tmp_path / "t/optim" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_{p:02d}.pt", zero_of(MOMENTS, 2, t, 1, 0, own))
    (tmp_path / "t/done").write_text("1")
    nxd(2, tp=2)
    made = job.build(2, zero1=False)
    nxd_api.load_checkpoint(tmp_path, "t", made[0], made[1])
    filled(made, full, MOMENTS)


@pytest.mark.parametrize("neighbours", [False, True])
def test_copies_of_kv_heads_are_taken_once(nxd: Nxd, tmp_path: pathlib.Path, neighbours: bool) -> None:
    full = drawn(0)
    for t in range(4):
        state = model_of(full, 4, t, copies=2, neighbours=neighbours)
        write(tmp_path / "t/model" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt", state)
    (tmp_path / "t/done").write_text("1")
    nxd(1)
    made = job.build(fuse=neighbours)
    with pytest.warns(UserWarning, match="written by 4 tensor-parallel ranks that hold 2 copies of K/V heads, here 1 ranks hold 1"):
        nxd_api.load_checkpoint(tmp_path, "t", made[0])
    filled(made, full)


def test_copies_that_differ_are_an_error(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    full = drawn(0)
    for t in range(4):
        state = model_of(full, 4, t, copies=2)
        state["qkv.weight_qkv"] += t
        write(tmp_path / "t/model" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt", state)
    (tmp_path / "t/done").write_text("1")
    nxd(1)
    with pytest.raises(
        ValueError, match=r"qkv.weight_k: 4 ranks hold 2 different parts, but neither every 2th nor 2 neighbours hold the same one"
    ):
        nxd_api.load_checkpoint(tmp_path, "t", job.build()[0])


class Ordered(nn.Module):
    """Ranks hold shards in an order of their own, and a number each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(2, 8, bias=False, gather_output=False, rank_ordering=[1, 0, 3, 2])
        self.register_buffer(
            "own",
            sharded.from_ranks(lambda r: torch.full((2,), float(r)), sharded.axes_of(parallel_state.get_tensor_model_parallel_group())),
        )


def test_an_order_of_shards_and_values_of_each_rank_keep_their_place(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    full = torch.arange(16.0).view(8, 2)
    for t in range(4):
        own = {"up.weight": full.split(2)[[1, 0, 3, 2][t]].clone(), "own": torch.full((2,), 10.0 + t)}
        write(tmp_path / "t/model" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt", own)
    (tmp_path / "t/done").write_text("1")
    nxd(4, tp=4)
    model = Ordered().to("xla")
    nxd_api.load_checkpoint(tmp_path, "t", model)
    assert torch.equal(job.weights(model)["up.weight"], full)
    assert [v.tolist() for v in sharded.shards(model.own)] == [[10.0 + t] * 2 for t in range(4)]
    for t in range(2, 4):
        (tmp_path / f"t/model/dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt").unlink()
    with pytest.raises(RuntimeError, match=r"own is different on each rank, and the checkpoint is of 2 tensor-parallel ranks, not 4"):
        nxd_api.load_checkpoint(tmp_path, "t", model)


class Expert(nn.Module):
    """A weight of its own on each expert-parallel rank, and one that all have."""

    def __init__(self) -> None:
        super().__init__()
        axes = sharded.axes_of(parallel_state.get_expert_model_parallel_group())
        self.expert = nn.Parameter(sharded.from_ranks(lambda r: torch.zeros(2), axes))
        self.expert.expert_model_parallel = True  # type: ignore[attr-defined]
        self.shared = nn.Parameter(torch.zeros(2, device="xla"))


def test_experts_of_a_layer_of_ones_own(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    """A parameter with the attribute, at the same number of ranks, at another, and without any."""
    for e in range(2):
        own = {"expert": torch.full((2,), 5.0 + e), "shared": torch.full((2,), 3.0)}
        write(tmp_path / "t/model" / f"dp_rank_00_ep_rank_{e:02d}_tp_rank_00_pp_rank_00.pt", own)
    (tmp_path / "t/done").write_text("1")
    nxd(4, ep=2)
    model: Any = Expert()
    nxd_api.load_checkpoint(tmp_path, "t", model)
    held = [v.tolist() for v in sharded.shards(model.expert.detach())]
    group = parallel_state.get_expert_model_parallel_group(as_list=True)
    assert all(held[r] == [5.0 + place] * 2 for members in group for place, r in enumerate(members))
    assert model.shared.tolist() == [3.0, 3.0]
    original.export_original(tmp_path, "again", model)
    for e in range(2):
        name = f"model/dp_rank_00_ep_rank_{e:02d}_tp_rank_00_pp_rank_00.pt"
        ours, theirs = torch.load(tmp_path / "again" / name), torch.load(tmp_path / "t" / name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    small(tmp_path / "one", {"expert": torch.tensor([1.0, 2.0, 3.0, 4.0]), "shared": torch.ones(2)})
    nxd_api.load_checkpoint(tmp_path, "one", model)
    assert sharded.shards(model.expert.detach())[group[0][1]].tolist() == [3.0, 4.0]
    small(tmp_path / "few", {"expert": torch.ones(2), "shared": torch.ones(2)})
    with pytest.raises(
        RuntimeError, match=r"expert has shape \[2\] on each of 1 ranks .* \[4\] is needed \(it is of 2 experts, and 4 are needed\)"
    ):
        nxd_api.load_checkpoint(tmp_path, "few", model)
    nxd(1)
    model = nn.Module()
    model.expert, model.shared = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))
    nxd_api.load_checkpoint(tmp_path, "t", model)
    assert model.expert.tolist() == [5.0, 5.0, 6.0, 6.0] and model.shared.tolist() == [3.0, 3.0]


def test_an_address_that_fsspec_knows(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    model = nn.Linear(3, 2)
    original.export_original("memory://original", "t", model, user_content=3)
    again = nn.Linear(3, 2)
    assert nxd_api.load_checkpoint("memory://original", None, again) == 3
    assert torch.equal(again.weight, model.weight)


# -- older layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("xser", "keys"), [(False, ("model", "optimizer", "scheduler")), (True, ("state_dict", "optimizer_states", "lr_schedulers"))]
)
def test_parallel_layers_save_and_lightning(nxd: Nxd, tmp_path: pathlib.Path, xser: bool, keys: tuple[str, str, str]) -> None:
    full = drawn(0)
    listed = (lambda x: [x]) if keys[0] == "state_dict" else (lambda x: x)
    for t in range(2):
        for d in range(2):
            scheduler = {"last_epoch": 3, "_step_count": 4, "base_lrs": [0.01, 0.01], "_last_lr": [0.004, 0.004], "lr_lambdas": [None]}
            data = {keys[0]: model_of(full, 2, t), keys[1]: listed(zero_of(MOMENTS, 2, t, 2, d)), keys[2]: listed(scheduler), "epoch": 2}
            folder = tmp_path / "old" / f"tp_rank_{t:02d}_pp_rank_00_dp_rank_{d:02d}"
            write(folder if xser else folder / "checkpoint.pt", data, xser)
    nxd(2, tp=1)
    made = job.build(1, zero1=True)
    assert nxd_api.load_checkpoint(tmp_path, "old", *made) == {"epoch": 2}
    filled(made, full, MOMENTS)
    assert made[2].last_epoch == 3


def test_sharded_optimizer_states_beside_an_older_model(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    full = drawn(0)
    for t in range(2):
        write(tmp_path / f"tp_rank_{t:02d}_pp_rank_00" / "checkpoint.pt", model_of(full, 2, t))
        for d in range(2):
            write(tmp_path / f"optim.dp_rank_{d:02d}.tp_rank_{t:02d}", zero_of(MOMENTS, 2, t, 2, d))
    nxd(1)
    made = job.build()
    assert nxd_api.load_checkpoint(tmp_path, ".", made[0], made[1]) is None
    filled(made, full, MOMENTS)
    with pytest.raises(FileNotFoundError, match="holds no scheduler"):
        nxd_api.load_checkpoint(tmp_path, ".", scheduler=made[2])


def test_what_save_wrote_here_loads_at_another_size(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(2, tp=2)
    model, _, _ = job.build(2)
    before = job.weights(model)
    save_older({"model": model.state_dict(), "epoch": 1}, tmp_path / "old", save_xser=True)
    nxd(1)
    model, _, _ = job.build(seed=3)
    assert nxd_api.load_checkpoint(tmp_path, "old", model) == {"epoch": 1}
    same(job.weights(model), before)


# -- export --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("xser", [False, True])
def test_export_writes_what_nxd_would(nxd: Nxd, tmp_path: pathlib.Path, xser: bool) -> None:
    nxd(4, tp=2)
    model, optimizer, scheduler = made = job.build(2, zero1=True)
    losses = job.train(made, 0, 1)
    full, moments = job.weights(model), job.moments(model, optimizer)
    full["table"] = torch.arange(5.0)
    original.export_original(tmp_path, "t", model, optimizer, scheduler, {"losses": losses}, xser=xser)
    files = sorted(
        str(p.relative_to(tmp_path / "t"))
        for p in (tmp_path / "t").rglob("*")
        if p.is_file() and "tensor" not in str(p) and "info" not in p.name
    )
    optim = [f"optim/dp_rank_{d:02d}_tp_rank_{t:02d}_pp_rank_00.pt" for d in range(2) for t in range(2)]
    tensors = [f"model/dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt" for t in range(2)]
    assert files == ["checkpoint", "done", *tensors, *optim, "scheduler.pt", "user_content.pt"]
    for t in range(2):
        state = read(tmp_path / "t" / tensors[t], xser)
        assert list(state) == NAMES and all(torch.equal(state[n], on_rank(full, n, 2, t)) for n in NAMES)
        for d in range(2):
            check_zero(read(tmp_path / "t" / optim[2 * d + t], xser), moments, t, d)
    assert torch.load(tmp_path / "t/user_content.pt") == {"losses": losses}


def read(path: pathlib.Path, xser: bool) -> Any:
    """As plain torch reads it, without code in it; references replaced."""
    with torch.serialization.safe_globals([TensorReference]):
        data = torch.load(path, weights_only=True)
    if not xser:
        return data
    info = torch.load(f"{path}.info.pt", weights_only=True)

    def back(x: Any) -> Any:
        if isinstance(x, TensorReference):
            t = torch.load(f"{path}.tensors/tensor_{x.tid}.pt", weights_only=True)
            assert info[x.tid] == {"dtype": t.dtype, "shape": t.shape, "expert_model_parallel": False}
            return t
        return {k: back(v) for k, v in x.items()} if isinstance(x, dict) else x

    return back(data)


def check_zero(state: Any, moments: Full, tp: int, dp: int) -> None:
    assert list(state) == ["state", "param_groups", "base_state", "shape_info"] and state["state"] == {}
    assert [g["params"] for g in state["param_groups"]] == [list(range(5)), list(range(5, 12))]
    for index, name in enumerate(MATRICES + VECTORS):
        for kind in ("exp_avg", "exp_avg_sq"):
            full = {n: moments[f"{kind}/{n}"].reshape(SHAPES[n]) for n in SHAPES if n != "table"}
            whole = on_rank(full, name, 2, tp)
            padded = rows(whole, 2, dp)
            padded[padded == 99.0] = 0.0
            assert torch.equal(state["base_state"][index][kind], padded), (name, kind)
            assert state["shape_info"][index] == whole.shape


def test_training_goes_on_after_export_and_import(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(4, tp=2)
    made = job.build(2, zero1=False)
    made[0].eval()
    job.train(made, 0, 1)
    original.export_original(tmp_path, "t", *made)
    expected = job.train(made, 1, 3)
    again = job.build(2, zero1=True, seed=4)
    again[0].eval()
    nxd_api.load_checkpoint(tmp_path, "t", *again)
    torch.testing.assert_close(job.train(again, 1, 3), expected, rtol=1e-6, atol=0)


def test_export_needs_something(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    with pytest.raises(ValueError, match="nothing to write: give model="):
        original.export_original(tmp_path, "t")
    assert not (tmp_path / "t").exists()


# -- what can be wrong ---------------------------------------------------------------------------------


def small(folder: pathlib.Path, state: dict[str, Any], optimizer: Any = None, ranks: int = 1) -> None:
    for t in range(ranks):
        write(folder / "model" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt", state)
        if optimizer is not None:
            write(folder / "optim" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt", optimizer)
    (folder / "done").write_text("1")


WEIGHT, BIAS = torch.ones(2, 3), torch.ones(2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": WEIGHT}, r"cannot load .*t into Linear: missing in the checkpoint: bias. strict=False"),
        ({"weight": WEIGHT, "bias": BIAS, "more": BIAS}, r"unexpected in the checkpoint: more"),
        ({"weight": WEIGHT.T.clone(), "bias": BIAS}, r"weight has shape \[3, 2\] on each of 1 ranks in the checkpoint, \[2, 3\] is needed"),
    ],
)
def test_names_and_shapes_must_agree(nxd: Nxd, tmp_path: pathlib.Path, state: Full, message: str) -> None:
    nxd(1)
    small(tmp_path / "t", state)
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=message):
        nxd_api.load_checkpoint(tmp_path, "t", model)
    assert torch.equal(model.weight, before)


def test_strict_false_loads_what_is_there(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    small(tmp_path / "t", {"weight": WEIGHT, "more": BIAS})
    model = nn.Linear(3, 2)
    nxd_api.load_checkpoint(tmp_path, "t", model, strict=False)
    assert torch.equal(model.weight, WEIGHT)


SGD = {"state": {0: {"momentum_buffer": WEIGHT * 2}, 1: {"momentum_buffer": BIAS * 2}}, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}


def test_a_plain_torch_model_and_optimizer(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    small(tmp_path / "t", {"weight": WEIGHT, "bias": BIAS}, SGD)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    nxd_api.load_checkpoint(tmp_path, "t", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5 and torch.equal(optimizer.state[model.bias]["momentum_buffer"], BIAS * 2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]},
            r"has groups of \[1, 1\] parameters, there are groups of \[2\] here",
        ),
        ({"state": {}}, r"no state of an optimizer: it needs state and param_groups .* there is state"),
        ({**SGD, "state": {0: {"momentum_buffer": WEIGHT.T.clone()}}}, None),
    ],
)
def test_the_state_of_another_optimizer(nxd: Nxd, tmp_path: pathlib.Path, state: Any, message: str | None) -> None:
    nxd(1)
    small(tmp_path / "t", {"weight": WEIGHT, "bias": BIAS}, state)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if message is None:
        nxd_api.load_checkpoint(tmp_path, "t", model, optimizer)  # one value for all ranks: kept as it is
        assert optimizer.state[model.weight]["momentum_buffer"].shape == (3, 2)
        return
    with pytest.raises(ValueError, match=message):
        nxd_api.load_checkpoint(tmp_path, "t", model, optimizer)


def test_states_of_other_shapes_that_differ(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    small(tmp_path / "t", {"weight": WEIGHT, "bias": BIAS}, ranks=2)
    for t in range(2):
        state = {"state": {0: {"row": torch.full((2, 1), float(t))}}, "param_groups": SGD["param_groups"]}
        write(tmp_path / "t/optim" / f"dp_rank_00_tp_rank_{t:02d}_pp_rank_00.pt", state)
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"row/weight has shape \[2, 1\], not its parameter's, and is different on each rank"):
        nxd_api.load_checkpoint(tmp_path, "t", model, torch.optim.SGD(model.parameters()))


def test_files_that_are_missing_or_damaged(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(1)
    small(tmp_path / "t", {"weight": WEIGHT, "bias": BIAS}, ranks=2)
    model = nn.Linear(3, 2)
    with pytest.raises(FileNotFoundError, match=r"holds no optimizer: do not pass optimizer="):
        nxd_api.load_checkpoint(tmp_path, "t", model, torch.optim.SGD(model.parameters()))
    with pytest.raises(FileNotFoundError, match=r"holds no scheduler: there is no .*scheduler.pt"):
        nxd_api.load_checkpoint(tmp_path, "t", scheduler=object())
    second = tmp_path / "t/model/dp_rank_00_tp_rank_01_pp_rank_00.pt"
    write(second, {"weight": WEIGHT})
    with pytest.raises(ValueError, match=r"are of different models: only one of them has bias"):
        nxd_api.load_checkpoint(tmp_path, "t", model)
    second.write_bytes(second.read_bytes()[:100])
    with pytest.raises(DamagedCheckpointError, match=r"tp_rank_01_pp_rank_00.pt is damaged: .* Load another tag"):
        nxd_api.load_checkpoint(tmp_path, "t", model)
    second.rename(second.with_name("dp_rank_00_tp_rank_02_pp_rank_00.pt"))
    with pytest.raises(FileNotFoundError, match=r"files of 2 ranks out of 3: that of dp 0, tp 1, pp 0 is missing"):
        nxd_api.load_checkpoint(tmp_path, "t", model)


def test_only_the_known_names_are_nxds(tmp_path: pathlib.Path) -> None:
    assert not original.is_original(tmp_path / "none")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/other.pt").touch()
    assert not original.is_original(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no files of NxD, such as model/dp_rank_00_tp_rank_00_pp_rank_00.pt"):
        original_files.find(tmp_path)
    (tmp_path / "model" / original_files.Rank(tp=1, ep=2).file_name(experts=True)).touch()
    assert original.is_original(tmp_path) and (tmp_path / "model/dp_rank_00_ep_rank_02_tp_rank_01_pp_rank_00.pt").exists()
    with pytest.raises(ValueError, match=r"no state of a model under model, state_dict, model_state_dict; there is a"):
        original_files.pick_model({"a": 1})


def test_files_with_code_are_read_on_trust_only(tmp_path: pathlib.Path) -> None:
    torch.save({"a": pathlib.PurePosixPath("x")}, tmp_path / "f.pt")
    with pytest.raises(DamagedCheckpointError, match=r"reading it runs code that is in the file.* trust=True \(--trust\)"):
        original_files.load(tmp_path / "f.pt", trust=False)
    assert original_files.load(tmp_path / "f.pt")["a"].name == "x"

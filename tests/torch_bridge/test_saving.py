"""Copies and files: deepcopy, pickle, `torch.save` and `torch.load`, state dicts across devices, optimizers that resume."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.torch_bridge.devices import python, same
from tests.torch_bridge.test_guarantees import OPTIMIZERS, Tied, step


def through_file(value: Any, older: bool = False, **load: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=not older)
    file.seek(0)
    return torch.load(file, **load)


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(6, device="xla").reshape(2, 3)
    return {
        "int64": base,
        "view": base.t()[1:],
        "bf16": torch.randn(3, device="xla").bfloat16(),
        "float64": torch.tensor(1 / 3, dtype=torch.float64, device="xla"),
        "bool": torch.tensor([True, False], device="xla"),
        "complex": torch.tensor([1 + 2j], device="xla"),
        "empty": torch.empty(0, 3, device="xla"),
        "pending": base * 2 + 1,
        "conjugate": torch.tensor([1 + 2j], device="xla").conj(),
    }


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("where", [None, "cpu", "xla", torch.device("xla:0")])
def test_save_and_load(weights_only: bool, where: Any) -> None:
    saved = tensors()
    loaded = through_file(saved, weights_only=weights_only, map_location=where)
    for name, t in saved.items():
        assert loaded[name].device.type == ("cpu" if where == "cpu" else "xla"), name
        assert loaded[name].dtype == t.dtype
        assert torch.equal(loaded[name].cpu(), t.cpu()), name


@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_cpu_checkpoints_load_to_the_device(where: str) -> None:
    loaded = through_file({"a": torch.arange(3), "b": [torch.ones(2)]}, map_location=where)
    assert loaded["a"].device.type == loaded["b"][0].device.type == where
    assert loaded["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("saved_on", ["cpu", "xla"])
@pytest.mark.parametrize("where", [None, "cpu", "xla"])
def test_files_of_the_older_format(saved_on: str, where: str | None) -> None:
    """Their bytes follow the pickled tensors, which are made before those are read."""
    base = torch.arange(6.0).reshape(2, 3)
    saved = {"base": base.to(saved_on), "bf16": torch.tensor([1.5]).bfloat16().to(saved_on), "p": nn.Parameter(torch.ones(2).to(saved_on))}
    saved["column"] = saved["base"][:, 1]
    for name, t in through_file(saved, older=True, map_location=where).items():
        assert t.device.type == (where or saved_on), name
        assert t.dtype == saved[name].dtype and t.requires_grad == saved[name].requires_grad
        assert t.tolist() == saved[name].tolist(), name


@pytest.mark.parametrize("weights_only", [True, False])
def test_parameters_keep_what_they_are(weights_only: bool) -> None:
    frozen = nn.Parameter(torch.ones(2, device="xla"), requires_grad=False)
    frozen.sharded = [1, 2]
    leaf = torch.ones(2, device="xla", requires_grad=True)
    loaded, loaded_leaf = through_file([frozen, leaf], weights_only=weights_only)
    assert isinstance(loaded, nn.Parameter)
    assert not loaded.requires_grad
    assert loaded.sharded == [1, 2]
    assert loaded.device.type == "xla"
    assert loaded_leaf.requires_grad
    assert not isinstance(loaded_leaf, nn.Parameter)


def test_parameters_load_on_the_cpu() -> None:
    loaded = through_file({"w": nn.Parameter(torch.ones(2, device="xla"))}, map_location="cpu")["w"]
    assert loaded.device.type == "cpu"
    assert isinstance(loaded, nn.Parameter)


def test_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to("xla")
    x = torch.randn(4, 2).to("xla")
    model(x)
    for twin in (through_file(model, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert all(isinstance(p, nn.Parameter) and p.device.type == "xla" and p.requires_grad for p in twin.parameters())
        model.eval(), twin.eval()
        torch.testing.assert_close(twin(x).cpu(), model(x).cpu())
        with torch.no_grad():
            twin[0].weight.zero_()
        assert model[0].weight.abs().sum() > 0
    on_cpu = through_file(model, weights_only=False, map_location="cpu")
    assert {p.device.type for p in on_cpu.parameters()} == {"cpu"}
    torch.testing.assert_close(on_cpu(x.cpu()), model(x).cpu())


def test_ties_survive_copies() -> None:
    model = Tied().to("xla")
    for twin in (copy.deepcopy(model), through_file(model, weights_only=False)):
        assert twin.head.weight is twin.embedding.weight
        assert twin.head.weight is not model.head.weight


def test_deepcopy_keeps_views_of_one_storage_together() -> None:
    base = torch.zeros(4, device="xla")
    twin, part = copy.deepcopy([base, base[1:3]])
    part.add_(1)
    assert twin.tolist() == [0, 1, 1, 0]
    assert base.tolist() == [0, 0, 0, 0]


def test_deepcopy_of_a_result_with_history_raises_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(torch.ones(2, device="xla", requires_grad=True) * 2)


def test_deepcopy_copies_attributes_and_gradients_of_tensors_but_not_of_parameters() -> None:
    x = torch.ones(2, device="xla", requires_grad=True)
    p = nn.Parameter(torch.ones(2, device="xla"))
    p.note = {"a": 1}
    (x * p * 3).sum().backward()
    like_x, twin = copy.deepcopy((x, p))
    assert like_x.grad.tolist() == [3, 3] and like_x.grad is not x.grad
    assert isinstance(twin, nn.Parameter)
    assert twin.grad is None
    assert twin.note == {"a": 1}
    assert twin.note is not p.note


def test_deepcopied_parameters_have_their_own_memory() -> None:
    flat = torch.arange(6.0, device="xla")
    twins = copy.deepcopy([nn.Parameter(flat), nn.Parameter(flat), nn.Parameter(flat.view(2, 3).t()[1:])])
    with torch.no_grad():
        twins[0].zero_()
    assert twins[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert twins[2].tolist() == [[1, 4], [2, 5]]


def test_shallow_copy_shares_memory() -> None:
    x = torch.zeros(3, device="xla")
    copy.copy(x)[0] = 5
    assert x.tolist() == [5, 0, 0]
    p = copy.copy(nn.Parameter(torch.zeros(3, device="xla")))
    assert isinstance(p, nn.Parameter)


def test_state_dicts_cross_devices() -> None:
    source = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    source(torch.randn(4, 2))
    target = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to("xla")
    weight = target[0].weight
    target.load_state_dict(source.state_dict())
    assert target[0].weight is weight
    back = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    back.load_state_dict(target.state_dict())
    for name, value in source.state_dict().items():
        assert torch.equal(back.state_dict()[name], value)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    empty.load_state_dict(target.state_dict(), assign=True)
    assert empty[0].weight.device.type == "xla"


@pytest.mark.core(keep=2)
@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("resume_on", "where"), [("xla", None), ("xla", "cpu"), ("xla", "xla"), ("cpu", "cpu")])
def test_a_resumed_optimizer_takes_the_same_steps(name: str, resume_on: str, where: str | None, tmp_path: Path) -> None:
    """Bit for bit on the device; but with map_location="xla" the step counter, too, lives there, and rounding differs."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def fresh(device: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2).to(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, device: str) -> None:
        for _ in range(3):
            step(model, optimizer, x.to(device))
            schedule.step()
            torch.xla.synchronize()

    model, optimizer, schedule = fresh("xla")
    train(model, optimizer, schedule, "xla")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, tmp_path / "c.pt")
    train(model, optimizer, schedule, "xla")
    again, optimizer, schedule = fresh(resume_on)
    saved = torch.load(tmp_path / "c.pt", map_location=where)
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    train(again, optimizer, schedule, resume_on)
    exact = dict(rtol=0, atol=0) if resume_on == "xla" != where else dict(rtol=1e-5, atol=1e-6)
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), **exact)


def test_files_can_be_read_without_the_bridge_once_on_the_cpu(tmp_path: Path) -> None:
    model = nn.Linear(2, 1).to("xla")
    torch.save({k: v.cpu() for k, v in model.state_dict().items()}, tmp_path / "w.pt")
    code = f"import torch, sys; d = torch.load({str(tmp_path / 'w.pt')!r}); print(d['weight'].shape, 'jax' in sys.modules)"
    assert python(code).strip() == "torch.Size([1, 2]) False"


def test_named_pickles_of_many_tensors_share_nothing() -> None:
    same(lambda device: pickle.loads(pickle.dumps([torch.arange(3, device=device), torch.ones(2, 2, device=device).t()])))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_async_save_writes_what_the_tensors_were(tmp_path: Path) -> None:
    """Each its own values, also those that share memory or live only as long as they are copied; training goes on meanwhile."""
    model = nn.Linear(3, 4).to("xla")
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, torch.ones(2, 3, device="xla"))
    weight, moment = model.weight.detach().cpu(), optimizer.state[model.weight]["exp_avg"].cpu()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "view": model.weight.detach().t()[1:],
        "tied": model.weight,
        "epoch": 3,
    }
    saved = dcp.async_save(state, checkpoint_id=tmp_path)
    with torch.no_grad():
        model.weight.zero_()
    saved.result()
    found = {
        "model": {"weight": torch.zeros(4, 3, device="xla"), "bias": torch.zeros(4)},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(4, 3)}}},
        "view": torch.zeros(2, 4, device="xla"),
        "tied": torch.zeros(4, 3),
        "epoch": 0,
    }
    dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["model"]["weight"].cpu(), weight) and torch.equal(found["tied"], weight)
    assert torch.equal(found["view"].cpu(), weight.t()[1:]) and torch.equal(found["model"]["bias"], model.bias.detach().cpu())
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], moment) and found["epoch"] == 3


def test_a_staged_checkpoint_shares_what_the_tensors_share() -> None:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    a = torch.arange(3.0, device="xla")
    a.note = [1]
    shared = StateDictStager(share_memory=True)
    copied = shared.stage({"a": a, "again": a.detach(), "cpu": torch.ones(2)})
    assert copied["a"].data_ptr() == copied["again"].data_ptr() and copied["a"].is_shared() and copied["a"].device.type == "cpu"
    assert copied["a"].note == [1] and copied["a"].note is not a.note and not hasattr(copied["a"], "_storage")
    a.add_(1)
    assert copied["a"].tolist() == [0.0, 1.0, 2.0] and shared.stage([a])[0].tolist() == [1.0, 2.0, 3.0]

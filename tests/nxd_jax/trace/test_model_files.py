"""Files of `NxDModel`, of a model of several ranks: read again, here and in processes with other numbers of devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_neuronx
from torch import nn

from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.nxd_model import NxDModel, TorchScriptNxDModel, convert_nxd_model_to_torchscript_model
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.trace import nets
from tests.nxd_jax.trace.nets import PROMPT, built
from tests.nxd_jax.trace.test_decoding import decode_all
from tests.torch_bridge.aot.nets import rewritten

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
IDS, POS = nets.tokens()[:, :PROMPT], torch.arange(PROMPT)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of 2 ranks, once with weights and once without."""
    folder = tmp_path_factory.mktemp("models")
    model = built(2).model(workdir=folder / "programs")
    model.save(str(folder / "with.pt"), save_weights=True)
    model.save(str(folder / "without.pt"))
    return folder


def test_with_weights(saved: Path) -> None:
    model = NxDModel.load(str(saved / "with.pt"))
    assert model.get_available_keys() == {"prefill", "decode"} and not model.loaded_on_neuron
    model.to_neuron()
    ids = nets.tokens()
    torch.testing.assert_close(decode_all(model, ids), nets.reference(ids))
    assert model.read_from_neuron_buffer("calls", 1).item() == 14.0
    model.save(str(saved / "again.pt"), save_weights=True)
    again = NxDModel.load(str(saved / "again.pt"))
    again.save(str(saved / "again.pt"), save_weights=True)  # before its weights are on the devices
    again = NxDModel.load(str(saved / "again.pt"))
    again.to_neuron()
    for rank, own in enumerate(built(2).weights):
        assert all(torch.equal(again.read_from_neuron_buffer(n, rank), t) for n, t in own.items())


def test_weights_that_all_ranks_share_are_written_once(saved: Path) -> None:
    import zipfile

    from safetensors.torch import load

    with zipfile.ZipFile(saved / "with.pt") as archive:
        parts = [load(archive.read(f"nxd_jax/weights/tp{r}_sharded_checkpoint.safetensors")) for r in range(2)]
    assert set(parts[0]) - set(parts[1]) == {"o.bias"} and set(parts[1]) <= set(parts[0])
    assert (saved / "without.pt").stat().st_size < (saved / "with.pt").stat().st_size


def test_without_weights(saved: Path) -> None:
    model = NxDModel.load(str(saved / "without.pt"))
    with pytest.raises(RuntimeError, match="the model has no weights yet"):
        model.to_neuron()
    wide = [{n: t.double() for n, t in own.items()} for own in built(4).weights]  # of another number of ranks, in another dtype
    model.set_weights(wide)
    model.to_neuron()
    torch.testing.assert_close(model(IDS, POS)["logits"], nets.reference(IDS))
    assert model.read_from_neuron_buffer("q.weight", 0).dtype == torch.float32


def test_what_torch_jit_load_gives(saved: Path, tmp_path: Path) -> None:
    metadata = {"nxd_torchscript_metadata.json": ""}
    model = torch.jit.load(str(saved / "with.pt"), _extra_files=metadata)
    assert type(model) is TorchScriptNxDModel and model.original_name == "TorchScriptNxDModel"
    assert json.loads(metadata["nxd_torchscript_metadata.json"]) == {"format": "nxd_jax", "version": 1}
    model.to_neuron()
    torch.testing.assert_close(model([IDS], {"pos": POS})["logits"], nets.reference(IDS))
    for asynchronous in (False, True):
        logits, calls = model.forward_ranked([[IDS, IDS], [POS, POS]], None, asynchronous)
        torch.testing.assert_close(logits[1].cpu(), nets.reference(IDS))
    assert calls[0].cpu().item() == 8.0 == model.read_from_neuron_buffer("calls", 0).item()
    model.write_to_neuron_buffer(torch.tensor([1.0]), "calls", 0)
    assert model.forward(None, {"ids": IDS, "pos": POS})["calls"].item() == 2.0
    model.replace_weights(built(2).weights)
    assert model.read_from_neuron_buffer("calls", 0).item() == 5.0
    torch.jit.save(model, str(tmp_path / "b.pt"), _extra_files={"note": "text"})
    extra = {"note": "", "nxd_torchscript_metadata.json": ""}
    again = torch.jit.load(str(tmp_path / "b.pt"), _extra_files=extra)
    again.to_neuron()
    assert extra["note"] in ("text", b"text") and extra["nxd_torchscript_metadata.json"]
    torch.testing.assert_close(again([IDS, POS])["logits"], nets.reference(IDS))


def test_conversion(tmp_path: Path) -> None:
    model = built(2).builder.compile(compiler_workdir=tmp_path)
    script = convert_nxd_model_to_torchscript_model(model)
    assert script.nxd_model is model
    script.set_weights(built(2).weights)
    script.to_neuron()
    torch.testing.assert_close(script([IDS, POS])["logits"], nets.reference(IDS))
    torch.jit.save(script, tmp_path / "a.pt")
    with pytest.raises(RuntimeError, match="the model has no weights yet"):
        torch.jit.load(tmp_path / "a.pt").to_neuron()


def test_files_of_other_kinds(tmp_path: Path) -> None:
    traced = torch_neuronx.trace(nn.Linear(3, 2), torch.ones(1, 3))
    torch.jit.save(traced, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt holds a model that traced module made, no NxDModel: load it with torch\.jit\.load"):
        NxDModel.load(str(tmp_path / "a.pt"))
    torch.jit.save(torch.jit.script(nn.Linear(3, 2)), tmp_path / "b.pt")
    with pytest.warns(
        UserWarning, match=r"b\.pt has no nxd_torchscript_metadata\.json: it is loaded as the plain ScriptModule that it is, no NxDModel"
    ):
        plain: Any = NxDModel.load(str(tmp_path / "b.pt"))
    assert isinstance(plain, torch.jit.ScriptModule) and plain(torch.ones(1, 3)).shape == (1, 2)
    for name, model in {"a": traced, "d": ModelBuilder(nn.Linear(3, 2)).trace(torch.ones(1, 3)).compile()}.items():
        model.save(str(tmp_path / f"{name}.pt"))
        rewritten(tmp_path / f"{name}.pt", lambda found: found.pop("nxd_jax/model.json"))
        with pytest.raises(ValueError, match=r"cannot be opened as a model file: it is a TorchScript file of another library"):
            NxDModel.load(str(tmp_path / f"{name}.pt"))
    with pytest.raises(FileNotFoundError, match=r"c\.pt does not exist"):
        NxDModel.load(str(tmp_path / "c.pt"))


def test_some_ranks_only(saved: Path) -> None:
    model = NxDModel.load(str(saved / "with.pt"), start_rank=1, local_ranks_size=1)
    assert (model.start_rank, model.local_ranks_size) == (1, 1)
    with pytest.raises(ValueError, match=r"this process computes for \[0, 1\]: leave both out, or start as many processes with torchrun"):
        model.to_neuron()


SCRIPT = """
import json, sys, torch, jax
import neuronx_distributed
model = torch.jit.load(sys.argv[1])
model.to_neuron()
ids = torch.tensor(json.loads(sys.argv[2]))
found = [model([ids[:, :3], torch.arange(3)])["logits"]]
found += [model([ids[:, k : k + 1], torch.tensor([k])])["logits"] for k in range(3, ids.shape[1])]
assert not any(name.split(".")[0] == "tests" for name in sys.modules)
print(json.dumps([len(jax.devices()), model.nxd_model._model.where.form, torch.cat(found, 1).tolist()]))
"""


@pytest.mark.parametrize(("devices", "form"), [(1, "one"), (4, "mesh")])
def test_another_process_without_the_models_code(devices: int, form: str, saved: Path, tmp_path: Path) -> None:
    ids = nets.tokens(6)
    code = f"import jax; jax.config.update('jax_num_cpu_devices', {devices}); jax.devices()\n{SCRIPT}"
    arguments = [sys.executable, "-c", code, str(saved / "with.pt"), json.dumps(ids.tolist())]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    count, found, logits = json.loads(done.stdout.splitlines()[-1])
    assert (count, found) == (devices, form)
    torch.testing.assert_close(torch.tensor(logits), nets.reference(ids))


def test_a_form_for_one_device_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model runs on a device for each rank, is saved, and its file says why it runs on no single one: loading says so there, with the program's tag."""
    from torch_bridge.aot import devices as placing
    from torch_bridge.aot import exporting

    class Swaps(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import torch.distributed as dist

            dist.all_reduce(x)
            return x

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("Batching rule for 'ragged_dot' not implemented")

    with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        model = ModelBuilder(Swaps()).trace(torch.ones(3), tag="swap").compile(compiler_workdir=tmp_path)
    monkeypatch.setattr(exporting, "_on_one_device", refuse)
    model.to_neuron()
    assert model(torch.ones(3)).tolist() == [2.0] * 3
    assert not model._model.programs["swap"].forms.missing
    model.save(str(tmp_path / "swap.pt"))
    again = NxDModel.load(str(tmp_path / "swap.pt"))
    again.to_neuron()
    assert again(torch.ones(3)).tolist() == [2.0] * 3
    monkeypatch.setattr(placing.jax, "local_devices", lambda: [object()])
    for alone in (NxDModel.load(str(tmp_path / "swap.pt")), model):
        alone._model._where = None
        with pytest.raises(
            RuntimeError,
            match=r"traced for 2 ranks, there are 1 devices, and program 'swap' cannot run on one device \(a collective cannot run as a batched one: "
            r"NotImplementedError: Batching rule for 'ragged_dot' not implemented\)\. Set JAX_NUM_CPU_DEVICES=2",
        ):
            _ = alone._model.where


def test_the_form_for_one_device_is_made_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not for a model that is traced and run; also after the world that it was traced in has gone, and others have been there."""
    from torch_bridge.aot import exporting

    made = []
    original = exporting._on_one_device
    monkeypatch.setattr(exporting, "_on_one_device", lambda *args: made.append(args) or original(*args))
    own = nets.built.__wrapped__(2)
    model = own.model(workdir=tmp_path)
    ids = nets.tokens(nets.PROMPT)
    logits = model(ids, torch.arange(nets.PROMPT))["logits"]
    assert not made
    with NxDParallelState(world_size=4, tensor_model_parallel_size=2):
        alone = own.model("one", workdir=tmp_path)
        torch.testing.assert_close(alone(ids, torch.arange(nets.PROMPT))["logits"], logits)
    assert len(made) == 2
    model.save(str(tmp_path / "a.pt"))
    model.save(str(tmp_path / "b.pt"))
    assert len(made) == 2  # of its two programs, once

"""`torch_neuronx`: what is accepted, what says that it is not there, and the profiler."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time

import pytest
import torch
import torch_neuronx
from torch import nn


def test_names_for_inference_can_be_imported() -> None:
    from torch_neuronx import PartitionerConfig, experimental, nki_jit, xla_impl

    assert PartitionerConfig(trace_kwargs={}, ops_to_run={}).trace_kwargs == {}
    model = nn.Linear(1, 1)
    for call, text in [
        (lambda: nki_jit(model), "neuronx_distributed.kernels; write other kernels in JAX"),
        (lambda: xla_impl.ops.nki_jit()(model), "nki_jit compiles NKI kernels"),
        (lambda: xla_impl.base.xla_call(model), "write the operator in JAX"),
    ]:
        with pytest.raises(NotImplementedError, match=text):
            call()
    assert experimental.profiler.profile(traced_only=True).auto_start
    assert all(hasattr(torch_neuronx, name) for name in torch_neuronx.__all__) and not hasattr(torch_neuronx, "nothing")


def test_placing_models_is_accepted() -> None:
    from torch_neuronx import experimental

    with experimental.neuron_cores_context(start_nc=4, nc_count=2), experimental.multicore_context():
        model = torch_neuronx.trace(lambda x: x + 1, torch.ones(2))
    experimental.set_neuron_cores(model, 0, 1)
    experimental.set_multicore(model)
    assert model(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="nc_count must be a number of a core or of cores, or -1 for all, got 0"):
        experimental.set_neuron_cores(model, 0, 0)


def test_hints_without_effect() -> None:
    from torch_neuronx.xla_impl.hint import TransferWithStaticRing

    torch_neuronx.xla_impl.ops.set_unload_prior_neuron_models_mode(True)
    weight = torch.ones(2, device="xla", requires_grad=True)
    (TransferWithStaticRing.apply(weight) * 3).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 3.0]


def test_submodules_of_utils_need_no_import() -> None:
    """Scripts say `torch.utils.checkpoint.checkpoint = torch_xla.utils.checkpoint.checkpoint`, and import none of it."""
    code = (
        "import torch_neuronx, torch_xla\n"
        "u = torch_xla.utils\n"
        "print(u.checkpoint.checkpoint.__module__, callable(u.serialization.save), u.utils.TmpFolder.__name__, u.closures.__name__)\n"
        "print(hasattr(u, 'nothing'), 'checkpoint' in dir(u))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    checkpoint, *rest = done.stdout.split()
    assert checkpoint.endswith("torch_xla.utils.checkpoint")
    assert rest == ["True", "TmpFolder", "torch_bridge.torch_xla.utils.closures", "False", "True"]


# -- the profiler -------------------------------------------------------------------------------------


def traces(folder: pathlib.Path) -> list[pathlib.Path]:
    return list(folder.glob("plugins/profile/*/*.xplane.pb"))


def test_profiler(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    from torch_neuronx.experimental.profiler import profile

    x = torch.ones(4, 4, device="xla")
    with profile(
        port=9012, profile_type="operator", ms_duration=60000, neuron_tensorboard_plugin_dir=str(tmp_path / "plugins/neuron")
    ) as p:
        (x @ x).sum().item()
        assert not caplog.messages
        p.start()
    assert "recorded already" in caplog.text and len(traces(tmp_path)) == 1


def test_profiler_starts_and_ends_when_told(tmp_path: pathlib.Path) -> None:
    from torch_neuronx.experimental.profiler import profile

    with profile(auto_start=False, output_dir=str(tmp_path / "never"), target="neuron_profile_perfetto"):
        torch.ones(1, device="xla").item()
    assert not (tmp_path / "never").exists()
    with pytest.raises(KeyError), profile(auto_start=False, output_dir=str(tmp_path), ms_duration=1) as p:
        p.start()
        until = time.monotonic() + 60
        while not traces(tmp_path) and time.monotonic() < until:  # the time is up before the block ends
            time.sleep(0.01)
        assert traces(tmp_path)
        raise KeyError
    assert len(traces(tmp_path)) == 1


def test_libneuronxla_keeps_the_callback_for_snapshots() -> None:
    import libneuronxla

    assert libneuronxla is sys.modules["torch_bridge.libneuronxla"]

    def mine(name: str, addressable_device_index: int, execution_count: int) -> str:
        return "outputs"

    with pytest.warns(
        UserWarning, match=r"snapshots of a program's inputs and outputs are not written here.*--xla_dump_to=<folder> writes the programs"
    ):
        first = libneuronxla.register_hlo_snapshot_callback(mine)
    assert first("graph", 0, 3) == "inputs"
    with pytest.warns(UserWarning, match="the callback is never called"):
        assert libneuronxla.register_hlo_snapshot_callback(first) is mine
    with pytest.raises(TypeError, match=r"takes a function of \(name, addressable_device_index, execution_count\), got 'inputs'"):
        libneuronxla.register_hlo_snapshot_callback("inputs")
    libneuronxla.configure_environment()
    libneuronxla.hook()
    with pytest.raises(ModuleNotFoundError, match="No module named 'libneuronxla.libncc'"):
        import libneuronxla.libncc

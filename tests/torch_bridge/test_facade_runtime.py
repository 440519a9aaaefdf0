"""`torch_xla.runtime`, `_XLAC`, and the rest of the names that scripts import."""

from __future__ import annotations

import copy
import importlib
import math
import os
import pathlib
import socket
from typing import Any

import pytest
import torch
import torch_neuronx
import torch_neuronx.utils
import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.runtime as xr
import torch_xla.test.test_utils as progress
import torch_xla.utils.utils as xu
from torch import nn

NAMES = {
    "world_size": 1,
    "global_ordinal": 0,
    "local_ordinal": 0,
    "process_index": 0,
    "process_count": 1,
    "local_process_count": 1,
    "global_device_count": 1,
    "local_device_count": 1,
    "addressable_device_count": 1,
    "global_runtime_device_count": 1,
    "addressable_runtime_device_count": 1,
    "host_index": 0,
    "is_spmd": False,
    "is_bf16_supported": True,
    "using_pjrt": True,
    "device_type": "NEURON",
}


@pytest.mark.parametrize(("name", "value"), NAMES.items())
def test_queries(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert getattr(xr, name)() == value


def test_device_type_follows_pjrt_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert xr.device_type() == "CPU" and torch_xla.real_devices() == ["CPU:0"]
    monkeypatch.setenv("PJRT_DEVICE", "x")
    xr.set_device_type("TPU")
    assert os.environ["PJRT_DEVICE"] == "TPU"


def test_devices() -> None:
    assert xr.xla_device() == torch.device("xla:0")
    assert xr.runtime_device_attributes()["platform"] == "cpu"
    assert xr.global_runtime_device_attributes()[0]["name"].endswith(":0")
    assert xr.memory_info()["bytes_limit"] > 0
    with pytest.raises(ValueError, match="number 0; got 1"):
        xr.xla_device(1)
    with pytest.raises(ValueError, match="devkind='TPU'"):
        xr.xla_device(devkind="TPU")


def test_initialize_cache(tmp_path: pathlib.Path) -> None:
    import jax

    old = {
        n: getattr(jax.config, n)
        for n in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    }
    try:
        xr.initialize_cache(str(tmp_path), readonly=True)
        (torch.ones(5077, device="xla") * 2).cpu()
        assert not list(tmp_path.iterdir())
        xr.initialize_cache(str(tmp_path))
        (torch.ones(5078, device="xla") * 2).cpu()
        assert list(tmp_path.iterdir()) and xr.get_num_cached_compilation_graph()
        other = tmp_path / "mine.txt"
        other.touch()
        xr.clear_computation_cache()
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == [other] and xr.get_num_cached_compilation_graph() == 0
        assert (torch.ones(5078, device="xla") * 2)[0].item() == 2
        assert len([p for p in tmp_path.rglob("*") if p.is_file()]) > 1
        xr.initialize_cache(str(tmp_path), readonly=True)
        xr.clear_computation_cache()
        assert len([p for p in tmp_path.rglob("*") if p.is_file()]) > 1
        for n in (5077, 5078):
            (torch.ones(n, device="xla") * 2).cpu()
    finally:
        from jax.experimental.compilation_cache import compilation_cache

        for name, value in old.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert xr.get_num_cached_compilation_graph() >= 2


def test_version_parses() -> None:
    major, minor = (int(part) for part in torch_xla.__version__.split(".")[:2])
    assert (major, minor) >= (2, 2)
    assert [int(part) for part in torch_neuronx.__version__.split(".")[:2]]


def test_tensor_ids_tell_shared_storage() -> None:
    from transformers.pytorch_utils import id_tensor_storage

    model = nn.Linear(2, 2).to("xla")
    state = model.state_dict()
    ids = torch_xla._XLAC._xla_get_tensor_id
    assert ids(state["weight"]) == ids(model.weight) == ids(model.weight[0]) != ids(state["bias"])
    assert id_tensor_storage(model.weight) == id_tensor_storage(model.weight.detach())
    with pytest.raises(RuntimeError, match="not an XLA tensor: cpu"):
        ids(torch.ones(1))


def test_pending_graph_as_text() -> None:
    x = torch.full((2, 3), 2.0, device="xla")
    torch_xla.sync()
    y = (x @ x.T).relu()
    text = torch_xla._XLAC._get_xla_tensors_text([y])
    assert "aten.mm" in text and "aten.relu" in text and "test_facade_runtime.py" in text
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([y])
    assert hlo.startswith("HloModule") and "dot(" in hlo and "f32[2,2]" in hlo
    assert torch_xla._XLAC._get_graph_hash([y]) == torch_xla._XLAC._get_graph_hash([y])
    assert y._storage.pending
    torch_xla._XLAC._xla_sync_multi([y], devices=[], wait=True, sync_xla_data=False)
    assert not y._storage.pending


MODULES = [
    "torch_neuronx",
    "torch_neuronx.distributed.fsdp_mics",
    "torch_neuronx.experimental.placement",
    "torch_neuronx.experimental.profiler",
    "torch_neuronx.testing",
    "torch_neuronx.testing.validation",
    "torch_neuronx.utils.utils",
    "torch_neuronx.xla_impl.base",
    "torch_neuronx.xla_impl.custom_op",
    "torch_neuronx.xla_impl.hint",
    "torch_neuronx.xla_impl.ops",
    "torch_xla._XLAC",
    "torch_xla.amp.syncfree",
    "torch_xla.core.functions",
    "torch_xla.core.xla_builder",
    "torch_xla.core.xla_op_registry",
    "torch_xla.debug.profiler",
    "torch_xla.distributed.data_parallel",
    "torch_xla.distributed.fsdp.consolidate_sharded_ckpts",
    "torch_xla.distributed.fsdp.state_dict_utils",
    "torch_xla.distributed.fsdp.wrap",
    "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel",
    "torch_xla.distributed.spmd.api",
    "torch_xla.distributed.spmd.xla_sharded_tensor",
    "torch_xla.distributed.spmd.xla_sharding",
    "torch_xla.distributed.zero_redundancy_optimizer",
    "torch_xla.experimental.distributed_checkpoint",
    "torch_xla.experimental.pjrt",
    "torch_xla.experimental.pjrt_backend",
    "torch_xla.experimental.spmd_fully_sharded_data_parallel",
    "torch_xla.experimental.xla_sharded_tensor",
    "torch_xla.experimental.xla_sharding",
    "torch_xla.utils.closures",
]


@pytest.mark.parametrize("name", MODULES)
def test_importable(name: str) -> None:
    assert importlib.import_module(name).__doc__


def test_what_is_not_here_says_so() -> None:
    from torch_neuronx.xla_impl import custom_op
    from torch_xla.core import xla_builder, xla_op_registry
    from torch_xla.distributed.data_parallel import DataParallel
    from torch_xla.distributed.spmd import get_global_mesh

    model = nn.Linear(1, 1)
    for call, text in [
        (lambda: DataParallel(model), "MpDeviceLoader"),
        (lambda: xla_builder.create_computation("x", None, []), "Write the computation in JAX"),
        (lambda: xla_op_registry.register("x", None), "in JAX instead"),
        (lambda: custom_op.load(name="x", compute_srcs=[]), "write the operator in JAX"),
    ]:
        with pytest.raises(NotImplementedError, match=text):
            call()
    assert get_global_mesh() is None


def test_zero_redundancy_optimizer_alone() -> None:
    """In a world of one rank: the optimizer on a copy of the weights in float32."""
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    with pytest.raises(RuntimeError, match="all parameters must be on one xla device; they are on cpu"):
        ZeroRedundancyOptimizer(nn.Linear(1, 1).parameters(), torch.optim.AdamW, lr=1e-3)
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device="xla"))
    optimizer = ZeroRedundancyOptimizer([p], torch.optim.SGD, grad_clipping=False, lr=2.0**-10)
    for _ in range(4):  # each too small for bfloat16
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.tolist() == [1 - 2.0**-8] * 3


def test_zero_redundancy_optimizer_with_a_clipping_of_the_script_s_own() -> None:
    """As the Stable Diffusion sample replaces it: by `_calc_grad_norm`, `device` and the inner optimizer's parameters."""
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    norms: list[torch.Tensor] = []

    class Own(ZeroRedundancyOptimizer):
        @torch.no_grad()
        def _clip_grad_norm(self, max_norm: Any, norm_type: Any = 2.0) -> None:
            norms.append(self._calc_grad_norm(norm_type))
            factor = torch.tensor(max_norm, device=self.device) / (norms[-1] + 1e-6)
            for group in self.base_optimizer.param_groups:
                for p in group["params"]:
                    p.grad.detach().mul_(factor.clamp(max=1.0))

    def trained(cls: Any) -> Any:
        p = nn.Parameter(torch.ones(2, device="xla"))
        optimizer = cls([p], torch.optim.SGD, lr=1.0, max_norm=0.5)
        p.grad = torch.tensor([3.0, 4.0], device="xla")
        optimizer.step()
        return optimizer, p.tolist()

    (own, a), (ours, b) = trained(Own), trained(ZeroRedundancyOptimizer)
    assert a == pytest.approx(b) and a == pytest.approx([0.7, 0.6])
    assert norms[0].shape == () and norms[0].item() == 5.0 and own.grad_norm is None and ours.grad_norm.tolist() == [5.0]
    assert own._calc_grad_norm().tolist() == 0.0  # gradients are gone after a step
    plain = ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(3, device="xla"))], torch.optim.SGD, lr=0.1)
    plain.step()  # without any, clipping has nothing to do
    assert plain.grad_norm is not None and plain.grad_norm.tolist() == [0.0]
    own.shard_of[own._all()[0]].grad = torch.tensor([3.0, -4.0], device="xla")
    assert own._calc_grad_norm(math.inf).item() == 4.0 and own._calc_grad_norm(1).item() == 7.0


def test_fsdp_checkpoint_module() -> None:
    from torch_xla.distributed.fsdp import checkpoint_module

    layer = checkpoint_module(nn.Linear(2, 2).to("xla"))
    layer(torch.ones(1, 2, device="xla", requires_grad=True)).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert layer._xla_checkpointed_forward_original.__func__ is nn.Linear.forward


@pytest.mark.parametrize("how", ["by position", "by keyword", "without gradients"])
def test_fsdp_checkpoint_module_gives_parameters_their_gradients(how: str) -> None:
    """However inputs are passed; a call without inputs that require gradients is not checkpointed."""
    from torch_xla.distributed.fsdp import checkpoint_module

    calls: list[int] = []

    class Layer(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(input).tanh()

    torch.manual_seed(0)
    plain, head = Layer(3, 3).to("xla"), nn.Linear(3, 1).to("xla")
    layer = checkpoint_module(copy.deepcopy(plain))
    found = []
    for module in (plain, layer):
        x = torch.ones(2, 3, device="xla", requires_grad=how != "without gradients")
        calls.clear()
        out = module(x) if how == "by position" else module(input=x)
        (head(out).sum() + out.square().sum()).backward()
        found.append([t.tolist() for t in (out, module.weight.grad, module.bias.grad) + ((x.grad,) if x.requires_grad else ())])
    assert found[0] == found[1]
    assert len(calls) == (1 if how == "without gradients" else 2)


def test_env_vars() -> None:
    assert xenv.PJRT_DEVICE == "PJRT_DEVICE" and xenv.TPU_NUM_DEVICES and xenv.HOST_WORLD_SIZE and xenv.NEURONCORE_NUM_DEVICES


def test_utils(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SOME_NUMBER", "12")
    monkeypatch.setenv("SOME_FLAG", "true")
    assert xu.getenv_as("SOME_NUMBER", int) == 12 and xu.getenv_as("MISSING", int, 3) == 3 and xu.getenv_as("SOME_FLAG", bool) is True
    assert xu.check_env_flag("SOME_FLAG") and not xu.check_env_flag("MISSING")
    ports = xu.get_free_tcp_ports(2)
    assert len(set(ports)) == 2
    with socket.socket() as s:
        s.bind(("", ports[0]))
    generator = xu.SampleGenerator((torch.ones(1), 2), sample_count=3)
    assert len(generator) == 3 and len(list(generator)) == 3 and len(list(generator)) == 3
    xu.eprint("to stderr")
    assert capsys.readouterr().err == "to stderr\n"
    assert xu.timed(lambda: 5, "took ", xu.null_print) == 5
    assert xu.for_each_instance_rewrite([1, {"a": 2}], lambda x: isinstance(x, int), lambda x: x * 10) == [10, {"a": 20}]
    seen: list[int] = []
    xu.for_each_instance({"a": (1, [2])}, lambda x: isinstance(x, int), seen.append)
    assert seen == [1, 2]
    assert sorted(xu.parallel_work(2, lambda a, b: a + b, [1, 2], [10, 20])) == [11, 22]
    assert xu.shape([[1, 2], [3, 4]]) == (2, 2) and xu.flatten_nested_tuple((1, (2, (3,)))) == (1, 2, 3)
    lazy = xu.LazyProperty(lambda: object())
    assert lazy.value is lazy.value


def test_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress.print_training_update(torch.device("xla:0"), 3, torch.tensor(0.5, device="xla"), 10.0, 9.5, epoch=1)
    line = capsys.readouterr().out
    assert line.startswith("| Training Device=NEURON:0 Epoch=1 Step=3 Loss=0.50000 Rate=10.00 GlobalRate=9.50 Time=")
    progress.print_test_update("xla:0", 97.5, epoch=2)
    assert "Epoch=2 Accuracy=97.50 Time=" in capsys.readouterr().out
    assert progress.get_summary_writer(None) is None
    progress.write_to_summary(None, 1, {"loss": 1.0})
    progress.close_summary_writer(None)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_platform_target(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    from torch_neuronx.utils import SUPPORTED_TYPES, get_platform_target

    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    assert get_platform_target() == "trn1" and "trn2" in SUPPORTED_TYPES
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    assert torch_neuronx.utils.utils.get_platform_target() == target
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "h100")
    with pytest.raises(ValueError, match=r"'h100' is not a platform target.*trn1"):
        get_platform_target()


def test_neuron_testing() -> None:
    from torch_neuronx.testing import assert_close, neuron_allclose

    x = torch.tensor([1.0, 2.0], device="xla")
    assert_close(x, torch.tensor([1.0, 2.0]))
    with pytest.raises(AssertionError, match="not close"):
        assert_close(x, torch.tensor([1.0, 3.0]))
    assert neuron_allclose(x, torch.tensor([1.0, 2.0])).allclose
    result = neuron_allclose(x, torch.tensor([1.0, 2.5]))
    assert not result and result.max_difference == 0.5 and result.mismatched == 1
    assert neuron_allclose(x, torch.tensor([1.0, 2.5]), atol=1.0, rtol=0.0)
    with pytest.raises(ValueError, match="one shape"):
        neuron_allclose(x, torch.ones(3))


def test_precision_of_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    monkeypatch.setattr(torch_xla._XLAC, "_mat_mul_precision", "default")
    before = jax.config.jax_default_matmul_precision
    assert torch_xla.backends.get_mat_mul_precision() == "default"
    try:
        torch_xla.backends.set_mat_mul_precision("highest")
        assert torch_xla.backends.get_mat_mul_precision() == "highest"
        with pytest.raises(ValueError, match="'float8'. Must be one of default, high, highest"):
            torch_xla.backends.set_mat_mul_precision("float8")
    finally:
        jax.config.update("jax_default_matmul_precision", before)

"""From devices, num_nodes, variables, sizes and configurations to ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch
from neuronx_distributed.lightning import NeuronLTModule, NeuronXLAAccelerator, NeuronXLAStrategy
from neuronx_distributed.parallel_layers import parallel_state
from pytorch_lightning import Trainer
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.strategies import SingleDeviceStrategy, StrategyRegistry
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from tests.nxd_jax.lightning import jobs
from torch_bridge.mesh import world

pytestmark = jobs.MARKS


def lay_out(folder: Path, model: Any = None, **options: Any) -> Trainer:
    """A Trainer that has set everything up and trained nothing."""
    made = jobs.trainer(folder, limit_train_batches=0, **options)
    made.fit(jobs.module() if model is None else model, jobs.loader())
    return made


def sizes(strategy: Any) -> tuple[int, ...]:
    """Of tensor, pipeline, context and expert parallelism."""
    return tuple(getattr(strategy, f"{name}_parallel_size") for name in ("tensor", "pipeline", "context", "expert"))


# -- devices and num_nodes ---------------------------------------------------------------------------


def test_devices_are_ranks(tmp_path: Path) -> None:
    made = lay_out(tmp_path, jobs.module(tp=2), tp=2, devices=4)
    assert world.current().axes == {"pp": 1, "dp": 2, "cp": 1, "tp": 2}
    assert (made.world_size, made.num_devices, made.num_nodes, made.node_rank) == (4, 4, 1, 0)
    assert made.is_global_zero and made.device_ids == [0, 1, 2, 3]
    assert made.global_rank.node.values == made.local_rank.node.values == (0, 1, 2, 3)
    strategy: Any = made.strategy
    assert strategy.data_parallel_size == 2 and strategy.data_parallel_rank.node.values == (0, 0, 1, 1)
    assert strategy.tensor_parallel_rank.node.values == (0, 1, 0, 1) and strategy.pipeline_parallel_rank == 0
    assert sizes(strategy) == (2, 1, 1, 1)
    assert strategy.root_device == torch.device("xla", 0)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": strategy.data_parallel_rank}


def test_machines(tmp_path: Path) -> None:
    made = lay_out(tmp_path, jobs.module(tp=2), tp=2, devices=2, num_nodes=2)
    assert (made.world_size, made.num_devices, made.num_nodes) == (4, 2, 2)
    assert world.local_size() == 2 and made.local_rank.node.values == (0, 1, 0, 1)


def test_sizes_that_were_asked_for() -> None:
    """A script may look at them before there is a Trainer."""
    assert sizes(NeuronXLAStrategy()) == (1, 1, 1, 1)
    assert sizes(NeuronXLAStrategy(tensor_parallel_size=8, expert_parallel_size=2)) == (8, 1, 1, 2)
    config = nxd.neuronx_distributed_config(tensor_parallel_size=2, context_parallel_size=2, pipeline_parallel_size=4, pipeline_config={})
    assert sizes(NeuronXLAStrategy(nxd_config=config)) == (2, 4, 2, 1)


def test_sizes_of_the_modules_configuration(tmp_path: Path) -> None:
    made = lay_out(tmp_path, jobs.module(tp=2), strategy=NeuronXLAStrategy(), devices=4)
    assert sizes(made.strategy) == (2, 1, 1, 1)


@pytest.mark.parametrize(("devices", "count"), [("auto", 2), (4, 4), ("4", 4), ("8,", 8), ([0], 1), ((3,), 1)])
def test_what_devices_may_be(tmp_path: Path, devices: Any, count: int) -> None:
    tp = min(count, 2)
    lay_out(tmp_path, jobs.module(tp=tp), tp=tp, devices=devices)
    assert world.size() == count


@pytest.mark.parametrize("devices", ["many", True, [0, 1], -1, 2.0, [True], []])
def test_what_devices_may_not_be(devices: Any) -> None:
    with pytest.raises(MisconfigurationException) as raised:
        NeuronXLAAccelerator.parse_devices(devices)
    assert f"Trainer(devices={devices!r}): NeuronXLAStrategy takes a number of cores per machine (devices=32)" in str(raised.value)
    assert "one core by its index (devices=[3]) or 'auto'" in str(raised.value)


@pytest.mark.parametrize("name", ["NEURONCORE_NUM_DEVICES", "TPU_NUM_DEVICES"])
def test_variables_say_what_auto_is(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "4")
    lay_out(tmp_path, jobs.module(tp=2), tp=2)
    assert world.size() == 4


@pytest.mark.parametrize("value", ["0", "-2", "all"])
def test_variables_without_meaning(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONCORE_NUM_DEVICES", value)
    with pytest.raises(ValueError, match=f"NEURONCORE_NUM_DEVICES='{value}' must be a positive number"):
        Trainer(strategy=NeuronXLAStrategy())


def test_a_launcher_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the variables say; `devices` may repeat it."""
    monkeypatch.setenv("NEURONCORE_NUM_DEVICES", "8")
    world.configure(world.World(4))
    for devices in ("auto", 4):
        lay_out(tmp_path, jobs.module(tp=2), tp=2, devices=devices)
        assert world.size() == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": 2}, "Trainer(devices=2, num_nodes=1), but the job has 4 rank(s), as torchrun, nxd-run or NEURON_RT_NUM_CORES said"),
        ({"devices": 4, "num_nodes": 2}, "Trainer(devices=4, num_nodes=2), but the job has 4 rank(s)"),
        ({"num_nodes": 2}, "Trainer(num_nodes=2), but the job has 1 machine(s)"),
    ],
)
def test_other_ranks_than_were_started(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    world.configure(world.World(4))
    with pytest.raises(MisconfigurationException) as raised:
        lay_out(tmp_path, **options)
    assert said in str(raised.value) and "leave devices='auto', or start that many" in str(raised.value) and world.KNOB in str(raised.value)
    assert world.size() == 4


def test_ranks_that_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException) as raised:
        lay_out(tmp_path, jobs.module(tp=2), tp=2, devices=3)
    assert "Trainer(devices=3, num_nodes=1) are 3 ranks, which the parallel sizes do not divide: they take multiples of 2" in str(
        raised.value
    )


# -- sizes and configurations ------------------------------------------------------------------------


def test_sizes_in_place_of_a_configuration(tmp_path: Path) -> None:
    lay_out(tmp_path, jobs.module(tp=4), strategy=NeuronXLAStrategy(tensor_parallel_size=4), devices=8)
    assert parallel_state.get_tensor_model_parallel_size() == 4 and parallel_state.get_data_parallel_size() == 2


def test_the_modules_configuration(tmp_path: Path) -> None:
    lay_out(tmp_path, jobs.module(tp=2), strategy=NeuronXLAStrategy(), devices=4)
    assert parallel_state.get_tensor_model_parallel_size() == 2


def test_without_any_configuration(tmp_path: Path) -> None:
    class Own(jobs.Module):
        def setup(self, stage: str | None = None, include_buffers: bool = False) -> None:
            self.model = torch.nn.Linear(2, 2)

        def configure_optimizers(self) -> Any:
            return super().configure_optimizers() if self.opt_cls is not None else torch.optim.SGD(self.parameters(), lr=0.1)

    lay_out(tmp_path, Own(), strategy=NeuronXLAStrategy(), devices=2)
    assert parallel_state.get_data_parallel_size() == 2
    with pytest.raises(TypeError, match="Own has no nxd_config: pass it to NeuronLTModule.__init__ or override configure_optimizers"):
        lay_out(tmp_path, Own(opt_cls=torch.optim.SGD), strategy=NeuronXLAStrategy(), devices=2)


def test_different_configurations(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException) as raised:
        lay_out(tmp_path, jobs.module(tp=4), tp=2, devices=4)
    assert "different configurations: tensor_parallel_size=2 for the strategy and 4 for the module. Give both the same nxd_config" in str(
        raised.value
    )


def test_a_configuration_and_other_sizes() -> None:
    with pytest.raises(MisconfigurationException, match="tensor_parallel_size=4, but its nxd_config says 2: leave the sizes out"):
        NeuronXLAStrategy(jobs.config(tp=2), tensor_parallel_size=4)
    NeuronXLAStrategy(jobs.config(tp=2), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"tensor_paralel_size": 2},
            TypeError,
            "NeuronXLAStrategy has no argument tensor_paralel_size; it has nxd_config, tensor_parallel_size",
        ),
        ({"nxd_config": {"tensor_parallel_size": 2}}, TypeError, "nxd_config must be what neuronx_distributed_config(...) returns"),
        ({"nxd_config": 2}, TypeError, "nxd_config must be what neuronx_distributed_config(...) returns, got int"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size"),
    ],
)
def test_arguments_without_meaning(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        NeuronXLAStrategy(**options)
    assert said in str(raised.value)


def test_what_lightning_refuses() -> None:
    with pytest.raises(MisconfigurationException, match="accelerator set through both strategy class and accelerator flag"):
        Trainer(strategy=NeuronXLAStrategy(), accelerator="cpu")
    with pytest.raises(ValueError, match="must be one of: .*bf16-true"):
        Trainer(strategy=NeuronXLAStrategy(), precision="bf16-mixed")
    with pytest.raises(MisconfigurationException, match=r"devices=0\)` value is not a valid input using NeuronXLAAccelerator"):
        Trainer(strategy=NeuronXLAStrategy(), devices=0)


def test_by_its_name() -> None:
    NeuronXLAStrategy.register_strategies(StrategyRegistry)
    made = Trainer(strategy="neuron_xla", accelerator=NeuronXLAAccelerator(), devices=4, logger=False)
    assert type(made.strategy) is NeuronXLAStrategy and made.num_devices == 4
    StrategyRegistry.remove("neuron_xla")


# -- several Trainers --------------------------------------------------------------------------------


def test_trainers_after_each_other(tmp_path: Path) -> None:
    """Each its own layout; a plain `Trainer()` is Lightning's own."""
    for tp, devices in ((2, 4), (4, 4), (1, 2), (2, "auto")):
        lay_out(tmp_path, jobs.module(tp=tp), tp=tp, devices=devices)
        assert parallel_state.get_tensor_model_parallel_size() == tp
        assert world.size() == (devices if isinstance(devices, int) else 2)
        other = Trainer(default_root_dir=tmp_path, logger=False)
        assert type(other.strategy) is SingleDeviceStrategy and type(other.accelerator) is CPUAccelerator
        assert other.world_size == 1 and other.is_global_zero


def test_a_module_belongs_to_its_layout(tmp_path: Path) -> None:
    model = jobs.module(tp=2)
    lay_out(tmp_path, model, tp=2, devices=4)
    first = model.model
    lay_out(tmp_path, model, tp=2, devices=4)
    assert model.model is first
    with pytest.raises(RuntimeError) as raised:
        lay_out(tmp_path, model, tp=2, devices=8)
    assert "this Module's model was made for ranks laid out as {'pp': 1, 'dp': 2, 'cp': 1, 'tp': 2}" in str(raised.value)
    assert "make a new Module, and pass ckpt_path= to take over what was trained" in str(raised.value)


@pytest.mark.parametrize("missing", ["nxd_config", "model_fn"])
def test_a_module_without(tmp_path: Path, missing: str) -> None:
    with pytest.raises(TypeError, match=rf"Module has no {missing}: pass {missing}= to NeuronLTModule.__init__ or override setup\(stage\)"):
        lay_out(tmp_path, jobs.module(**{missing: None}), devices=2)


def test_a_module_without_an_optimizer(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Module has no opt_cls: pass it to NeuronLTModule.__init__ or override configure_optimizers"):
        lay_out(tmp_path, jobs.module(opt_cls=None), devices=2)


@pytest.mark.parametrize("steps", [0, -1, True, 1.5])
def test_accumulation_is_a_number(steps: Any) -> None:
    with pytest.raises(ValueError, match=f"grad_accum_steps must be a positive number, got {steps!r}"):
        NeuronLTModule(grad_accum_steps=steps)


def test_what_runs_where_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        lay_out(tmp_path, jobs.module(tp=2), tp=2, devices=4)
    assert "NeuronCores: 4 ranks in one process, tp 2 x dp 2" in caplog.text


def test_context_parallel_ranks_read_the_same(tmp_path: Path) -> None:
    config = nxd.neuronx_distributed_config(tensor_parallel_size=2, context_parallel_size=2)
    made = lay_out(tmp_path, jobs.module(tp=2, nxd_config=config), strategy=NeuronXLAStrategy(config), devices=8)
    assert made.distributed_sampler_kwargs is not None and made.distributed_sampler_kwargs["num_replicas"] == 2
    assert world.current().axes == {"pp": 1, "dp": 2, "cp": 2, "tp": 2}

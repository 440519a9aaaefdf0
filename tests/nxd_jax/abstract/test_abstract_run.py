"""Abstract runs say what real ones need, take worlds larger than the machine, refuse to make up values, and leave nothing behind."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla
from neuronx_distributed import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config
from torch import nn

import nxd_jax
from nxd_jax.abstract import AbstractReport, AbstractValueError, abstract_run
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_jax.trainer.footprint import footprint
from tests.nxd_jax.conftest import Nxd
from tests.torch_bridge.devices import python
from torch_bridge import hlo, metrics
from torch_bridge.errors import DeadTensorError
from torch_bridge.mesh import world
from torch_bridge.mesh.abstract_arrays import AbstractArray
from torch_bridge.recorder import sharded
from torch_bridge.runtime import session


class Model(nn.Module):
    """An embedding, two parallel layers, a norm, a plain layer and a buffer: [batch, seq] to a number."""

    def __init__(self, hidden: int = 16, made: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        made()
        self.embed = ParallelEmbedding(32, hidden)
        self.up = ColumnParallelLinear(hidden, 4 * hidden, gather_output=False)
        self.down = RowParallelLinear(4 * hidden, hidden, input_is_parallel=True)
        self.norm = nn.LayerNorm(hidden)
        self.plain = nn.Linear(hidden, 1)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.down(torch.relu(self.up(x))))
        return (self.plain(x) * self.scale).square().mean()


def config(tp: int) -> dict[str, Any]:
    return neuronx_distributed_config(tensor_parallel_size=tp, optimizer_config={"zero_one_enabled": True})


def train(tp: int, steps: int = 2, hidden: int = 16, look: Callable[[torch.Tensor], Any] = lambda loss: None) -> tuple[Any, Any, list[Any]]:
    """A training script: model, optimizer, and what `look` saw of each step's loss."""
    torch.manual_seed(1)
    nxd_config = config(tp)
    model = initialize_parallel_model(nxd_config, Model, hidden)
    optimizer = initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    seen = []
    for step in range(steps):
        ids = (torch.arange(8).reshape(2, 4) + step).to("xla")
        loss = model.run_train(ids)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        seen.append(look(loss))
    return model, optimizer, seen


def planned(compiled: Any) -> tuple[int, ...]:
    found = compiled.memory_analysis()
    return found.argument_size_in_bytes, found.output_size_in_bytes, found.alias_size_in_bytes, found.temp_size_in_bytes


def losses(tp: int) -> list[float]:
    return train(tp, look=lambda loss: loss.item())[2]


def test_report_is_what_a_real_run_needs_and_real_runs_go_on(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_FOLD", "12")  # else an abstract run leaves the graph as it is recorded, without what looks for loops
    nxd(8, tp=4)
    model, _, before = train(4, look=lambda loss: loss.item())
    program = max(session.current().recent, key=lambda p: len(p.graph.nodes))
    real = planned(program.compiled)
    storages = {id(t._storage): t._storage.array for t in [*model.parameters(), *model.buffers()]}  # type: ignore[union-attr]
    kept = sum(a.addressable_shards[0].data.nbytes for a in storages.values())
    expected = footprint(config(4), Model)

    with abstract_run() as run:  # the world as it is
        train(4)
        report = run.report()
    (found,) = report.programs
    assert (found.arguments, found.outputs, found.aliased, found.temporaries) == real
    assert found.runs == 2 and found.ops == len(program.graph.nodes)
    assert found.peak == real[0] + real[1] - real[2] + real[3] <= report.peak
    assert report.kinds["parameter"] + report.kinds["buffer"] == kept
    for kind in ("parameter", "buffer", "gradient", "master weight", "optimizer state"):
        assert report.kinds[kind] == expected.bytes_of(kind), kind
    assert report.cores == 8 and report.axes == {"pp": 1, "dp": 2, "cp": 1, "tp": 4}

    assert losses(4) == before


@pytest.fixture(scope="module")
def large() -> Iterator[tuple[AbstractReport, list[Any]]]:
    """A training script on 128 cores, twice as many as JAX has devices here, and what was seen on the way."""
    seen: list[Any] = []
    with nxd_jax.abstract_run(instance="trn1.32xlarge", nodes=4) as run:
        model, _, _ = train(32, hidden=64)
        weight = model.module.up.weight
        seen += [world.size(), weight._storage.array, tuple(weight.shape), sharded.varying(weight)]
        seen.append([kind for kind in (p.device.type for p in model.parameters()) if kind != "xla"])
        yield_report = run.report()
        seen.append(run)
    yield yield_report, [*seen, model, weight]


def test_a_world_larger_than_the_machine(large: tuple[AbstractReport, list[Any]]) -> None:
    report, (size, array, shape, varying, elsewhere, *_) = large
    assert size == report.cores == 128 and not elsewhere
    assert isinstance(array, AbstractArray)
    assert array.shape == (256, 64) and array.core_bytes == 8 * 64 * 4 and shape == (8, 64)
    assert varying.axes == ("tp",) and varying.global_shape == (256, 64)
    assert report.hbm_bytes == 16 * 2**30 and report.fits
    tensors = {(c.kind, c.axes) for c in report.programs[0].collectives}
    assert {("all-reduce", ("tp",)), ("reduce-scatter", ("dp",)), ("all-gather", ("dp",))} <= tensors
    gradients = next(c for c in report.programs[0].collectives if (c.kind, c.axes) == ("reduce-scatter", ("dp",)))
    assert gradients.ranks == 4
    assert gradients.bytes >= report.kinds["gradient"]  # rows are padded until they divide


def test_report_as_text(large: tuple[AbstractReport, list[Any]]) -> None:
    text = str(large[0])
    assert text.startswith("128 cores (dp 4 x tp 32), each a core of Trainium1 at LNC 1 with 16.00 GiB\n")
    parts = ["by shape, per core: parameter ", "master weight ", "XLA, per core: arguments ", " in place), temporaries "]
    for part in [*parts, "all-reduce along tp (groups of 32), "]:
        assert part in text
    assert "smaller programs (initialisation and the like) were not compiled" in text
    assert "of 16.00 GiB per core (0%): fits" in text


def test_tensors_of_the_run_are_lost_after_it(large: tuple[AbstractReport, list[Any]]) -> None:
    run, model, weight = large[1][-3:]
    assert world._world is None or world.size() != 128
    assert not dist.is_initialized()
    with pytest.raises(
        DeadTensorError, match=r"made in an abstract run that has ended: it had a shape and no value\. Make it again outside"
    ):
        weight.sum().item()
    with pytest.raises(DeadTensorError, match="abstract run"):
        model.module.scale.cpu()
    with pytest.raises(RuntimeError, match=r"report\(\) after the end of abstract_run: call it within the `with` block"):
        run.report()
    assert torch.ones(2, device="xla").sum().item() == 2


def test_values_are_refused_with_the_line_that_asks() -> None:
    with abstract_run() as run:
        x = torch.rand(300, 300, device="xla") @ torch.rand(300, 300).to("xla")
        with pytest.raises(AbstractValueError) as error:
            x.sum().item()
        for part in (
            r"float32[]",
            "test_abstract_run.py:",
            "in an abstract run tensors on xla have shapes and no values",
            "values='zeros'",
        ):
            assert part in str(error.value)
        for reads in (x.cpu, lambda: repr(x), x.tolist, lambda: bool((x > 0).any())):
            with pytest.raises(AbstractValueError, match=r"\(.*\) is asked for at .*test_abstract_run.py:\d+"):
                reads()
        assert run.report(programs=9).skipped == 0


def test_compiled_programs_stay_and_hlo_is_to_be_had() -> None:
    def product() -> torch.Tensor:
        return torch.full((3, 3), 2.0).to("xla") @ torch.ones(3, 3).to("xla")

    assert product().sum().item() == 54
    before = metrics.COUNTERS["UncachedCompile"]
    with abstract_run():
        lost = product()
        torch_xla.sync()
        other = lost.exp()
        torch_xla.sync()
        assert "stablehlo.exponential" in hlo()
    assert "stablehlo.exponential" not in hlo()
    compiled = metrics.COUNTERS["UncachedCompile"]
    assert product().sum().item() == 54
    assert metrics.COUNTERS["UncachedCompile"] == compiled > before
    del other


def test_zeros_if_asked_for() -> None:
    with abstract_run(values="zeros"):
        x = torch.rand(300, 300).to("xla")
        assert (x + 1).sum().item() == 0 and x.cpu().shape == (300, 300)
        assert "0." in repr(x)


def test_small_inputs_keep_their_values() -> None:
    with abstract_run():
        mask = torch.tensor([1, 1, 0]).to("xla")
        assert mask.tolist() == [1, 1, 0]
        assert not (mask == 1).all()  # worked out on the host, as in a real run


def test_models_are_made_without_memory() -> None:
    with abstract_run():
        model = nn.Linear(1 << 16, 1 << 16)  # 16 GiB
        assert model.weight.is_meta
        model = model.to("xla")
        assert model.weight.device.type == "xla" and model.weight.requires_grad
        on_xla = nn.Linear(4, 4, device="xla")
        assert model(torch.ones(2, 1 << 16, device="xla")).shape == (2, 1 << 16)
        assert on_xla(torch.ones(2, 4, device="xla")).shape == (2, 4)
    assert not nn.Linear(2, 2).weight.is_meta


def test_parameters_are_not_initialised(nxd: Nxd) -> None:
    """`param_init_fn` would make every weight on the CPU."""
    nxd(2, tp=2)

    def never(module: nn.Module, device: Any) -> None:
        raise AssertionError("called")

    options = {"meta_device_init": True, "param_init_fn": never}
    with abstract_run():
        nxd_config = neuronx_distributed_config(tensor_parallel_size=2, model_init_config=options)
        model = initialize_parallel_model(nxd_config, Model)
        assert sharded.varying(model.module.down.weight).axes == ("tp",)
        assert model.run_train(torch.zeros(2, 4, dtype=torch.int64, device="xla")).shape == ()


def test_a_failed_script_leaves_nothing_behind() -> None:
    before = world._world
    with pytest.raises(ZeroDivisionError), abstract_run(96):
        initialize_parallel_model(config(8), Model, 64, lambda: 1 // 0)
    assert world._world is before and not dist.is_initialized()
    assert (torch.ones(3, device="xla") * 2).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"values": "ones"}, ValueError, r"values='ones' must be one of 'error', 'zeros'"),
        ({"cores": 0}, ValueError, r"cores=0: an abstract run has at least 1 core"),
        ({"cores": 33, "instance": "trn1.32xlarge"}, ValueError, r"cores=33: 1 x trn1.32xlarge have 32 cores; give more nodes"),
    ],
)
def test_errors_of_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text), abstract_run(**arguments):
        raise AssertionError("entered")


def test_runs_do_not_nest() -> None:
    with abstract_run() as run:
        with pytest.raises(RuntimeError, match=r"an abstract run is active already: leave its `with` block"), abstract_run():
            raise AssertionError("entered")
        with pytest.raises(RuntimeError, match=r"report\(\) without a program: within the `with` block, run a training step"):
            run.report()


def test_cores_after_the_world_was_joined(nxd: Nxd) -> None:
    nxd(2)
    with (
        pytest.raises(RuntimeError, match=r"abstract_run with 128 cores of its own after torch.distributed was initialised"),
        abstract_run(128),
    ):
        raise AssertionError("entered")


def test_one_of_several_processes() -> None:
    world.configure(world.World(2, hosted=(0,)))
    try:
        with (
            pytest.raises(RuntimeError, match=r"abstract_run in one of 2 processes: start the script once, without torchrun"),
            abstract_run(),
        ):
            raise AssertionError("entered")
    finally:
        world.configure(None)


def test_worlds_after_a_run_that_came_first() -> None:
    """An abstract run of the world as it is, before JAX has started: what follows has devices of its own, in this layout and another."""
    code = """
    import jax, torch, nxd_jax
    from torch import nn
    from neuronx_distributed import initialize_parallel_model, neuronx_distributed_config
    from nxd_jax.parallel_layers import ColumnParallelLinear, parallel_state

    def train(tp):
        model = initialize_parallel_model(neuronx_distributed_config(tensor_parallel_size=tp), lambda: ColumnParallelLinear(4, 8))
        loss = model(torch.ones(2, 4).to("xla")).sum()
        loss.backward()
        torch.xla.synchronize()
        return loss, next(iter(model.parameters()))._storage.array.sharding.mesh.devices.flat[0]

    with nxd_jax.abstract_run() as run:
        train(2)
        run.report()
    for tp in (2, 4):
        loss, device = train(tp)
        assert device.client is jax.devices()[0].client and loss.item() == loss.item()
        parallel_state.destroy_model_parallel()
    print("trained")
    """
    assert python(textwrap.dedent(code), NEURON_RT_NUM_CORES="8").splitlines()[-1] == "trained"

"""`parallel_model_trace`, its folders, and buckets."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_neuronx
from torch import nn

import torch_bridge
from nxd_jax.parallel_layers import layers, parallel_state
from nxd_jax.parallel_layers.mappings import gather_from_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from nxd_jax.trace import parallel_model_load, parallel_model_save, parallel_model_trace
from nxd_jax.trace.functions import shard_checkpoint
from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.nxd_model import NxDModel
from nxd_jax.trace.parallel_context import NxDParallelState
from nxd_jax.trace.trace import ParallelModel, TensorParallelNeuronModel
from tests.nxd_jax.trace import nets

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
IDS = torch.tensor([[3, 1, 2]])


class Net(nn.Module):
    """An embedding cut along the vocabulary, two linears, and a sum that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = layers.ParallelEmbedding(8, 4)
        self.up = layers.ColumnParallelLinear(4, 8, gather_output=False)
        self.down = layers.RowParallelLinear(8, 4, input_is_parallel=True)
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, ids: torch.Tensor) -> Any:
        y = self.down(torch.relu(self.up(self.embed(ids))))
        return y, self.sum + y.sum((0, 1))


def make() -> tuple[nn.Module, Mapping[torch.Tensor, int]]:
    module = Net()
    return module, {module.sum: 1}


def full() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    shapes = {"embed.weight": (8, 4), "up.weight": (8, 4), "up.bias": (8,), "down.weight": (4, 8), "down.bias": (4,)}
    return {n: torch.randn(s, generator=g) for n, s in shapes.items()} | {"sum": torch.zeros(4)}


def reference(ids: torch.Tensor, w: Mapping[str, torch.Tensor]) -> torch.Tensor:
    x = torch.nn.functional.embedding(ids, w["embed.weight"])
    x = torch.relu(x @ w["up.weight"].T + w["up.bias"])
    return x @ w["down.weight"].T + w["down.bias"]


def traced(tp: int = 2, **kwargs: Any) -> TensorParallelNeuronModel:
    options = {"tp_degree": tp, "spmd_mode": True, "inline_weights_to_neff": False, "checkpoint_loader_callable": full}
    return parallel_model_trace(make, (IDS,), **{**options, **kwargs})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parallel") / "model"
    traced(serialization_path=path)
    return path


def test_weights_of_a_checkpoint(folder: Path) -> None:
    """The state that a result updates is kept and not returned."""
    assert sorted(p.name for p in folder.iterdir()) == ["tp_0.pt", "tp_1.pt"]
    model = parallel_model_load(folder)
    assert isinstance(model, ParallelModel) and model.tp_degree == 2 and len(model.models) == 1
    wanted = reference(IDS, full())
    for k in range(1, 3):
        (y,) = model(IDS)
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(model.model.programs.read("sum", 1), wanted.sum((0, 1)) * k)
    with pytest.raises(
        ValueError, match=r"the model was traced for inputs int64 \[1, 3\], got int64 \[1, 2\]: pad them, or trace the model"
    ):
        model(IDS[:, :2])
    with pytest.raises(ValueError, match=r"the model was traced for inputs int64 \[1, 3\], got float32 \[1, 3\]: cast them"):
        model(IDS.float())
    with pytest.raises(ValueError, match=r"the model was traced with inputs \(tensor\), got \(tensor, tensor\)"):
        model(IDS, IDS)
    with pytest.raises(ValueError, match=r"the model was traced with inputs \(tensor\), got \(\)"):
        model()
    torch_neuronx.async_load(model)
    torch_neuronx.move_trace_to_device(model, 0)


def test_weights_of_the_module(tmp_path: Path) -> None:
    """Those that `func` made, for a number of ranks that differs; a second save leaves no files of other ranks."""
    found: list[dict[str, torch.Tensor]] = []

    def linear() -> nn.Module:
        torch.manual_seed(3)
        module = layers.ColumnParallelLinear(3, 8, bias=False)
        found.append({"weight": module.weight})
        return module

    x = torch.ones(2, 3)
    results = []
    for tp in (4, 1):
        model = parallel_model_trace(linear, x, tp_degree=tp)
        results.append(model(x))
        parallel_model_save(model, tmp_path)
        torch.testing.assert_close(parallel_model_load(tmp_path)(x), results[-1])
        assert len(list(tmp_path.iterdir())) == tp
    torch.testing.assert_close(results[0], results[1])  # layers are initialised alike for every number of ranks
    assert type(torch.jit.load(tmp_path / "tp_0.pt")(x)) is torch.Tensor


class Attention(nn.Module):
    """As samples share models out: each rank its part of the weights and of a bias by head, which is computed on the CPU and no buffer."""

    def __init__(self, full: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
        heads = len(bias) // size
        self.up = layers.ColumnParallelLinear(3, 8, bias=False, gather_output=False)
        self.up.weight.data = full[8 // size * rank : 8 // size * (rank + 1)].clone()
        self.down = layers.RowParallelLinear(8, 3, bias=False, input_is_parallel=True)
        self.down.weight.data = full.t()[:, 8 // size * rank : 8 // size * (rank + 1)].clone()
        own = bias[heads * rank : heads * (rank + 1)].clone()
        self.bias = lambda: own
        self.scale = torch.tensor([2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x * self.scale)
        return self.down((x.unflatten(-1, (len(self.bias()), -1)) + self.bias()[:, None]).flatten(-2) * self.scale)


def test_tensors_of_each_rank_that_are_no_buffers(tmp_path: Path) -> None:
    full, bias, x = torch.randn(8, 3), torch.randn(4), torch.randn(2, 3)
    wanted = (x @ full.t() * 2 + bias.repeat_interleave(2)) * 2 @ full
    for tp in (2, 1):
        parallel_model_save(parallel_model_trace(lambda: Attention(full, bias), x, tp_degree=tp), tmp_path)
        torch.testing.assert_close(parallel_model_load(tmp_path)(x), wanted)


def own(data: torch.Tensor) -> torch.Tensor:
    """The rank's rows, as samples take them."""
    rank, rows = parallel_state.get_tensor_model_parallel_rank(), len(data) // parallel_state.get_tensor_model_parallel_size()
    return data[rows * rank : rows * (rank + 1)].clone()


class Table(nn.Module):
    """A plain layer that has each rank's part of a table, given to it in some way."""

    def __init__(self, give: Callable[[nn.Embedding, torch.Tensor], Any], table: torch.Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 3)
        give(self.embed, own(table))
        self.again = self.embed  # one module under two names

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return reduce_from_tensor_model_parallel_region(self.embed(ids) + self.again(ids))


def by_data(layer: nn.Embedding, part: torch.Tensor) -> None:
    layer.weight.data = part


def by_copy(layer: nn.Embedding, part: torch.Tensor) -> None:
    layer.weight.data[:] = part


@pytest.mark.parametrize("give", [by_data, by_copy, lambda layer, part: layer.load_state_dict({"weight": part})])
def test_parameters_that_are_given_each_ranks_values(give: Any, tmp_path: Path) -> None:
    table, ids = torch.randn(4, 3), torch.tensor([[0, 1, 1]])
    model = parallel_model_trace(lambda: Table(give, table), ids, tp_degree=2)
    parallel_model_save(model, tmp_path)
    for one in (model, parallel_model_load(tmp_path)):
        torch.testing.assert_close(one(ids), 2 * (table[:2][ids] + table[2:][ids]))
    with (
        NxDParallelState(world_size=2, tensor_model_parallel_size=2),
        pytest.raises(RuntimeError, match=r"traces for one rank, the world has 2, and each rank has weights of its own: use neuronx_distr"),
    ):
        torch_neuronx.trace(Table(by_data, table), ids)


class Shifted(nn.Module):
    """Each rank's shift by some bucket's factor, which is no parameter, and a buffer that no state dict holds."""

    def __init__(self, shift: torch.Tensor, factor: int = 1) -> None:
        super().__init__()
        self.up = layers.ColumnParallelLinear(3, 4, bias=False, gather_output=False)
        self.shift = [own(shift) * factor]
        self.register_buffer("more", own(shift) * factor, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gather_from_tensor_model_parallel_region(self.up(x) + self.shift[0] * self.more)


def by_rows(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    return tensors, torch.tensor(tensors[0].shape[0] - 1)


def test_each_ranks_own_in_buckets(tmp_path: Path) -> None:
    """Other values in each bucket, and weights from a checkpoint that does not have them."""
    shift, weight, x = torch.randn(4), torch.randn(4, 3), torch.randn(2, 3)
    config = torch_neuronx.BucketModelConfig(lambda: torch.jit.script(by_rows), func_kwargs=[{"factor": 1}, {"factor": 2}])
    options: dict[str, Any] = {"bucket_config": config, "inline_weights_to_neff": False, "tp_degree": 2, "spmd_mode": True}
    model = parallel_model_trace(
        lambda factor: Shifted(shift, factor), [x[:1], x], checkpoint_loader_callable=lambda: {"up.weight": weight}, **options
    )
    parallel_model_save(model, tmp_path)
    for one in (model, parallel_model_load(tmp_path)):
        torch.testing.assert_close(one(x[:1]), x[:1] @ weight.t() + shift**2)
        torch.testing.assert_close(one(x), x @ weight.t() + 4 * shift**2)


@pytest.mark.parametrize("form", ["mesh", "one"])
def test_each_ranks_own_in_the_builders_model(form: str, tmp_path: Path) -> None:
    shift, weight, x = torch.randn(4), torch.randn(4, 3), torch.randn(2, 3)
    with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        module = Shifted(shift)
        buffers = set(dict(module.named_buffers()))
        model = ModelBuilder(module).trace(x[:1], tag="a").trace(x, tag="b").compile(compiler_workdir=tmp_path)
        weights = shard_checkpoint({"up.weight": weight}, module)
    assert set(dict(module.named_buffers())) == buffers
    model.save(str(tmp_path / "model.pt"))
    loaded = NxDModel.load(str(tmp_path / "model.pt"))
    for one in (model, loaded):
        nets.put_on(one, form)
        one.set_weights(weights)
        one.to_neuron()
        for rows in (1, 2):
            torch.testing.assert_close(one(x[:rows]), x[:rows] @ weight.t() + shift**2)


def test_xla_tensors_of_each_rank_that_are_no_buffers() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return reduce_from_tensor_model_parallel_region(x * 2 + offset)

    def make() -> nn.Module:
        nonlocal offset
        offset = torch.ones(3, device="xla") * (parallel_state.get_tensor_model_parallel_rank() + 1)
        with pytest.raises(
            ValueError, match=r"differs by rank and is no parameter or buffer of the module: .*register_buffer\(name, tensor"
        ):
            torch_bridge.capture(Net(), torch.ones(3))
        return Net()

    offset = torch.zeros(3)
    model = parallel_model_trace(make, torch.ones(3), tp_degree=2)
    assert model(torch.ones(3)).tolist() == [2.0 + 1 + 2.0 + 2] * 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inline_weights_to_neff": True}, "spmd_mode needs weights apart from the programs: set inline_weights_to_neff=False"),
        (
            {"inline_weights_to_neff": True, "spmd_mode": False, "bucket_config": torch_neuronx.BucketModelConfig(print)},
            "bucket_config needs weights apart from the programs: set inline_weights_to_neff=False",
        ),
        ({"checkpoint_loader_callable": None}, "spmd_mode needs checkpoint_loader_callable, a function that returns the full state dict"),
        (
            {"spmd_mode": False, "serialization_path": "x"},
            "serialization_path needs spmd_mode=True; save other models with parallel_model_save",
        ),
    ],
)
def test_arguments_that_do_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        traced(**options)


def test_results_that_update_nothing() -> None:
    for aliases, text in (
        (lambda m: {m.sum: 5}, "sum is said to be updated by result 5, and the forward returns 2 tensors"),
        (
            lambda m: {m.sum: 0},
            r"sum: float32 \[4\] is to be updated by a result that is float32 \[1, 3, 4\]: a state keeps its shape and dtype",
        ),
        (
            lambda m: {torch.ones(4): 1},
            r"result 1 is to update a tensor of shape \[4\] that is no parameter or buffer of the module: register it",
        ),
    ):

        def made(aliases: Any = aliases) -> Any:
            module = Net()
            return module, aliases(module)

        with pytest.raises(ValueError, match=text):
            parallel_model_trace(made, (IDS,))
    with pytest.raises(RuntimeError, match="weight is on meta: give the model its weights, or a checkpoint loader"):
        parallel_model_trace(lambda: nn.Linear(3, 2, device="meta"), torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"the function must return \(module, states\), got int first"):
        parallel_model_trace(lambda: (3, {}), (IDS,))


def test_folders_that_are_not_whole(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no tp_0\.pt, tp_1\.pt, \.\.\.: it is no folder that parallel_model_save wrote"):
        parallel_model_load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no tp_0\.pt"):
        parallel_model_load(tmp_path / "nowhere")
    shutil.copy(folder / "tp_1.pt", tmp_path / "tp_1.pt")
    with pytest.raises(ValueError, match="the model has 2 ranks, and .* has the files of ranks 1: all are needed"):
        parallel_model_load(tmp_path)
    shutil.copy(folder / "tp_0.pt", tmp_path / "tp_0.pt")
    parallel_model_load(tmp_path)
    shutil.copy(folder / "tp_0.pt", tmp_path / "tp_2.pt")
    with pytest.raises(ValueError, match=r"tp_2\.pt holds the weights of rank 0"):
        parallel_model_load(tmp_path)
    (tmp_path / "tp_2.pt").unlink()
    shutil.copy(folder / "tp_0.pt", tmp_path / "tp_1.pt")
    with pytest.raises(ValueError, match=r"tp_1\.pt holds the weights of rank 0: the folder has files under wrong names"):
        parallel_model_load(tmp_path)
    (tmp_path / "tp_1.pt").write_bytes((folder / "tp_1.pt").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"tp_1\.pt cannot be opened as a model file: File is not a zip file"):
        parallel_model_load(tmp_path)
    torch.jit.save(torch_neuronx.trace(nn.Linear(3, 2), torch.ones(1, 3)), tmp_path / "tp_1.pt")
    with pytest.raises(ValueError, match=r"tp_1\.pt is a model that traced module made: load it with torch\.jit\.load"):
        parallel_model_load(tmp_path)
    with pytest.raises(
        RuntimeError, match=r"this file is one rank of a model: load its folder with neuronx_distributed\.trace\.parallel_model_load"
    ):
        torch.jit.load(folder / "tp_0.pt")
    with pytest.raises(ValueError, match="parallel_model_save takes what parallel_model_trace returned, got Linear"):
        parallel_model_save(nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]


def test_files_of_two_models(folder: Path, tmp_path: Path) -> None:
    traced(serialization_path=tmp_path, checkpoint_loader_callable=lambda: {n: t * 2 for n, t in full().items()})
    parallel_model_load(tmp_path)
    other = parallel_model_trace(lambda: layers.ColumnParallelLinear(3, 8), torch.ones(2, 3), tp_degree=2)
    parallel_model_save(other, tmp_path / "other")
    shutil.copy(folder / "tp_0.pt", tmp_path / "other" / "tp_0.pt")
    with pytest.raises(ValueError, match=r"tp_1\.pt holds other programs than tp_0\.pt: the folder has files of several models"):
        parallel_model_load(tmp_path / "other")


def by_length(tensors: list[torch.Tensor], lengths: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The smallest bucket that the tokens which are not 0 fit into."""
    longest = (tensors[0] != 0).sum(1).max()
    bucket = (lengths < longest).sum()
    return [tensors[0][:, : int(lengths[bucket])]], bucket.to(torch.int32)


def test_buckets(tmp_path: Path) -> None:
    lengths = torch.tensor([2, 4])
    config = torch_neuronx.BucketModelConfig(lambda: torch.jit.script(by_length), bucket_kernel_constant_args=(lengths,))
    examples = [(torch.ones(1, int(n), dtype=torch.int64),) for n in lengths]
    with pytest.raises(ValueError, match="example_inputs must be a list with the inputs of each bucket"):
        parallel_model_trace(make, [], bucket_config=config, inline_weights_to_neff=False)
    model = parallel_model_trace(
        make, examples, bucket_config=config, inline_weights_to_neff=False, tp_degree=2, spmd_mode=True, checkpoint_loader_callable=full
    )
    assert config.bucket_degree == 2
    parallel_model_save(model, tmp_path)
    loaded = parallel_model_load(tmp_path)
    for one in (model, loaded):
        total = torch.zeros(4)
        for ids in (torch.tensor([[1, 2, 0, 0]]), torch.tensor([[1, 2, 3, 0]]), torch.tensor([[5, 0, 0, 0]])):
            cut = ids[:, :2] if int((ids != 0).sum()) <= 2 else ids
            wanted = reference(cut, full())
            torch.testing.assert_close(one(ids)[0], wanted)
            total += wanted.sum((0, 1))
        torch.testing.assert_close(one.model.programs.read("sum", 0), total)  # one state for both buckets


class Masked(nn.Module):
    """A mask that no state dict holds, each bucket's own; seed: of the weight."""

    def __init__(self, length: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = layers.ColumnParallelLinear(1, 4, bias=False)
        self.register_buffer("mask", torch.arange(float(length)), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.up((ids * self.mask).sum(1, keepdim=True))


@pytest.mark.parametrize("seeds", [(3, 3), (3, 4)])
def test_buckets_of_other_modules(seeds: tuple[int, int], tmp_path: Path) -> None:
    lengths = torch.tensor([2, 4])
    kwargs = [{"length": 2, "seed": seeds[0]}, {"length": 4, "seed": seeds[1]}]
    config = torch_neuronx.BucketModelConfig(
        lambda: torch.jit.script(by_length), bucket_kernel_constant_args=(lengths,), func_kwargs=kwargs
    )
    options: dict[str, Any] = {"bucket_config": config, "inline_weights_to_neff": False, "tp_degree": 2}
    examples = [torch.ones(1, 2), torch.ones(1, 4)]
    if seeds[0] != seeds[1]:
        with pytest.raises(ValueError, match=r"up\.weight of bucket 1 has other values than in the buckets before"):
            parallel_model_trace(Masked, examples, **options)
        return
    parallel_model_save(parallel_model_trace(Masked, examples, **options), tmp_path)
    weight = torch.cat([own["up.weight"] for own in parallel_model_load(tmp_path).model.weights])
    for length, total in ((2, 1.0), (4, 6.0)):
        ids = torch.nn.functional.pad(torch.ones(1, length), (0, 4 - length))
        torch.testing.assert_close(parallel_model_load(tmp_path)(ids), total * weight.T)

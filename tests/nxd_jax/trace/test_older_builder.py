"""The builder of `trace.model_builder`, and the executor that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nxd_jax.parallel_layers import layers, parallel_state
from nxd_jax.trace import ModelBuilder
from nxd_jax.trace.model_builder import BaseModelInstance
from nxd_jax.trace.spmd import NxDModelExecutor

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
START = torch.tensor([0], dtype=torch.int32)
X = torch.arange(6.0).view(2, 3)


class Net(nn.Module):
    """Returns a tuple for two rows, and a dict for one: two output structures."""

    def __init__(self) -> None:
        super().__init__()
        self.up = layers.ColumnParallelLinear(3, 4, dtype=torch.float32)
        self.total = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.up(x)
        total = self.total + y.sum(0)
        return (y, total) if x.shape[0] == 2 else {"y": y * 2, "total": total, "more": [y]}


class Instance(BaseModelInstance):
    def __init__(self, index: int) -> None:
        super().__init__(Net, {})
        self.index = index
        self.asked: list[tuple[int, dict[str, Any]]] = []

    def load_module(self) -> None:
        self.module = Net().eval()

    def get(self, bucket_rank: int, **kwargs: Any) -> tuple[nn.Module, Mapping[torch.Tensor, int]]:
        self.asked.append((bucket_rank, kwargs))
        return self.module, {self.module.total: self.index}


def full() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(8)
    return {"up.weight": torch.randn(4, 3, generator=g, dtype=torch.float64), "up.bias": torch.randn(4, generator=g)}


def builder(folder: Path, **kwargs: Any) -> ModelBuilder:
    options = {"tp_degree": 2, "checkpoint_loader": full, "compiler_workdir": folder / "work"}
    return ModelBuilder(None, **{**options, **kwargs})


def reference(x: torch.Tensor) -> torch.Tensor:
    return x @ full()["up.weight"].float().T + full()["up.bias"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelBuilder, Path]:
    """A builder with two keys, and the files of its model with and without weights."""
    folder = tmp_path_factory.mktemp("older")
    found = builder(folder)
    found.add("two", Instance(1), [(X,)], compiler_args="-O1").add("one", Instance(1), [(X[:1],)], priority_model_idx=0)
    torch.jit.save(found.trace(initialize_model_weights=True), folder / "with.pt")
    torch.jit.save(found.trace(initialize_model_weights=False), folder / "without.pt")
    return found, folder


def check(model: NxDModelExecutor) -> None:
    for _ in range(2):
        (y,) = model(X)
        torch.testing.assert_close(y, reference(X))
    got = model(X[:1])
    assert list(got) == ["y", "more"]  # each program has its own structure, and the state is not returned
    torch.testing.assert_close(got["y"], reference(X[:1]) * 2)
    torch.testing.assert_close(got["more"][0], reference(X[:1]))
    total = reference(X).sum(0) * 2 + reference(X[:1])[0]
    torch.testing.assert_close(model.nxd_model.programs.read("total", 1), total)


def test_weights_in_the_file(made: tuple[ModelBuilder, Path]) -> None:
    model = torch.jit.load(made[1] / "with.pt")
    assert type(model) is NxDModelExecutor and model.original_name == "NxDModelExecutor"
    with pytest.raises(RuntimeError, match=r"the model has no weights yet: call nxd_model\.initialize\(weights, start_rank_tensor\)"):
        model(X)
    for _ in range(2):
        model.nxd_model.initialize_with_saved_weights(START)
        check(model)
    with pytest.raises(
        ValueError, match=r"no program was traced for inputs of shapes \[\[3, 3\]\]: there are \[\[2, 3\]\] -> two; \[\[1, 3\]\] -> one"
    ):
        model(torch.ones(3, 3))
    with pytest.raises(TypeError, match=r"takes tensors in the order of its example_inputs, without names, got x="):
        model(x=torch.ones(2, 3))
    with pytest.raises(TypeError, match=r"input 0 of a traced model must be a tensor, got list: .* its tensors, one by one"):
        model([1, 2])


def test_weights_that_are_given(made: tuple[ModelBuilder, Path], tmp_path: Path) -> None:
    model = torch.jit.load(made[1] / "without.pt")
    with pytest.raises(
        RuntimeError, match=r"saved without weights \(trace\(initialize_model_weights=False\)\): call initialize\(weights, start_rank"
    ):
        model.nxd_model.initialize_with_saved_weights(START)
    weights = made[0].shard_checkpoint(str(tmp_path))
    assert not parallel_state.model_parallel_is_initialized()
    for rank, own in enumerate(weights):
        assert own["up.weight"].dtype == torch.float32
        torch.testing.assert_close(own["up.weight"].double(), full()["up.weight"].chunk(2)[rank], rtol=1e-6, atol=1e-6)
        files = load_file(tmp_path / f"tp{rank}_sharded_checkpoint.safetensors")
        assert all(torch.equal(files[n], t) for n, t in own.items())
    with pytest.raises(ValueError, match=r"start_rank_tensor says 1, and this process computes for ranks \[0, 1\]"):
        model.nxd_model.initialize(weights, START + 1)
    model.nxd_model.initialize(weights, START)
    check(model)
    joined = [{**weights[0], "up.weight": full()["up.weight"], "up.bias": full()["up.bias"]}]
    model.nxd_model.initialize(joined)  # of one rank
    check(model)
    joined[0]["up.bias"].zero_()
    torch.jit.save(model, tmp_path / "again.pt")  # with the weights that it computes with
    again = torch.jit.load(tmp_path / "again.pt")
    again.nxd_model.initialize_with_saved_weights(START)
    check(again)


def test_the_working_folder(tmp_path: Path) -> None:
    """Programs of before go, whatever else was there stays."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("mine")
    builder(tmp_path)
    assert (tmp_path / "work" / "notes.txt").exists()
    builder(tmp_path).add("a", Instance(1), [(X,)]).trace(dry_run=True)
    assert list((tmp_path / "work" / "a").rglob("graph.stablehlo"))
    builder(tmp_path)
    assert not (tmp_path / "work").exists()


class Config:
    def get_func_kwargs_for_bucket_rank(self, bucket: int) -> dict[str, int]:
        return {"bucket": bucket}


def test_buckets_and_groups_of_ones_own(tmp_path: Path) -> None:
    sizes = []
    instance = Instance(1)
    groups = []

    def own() -> None:
        sizes.append(parallel_state.get_tensor_model_parallel_size())
        groups.append(parallel_state.get_kv_shared_group(as_list=True))

    found = builder(tmp_path, init_custom_process_group_fn=own, num_cores_per_group=2)
    with pytest.warns(DeprecationWarning, match="bucket_config is not needed: each entry of example_inputs is a bucket"):
        found.add("all", instance, [(X,), (X[:1],)], bucket_config=Config())
    model = found.trace()
    assert instance.asked[:2] == [(0, {"bucket": 0}), (1, {"bucket": 1})] and sizes[0] == 2
    assert groups[0] == [[0, 1]]
    check(model)
    assert set(model.nxd_model.programs.programs) == {"all_0", "all_1"}


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="world_size=4 needs local_ranks_size, the ranks of this process"):
        builder(tmp_path, world_size=4)
    found = builder(tmp_path, checkpoint_loader=None)
    with pytest.raises(ValueError, match=r"nothing was added: call add\(key, model_instance, example_inputs\) before trace\(\)"):
        found.trace()
    for wrong in ([], X, ()):
        with pytest.raises(ValueError, match="example_inputs must be a list with a tuple of tensors for each bucket"):
            found.add("a", Instance(1), wrong)
    found.add("a", Instance(1), [(X,)])
    with pytest.raises(ValueError, match="key 'a' is there already: give each kind of call its own"):
        found.add("a", Instance(1), [(X,)])
    with pytest.raises(ValueError, match=r"the builder has no checkpoint_loader: give one, or trace\(initialize_model_weights=False\)"):
        found.trace()
    groups = builder(tmp_path, num_cores_per_group=3)
    groups.add("a", Instance(1), [(X,)])
    with pytest.raises(AssertionError):
        groups.trace()
    assert not parallel_state.model_parallel_is_initialized()
    found.add("b", Instance(1), [(X,)])
    with pytest.raises(
        ValueError, match=r"'b' and 'a' take inputs of the same shapes, \[\[2, 3\]\], and calls are routed by shapes: give one of them"
    ):
        found.trace(initialize_model_weights=False)

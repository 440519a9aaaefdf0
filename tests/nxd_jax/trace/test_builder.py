"""`ModelBuilder`, `trace.functions` and `NxDParallelState`: what they accept, what they leave behind, and their errors."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nxd_jax
from nxd_jax import trace as trace_api
from nxd_jax.parallel_layers import layers, parallel_state
from nxd_jax.trace import functions, mock_torchdist
from nxd_jax.trace.model_builder_utils import generate_key
from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.trace import nets
from torch_bridge.mesh import world

X = torch.ones(2, 3)


class Two(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        return a + b


class Rest(nn.Module):
    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return args[0]


class Named(nn.Module):
    def forward(self, a: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return a


class Bare(nn.Module):
    def forward(self) -> torch.Tensor:
        return torch.ones(1)


class Default(nn.Module):
    def forward(self, a: torch.Tensor, n: int = 3) -> torch.Tensor:
        return a * n


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "kind", "text"),
    [
        (None, X, None, ValueError, r"the model is None: give an nn\.Module or a function"),
        (Rest(), X, None, NotImplementedError, r"forward takes \*args.*: name every parameter"),
        (Named(), X, None, NotImplementedError, r"forward takes \*\*more.*: name every parameter"),
        (Bare(), X, None, ValueError, "forward takes no parameters: a traced model needs at least one input tensor"),
        (Default(), X, None, ValueError, "parameter n of forward has default 3: None is the only default that a traced model may have"),
        (Two(), [X, X], None, ValueError, "args must be None, a tensor or a tuple of tensors, got list of Tensor"),
        (Two(), (X, 3), None, ValueError, "args must be None, a tensor or a tuple of tensors, got tuple of Tensor, int|int, Tensor"),
        (Two(), 3, None, ValueError, "args must be None, a tensor or a tuple of tensors, got int"),
        (Two(), (X, X, X, X), None, ValueError, "args has 4 tensors, and forward takes 3: a, b, c"),
        (Two(), X, [X], ValueError, "kwargs must be a dict of tensors, got list of Tensor"),
        (Two(), X, {"d": X}, ValueError, "forward has no parameter d: it takes a, b, c"),
        (Two(), X, {"a": X}, ValueError, "a is given in args and in kwargs: give it once"),
        (Two(), X, {"b": 3}, ValueError, r"kwargs\['b'\] must be a tensor, got int"),
        (Two(), X, None, ValueError, "forward needs b: give an example tensor for each in args or kwargs"),
        (Two(), None, None, ValueError, "forward needs a, b: give an example tensor"),
        (lambda a=None: a, None, None, ValueError, "a trace needs an example tensor for at least one parameter of forward"),
    ],
)
def test_examples_that_do_not_fit(model: Any, args: Any, kwargs: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        ModelBuilder(model).trace(args, kwargs)


def test_arguments_of_the_builder(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"spmd=False \(a program for each rank\) is not supported"):
        ModelBuilder(Two()).trace((X, X), spmd=False)
    builder = ModelBuilder(Two(), weights_to_skip_layout_optimization={"w"})
    with pytest.raises(ValueError, match=r"nothing is traced yet: call trace\(\.\.\.\) before compile\(\)"):
        builder.compile()
    builder.trace((X, X), tag="a").trace((X[:1], X[:1]), tag="b")
    with pytest.raises(ValueError, match="priority_model_key 'c' is no tag: there are a, b"):
        builder.compile("c", tmp_path)
    with pytest.raises(ValueError, match="compiler_args has no entry for b: give one for every tag, or a string for all"):
        builder.compile(compiler_workdir=tmp_path, compiler_args={"a": "-O1"})
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="the compilation of 'a' failed: "):
        builder.compile(compiler_workdir=tmp_path / "file")
    for priority, args in ((None, "-O1"), ("b", {"a": "-O1", "b": "-O2"})):
        model = builder.compile(priority, tmp_path / "programs", args, max_workers=2)
        model.to_neuron()
        assert model(X, X).tolist() == (X + X).tolist() and model(a=X[:1], b=X[:1]).shape == (1, 3)
    assert {p.name for p in (tmp_path / "programs").iterdir()} == {"a", "b"}
    found = builder.trace_artifacts_collection["a"]
    assert found.hlo in [p.read_bytes() for p in (tmp_path / "programs" / "a").rglob("graph.stablehlo")]


def test_the_same_tag_again() -> None:
    """The later trace counts."""
    builder = ModelBuilder(Two()).trace((X, X), tag="a").trace((X[:1], X[:1]), tag="a")
    assert builder.compile().router([X[:1], X[:1]], ["a", "b"]) == ["a"]


def test_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(3, 2)
    found = functions.trace(linear, X)
    (provided,) = found.provided_args
    assert (provided.param_name, provided.is_positional) == ("input", True) and provided.tensor is X
    assert found.weight_name_to_idx == {"weight": 0, "bias": 1}
    assert [t["shape"] for t in found.metaneff["weights"]] == [[2, 3], [2]]
    compiled = functions.compile(found.hlo, found.metaneff, tmp_path, key="tag")
    assert compiled.get_neff_bytes() == found.hlo and Path(compiled.neff_filepath).is_relative_to(tmp_path / "tag")
    wlo = functions.compile_wlo(found.hlo, found.metaneff, tmp_path)
    assert generate_key(found.hlo) in wlo.neff_filepath and generate_key(b"a").startswith("model_") and generate_key(b"a", "t") == "t"
    assert functions.compile_layout_transformer(wlo, found.weight_name_to_idx).hlo_filepath == wlo.wrapped_neff_hlo_filepath
    with pytest.raises(ValueError, match="wlo_artifacts must come from compile_wlo, got CompilationArtifacts"):
        functions.compile_layout_transformer(compiled, {})
    with pytest.raises(ValueError, match=r"hlo_module must be the hlo of TraceArtifacts \(serialized StableHLO, bytes\), got str"):
        functions.compile("hlo")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert Path(functions.compile(found.hlo).neff_filepath).is_relative_to(tmp_path / "temporary" / "nxd_models")


def test_older_names_of_functions() -> None:
    from nxd_jax.trace import model_builder

    for name in ("trace", "compile", "compile_wlo", "compile_layout_transformer", "shard_checkpoint"):
        with pytest.warns(DeprecationWarning, match=f"trace.model_builder.{name} is trace.functions.{name}"):
            assert getattr(model_builder, name) is getattr(functions, name)
    assert not hasattr(model_builder, "nothing")


def test_names() -> None:
    for package in (nxd_jax, trace_api):
        for name in ("ModelBuilder", "NxDModel", "NxDParallelState", "shard_checkpoint"):
            assert name in dir(package) and callable(getattr(package, name))
    assert nxd_jax.ModelBuilder is ModelBuilder and trace_api.ModelBuilder is not ModelBuilder  # as in the original
    assert all(inspect.ismodule(getattr(trace_api, name)) for name in ("spmd", "functions", "trace", "mock_torchdist"))
    assert not hasattr(trace_api, "nothing")
    for name in ("shard_children", "get_sharded_checkpoint", "create_local_weight_qkv", "TensorParallelNeuronModel"):
        assert name in trace_api.trace.__all__ and callable(getattr(trace_api.trace, name))


# -- parallel state ------------------------------------------------------------------------------------


def nothing_left() -> bool:
    return (
        not (parallel_state.model_parallel_is_initialized() or dist.is_initialized() or parallel_state.get_aot_mode()) and world.size() == 1
    )


def test_parallel_state() -> None:
    with NxDParallelState(world_size=8, rank=3, tensor_model_parallel_size=4, context_parallel_size=2, lnc_size=2) as state:
        assert state.rank == 3 and dist.get_world_size() == 8 and parallel_state.get_aot_mode()
        assert parallel_state.get_tensor_model_parallel_size() == 4 and parallel_state.get_context_model_parallel_size() == 2
        with (
            pytest.raises(RuntimeError, match="sets up parallel state, which is there already: leave the other block, or call destroy"),
            NxDParallelState(),
        ):
            pass
        assert parallel_state.get_tensor_model_parallel_size() == 4
    assert nothing_left()
    with pytest.raises(KeyError), NxDParallelState(2, tensor_model_parallel_size=2):
        raise KeyError
    assert nothing_left()
    with pytest.raises(Exception, match="3"), NxDParallelState(world_size=4, tensor_model_parallel_size=3):
        pass
    assert nothing_left()
    with pytest.raises(ValueError, match="rank must be one of the 2 ranks of world_size, got 2"):
        NxDParallelState(world_size=2, rank=2)


def test_parallel_state_in_a_job(nxd: Nxd) -> None:
    """Where torch.distributed is there, it stays."""
    nxd(4, tp=2)
    parallel_state.destroy_model_parallel()
    with (
        pytest.raises(RuntimeError, match=r"NxDParallelState\(world_size=2\) in a job of 4 ranks: give that number"),
        NxDParallelState(world_size=2),
    ):
        pass
    with NxDParallelState(world_size=4, tensor_model_parallel_size=4):
        assert parallel_state.get_tensor_model_parallel_size() == 4
    assert dist.is_initialized() and not parallel_state.model_parallel_is_initialized()


def test_mock_distributed() -> None:
    with mock_torchdist.mock_distributed(world_size=4):
        dist.init_process_group("xla")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        assert dist.get_world_size() == 4 and layers.ColumnParallelLinear(4, 4).weight.shape == (2, 4)
        with (
            pytest.raises(RuntimeError, match="mock_distributed needs torch.distributed not to be initialised: this job has real ranks"),
            mock_torchdist.mock_distributed(2),
        ):
            pass
        parallel_state.destroy_model_parallel()
    assert nothing_left()
    with pytest.raises(KeyError), mock_torchdist.mock_distributed(2):
        raise KeyError
    assert nothing_left()


def test_a_world_of_data_parallel_ranks() -> None:
    """tp 2 in a world of 4: ranks with one place in their groups hold the same part."""
    ids = nets.tokens(3)
    with NxDParallelState(world_size=4, tensor_model_parallel_size=2):
        module = nets.Decoder()
        model = ModelBuilder(module).trace((ids, torch.arange(3)), tag="all").compile()
        weights = functions.shard_checkpoint(nets.full_weights(), module)
    assert torch.equal(weights[0]["q.weight"], weights[2]["q.weight"]) and not torch.equal(weights[0]["q.weight"], weights[1]["q.weight"])
    model.set_weights(weights)
    model.to_neuron()
    [logits, _] = model([ids, ids, ids.flip(0), ids.flip(0)], [torch.arange(3)] * 4, forward_mode="ranked_to_cpu")
    for rank in range(4):
        torch.testing.assert_close(logits[rank], nets.reference(ids if rank < 2 else ids.flip(0)))
    two = nets.built(2).weights
    model.replace_weights(two)
    torch.testing.assert_close(model(ids, torch.arange(3))["logits"], nets.reference(ids))


@pytest.mark.filterwarnings("ignore:a parallel layer was made before")
@pytest.mark.parametrize("mocked", [False, True])
def test_parallel_state_behind_a_reference_on_the_cpu(mocked: bool) -> None:
    """A model made before anybody set up groups has groups of one; they and the process group of one make room."""
    x = torch.randn(2, 4)
    reference = layers.ColumnParallelLinear(4, 6)
    wanted = reference(x)
    assert parallel_state.model_parallel_is_initialized() and dist.get_world_size() == 1
    if mocked:
        with mock_torchdist.mock_distributed(world_size=2):
            dist.init_process_group("xla")
            assert dist.get_world_size() == 2
    else:
        with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
            assert layers.ColumnParallelLinear(4, 6).weight.shape[0] == 3
    assert nothing_left()
    torch.testing.assert_close(reference(x), wanted)

"""`shard_checkpoint` and the helpers below it, against cuts written out by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nxd_jax.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers import layers
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.trace import resharding
from nxd_jax.trace import trace as trace_names
from nxd_jax.trace.functions import shard_checkpoint
from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.parallel_context import NxDParallelState
from nxd_jax.utils import model_utils
from tests.nxd_jax.trace import nets
from torch_bridge.aot.facts import Cut, Held, Piece


class Hooked(layers.ColumnParallelLinear):
    """Takes its weight from another name and doubles it."""

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        if prefix.endswith("weight"):
            model_state_dict[prefix] = model_state_dict.pop(f"old_{prefix}") * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hooked = Hooked(4, 8, bias=False)
        self.fused = layers.ColumnParallelLinear(4, 8, stride=2, gather_output=False)
        self.row = layers.RowParallelLinear(8, 4, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(4)
        self.rank = layers.SPMDRank(4)


def checkpoint() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    shapes = {
        "old_hooked.weight": (8, 4),
        "fused.weight": (8, 4),
        "fused.bias": (8,),
        "row.weight": (4, 8),
        "row.bias": (4,),
        "norm.weight": (4,),
        "norm.bias": (4,),
        "unknown.weight": (3,),
    }
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


@pytest.mark.parametrize("on_meta", [False, True])
def test_cuts(on_meta: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    full = checkpoint()
    before = copy.copy(full)
    with NxDParallelState(world_size=4, tensor_model_parallel_size=4):
        if on_meta:
            with model_utils.init_on_device(torch.device("meta")):
                module = Net()
        else:
            module = Net()
        found = shard_checkpoint(full, module, serialize_path=str(tmp_path / "weights"))
        part = shard_checkpoint(full, module, 1, 2)
    assert list(full) == list(before) and all(full[n] is t for n, t in before.items())  # the original changes the caller's dict
    assert "the model has no unknown.weight: these tensors of the checkpoint are left out" in caplog.text
    names = {"hooked.weight", "fused.weight", "fused.bias", "row.weight", "row.bias", "norm.weight", "norm.bias", "rank.rank"}
    for rank, own in enumerate(found):
        assert set(own) == names
        expected = {
            "hooked.weight": full["old_hooked.weight"].chunk(4)[rank] * 2,
            "fused.weight": torch.cat([half.chunk(4)[rank] for half in full["fused.weight"].chunk(2)]),
            "fused.bias": torch.cat([half.chunk(4)[rank] for half in full["fused.bias"].chunk(2)]),
            "row.weight": full["row.weight"].chunk(4, 1)[rank].to(torch.bfloat16),
            "row.bias": full["row.bias"].to(torch.bfloat16),
            "norm.weight": full["norm.weight"],
            "rank.rank": torch.tensor([rank], dtype=torch.int32),
        }
        files = load_file(tmp_path / "weights" / f"tp{rank}_sharded_checkpoint.safetensors")
        for name, t in expected.items():
            assert own[name].dtype == t.dtype and torch.equal(own[name], t), name
            assert torch.equal(files[name], t), name
    assert len(part) == 2 and all(torch.equal(part[0][n], found[1][n]) and torch.equal(part[1][n], found[2][n]) for n in names)


def test_errors() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match="shard_checkpoint needs parallel state: call it within `with NxDParallelState"):
        shard_checkpoint({}, module)
    with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        for start, end in ((0, 2), (-1, 1), (1, 0), (2, None)):
            with pytest.raises(AssertionError, match="must be ranks of the 2 in the world, the first not above the last"):
                shard_checkpoint({}, module, start, end)
        column = layers.ColumnParallelLinear(4, 8, bias=False)
        for shape in ((6, 4), (8, 3), (8, 4, 1)):
            with pytest.raises(RuntimeError, match="weight: "):
                shard_checkpoint({"weight": torch.ones(shape)}, column)
        whole = nn.Module()
        whole.register_buffer("weight", torch.zeros(8, 4, dtype=torch.int8))
        with pytest.raises(
            RuntimeError, match=r"weight: the checkpoint has torch\.float32, the model torch\.int8, which is of another kind: convert"
        ):
            shard_checkpoint({"weight": torch.ones(8, 4)}, whole)
        with pytest.raises(RuntimeError, match=r"weight: .*\[3, 2\]"):
            shard_checkpoint({"weight": torch.ones(3, 2)}, module)
        with pytest.raises(ValueError, match="tp_degree is 4, and parallel state has tensor parallel size 2: they must agree"):
            trace_names.get_sharded_checkpoint({}, column, 0, 4)


def test_helpers_of_the_older_generations(caplog: pytest.LogCaptureFixture) -> None:
    """They change the dict that they are given, as the original's do."""
    full = torch.arange(24.0).view(12, 2)
    assert torch.equal(trace_names.create_local_weight(1, 3, full, 0, 4, 1), full[4:8])
    assert torch.equal(trace_names.create_local_weight(1, 3, full, 0, 4, 2), torch.cat([full[2:4], full[8:10]]))
    out = torch.empty(4, 2)
    assert trace_names.create_local_weight(0, 3, full, 0, 4, 1, out) is out and torch.equal(out, full[:4])
    qkv = trace_names.create_local_weight_qkv(1, 2, full[:8], 0, 2, 1, 2)  # 2 heads of q, 1 of k and 1 of v, of 2 rows each
    assert torch.equal(qkv, torch.cat([full[2:4], full[5:6], full[7:8]]))
    with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        module = layers.ColumnParallelLinear(2, 12, bias=False)
        state = {"weight": full, "other": full}
        trace_names.get_sharded_checkpoint(state, module, 1, 2)
        assert list(state) == ["weight"] and torch.equal(state["weight"], full[6:])
        state = {"weight": full}
        trace_names.preprocess_checkpoint(module, state)
        trace_names.get_sharded_checkpoint(state, module, 0, 2, is_cached=True)
        assert torch.equal(state["weight"], full[:6])
        state = {"a.weight": full, "b.weight": full, "a.bias": full}
        trace_names.shard_children(nn.ModuleDict({"a": module, "b": nn.Linear(2, 12)}), state, "", torch.float64, 1, 2)
        assert torch.equal(state["a.weight"], full[6:].double()) and state["b.weight"] is state["a.bias"] is full
        state = {"x.a.weight": full}
        trace_names.shard_children(nn.ModuleDict({"a": module}), state, "x.", None, 0, 2)
        assert torch.equal(state["x.a.weight"], full[:6])
        with pytest.raises(ValueError, match="tp_degree is 4, and parallel state has tensor parallel size 2: they must agree"):
            trace_names.shard_children(module, {}, "", None, 0, 4)


def test_parameters_that_read_their_value() -> None:
    linear = nn.Linear(2, 3, bias=False)
    linear.weight.get_tensor_from_state_dict = lambda prefix, state: state[prefix + "a"] + state[prefix + "b"]  # type: ignore[attr-defined]
    outer = nn.Sequential(linear)
    with NxDParallelState():
        [own] = shard_checkpoint({"0.a": torch.ones(3, 2), "0.b": torch.full((3, 2), 2.0)}, outer)
    assert list(own) == ["0.weight"] and own["0.weight"].tolist() == [[3.0] * 2] * 3


class Grouped(nn.Module):
    """K/V heads with copies on 4 ranks, and numbers of ranks."""

    def __init__(self, copies: int, tp: int) -> None:
        super().__init__()
        self.qkv = GQAQKVColumnParallelLinear(6, [16, 8], bias=False, gather_output=False, kv_size_multiplier=copies, fuse_qkv=False)
        self.out = layers.RowParallelLinear(16, 6, bias=False, input_is_parallel=True)
        self.rank = layers.SPMDRank(tp)

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(x)
        return self.out(q), k, v, self.rank.get_rank() + 0


def grouped(tp: int, copies: int) -> tuple[Any, list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(6)
    shapes = {"qkv.weight_q": (16, 6), "qkv.weight_k": (8, 6), "qkv.weight_v": (8, 6), "out.weight": (6, 16)}
    full = {name: torch.randn(s, generator=g) for name, s in shapes.items()}
    with NxDParallelState(world_size=tp, tensor_model_parallel_size=tp):
        module = Grouped(copies, tp)
        model = ModelBuilder(module).trace(torch.ones(2, 6)).compile()
        state = {n: t.repeat(copies, 1) if n in ("qkv.weight_k", "qkv.weight_v") else t for n, t in full.items()}
        return model, shard_checkpoint(state if copies == 1 else full, module), full


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("machine", ["trn1", "trn2"])
def test_copies_of_k_and_v(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies go round the ranks on trn1 and stand side by side on trn2; weights of 4 ranks with copies serve 2 without."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", machine)
    four, weights, full = grouped(4, 2)
    x = torch.randn(2, 6)
    parts = [full["qkv.weight_k"].chunk(2)[r % 2 if machine == "trn1" else r // 2] for r in range(4)]
    assert all(torch.equal(own["qkv.weight_k"], part) for own, part in zip(weights, parts, strict=True))
    four.set_weights(weights)
    four.to_neuron()
    out, k, _, number = four([x] * 4, forward_mode="ranked_to_cpu")
    torch.testing.assert_close(out[3], x @ full["qkv.weight_q"].T @ full["out.weight"].T)
    for rank in range(4):
        torch.testing.assert_close(k[rank], x @ parts[rank].T)
        assert number[rank].tolist() == [rank]
    two, own, _ = grouped(2, 1)
    for found, wanted in (
        (resharding.resharded(weights, two._model.weights, 2), own),
        (resharding.resharded(own, four._model.weights, 4), weights),
    ):
        assert all(torch.equal(found[r][n], t) for r, state in enumerate(wanted) for n, t in state.items())
    weights[1]["qkv.weight_k"] = weights[1]["qkv.weight_k"] + 1
    with pytest.raises(
        ValueError, match=r"qkv\.weight_k: what 4 ranks hold are not the parts, and copies of parts, that .*: shard the full checkpoint"
    ):
        two.set_weights(weights)


def test_what_cannot_be_cut_again() -> None:
    x = torch.ones(4, 2)
    with pytest.raises(
        ValueError, match=r"the weights are of 2 ranks, the model has 4, and w is no plain cut of w: float32 \[4, 2\] that all have"
    ):
        resharding.resharded([{"w": x}, {"w": x + 1}], {"w": Held("w", (4, 2), torch.float32, False)}, 4)
    same = resharding.resharded([{"w": x}, {"w": x.clone()}], {"w": Held("w", (4, 2), torch.float32, False)}, 4)
    assert len(same) == 4 and all(own["w"] is x for own in same)
    strided = Held("w", (2, 2), torch.float32, False, (Cut(0, 4, (Piece(4), Piece(4)), (0, 1, 2, 3)),))
    full = torch.arange(16.0).view(8, 2)
    halves = [torch.cat([full[0:2], full[4:6]]), torch.cat([full[2:4], full[6:8]])]
    got = resharding.resharded([{"w": h} for h in halves], {"w": strided}, 4)
    assert [own["w"][:, 0].tolist() for own in got] == [[0.0, 8.0], [2.0, 10.0], [4.0, 12.0], [6.0, 14.0]]
    for other in ([{"w": halves[0]}, {}], [{"w": halves[0]}, {"w": halves[1].double()}]):
        with pytest.raises(
            ValueError, match=r"w: of 2 ranks [12] have a part, of shapes \[4, 2\]: all must have one of the same shape and dtype; shard"
        ):
            resharding.resharded(other, {"w": strided}, 4)
    with pytest.raises(
        ValueError, match=r"w: 2 parts of shape \[3, 2\] do not make up a tensor with 8 entries along dim 0, which the model's ranks share"
    ):
        resharding.resharded([{"w": h[:3]} for h in halves], {"w": strided}, 4)


def test_copies_of_fused_k_and_v() -> None:
    """A layer that may hold copies of k and v in one weight with q: cut as it says, and refused for another number of ranks."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = GQAQKVColumnParallelLinear(6, [16, 8], bias=False, gather_output=False, fuse_qkv=True)

        def forward(self, x: torch.Tensor) -> Any:
            return self.qkv(x)

    full = {"qkv.weight_qkv": torch.randn(32, 6)}
    built = {}
    for tp in (1, 2):
        with NxDParallelState(world_size=tp, tensor_model_parallel_size=tp):
            module = Fused()
            built[tp] = ModelBuilder(module).trace(torch.ones(2, 6)).compile(), shard_checkpoint(full, module)
    q, k, v = full["qkv.weight_qkv"].split([16, 8, 8])
    for rank, own in enumerate(built[2][1]):
        assert torch.equal(own["qkv.weight_qkv"], torch.cat([t.chunk(2)[rank] for t in (q, k, v)]))
    with pytest.raises(ValueError, match="the weights are of 2 ranks, the model has 1, and qkv.weight_qkv is no plain cut"):
        built[1][0].set_weights(built[2][1])
    with pytest.raises(ValueError, match="the weights are of 1 ranks, the model has 2, and qkv.weight_qkv is no plain cut"):
        built[2][0].set_weights(built[1][1])


class Experts(nn.Module):
    """Every row goes through the expert of its number, 4 in all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ExpertFusedColumnParallelLinear(4, 3, 8)
        self.down = ExpertFusedRowParallelLinear(4, 8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.core(keep=1)
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2), (2, 2)])
def test_experts(tp: int, ep: int, tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(9)
    full = {"up.weight": torch.randn(4, 3, 8, generator=g), "down.weight": torch.randn(4, 8, 3, generator=g)}
    x = torch.randn(4, 5, 3, generator=g)
    with NxDParallelState(world_size=tp * ep, tensor_model_parallel_size=tp, expert_model_parallel_size=ep):
        module = Experts()
        places = [(parallel_groups.places("ep")[r] if ep > 1 else 0, parallel_groups.places("tp")[r]) for r in range(tp * ep)]
        model = ModelBuilder(module).trace(x[: 4 // ep]).compile(compiler_workdir=tmp_path)
        weights = shard_checkpoint(full, module)
    for own, (e, t) in zip(weights, places, strict=True):
        assert torch.equal(own["up.weight"], full["up.weight"].chunk(ep)[e].chunk(tp, 2)[t])
        assert torch.equal(own["down.weight"], full["down.weight"].chunk(ep)[e].chunk(tp, 1)[t])
    model.set_weights(weights)
    model.to_neuron()
    wanted = torch.einsum("enf,efh->enh", torch.relu(torch.einsum("enh,ehf->enf", x, full["up.weight"])), full["down.weight"])
    [got] = model([x.chunk(ep)[e] for e, _ in places], forward_mode="ranked_to_cpu")
    for own, (e, _) in zip(got, places, strict=True):
        torch.testing.assert_close(own, wanted.chunk(ep)[e])
    model.replace_weights([full])
    assert all(torch.equal(model.read_from_neuron_buffer(n, r), own[n]) for r, own in enumerate(weights) for n in full)


def test_same_names_in_files(tmp_path: Path) -> None:
    """An older file stays until the new one is whole."""
    from nxd_jax.trace import functions

    path = tmp_path / functions.rank_file(3)
    assert path.name == "tp3_sharded_checkpoint.safetensors"
    functions.write_rank_file(path, {"a": torch.ones(2), "empty": torch.ones(0, 3), "b": torch.tensor(2.0, dtype=torch.bfloat16)})
    found = load_file(path)
    assert found["a"].tolist() == [1.0, 1.0] and found["empty"].shape == (0, 3) and found["b"].item() == 2.0
    with pytest.raises(KeyError):
        functions.write_rank_file(path, {"c": torch.ones(2, dtype=torch.complex128)})
    assert "a" in load_file(path) and nets.HEADS


class UpstreamFused(nn.Module):
    """q, k and v in one weight, marked as upstream's layers mark it; a padded layer; numbers of ranks."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.qkv = layers.ColumnParallelLinear(6, 32, bias=False, gather_output=False)
        for name, value in {"fused_qkv": True, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2}.items():
            setattr(self.qkv.weight, name, value)
        self.padded = layers.ColumnParallelLinear(6, 7, gather_output=False, pad=True, dtype=torch.bfloat16)
        self.rank = layers.SPMDRank(tp)
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.qkv(x), self.padded(x.to(torch.bfloat16)), self.rank.get_rank() + 0


@pytest.mark.core(keep=2)
@pytest.mark.parametrize(("given", "ranks"), [(1, 2), (2, 4), (4, 1), (4, 2)])
def test_other_numbers_of_ranks(given: int, ranks: int) -> None:
    g = torch.Generator().manual_seed(7)
    shapes = {"qkv.weight": (32, 6), "padded.weight": (7, 6), "padded.bias": (7,)}
    full = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    weights = {}
    for tp in (given, ranks):
        with NxDParallelState(world_size=tp, tensor_model_parallel_size=tp):
            module = UpstreamFused(tp)
            weights[tp] = shard_checkpoint(full, module)
            model = ModelBuilder(module).trace(torch.ones(2, 6)).compile() if tp == ranks else None
    assert model is not None
    model.set_weights(weights[given])
    model.to_neuron()
    for rank, own in enumerate(weights[ranks]):
        for name, t in own.items():
            assert torch.equal(model.read_from_neuron_buffer(name, rank), t), name

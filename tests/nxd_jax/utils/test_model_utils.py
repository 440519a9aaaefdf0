"""Models made on "meta", filled, moved and retied; structures; what the platform is."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn

from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers.layer_norm import LayerNorm
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_jax.utils import model_utils
from nxd_jax.utils.full_weights import gather_full
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(8, 6)
        self.up = ColumnParallelLinear(6, 8, gather_output=False, stride=2)
        self.qkv = GQAQKVColumnParallelLinear(6, [8, 4], bias=False)
        self.down = RowParallelLinear(8, 6, input_is_parallel=True, sequence_parallel_enabled=True)
        self.norm = LayerNorm(6, sequence_parallel_enabled=True)
        self.head = ColumnParallelLinear(6, 8, bias=False, gather_output=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 2)
        self.frozen.weight.requires_grad_(False)
        self.frozen.weight.shared = True  # type: ignore[assignment]
        self.register_buffer("table", torch.arange(3.0))


def attributes(model: nn.Module) -> dict[str, Any]:
    return {name: model_utils._attributes(p) for name, p in model.named_parameters(remove_duplicate=False)}


def fill(module: nn.Module, device: Any) -> None:
    for name in ("init_weight_cpu", "reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            return


@pytest.mark.parametrize("buffers", [False, True])
def test_from_meta_to_xla(nxd: Nxd, buffers: bool) -> None:
    nxd(4, tp=2)
    torch.manual_seed(0)
    reference = Model().to("xla")
    with model_utils.init_on_device(torch.device("meta"), include_buffers=buffers):
        model = Model()
    assert all(p.is_meta for p in model.parameters()) and model.table.is_meta == buffers  # type: ignore[union-attr]
    assert model.head.weight is model.embed.weight and not model.frozen.weight.requires_grad
    assert attributes(model) == attributes(reference)
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    if buffers:
        model.table = torch.arange(3.0)
    torch.manual_seed(0)
    assert model_utils.get_model_sequential(model, "xla", param_init_fn=fill) is model
    assert all(p.device.type == "xla" for p in model.parameters())
    assert model.head.weight is model.embed.weight and not model.frozen.weight.requires_grad
    assert attributes(model) == attributes(reference)
    for name, p in model.named_parameters():
        found = gather_full(p)
        assert isinstance(found, tuple) or found.isfinite().all(), name
    assert sharded.varying(model.up.weight) == sharded.varying(reference.up.weight)
    assert torch.equal(gather_full(model.embed.weight), gather_full(reference.embed.weight))  # type: ignore[arg-type]


def test_reinit_calls_either_form(nxd: Nxd) -> None:
    nxd(1)
    for fn in (lambda m, device: fill(m, device), lambda m: fill(m, None)):
        with model_utils.init_on_device("meta"):
            model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        model_utils.reinit_model(model, torch.device("cpu"), fn)
        assert isinstance(model[1], nn.LayerNorm) and model[1].weight.tolist() == [1.0] * 3
        assert isinstance(model[0], nn.Linear) and model[0].weight.abs().max() < 1


def test_first_of_tied_parameters_counts(nxd: Nxd) -> None:
    nxd(1)
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    values = iter((1.0, 2.0))

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.fill_(next(values))

    model_utils.reinit_model(model, "cpu", init)
    assert model["a"].weight is model["b"].weight and model["a"].weight[0, 0] == 1.0  # type: ignore[index]


def test_parameters_replaced_in_a_block_get_their_attributes_and_ties_back(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model = Model()
    before = attributes(model)
    with model_utils.preserve_parallel_attributes(model), model_utils.preserve_shared_weights(model):
        for module in model.modules():
            for name, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[name] = nn.Parameter(p.detach().clone())
    assert attributes(model) == before and model.head.weight is model.embed.weight
    assert model_utils.analyze_shared_parameters(model) == [["embed.weight", "head.weight"]]


def test_move_model_to_device(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model = Model()
    before, up = attributes(model), model.up.weight
    model_utils.move_model_to_device(model, torch.device("xla"))
    assert attributes(model) == before and model.up.weight is up and model.head.weight is model.embed.weight
    assert {p.device.type for p in model.parameters()} == {"xla"} and model.table.device.type == "xla"  # type: ignore[union-attr]


def test_models_of_transformers_tie_themselves() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4)
    model = transformers.GPT2LMHeadModel(config)
    assert model_utils.is_hf_pretrained_model(model) and not model_utils.is_hf_pretrained_model(nn.Linear(1, 1))
    with model_utils.preserve_shared_weights(model):
        model.lm_head.weight = nn.Parameter(torch.zeros(8, 4))
    assert model.lm_head.weight is model.transformer.wte.weight
    calls: list[int] = []
    model.tie_weights = lambda: calls.append(1)
    model_utils.move_model_to_device(model, "xla")
    assert calls == [1]
    with model_utils.preserve_shared_weights(model, ignore_hf=True):
        pass
    assert calls == [1]


def test_a_pipeline_model_moves_itself(nxd: Nxd) -> None:
    nxd(1)
    calls = []

    class Pipeline:
        def maybe_materialize_local_module(self) -> None:
            calls.append("materialize")

        def move_model_to_device(self) -> None:
            calls.append("move")

    model_utils.get_model_sequential(Pipeline(), "xla")
    assert calls == ["materialize", "move"]
    with pytest.raises(ValueError, match="sequential_move_factor=0 must be positive"):
        model_utils.get_model_sequential(nn.Linear(1, 1), "xla", 0)


def test_init_on_device_is_undone_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), model_utils.init_on_device("meta", include_buffers=True):
        raise ZeroDivisionError
    module = nn.BatchNorm1d(2)
    assert module.weight.device.type == "cpu" and module.running_mean.device.type == "cpu"  # type: ignore[union-attr]


def test_recursive_filter() -> None:
    a, b = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    data = {"a": a, "b": b, "list": [a, (b, a)], "n": 1, "none": None}
    kept = model_utils.recursive_filter(data, lambda t: t.is_floating_point())
    assert kept == {"a": a, "list": [a, (a,)], "n": 1, "none": None}
    assert model_utils.recursive_filter(b, lambda t: t.is_floating_point()) is None
    assert isinstance(model_utils.recursive_filter(collections.OrderedDict(a=a), lambda t: True), dict)


def test_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_utils.get_platform_lnc() == model_utils.LogicalNCConfig.LNC_1 == 1
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert model_utils.get_platform_lnc() is model_utils.LogicalNCConfig.LNC_2
    assert not model_utils.check_delay_tracing({}) and not model_utils.get_delay_tracing(None)


def test_ranks_of_this_host(nxd: Nxd) -> None:
    nxd(4)
    assert model_utils.get_local_world_size() == 4

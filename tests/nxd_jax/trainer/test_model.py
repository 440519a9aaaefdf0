"""`initialize_parallel_model` and `NxDModel`: a module that stands for the model it wraps."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.trainer import initialize_parallel_model, neuronx_distributed_config
from neuronx_distributed.trainer.model import NxDModel
from torch import nn

from nxd_jax.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

transformers = pytest.importorskip("transformers")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, gather_output=False)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True)
        self.module = nn.LayerNorm(4)  # a name that the wrapper has too
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.drop(self.module(self.down(self.up(x)))) * self.scale).square().mean()


def wrapped(tp: int = 1, model_fn: Any = Inner, *args: Any, **kwargs: Any) -> NxDModel:
    torch.manual_seed(0)
    return initialize_parallel_model(neuronx_distributed_config(tensor_parallel_size=tp), model_fn, *args, **kwargs)


def plain() -> Inner:
    torch.manual_seed(0)
    return Inner()


def input_of(rows: int = 3) -> torch.Tensor:
    return torch.arange(4.0 * rows).reshape(rows, 4).sin().to("xla")


NAMES = ["up.weight", "up.bias", "down.weight", "down.bias", "module.weight", "module.bias"]


# -- arguments of initialize_parallel_model ------------------------------------------------------------


def test_both_signatures(nxd: Nxd) -> None:
    """As documented, (config, model_fn, *args), and as NxD's code has it, with `include_buffers` right after `model_fn`."""
    nxd(1)
    seen: list[Any] = []

    def model_fn(size: int, a: int) -> nn.Module:
        seen.append((size, a))
        return nn.Linear(2, 2)

    for args, kwargs in [((5,), {}), ((True, 5), {}), ((False, 5), {}), ((5,), {"include_buffers": True})]:
        wrapped(1, model_fn, *args, **kwargs, a=1)
    wrapped(1, model_fn, True, 5, 1)
    assert seen == [(5, 1)] * 5


def test_a_bool_that_model_fn_needs_is_its_own(nxd: Nxd) -> None:
    nxd(1)
    bias = [
        wrapped(1, lambda bias: nn.Linear(2, 2, bias=bias), *args).local_module().bias is not None
        for args in [(True,), (False,), (True, False)]
    ]
    assert bias == [True, False, False]
    with pytest.warns(
        UserWarning, match="True was taken for include_buffers, as neuronx_distributed has it. If it is model_fn's, pass it by keyword"
    ):
        model = wrapped(1, lambda bias=False: nn.Linear(2, 2, bias=bias), True)
    assert model.local_module().bias is None


def test_model_fn_must_give_a_module(nxd: Nxd) -> None:
    nxd(1)
    with pytest.raises(TypeError, match="model_fn must return a torch.nn.Module, got int"):
        wrapped(1, lambda: 3)


# -- running -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_run_train_and_run_eval(nxd: Nxd, tp: int) -> None:
    nxd(tp, tp=tp)
    model, reference = wrapped(tp).eval(), plain().to("xla").eval()
    loss, expected = model.run_train(input_of()), reference(input_of())
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.cpu())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        for s, t in zip(sharded.shards(p.grad), sharded.shards(q.grad), strict=True):
            torch.testing.assert_close(s, t)
    once = model.module.scale.clone()
    model.run_train(input_of())
    torch.testing.assert_close(model.down.bias.grad.cpu(), 2 * reference.down.bias.grad.cpu())  # added to what was there
    out = model.run_eval(input_of())
    assert not out.requires_grad and torch.equal(out.cpu(), loss.cpu()) and torch.equal(model.module.scale, once)
    assert torch.equal(model(x=input_of()).cpu(), loss.cpu())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: loss,
        lambda loss: (loss, 3),
        lambda loss: [loss],
        lambda loss: {"loss": loss},
        lambda loss: type("Output", (), {"loss": loss})(),
    ],
)
def test_where_run_train_finds_the_loss(nxd: Nxd, wrap: Any) -> None:
    nxd(1)

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x).sum())

    model = wrapped(1, Model, 4, 1)
    loss = model.run_train(input_of())
    assert loss.dim() == 0 and model.weight.grad is not None


@pytest.mark.parametrize(
    ("out", "found"), [(torch.ones(2), r"a tensor of shape \[2\]"), ("no", "str"), ({}, "dict"), ((), "tuple"), ((None,), "tuple")]
)
def test_no_loss(nxd: Nxd, out: Any, found: str) -> None:
    nxd(1)

    class Model(nn.Module):
        def forward(self) -> Any:
            return out

    with pytest.raises(TypeError, match=f"run_train needs a model that returns its loss, .* got {found}"):
        wrapped(1, Model).run_train()


# -- the module that it stands for ---------------------------------------------------------------------


def test_views_have_the_models_names(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model, reference = wrapped(2), plain()
    assert [n for n, _ in model.named_parameters()] == NAMES == [n for n, _ in model.local_named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in reference.named_modules()] == [n for n, _ in model.local_named_modules()]
    assert (
        [n for n, _ in model.named_children()] == [n for n, _ in reference.named_children()] == [n for n, _ in model.local_named_children()]
    )
    assert [n for n, _ in model.named_buffers()] == ["scale"] == [n for n, _ in model.local_named_buffers()]
    assert list(model.state_dict()) == list(reference.state_dict()) == list(model.local_state_dict())
    assert (
        [id(p) for p in model.parameters()]
        == [id(p) for p in model.local_module().parameters()]
        == [id(p) for p in model.local_parameters()]
    )
    assert next(model.buffers()) is next(model.local_buffers()) is model.local_module().scale
    assert next(iter(model.modules())) is model.original_module() is model.local_modules()[0] is model.local_module()
    assert list(model.children()) == list(model.local_children()) == list(model.local_module().children())
    assert [n for n, _ in model.named_parameters(prefix="p", recurse=True)] == [f"p.{n}" for n in NAMES]
    assert (
        model.get_parameter("module.weight") is model.local_module().module.weight
        and model.get_submodule("module") is model.local_module().module
    )
    assert model.get_buffer("scale") is model.local_module().scale
    assert not model.pp_enabled and repr(model).startswith("NxDModel(Inner(") and "up" in dir(model) and "run_train" in dir(model)


def test_modes_casts_and_moves(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model = wrapped(2)
    inner = model.local_module()
    assert model.training and inner.training and inner.drop.training
    assert model.eval() is model and not model.training and not inner.drop.training
    assert model.train() is model and inner.drop.training
    assert model.dtype == torch.float32 and next(model.parameters()).device.type == "xla"
    up = inner.up.weight
    assert model.to(torch.bfloat16) is model and model.dtype == torch.bfloat16 and inner.up.weight is up and up.tensor_model_parallel
    assert inner.scale.dtype == torch.bfloat16 and model.float().dtype == torch.float32
    assert model.requires_grad_(False) is model and not any(p.requires_grad for p in inner.parameters())
    assert wrapped(1, nn.Identity).dtype == torch.float32


def test_attributes_are_the_models(nxd: Nxd) -> None:
    nxd(1)
    model = wrapped()
    inner = model.local_module()
    assert model.up is inner.up and not hasattr(model, "nothing")
    with pytest.raises(AttributeError, match="'Inner' object has no attribute 'nothing'"):
        _ = model.nothing
    with pytest.raises(AttributeError, match="'Inner' object has no attribute 'config'"):
        _ = model.config
    model.drop = nn.Identity()
    model.extra = nn.Linear(2, 2)
    model.gain = nn.Parameter(torch.ones(1))
    model.register_buffer("table", torch.zeros(1))
    model.register_parameter("other", nn.Parameter(torch.ones(1)))
    model.add_module("last", nn.Linear(1, 1))
    model.set_submodule("extra", nn.Linear(3, 3))
    assert (
        isinstance(inner.drop, nn.Identity)
        and inner.extra.in_features == 3
        and {"gain", "other", "last.weight", "table"} <= set(inner.state_dict())
    )
    model.note = "ours"
    inner.flag = False
    model.flag = True
    assert inner.flag is True and not hasattr(inner, "note") and model.note == "ours"
    del model.extra, model.note
    assert not hasattr(inner, "extra") and not hasattr(model, "note")


def test_apply_and_hooks(nxd: Nxd) -> None:
    nxd(1)
    model = wrapped()
    seen: list[Any] = []
    assert model.apply(lambda m: seen.append(type(m).__name__)) is model
    assert seen == ["ColumnParallelLinear", "RowParallelLinear", "LayerNorm", "Dropout", "Inner"]
    handles = [
        model.register_forward_pre_hook(lambda m, args: (args[0] * 0,)),
        model.register_forward_hook(lambda m, args, out: out + 1),
        model.register_full_backward_hook(lambda m, before, after: seen.append("backward")),
        model.local_module().up.register_forward_hook(lambda m, args, out: seen.append("up")),
    ]
    model.eval().run_train(input_of().requires_grad_())
    assert seen[-2:] == ["up", "backward"]
    for handle in handles:
        handle.remove()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_state_goes_out_and_in(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model, other = wrapped(2), wrapped(2)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert not other.load_state_dict(model.state_dict()).missing_keys
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=re.escape('Missing key(s) in state_dict: "scale", "up.weight"')):
        model.load_state_dict({})
    assert model.load_state_dict({}, strict=False).missing_keys == list(plain().state_dict())


def test_as_a_part_of_another_module(nxd: Nxd) -> None:
    nxd(1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = wrapped()
            self.head = nn.Linear(2, 2)

    outer, other = Outer(), Outer()
    names = [*(f"model.{n}" for n in plain().state_dict()), "head.weight", "head.bias"]
    assert list(outer.state_dict()) == names
    assert [n for n, _ in outer.named_parameters()] == [n for n in names if n != "model.scale"]
    with torch.no_grad():
        outer.model.up.weight.fill_(3.0)
    other.load_state_dict(outer.state_dict())
    assert other.model.up.weight.cpu().eq(3).all()
    with pytest.raises(RuntimeError, match=re.escape('Unexpected key(s) in state_dict: "model.module.new"')):
        other.load_state_dict({**outer.state_dict(), "model.new": torch.ones(1)})


def test_copies(nxd: Nxd) -> None:
    nxd(1)
    model = wrapped(1, nn.Linear, 4, 4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, NxDModel) and other.weight is not model.weight and other.nxd_config == model.nxd_config
        assert torch.equal(other.weight.cpu(), model.weight.cpu()) and other.weight.device.type == "xla"
    parallel = wrapped()
    other = copy.deepcopy(parallel)
    assert other.up.weight is not parallel.up.weight and other.up.weight.tensor_model_parallel
    with torch.no_grad():
        other.up.weight.zero_()
    assert parallel.up.weight.cpu().abs().sum() > 0


# -- models of transformers ----------------------------------------------------------------------------


def tiny(**kwargs: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        attn_implementation="eager",
        name_or_path="tiny",
        **kwargs,
    )
    return transformers.LlamaForCausalLM(config)


def test_a_model_of_transformers(nxd: Nxd) -> None:
    nxd(1)
    model = wrapped(1, tiny)
    torch.manual_seed(0)
    reference = tiny()
    ids = torch.tensor([[1, 2, 3]])
    assert model.config is model.local_module().config and model.config.hidden_size == 8
    assert model.name_or_path == "tiny" and model.dtype == torch.float32
    out, expected = model.eval()(input_ids=ids.to("xla"), labels=ids.to("xla")), reference.eval()(input_ids=ids, labels=ids)
    torch.testing.assert_close(out.loss.cpu(), expected.loss)
    torch.testing.assert_close(out["logits"].cpu(), expected.logits)
    loss = model.run_train(input_ids=ids.to("xla"), labels=ids.to("xla"))
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5) and model.lm_head.weight.grad is not None
    found = model.generate(ids.to("xla"), max_new_tokens=1, do_sample=False)
    assert found.tolist() == reference.generate(ids, max_new_tokens=1, do_sample=False).tolist()


def test_replay_by_variable(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the same losses and weights from recordings as with NXD_JAX_REPLAY=0 op by op, dropout and all."""

    def train() -> tuple[list[float], list[torch.Tensor], Any]:
        nxd(4, tp=2)
        xm.set_rng_state(3)
        model = wrapped(2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for k in range(6):
            loss = model(torch.full((3, 4), float(k), device="xla"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [w for p in model.parameters() for w in sharded.shards(p.detach())], model

    monkeypatch.setenv("NXD_JAX_REPLAY", "0")
    losses, weights, model = train()
    assert not hasattr(model.original_module().forward, "played")
    monkeypatch.delenv("NXD_JAX_REPLAY")
    again, same, model = train()
    assert model.original_module().forward.played > 0
    assert again == losses and all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))

"""Wrapped modules compute the same, under the same names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nxd_jax.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_jax.utils.activation_checkpoint import NxDCheckpointWrapper, apply_activation_checkpointing, checkpoint_wrapper
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, gather_output=False)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        self.calls += 1
        return self.down(torch.relu(self.up(x)) * scale) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.again = self.layers[0]
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.out(self.again(x)).sum()


def make() -> Model:
    torch.manual_seed(0)
    return Model().to("xla")


def wrap(model: Model) -> Model:
    apply_activation_checkpointing(model, checkpoint_wrapper, lambda m: isinstance(m, Layer))
    return model


@pytest.mark.parametrize("tp", [1, 2])
def test_same_loss_gradients_and_names(nxd: Nxd, tp: int) -> None:
    nxd(tp, tp=tp)
    plain, wrapped = make(), wrap(make())
    assert all(isinstance(m, NxDCheckpointWrapper) for m in wrapped.layers) and wrapped.again is wrapped.layers[0]
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert {n for n, _ in wrapped.named_modules()} == {n for n, _ in plain.named_modules()}
    wrapped.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4).to("xla").requires_grad_()
    losses = [model(x) for model in (plain, wrapped)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1].cpu(), losses[0].cpu())
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        for s, t in zip(sharded.shards(a.grad), sharded.shards(b.grad), strict=True):
            torch.testing.assert_close(s, t)
    assert [layer.calls for layer in plain.layers] == [2, 1] and [layer.calls for layer in wrapped.layers] == [4, 2]
    assert wrapped.layers[0].up.weight.tensor_model_parallel


def test_wrapping_twice_wraps_once(nxd: Nxd) -> None:
    nxd(1)
    model = wrap(wrap(make()))
    assert sum(isinstance(m, NxDCheckpointWrapper) for m in model.modules()) == 2


def test_dropout_is_the_same_in_the_recomputation(nxd: Nxd) -> None:
    nxd(1)
    module = checkpoint_wrapper(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))).to("xla")
    x = torch.ones(4, 16).to("xla").requires_grad_()
    out = module(x)
    out.sum().backward()
    kept = (out != 0).float().cpu() * 2
    weight = module._checkpoint_wrapped_module[0].weight
    torch.testing.assert_close(weight.grad.cpu(), kept.sum(0)[:, None].expand(16, 16))


def test_a_checkpoint_function_of_ones_own(nxd: Nxd) -> None:
    nxd(1)
    calls = []
    module = checkpoint_wrapper(nn.Linear(2, 2), checkpoint_fn=lambda fn, *args, extra: (calls.append(extra), fn(*args))[1], extra=3)
    module(torch.ones(1, 2))
    assert calls == [3]


def test_pipeline_and_nxd_models(nxd: Nxd) -> None:
    nxd(1)

    class Pipeline:
        transformer_layer_cls = Layer

        def __init__(self) -> None:
            self.local_stage_modules = [make()]

        def cut_pipeline_stage(self, name: str) -> None: ...

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = make()

        def local_modules(self) -> list[nn.Module]:
            return [self.module]

    pipeline, wrapped = Pipeline(), Wrapped()
    apply_activation_checkpointing(pipeline, checkpoint_wrapper, lambda m: False)
    apply_activation_checkpointing(wrapped, checkpoint_wrapper, lambda m: m is wrapped.module.out)
    assert isinstance(pipeline.local_stage_modules[0].layers[1], NxDCheckpointWrapper)
    assert isinstance(wrapped.module.out, NxDCheckpointWrapper) and not isinstance(wrapped.module.layers[0], NxDCheckpointWrapper)

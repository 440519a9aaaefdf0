"""`get_lora_model` of what `initialize_parallel_model` returns: the adapters are inside, they train, and checkpoints hold them."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nxd_jax as nxd_api
from nxd_jax.modules.lora import LoraConfig, LoraModel, get_lora_model
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_jax.trainer.model import NxDModel
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lora.models import full, stir

RATE, SCALE = 0.5, 2.0
ADAPTERS = ["up.lora_A.weight", "up.lora_B.weight", "down.lora_A.weight", "down.lora_B.weight"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, gather_output=False)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(torch.tanh(self.up(x))), x)


def lora() -> LoraConfig:
    return LoraConfig(lora_rank=2, lora_alpha=4, target_modules=["up", "down"], save_lora_config_adapter=True)


def parallel_model(config: LoraConfig | None = None) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    options = {"zero_one_enabled": False, "grad_clipping": False}
    nxd_config = nxd_api.neuronx_distributed_config(tensor_parallel_size=2, optimizer_config=options, lora_config=config)
    return nxd_api.initialize_parallel_model(nxd_config, Net), nxd_config


def batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(3, 4, generator=generator) for _ in range(count))


def dense_losses(tensors: dict[str, torch.Tensor], count: int) -> list[float]:
    """Training of the adapters alone, in plain torch, from full tensors."""
    state = {name: t.clone().requires_grad_(name in ADAPTERS) for name, t in tensors.items()}

    def layer(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = state[f"{name}.weight"] + SCALE * state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
        return F.linear(x, weight, state[f"{name}.bias"])

    optimizer = torch.optim.SGD([state[name] for name in ADAPTERS], lr=RATE)
    found = []
    for x in batches(count):
        optimizer.zero_grad()
        loss = F.mse_loss(layer("down", torch.tanh(layer("up", x))), x)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("calls_before", [0, 4])
def test_adapters_are_inside_and_train(nxd: Nxd, calls_before: int) -> None:
    """Also in a model that was played before it had them."""
    nxd(4, tp=2)
    model, nxd_config = parallel_model()
    for x in batches(calls_before):
        model(x.to("xla")).item()
    config = lora()
    found: Any = get_lora_model(model, config)
    assert found is model and isinstance(found, NxDModel) and found.nxd_config is nxd_config
    assert isinstance(found.module, LoraModel) and found.module.lora_config is config and type(found.get_base_model()) is Net
    assert [n.removeprefix("module.") for n, p in found.named_parameters() if p.requires_grad] == ADAPTERS
    assert list(found.state_dict()) == [*ADAPTERS, "lora_config"]
    stir(found)
    want = dense_losses({name: full(t).detach() for name, t in found.tensors().items()}, 4)
    optimizer = nxd_api.initialize_parallel_optimizer(nxd_config, torch.optim.SGD, found.parameters(), lr=RATE)
    losses = []
    for x in batches(4):
        optimizer.zero_grad()
        losses.append(found.run_train(x.to("xla")).item())
        optimizer.step()
    assert want[-1] < want[0]
    torch.testing.assert_close(losses, want, rtol=1e-4, atol=0)


def test_the_same_as_with_a_configuration(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    """Names, adapters, and the checkpoint, which loads in either."""
    nxd(2, tp=2)
    late: Any = get_lora_model(parallel_model()[0], lora())
    at_once, _ = parallel_model(lora())
    assert list(late.tensors()) == list(at_once.tensors())
    x = next(batches(1)).to("xla")
    stir(late)
    nxd_api.save_checkpoint(str(tmp_path), tag="t", model=late)
    assert late(x).item() != at_once(x).item()
    nxd_api.load_checkpoint(str(tmp_path), tag="t", model=at_once)
    assert late(x).item() == at_once(x).item()


def test_without_adapters(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model, _ = parallel_model()
    inside = model.module
    assert get_lora_model(model, None) is model and get_lora_model(model, LoraConfig(enable_lora=False)) is model
    assert model.module is inside and type(inside) is Net


def test_adapters_that_would_not_train(nxd: Nxd) -> None:
    nxd(2, tp=2)
    model, _ = parallel_model()
    with pytest.raises(TypeError, match=r"takes the model inside an NxDModel: use get_lora_model\(model, lora_config\)"):
        LoraModel(model, lora())
    get_lora_model(model, lora())
    with pytest.raises(ValueError, match="has LoRA adapters already"):
        get_lora_model(model, lora())

    class Wrapper(nn.Module):
        """Its modules' names are not those of its state dict."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2))

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner.named_modules(*args, **kwargs)

    text = r"no parameter to train of the adapters of 0 is in the state dict of the Wrapper, which has inner\.0\.lora_A\.weight.*If it wraps another model"
    with pytest.raises(ValueError, match=text):
        LoraModel(Wrapper(), LoraConfig(lora_rank=1, target_modules=["0"]))

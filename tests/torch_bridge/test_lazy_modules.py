"""Modules whose parameters get their shapes from the first batch (`nn.LazyLinear`), on xla."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import torch_bridge

torch_bridge.register()
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")

KINDS = {
    nn.LazyLinear: ((3,), (4, 5)),
    nn.LazyConv2d: ((4, 3), (2, 3, 6, 6)),
    nn.LazyConvTranspose1d: ((4, 3), (2, 3, 6)),
    nn.LazyBatchNorm1d: ((), (6, 3)),
    nn.LazyInstanceNorm2d: ((), (2, 3, 4, 4)),
}


def net(device: str) -> nn.Module:
    return nn.Sequential(
        nn.LazyConv1d(4, 3, device=device), nn.LazyBatchNorm1d(device=device), nn.Flatten(), nn.LazyLinear(2, device=device)
    )


def batch(device: str = "xla") -> torch.Tensor:
    return torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1)).to(device)


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(batch(device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["device", "context", "to", "to with a dtype"])
def test_made_on_xla_or_moved_there(kind: Any, how: str) -> None:
    arguments, shape = KINDS[kind]
    if how == "device":
        module = kind(*arguments, device="xla")
    elif how == "context":
        with torch.device("xla"):
            module = kind(*arguments)
    else:
        module = kind(*arguments).to("xla", torch.float64 if "dtype" in how else None)
    dtype = torch.float64 if "dtype" in how else torch.float32
    parameters = list(module.parameters())
    assert all(is_lazy(p) and isinstance(p, nn.UninitializedParameter) and p.device.type == "xla" for p in parameters)
    x = torch.randn(shape, dtype=dtype)
    found = module(x.to("xla"))
    assert type(module) is kind.cls_to_become
    assert [p is q for p, q in zip(parameters, module.parameters(), strict=True)] == [True] * len(parameters)
    assert all(isinstance(p, nn.Parameter) and not is_lazy(p) and p.is_leaf and p.dtype == dtype for p in parameters)
    plain = copy.deepcopy(module).cpu()
    if isinstance(plain, nn.modules.batchnorm._NormBase):  # as it was before the first batch
        plain.reset_running_stats()
    torch.testing.assert_close(found.cpu(), plain(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close({k: v.cpu() for k, v in module.state_dict().items()}, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_made_before_goes_on(kind: Any) -> None:
    reference = net("cpu")
    reference(batch("cpu"))
    reference[1].reset_running_stats()  # type: ignore[operator, index]
    module, moved = net("xla"), net("cpu")
    optimizers = [kind(m.parameters(), lr=0.1) for m in (module, moved, reference)]
    moved.to("xla")
    for m in (module, moved):
        m.load_state_dict(reference.state_dict())
    expected = trained(reference, optimizers[2], "cpu")
    assert trained(module, optimizers[0], "xla") == pytest.approx(expected, rel=1e-4)
    assert trained(moved, optimizers[1], "xla") == pytest.approx(expected, rel=1e-4)


def test_states_and_copies_without_shapes() -> None:
    module = net("xla")
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=False)  # torch refuses parameters without a shape otherwise
    assert type(read["0.weight"]) is nn.UninitializedParameter and type(read["1.running_mean"]) is nn.UninitializedBuffer
    other, copied = net("xla"), copy.deepcopy(module)
    other.load_state_dict(read)
    shared = copy.deepcopy([module[1].running_mean] * 2)  # type: ignore[index]
    assert shared[0] is shared[1] and is_lazy(shared[0])
    assert other(batch()).shape == copied(batch()).shape == (4, 2)
    assert is_lazy(module[0].weight) and is_lazy(module[1].running_mean)  # type: ignore[index]


def test_back_to_the_cpu() -> None:
    module = net("xla").cpu()
    assert type(module[0].weight) is nn.UninitializedParameter and type(module[1].running_mean) is nn.UninitializedBuffer  # type: ignore[index]
    assert module(batch("cpu")).device.type == "cpu"


def test_without_parameters() -> None:
    module = nn.LazyBatchNorm1d(affine=False).to("xla")
    assert module.running_mean is not None and module.running_mean.device.type == "xla"
    assert module(batch()).shape == batch().shape and module.running_mean.shape == (3,)


def test_with_a_shape_from_the_cpu() -> None:
    module = net("cpu")
    module(batch("cpu"))
    assert module.to("xla")(batch()).device.type == "xla"


def test_before_they_have_a_shape() -> None:
    weight = nn.LazyLinear(3, device="xla").weight
    weight.tag = "mine"  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="Can't access the shape of an uninitialized parameter"):
        _ = weight.shape
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        weight + 1
    with pytest.raises(
        ValueError, match=r"materialize\(device='cpu'\) of a parameter or buffer on xla:0: it becomes one there; move the module first"
    ):
        weight.materialize((3, 4), device="cpu")
    weight.materialize((3, 4), dtype=torch.float16)
    assert weight.shape == (3, 4) and weight.dtype == torch.float16 and weight.tag == "mine"  # type: ignore[attr-defined]


def test_drift_is_said_with_their_names() -> None:
    """The module that a parameter belongs to is known behind its first batch."""
    from torch_bridge.passes.check_replicas import path_of

    module = net("xla")
    module(batch())
    assert path_of(module[0].weight._storage).endswith("weight")  # type: ignore[index]

"""torch's old constructors, `torch.FloatTensor([loss.item()])`, of numbers that differ by rank."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers, world


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> None:
    hosted(4)
    assert rank_numbers.is_ranked(world.rank())


def _loss() -> Any:
    return (torch.ones(3, device="xla") * (world.rank() + 1)).sum()


@pytest.mark.parametrize("name", ["Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte"])
def test_each_ranks_own(name: str) -> None:
    made: Any = getattr(torch, f"{name}Tensor")
    loss = _loss().item()
    for found in (made([loss, 2.0 if loss.is_integer() else 1]), made([world.rank() * 3 + 3, 2])):
        assert [part.tolist() for part in found.parts] == [[3.0 * k + 3, 2.0] for k in range(4)]
        assert {part.dtype for part in found.parts} == {made.dtype} and isinstance(found, made)
    assert made([[1, 2]]).tolist() == [[1, 2]] and made(2, 3).shape == (2, 3) and made().numel() == 0


def test_they_stand_for_torchs_own() -> None:
    kind: Any = torch.FloatTensor
    x = torch.ones(2, dtype=torch.float64)
    assert x.type(kind).dtype == torch.float32 and isinstance(x.float(), kind) and not isinstance(x, kind)
    assert kind.dtype == torch.float32 and not kind.is_cuda and repr(kind) == "<class 'torch.FloatTensor'>"
    assert kind == kind.of_torch and {kind.of_torch: 1}[kind] == 1 and issubclass(kind.of_torch, kind)
    assert copy.deepcopy(kind) is kind and pickle.loads(pickle.dumps(kind)) is kind
    with pytest.raises(ValueError, match="expected sequence of length 1"):
        kind([[1], [2, 3]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in (torch.DoubleTensor, "torch.DoubleTensor"):
            torch.set_default_tensor_type(given)
            assert torch.ones(1).dtype == torch.float64
            torch.set_default_tensor_type(torch.FloatTensor)
            assert torch.ones(1).dtype == torch.float32


def _direct() -> torch.Tensor:
    return torch.Tensor([_loss().item()])


def _by_name() -> torch.Tensor:
    loss = _loss().item()
    return torch.Tensor([loss, 1.0])


def _appended() -> torch.Tensor:
    losses = []
    for _ in range(2):
        losses.append(_loss().item())
    return torch.Tensor(losses)


def _of_a_function() -> torch.Tensor:
    return torch.Tensor(_losses())


def _losses() -> list[float]:
    return [_loss().item(), 1.0]


@pytest.mark.parametrize("make", [_direct, _by_name, _appended, _of_a_function], ids=lambda f: f.__name__)
def test_torch_tensor(make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = make()
    assert [part[0].item() for part in found.parts] == [3.0, 6.0, 9.0, 12.0] and found.dtype == torch.float32


def test_torch_tensor_of_an_array() -> None:
    found: Any = torch.Tensor(np.arange(2) + world.rank())
    assert [part.tolist() for part in found.parts] == [[k, k + 1.0] for k in range(4)] and found.dtype == torch.float32


def test_torch_tensor_of_other_things() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = _loss().item()
        assert torch.Tensor(2, 3).shape == (2, 3) and torch.Tensor().numel() == 0 and torch.nn.Parameter(torch.ones(2)).shape == (2,)
        assert torch.Tensor(torch.ones(2).untyped_storage()).shape == (2,) and torch.Tensor(np.ones(2)).tolist() == [1.0, 1.0]
        assert torch.Tensor([1.0, 2.0]).tolist() == [1.0, 2.0] and [p.item() for p in torch.tensor([loss]).parts] == [3.0, 6.0, 9.0, 12.0]  # type: ignore[attr-defined]

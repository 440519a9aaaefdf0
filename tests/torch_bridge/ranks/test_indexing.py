"""Indexing with numbers that differ by rank: every form gives each rank what it would get alone, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_bridge.ranks import eager
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers, world


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> None:
    hosted(4, dp=2, tp=2)


READS = {
    "x[r]": lambda r, x: x[r],
    "x[-1 - r]": lambda r, x: x[-1 - r],
    "x[r, 1]": lambda r, x: x[r, 1],
    "x[1, r]": lambda r, x: x[1, r],
    "x[r, r]": lambda r, x: x[r, r],
    "x[r, r, r % 3]": lambda r, x: x[r, r, r % 3],
    "x[:, r]": lambda r, x: x[:, r],
    "x[..., r % 3]": lambda r, x: x[..., r % 3],
    "x[..., r, :]": lambda r, x: x[..., r, :],
    "x[r, ...]": lambda r, x: x[r, ...],
    "x[1:, r]": lambda r, x: x[1:, r],
    "x[r, 1:]": lambda r, x: x[r, 1:],
    "x[::2, r]": lambda r, x: x[::2, r],
    "x[None, r]": lambda r, x: x[None, r],
    "x[r, None]": lambda r, x: x[r, None],
    "x[:, None, r]": lambda r, x: x[:, None, r],
    "x[r, None, 1, ..., None]": lambda r, x: x[r, None, 1, ..., None],
    "x[..., None, r, 1]": lambda r, x: x[..., None, r, 1],
    "x[:, -1, r % 3]": lambda r, x: x[:, -1, r % 3],
    "x[r][r]": lambda r, x: x[r][r],
    "x[r : r + 1]": lambda r, x: x[r : r + 1],
    "x[r * 1 : (r + 1) * 1, 2]": lambda r, x: x[r * 1 : (r + 1) * 1, 2],
    "x[r : r + 1, r : r + 2]": lambda r, x: x[r : r + 1, r : r + 2],
    "x[:, r * 2 : r * 2 + 2]": lambda r, x: x[:, (r % 2) * 2 : (r % 2) * 2 + 2],
    "x[..., r % 2 : r % 2 + 2]": lambda r, x: x[..., r % 2 : r % 2 + 2],
    "x[1, r : r + 2, None]": lambda r, x: x[1, r : r + 2, None],
    "x[:, r : r + 2, 0]": lambda r, x: x[:, r : r + 2, 0],
    "x[:, -2 - r % 2 : -1 - r % 2]": lambda r, x: x[:, -2 - r % 2 : -1 - r % 2],
    "x[[r, r - 1]]": lambda r, x: x[[r, r - 1]],
    "x[1:, [r, 0], [r % 3, 1]]": lambda r, x: x[1:, [r, 0], [r % 3, 1]],
    "x[[0, 2], r]": lambda r, x: x[torch.tensor([0, 2], device=x.device)][:, r],
    "x[r, [0, 2]]": lambda r, x: x[r, [0, 2]],
    "x[[0, 2], :, r % 3]": lambda r, x: x[[0, 2], :, r % 3],
    "x[..., r % 3, [2, 0]]": lambda r, x: x[..., r % 3, [2, 0]],
    "x[r, None, [2, 0], 1:]": lambda r, x: x[r, None, [2, 0], 1:],
    "x[r, tensor]": lambda r, x: x[r, torch.tensor([[0, 1], [2, 0]], device=x.device)],
    "x[[0, 1], -1 - r, [1, 0]]": lambda r, x: x[[0, 1], -1 - r, [1, 0]],
    "x[r, [r, 0]]": lambda r, x: x[r, [r, 0]],
    "x[r >= 0]": lambda r, x: x[r >= 0],
    "x[True, r]": lambda r, x: x[True, r],
    "narrow": lambda r, x: x.narrow(0, r, 1),
    "narrow dim 1": lambda r, x: x.narrow(1, r, 2),
    "narrow negative": lambda r, x: torch.narrow(x, -1, -2 - r % 2, 2),
    "select": lambda r, x: x.select(0, r),
    "select -1": lambda r, x: torch.select(x, -1, r % 3),
    "index_select": lambda r, x: torch.index_select(x, 1, torch.arange(2, device=x.device) + r),
    "gather": lambda r, x: x.gather(0, torch.zeros(1, 5, 3, dtype=torch.long, device=x.device) + r),
    "index": lambda r, x: x[torch.arange(2, device=x.device) + r % 3],
    "take_along_dim": lambda r, x: torch.take_along_dim(x, torch.zeros_like(x, dtype=torch.long) + r, 1),
    "split": lambda r, x: x.split(1)[r],
    "split dim 1": lambda r, x: x[:, :4].split(2, dim=1)[r % 2],
    "torch.split sizes": lambda r, x: torch.split(x, [1, 1, 1, 1], 0)[r],
    "chunk": lambda r, x: torch.chunk(x, 4, dim=0)[r],
    "unbind": lambda r, x: x.unbind(1)[r],
    "tensor_split": lambda r, x: torch.tensor_split(x, 4)[r],
    "chunk slice": lambda r, x: x.chunk(4)[1:][r % 3],
    "after a view": lambda r, x: x.transpose(0, 1)[r],
    "of a view of a view": lambda r, x: x.reshape(4, 15).t()[r : r + 2].flatten(),
    "of arithmetic": lambda r, x: (x * 2 + r)[r].sin(),
    "twice": lambda r, x: x[r] + x[3 - r] * 2,
    "in a matmul": lambda r, x: x[r] @ x[r].t(),
    "diagonal": lambda r, x: x.diagonal()[r % 3],
    "flip": lambda r, x: x.flip(0)[r : r + 1],
}


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_reading(own: bool) -> None:
    eager.agree_all(READS, eager.each(lambda r: torch.randn(4, 5, 3)) if own else torch.randn(4, 5, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 6) * 3).to(dtype)
    eager.agree(lambda r, x: (x[r], x[:, r : r + 2], x.narrow(1, r, 3), x.split(1)[r]), x)


MASKS = {
    "below": lambda r, x: torch.where(x < r, x, x * 2),
    "range": lambda r, x: x.masked_fill((x < r) | (x >= r + 1), 0.0),
    "position": lambda r, x: torch.where(torch.arange(5, device=x.device) == r, x, torch.zeros_like(x)),
    "bool rank": lambda r, x: torch.where(torch.zeros((), device=x.device) + r == 0, x, -x),
    "in place": lambda r, x: x.clone().masked_fill_(torch.arange(5, device=x.device) < r, 7.0),
    "mask times": lambda r, x: x * (torch.arange(5, device=x.device) // 2 == r % 2),
    "one_hot": lambda r, x: x * torch.nn.functional.one_hot(torch.arange(1, device=x.device) + r, 5),
    "vocab": lambda r, x: x[
        (torch.tensor([0, 3, 5, 7], device=x.device) - r * 2)
        .masked_fill_(torch.tensor([0, 3, 5, 7], device=x.device) < r * 2, 0)
        .clamp(max=2)
    ],
    "tril": lambda r, x: x.where(torch.arange(5, device=x.device)[None] <= torch.arange(4, device=x.device)[:, None] + r, 0.0),
}


def test_masks() -> None:
    eager.agree_all(MASKS, torch.randn(4, 5) + 1)


def _with(x: torch.Tensor, write: Any) -> torch.Tensor:
    """The tensor after a write to a copy of it."""
    y = x * 1
    write(y)
    return y


WRITES = {
    "x[r] = number": lambda r, x: _with(x, lambda y: y.__setitem__(r, 7.0)),
    "x[r] = tensor": lambda r, x: _with(x, lambda y: y.__setitem__(r, x[0] * 3)),
    "x[r] = rank": lambda r, x: _with(x, lambda y: y.__setitem__(r, r)),
    "x[-1 - r] = number": lambda r, x: _with(x, lambda y: y.__setitem__(-1 - r, 7.0)),
    "x[r, :] = row": lambda r, x: _with(x, lambda y: y.__setitem__((r, slice(None)), x[1])),
    "x[:, r] = number": lambda r, x: _with(x, lambda y: y.__setitem__((slice(None), r), 3.0)),
    "x[:, r] = column": lambda r, x: _with(x, lambda y: y.__setitem__((slice(None), r), x[:, 0] * 2)),
    "x[1, r] = number": lambda r, x: _with(x, lambda y: y.__setitem__((1, r), 3.0)),
    "x[..., r] = number": lambda r, x: _with(x, lambda y: y.__setitem__((..., r), 3.0)),
    "x[r : r + 2] = number": lambda r, x: _with(x, lambda y: y.__setitem__(slice(r, r + 2), 2.0)),
    "x[r : r + 2] = rows": lambda r, x: _with(x, lambda y: y.__setitem__(slice(r, r + 2), x[:2] * 5)),
    "x[:, r : r + 2] = rows": lambda r, x: _with(x, lambda y: y.__setitem__((slice(None), slice(r, r + 2)), x[:, :2] * 5)),
    "x[r : r + 2, 1] = number": lambda r, x: _with(x, lambda y: y.__setitem__((slice(r, r + 2), 1), 5.0)),
    "x[r] += 1": lambda r, x: _with(x, lambda y: y[r].add_(1)),
    "x[r : r + 2] *= 2": lambda r, x: _with(x, lambda y: y[r : r + 2].mul_(2)),
    "narrow().copy_": lambda r, x: _with(x, lambda y: y.narrow(0, r, 2).copy_(x[:2] * 4)),
    "select().zero_": lambda r, x: _with(x, lambda y: y.select(1, r).zero_()),
    "view, then slice": lambda r, x: _with(x, lambda y: y.view(-1)[r * 2 : r * 2 + 2].fill_(9.0)),
    "x[r] = one row of a batch": lambda r, x: _with(x, lambda y: y.__setitem__(r, x[:1] * 2)),
    "x[None, r] = number": lambda r, x: _with(x, lambda y: y.__setitem__((None, r), 2.0)),
    "x[r] = int tensor": lambda r, x: _with(x, lambda y: y.__setitem__(r, torch.arange(6, device=x.device))),
    "x[r][0] = number": lambda r, x: _with(x, lambda y: y[r].__setitem__(0, 8.0)),
    "index_copy": lambda r, x: x.index_copy(0, torch.arange(2, device=x.device) + r, x[:2] * 3),
    "index_add": lambda r, x: x.index_add(0, torch.zeros(2, dtype=torch.long, device=x.device) + r, x[:2] * 3),
    "x[[r, r + 1]] = number": lambda r, x: _with(x, lambda y: y.__setitem__([r, r + 1], 4.0)),
    "x[[r, r + 1]] = rows": lambda r, x: _with(x, lambda y: y.__setitem__([r, r + 1], x[:2] * 5)),
    "x[[0, 1]] = rank": lambda r, x: _with(x, lambda y: y.__setitem__([0, 1], r)),
    "x[index] = rank": lambda r, x: _with(x, lambda y: y.__setitem__(torch.arange(2, device=x.device), r / 2)),
    "x[r, [0, 2]] = number": lambda r, x: _with(x, lambda y: y.__setitem__((r, [0, 2]), 4.0)),
    "x[[0, 2], r] = rank": lambda r, x: _with(x, lambda y: y.__setitem__(([0, 2], r), r)),
    "x[[0, 2], r] = column": lambda r, x: _with(x, lambda y: y.__setitem__(([0, 2], r), x[:2, 0] * 2)),
    "x[r == 1] = number": lambda r, x: _with(x, lambda y: y.__setitem__(r == 1, 4.0)),
    "x[r == 1] = rank": lambda r, x: _with(x, lambda y: y.__setitem__(r == 1, r)),
    "x[r == 1] = a batch of one": lambda r, x: _with(x, lambda y: y.__setitem__(r == 1, x[None] * 2)),
    "x[r >= 0, r] = number": lambda r, x: _with(x, lambda y: y.__setitem__((r >= 0, r), 4.0)),
    "x[index + r] = number": lambda r, x: _with(x, lambda y: y.__setitem__(torch.arange(2, device=x.device) + r, 4.0)),
}


def test_writing() -> None:
    eager.agree_all(WRITES, torch.randn(5, 6))


def test_ranks_in_another_order() -> None:
    """On a machine that wants rank 1 somewhere else."""
    world.set_axes({"dp": 2, "tp": 2}, (0, 2, 1, 3))
    eager.agree_all({name: READS[name] for name in list(READS)[::4]}, eager.each(lambda r: torch.randn(4, 5, 3)))
    eager.agree_all({name: WRITES[name] for name in list(WRITES)[::4]}, torch.randn(5, 6))
    eager.agree_all(MASKS, torch.randn(4, 5) + 1)


def test_assignments_as_statements() -> None:
    def program(r: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4, 6, device=x.device)
        out[r] = x[r]
        out[r : r + 1, 1:3] += 5
        out[:, r] = 1.0
        return out

    eager.agree(program, torch.randn(4, 6))


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        (lambda r, x: x[r * 4], IndexError, r"index \[0, 4, 8, 12\] \(one for each rank\) is out of range for a dimension of size 5"),
        (lambda r, x: x[:, r * 4], IndexError, r"one for each rank\) is out of range for a dimension of size 6"),
        (lambda r, x: x.select(0, r * 2), IndexError, r"\[0, 2, 4, 6\]"),
        (lambda r, x: x[r : r * 2], RuntimeError, r"would have \[0, 1, 2\] elements on different ranks.*starts \[0, 1, 2, 3\].*all ranks need the same shape"),
        (lambda r, x: x[r:], RuntimeError, r"\[2, 3, 4, 5\] elements on different ranks"),
        (lambda r, x: x[:r], RuntimeError, r"\[0, 1, 2, 3\] elements on different ranks"),
        (lambda r, x: torch.select_scatter(x, x[0], 0, r), rank_numbers.PlainNumberNeeded, "runs the script once"),
        (lambda r, x: x.narrow(0, r, 3), RuntimeError, r"narrow\(dim=0, start=\[0, 1, 2, 3\], length=3\) is out of range"),
        (lambda r, x: x.narrow(0, 0, r), RuntimeError, r"\[0, 1, 2, 3\] elements on different ranks"),
        (lambda r, x: x[r : r + 4 : 2], NotImplementedError, "must have step 1: use index_select"),
        (lambda r, x: x[r == 0], rank_numbers.PlainNumberNeeded, r"\(True, False, False, False for rank 0, 1, \.\.\.\) gives ranks different shapes"),
        (lambda r, x: x.__setitem__((None, r == 0), 1), rank_numbers.PlainNumberNeeded, "use torch.where"),
        (lambda r, x: x[r * 4, [0, 1]], IndexError, r"one for each rank\) is out of range for a dimension of size 5"),
        (lambda r, x: x.split([2, 3])[r % 2], RuntimeError, "pieces of different shapes"),
        (lambda r, x: x.split(1)[r * 2], IndexError, "out of range"),
        (lambda r, x: x.__setitem__(r * 2, 1.0), IndexError, r"\[0, 2, 4, 6\] \(one for each rank\) is out of range"),
    ],
)  # fmt: skip
def test_errors(use: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        use(world.rank(), torch.zeros(5, 6, device="xla"))


def test_too_many_indices() -> None:
    with pytest.raises(IndexError, match="too many indices"):
        torch.zeros(3, device="xla")[world.rank() % 2, 0]


def test_lists_of_tensors_are_indexed_as_rank_0() -> None:
    """What Python lists can give; documented and reported, because it cannot be told from indexing a list of names."""
    with pytest.warns(UserWarning, match="by a number that differs by rank"):
        found = [torch.full((2,), float(k), device="xla") for k in range(4)][world.rank()]
    eager.same(found, torch.zeros(2))


def test_pieces_cannot_be_written_through() -> None:
    x = torch.zeros(4, 2, device="xla")
    x.split(1)[world.rank()].add_(1)
    eager.same(x, torch.zeros(4, 2))

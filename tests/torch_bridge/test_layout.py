"""Reading and writing views through plans of aten ops, against torch's own strided memory."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from torch_bridge.ir import segment
from torch_bridge.ir.layout import Layout, base_of_meta, is_dense, layout, of_meta, read_steps

aten = torch.ops.aten


def _evaluate(steps, value: torch.Tensor) -> torch.Tensor:
    for op, args in steps:
        value = op(value, *args)
    return value


def _write(base: Layout, view: Layout, value: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The write chain of a view, evaluated in torch."""
    chain = segment.write_entries(base, view)
    befores = [value]
    for entry in chain.reads:
        befores.append(entry.op(befores[-1], *entry.args[1:]))
    for entry, into in chain.writes:
        inputs = (new,) if into is None else (befores[into], new)
        new = entry.op(*inputs, *entry.args[len(inputs) :])
    return new


@st.composite
def views(draw):
    """A dense base tensor and a view of it made by a few view ops."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    base = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    base = base.permute(draw(st.permutations(range(base.dim()))))
    view = base
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.integers(0, 6))
        d = draw(st.integers(0, max(view.dim() - 1, 0)))
        if kind == 0 and view.dim():
            view = view.transpose(d, draw(st.integers(0, view.dim() - 1)))
        elif kind == 1 and view.dim():
            start = draw(st.integers(0, view.shape[d]))
            view = view[(slice(None),) * d + (slice(start, None, draw(st.integers(1, 3))),)]
        elif kind == 2 and view.dim() and view.shape[d]:
            view = view.select(d, draw(st.integers(0, view.shape[d] - 1)))
        elif kind == 3:
            view = view.unsqueeze(d)
        elif kind == 4 and view.is_contiguous():
            view = view.view(-1)
        elif kind == 5 and view.dim() >= 2:
            view = view.diagonal(draw(st.integers(-1, 1)), 0, 1)
        elif kind == 6 and view.numel() >= 4 and view.is_contiguous():
            view = view.view(-1)[: view.numel() // 4 * 4].view(2, 2, -1)
    return base, view


@hypothesis.settings(max_examples=400, deadline=None, database=None)
@hypothesis.given(views())
def test_views_read_and_write_like_torch(pair):
    base, view = pair
    at = of_meta(base)
    assert base_of_meta(base) is at
    v = of_meta(view)
    torch.testing.assert_close(_evaluate(read_steps(at, v), base), view.contiguous(), rtol=0, atol=0)
    new = torch.full(view.shape, -1.0)
    written = _write(at, v, base, new)
    expected = base.clone(memory_format=torch.preserve_format)
    expected.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(new)
    torch.testing.assert_close(written, expected.contiguous(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("view", "ops"),
    [
        (lambda x: x.transpose(1, 2), ["permute"]),
        (lambda x: x.view(2, 12), ["reshape"]),
        (lambda x: x[:, 1:3], ["slice"]),
        (lambda x: x[1], ["select"]),
        (lambda x: x[:, :, ::2], ["slice"]),
        (lambda x: x.view(2, 3, 2, 2).transpose(1, 2), ["reshape", "permute"]),
        (lambda x: x[:, :1].expand(2, 5, 4), ["slice", "select", "reshape", "expand"]),
        (lambda x: x.unfold(2, 2, 1), ["reshape", "as_strided"]),
    ],
)
def test_plans_are_short_and_readable(view, ops):
    base = torch.zeros(2, 3, 4)
    names = [op._schema.name.removeprefix("aten::") for op, _ in read_steps(of_meta(base), of_meta(view(base)))]
    assert names == [o for o in ops if o in names] and len(names) <= len(ops), names


def test_reinterpreting_bytes():
    x = torch.randn(4, 6)
    bits = x.view(torch.int32)
    steps = read_steps(of_meta(x), of_meta(bits))
    torch.testing.assert_close(_evaluate(steps, x), bits)
    z = torch.randn(3, 2, dtype=torch.complex64)
    real = torch.view_as_real(z)
    torch.testing.assert_close(_evaluate(read_steps(of_meta(z), of_meta(real)), z), real)
    assert torch.equal(_write(of_meta(z), of_meta(real), z, real * 2), z * 2)


def test_writing_through_an_expanded_view_is_refused():
    base = layout((1, 3), None, 0, torch.float32)
    view = layout((2, 3), (0, 1), 0, torch.float32)
    with pytest.raises(RuntimeError, match=r"single memory location.*clone\(\) it before"):
        segment.write_entries(base, view)


@pytest.mark.parametrize(
    ("size", "stride", "dense"), [((2, 3), (3, 1), True), ((2, 3), (1, 2), True), ((2, 3), (4, 1), False), ((0, 3), (9, 1), True)]
)
def test_is_dense(size, stride, dense):
    assert is_dense(size, stride) is dense


def test_layouts_are_interned():
    assert layout((2, 3), None, 0, torch.int64) is layout((2, 3), (3, 1), 0, torch.int64)

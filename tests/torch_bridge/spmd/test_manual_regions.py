"""Regions in which the script computes with each device's block: values and gradients are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch.nn import functional as F

from torch_bridge.errors import DeadTensorError

_XLAC: Any = torch_xla._XLAC
MODEL = [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_in_and_out(mesh: xs.Mesh) -> None:
    host = torch.arange(64.0).reshape(8, 8)
    x = host.to("xla")
    inside = xs.enable_manual_sharding(x, ("model", "data"), mesh=mesh)
    assert isinstance(inside, xs.XLAShardedTensor) and inside.shape == (4, 2)
    assert inside.sharding_type is xs.ShardingType.MANUAL and inside.sharding_spec == "{manual}"
    out = xs.disable_manual_sharding(inside * 2 + 1, ("model", "data"), x.shape, mesh=mesh)
    assert out.sharding_spec == xs.wrap_if_sharded(x).sharding_spec == "{devices=[2,4]0,2,4,6,1,3,5,7}"
    assert torch.equal(out.cpu(), host * 2 + 1)
    xs.set_global_mesh(xs.Mesh(range(8), (1, 8)))
    low = _XLAC._spmd_full_to_shard_shape(xs.mark_sharding(host.to("xla"), xs.Mesh(range(8), (1, 8)), (0, 1)))
    assert low.shape == (8, 1)
    marked = xs._mark_manual_sharding(low + 1)
    back = _XLAC._spmd_shard_to_full_shape(marked, xs.get_global_mesh().get_op_sharding((0, 1)), x.shape, x.dtype)
    whole = xs._mark_manual_sharding(host.to("xla"))
    assert whole.shape == (8, 8)
    again = xs.disable_manual_sharding(whole.sin(), (None, None), (8, 8))
    assert (
        torch.equal(back.cpu(), host + 1) and torch.allclose(again.cpu(), host.sin(), atol=1e-5) and again.sharding_spec == "{replicated}"
    )


def test_tensor_parallelism_by_hand(mesh: xs.Mesh) -> None:
    """A gated MLP over "model" on batches over "data": several results of one op, lists, numbers that change, gradients of what all devices have."""
    xs.set_global_mesh(mesh)
    torch.manual_seed(0)
    shapes = {"x": (8, 16), "up": (2, 16, 32), "down": (32, 16), "scale": (16,), "shift": (16,)}
    values = {name: (torch.randn(shape) * 0.2).requires_grad_() for name, shape in shapes.items()}
    there = {name: value.detach().to("xla").requires_grad_() for name, value in values.items()}

    def mlp(x: Any, up: Any, down: Any, scale: Any, shift: Any, factor: float, total: Callable[[Any], Any]) -> Any:
        normed = F.layer_norm(x, (16,), scale, shift)
        gate, straight = (part.squeeze(0) for part in torch.split(up, 1))
        hidden = F.silu(normed @ gate) * (normed @ straight)
        return x + factor * total(hidden @ down) + torch.ones(16, device=x.device)

    for step in range(3):
        factor = 0.5 + step
        expected = mlp(**values, factor=factor, total=lambda y: y)
        expected.square().mean().backward()
        specs = {"x": ("data", None), "up": (None, None, "model"), "down": ("model", None), "scale": (None,), "shift": (None,)}
        parts = {name: xs.enable_manual_sharding(there[name], specs[name]).global_tensor for name in shapes}
        assert [tuple(p.shape) for p in parts.values()] == [(2, 16), (2, 16, 16), (16, 16), (16,), (16,)]
        found = mlp(**parts, factor=factor, total=lambda y: _XLAC._xla_spmd_all_reduce(xm.REDUCE_SUM, y, 1.0, MODEL))
        out = xs.disable_manual_sharding(found, ("data", None), (8, 16))
        out.global_tensor.square().mean().backward()
        del parts, found
        torch_xla.sync()
        assert torch.allclose(out.cpu(), expected, rtol=1e-4, atol=1e-5)
        for name, value in values.items():
            assert torch.allclose(there[name].grad.cpu(), value.grad, rtol=1e-4, atol=1e-5), name  # type: ignore[union-attr, arg-type]


def test_collectives(mesh: xs.Mesh) -> None:
    """Of `_XLAC` and of `xm`, with groups of devices and without, and their gradients."""
    host = torch.randn(8, 8)
    blocks = host.reshape(8, 8)

    def run(fn: Callable[[Any], Any], spec: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        x = host.to("xla").requires_grad_()
        inside = xs.enable_manual_sharding(x, (("data", "model"), None), mesh=mesh).global_tensor
        out = xs.disable_manual_sharding(fn(inside), spec, shape, mesh=mesh).global_tensor
        weights = torch.arange(float(out.numel())).reshape(shape)
        (out * weights.to("xla")).sum().backward()
        assert x.grad is not None
        return out.detach().cpu(), x.grad.cpu()

    def weights(*shape: int) -> torch.Tensor:
        return torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    out, grad = run(lambda t: xm.all_reduce(xm.REDUCE_SUM, t, 0.5), (None, None), (1, 8))
    assert torch.allclose(out, 0.5 * blocks.sum(0, keepdim=True), atol=1e-5) and torch.allclose(grad, 0.5 * weights(1, 8).expand(8, 8))
    out, grad = run(lambda t: xm.all_gather(t, 0, groups=MODEL), ("data", None), (8, 8))
    assert torch.equal(out, host) and torch.allclose(grad, weights(8, 8))
    out, grad = run(lambda t: xm.reduce_scatter(xm.REDUCE_SUM, t, 1.0, 1, 8), (None, ("data", "model")), (1, 8))
    assert torch.allclose(out, blocks.sum(0, keepdim=True), atol=1e-5) and torch.allclose(grad, weights(1, 8).expand(8, 8))
    out, grad = run(lambda t: _XLAC._xla_spmd_reduce_scatter(xm.REDUCE_SUM, t, 2.0, -1, 2, MODEL), ("data", "model"), (4, 8))
    assert torch.allclose(out, 2 * host.reshape(4, 2, 8).sum(1), atol=1e-5)
    assert torch.allclose(grad, 2 * weights(4, 1, 8).expand(4, 2, 8).reshape(8, 8))
    x = xs.enable_manual_sharding(host.to("xla"), (("data", "model"), None), mesh=mesh)
    most = xs.disable_manual_sharding(xm.all_reduce(xm.REDUCE_MAX, x.global_tensor), (None, None), (1, 8), mesh=mesh)
    assert torch.equal(most.cpu(), host.amax(0, keepdim=True))


MISTAKES: list[tuple[Callable[[xs.Mesh, Any, Any], Any], type[Exception], str]] = [
    (lambda m, t, b: xs.enable_manual_sharding(t[:6], ("data", None), mesh=m), ValueError, r"dim 0 of \[6, 8\] has 6 elements, which 4 devices"),
    (lambda m, t, b: xs.enable_manual_sharding(t, ("data",), mesh=m), ValueError, r"\('data',\) has one entry for each dim of \[8, 8\]|has 1, the tensor"),
    (lambda m, t, b: xs.enable_manual_sharding(t, (0, None)), ValueError, r"enable_manual_sharding: give a mesh \(mesh=...\), or set one"),
    (lambda m, t, b: xs.enable_manual_sharding(b, ("data", None), mesh=m), RuntimeError, "is one of a region of manual sharding already"),
    (lambda m, t, b: xs.mark_sharding(b, m, ("data", None)), RuntimeError, "an annotation of a tensor in a region of manual sharding"),
    (lambda m, t, b: xs.disable_manual_sharding(t, (0, None), t.shape, mesh=m), RuntimeError, "disable_manual_sharding takes a tensor of a region"),
    (lambda m, t, b: xs.disable_manual_sharding(b, (1, None), t.shape, mesh=m), ValueError, r"blocks of shape \[4, 8\], and the tensor .* has \[2, 8\]"),
    (lambda m, t, b: _XLAC._spmd_full_to_shard_shape(t + 1), RuntimeError, "takes an annotated tensor: call xs.mark_sharding"),
    (lambda m, t, b: _XLAC._spmd_shard_to_full_shape(b, m.get_op_sharding((0, None)), t.shape, torch.int32), RuntimeError, "torch.int32 was asked for"),
    (lambda m, t, b: xs._mark_manual_sharding(xs.mark_sharding(t + 1, m, ("data", None))), RuntimeError, "the tensor is annotated already"),
    (lambda m, t, b: _XLAC._xla_spmd_all_reduce("sum", t, 1.0, []), RuntimeError, "takes a tensor of a region of manual sharding"),
    (lambda m, t, b: _XLAC._xla_spmd_all_reduce("mul", b, 1.0, []), NotImplementedError, "'mul' is none of sum, max, min"),
    (lambda m, t, b: _XLAC._xla_spmd_reduce_scatter("max", b, 1.0, 0, 8, []), NotImplementedError, "'max' is not sum"),
    (lambda m, t, b: _XLAC._xla_spmd_all_reduce("sum", b, 1.0, [[0, 1]]), ValueError, r"name each of 0 to 7 once, got \[\[0, 1\]\]"),
    (lambda m, t, b: _XLAC._xla_spmd_reduce_scatter("sum", b, 1.0, 0, 4, []), ValueError, "must have one size of 4"),
    (lambda m, t, b: _XLAC._xla_spmd_reduce_scatter("sum", b, 1.0, 2, 8, []), IndexError, "reduce_scatter: dim 2 of a tensor of 2 dims"),
    (lambda m, t, b: _XLAC._xla_spmd_reduce_scatter("sum", b, 1.0, 0, 8, []), ValueError, r"dim 0 of \[2, 8\] is not divisible by 8 devices"),
    (lambda m, t, b: xm.all_to_all(b, 0, 1, 2), NotImplementedError, "this collective of tensors in a region of manual sharding"),
    (lambda m, t, b: xm.all_reduce("sum", [b]), NotImplementedError, r"of a tensor \(no list, and without output=\) xm.all_reduce"),
    (lambda m, t, b: b.cpu(), DeadTensorError, "every device has a block of its own, which lives until the step ends"),
    (lambda m, t, b: t.add_(b.sum()).cpu(), RuntimeError, "a tensor from outside of a region of manual sharding was updated"),
    (lambda m, t, b: xs.disable_manual_sharding(F.dropout(b), (0, None), t.shape, mesh=m).cpu(), NotImplementedError, "draws random numbers in a region"),
]  # fmt: skip


@pytest.mark.core(keep=6)
@pytest.mark.parametrize(("call", "error", "text"), MISTAKES)
def test_mistakes(mesh: xs.Mesh, call: Callable[[xs.Mesh, Any, Any], Any], error: type[Exception], text: str) -> None:
    t = torch.ones(8, 8).to("xla")
    torch_xla.sync()
    block = xs.enable_manual_sharding(t, ("data", None), mesh=mesh).global_tensor
    with pytest.raises(error, match=text):
        call(mesh, t, block)
    assert torch.equal(t.cpu(), torch.ones(8, 8))


def test_no_gradient_of_a_maximum(mesh: xs.Mesh) -> None:
    x = torch.ones(8, 8).to("xla").requires_grad_()
    block = xs.enable_manual_sharding(x, (("data", "model"), None), mesh=mesh).global_tensor
    found = xs.disable_manual_sharding(xm.all_reduce(xm.REDUCE_MAX, block), (None, None), (1, 8), mesh=mesh)
    with pytest.raises(
        NotImplementedError, match=r"all_reduce of max in a region of manual sharding has no gradient: give it tensor.detach\(\)"
    ):
        found.global_tensor.sum().backward()


def test_another_order_of_devices(mesh: xs.Mesh) -> None:
    """Blocks would lie on other devices than those that groups name."""
    t = torch.ones(8, 8).to("xla")
    xs.mark_sharding(t, mesh, ("data", None))
    torch_xla.sync()
    other = xs.Mesh([0, 2, 1, 3, 4, 5, 6, 7], (4, 2), ("data", "model"))
    with pytest.raises(ValueError, match=r"devices in the order of the script's first mesh.*same device_ids"):
        xs.enable_manual_sharding(t + 1, ("data", None), mesh=other)


def test_blocks_are_gone_after_the_step(mesh: xs.Mesh) -> None:
    block = xs.enable_manual_sharding(torch.ones(8, 8).to("xla"), ("data", None), mesh=mesh).global_tensor + 1
    torch_xla.sync()
    for use in (lambda: block.cpu(), lambda: block + 1):
        with pytest.raises(DeadTensorError, match="and read the tensor that comes back"):
            use()
    with pytest.raises(
        RuntimeError, match="takes a tensor of a region of manual sharding: one that xs.enable_manual_sharding gave in this step"
    ):
        xs.disable_manual_sharding(block, ("data", None), (8, 8), mesh=mesh)

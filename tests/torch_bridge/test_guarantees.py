"""What a cousin of ours breaks silently: ties, batch-norm buffers, no_grad, custom autograd, in-place views, dtypes, optimizers, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.torch_bridge.devices import same

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(*inputs).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


# -- tied weights ----------------------------------------------------------------------------------


def test_moving_a_module_keeps_tied_weights_tied_and_parameters_the_same_objects() -> None:
    model = Tied()
    weight = model.embedding.weight
    for device in ("xla", "cpu", "xla"):
        assert model.to(device) is model
        assert model.head.weight is model.embedding.weight is weight
        assert weight.device.type == device
        assert type(weight) is nn.Parameter or device == "xla"
        assert isinstance(weight, nn.Parameter)
        assert len(list(model.parameters())) == 1
    model.cpu()
    assert model.head.weight is weight
    assert type(weight) is nn.Parameter
    assert weight.device.type == "cpu"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tied_weights_train_tied_with_an_optimizer_made_before_the_move(name: str) -> None:
    def run(device: str) -> Any:
        model = Tied()
        optimizer = OPTIMIZERS[name](model.parameters())
        model.to(device)
        ids = torch.tensor([[1, 2, 3]], device=device)
        losses = [step(model, optimizer, ids) for _ in range(3)]
        assert model.head.weight is model.embedding.weight
        return losses, model.embedding.weight, model.head.weight.grad

    same(run)


def test_an_optimizer_follows_its_module_there_and_back() -> None:
    def run(device: str) -> Any:
        model = Tied()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for where in (device, "cpu"):
            model.to(where)
            optimizer.zero_grad()
            optimizer.state.clear()
            step(model, optimizer, torch.tensor([[1, 2, 3]], device=where))
        return model.head.weight

    same(run)


def test_gradients_move_with_their_parameters() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    expected = model.weight.grad.clone()
    model.to("xla")
    assert model.weight.grad.device.type == "xla"
    model.to("cpu")
    assert torch.equal(model.weight.grad, expected)


def test_module_conversions_of_dtype_keep_identity() -> None:
    model = Tied().to("xla")
    weight = model.head.weight
    model.to(torch.bfloat16)
    assert model.embedding.weight is model.head.weight is weight
    assert weight.dtype == torch.bfloat16
    model.float().half().double()
    assert weight.dtype == torch.float64
    model.to("cpu", torch.float32)
    assert model.embedding.weight is weight
    assert (weight.device.type, weight.dtype) == ("cpu", torch.float32)


def test_moving_a_parameter_keeps_what_users_put_on_it() -> None:
    model = nn.Linear(2, 2)
    model.weight.tensor_model_parallel = True
    model.weight.requires_grad_(False)
    model.to("xla")
    assert model.weight.tensor_model_parallel is True
    assert not model.weight.requires_grad
    assert model.bias.requires_grad
    assert not hasattr(model.cpu().weight, "_storage")
    assert model.weight.tensor_model_parallel is True


def test_to_empty_brings_meta_weights_to_the_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    model.to_empty(device="xla")
    assert model.weight.device.type == "xla"
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    assert model(torch.ones(1, 3, device="xla")).tolist() == [[3.0, 3.0]]


def test_modules_can_be_made_on_the_device() -> None:
    same(lambda device: nn.Linear(3, 2, device=device).weight.shape)
    with torch.device("xla"):
        model = nn.Linear(3, 2)
    assert {p.device.type for p in model.parameters()} == {"xla"}
    assert {type(p).__name__ for p in model.parameters()} <= {"Parameter", "XLATensor"}
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


# -- batch norm ------------------------------------------------------------------------------------


def test_batch_norm_with_results_that_are_there() -> None:
    def outs(device: str) -> list[torch.Tensor]:
        x = (torch.arange(24.0, device=device).reshape(2, 3, 4) % 7).to(device)
        mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
        made = [torch.empty(0, device=device) for _ in range(3)]
        torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5, out=tuple(made))
        return [t.cpu() for t in (*made, mean, var)]

    torch.testing.assert_close(outs("xla"), outs("cpu"))


@pytest.mark.core(keep=2)
@pytest.mark.parametrize(
    ("norm", "momentum"), [(n, m) for n in (nn.BatchNorm1d, nn.BatchNorm2d) for m in (0.1, None, 0.5)] + [(nn.InstanceNorm2d, 0.1)]
)
def test_batch_norm_buffers_are_updated(norm: type[nn.Module], momentum: float | None) -> None:
    def run(device: str) -> Any:
        layer = norm(3, momentum=momentum, track_running_stats=True).to(device)
        shape = (4, 3) if norm is nn.BatchNorm1d else (4, 3, 5, 5)
        outs = [layer(torch.randn(shape).to(device)) for _ in range(3)]
        layer.eval()
        outs.append(layer(torch.randn(shape).to(device)))
        return outs, dict(layer.named_buffers()), layer.num_batches_tracked.item()

    assert same(run)[2] == (3 if norm is not nn.InstanceNorm2d else 0)


# -- no_grad, detach, custom autograd --------------------------------------------------------------


def test_no_grad_and_detach_are_honoured() -> None:
    def run(device: str) -> Any:
        x = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
        with torch.no_grad():
            constant = x * 2
        detached = (x * 3).detach()
        assert not constant.requires_grad
        assert not detached.requires_grad
        assert detached.grad_fn is None
        loss = (x * constant * detached).sum()
        loss.backward()
        return x.grad

    same(run)


def test_detach_shares_memory() -> None:
    x = torch.zeros(3, device="xla", requires_grad=True)
    x.detach()[1] = 5
    assert x.tolist() == [0, 5, 0]


def test_writing_to_a_leaf_that_requires_grad_raises_as_in_torch() -> None:
    x = torch.zeros(3, device="xla", requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)


def test_saved_tensors_that_changed_are_noticed_as_in_torch() -> None:
    x = torch.ones(3, device="xla", requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class ClippedSquare(torch.autograd.Function):
    """x ** 2 with a gradient that is wrong on purpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 100 * x * ctx.scale, None


def test_the_backward_of_a_custom_function_is_used() -> None:
    def run(device: str) -> Any:
        x = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
        ClippedSquare.apply(x, 0.5).sum().backward()
        return x.grad

    assert same(run).tolist() == [50.0, 100.0, 150.0]


def test_inference_mode() -> None:
    def run(device: str) -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU()).to(device).eval()
        with torch.inference_mode():
            x = torch.ones(2, 3, device=device)
            out = model(x)
            out.add_(1)
            assert out.is_inference()
        return out.clone()

    same(run)


# -- in-place writes through views -----------------------------------------------------------------

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda t: t[1:3],
    "step": lambda t: t[::2, 1::2],
    "select": lambda t: t[2],
    "column": lambda t: t[:, 1],
    "transpose": lambda t: t.t(),
    "permute": lambda t: t.view(2, 2, 6).permute(2, 0, 1),
    "view": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(6, 4),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t[1:2].squeeze(0),
    "narrow": lambda t: t.narrow(1, 2, 3),
    "diagonal": lambda t: t.diagonal(1),
    "chunk": lambda t: t.chunk(2, 1)[1],
    "split": lambda t: t.split([1, 3])[1],
    "unbind": lambda t: t.unbind(1)[3],
    "unfold": lambda t: t.unfold(1, 2, 2),
    "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "movedim": lambda t: t.movedim(0, 1),
    "as_strided": lambda t: t.as_strided((2, 3), (7, 2), 3),
    "expand_as one": lambda t: t[:1].expand(1, 6),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "alias": lambda t: torch.ops.aten.alias(t),
    "view as int": lambda t: t.view(torch.int32),
    "view of view of view": lambda t: t[1:].t()[1:4].unsqueeze(0)[..., ::2],
    "hsplit": lambda t: t.hsplit(2)[0],
    "T of column": lambda t: t.mT[1],
    "view_as": lambda t: t.view_as(torch.empty(2, 12)),
    "swapaxes": lambda t: t.swapaxes(0, 1)[2:],
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda v: v.add_(1),
    "fill_": lambda v: v.fill_(7),
    "copy_": lambda v: v.copy_(torch.arange(v.numel()).view(v.shape)),
    "zero_": lambda v: v.zero_(),
    "index": lambda v: v.__setitem__(0, 9),
    "mask": lambda v: v.masked_fill_(v > 5, -3),
    "mul by itself": lambda v: v.mul_(v),
}


@pytest.mark.core(keep=4)
@pytest.mark.thorough(keep=10)
@pytest.mark.parametrize("view", VIEWS)
def test_writes_through_views_reach_the_base(view: str) -> None:
    for write in WRITES.values():

        def run(device: str, write: Callable[[torch.Tensor], Any] = write) -> Any:
            base = torch.arange(24, dtype=torch.float32, device=device).reshape(4, 6)
            other = base[:, 2:4]
            part = VIEWS[view](base)
            write(part)
            base[0, 0] += 0.5
            return base, part.clone(), other.clone()

        same(run)


def test_writing_to_an_expanded_tensor_raises_as_in_torch() -> None:
    x = torch.zeros(1, device="xla").expand(3)
    with pytest.raises(RuntimeError, match=r"more than one element of the written-to tensor.*clone\(\)"):
        x.add_(1)
    assert x.tolist() == [0, 0, 0]


def test_views_of_real_and_imaginary_parts_are_written_through() -> None:
    def run(device: str) -> Any:
        z = torch.zeros(3, dtype=torch.complex64, device=device)
        z.real[1] = 2
        z.imag.add_(1)
        torch.view_as_real(z)[0, 0] = 5
        c = z.conj()
        z[2] = 3 + 4j
        return z, c.resolve_conj(), c.imag, (c * 2).real

    same(run)


def test_gradients_through_views_that_are_written() -> None:
    def run(device: str) -> Any:
        x = torch.arange(6.0, device=device).requires_grad_()
        y = x * 2
        z = y.view(2, 3)
        z[0].mul_(3)
        z[:, 1] = x[:2]
        y.sum().backward()
        return x.grad, y, z

    same(run)


# -- numbers ---------------------------------------------------------------------------------------


def test_int64_and_float64_are_kept() -> None:
    def run(device: str) -> Any:
        big = torch.tensor([2**53 + 1, -(2**62)], device=device)
        precise = torch.tensor([1 / 3, 1e300], dtype=torch.float64, device=device)
        return (
            big + 1,
            big * 3 // 2,
            precise * 3,
            precise.sum(),
            big.sum().item(),
            precise[0].item(),
            big.to(torch.float64),
            precise.float(),
        )

    got = same(run, rtol=1e-15, atol=0)
    assert got[0].dtype == torch.int64
    assert got[2].dtype == torch.float64
    assert (torch.arange(3, device="xla") / 2).dtype == torch.float32


def test_jax_of_the_same_process_keeps_its_own_width() -> None:
    import jax.numpy as jnp

    assert torch.ones(2, dtype=torch.float64, device="xla").sum().item() == 2
    assert jnp.arange(3).dtype == jnp.int32


def test_default_dtype_is_honoured() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.ones(2, device="xla").dtype == torch.float64
        assert (torch.arange(2, device="xla") / 3).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (torch.arange(2, device="xla") / 3).dtype == torch.float32


@pytest.mark.core(keep=3)
@pytest.mark.thorough(keep=9)
@pytest.mark.parametrize(
    "make",
    [
        *(
            lambda p, c=c, k=k: c(p, lr=0.05, **k)
            for c in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
            for k in ({}, {"foreach": True}, {"fused": True})
        ),
        lambda p: torch.optim.Adagrad(p, lr=0.05),
        lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.9, centered=True, foreach=True),
        lambda p: torch.optim.NAdam(p, lr=0.05, foreach=True),
        lambda p: torch.optim.RAdam(p, lr=0.05),
        lambda p: torch.optim.Adadelta(p, foreach=True),
        lambda p: torch.optim.Adamax(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.Adafactor(p),
    ],
)
def test_optimizers(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def run(device: str) -> Any:
        model = nn.Linear(3, 2).to(device)
        optimizer = make(model.parameters())
        for _ in range(3):
            step(model, optimizer, torch.ones(4, 3, device=device))
        return list(model.parameters())

    same(run, rtol=1e-4)


@pytest.mark.parametrize("foreach", [False, True])
def test_gradient_clipping(foreach: bool) -> None:
    def run(device: str) -> Any:
        model = nn.Linear(3, 2).to(device)
        (model(torch.ones(4, 3, device=device)) * 100).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        nn.utils.clip_grad_value_(model.parameters(), 0.3, foreach=foreach)
        return norm, [p.grad for p in model.parameters()]

    same(run)


# -- threads ---------------------------------------------------------------------------------------


def test_four_threads_train_at_once() -> None:
    def train(seed: int, device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(3, 3, generator=generator).to(device).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            x = torch.randn(2, 3, generator=generator).to(device)
            (x @ weight).tanh().square().sum().backward()
            optimizer.step()
            if seed == 1:
                weight.sum().item()
        return [weight.detach().cpu()]

    results: dict[int, Any] = {}

    def worker(seed: int) -> None:
        try:
            results[seed] = train(seed, "xla")
        except BaseException as error:
            results[seed] = error

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        torch.testing.assert_close(results[seed], train(seed, "cpu"), rtol=1e-4, atol=1e-5)

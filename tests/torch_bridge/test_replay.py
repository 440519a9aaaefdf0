"""`torch_bridge.optimize`: what it plays is, bit for bit, what would have been recorded."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_bridge
from tests.torch_bridge.replaying import batch, bits, compile_fast, descend, everything, parity, player, run, trained  # noqa: F401
from torch_bridge import metrics
from torch_bridge.runtime import executor, session, steps


class Net(nn.Module):
    """Two layers, and a rule between them."""

    def __init__(self, between: Callable[..., Any] = torch.tanh):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 6)
        self.between = between

    def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> Any:
        return self.b(self.between(self.a(x), *more, **named))


class Wrapped(nn.Module):
    """A function of (module, arguments) as a forward, beside a Net."""

    def __init__(self, rule: Callable[..., Any], **attributes: Any):
        super().__init__()
        self.net = Net()
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.rule = rule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.rule(self, *args, **kwargs)


def test_plain_training() -> None:
    model = parity(Net)
    assert player(model).played == 3  # of 6: one was looked at, two recorded


BATCHES = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.4), nn.Linear(5, 6)),
    "ema": lambda: Wrapped(lambda m, x: m.net(x) + m.ema.lerp_(x.detach().mean(0), 0.1), ema=torch.zeros(6)),
    "copy_": lambda: Wrapped(lambda m, x: m.net(x) - m.last.copy_(x).sum() * 0.1, last=torch.zeros(4, 6)),
    "add_": lambda: Wrapped(lambda m, x: m.net(x) * m.count.add_(1), count=torch.zeros(())),
    "index_copy_": lambda: Wrapped(
        lambda m, x: m.net(x) + m.table.index_copy_(0, (x[:2, 0] > 0).long() + m.rows, x[:2].detach()).sum(0),
        table=torch.zeros(4, 6),
        rows=torch.tensor([0, 2]),
    ),
    "zero_, then add_": lambda: Wrapped(lambda m, x: m.net(x) * m.sum.zero_().add_(x.detach().mean()), sum=torch.ones(())),
    "slice assignment": lambda: Wrapped(_assign, cache=torch.zeros(8, 6)),
    "nested checkpoints": lambda: Wrapped(lambda m, x: checkpoint(_Inner(m.net), x, use_reentrant=False)),
    "tied": lambda: _tied(),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 6)),
    "inplace relu": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)),
    "weight clamped in forward": lambda: Wrapped(_clamped),
    "gru": lambda: Wrapped(lambda m, x: m.cell(x, torch.zeros_like(x)), cell=nn.GRUCell(6, 6)),
    "attention": lambda: Wrapped(lambda m, x: m.cell(x[None], x[None], x[None])[0], cell=nn.MultiheadAttention(6, 2, batch_first=True)),
    "gradients inside": lambda: Wrapped(_gradient_inside),
}


class _Inner(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(checkpoint(self.net, x, use_reentrant=False))


def _assign(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.cache[2:6] = x.detach() * 2
    return m.net(x) * m.cache.sum()


def _clamped(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.net.a.weight.clamp_(-0.3, 0.3)
    return m.net(x)


def _gradient_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(m.net(x).sum(), x, create_graph=True)
    return g


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


@pytest.mark.core(keep=3)
@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("name", BATCHES)
def test_modules_that_are_played(name: str) -> None:
    parity(BATCHES[name])


def test_train_and_eval_take_turns() -> None:
    def step(m: Any, k: int) -> Any:
        m.train(k % 2 == 0)
        return trained()(m, k)

    parity(BATCHES["batch norm"], step, steps=10)
    parity(BATCHES["dropout"], step, steps=10)


def test_evaluation_without_gradients() -> None:
    def step(m: Any, k: int) -> Any:
        with torch.no_grad():
            return m.eval()(batch(k))

    parity(BATCHES["batch norm"], step)

    def inference(m: Any, k: int) -> Any:
        with torch.inference_mode():
            return m.eval()(batch(k))

    parity(BATCHES["batch norm"], inference)


def test_gradient_accumulation_with_and_without_a_step_between() -> None:
    def accumulate(sync: bool, together: bool) -> Any:
        def step(m: Any, k: int) -> Any:
            m.zero_grad()
            losses: list[Any] = []
            for j in range(2):
                loss = m(batch(2 * k + j)).square().mean()
                if sync:
                    executor.sync()  # also between forward and backward
                losses.append(loss)
                if not together:
                    loss.backward()
                    if sync:
                        executor.sync()
            if together:
                torch.autograd.backward(losses)
            descend(m)
            return losses

        return step

    parity(BATCHES["batch norm"], accumulate(sync=True, together=False))
    parity(BATCHES["batch norm"], accumulate(sync=False, together=True))
    parity(Net, accumulate(sync=True, together=True))


def test_recurrent_use() -> None:
    def step(m: Any, k: int) -> Any:
        x = batch(k)
        for _ in range(3):
            x = m(x)
        m.zero_grad()
        x.square().mean().backward()
        descend(m)
        return x

    parity(Net, step)


class Pair(NamedTuple):
    """Two results."""

    first: torch.Tensor
    second: Any


RESULTS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "dict": lambda m, x: {"first": m.net(x), "second": x * 2},
    "tuple with None and a number": lambda m, x: (m.net(x), None, 3, "word"),
    "named tuple": lambda m, x: Pair(m.net(x), [x.sum()]),
    "integers": lambda m, x: (m.net(x), x.argmax(-1)),
    "a tensor twice": lambda m, x: (lambda y: (y, y, m.net(y)))(m.net(x)),
    "parts of one tensor": lambda m, x: tuple(m.net(x).chunk(2, -1)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    def step(m: Any, k: int) -> Any:
        out = m(batch(k))
        tensors = [t for t in (out.values() if isinstance(out, dict) else out) if isinstance(t, torch.Tensor)]
        loss: Any = sum(t.square().mean() for t in tensors if t.is_floating_point())
        m.zero_grad()
        loss.backward()
        descend(m)
        return [loss, tensors, type(out).__name__, [type(x).__name__ for x in out], out[0] is out[1] if isinstance(out, tuple) else None]

    parity(lambda: Wrapped(RESULTS[name]), step)


def test_some_results_unused_and_others_in_other_steps() -> None:
    def two(m: Any, x: torch.Tensor) -> Any:
        y = m.net(x)
        return y, torch.sin(y), m.net.a(x)

    def step(m: Any, k: int) -> Any:
        outs = m(batch(k))
        loss = [outs[0] + outs[1], outs[0] * 2 + outs[1], outs[1] + outs[2].sum()][k // 2 % 3].sum()
        m.zero_grad()
        loss.backward()
        descend(m)
        return loss

    parity(lambda: Wrapped(two), step, steps=17)


def test_gradients_of_results_that_share_memory_are_told_apart() -> None:
    def step(m: Any, k: int) -> Any:
        a, b = m(batch(k))
        g, h = batch(k + 50), batch(k + 60)
        m.zero_grad()
        torch.autograd.backward([a, b], [g, g] if k < 5 else [g, h])
        return [a, b]

    parity(lambda: Wrapped(lambda m, x: (m.net(x), m.net(x * 2))), step, steps=9)


def test_a_gradient_that_is_a_weight_or_a_result() -> None:
    def step(m: Any, k: int) -> Any:
        out = m(batch(k, 6, 8))
        m.zero_grad()
        out.backward(m.weight.detach() if k < 5 else batch(k + 70, 6, 8) if k < 7 else out.detach())
        return out

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.weight

    parity(Product, step, steps=9)


def test_gradients_of_two_parameters_do_not_share_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 6))
            self.b = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a + self.b

    def step(m: Any, k: int) -> Any:
        m.zero_grad()
        (m(batch(k)) * batch(k + 30)).sum().backward()
        m.a.grad.mul_(2)  # b's stays
        return [m.a.grad, m.b.grad]

    parity(Sum, step)


def test_backward_twice() -> None:
    def step(m: Any, k: int) -> Any:
        loss = m(batch(k)).square().mean()
        m.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        descend(m)
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()
        return loss

    parity(Net, step)


def test_gradients_of_gradients() -> None:
    def step(m: Any, k: int) -> Any:
        x = batch(k).requires_grad_()
        (g,) = torch.autograd.grad(m(x).square().mean(), x, create_graph=True)
        loss = m(x).mean() + g.square().sum()
        m.zero_grad()
        loss.backward()
        descend(m)
        return [g, loss]

    # The gradients of one weight from several passes are added in another order: the last bits differ.
    parity(BATCHES["dropout"], step, close=True)


def test_gradients_of_inputs_only() -> None:
    def step(m: Any, k: int) -> Any:
        x = batch(k).requires_grad_(k % 3 != 1)
        loss = m(x).square().mean()
        m.zero_grad()
        if k % 3 == 0:
            return torch.autograd.grad(loss, x)
        loss.backward()
        return [loss, x.grad if k % 3 == 2 else None]

    parity(Net, step, steps=18)


def test_frozen_parameters_and_switches() -> None:
    def step(m: Any, k: int) -> Any:
        m.a.requires_grad_(k % 8 < 4)
        m.b.bias.requires_grad_(k < 8)
        return trained()(m, k)

    parity(Net, step, steps=16)


def test_autocast_on_and_off() -> None:
    def step(m: Any, k: int) -> Any:
        with torch.autocast("xla", torch.bfloat16, enabled=k % 2 == 0):
            out = m(batch(k))
        loss = out.float().square().mean()
        m.zero_grad()
        loss.backward()
        descend(m)
        return [out, loss]

    parity(Net, step, steps=12)


def test_autocast_and_a_backward_pass_that_was_not_recorded() -> None:
    def step(m: Any, k: int) -> Any:
        x = batch(k).requires_grad_()
        with torch.autocast("xla", torch.bfloat16):
            out = m(x)
        m.zero_grad()
        if k < 5:
            out.float().sum().backward()
        else:
            return torch.autograd.grad(out.float().square().sum(), [x, m.b.bias])
        return x.grad

    parity(Net, step, steps=6)


def test_batch_sizes_and_kinds_of_memory() -> None:
    def step(m: Any, k: int) -> Any:
        big = batch(k, 20, 6)
        x = [big[:4], batch(k), big[3:15:3], batch(k, 6, 4).t(), big[: 2 + k % 3]][k // 4 % 5]
        out = m(x)
        m.zero_grad()
        out.square().mean().backward()
        descend(m)
        return out

    parity(Net, step, steps=20)


def test_keyword_arguments_and_the_same_tensor_twice() -> None:
    def rule(m: Any, x: Any, other: Any = None, scale: Any = 1.0, flags: Any = ()) -> torch.Tensor:
        same = 2.0 if other is x else 1.0
        return m.net(x) * same + (0 if other is None else m.net(other)) * scale + len(flags)

    def step(m: Any, k: int) -> Any:
        x = batch(k).requires_grad_()
        case = k // 3 % 4
        out = [lambda: m(x), lambda: m(x, other=x), lambda: m(x, other=batch(k + 9), flags=[1, 2]), lambda: m(x, x, scale=-0.0)][case]()
        m.zero_grad()
        out.square().mean().backward()
        descend(m)
        return [out, x.grad]

    parity(lambda: Wrapped(rule), step, steps=18)


def test_results_changed_in_place_by_the_caller() -> None:
    def step(m: Any, k: int) -> Any:
        out = m(batch(k))
        out.mul_(2)
        F.relu_(out)
        m.zero_grad()
        out.square().mean().backward()
        descend(m)
        return out

    parity(Net, step)

    def two(m: Any, k: int) -> Any:
        a, b = m(batch(k))
        a.mul_(2)
        m.zero_grad()
        (a.square().mean() + b.square().mean()).backward()
        descend(m)
        return [a, b]

    parity(lambda: Wrapped(lambda m, x: (m.net(x), m.net(x * 2))), two)


@pytest.mark.parametrize("what", ["input", "weight", "buffer"])
def test_changing_what_the_backward_pass_needs_is_an_error(what: str) -> None:
    def step(m: Any, k: int) -> Any:
        x = batch(k)
        out = m(x)
        with torch.no_grad():
            {"input": x, "weight": m.net.b.weight, "buffer": m.scale}[what].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        m.zero_grad()
        return out

    def good_and_bad(m: Any, k: int) -> Any:
        return step(m, k) if k == 1 or k > 4 else trained()(m, k)

    parity(lambda: Wrapped(lambda m, x: m.net(x) * m.scale, scale=torch.ones(())), good_and_bad)


def test_changing_what_it_does_not_need_is_fine() -> None:
    def step(m: Any, k: int) -> Any:
        x = batch(k).requires_grad_()
        y = x * 1
        out = m(y)
        with torch.no_grad():
            y.mul_(2)
            m.bias.mul_(0.5)
        m.zero_grad()
        out.square().sum().backward()
        return [out, x.grad]

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.bias

    parity(Shift, step)


def test_a_version_moves_when_a_played_call_writes_to_a_buffer() -> None:
    def step(m: Any, k: int) -> Any:
        weight = batch(k + 20, 6).requires_grad_()
        first = (weight * m.ema).sum()
        m(batch(k))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()
        return trained()(m, k)

    parity(BATCHES["ema"], step)


def test_parameters_swapped() -> None:
    def step(m: Any, k: int) -> Any:
        if k == 4:
            m.a.weight = nn.Parameter(batch(99, 8, 6))
        if k == 5:
            m.b.weight.data = batch(98, 6, 8)
        if k == 6:
            m.load_state_dict({name: t + 1 for name, t in m.state_dict().items()})
        return trained()(m, k)

    parity(Net, step, steps=11)


def test_data_swapped_between_forward_and_backward() -> None:
    def step(m: Any, k: int) -> Any:
        x = batch(k).requires_grad_()
        out = m(x)
        if k == 5:
            before = m.b.weight.data
            m.b.weight.data = before * 2
            if getattr(m.forward, "asked", False):
                with pytest.raises(
                    RuntimeError,
                    match=r"the memory of a parameter was swapped \(param.data = ...\) between the forward and the backward pass",
                ):
                    out.sum().backward()
            m.b.weight.data = before
        else:
            out.sum().backward()
        m.zero_grad()
        return [out, x.grad]

    parity(Net, step, steps=7)


def test_dtype_changed() -> None:
    def step(m: Any, k: int) -> Any:
        if k == 5:
            m.to(torch.bfloat16)
        return trained(lambda m, k: m(batch(k).to(next(m.parameters()).dtype)))(m, k)

    parity(Net, step, steps=11)


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "tensor", "accumulated", "global", "root"])
def test_hooks_added_later_and_removed(kind: str) -> None:
    calls: list[int] = []

    def count(*args: Any) -> Any:
        calls.append(1)
        return None

    def add(m: Any) -> Any:
        if kind == "forward":
            return m.a.register_forward_hook(lambda mod, args, out: count() or out * 2)
        if kind == "pre":
            return m.b.register_forward_pre_hook(lambda mod, args: (count() or args[0] + 1,))
        if kind == "backward":
            return m.a.register_full_backward_hook(count)
        if kind == "tensor":
            return m.a.weight.register_hook(lambda g: count() or g * 3)
        if kind == "accumulated":
            return m.a.weight.register_post_accumulate_grad_hook(lambda p: count(p.grad.mul_(2)))
        if kind == "global":
            return nn.modules.module.register_module_forward_hook(lambda mod, args, out: count() or out * 2)
        return m.register_forward_hook(lambda mod, args, out: count() or out * 2)

    handles: list[Any] = []

    def step(m: Any, k: int) -> Any:
        if k == 4:
            handles.append(add(m))
        if k == 7:
            handles.pop().remove()
        calls.clear()
        return [trained(lambda m, k: m(batch(k).requires_grad_()))(m, k), len(calls)]

    parity(Net, step, steps=9)


@pytest.mark.switched_on("NXD_JAX_REPLAY")
def test_modules_in_modules() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer: Any = Net()
            self.again: Any = self.layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.again(x * 2)

    def inner(m: Any) -> Any:
        return torch_bridge.optimize(torch_bridge.optimize(m.layer))

    both: Any = parity(Twice, part=lambda m: (inner(m), m)[1])
    assert player(both.layer).played == 0  # the outer one plays
    parity(Twice, part=inner)


@pytest.mark.switched_on("NXD_JAX_REPLAY")
def test_parts_with_everything_else_recorded() -> None:
    def outer(m: Any) -> Any:
        torch_bridge.optimize(m[2])
        return m[0]

    model: Any = parity(lambda: nn.Sequential(Net(), nn.Linear(6, 6), Net()), part=outer)
    assert player(model[2]).played


def test_optimized_module_in_a_checkpoint() -> None:
    def step(m: Any, k: int) -> Any:
        return trained(lambda m, k: checkpoint(m, batch(k).requires_grad_(), use_reentrant=k % 2 == 0))(m, k)

    parity(BATCHES["dropout"], step, steps=12)


def test_copies_are_optimized_for_themselves() -> None:
    model = parity(Net)
    twin = copy.deepcopy(model)
    assert player(twin).played == 0 and player(twin) is not player(model)
    expected = run(torch_bridge.restore(copy.deepcopy(twin)), trained(), 6)
    before = everything(model)
    assert run(twin, trained(), 6) == expected and player(twin).played
    assert everything(model) == before


def test_a_forward_of_the_instance_is_kept() -> None:
    def make() -> nn.Module:
        net: Any = Net()
        net.forward = lambda x: net.b(net.a(x)) * 3
        return net

    model = make().to("xla")
    x = batch(0)
    expected = bits(model(x))
    torch_bridge.optimize(model)
    for _ in range(5):
        assert bits(model(x)) == expected
    torch_bridge.restore(model)
    assert bits(model(x)) == expected and not hasattr(model.forward, "played")


def test_pickling() -> None:
    model = torch_bridge.optimize(Net().to("xla"))
    expected = bits(model(batch(0)))
    twin = pickle.loads(pickle.dumps(model))
    assert [bits(twin(batch(0))) for _ in range(5)] == [expected] * 5
    assert player(twin) is not player(model) and set(twin.state_dict()) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    forward = model.forward
    del model
    gc.collect()
    with pytest.raises(TypeError, match="cannot be pickled after the module is gone"):
        pickle.dumps(forward)
    with pytest.raises(TypeError, match="takes a torch.nn.Module, got Tensor"):
        torch_bridge.optimize(torch.ones(1))  # type: ignore[arg-type]


def test_functional_call_and_functorch() -> None:
    def step(m: Any, k: int) -> Any:
        x = batch(k)
        weights = {name: (p * 1.5).detach().requires_grad_() for name, p in m.named_parameters()}
        out = torch.func.functional_call(m, weights, (x,))
        found = torch.autograd.grad(out.sum(), list(weights.values()))
        held = {name: p.detach() for name, p in m.named_parameters()}
        grads = torch.func.grad(lambda w: torch.func.functional_call(m, w, (x,)).square().sum())(held)
        mapped = torch.func.vmap(lambda row: torch.func.functional_call(m, held, (row,)))(x)
        return [out, *found, *grads.values(), mapped, trained()(m, k)]

    parity(Net, step, steps=6)


def test_default_device() -> None:
    def step(m: Any, k: int) -> Any:
        with torch.device("xla"):
            return trained()(m, k)

    parity(Net, step, played=False)


def test_an_error_in_the_forward_leaves_the_next_call_right() -> None:
    def rule(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.net(x)
        m.seen.add_(1)
        if x.shape[0] == 3:
            raise ValueError("three rows")
        return y * m.seen

    def step(m: Any, k: int) -> Any:
        if k in (0, 2, 5):
            with pytest.raises(ValueError, match="three rows"):
                m(batch(k, 3, 6))
        return trained()(m, k)

    parity(lambda: Wrapped(rule, seen=torch.zeros(())), step, steps=9)


class OneTable(nn.Module):
    """Layers that read views of copies of one value, as rotary embeddings of GPT-J and GLM do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.cos(x)
        for layer in self.layers:
            x = (layer(x).view(-1, 2) * table.clone().view(-1, 2)).view_as(x)
        return x


def test_a_backward_pass_reads_the_views_that_it_read(clean_step: None) -> None:
    """Each layer's own, where several have the same contents: another one would be another program."""
    counts: list[int] = []

    def step(m: Any, k: int) -> Any:
        if k == 0:
            executor.clear_cache()
        if k in (1, 6):
            counts.append(metrics.COUNTERS["UncachedCompile"])
        loss = m(batch(k)).square().mean()
        m.zero_grad()
        loss.backward()
        steps.mark()
        return [bits(loss), *[bits(p.grad) for p in m.parameters()]]

    parity(OneTable, step, steps=7)
    assert counts[0] == counts[1] and counts[2] == counts[3]


FUSED = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_training_loop_compiles_as_often_as_without(name: str, clean_step: None) -> None:
    """Optimizer, schedule, clipping, step closures: the same program as without `optimize`, from the first step on."""
    counts: list[int] = []
    made: list[Any] = []

    def step(m: Any, k: int) -> Any:
        if k == 0:
            executor.clear_cache()
            made[:] = [FUSED[name](m.parameters())]
            made.append(torch.optim.lr_scheduler.LambdaLR(made[0], lambda n: 1 / (1 + n)))
        optimizer, schedule = made
        if k in (2, 9):
            counts.append(metrics.COUNTERS["UncachedCompile"])
        seen: list[Any] = []
        loss = m(batch(k)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(m.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        steps.add_closure(lambda value: seen.append(bits(value)), (loss.detach(),))
        steps.mark()
        if k == 9:
            programs.append(
                {
                    t.nodes: [sum(map(len, p.spec.ports.outputs)) for found in t.programs.values() for p in found]
                    for t in session.current().traces.values()
                }
            )
        return seen

    programs: list[Any] = []
    parity(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Linear(5, 6)), step, steps=10)
    assert {nodes: outs[-1] for nodes, outs in programs[0].items()} == {nodes: outs[-1] for nodes, outs in programs[1].items()}
    assert counts[2] == counts[3]


def test_reentrant_checkpoint_inside() -> None:
    parity(lambda: Wrapped(lambda m, x: checkpoint(m.net, m.net(x), use_reentrant=True)))

"""Autograd beyond plain backward on device xla: hooks, double backward, functional transforms, accumulation."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.torch_bridge.devices import same


def test_tensor_hooks() -> None:
    def run(device: str) -> Any:
        seen: list[torch.Tensor] = []
        x = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
        y = x * 3
        handle = x.register_hook(lambda grad: grad * 2)
        y.register_hook(lambda grad: seen.append(grad))
        y.retain_grad()
        y.sum().backward(retain_graph=True)
        handle.remove()
        y.sum().backward()
        return x.grad, y.grad, seen

    same(run)


def test_post_accumulate_grad_hooks_step_in_backward() -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(device)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            model(torch.ones(2, 3, device=device)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        return list(model.parameters())

    same(run)


def test_module_hooks() -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).to(device)
        seen: list[Any] = []
        model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[0].register_forward_hook(lambda module, args, out: out * 2)
        model[2].register_full_backward_hook(lambda module, grad_in, grad_out: seen.append((grad_in[0], grad_out[0])))
        model[2].register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 3,))
        model(torch.ones(2, 3, device=device)).sum().backward()
        return seen, [p.grad for p in model.parameters()]

    same(run)


def test_double_backward() -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        x = torch.randn(4, 3).to(device).requires_grad_()
        (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        penalty = (grad.norm(2, dim=1) - 1).square().mean()
        penalty.backward()
        return penalty, [p.grad for p in critic.parameters()]

    same(run)


def test_convolution_double_backward() -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        weight = torch.randn(2, 3, 3, 3).to(device).requires_grad_()
        x = torch.randn(1, 3, 5, 5).to(device).requires_grad_()
        (grad,) = torch.autograd.grad(nn.functional.conv2d(x, weight, padding=1).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.grad, weight.grad

    same(run, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward-mode AD
def test_functional_transforms() -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        w = torch.randn(3, 3).to(device)
        x = torch.randn(4, 3).to(device)
        per_sample = torch.func.vmap(torch.func.grad(lambda row: (row @ w).tanh().sum()))(x)
        jacobian = torch.autograd.functional.jacobian(lambda row: (row @ w).tanh(), x[0])
        hessian = torch.autograd.functional.hessian(lambda row: (row @ w).tanh().sum(), x[0])
        value, tangent = torch.func.jvp(lambda t: (t @ w).sin(), (x,), (torch.ones_like(x),))
        return per_sample, jacobian, hessian, value, tangent

    same(run)


def test_gradients_accumulate_and_grad_can_be_assigned() -> None:
    def run(device: str) -> Any:
        p = nn.Parameter(torch.ones(3, device=device))
        for _ in range(3):
            (p * 2).sum().backward()
        kept = p.grad.clone()
        p.grad = torch.full_like(p, 7)
        (p * 2).sum().backward()
        p.grad.data.mul_(2)
        p.grad.zero_()
        p.grad += 1
        return kept, p.grad

    same(run)


def test_graph_kept_over_steps() -> None:
    """A backward through what an earlier, already executed step computed."""

    def run(device: str) -> Any:
        x = torch.ones(3, device=device, requires_grad=True)
        y = x.exp()
        if device == "xla":
            torch.xla.synchronize()
        z = y * y
        if device == "xla":
            torch.xla.synchronize()
        z.sum().backward()
        return x.grad

    same(run)


def test_backward_twice_raises_as_in_torch() -> None:
    x = torch.ones(3, device="xla", requires_grad=True)
    y = x.exp().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_anomaly_mode_and_saved_tensor_hooks() -> None:
    def run(device: str) -> Any:
        x = torch.ones(3, device=device, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            y = (x.exp() * x).sum()
        y.backward()
        return x.grad

    same(run)
    with torch.autograd.set_detect_anomaly(True):
        x = torch.zeros(2, device="xla", requires_grad=True)
        with pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError, match="returned nan"):
            (x.sqrt() * 0).sum().backward()


def test_parametrization_and_swa_helpers() -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).to(device)
        average = torch.optim.swa_utils.AveragedModel(model)
        model(torch.ones(1, 3, device=device)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad
        average.update_parameters(model)
        return nn.utils.parameters_to_vector(model.parameters()), list(average.parameters())

    same(run)


@pytest.mark.parametrize("kind", ["swa", "swa of lists", "ema"])
def test_averages_of_buffers(kind: str) -> None:
    """Of a batch norm: torch averages its number of batches, an integer, by a kernel for lists, which refuses integers elsewhere."""
    averaging: dict[str, Any] = {"ema": {"avg_fn": torch.optim.swa_utils.get_ema_avg_fn(0.9)}}.get(kind, {})

    def run(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)).to(device)
        of_lists = {"multi_avg_fn": torch.optim.swa_utils.get_swa_multi_avg_fn()} if kind == "swa of lists" and device == "xla" else {}
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True, **averaging, **of_lists)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(4):
            optimizer.zero_grad()
            model(torch.arange(12.0, device=device).reshape(4, 3).sin() * (i + 1)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
        assert average.module[1].num_batches_tracked.dtype == torch.int64
        return list(average.parameters()), list(average.buffers())

    same(run)


def test_a_weight_that_is_computed_before_each_call_moves() -> None:
    """The old `weight_norm`'s: it holds the graph of the parameters that it is made of."""

    def run(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.utils.weight_norm(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.to(device)
        model.weight.sum().backward()
        optimizer.step()
        out = model(torch.ones(1, 3, device=device)).detach()
        return model.weight_g, model.weight_g.grad, out, model.cpu()(torch.ones(1, 3))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        same(run)


LIST_WRITES = {
    "add": lambda z: torch._foreach_add_([z], 1),
    "mul": lambda z: torch._foreach_mul_([z], [z.detach()]),
    "zero": lambda z: torch._foreach_zero_([z]),
    "sqrt": lambda z: torch._foreach_sqrt_([z]),
}


@pytest.mark.parametrize("name", LIST_WRITES)
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_write_to_a_list_that_the_backward_pass_needs_unchanged(name: str, device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    z = (x * 2).exp()
    LIST_WRITES[name](z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_versions_of_parameters_behind_a_step(optimizer: type[torch.optim.Optimizer], options: dict[str, bool]) -> None:
    def run(device: str) -> Any:
        p = nn.Parameter(torch.ones(3, device=device))
        o = optimizer([p], lr=0.1, **options)
        loss = (p * p).sum()
        loss.backward(retain_graph=True)
        before = p._version
        o.step()
        try:
            loss.backward()
        except RuntimeError:
            return p._version > before, "refused"
        return p._version > before, p.grad

    same(run)


def test_lists_as_out() -> None:
    def run(device: str) -> Any:
        parts = [torch.zeros(2, device=device) for _ in range(2)]
        torch.split_copy(torch.arange(4.0, device=device), 2, out=parts)
        split = [t.clone() for t in parts]
        torch.unbind_copy(torch.arange(4.0, device=device).reshape(2, 2) + 7, out=parts)
        return split, parts

    same(run)


OUTS = {
    "kron": lambda x, out: torch.kron(x, x[:2] + 1, out=out),
    "matrix_rank": lambda x, out: torch.linalg.matrix_rank(x, out=out),
    "matrix_rank, tolerance": lambda x, out: torch.linalg.matrix_rank(x, 0.5, out=out),
    "matrix_rank, tolerances": lambda x, out: torch.linalg.matrix_rank(x, atol=torch.full((), 0.5, device=x.device), rtol=None, out=out),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", OUTS)
def test_outs_of_composite_ops(name: str, inference: bool) -> None:
    """Ops whose `out=` torch makes of other ops: it gets the result, and counts the write."""

    def run(device: str) -> Any:
        x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.1], [0.0, -0.1, 1.0]], device=device)
        shape, dtype = ((6, 9), torch.float64) if name == "kron" else ((), torch.int64)
        with torch.inference_mode(inference):
            out = torch.zeros(shape, dtype=dtype, device=device)
            found = OUTS[name](x, out)
            return found, out, found is out, None if inference or name == "kron" else out._version  # torch's kron counts none on the CPU

    same(run)


def test_outs_of_composite_ops_have_no_gradient() -> None:
    for device in ("cpu", "xla"):
        x = torch.ones(2, 2, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"functions with out=... arguments don't support automatic differentiation"):
            torch.kron(x, x, out=torch.zeros(4, 4, device=device))


INFERENCE = {
    "view": lambda a: a.view(2, 2).is_inference(),
    "detach": lambda a: a.detach().is_inference(),
    "write to a view": lambda a: a[0].fill_(3),
    "data": lambda a: a.data.add_(1),
    "clone": lambda a: a.clone().add_(1),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_inference_tensors_outside_inference_mode(name: str) -> None:
    def run(device: str) -> Any:
        with torch.inference_mode():
            a = torch.arange(4.0, device=device)
        try:
            return INFERENCE[name](a), a
        except RuntimeError as error:
            return "Inplace update to inference tensor outside InferenceMode" in str(error), a

    same(run)


def test_lists_of_inference_tensors_outside_inference_mode() -> None:
    with torch.inference_mode():
        a = torch.arange(4.0, device="xla")
        torch._foreach_add_([a], 1)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode is not allowed: write to a clone"):
        torch._foreach_add_([a], 1)
    assert torch.equal(a.cpu(), torch.arange(4.0) + 1)

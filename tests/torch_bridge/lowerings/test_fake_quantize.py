"""Fake quantization against eager torch: values, masks, zero points that are floats, and gradients."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import torch_bridge
import torch_bridge.lowerings as lowerings
from tests.torch_bridge.lowerings.batches import together
from tests.torch_bridge.lowerings.parity import check, to_jax
from torch_bridge import _compat, metrics

aten = torch.ops.aten
torch_bridge.register()
X = torch.tensor([[-3.3, 0.25, 0.75, 9.0, float("nan")], [0.0, -0.25, 2.9, 3.1, -2.4]])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PER_TENSOR = aten.fake_quantize_per_tensor_affine_cachemask.default
BY_TENSORS = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default
PER_CHANNEL = aten.fake_quantize_per_channel_affine_cachemask.default


@pytest.mark.parametrize("dtype", DTYPES)
@together
def test_per_tensor(dtype):
    x = X.to(dtype)
    check(PER_TENSOR, x, 0.5, 1, -4, 7)
    for zero in (torch.tensor([1], dtype=torch.int32), torch.tensor([1.7]), torch.tensor([-1.7])):
        for on in (1, 0):
            check(BY_TENSORS, x, torch.tensor([0.5]), zero, torch.tensor([on]), -4, 7)


@pytest.mark.parametrize("dtype", DTYPES)
@together
def test_per_channel(dtype):
    x = X.to(dtype)
    scale = torch.tensor([0.5, 0.3, 0.1, 1.0, 2.0])
    for zero in (torch.tensor([0, 1, -2, 3, 0], dtype=torch.int32), torch.tensor([0.0, 1.3, -2.2, 3.5, 0.1])):
        check(PER_CHANNEL, x, scale, zero, 1, -4, 7)
        check(PER_CHANNEL, x, scale[:2], zero[:2], 0, -4, 7)


def test_the_gradient_is_that_of_what_was_not_cut_off():
    with _compat.enable_x64():
        low = lowerings.lookup(PER_TENSOR).fn
        got = jax.grad(lambda x: low(x, 0.5, 1, -4, 7)[0].sum())(to_jax(X))
    x = X.clone().requires_grad_()
    torch.fake_quantize_per_tensor_affine(x, 0.5, 1, -4, 7).sum().backward()
    np.testing.assert_array_equal(np.asarray(got), x.grad.numpy())


@pytest.mark.filterwarnings("error")
def test_training_with_fake_quantization_stays_on_the_device():
    """A scale that changes in each step, weights by channel; what was cut off has no gradient."""
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        w = torch.randn(3, 4).to(device).requires_grad_()
        x = torch.randn(5, 4).to(device)
        scales, zeros = torch.tensor([0.1, 0.2, 0.05], device=device), torch.zeros(3, dtype=torch.int32, device=device)
        for step in range(3):
            quantized = torch.fake_quantize_per_channel_affine(w, scales, zeros, 0, -8, 7)
            loss = (
                torch.nn.functional.linear(torch.fake_quantize_per_tensor_affine(x, 0.1 + 0.01 * step, 0, -8, 7), quantized).square().mean()
            )
            (grad,) = torch.autograd.grad(loss, w)
            with torch.no_grad():
                w -= 0.1 * grad
        results.append((loss.item(), grad.cpu(), w.detach().cpu()))
    torch.testing.assert_close(*results)
    assert not any("fake_quantize" in name for name in metrics.COUNTERS)


@pytest.mark.filterwarnings("ignore:aten._fused_moving_avg_obs_fq_helper")
def test_torchs_fused_observer_runs_on_the_cpu_and_resizes_its_buffers():
    """What `prepare_qat` puts into a model by default: an op that writes ranges, scales and zero points, by channel into buffers that were shorter."""
    results = []
    for device in ("cpu", "xla"):
        buffers = [torch.tensor(v, device=device) for v in ([], [], [1.0])] + [torch.zeros(1, dtype=torch.int32, device=device)]
        on = [torch.ones(1, dtype=torch.long, device=device) for _ in range(2)]
        for step in range(2):
            weight = torch.linspace(-1, 2 + step, 12).reshape(3, 4).to(device).requires_grad_()
            out = torch.fused_moving_avg_obs_fake_quant(weight, *on, *buffers, 0.01, -128, 127, 0, True, True)
            out.square().sum().backward()
        results.append([out.detach().cpu(), weight.grad.cpu(), *(b.cpu() for b in buffers)])
    torch.testing.assert_close(*results)


SEEN = {
    "both signs": torch.tensor([[-3.3, 0.25, 0.75, 9.0], [0.0, -0.25, 2.9, 3.1], [-7.0, 1.0, 0.5, -2.5]]),
    "positive": torch.tensor([[3.3, 0.25], [1.0, 2.9]]),
    "negative": torch.tensor([[-3.3, -0.25], [-1.0, -2.9]]),
    "zeros": torch.zeros(2, 3),
    "tiny": torch.tensor([[1e-5, -2e-5], [3e-6, 1e-5]]),
    "tiny and positive": torch.tensor([[1e-5, 2e-5], [3e-6, 1e-5]]),
}


@pytest.mark.core(keep=6)
@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_an_observer_that_rounds(name: str, per_row: bool, symmetric: bool) -> None:
    """Three calls on one set of buffers: values, masks and buffers are eager torch's."""
    buffers = [torch.tensor([float("inf")]), torch.tensor([-float("inf")]), torch.ones(1), torch.zeros(1, dtype=torch.int32)]
    if per_row:
        buffers[:2] = torch.empty(0), torch.empty(0)
    moved = [b.clone().to("xla") for b in buffers]
    grid = (-128, 127) if symmetric else (0, 255)
    for factor, observed, rounding in ((1.0, 1, 1), (0.5, 1, 0), (3.0, 0, 1), (2.0, 1, 1)):
        x = SEEN[name] * factor
        flags = torch.tensor([observed]), torch.tensor([rounding])
        want = aten._fused_moving_avg_obs_fq_helper(x, *flags, *buffers, 0.01, *grid, 0, per_row, symmetric)
        got = aten._fused_moving_avg_obs_fq_helper(x.to("xla"), *(f.to("xla") for f in flags), *moved, 0.01, *grid, 0, per_row, symmetric)
        torch.testing.assert_close([t.cpu() for t in (*got, *moved)], [*want, *buffers], rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min")  # users have it still
def test_training_for_quantization_is_one_program_a_step() -> None:
    from torch.ao import quantization

    def train(device: str) -> tuple[dict[str, torch.Tensor], int]:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(quantization.QuantStub(), torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        layers.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        model = quantization.prepare_qat(layers.train()).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = metrics.EXECUTE_TIME.count
        for k in range(3):
            optimizer.zero_grad()
            model(torch.arange(8.0).view(2, 4).to(device) / (k + 1) - 1).pow(2).sum().backward()
            optimizer.step()
            if device == "xla":
                torch.xla.synchronize()  # type: ignore[attr-defined]
        return {k: v.cpu() for k, v in model.state_dict().items()}, metrics.EXECUTE_TIME.count - before

    state, programs = train("xla")
    assert programs == 3
    torch.testing.assert_close(state, train("cpu")[0], rtol=1e-4, atol=1e-5)

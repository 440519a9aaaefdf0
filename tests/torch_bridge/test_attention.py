"""`F.scaled_dot_product_attention` on the device, in all forms torch takes: fused where it can be, torch's plain formula elsewhere."""

from __future__ import annotations

import pytest
import torch

import torch_bridge  # noqa: F401  (registers the device)

MASKS = {
    "none": lambda: None,
    "causal": lambda: None,
    "bool": lambda: torch.rand(5, 5) > 0.5,
    "float": lambda: torch.randn(5, 5),
    "trained": lambda: torch.randn(5, 5).requires_grad_(),
}


@pytest.mark.thorough(keep=11)
@pytest.mark.core(keep=2)
@pytest.mark.parametrize("shape", [(5, 8), (4, 5, 8), (2, 4, 5, 8), (2, 3, 4, 5, 8)])
@pytest.mark.parametrize("kind", MASKS)
def test_every_rank_and_mask(shape, kind):
    mask = MASKS[kind]()
    values = [torch.randn(shape) for _ in range(3)]
    results = {}
    for device in ("cpu", "xla"):
        inputs = [v.detach().to(device).requires_grad_() for v in values]
        m = None if mask is None else mask.detach().to(device).requires_grad_(mask.requires_grad)
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, m, is_causal=kind == "causal")
        out.square().sum().backward()
        trained = [*inputs, m] if m is not None and m.requires_grad else inputs
        results[device] = [out.detach().cpu(), *(t.grad.cpu() for t in trained)]
        with torch.inference_mode():
            again = torch.nn.functional.scaled_dot_product_attention(*(t.detach() for t in inputs), m, is_causal=kind == "causal")
            torch.testing.assert_close(again.cpu(), results["cpu"][0])
    torch.testing.assert_close(results["xla"], results["cpu"], rtol=1e-4, atol=1e-5)


def test_views_in_inference_mode_are_as_normal_as_their_base():
    x = torch.ones(3, 4).to("xla")
    with torch.inference_mode():
        assert not x.detach().is_inference() and not x.t().is_inference()
        assert (x + 1).is_inference() and (x + 1).t().is_inference()
        x.t()[0].add_(1)
    assert x[:, 0].tolist() == [2.0] * 3

"""OCP's float8 checkpoints in Neuron's range."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.quantization.rescale import FP8_SCALING_FACTOR, rescale, rescale_state_dict


def test_values_stay_and_the_range_shrinks() -> None:
    weight = torch.linspace(-448, 448, 1001).to(torch.float8_e4m3fn)
    scale = torch.tensor([0.01])
    made, factor = rescale(weight, scale)
    assert made.dtype is torch.float8_e4m3fn and made.float().abs().max() == 240
    torch.testing.assert_close(factor, scale * 448 / 240)
    before, after = weight.float() * scale, made.float() * factor
    assert ((after - before).abs() <= before.abs() / 16 + 1e-6).all()
    assert FP8_SCALING_FACTOR == 448 / 240
    with pytest.raises(TypeError, match="a weight of torch.float8_e5m2 has no OCP range to leave"):
        rescale(weight.to(torch.float8_e5m2), scale)


@pytest.mark.parametrize("suffix", ["weight_scale", "scale", "weight_scale_inv"])
def test_state_dicts(suffix: str) -> None:
    wide, narrow = torch.tensor([448.0, 1.0]).to(torch.float8_e4m3fn), torch.tensor([240.0, 1.0]).to(torch.float8_e4m3fn)
    given = {
        "a.weight": wide,
        f"a.{suffix}": torch.ones(1),
        "b.weight": narrow,
        f"b.{suffix}": torch.ones(1),
        "norm.weight": torch.ones(2),
        "step": 3,
    }
    made = rescale_state_dict(given)
    assert made["a.weight"].float()[0] == 240 and made[f"a.{suffix}"] == torch.tensor(448 / 240)
    assert all(made[key] is given[key] for key in ("b.weight", f"b.{suffix}", "norm.weight", "step"))
    assert given["a.weight"].float()[0] == 448 and list(made) == list(given)


def test_numbers_without_a_scale() -> None:
    weight = torch.tensor([448.0]).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"a\.weight has numbers beyond 240 and no scale beside it \(looked for a\.weight_scale, a\.scale"):
        rescale_state_dict({"a.weight": weight})
    with pytest.raises(ValueError, match=r"cache has numbers beyond 240 and no scale beside it"):
        rescale_state_dict({"cache": weight})

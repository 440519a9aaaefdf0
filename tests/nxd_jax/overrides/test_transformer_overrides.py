"""Rotary embeddings in both layouts, against complex multiplication."""

from __future__ import annotations

import pytest
import torch

from nxd_jax.overrides.transformer_overrides import apply_rotary_pos_emb

B, H, S, D, POSITIONS = 2, 3, 5, 8, 16


def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(POSITIONS).float(), 100 ** (-torch.arange(0, D, 2) / D))
    twice = torch.cat((angles, angles), -1)
    return angles, twice.cos(), twice.sin()


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D], angles [B, S, D/2]: pairs (d, d + D/2) as complex numbers."""
    z = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((z.real, z.imag), -1)


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("form", ["table", "4d table", "rows", "no ids"])
@pytest.mark.parametrize(("flash", "transpose"), [(True, True), (True, False), (False, True)])
def test_both_layouts(form: str, flash: bool, transpose: bool) -> None:
    angles, cos, sin = tables()
    ids = torch.arange(S).expand(B, S) if form == "no ids" else torch.randint(0, POSITIONS, (B, S))
    q, k = torch.randn(B, H, S, D), torch.randn(B, H, S, D)
    expected = [rotated(t, angles[ids]) for t in (q, k)]
    if form == "4d table":
        cos, sin = cos[None, None], sin[None, None]
    elif form == "rows":
        cos, sin = cos[ids], sin[ids]
    turned = flash and transpose
    given = [t.mT if turned else t for t in (q, k)]
    found = apply_rotary_pos_emb(*given, cos, sin, None if form == "no ids" else ids, flash, transpose)
    torch.testing.assert_close([t.mT if turned else t for t in found], expected)


def test_on_xla() -> None:
    _, cos, sin = tables()
    q, k, ids = torch.randn(B, H, D, S), torch.randn(B, H, D, S), torch.arange(S)[None]
    expected = apply_rotary_pos_emb(q, k, cos, sin, ids, True)
    found = apply_rotary_pos_emb(*(t.to("xla") for t in (q, k, cos, sin, ids)), True)
    torch.testing.assert_close([t.cpu() for t in found], list(expected))

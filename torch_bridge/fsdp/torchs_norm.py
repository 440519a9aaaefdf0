"""torch's `clip_grad_norm_` and `get_total_norm` for gradients of shards: the norm of whole gradients, where torch would take each rank's part.

Every rank must clip by the same factor. Lightning, accelerate and transformers' Trainer call torch's function, so it is that one that must know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from torch_bridge.fsdp import grad_norm, live
from torch_bridge.mesh.groups import Groups

_NAMES = ((clip_grad, "_get_total_norm"), (torch.nn.utils, "get_total_norm"))
"""Where torch has the function: `clip_grad_norm_`, whoever imported it from where, looks it up under the first name."""


def install() -> None:
    """Called when a module is wrapped. Gradients that are not of shards go to torch's function, as before."""
    for module, name in _NAMES:
        original = getattr(module, name)
        if not hasattr(original, "_of_torch"):
            setattr(module, name, _knowing_shards(original))


def _knowing_shards(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        owners = live.of(given)
        if not any(owners):
            return original(given, norm_type, error_if_nonfinite, foreach)
        norm = _total(given, owners, float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} of gradients is non-finite ({norm.item()}), so they cannot be clipped. Pass error_if_nonfinite=False to "
                "scale them by it anyway"
            )
        return norm

    get_total_norm._of_torch = original  # type: ignore[attr-defined]
    return get_total_norm


@torch.no_grad()
def _total(given: list[torch.Tensor], owners: list[Groups | None], p: float) -> torch.Tensor:
    cut: dict[str, tuple[list[torch.Tensor], Any]] = {}
    for t, among in zip(given, owners, strict=True):
        if among is not None:
            cut.setdefault(among.loose_text, ([], among.members))[0].append(t)
    return grad_norm.total(list(cut.values()), [t for t, among in zip(given, owners, strict=True) if among is None], p)

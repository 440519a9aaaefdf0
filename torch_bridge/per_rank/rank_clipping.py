"""`clip_grad_norm_(parameters, 1.0 + rank)`: torch's functions that clip gradients, with a bound that differs by rank.

They begin with `float(bound)`, which is the first hosted rank's for all. In torch's module the name `float` leaves such a bound as it is: each rank's own in
what follows. `clip_grad_value_` gives its bound to an op that takes plain numbers, so tensors take its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from torch_bridge.mesh import rank_numbers


@functools.cache
def install() -> None:
    """Once there is a number that differs by rank."""
    clip_grad.float = _kept  # type: ignore[attr-defined]
    clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = _by_value(clip_grad.clip_grad_value_)


def _kept(x: Any = 0.0) -> Any:
    """`float(x)`, each rank's own of one that differs."""
    return x * 1.0 if rank_numbers.is_ranked(x) else float(x)


def _by_value(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def clip_grad_value_(parameters: Any, clip_value: Any, *args: Any, **kwargs: Any) -> None:
        if not rank_numbers.is_ranked(clip_value):
            original(parameters, clip_value, *args, **kwargs)
            return
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        with torch.no_grad():
            for grad in [p.grad for p in given if p.grad is not None]:
                bound = torch.zeros((), dtype=grad.dtype, device=grad.device) + clip_value
                grad.clamp_(-bound, bound)

    return clip_grad_value_

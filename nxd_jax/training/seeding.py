"""One seed for all random numbers of a training."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from nxd_jax.tensor_parallel.random import model_parallel_xla_manual_seed


def seed_everything(seed: Any) -> None:
    """Seed Python, NumPy, torch, the device, and the random states of tensor-parallel ranks. None: leave them.

    The original adds 100 for each pipeline rank; here all stages draw from one stream, so that a model begins alike however it is laid out.
    """
    if seed is None:
        return
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed: {seed!r} must be a whole number that is not negative")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_xla_manual_seed(seed)

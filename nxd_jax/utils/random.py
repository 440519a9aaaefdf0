"""`neuronx_distributed.utils.random`."""

from __future__ import annotations

import random

import numpy as np
import torch

from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.tensor_parallel.random import model_parallel_xla_manual_seed


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (the CPU and xla), and once model parallel groups exist also what tensor parallel ranks draw differently."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if parallel_groups.initialized():
        model_parallel_xla_manual_seed(seed)

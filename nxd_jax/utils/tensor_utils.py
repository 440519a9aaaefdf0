"""`neuronx_distributed.utils.tensor_utils`."""

from __future__ import annotations

import torch


def cumsum(tensor: torch.Tensor, dim: int = 0, tril_size: int = 2048) -> torch.Tensor:
    """`tensor_utils.cumsum`: running sums down the rows of a 2-d tensor, added up in float64 and returned in the tensor's own dtype.

    tril_size is accepted: NxD multiplies by triangular matrices of that size.

    Raises ValueError for a tensor that is not 2-d, and NotImplementedError for a dim other than 0.
    """
    if tensor.dim() != 2:
        raise ValueError(f"cumsum needs a 2-d tensor, got one of shape {list(tensor.shape)}; use torch.cumsum(tensor, dim)")
    if dim != 0:
        raise NotImplementedError(f"cumsum(dim={dim}): only dim 0 is supported; use torch.cumsum(tensor, dim)")
    return torch.cumsum(tensor, 0, dtype=torch.float64).to(tensor.dtype)

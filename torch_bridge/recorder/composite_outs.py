"""Overloads with `out=` that torch makes of other ops in a way that does not reach an xla tensor: it writes to memory behind what it calls a copy
(`kron`), or gives another tensor than `out` back (`linalg.matrix_rank`). Here the result is computed, and written to `out`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_bridge.recorder.dispatch import composite

aten = torch.ops.aten


def _writes(functional: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    """What an overload with `out=` does, by the one without."""
    name = functional._schema.name.removeprefix("aten::")

    def write(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        given = [x for x in pytree.tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            raise RuntimeError(
                f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the arguments requires grad."
            )
        return torch.mul(functional(*args, **kwargs), True, out=out)  # with torch's rules for sizes and dtypes of `out`

    return write


composite(aten.kron.out, _writes(aten.kron.default))
composite(aten.linalg_matrix_rank.out, _writes(aten.linalg_matrix_rank.default))
composite(aten.linalg_matrix_rank.atol_rtol_float_out, _writes(aten.linalg_matrix_rank.atol_rtol_float))
composite(aten.linalg_matrix_rank.atol_rtol_tensor_out, _writes(aten.linalg_matrix_rank.atol_rtol_tensor))
composite(aten.linalg_matrix_rank.out_tol_tensor, _writes(aten.linalg_matrix_rank.tol_tensor))

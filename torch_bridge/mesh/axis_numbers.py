"""A table with a number for each rank, inside a program: the rank's own, from its place along the mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from torch_bridge.mesh import world


def own(values: Sequence[Any], dtype: DTypeLike) -> Any:
    """Inside a program: the rank's own of the values, as a traced scalar; a line through the axis index where it is one."""
    axes = world.axes_of_table(values)
    if not axes:
        return jnp.asarray(values[world.current().order[0]], dtype)
    index = jax.lax.axis_index(axes if len(axes) > 1 else axes[0])
    table = _reduced(values, axes)
    step = table[1] - table[0]
    if all(table[k] == table[0] + k * step for k in range(len(table))):
        return (index.astype(dtype) * jnp.asarray(step, dtype)) + jnp.asarray(table[0], dtype)
    return jnp.asarray(table, dtype)[index]


def _reduced(values: Sequence[Any], axes: tuple[str, ...]) -> list[Any]:
    """The values at index 0 of all other axes, in the order of the linear index over `axes`."""
    others = [world.coordinates(a) for a in world.current().axes if a not in axes]
    return [values[r] for r in world.current().order if all(c[r] == 0 for c in others)]

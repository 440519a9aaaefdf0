"""The types of a lowering's arguments, by the names that its signature uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
from jax.typing import DTypeLike

from torch_bridge.ir import dtypes

Array: TypeAlias = jax.Array
Key: TypeAlias = jax.Array
"""A PRNG key: what a lowering with `rng=True` takes as `key`."""
DType: TypeAlias = DTypeLike
"""A dtype on JAX's side: a numpy dtype or what `jnp.dtype` makes one of. torch's own are `torch.dtype`."""

Number: TypeAlias = int | float | complex
"""A Python number (bools are ints): a Scalar of an op with `lift=False`, which shapes the program."""
Scalar: TypeAlias = dtypes.SchemaScalar
"""What torch's schema calls a Scalar: a Python number, or one that is an input of the program."""
Operand: TypeAlias = Array | Scalar
"""An operand of arithmetic: torch's Python numbers arrive as such also where the schema says Tensor."""

Shape: TypeAlias = Sequence[int]
Dims: TypeAlias = int | Sequence[int]
"""One dim or several, negative ones counted from the end."""

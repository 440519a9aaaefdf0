"""Which precision the environment asks for when a graph runs.

| variable | what changes |
|---|---|
| `NEURON_RT_STOCHASTIC_ROUNDING_EN` | 1: roundings to bfloat16 and float16 in compiled programs are stochastic (`stochastic_rounding.py`) |
| `NEURON_RT_STOCHASTIC_ROUNDING_SEED` | seed of their random numbers, 0 by default |
| `XLA_USE_BF16`, `XLA_DOWNCAST_BF16` | what float tensors hold on the device (`device_formats.py`); stochastic rounding unless that is set to 0 |
| `NEURON_CC_FLAGS` | `--auto-cast=none, matmult or all` and `--auto-cast-type=bf16, fp16, tf32 or fp8_e4m3`: the type that float32 ops compute in |

They are read at every execution, so a script may set them after its imports. A program is compiled for one `Mode` and never used for another.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_bridge import _compat
from torch_bridge.config import compiler_flags
from torch_bridge.config.variables import VARIABLES
from torch_bridge.mesh import abstract_arrays, sharding
from torch_bridge.precision import device_formats, rewrite_roundings, stochastic_rounding

_SWITCH = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
_SEED = "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
_VARIABLES = (_SWITCH, _SEED, *device_formats.VARIABLES)
VARIABLE_NAMES = ("NEURON_CC_FLAGS", *_VARIABLES)
"""What `Mode` depends on."""


@dataclass(frozen=True)
class Mode:
    """How a program computes.

    stochastic: roundings to half precision are. float32, float64: the formats (names as in `--auto-cast-type`, and fp32) that results of that dtype
    are rounded to; None: as they are. matmul: the format that float32 operands of matrix products and convolutions are rounded to.
    """

    stochastic: bool = False
    float32: str | None = None
    float64: str | None = None
    matmul: str | None = None


PLAIN = Mode()
_read: tuple[tuple[str | None, ...], Mode, int, dict[str, str]] = ((None,) * len(VARIABLE_NAMES), PLAIN, 0, {})


def current() -> Mode:
    """What the environment asks for now; `ValueError` for values it cannot have."""
    return _settings()[1]


def _settings() -> tuple[tuple[str | None, ...], Mode, int, dict[str, str]]:
    """The raw variables, the mode, the seed and the formats of uploads; parsed again when a variable changed."""
    global _read
    raw = tuple(map(os.environ.get, VARIABLE_NAMES))
    if raw != _read[0]:
        values = {name: VARIABLES[name].parse(text or "") for name, text in zip(_VARIABLES, raw[1:], strict=True)}
        flags = compiler_flags.parse(raw[0] or "")
        scope, kind = flags.get("--auto-cast", "none"), flags.get("--auto-cast-type", "bf16")
        held = device_formats.formats(values)
        mode = Mode(
            stochastic=bool(held) if values[_SWITCH] is None else values[_SWITCH],
            float32=held.get("float32") or (kind if scope == "all" else None),
            float64=held.get("float64"),
            matmul=kind if scope != "none" else None,
        )
        _read = (raw, mode, values[_SEED] or 0, held)
    return _read


def uploaded(values: np.ndarray) -> np.ndarray:
    """What the device holds of values that are moved to it."""
    return device_formats.on_host(values, _settings()[3])


def extra_inputs(mode: Mode) -> list[Any]:
    """What a program of this mode takes after its other inputs, if it rounds stochastically: what tells its roundings apart, and the random words of this
    execution."""
    if not mode.stochastic:
        return []
    return [*_place_numbers(), stochastic_rounding.STREAM.take(_settings()[2])]


def extra_count(mode: Mode) -> int:
    """How many these are."""
    return stochastic_rounding.PLACES + 1 if mode.stochastic else 0


def _place_numbers() -> Sequence[Any]:
    if abstract_arrays.active():
        return stochastic_rounding.place_numbers()
    return _placed(sharding.mesh() if sharding.active() else None, getattr(jax.config, "jax_default_device", None))


@functools.lru_cache(maxsize=2)
def _placed(mesh: Any, device: Any) -> Sequence[Any]:
    """On the devices of the mesh, or on the default device: they are the same in every execution."""
    return [_compat.put(k) if mesh is None else sharding.replicated(k) for k in stochastic_rounding.place_numbers()]


def store(mode: Mode) -> Callable[[Any], Any] | None:
    """How a program of this mode rounds each value that an op returns; None: not at all."""
    if mode.float32 is None and mode.float64 is None:
        return None
    formats = {jnp.dtype(jnp.float32): mode.float32, jnp.dtype(jnp.float64): mode.float64}

    def rounded(x: Any) -> Any:
        target = formats.get(getattr(x, "dtype", None))
        return x if target is None else _rounded(x, target, mode.stochastic)

    return rounded


def _rounded(x: Any, target: str, stochastic: bool) -> Any:
    """`x` in its own dtype with the values of a narrower format. XLA may drop a pair of converts, so plain rounding is `reduce_precision`."""
    if target == "fp32":
        return lax.reduce_precision(x, 8, 23)
    narrow = x.astype(jnp.float32)
    half = rewrite_roundings.HALF.get(target)
    narrow = (
        narrow.astype(half).astype(jnp.float32)
        if stochastic and half is not None
        else stochastic_rounding.nearest(narrow, *rewrite_roundings.BITS[target])
    )
    return narrow.astype(x.dtype)


def apply(mode: Mode, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """`run(*inputs)`, traced, with the roundings of this mode; the inputs end with those of `extra_inputs`."""
    if not mode.stochastic and mode.matmul is None:
        return run(*inputs)
    if not mode.stochastic:
        return rewrite_roundings.rewrite(run, inputs, matmul=mode.matmul)
    given = len(inputs) - extra_count(mode)
    return rewrite_roundings.rewrite(run, inputs[:given], inputs[-1], inputs[given:-1], mode.matmul)

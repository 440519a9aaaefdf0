"""On CPUs XLA may compute no more than single products in its kernel library (YNNPACK).

By itself XLA hands the library a product or a sum together with what reads it. In jaxlib 0.10.2 to 0.11.2 such groups give wrong numbers without a word:

| group | wrong in |
|---|---|
| a product of one matrix for the whole batch (`expand`: K/V heads that several query heads share), then sums (softmax, its gradient) | 0.10.2, 0.11.2 |
| many rows times a small matrix, squared and summed (32,769 x 3 by 3 x 3); jax-ml/jax issue 39103 | 0.10.2 |
| `reduce_window` with dilation where the window is 1; openxla/xla issue 48714 | 0.10.2 |
| sums of tensors of rank 7 and more end the process; jax-ml/jax issue 39257 | 0.10.2, 0.11.0 |

jaxlib 0.10.0 gives it single products, and so does `VALUE`. Convolutions are then Eigen's, which runs them on all threads; the library runs many on one.

Programs that are recorded or traced have it among their options (`compiler.xla_options`). What else is compiled in the process, such as functions of `to_jax`
under the caller's own `jax.jit`, gets it where XLA reads its flags after `single_products_only`. Whoever names the option in `XLA_FLAGS` has the last word.
"""

from __future__ import annotations

import functools
import os
import warnings

from torch_bridge import _compat

OPTION = "xla_cpu_experimental_ynn_fusion_type"
VALUE = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"


def named_by_user() -> bool:
    """Whether `XLA_FLAGS` says what the library gets."""
    return OPTION in os.environ.get("XLA_FLAGS", "")


def single_products_only() -> None:
    """Make it the default of this process, if XLA has not read its flags yet. `XLA_FLAGS` stays as it is: processes that are started later may have another
    XLA, and one that does not know a flag aborts."""
    if named_by_user() or not _compat.has_library_fusions():
        return
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} --{OPTION}={VALUE}".strip()
    try:
        _compat.read_xla_flags()
    finally:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before


@functools.cache
def warn_if_fused() -> None:
    """One warning if JAX was used before this process had the default, so that the caller's own `jax.jit` on CPUs may give wrong numbers."""
    if not named_by_user() and _compat.fuses_products():
        warnings.warn(
            "JAX ran before to_jax was used first. What you compile with jax.jit on CPUs can give wrong numbers in jaxlib 0.10.2 to 0.11.2: XLA computes "
            f"products and what reads them as one. Set XLA_FLAGS=--{OPTION}={VALUE} in the environment, or use to_jax before JAX runs.",
            stacklevel=3,
        )

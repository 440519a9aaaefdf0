"""How `log_metrics` of a model module is called: with the numbers that an override asks for, each under its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_FIRST = ("log_fn", "loss_mean")
_REST = ("lr", "global_step", "consumed_samples", "grad_norm", "param_norm", "throughput", "throughput_peak")

NEWEST = (*_FIRST, "misc_metrics", *_REST, "trainer")
"""The arguments by position, as NxD Training's newest release has them. It calls the hook for steps that are logged."""
OLDER = (*_FIRST, *_REST, "full_log", "trainer")
"""As its first releases have them. They call the hook in every step; full_log says whether the step is logged."""


def call(hook: Callable[..., None], numbers: Mapping[str, Any], full_log: bool) -> None:
    """Call an override of `log_metrics`, or the method itself, with `numbers` (by the names of `NEWEST`).

    Parameters that all have known names get their values by name, in whatever order they stand. Others get them by position: in the order `OLDER` where a
    parameter is called full_log, else in the order `NEWEST`. full_log: whether the step is logged; for others only a hook with full_log is called.

    Raises TypeError for an override that can be called in neither way.
    """
    signature = inspect.signature(hook)
    older = "full_log" in signature.parameters
    if not full_log and not older:
        return
    values = {**numbers, "full_log": full_log}
    if (names := _names(signature)) is not None:
        hook(**{name: values[name] for name in names})
        return
    order = OLDER if older else NEWEST
    try:
        signature.bind(*order)
    except TypeError as error:
        raise TypeError(
            f"log_metrics{signature} cannot be called: it must take ({', '.join(order)}), in this order or by these names"
        ) from error
    hook(*(values[name] for name in order))


def _names(signature: inspect.Signature) -> list[str] | None:
    """Which numbers are asked for by name; None if a parameter has another name, or stands for several by position."""
    found: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found += [more for more in NEWEST if more not in signature.parameters]
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY) or name not in {*NEWEST, *OLDER}:
            return None
        else:
            found.append(name)
    return found

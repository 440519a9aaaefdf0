"""Hooks inside of modules that do not stand against playing them (`replay`), as all they do ends up in what the module returns.

That is how transformers' models collect hidden states, attentions and router logits when these are asked for: hooks on their layers, which stay there,
append to a list that lives as long as the call.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_COLLECTS = "transformers.utils.output_capturing"


def all_known(hooks: Mapping[Any, Any]) -> bool:
    """Whether all hooks of a module are of that kind."""
    return all(getattr(hook, "__module__", "") == _COLLECTS for hook in hooks.values())


def collecting() -> bool:
    """Whether a module around is collecting now: then its hooks have to be called."""
    active = getattr(sys.modules.get(_COLLECTS), "_active_collector", None)
    return active is not None and bool(active.get())

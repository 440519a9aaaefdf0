"""Puts ours in the place of transformers' `GenerationMixin.generate`: when transformers is imported, or at once if it has been."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch_bridge.config.late_imports import when_imported

WHERE = "transformers.generation.utils"
"""The module that has `GenerationMixin`."""


def install() -> None:
    """Called when the first xla tensor of the process is made, without which no model is on xla. Imports nothing of transformers."""
    when_imported(WHERE, _wrap)


def _wrap(module: ModuleType) -> None:
    mixin: Any = module.GenerationMixin
    original = mixin.generate
    if hasattr(original, "_of_transformers"):
        return

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        from torch_bridge.generation import generate

        return generate.generate(original, self, args, kwargs)

    generate._of_transformers = original  # type: ignore[attr-defined]
    mixin.generate = generate

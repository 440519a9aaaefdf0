"""Token ids as users have them: lists, NumPy arrays, tensors on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_TAKEN = 'give token ids, such as tokenizer(text)["input_ids"]'


def prompts(given: Any) -> list[list[int]]:
    """Prompts as lists: a sequence of them, or an array or tensor [prompts, tokens]. Raises TypeError for what else there is, such as a single prompt."""
    if isinstance(given, (str, bytes, Mapping)) or not hasattr(given, "__iter__"):
        raise TypeError(f"prompts must be a list with the token ids of each prompt, got {_shown(given)}: {_TAKEN}")
    rows = [_plain(one) for one in given]
    if rows and all(isinstance(one, (int, float)) or getattr(one, "ndim", None) == 0 for one in rows):
        raise TypeError(
            f"prompts must be a list with the token ids of each prompt, got {_shown(rows)}: put a single prompt into a list, too"
        )
    return [prompt(one, f"prompt {number}") for number, one in enumerate(rows)]


def prompt(given: Any, name: str = "the prompt") -> list[int]:
    """A prompt as a list. Raises TypeError for what is no row of whole numbers."""
    found = _numbers(given)
    if found is None or found.ndim != 1:
        raise TypeError(f"{name} is {_shown(given)}: {_TAKEN}, one row of whole numbers")
    return list(map(int, found))


def table(given: Any, name: str) -> np.ndarray[Any, Any]:
    """Whole numbers as an array. Raises TypeError for others, and for rows of other lengths."""
    found = _numbers(given)
    if found is None:
        raise TypeError(f"{name} must be whole numbers, in rows of one length, got {_shown(given)}")
    return found


def ends(given: int | Sequence[int]) -> tuple[int, ...]:
    """Tokens that end a text: one, or several."""
    return tuple(int(token) for token in table(given, "end").reshape(-1))


def _numbers(given: Any) -> np.ndarray[Any, Any] | None:
    """int64; None for what is not made of whole numbers."""
    plain = _plain(given)
    if isinstance(plain, (str, bytes, Mapping, set)):
        return None
    try:
        found = np.asarray([_plain(one) for one in plain] if isinstance(plain, (list, tuple)) else plain)
    except ValueError:  # rows of other lengths
        return None
    if not found.size:
        return found.astype(np.int64)
    return found.astype(np.int64) if found.dtype.kind in "iu" else None


def _plain(given: Any) -> Any:
    return given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given


def _shown(given: Any) -> str:
    text = repr(_plain(given))
    return text if len(text) <= 60 else f"{text[:57]}..."

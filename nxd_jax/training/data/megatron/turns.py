"""Whose turn it is when several sets are blended by weights: always that of the set which is furthest behind its weight, the first one of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

BLOCK = 1 << 16
"""Turns that are looked at together."""

LONGEST = 10_000
"""Of a pattern of turns that is looked for."""


def turns(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """(set, how many turns it had before) of each of `size` turns: uint16 [size], int64 [size]. (The original's `build_blending_indices`.)

    Weights such as 0.3 and 0.7 give a pattern that comes again; it is laid out and every turn of it compared with the rule, which takes hundredths of a second
    for a million of turns. Other weights take a second.
    """
    chosen, counts = np.empty(size, np.uint16), np.zeros(len(weights), np.int64)
    pattern, done = _pattern(weights), 0
    while done < size:
        if pattern is not None and done >= pattern:
            again = _as_before(weights, counts, chosen[done - pattern : done], done, min(BLOCK, size - done))
            chosen[done : done + len(again)] = again
            counts += np.bincount(again, minlength=len(counts))
            done += len(again)
            if len(again) == BLOCK:
                continue
        end = min(size, done + (pattern or size))
        chosen[done:end] = _one_by_one(weights, counts, done, end)
        counts += np.bincount(chosen[done:end], minlength=len(counts))
        done = end
    return chosen, _numbers(chosen, len(weights))


def _pattern(weights: Sequence[float]) -> int | None:
    """After how many turns all sets have what their weights say; None if that takes too many."""
    fractions = [Fraction(weight).limit_denominator(LONGEST) for weight in weights]
    length = math.lcm(*(fraction.denominator for fraction in fractions))
    exact = all(abs(float(fraction) - weight) < 1e-12 for fraction, weight in zip(fractions, weights, strict=True))
    return length if exact and length <= LONGEST else None


def _one_by_one(weights: Sequence[float], counts: np.ndarray, begin: int, end: int) -> list[int]:
    had = counts.tolist()
    found = []
    for turn in range(begin, end):
        due = float(turn) if turn else 1.0
        behind = [weight * due - count for weight, count in zip(weights, had, strict=True)]
        first = behind.index(max(behind))
        found.append(first)
        had[first] += 1
    return found


def _as_before(weights: Sequence[float], counts: np.ndarray, pattern: np.ndarray, begin: int, size: int) -> np.ndarray:
    """The pattern again, as far as it is what the rule says."""
    supposed = np.resize(pattern, size)
    due = np.maximum(np.arange(begin, begin + size, dtype=np.float64), 1.0)
    first, most = np.zeros(size, np.int64), np.full(size, -np.inf)
    for number, (weight, count) in enumerate(zip(weights, counts.tolist(), strict=True)):
        mine = supposed == number
        behind = weight * due - (count + np.cumsum(mine) - mine)
        first[behind > most] = number
        most = np.maximum(behind, most)
    wrong = np.flatnonzero(first != supposed)
    return supposed[: wrong[0]] if len(wrong) else supposed


def _numbers(chosen: np.ndarray, sets: int) -> np.ndarray:
    found = np.empty(len(chosen), np.int64)
    for number in range(sets):
        places = np.flatnonzero(chosen == number)
        found[places] = np.arange(len(places))
    return found

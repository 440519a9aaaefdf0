"""The rules of Megatron's GPT datasets as plain loops over documents and tokens, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def epochs(tokens: int, seq_length: int, samples: int, extra: int) -> int:
    count = 1
    while (count * tokens - extra) // seq_length < samples:
        count += 1
    return count


def separate_last_epoch(tokens: int, seq_length: int, samples: int, count: int, extra: int) -> bool:
    if count == 1:
        return False
    needed = samples - ((count - 1) * tokens - extra) // seq_length
    return needed < int(0.80 * ((tokens - extra) // seq_length))


def maps(
    sizes: Sequence[int], documents: Sequence[int], seq_length: int, samples: int, seed: int, extra: int = 1, drop_last: bool = True
) -> tuple[list[int], list[list[int]], list[int]]:
    """(documents of all epochs, where samples begin, the order of samples)."""
    tokens = sum(sizes[d] for d in documents)
    count = epochs(tokens, seq_length, samples, extra)
    separate = separate_last_epoch(tokens, seq_length, samples, count, extra)
    source = np.random.RandomState(seed)
    order: list[int] = []
    for times in (count - 1, 1) if separate else (count,):
        part = np.array([d for _ in range(times) for d in documents], np.int32)
        source.shuffle(part)
        order += part.tolist()
    bounds = begins(sizes, order, seq_length, extra, drop_last)
    total = len(bounds) - 1
    first = ((count - 1) * tokens - extra) // seq_length if separate else total
    shuffled: list[int] = []
    for low, high in ((0, first), (first, total)):
        numbers = np.arange(low, high, dtype=np.uint32)
        if len(numbers):
            source.shuffle(numbers)
        shuffled += numbers.tolist()
    return order, bounds, shuffled


def begins(sizes: Sequence[int], order: Sequence[int], seq_length: int, extra: int, drop_last: bool) -> list[list[int]]:
    """Walk through the documents, `seq_length` tokens from bound to bound."""
    total = sum(sizes[d] for d in order) - extra
    count = total // seq_length if drop_last else -(-total // seq_length)
    place, offset = 0, 0
    found = [[0, 0]]
    for _ in range(count):
        missing = seq_length + extra
        while missing:
            here = sizes[order[place]] - offset
            if here >= missing:
                offset += missing - extra
                missing = 0
            elif place == len(order) - 1:
                offset = sizes[order[place]] - extra
                missing = 0
            else:
                missing -= here
                place, offset = place + 1, 0
        found.append([place, offset])
    return found


def text(rows: Sequence[Sequence[int]], order: Sequence[int], begin: int, length: int) -> list[int]:
    """Tokens of the stream of all documents, by walking it from its first token on."""
    stream = [token for d in order for token in rows[d]]
    return stream[begin : begin + length]

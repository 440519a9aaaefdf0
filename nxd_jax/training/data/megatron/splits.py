"""What `data.splits_string` says: which documents are for training, validation and test."""

from __future__ import annotations

from itertools import accumulate


def split(said: str, documents: int) -> list[int]:
    """Four bounds: document 0, the ends of training, validation and test; the last one is `documents`.

    said: three weights with commas or slashes ("980,10,10"). Ends are sums of rounded numbers; what they are too many or too few together is taken from all.

    Raises ValueError for anything else. (Small sets with uneven weights give the original bounds below 0, and it stops.)
    """
    words = str(said).split("," if "," in str(said) else "/")
    try:
        weights = [float(word) for word in words]
    except ValueError:
        weights = []
    total = sum(weights)
    if len(weights) != 3 or min(weights) < 0 or not 0 < total < float("inf"):
        raise ValueError(f"data.splits_string: {said!r} must be three weights for training, validation and test, such as 980,10,10")
    ends = list(accumulate(round(weight / total * float(documents)) for weight in weights))
    return [0, *(max(end - (ends[-1] - documents), 0) for end in ends)]

"""Numbers as people read them: bytes, counts, operations, seconds."""

from __future__ import annotations

_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def size(count: float) -> str:
    """Bytes in the largest unit of which there is at least one: 1536 -> "1.50 KiB"."""
    for unit, name in _BYTES:
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:g} B"


def count(number: float) -> str:
    """A count with a decimal prefix: 1500 -> "1.5 k"; small whole numbers as they are."""
    for unit, name in _COUNTS:
        if abs(number) >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number:g}"


def many(number: int, noun: str) -> str:
    """A number and its noun: "1 program", "2 programs"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def seconds(time: float) -> str:
    """A duration in the largest unit of which there is at least one: 0.0025 -> "2.5 ms"."""
    for unit, name in _SECONDS:
        if abs(time) >= unit:
            return f"{time / unit:.3g} {name}"
    return "0 s" if not time else f"{time / 1e-9:.3g} ns"


def share(part: float, whole: float) -> str:
    """A part in percent of the whole; "-" of nothing."""
    return f"{part / whole:.1%}" if whole else "-"

"""Yes or no in configurations."""

from __future__ import annotations


def flag(name: str, value: object) -> bool:
    """True or False; scripts also pass 1 or 0. Raises TypeError for anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name} must be True or False (or 1 or 0), got {value!r}")

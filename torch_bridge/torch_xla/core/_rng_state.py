"""The device's random state as one int, as torch_xla has it: the seed in the low 32 bits, the number of draws since in the high ones."""

from __future__ import annotations

import hashlib

from torch_bridge.rng import RngState

_LOW = 0xFFFFFFFF
_MAX_OFFSET = 1 << 31


def pack(state: RngState) -> int:
    """An int below 2**63 that `restore` turns into the same state.

    A state too large for one is first replaced by a fresh seed derived from it.
    """
    if state.seed > _LOW or state.offset >= _MAX_OFFSET:
        digest = hashlib.sha256(f"{state.seed},{state.offset}".encode()).digest()
        state.manual_seed(int.from_bytes(digest[:4], "little"))
    return state.offset << 32 | state.seed


def restore(state: RngState, packed: int) -> None:
    """Put back what `pack` gave. Any int may be used as a seed."""
    unsigned = packed & 0xFFFFFFFFFFFFFFFF
    state.seed, state.offset = unsigned & _LOW, unsigned >> 32 & (_MAX_OFFSET - 1)

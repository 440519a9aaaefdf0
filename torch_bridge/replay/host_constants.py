"""What a stretch of recorded ops takes from the host: tensors that its code makes of Python values (`torch.tensor([1, 2], device=x.device)`, a mask that
is put together on the CPU). Where two recordings take the same, they are constants of the tape, with arrays that live as long as it does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_bridge.ir.layout import Layout
from torch_bridge.ir.segment import Segment, Storage
from torch_bridge.runtime import transfer

if TYPE_CHECKING:
    pass

MOST = 1 << 24
"""Bytes of the largest constant."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """digest: of the values; layout: of the storage that has them; spec: how ranks hold it."""

    digest: bytes
    layout: Layout
    spec: Any
    array: Any = dataclasses.field(compare=False, repr=False)

    def storage(self) -> Storage:
        """A new storage with the values."""
        made = Storage(self.layout, self.array)
        if self.spec is not None:
            made.describe(spec=self.spec)
        return made


_WATCHING: list[Uploads] = []


def _tell(array: object, hosts: Sequence[torch.Tensor]) -> None:
    for uploads in tuple(_WATCHING):
        uploads._uploaded(array, hosts)


class Uploads:
    """Notes what this thread uploads until `stop`. The segment holds the arrays as long as it needs them, so that no program overwrites one that a tape has."""

    def __init__(self, segment: Segment):
        self._segment = segment
        self._thread = threading.get_ident()
        self._digests: dict[int, tuple[Any, bytes]] = {}
        _WATCHING.append(self)
        transfer.WITNESS = _tell

    def _uploaded(self, array: object, hosts: Sequence[torch.Tensor]) -> None:
        if threading.get_ident() != self._thread:  # a data loader's
            return
        self._segment.kept.append(array)
        if sum(host.nbytes for host in hosts) <= MOST and all(host.device.type == "cpu" for host in hosts):
            digest = hashlib.sha256()
            for host in hosts:
                digest.update(transfer.bits(host))
            self._digests[id(array)] = array, digest.digest()

    def stop(self) -> None:
        """End watching."""
        _WATCHING.remove(self)
        transfer.WITNESS = _tell if _WATCHING else None

    def constant(self, storage: Storage) -> Constant | None:
        """What a storage holds, if that was uploaded and nothing was written to it since."""
        array, digest = self._digests.get(id(storage.held), (None, b""))
        return None if array is None else Constant(digest, storage.layout, storage.spec, array)

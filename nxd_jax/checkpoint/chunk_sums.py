"""Chunks of arrays with a checksum: Orbax writes uncompressed ones, in which a flipped byte or a lost block loads as numbers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch_bridge.config.variables import VARIABLES

SUMMED = {"id": "zlib", "level": 0}
"""Zarr's codec for chunks that are stored as they are, with an Adler-32 behind them, which every reader of zarr checks."""

FAILED = "inflate() failed"
"""In errors of reading: the bytes do not give the checksum."""

_lock = threading.Lock()
_open = 0


@contextlib.contextmanager
def written() -> Iterator[None]:
    """A block in which Orbax writes uncompressed chunks with a checksum. It has no option for that, so what describes arrays that it writes is replaced.

    Another save of Orbax at that time, in another thread, writes such chunks as well: they hold the same and are read alike. An Orbax that describes arrays
    in another way writes chunks without a checksum; `NXD_JAX_CHECKPOINT_CHECKSUMS=0` has it do so.
    """
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils as described
    except ImportError:
        described = None
    if not hasattr(described, "build_array_write_spec") or VARIABLES["NXD_JAX_CHECKPOINT_CHECKSUMS"].now() is False:
        yield
        return
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            described.build_array_write_spec = _Summing(described.build_array_write_spec)
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                described.build_array_write_spec = described.build_array_write_spec.build


class _Summing:
    """Orbax's `build_array_write_spec` for chunks with a checksum."""

    def __init__(self, build: Callable[..., Any]):
        self.build = build

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        spec = self.build(*args, **kwargs)
        array = spec.json
        while array.get("driver") == "cast":
            array = array["base"]
        if array.get("driver") == "zarr" and array.get("metadata", {}).get("compressor", SUMMED) is None:
            array["metadata"]["compressor"] = dict(SUMMED)
        return spec

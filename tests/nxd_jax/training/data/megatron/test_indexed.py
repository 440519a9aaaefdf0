"""`.bin` and `.idx` files: bytes as the format has them, written and read, and what is said of files that are damaged."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxd_jax.training.data.megatron import indexed
from nxd_jax.training.data.megatron.indexed import DTYPES, IndexedSet
from nxd_jax.training.data.megatron.writing import IndexedWriter, smallest_dtype

SEQUENCES: list[list[int]] = [[5, 6, 7], [], [1], [9, 8, 7, 6, 5]]


def by_hand(folder: Path, code: int, dtype: str, bounds: tuple[int, ...] = (0, 2, 4), sequences: list[list[int]] | None = None) -> Path:
    """A set as its specification reads, field by field."""
    sequences = SEQUENCES if sequences is None else sequences
    item = struct.calcsize(dtype)
    body, places, at = b"", [], 0
    for ids in sequences:
        places.append(at)
        at += len(ids) * item
        body += struct.pack(f"<{len(ids)}{dtype}", *ids)
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code) + struct.pack("<QQ", len(sequences), len(bounds))
    head += b"".join(struct.pack("<i", len(ids)) for ids in sequences)
    head += b"".join(struct.pack("<q", place) for place in places)
    head += b"".join(struct.pack("<q", bound) for bound in bounds)
    (folder / "a.bin").write_bytes(body)
    (folder / "a.idx").write_bytes(head)
    return folder / "a"


CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}


@pytest.mark.parametrize("code", CODES)
def test_every_dtype(code: int, tmp_path: Path) -> None:
    prefix = by_hand(tmp_path, code, CODES[code])
    found = IndexedSet(prefix)
    assert [row.tolist() for row in map(found.__getitem__, range(4))] == SEQUENCES
    assert found.dtype == np.dtype(DTYPES[code]) and found.tokens == 9 and len(found) == 4
    assert found.documents.tolist() == [0, 2, 4] and found.sizes.tolist() == [3, 0, 1, 5]
    with IndexedWriter(tmp_path / "b", DTYPES[code]) as writer:
        for number, ids in enumerate(SEQUENCES):
            writer.add(ids)
            if number % 2:
                writer.end_document()
    assert (writer.sequences, writer.documents, writer.tokens) == (4, 2, 9)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"b{suffix}").read_bytes() == (tmp_path / f"a{suffix}").read_bytes()


def test_code_7_of_nemos_builder_is_float64(tmp_path: Path) -> None:
    found = IndexedSet(by_hand(tmp_path, 7, "d"))
    assert found.dtype == np.float64 and found[3].tolist() == SEQUENCES[3]


def test_parts_of_sequences(tmp_path: Path) -> None:
    found = pickle.loads(pickle.dumps(IndexedSet(by_hand(tmp_path, 8, "H"))))
    assert found.get(3, 2).tolist() == [7, 6, 5] and found.get(3, 1, 2).tolist() == [8, 7]
    assert found.get(0, 3).tolist() == [] and found.get(1).tolist() == []
    assert [block.tolist() for block in found.blocks(4)] == [[5, 6, 7, 1], [9, 8, 7, 6], [5]]
    for arguments in ((3, 0, 6), (3, 6), (0, -1), (2, 0, -1)):
        with pytest.raises(IndexError, match=r"a: sequence \d has \d tokens, and -?\d from -?\d on were asked for"):
            found.get(*arguments)
    with pytest.raises(IndexError):
        found[4]


def test_an_empty_set(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a"):
        pass
    found = IndexedSet(tmp_path / "a")
    assert len(found) == found.tokens == 0 and list(found.blocks()) == []


def changed(folder: Path, suffix: str, change: Callable[[bytes], bytes]) -> None:
    file = folder / f"a.{suffix}"
    file.write_bytes(change(file.read_bytes()))


def put(at: int, kind: str, value: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + struct.pack(f"<{kind}", value) + data[at + struct.calcsize(kind) :]


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "another file": ("idx", lambda _: b"PK\x03\x04 and more and more and more of it", r"is no index of a Megatron set: it begins with b'PK"),
    "empty": ("idx", lambda _: b"", r"is no index of a Megatron set: it begins with b''"),
    "cached": ("idx", lambda d: b"TNTIDX\x00\x00" + d[8:], r"is Megatron's older kind \(data_impl lazy or cached\), and only data_impl mmap"),
    "retrieval": ("idx", lambda d: b"MMIDRET\x00\x00" + d[9:], r"is an index for retrieval"),
    "version": ("idx", put(9, "Q", 2), r"a.idx is of version 2; only version 1 is known"),
    "code": ("idx", put(17, "B", 9), r"has the dtype code 9; known are 1 \(uint8\), 2"),
    "cut header": ("idx", lambda d: d[:20], r"is damaged: it ends after 20 bytes, within the header of 34"),
    "cut": ("idx", lambda d: d[:-1], r"with 4 sequences and 3 document bounds it must have 106 bytes, and has 105"),
    "modes": ("idx", lambda d: d + bytes(4), r"says the mode of each of its 4 sequences \(a multimodal set\)"),
    "negative": ("idx", put(34 + 4, "i", -2), r"sequence 1 has -2 tokens"),
    "address": ("idx", put(34 + 16 + 16, "q", 2), r"sequence 2 begins at byte 2, and the one before ends at 6"),
    "bounds": ("idx", put(34 + 48, "q", 1), r"documents must begin with sequence 0, one behind the other, up to 4"),
    "bounds beyond": ("idx", put(34 + 64, "q", 5), r"up to 4"),
    "bounds back": ("idx", put(34 + 56, "q", 9), r"up to 4"),
    "short data": ("bin", lambda d: d[:-2], r"does not fit .*a.bin: 4 sequences of 9 tokens \(uint16\) take 18 bytes, and the file has 16. One of the two"),
    "long data": ("bin", lambda d: d + b"xx", r"take 18 bytes, and the file has 20"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damages(name: str, tmp_path: Path) -> None:
    by_hand(tmp_path, 8, "H")
    suffix, change, said = DAMAGES[name]
    changed(tmp_path, suffix, change)
    with pytest.raises(ValueError, match=said):
        IndexedSet(tmp_path / "a")


def test_a_damage_far_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are joined."""
    monkeypatch.setattr(indexed, "BLOCK", 2)
    assert IndexedSet(by_hand(tmp_path, 8, "H")).tokens == 9
    changed(tmp_path, "idx", put(34 + 16 + 24, "q", 10))
    with pytest.raises(ValueError, match="sequence 3 begins at byte 10, and the one before ends at 8"):
        IndexedSet(tmp_path / "a")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    by_hand(tmp_path, 8, "H")
    with pytest.raises(
        FileNotFoundError, match=r"a.bin: there is no .*a.bin.idx and no .*a.bin.bin. A prefix is the name without .bin and .idx: .*a$"
    ):
        IndexedSet(tmp_path / "a.bin")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"a: there is no .*a.bin$"):
        IndexedSet(tmp_path / "a")


# -- writing -----------------------------------------------------------------------------------------


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens of uint32 cannot be written; dtypes are uint8, int8"):
        IndexedWriter(tmp_path / "a", np.uint32)
    with (
        pytest.raises(ValueError, match="token 300 does not fit uint8: give a larger dtype"),
        IndexedWriter(tmp_path / "a", np.uint8) as writer,
    ):
        writer.add([1, 300])
    assert os.listdir(tmp_path) == []
    assert [smallest_dtype(size).name for size in (65499, 65500, None)] == ["uint16", "int32", "int32"]


def test_a_set_that_is_there_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    def write(ids: list[int], **options: Any) -> None:
        with IndexedWriter(tmp_path / "a", np.uint8, **options) as writer:
            writer.add(ids)
            writer.end_document()

    write([1, 2])
    with pytest.raises(FileExistsError, match=r"a.bin is there already; choose another prefix, or pass --overwrite"):
        write([3])
    with pytest.raises(OSError, match="the disk is full"), IndexedWriter(tmp_path / "a", np.uint8, overwrite=True) as writer:
        writer.add([3])
        raise OSError("the disk is full")
    assert IndexedSet(tmp_path / "a")[0].tolist() == [1, 2]
    write([4, 5, 6], overwrite=True)
    assert IndexedSet(tmp_path / "a")[0].tolist() == [4, 5, 6] and sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_what_a_killed_run_leaves(tmp_path: Path) -> None:
    """It is no set, and the next run removes it; that of a run at work stays."""
    none, other = 2**22 + 1, os.getppid()
    for pid in (none, other):
        (tmp_path / f".a.bin.partial-{pid}").touch()
    with IndexedWriter(tmp_path / "a") as writer:
        writer.add([1])
    assert sorted(os.listdir(tmp_path)) == [f".a.bin.partial-{other}", "a.bin", "a.idx"]

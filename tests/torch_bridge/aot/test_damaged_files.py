"""Damaged model files: each is refused with what is wrong with it, and nothing is half loaded."""

from __future__ import annotations

import random
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.torch_bridge.aot.nets import X, content, in_text, members, rewritten
from torch_bridge.aot import files

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")


def truncated(part: float) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])


def without(name: str) -> Callable[[Path], None]:
    return lambda path: rewritten(path, lambda found: found.pop(name))


def replaced(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda path: rewritten(path, lambda found: found.__setitem__(name, data))


def flipped(name: str, part: float) -> Callable[[Path], None]:
    """One bit of a member's bytes."""

    def flip(path: Path) -> None:
        inside = members(path)[name]
        data = bytearray(path.read_bytes())
        start = bytes(data).rindex(inside) if len(inside) < 1000 else bytes(data).index(inside)
        data[start + int(part * (len(inside) - 1))] ^= 4
        path.write_bytes(data)

    return flip


def script(path: Path) -> None:
    path.unlink()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def plain_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")


MODEL, INITIAL, WEIGHTS = "nxd_jax/model.json", "nxd_jax/initial.safetensors", "nxd_jax/weights/tp0_sharded_checkpoint.safetensors"
PROGRAM = "nxd_jax/programs/0.one.stablehlo"
MEMBERS = {n: n.rpartition("/")[2] for n in (MODEL, INITIAL, WEIGHTS, PROGRAM)}
DAMAGE: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    **{f"truncated to {p}": (truncated(p), "cannot be opened as a model file: File is not a zip file") for p in (0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 0.999)},
    **{f"flipped in {short} at {p}": (flipped(n, p), "Bad CRC|not those that were|no JSON") for n, short in MEMBERS.items() for p in (0, 0.01, 0.5, 0.99)},
    **{f"without {n.rpartition('/')[2]}": (without(n), f"{n} is missing") for n in (INITIAL, WEIGHTS, PROGRAM)},
    **{f"another {n.rpartition('/')[2]}": (replaced(n, b"12345678" * 9), f"{n} is not what was written") for n in (INITIAL, WEIGHTS, PROGRAM)},
    "without model.json": (without(MODEL), "it is a TorchScript file of another library"),
    "model.json is no text": (replaced(MODEL, b"\xff\xfe\x00"), r"model\.json is no JSON|invalid start byte"),
    "model.json is no JSON": (replaced(MODEL, b"{"), r"nxd_jax/model\.json is no JSON: "),
    "model.json is a list": (replaced(MODEL, b"[1, 2]"), r"nxd_jax/model\.json has no version"),
    "no version": (in_text(lambda t: t.pop("version")), r"nxd_jax/model\.json has no version"),
    "a version that is a text": (in_text(lambda t: t.update(version="1")), r"nxd_jax/model\.json has no version"),
    "a newer version": (in_text(lambda t: t.update(version=9)), "it has version 9, and this release reads up to 1: install a newer nxd_jax"),
    "no kind": (in_text(lambda t: t.pop("kind")), "'kind'"),
    "no members": (in_text(lambda t: t.pop("members")), "'members'"),
    "members as a list": (in_text(lambda t: t.update(members=[1])), "items"),
    "no programs": (in_text(lambda t: t.pop("programs")), "'programs'"),
    "programs that are numbers": (in_text(lambda t: t.update(programs=[1])), "subscriptable"),
    "no facts": (in_text(lambda t: t["programs"][0].pop("facts")), "'facts'"),
    "an unknown dtype": (in_text(lambda t: t["programs"][0]["facts"]["inputs"][0].update(dtype="float7")), "float7"),
    "a dtype that is none": (in_text(lambda t: t["programs"][0]["facts"]["inputs"][0].update(dtype="nn")), "'nn' is no dtype"),
    "a shape of texts": (in_text(lambda t: t["programs"][0]["facts"]["inputs"][0].update(shape=["a"])), "invalid literal"),
    "an unknown fact": (in_text(lambda t: t["programs"][0]["facts"]["weights"][0].update(cuts=[{"dimension": 1}])), "dimension"),
    "a form that is not there": (in_text(lambda t: t["programs"][0].update(forms=["mesh"])), "0.mesh.stablehlo"),
    "initial values that are not there": (in_text(lambda t: t["programs"][0].update(initial=["w"])), "'w'"),
    "weights of more ranks": (in_text(lambda t: t.update(ranks=2)), "tp1_sharded_checkpoint"),
    "ranks as a text": (in_text(lambda t: t.update(ranks="many")), "invalid literal"),
    "a plain zip": (plain_zip, r"it has no nxd_jax/model\.json"),
    "a TorchScript file": (script, "it is a TorchScript file of another library"),
    "an empty file": (lambda path: path.write_bytes(b""), "File is not a zip file"),
    "a text": (lambda path: path.write_text("import torch"), "File is not a zip file"),
    "safetensors": (lambda path: save_file({"a": X}, path), "File is not a zip file"),
    "a folder": (folder, "is no file"),
    "nothing": (lambda path: path.unlink(), "does not exist"),
}  # fmt: skip
assert len(DAMAGE) >= 50


@pytest.mark.core(keep=20)
@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_files(what: str, saved: Path, tmp_path: Path) -> None:
    damage, text = DAMAGE[what]
    path = tmp_path / "damaged.pt"
    shutil.copy(saved, path)
    damage(path)
    wanted = FileNotFoundError if what in ("a folder", "nothing") else files.DamagedModelError
    with pytest.raises(wanted, match=text) as error:
        content(path)
    assert str(path) in str(error.value)
    if what not in ("a TorchScript file", "without model.json"):
        with pytest.raises((ValueError, RuntimeError, OSError)):
            torch.jit.load(path)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("seed", range(8))
def test_any_flipped_byte(seed: int, saved: Path, tmp_path: Path) -> None:
    """Wherever it is, the file is refused, or all that it holds is what was written."""
    good, chosen = content(saved), random.Random(seed)
    data = saved.read_bytes()
    refused = 0
    with zipfile.ZipFile(saved) as archive:
        directory = archive.start_dir
    for k in range(100):
        damaged = bytearray(data)
        place = chosen.randrange(len(data)) if k % 2 else chosen.randrange(directory, len(data))
        damaged[place] ^= 1 << chosen.randrange(8)
        path = tmp_path / "damaged.pt"
        path.write_bytes(damaged)
        try:
            found = content(path)
        except files.DamagedModelError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert found == good, place
    assert refused > 20

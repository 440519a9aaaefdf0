"""Model files: what comes back, what `torch.jit.load` makes of them, and what is said of damaged ones."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_neuronx
from torch import nn

from tests.torch_bridge.aot.nets import Net, X, content, in_text
from torch_bridge.aot import files, safetensors
from torch_bridge.aot.traced_module import TracedModule

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")


def test_what_is_saved_comes_back(saved: Path) -> None:
    model = torch.jit.load(saved)
    assert type(model) is TracedModule and model.original_name == "TracedModule"
    for k in range(2):
        got = model(X)
        torch.testing.assert_close(got["y"], Net()(X)["y"].detach())
        assert got["calls"].tolist() == [8 + k] and got["calls"].dtype == torch.int32
    with files.opened(saved) as opened:
        [own] = opened.weights([0])
    assert {n: t.dtype for n, t in own.items()} == {
        n: t.dtype for n, t in {**dict(Net().named_parameters()), **dict(Net().named_buffers())}.items()
    }
    assert all(t.data_ptr() % t.element_size() == 0 for t in own.values())
    assert torch.equal(model.state_dict()["linear.weight"], Net().linear.weight)
    assert sorted(p.name for p in saved.parent.iterdir()) == ["good.pt"]


def test_tensors_begin_where_memory_likes_it(saved: Path) -> None:
    """The members are stored as they are, at multiples of 64 bytes."""
    with zipfile.ZipFile(saved) as archive:
        assert archive.testzip() is None
        for info in (i for i in archive.infolist() if i.filename.endswith(".safetensors")):
            with open(saved, "rb") as f:
                f.seek(info.header_offset + 26)
                name, extra = int.from_bytes(f.read(2), "little"), int.from_bytes(f.read(2), "little")
            assert (info.header_offset + 30 + name + extra) % 64 == 0 and info.compress_type == zipfile.ZIP_STORED


def test_the_file_may_be_deleted_and_weights_changed(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.pt"
    shutil.copy(saved, copy)
    with files.opened(copy) as opened:
        [own] = opened.weights([0])
    copy.unlink()
    before = own["linear.weight"].clone()
    own["linear.weight"].add_(1)  # memory of our own: the file was not written to
    assert torch.equal(own["linear.weight"], before + 1)


def test_an_older_file_stays_when_a_save_fails(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    shutil.copy(saved, path)
    before = path.read_bytes()
    model = torch.jit.load(path)
    model.weights = [{**model.weights[0], "w": torch.ones(2, dtype=torch.complex128)}]
    with pytest.raises(ValueError, match=r"a model file cannot hold w \(torch\.complex128\): convert the weights before the trace"):
        torch.jit.save(model, path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["model.pt"]
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere for m\.pt does not exist"):
        torch.jit.save(torch.jit.load(path), tmp_path / "nowhere" / "m.pt")


def test_a_model_is_saved_over_its_own_file(saved: Path, tmp_path: Path) -> None:
    """Its weights are mapped from the file that is replaced."""
    path = tmp_path / "model.pt"
    shutil.copy(saved, path)
    wanted = content(path)
    torch.jit.save(torch.jit.load(path), path)
    assert content(path) == wanted


# -- torch.jit -----------------------------------------------------------------------------------------


def test_extra_files(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.save(torch.jit.load(saved), str(path), _extra_files={"note": "text", "more.json": b"{}"})
    extra: dict[str, Any] = {"note": "", "more.json": ""}
    assert type(torch.jit.load(str(path), _extra_files=extra)) is TracedModule
    assert {n: t.encode() if isinstance(t, str) else t for n, t in extra.items()} == {"note": b"text", "more.json": b"{}"}


def test_plain_scripts_are_read_as_ever(tmp_path: Path) -> None:
    linear = torch.jit.script(nn.Linear(3, 2))
    torch.jit.save(linear, tmp_path / "a.pt", _extra_files={"note": "text"})
    extra = {"note": ""}
    with open(tmp_path / "a.pt", "rb") as f:
        for one in (tmp_path / "a.pt", str(tmp_path / "a.pt"), f):
            found = torch.jit.load(one, map_location="cpu", _extra_files=extra)
            assert isinstance(found, torch.jit.ScriptModule) and torch.equal(found(X), linear(X))
            assert extra["note"] in (b"text", "text")
    torch_neuronx.script_files.loads("traced module", "torch_bridge.aot.traced_module:loaded")  # a second time
    assert torch.jit.load.__name__ == "load" and not hasattr(torch.jit.load.__wrapped__, "reads_models")


def test_buffers_and_open_files(saved: Path) -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.load(saved), buffer, _extra_files={"note": "text"})
    buffer.seek(0)
    extra = {"note": ""}
    with open(saved, "rb") as f:
        for model in (torch.jit.load(f), torch.jit.load(buffer, _extra_files=extra)):
            assert type(model) is TracedModule
            torch.testing.assert_close(model(X)["y"], Net()(X)["y"].detach())
    assert extra["note"] in ("text", b"text")


def test_a_kind_that_nobody_loads(saved: Path, tmp_path: Path) -> None:
    """torch reads its own part of the file."""
    path = tmp_path / "a.pt"
    shutil.copy(saved, path)
    in_text(lambda t: t.update(kind="unknown"))(path)
    assert isinstance(torch.jit.load(path), torch.jit.ScriptModule)


STUB = """
import sys, torch
model = torch.jit.load(sys.argv[1])
try:
    model([torch.ones(2, 3)])
except torch.jit.Error as error:
    print("this file holds a model that was traced with nxd_jax" in str(error), "before torch.jit.load, or call" in str(error))
"""


def test_without_the_library_it_says_what_to_call(saved: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUB, str(saved)], capture_output=True, text=True, timeout=120, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


LOAD = """
import sys, torch, torch_neuronx
assert "tests" not in sys.modules
model = torch.jit.load(sys.argv[1])
print(model(torch.arange(6.0).view(2, 3))["y"].tolist())
"""


def test_another_process_needs_no_code_of_the_model(saved: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOAD, str(saved)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), Net()(X)["y"].detach())


# -- safetensors ---------------------------------------------------------------------------------------


def test_safetensors_of_every_dtype(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    wanted = {code: (torch.arange(6) % 2).to(dtype).reshape(2, 3) for code, dtype in safetensors.DTYPES.items() if code != "C64"}
    wanted["transposed"] = X.t()
    wanted["number"] = torch.tensor(3.5)
    path = tmp_path / "a.safetensors"
    path.write_bytes(
        safetensors.header((n, t.dtype, tuple(t.shape)) for n, t in wanted.items()) + b"".join(safetensors.raw(t) for t in wanted.values())
    )
    found = load_file(path)
    assert all(torch.equal(found[n].to(torch.float64), t.to(torch.float64)) and found[n].dtype == t.dtype for n, t in wanted.items())
    with open(path, "rb") as f:
        entries = safetensors.entries(f, 0, path.stat().st_size)
    assert {n: (e.dtype, e.shape) for n, e in entries.items()} == {n: (t.dtype, tuple(t.shape)) for n, t in wanted.items()}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"1234", "4 bytes cannot hold a header of 4"),
        (b"\xff" * 16, "16 bytes cannot hold a header of"),
        (b"\x02" + bytes(7) + b"[]", "its header cannot be read"),
        (b"\x04" + bytes(7) + b"nope", "its header cannot be read"),
        (b"\x30" + bytes(7) + b'{"a":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}}'.ljust(48)[:48], "its header cannot be read"),
    ],
)
def test_what_is_not_safetensors(data: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    with open(path, "rb") as f, pytest.raises(ValueError, match=text):
        safetensors.entries(f, 0, len(data))

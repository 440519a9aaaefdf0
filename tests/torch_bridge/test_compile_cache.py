"""The persistent cache: a second process compiles nothing, a changed flag compiles anew, and what is wrong with a folder is said."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest
import torch
import torch_xla

from tests.torch_bridge.devices import python
from torch_bridge import compile_cache, executor, metrics, program

TRAIN = """
import json, torch, torch_xla
from torch_bridge import metrics
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)).to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(4):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(6, 4).to("xla")), torch.tensor([0, 1, 0, 1, 1, 0]).to("xla"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    losses.append(loss.item())
counts = {name: metrics.COUNTERS.get("PersistentCache" + name, 0) for name in ("Hit", "Miss")}
print(json.dumps({"losses": losses, **counts}))
"""


def train(**environment: str) -> dict[str, Any]:
    """The losses of a training script in a process of its own, and how many programs it found in the cache and compiled."""
    return json.loads(python(TRAIN, **environment))


def test_a_second_process_compiles_nothing(tmp_path: pathlib.Path) -> None:
    first = train(NEURON_COMPILE_CACHE_URL=str(tmp_path))
    assert first["Miss"] > 0 and first["Hit"] == 0
    second = train(NEURON_CC_FLAGS=f"--model-type=transformer --cache_dir={tmp_path}", NEURON_COMPILE_CACHE_URL="/proc/nowhere")
    assert second == {"losses": first["losses"], "Hit": first["Miss"], "Miss": 0}
    changed = train(NEURON_COMPILE_CACHE_URL=str(tmp_path), NEURON_CC_FLAGS="--auto-cast=matmult --auto-cast-type=bf16")
    assert changed["Miss"] > 0 and changed["losses"] != first["losses"]


_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")


@pytest.fixture
def jax_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives a function that reads JAX's cache settings; they are put back after the test."""
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    old = {n: getattr(jax.config, n) for n in _SETTINGS}
    yield lambda: [getattr(jax.config, n) for n in _SETTINGS]
    for name, value in old.items():
        jax.config.update(name, value)
    compile_cache.compilation_cache.reset_cache()


def test_settings(tmp_path: pathlib.Path, jax_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax_settings()
    compile_cache.configure({})
    assert jax_settings() == before, "JAX's own variables stay in force"
    compile_cache.configure({"NEURON_COMPILE_CACHE_URL": f"file://{tmp_path}/new/folder"})
    assert jax_settings() == [f"{tmp_path}/new/folder", 0.0, -1] and (tmp_path / "new" / "folder").is_dir()
    monkeypatch.setenv("NEURON_CC_FLAGS", f"--no_cache --cache_dir={tmp_path}/other")
    compile_cache.configure({"NEURON_COMPILE_CACHE_URL": str(tmp_path)})
    assert jax_settings()[0] == f"{tmp_path}/new/folder" and not (tmp_path / "other").exists()


def counted(n: int) -> list[int]:
    """Hits and misses of a small graph that no other test has, compiled as if for the first time in this process."""
    executor.clear_cache()
    before = dict(metrics.COUNTERS)
    x = torch.ones(n, device="xla") * 2
    torch_xla.sync()
    found = [metrics.COUNTERS.get(k, 0) - before.get(k, 0) for k in ("PersistentCacheHit", "PersistentCacheMiss")]
    assert x.tolist() == [0.0 if program.EXTRACT_ONLY else 2.0] * n
    return found


def test_counters(tmp_path: pathlib.Path, jax_settings: Any) -> None:
    compile_cache.use(tmp_path)
    assert counted(4073) == [0, 1]
    assert counted(4073) == [1, 0]
    compile_cache.use(tmp_path, readonly=True)
    assert counted(4074) == counted(4074) == [0, 1]
    jax.config.update("jax_compilation_cache_dir", None)
    compile_cache.compilation_cache.reset_cache()
    assert counted(4073) == [0, 0]


def test_graphs_extracted_first_are_found(tmp_path: pathlib.Path, jax_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workflow of neuron_parallel_compile: compile without running, then train."""
    compile_cache.use(tmp_path)
    monkeypatch.setattr(program, "EXTRACT_ONLY", True)
    assert counted(4075)[0] == 0
    monkeypatch.setattr(program, "EXTRACT_ONLY", False)
    assert counted(4075) == [1, 0]


def test_entries_that_cannot_be_read_are_compiled(tmp_path: pathlib.Path, jax_settings: Any) -> None:
    compile_cache.use(tmp_path)
    counted(4076)
    for entry in tmp_path.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:100])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert counted(4076) == [0, 1]


def test_storage_that_is_no_folder(jax_settings: Any, tmp_path: pathlib.Path) -> None:
    before = jax_settings()
    with pytest.warns(UserWarning, match="NEURON_COMPILE_CACHE_URL=s3://bucket/x: only folders can keep compiled programs"):
        compile_cache.configure({"NEURON_COMPILE_CACHE_URL": "s3://bucket/x"})
    assert jax_settings() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="NEURON_COMPILE_CACHE_URL=.*file/below: must be a folder that can be written"):
        compile_cache.configure({"NEURON_COMPILE_CACHE_URL": str(tmp_path / "file" / "below")})

"""The persistent cache: settings, counters, and what is wrong with a folder is said. `tests/test_examples.py` runs whole scripts twice."""

from __future__ import annotations

import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import pytest
import torch
import torch_xla

from torch_bridge import metrics
from torch_bridge.compiler import xla_cache
from torch_bridge.config import environment
from torch_bridge.config.settings import SETTINGS
from torch_bridge.runtime import executor

_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")


@pytest.fixture
def jax_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives a function that reads JAX's cache settings; they are put back after the test."""
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    old = {n: getattr(jax.config, n) for n in _SETTINGS}
    yield lambda: [getattr(jax.config, n) for n in _SETTINGS]
    for name, value in old.items():
        jax.config.update(name, value)
    xla_cache.compilation_cache.reset_cache()


def test_settings(tmp_path: pathlib.Path, jax_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax_settings()
    xla_cache.configure({})
    assert jax_settings() == before, "JAX's own variables stay in force"
    xla_cache.configure({"NEURON_COMPILE_CACHE_URL": f"file://{tmp_path}/new/folder"})
    assert jax_settings() == [f"{tmp_path}/new/folder", 0.0, -1] and (tmp_path / "new" / "folder").is_dir()
    monkeypatch.setenv("NEURON_CC_FLAGS", f"--no_cache --cache_dir={tmp_path}/other")
    xla_cache.configure({"NEURON_COMPILE_CACHE_URL": str(tmp_path)})
    assert jax_settings()[0] == f"{tmp_path}/new/folder" and not (tmp_path / "other").exists()
    monkeypatch.setenv("NEURON_CC_FLAGS", f"--model-type=transformer --cache_dir={tmp_path}/other")
    xla_cache.configure({"NEURON_COMPILE_CACHE_URL": "/proc/nowhere"})
    assert jax_settings()[0] == f"{tmp_path}/other", "--cache_dir wins"


@pytest.mark.parametrize(
    ("flags", "url", "jax_folder", "kept"),
    [
        ("", None, None, False),
        ("", "/tmp/programs", None, True),
        ("--cache_dir=/tmp/programs", None, None, True),
        ("--no_cache --cache_dir=/tmp/programs", "/tmp/programs", None, False),
        ("--no_cache", None, "/tmp/programs", True),
    ],
)
def test_whether_programs_are_kept_is_known_before_jax_starts(
    flags: str, url: str | None, jax_folder: str | None, kept: bool, jax_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX's folder counts in its variable until JAX is imported, and in its settings from then on, as scripts change those."""
    monkeypatch.setenv("NEURON_CC_FLAGS", flags)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    values = {"NEURON_COMPILE_CACHE_URL": url} if url else {}
    jax.config.update("jax_compilation_cache_dir", jax_folder)
    assert environment.keeps_programs(values) is kept and environment.jax_keeps_programs() is bool(jax_folder)
    jax.config.update("jax_compilation_cache_dir", None)
    if jax_folder:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax_folder)
    monkeypatch.delitem(sys.modules, "jax")
    assert environment.keeps_programs(values) is kept
    assert not environment.keeps_programs({**values, "NEURON_EXTRACT_GRAPHS_ONLY": True}), "neuron_parallel_compile"


def counted(n: int) -> list[int]:
    """Hits and misses of a small graph that no other test has, compiled as if for the first time in this process."""
    executor.clear_cache()
    before = dict(metrics.COUNTERS)
    x = torch.ones(n, device="xla") * 2
    torch_xla.sync()
    found = [metrics.COUNTERS.get(k, 0) - before.get(k, 0) for k in ("PersistentCacheHit", "PersistentCacheMiss")]
    assert x.tolist() == [0.0 if SETTINGS.extract_only else 2.0] * n
    return found


def test_counters(tmp_path: pathlib.Path, jax_settings: Any) -> None:
    xla_cache.use(tmp_path)
    assert counted(4073) == [0, 1]
    assert counted(4073) == [1, 0]
    xla_cache.use(tmp_path, readonly=True)
    assert counted(4074) == counted(4074) == [0, 1]
    jax.config.update("jax_compilation_cache_dir", None)
    xla_cache.compilation_cache.reset_cache()
    assert counted(4073) == [0, 0]


def test_nothing_is_read_while_dumps_are_asked_for(tmp_path: pathlib.Path, jax_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dumped is what this process compiled; what it compiles is kept for others."""
    xla_cache.use(tmp_path / "cache")
    monkeypatch.setenv("NEURON_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.setenv("NEURON_FRAMEWORK_DEBUG", "1")
    assert counted(4079) == [0, 1] and list((tmp_path / "dumps").glob("MODULE_*"))
    assert counted(4079) == [0, 1], "though it is there"
    monkeypatch.delenv("NEURON_FRAMEWORK_DEBUG")
    assert counted(4079) == [1, 0]


def test_graphs_extracted_first_are_found(tmp_path: pathlib.Path, jax_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workflow of neuron_parallel_compile: compile without running, then train."""
    xla_cache.use(tmp_path)
    monkeypatch.setattr(SETTINGS, "extract_only", True)
    assert counted(4075)[0] == 0
    monkeypatch.setattr(SETTINGS, "extract_only", False)
    assert counted(4075) == [1, 0]


def test_damaged_entries_are_replaced(tmp_path: pathlib.Path, jax_settings: Any) -> None:
    """What a killed process leaves behind; one warning for the folder."""
    xla_cache.configure({"NEURON_COMPILE_CACHE_URL": str(tmp_path)})

    def damage() -> None:
        for entry in tmp_path.glob("*-cache"):
            entry.write_bytes(entry.read_bytes()[:100])

    counted(4076)
    damage()
    with pytest.warns(
        UserWarning, match=f"damaged entries in the cache of compiled programs {tmp_path}, such as .*-cache: .* They are replaced"
    ):
        assert counted(4076) == [0, 1]
    assert counted(4076) == [1, 0]
    damage()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counted(4076) == [0, 1]


def test_damaged_entries_of_a_folder_to_read_from_stay(tmp_path: pathlib.Path, jax_settings: Any) -> None:
    xla_cache.configure({"NEURON_COMPILE_CACHE_URL": str(tmp_path)})
    counted(4077)
    (entry,) = tmp_path.glob("*-cache")
    entry.write_bytes(b"half")
    xla_cache.use(tmp_path, readonly=True)
    with pytest.warns(UserWarning, match="The folder is read-only, so they stay"):
        assert counted(4077) == [0, 1]
    assert entry.read_bytes() == b"half"


def test_a_changed_flag_uses_an_entry_of_its_own(tmp_path: pathlib.Path, jax_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable that `numerics.Mode` reads: another program in the folder, and back to the first when it is unset."""
    xla_cache.use(tmp_path)
    x = (torch.arange(64.0).reshape(8, 8) / 7).to("xla")

    def product() -> tuple[list[list[float]], int, int]:
        executor.clear_cache()
        before = dict(metrics.COUNTERS)
        values = (x @ x + x).tolist()
        return values, *(metrics.COUNTERS.get(k, 0) - before.get(k, 0) for k in ("PersistentCacheHit", "PersistentCacheMiss"))

    plain, _, compiled = product()
    assert compiled == 1
    for name, value in (
        ("NEURON_CC_FLAGS", "--auto-cast=matmult"),
        ("NEURON_CC_FLAGS", "--auto-cast=matmult --auto-cast-type=tf32"),
        ("NEURON_CC_FLAGS", "--auto-cast=all"),
        ("XLA_USE_BF16", "1"),
    ):
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            patch.setenv(name, value)
            found, hits, misses = product()
            assert found != plain and (hits, misses) == (0, 1), value
        assert product() == (plain, 1, 0), value


def test_storage_that_is_no_folder(jax_settings: Any, tmp_path: pathlib.Path) -> None:
    before = jax_settings()
    with pytest.warns(UserWarning, match="NEURON_COMPILE_CACHE_URL=s3://bucket/x: only folders can keep compiled programs"):
        xla_cache.configure({"NEURON_COMPILE_CACHE_URL": "s3://bucket/x"})
    assert jax_settings() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="NEURON_COMPILE_CACHE_URL=.*file/below: must be a folder that can be written"):
        xla_cache.configure({"NEURON_COMPILE_CACHE_URL": str(tmp_path / "file" / "below")})

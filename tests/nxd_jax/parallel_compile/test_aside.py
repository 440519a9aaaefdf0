"""Under `neuron_parallel_compile` graphs are compiled several at a time, while the script goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import torch_bridge
import torch_bridge.device.startup
from torch_bridge.compiler import background_compile, executable_cache
from torch_bridge.config.settings import SETTINGS
from torch_bridge.runtime import executor, session

torch_bridge.register()


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Compile only, as under the command; gives what was told so far when it is called."""
    monkeypatch.setenv("NXD_JAX_COLLECT", f"compile:{tmp_path}")
    monkeypatch.setenv("NXD_JAX_COMPILE_WORKERS", "2")
    monkeypatch.setattr(SETTINGS, "extract_only", True)
    monkeypatch.setattr(background_compile, "_pool", None)
    executor.clear_cache()

    def events() -> list[dict[str, Any]]:
        if background_compile._pool is not None:
            background_compile._pool.shutdown()
        return [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]

    yield events
    executor.clear_cache()


def graph(n: int) -> torch.Tensor:
    """One graph of its own for each n."""
    x = torch.ones(n).to("xla")
    y = (x * 2).sum()
    torch_bridge.runtime.executor.sync()
    return y


@pytest.fixture
def compile_it(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts something in front of each compilation."""

    def put(before: Any) -> None:
        original = executable_cache.prepared

        def prepared(*args: Any) -> Any:
            finish = original(*args)
            return lambda: (before(), finish())[1]

        monkeypatch.setattr(executable_cache, "prepared", prepared)

    return put


def test_several_at_a_time_while_the_script_goes_on(told: Any, compile_it: Any) -> None:
    met = threading.Barrier(3, timeout=60)  # two compilations, and the script after both graphs
    compile_it(met.wait)
    assert graph(3).item() == 0 and graph(4).item() == 0, "results are zeros"
    met.wait()
    events = told()
    assert [e["event"] for e in events[:2]] == ["found", "found"]
    assert sorted(e["event"] for e in events[2:]) == ["compiled", "compiled"]
    assert all(0 < e["seconds"] < 60 and e["cached"] is False for e in events[2:])


def test_a_graph_that_fails_is_told_of_and_the_others_are_compiled(told: Any, compile_it: Any) -> None:
    turns = iter([True, False])
    lock = threading.Lock()

    def fail_once() -> None:
        with lock:
            bad = next(turns)
        if bad:
            raise ValueError("no room")

    compile_it(fail_once)
    graph(3), graph(4)
    ends = [e for e in told() if e["event"] != "found"]
    assert sorted(e["event"] for e in ends) == ["compiled", "failed"]
    assert next(e["error"] for e in ends if e["event"] == "failed") == "ValueError: no room"


def test_a_graph_that_cannot_be_lowered_raises_in_the_script(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: Any) -> Any:
        raise NotImplementedError("no lowering")

    monkeypatch.setattr(executable_cache, "prepared", no)
    with pytest.raises(NotImplementedError, match="no lowering"):
        graph(3)
    assert [e["event"] for e in told()] == ["found", "failed"]


def test_a_graph_that_comes_again_is_compiled_once(told: Any) -> None:
    graph(3), graph(3)
    assert [e["event"] for e in told()] == ["found", "compiled"]


def test_whoever_asks_for_an_executable_waits(told: Any) -> None:
    graph(5)
    newest = session.current().recent[-1]
    assert newest.begun and newest.compiled.memory_analysis() is not None and newest.compile_seconds > 0


def test_how_many_at_a_time(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert background_compile.wanted() and background_compile.workers() == 2
    monkeypatch.setenv("NXD_JAX_COMPILE_WORKERS", "1")
    assert not background_compile.wanted()
    monkeypatch.delenv("NXD_JAX_COMPILE_WORKERS")
    assert 1 <= background_compile.workers() <= background_compile.MOST
    monkeypatch.setenv("NXD_JAX_COMPILE_WORKERS", "many")
    with pytest.raises(ValueError, match="NXD_JAX_COMPILE_WORKERS='many': must be a whole number of at least 1"):
        background_compile.workers()


def test_only_where_nothing_waits(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in real runs, not where processes compile together, not while graphs are collected or HLO is dumped."""
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        assert not background_compile.wanted()
    with monkeypatch.context() as patch:
        patch.setattr(SETTINGS, "extract_only", False)
        assert not background_compile.wanted()
    with monkeypatch.context() as patch:
        patch.setenv("NXD_JAX_COLLECT", "collect:/nowhere")
        assert not background_compile.wanted()
    with monkeypatch.context() as patch:
        patch.setenv("NEURON_FRAMEWORK_DEBUG", "1")
        assert not background_compile.wanted()
    assert background_compile.wanted()

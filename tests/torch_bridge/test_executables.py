"""Executables found by the recorded graph, or by what jax.export wrote: a second process does not trace, and whatever changes a program changes its name."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch_xla
from torch import fx

import torch_bridge
from tests.torch_bridge.aot.nets import Net
from tests.torch_bridge.aot.nets import X as NET_INPUT
from tests.torch_bridge.test_equal_programs import products
from torch_bridge import _compat, lowerings, metrics
from torch_bridge.aot import model as model_of_programs
from torch_bridge.aot import traced_module
from torch_bridge.aot.model import Model, Program
from torch_bridge.compiler import cache_environment, cache_keys, executable_cache, interpret, xla_cache
from torch_bridge.compiler.cache_environment import UnknownError
from torch_bridge.config import freed_memory
from torch_bridge.runtime import executor, session

aten = torch.ops.aten
_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_compilation_cache_max_size",
)
_ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Where entries go while the test runs."""
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    monkeypatch.delenv("NXD_JAX_EXECUTABLES", raising=False)
    old = {n: getattr(jax.config, n) for n in _SETTINGS}
    xla_cache.configure({"NEURON_COMPILE_CACHE_URL": str(tmp_path)})
    yield tmp_path / "executables"
    for name, value in old.items():
        jax.config.update(name, value)
    xla_cache.compilation_cache.reset_cache()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the size of every graph that is traced."""
    found: list[int] = []
    run = interpret.run

    def noted(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        found.append(len(graph.nodes))
        return run(graph, *args, **kwargs)

    monkeypatch.setattr(interpret, "run", noted)
    return found


X = torch.arange(48.0).reshape(6, 8) / 7


def afresh(work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor = X) -> tuple[torch.Tensor, int, int]:
    """`work` on xla as if for the first time in this process: its result, and what the persistent caches found and did not."""
    executor.clear_cache()
    before = dict(metrics.COUNTERS)
    result = work(x.to("xla")).cpu()
    return result, *(metrics.COUNTERS.get(f"PersistentCache{k}", 0) - before.get(f"PersistentCache{k}", 0) for k in ("Hit", "Miss"))


def product(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.T).softmax(-1) * 3


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob(f"*{executable_cache.SUFFIX}"))


# -- hits -----------------------------------------------------------------------------------------


def test_a_hit_is_not_traced(folder: pathlib.Path, traced: list[int]) -> None:
    first, *counts = afresh(product)
    assert counts == [0, 1] and len(traced) == len(entries(folder)) == 1
    second, *counts = afresh(product)
    assert counts == [1, 0] and len(traced) == 1
    assert torch.equal(first, second) and [p.name for p in folder.parent.glob("**/.*")] == []


def test_what_jax_has_is_noted(folder: pathlib.Path, traced: list[int]) -> None:
    """After an upgrade, or for a folder from before: traced once more, not compiled."""
    afresh(product)
    entries(folder)[0].unlink()
    first, *counts = afresh(product)
    assert counts == [1, 0] and len(traced) == 2
    second, *counts = afresh(product)
    assert counts == [1, 0] and len(traced) == 2 and torch.equal(first, second)


def test_programs_with_many_temporaries_are_written(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's CPU backend serializes no executable whose temporaries lie in several blocks; JAX would warn of that."""
    monkeypatch.setattr(freed_memory, "largest_block", lambda: 5 << 20)
    x = torch.rand(1024, 1024)
    first, *counts = afresh(products, x)
    assert counts == [0, 1] and len(entries(folder)) == 1
    second, *counts = afresh(products, x)
    assert counts == [1, 0] and torch.equal(first, second)


def test_inspection_of_a_program_that_was_found(folder: pathlib.Path, traced: list[int]) -> None:
    afresh(product)
    afresh(product)
    assert len(traced) == 1 and "HloModule" in torch_bridge.hlo(stage="optimized")
    assert "stablehlo.dot_general" in torch_bridge.hlo()
    compiled = session.current().recent[-1].compiled
    assert compiled.memory_analysis().output_size_in_bytes == 6 * 6 * 4
    assert [o.shape for o in compiled.out_info] == [(6, 6)] and len(compiled.output_shardings) == 1


def test_updates_stay_in_place(folder: pathlib.Path, traced: list[int]) -> None:
    """Donation, lifted numbers and random draws of a program that was found."""

    def step() -> tuple[list[float], bool]:
        executor.clear_cache()
        torch.manual_seed(3)
        weight = X.clone().to("xla")
        weight += 0.5  # numpy's memory, which JAX may have taken as it is, cannot be donated
        torch_xla.sync()
        at = weight._storage.array.unsafe_buffer_pointer()
        for k in range(3):
            weight.mul_(0.25 * k).add_(torch.rand_like(weight))
            torch_xla.sync()
        return weight.cpu().flatten().tolist(), weight._storage.array.unsafe_buffer_pointer() == at

    first = step()
    seen = len(traced)
    assert step() == first and len(traced) == seen and first[1]


_SCRIPT = """
import hashlib, json, logging
logging.basicConfig()
logging.getLogger("nxd_jax").setLevel("DEBUG")
import torch, torch_xla, torch_xla.core.xla_model as xm
from torch_bridge import metrics
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded

world.set_axes({"dp": 4, "tp": 2})
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
losses = []
for k in range(2):
    x = sharded.from_ranks(lambda r: torch.arange(16.0).reshape(2, 8) / (8 + r % 3 + k))
    loss = model(x).square().sum()
    loss.backward()
    xm.optimizer_step(optimizer)
    optimizer.zero_grad()
    losses.append(loss.item())
    optimizer.param_groups[0]["lr"] *= 0.9
bits = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
print(json.dumps([bits, losses, {k: metrics.COUNTERS.get(k, 0) for k in ("PersistentCacheHit", "PersistentCacheMiss")}, world.size()]))
"""


_EQUAL_PROGRAMS = """
import json
import torch, torch_xla, torch_xla.core.xla_model as xm
from torch_bridge import metrics
from torch_bridge.mesh import world
from torch_bridge.mesh.places import along
from torch_bridge.recorder import placed, sharded

world.set_axes({"pp": 4, "tp": 2})
start = sharded.from_ranks(lambda r: torch.arange(48.0).reshape(6, 8) / (7 + r % 2), ("tp",))
found = []
for k in range(4):
    x = placed.moved(start, along("pp", k))
    torch.manual_seed(1)
    y = torch.nn.functional.dropout(torch.sort(torch.sin(x) @ x.t())[0])
    y = xm.all_reduce("sum", y, groups=[[0, 1], [2, 3], [4, 5], [6, 7]])
    torch_xla.sync()
    found.append([shard.tolist() for shard in sharded.shards(y)][2 * k : 2 * k + 2])
names = ("PersistentCacheHit", "PersistentCacheMiss", "EqualProgram")
print(json.dumps([found, [metrics.COUNTERS.get(name, 0) for name in names]]))
"""


def run_with(folder: pathlib.Path, script: str, seed: str) -> tuple[Any, int, str]:
    """What a process of eight ranks that keeps programs in a folder prints last, how many entries there are then, and what it says."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "aliases"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONHASHSEED": seed,
        "NEURON_RT_NUM_CORES": "8",
        "NEURON_COMPILE_CACHE_URL": str(folder),
    }
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), len(entries(folder / "executables")), done.stderr


def test_a_second_process_with_equal_programs(tmp_path: pathlib.Path) -> None:
    """The program of one stage is compiled and kept, those of three others are noted with its code; a second process finds all."""
    (found, counts), kept, told = run_with(tmp_path, _EQUAL_PROGRAMS, "1")
    assert kept >= 4 and counts[2] == 3, told
    assert all(stage == found[0] for stage in found) and found[0][0] == found[0][1]
    again, kept_then, told = run_with(tmp_path, _EQUAL_PROGRAMS, "2")
    assert again == [found, [sum(counts), 0, 0]] and kept_then == kept, told
    assert len(list(tmp_path.glob("*-cache"))) == kept - 3


def test_a_second_process_with_eight_ranks(tmp_path: pathlib.Path) -> None:
    """Equal names in processes whose sets and addresses are in another order; the same bits from programs under `shard_map`."""
    (bits, losses, counts, size), kept, told = run_with(tmp_path, _SCRIPT, "1")
    assert size == 8 and counts["PersistentCacheMiss"] >= 1 and kept >= 1, told
    again, kept_then, told = run_with(tmp_path, _SCRIPT, "2")
    assert again[:2] == [bits, losses] and again[2]["PersistentCacheMiss"] == 0 and kept_then == kept, told


# -- names ----------------------------------------------------------------------------------------

VARIANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "op": lambda x: (x @ x.T).log_softmax(-1) * 3,
    "dim": lambda x: (x @ x.T).softmax(-2) * 3,
    "order": lambda x: (x.T @ x).softmax(-1) * 3,
    "shape": lambda x: (x[:4] @ x.T).softmax(-1) * 3,
    "dtype": lambda x: (x.double() @ x.T.double()).softmax(-1) * 3,
    "type of a number": lambda x: (x @ x.T).softmax(-1) * 3.0,
    "constant": lambda x: (x @ x.T).softmax(-1).clamp(0, 0.5),
    "another constant": lambda x: (x @ x.T).softmax(-1).clamp(0, 0.25),
    "result": lambda x: (x @ x.T).softmax(-1),
}


def test_other_programs_have_other_entries(folder: pathlib.Path, traced: list[int]) -> None:
    expected = len({p.name for p in entries(folder)})
    for name, work in {"": product, **VARIANTS}.items():
        result, *_ = afresh(work)
        expected += 1
        assert len(traced) == len(entries(folder)) == expected, name
        torch.testing.assert_close(result, work(X))
    for name, work in VARIANTS.items():
        result, *counts = afresh(work)
        assert counts == [1, 0] and len(traced) == expected, name
        torch.testing.assert_close(result, work(X))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=false"),
        ("NEURON_CC_FLAGS", "--auto-cast=matmult"),
        ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1"),
        ("NXD_JAX_ANYTHING", "1"),
        ("JAX_ANYTHING", "1"),
    ],
)
def test_variables_are_part_of_the_name(
    folder: pathlib.Path, traced: list[int], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    afresh(product)
    monkeypatch.setenv(name, value)
    afresh(product)
    assert len(traced) == 2
    monkeypatch.delenv(name)
    assert afresh(product)[1:] == (1, 0) and len(traced) == 2


def test_settings_are_part_of_the_name(folder: pathlib.Path, traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    afresh(product)
    with jax.default_matmul_precision("highest"):
        afresh(product)
    assert len(traced) == 2
    before = cache_keys.digest(cache_environment.describe())
    torch.set_default_dtype(torch.float64)
    try:
        assert cache_keys.digest(cache_environment.describe()) != before
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(_compat, "compile_options", lambda: "XLA's flags as it took them, whatever the variable says now")
    assert cache_keys.digest(cache_environment.describe()) != before
    monkeypatch.setattr(jax, "__version__", "9.9")
    cache_environment._versions.cache_clear()
    changed = cache_environment.describe()["versions"]
    monkeypatch.undo()
    cache_environment._versions.cache_clear()
    assert changed != cache_environment.describe()["versions"] and before == cache_keys.digest(cache_environment.describe())


@pytest.mark.parametrize(
    "name", ["NEURON_FRAMEWORK_DEBUG", "NEURON_COMPILE_CACHE_URL", "NXD_JAX_TOP_DIR", "NXD_JAX_VERIFY", "JAX_COMPILATION_CACHE_DIR", "HOME"]
)
def test_variables_that_do_not_matter(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = cache_environment.describe()
    monkeypatch.setenv(name, "/somewhere/else")
    assert cache_environment.describe() == before
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir=/somewhere/else --no_cache")
    assert cache_environment.describe() == before


def test_source_is_part_of_the_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(cache_environment, "__file__", str(package / "surroundings.py"))
    digest = cache_environment.source_digest.__wrapped__
    file = package / "ops.py"

    def source(text: str, age: float = 1000) -> str:
        file.write_text(text)
        os.utime(file, (cache_environment._LOADED - age,) * 2)
        return digest()

    first = source("x = 1")
    assert source("x = 2") != first == source("x = 1")
    with pytest.raises(UnknownError, match="ops.py has changed since this process loaded it"):
        source("x = 2", age=-1)


def text_of(*args: Any, target: Any = aten.add.Tensor) -> str:
    """The text of a graph with one call."""
    graph = fx.Graph()
    x = graph.placeholder("arg0")
    graph.output((graph.call_function(target, (x, *args)),))
    return cache_keys.graph_text(graph)


def test_constants_in_a_name() -> None:
    values = [1, 1.0, True, -0.0, 0.0, None, "1", (1,), [1], {"a": 1}, 1j, slice(0, 1), torch.float32, "torch.float32"]
    texts = [text_of(v) for v in values]
    assert len(set(texts)) == len(values) and texts == [text_of(v) for v in values]
    assert text_of(float("nan")) == text_of(float("nan")) and text_of(0.1) != text_of(0.1 + 2**-55)


def test_what_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, said in ((np.float32(1), "an op takes a numpy.float32"), (object(), "an op takes a builtins.object")):
        with pytest.raises(UnknownError, match=said):
            text_of(value)
    with pytest.raises(UnknownError, match="the graph calls <function"):
        text_of(target=test_constants_in_a_name)
    with pytest.raises(UnknownError, match="has no text that other processes share"):
        cache_environment.stable(["a", repr(object())])
    graph = fx.Graph()
    graph.output((graph.get_attr("weight"),))
    with pytest.raises(UnknownError, match="the graph holds a tensor, weight"):
        cache_keys.graph_text(graph)


def test_lowerings_of_the_scripts_own(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What they do is not known from one process to the next, so their programs are traced in each."""
    table = lowerings.registry._TABLE
    own = lowerings.Lowering(lambda x: x * 7)
    monkeypatch.setitem(table, aten.tanh.default, own)
    caplog.set_level(logging.DEBUG, "nxd_jax")
    assert afresh(lambda x: x.tanh() + 1)[0].allclose(X * 7 + 1) and entries(folder) == []
    assert "this program is traced in every process: aten.tanh.default has a lowering of the script's own" in caplog.text
    assert text_of() and len(afresh(product)) == 3 and len(entries(folder)) == 1, "other programs do not mind"
    monkeypatch.delitem(table, aten.add.Tensor)
    with pytest.raises(
        UnknownError, match="aten.add.Tensor is made of others, and the script has lowerings of its own .aten.tanh.default."
    ):
        text_of()
    monkeypatch.delitem(table, aten.tanh.default)
    if aten.add.Tensor in cache_keys.decomposition_table:
        monkeypatch.setitem(cache_keys.decomposition_table, aten.add.Tensor, test_constants_in_a_name)
    with pytest.raises(UnknownError, match="aten.add.Tensor has a decomposition of the script's own"):
        text_of()


def test_a_jax_that_has_changed(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def gone() -> str:
        raise AttributeError("module 'jax._src.compiler' has no attribute 'get_compile_options'")

    monkeypatch.setattr(_compat, "compile_options", gone)
    caplog.set_level(logging.INFO, "nxd_jax")
    assert afresh(product)[0].allclose(product(X)) and entries(folder) == []
    assert "programs are traced in every process: AttributeError: module 'jax._src.compiler'" in caplog.text


# -- the folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["half", "foreign", "empty", "another format"])
def test_damaged_entries_are_replaced(folder: pathlib.Path, traced: list[int], caplog: pytest.LogCaptureFixture, damage: str) -> None:
    afresh(product)
    (entry,) = entries(folder)
    data = entry.read_bytes()
    cases = {
        "half": data[: len(data) // 2],
        "foreign": b"#!/bin/sh\n",
        "empty": b"",
        "another format": b"nxd_jax executable 9\n" + data[len(executable_cache.HEAD) :],
    }
    entry.write_bytes(cases[damage])
    assert afresh(product)[0].allclose(product(X)) and len(traced) == 2
    (said,) = [r.getMessage() for r in caplog.records if r.name == "nxd_jax"]
    assert said.startswith(f"{entry} cannot be used, so its program is compiled again: DamagedError: it ")
    assert entry.read_bytes() == data and afresh(product)[1:] == (1, 0) and len(traced) == 2


def test_code_that_is_gone_or_another(folder: pathlib.Path, traced: list[int]) -> None:
    """JAX's entry evicted, or replaced by one that this entry was not made for."""
    afresh(product)
    (code,) = folder.parent.glob("*-cache")
    code.unlink()
    assert afresh(product)[1:] == (0, 1) and afresh(product)[1:] == (1, 0) and len(traced) == 2
    packed = code.read_bytes()
    afresh(VARIANTS["op"])
    (other,) = set(folder.parent.glob("*-cache")) - {code}
    other.write_bytes(packed)
    afresh(VARIANTS["op"])
    assert len(traced) == 4, "not taken for what it is not"


def test_entries_whose_code_was_evicted_go(folder: pathlib.Path) -> None:
    afresh(product)
    (gone,) = entries(folder)
    (code,) = folder.parent.glob("*-cache")
    jax.config.update("jax_compilation_cache_max_size", 10**9)
    xla_cache.compilation_cache.reset_cache()
    code.unlink()
    afresh(VARIANTS["op"])
    assert len(entries(folder)) == 1 and not gone.exists()


def test_a_folder_to_read_from(folder: pathlib.Path, traced: list[int]) -> None:
    afresh(product)
    xla_cache.use(folder.parent, readonly=True)
    assert afresh(product)[1:] == (1, 0) and len(traced) == 1
    afresh(VARIANTS["op"])
    assert len(entries(folder)) == 1
    entries(folder)[0].write_bytes(b"half")
    afresh(product)
    assert entries(folder)[0].read_bytes() == b"half"


def test_it_can_be_turned_off(folder: pathlib.Path, traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_EXECUTABLES", "0")
    afresh(product)
    assert afresh(product)[1:] == (1, 0) and len(traced) == 2 and not folder.exists()
    monkeypatch.delenv("NXD_JAX_EXECUTABLES")
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "of_jax_alone"))
    xla_cache.compilation_cache.reset_cache()
    afresh(product)
    assert not folder.exists() and not (folder.parent / "of_jax_alone" / "executables").exists()


def test_a_folder_that_cannot_be_written(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file")
    caplog.set_level(logging.INFO, "nxd_jax")
    assert afresh(product)[0].allclose(product(X))
    assert "is not written: " in caplog.text


def test_writers_at_once(folder: pathlib.Path) -> None:
    """Whole entries only, whoever wins; nothing else stays."""
    afresh(product)
    (entry,) = entries(folder)
    made = session.current().recent[-1].compiled
    (code,) = folder.parent.glob("*-cache")
    lies = executable_cache.Code(code.name.removesuffix("-cache"), hashlib.sha256(code.read_bytes()).digest())
    stop = threading.Event()
    found: list[Any] = []

    def write() -> None:
        while not stop.is_set():
            executable_cache._write(entry, made, lies)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(50):
        found.append(executable_cache._unpacked(entry.read_bytes()).code)
    stop.set()
    for t in threads:
        t.join()
    assert set(found) == {lies} and list(folder.iterdir()) == [entry]


def test_entries_of_jax_are_watched(folder: pathlib.Path) -> None:
    with _compat.watch_cache_entries() as outer, _compat.watch_cache_entries() as inner:
        afresh(product)
    assert [k for k, _ in outer] == [k for k, _ in inner] and len(outer) == 1
    assert _compat.cache_entry(outer[0][0]) == outer[0][1] and _compat.cache_entry("unheard-of") is None
    afresh(VARIANTS["op"])
    assert len(outer) == 1


# -- programs that jax.export wrote ----------------------------------------------------------------


def from_file(program: Program) -> list[torch.Tensor]:
    """What a model of it gives in two calls, started as if this process had never seen it."""
    model = Model()
    model.add("a", program)
    model.set_weights([{n: t.detach() for n, t in Net().state_dict().items()}])
    model.start()
    return [t for _ in range(2) for t in model.results("a", model.run("a", [NET_INPUT]), 0)]


def test_an_exported_program_is_lowered_once(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced_module.trace_program(Net(), (NET_INPUT,))[0]
    first = from_file(program)
    assert len(entries(folder)) == 1 and first[1].item() == 8 and first[3].item() == 9

    def lowered(*_: Any) -> Any:
        raise AssertionError("lowered again")

    monkeypatch.setattr(model_of_programs, "_lowered", lowered)
    before = metrics.COUNTERS.get("PersistentCacheHit", 0)
    assert all(map(torch.equal, from_file(program), first)) and metrics.COUNTERS["PersistentCacheHit"] == before + 1
    monkeypatch.setenv("NXD_JAX_EXECUTABLES", "0")
    with pytest.raises(AssertionError, match="lowered again"):
        from_file(program)


def test_a_damaged_entry_of_an_exported_program(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    program = traced_module.trace_program(Net(), (NET_INPUT,))[0]
    first = from_file(program)
    [entry] = entries(folder)
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-20])
    assert all(map(torch.equal, from_file(program), first))
    assert "cannot be used, so its program is compiled again: DamagedError" in caplog.text and len(entry.read_bytes()) == len(whole)


@pytest.mark.parametrize("what", ["program", "shape", "dtype", "call", "flag", "tree"])
def test_what_changes_the_name_of_an_exported_program(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"program": b"stablehlo", "shapes": ([jax.ShapeDtypeStruct((2, 3), np.float32)], []), "call": "donated"}
    name = cache_keys.digest(cache_keys.of_exported(**given))
    assert cache_keys.digest(cache_keys.of_exported(**given)) == name
    given |= {
        "program": {"program": b"stablehlo 2"},
        "shape": {"shapes": ([jax.ShapeDtypeStruct((3, 2), np.float32)], [])},
        "dtype": {"shapes": ([jax.ShapeDtypeStruct((2, 3), np.int32)], [])},
        "tree": {"shapes": ([], [jax.ShapeDtypeStruct((2, 3), np.float32)])},
        "call": {"call": ""},
    }.get(what, {})
    if what == "flag":
        monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=true")
    assert cache_keys.digest(cache_keys.of_exported(**given)) != name

"""`compiler/xla_options.py`: on CPUs YNNPACK computes single products only, and temporaries lie in blocks, unless XLA_FLAGS says otherwise."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import fx

from torch_bridge import _compat
from torch_bridge.compiler import xla_options
from torch_bridge.config import environment, freed_memory
from torch_bridge.runtime import executor, session

aten = torch.ops.aten
OPTION = "xla_cpu_experimental_ynn_fusion_type"
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the option is for CPUs")


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(freed_memory, "largest_block", lambda: None)
    xla_options._known.cache_clear()
    yield
    xla_options._known.cache_clear()


def graph_of(*ops: Callable[..., Any]) -> fx.Graph:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for op in ops:
        node = graph.call_function(op, (node,))
    graph.output(node)
    return graph


@on_cpu
@pytest.mark.parametrize("op", [aten.convolution.default, aten.convolution_backward.default, aten.mm.default, aten.sum.default])
def test_the_kernel_library_gets_single_products_only(op: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert xla_options.of(graph_of(aten.relu.default, op)) == xla_options.without_graph() == {OPTION: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


@on_cpu
def test_the_compiled_program_has_no_other_fusions_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    x = torch.randn(64, 64)
    found = (x.to("xla") @ x.to("xla")).abs().sum(-1)
    torch.testing.assert_close(found.cpu(), (x @ x).abs().sum(-1))
    text = session.current().recent[-1].compiled.as_text()
    assert not [part for part in text.split("\n\n") if " dot(" in part and (" abs(" in part or " reduce(" in part)]


@pytest.fixture
def _nothing_is_written_to_jaxs_cache() -> Iterator[None]:
    """JAX writes what took a second to compile, and cannot write programs with several blocks."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    yield
    jax.config.update(name, before)


@on_cpu
@pytest.mark.usefixtures("_nothing_is_written_to_jaxs_cache")
def test_temporaries_lie_in_blocks_that_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two tensors of 4 MB that are needed at once, and blocks of 5 MB."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    sizes = []
    for largest in (20 << 20, 5 << 20):
        monkeypatch.setattr(freed_memory, "largest_block", lambda largest=largest: largest)
        options = xla_options.of(graph_of(aten.relu.default))
        assert options == {OPTION: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT", "xla_multiheap_size_constraint_per_heap": largest}
        folder = tmp_path / str(largest)
        x = np.ones((1024, 1024), np.float32)
        function = jax.jit(lambda x: jnp.sort(x @ x) @ jnp.sort(x @ (x + 1)), compiler_options={**options, "xla_dump_to": str(folder)})
        np.testing.assert_allclose(function(x), np.full_like(x, 1024.0 * 1024 * 2048))
        (text,) = (file.read_text() for file in folder.glob("*buffer-assignment.txt"))
        sizes.append(sorted(int(size) for size in re.findall(r"size (\d+),(?: page \d+,)? preallocated-temp", text)))
    assert [len(found) for found in sizes] == [1, 2] and max(sizes[1]) <= 5 << 20


@on_cpu
@pytest.mark.parametrize(("level", "warned"), [("1", False), ("0", True)])
def test_xla_does_not_warn_of_tensors_larger_than_a_block(
    level: str, warned: bool, empty_jax_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unless the user wants to hear more of XLA than JAX lets through by itself."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    monkeypatch.setattr(freed_memory, "largest_block", lambda: 1 << 20)
    monkeypatch.setattr(environment, "jax_keeps_programs", lambda: False)
    executor.clear_cache()
    x = torch.rand(1024, 1024).to("xla")
    assert (torch.sin(x @ x).t() @ (x + 1)).sum().isfinite()
    assert ("larger than the per-heap size limit" in capfd.readouterr().err) is warned


@on_cpu
def test_xla_logs_as_before_once_programs_are_compiled() -> None:
    with _compat.without_warnings_of_xla(), _compat.without_warnings_of_xla():
        pass
    assert _compat._Warnings.unwanted == 0


@on_cpu
def test_what_is_taken_for_known_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "_OPTIONS", set())
    assert _compat.knows_options({"xla_multiheap_size_constraint_per_heap": 5 << 20})
    assert _compat.knows_options({OPTION: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"})


def test_what_xla_flags_say_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--{OPTION}=LIBRARY_FUSION_TYPE_DOT")
    assert xla_options.of(graph_of(aten.mm.default)) is xla_options.without_graph() is None


@on_cpu
def test_an_option_that_this_xla_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(_compat, "_OPTIONS", set())
    monkeypatch.setattr(xla_options, "_ALWAYS", {OPTION: "LIBRARY_FUSION_TYPE_OF_TOMORROW"})
    assert xla_options.of(graph_of(aten.convolution.default)) is None
    assert not _compat.knows_options({"xla_cpu_no_such_option": "1"})


@on_cpu
def test_a_model_with_convolutions_is_compiled_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled program of one has a plain convolution: the library's would stand in a fusion of kind `__ynn_fusion`."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(32, 32, 3, padding=1)
    x = torch.randn(16, 32, 32, 32)
    expected = layer(x).detach().numpy()
    found = layer.to("xla")(x.to("xla")).cpu()
    text = next(p for p in reversed(session.current().recent) if xla_options.of(p.graph)).compiled.as_text()
    assert " convolution(" in text.split("ENTRY")[1], "the convolution is in a fusion"
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-5)

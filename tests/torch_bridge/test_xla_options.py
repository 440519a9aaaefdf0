"""`compiler/xla_options.py`: on CPUs programs with convolutions keep them from YNNPACK, and temporaries lie in blocks, unless XLA_FLAGS says otherwise."""

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
from torch_bridge.runtime import executor

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
@pytest.mark.parametrize("op", [aten.convolution.default, aten.convolution_backward.default])
def test_convolutions_are_not_left_to_the_kernel_library(op: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    options = xla_options.of(graph_of(aten.relu.default, op))
    assert options is not None and "CONVOLUTION" not in options[OPTION] and "DOT" in options[OPTION]


def test_other_programs_have_no_options() -> None:
    assert xla_options.of(graph_of(aten.mm.default, aten.relu.default)) is None


@on_cpu
def test_temporaries_lie_in_blocks_that_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two tensors of 4 MB that are needed at once, and blocks of 5 MB."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    sizes = []
    for largest in (20 << 20, 5 << 20):
        monkeypatch.setattr(freed_memory, "largest_block", lambda largest=largest: largest)
        options = xla_options.of(graph_of(aten.relu.default))
        assert options == {"xla_multiheap_size_constraint_per_heap": largest}
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


def test_what_xla_flags_say_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--{OPTION}=LIBRARY_FUSION_TYPE_DOT")
    assert xla_options.of(graph_of(aten.convolution.default)) is None


@on_cpu
def test_an_option_that_this_xla_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(xla_options, "_ALL_BUT_CONVOLUTIONS", {OPTION: "LIBRARY_FUSION_TYPE_OF_TOMORROW"})
    assert xla_options.of(graph_of(aten.convolution.default)) is None
    assert not _compat.knows_options({"xla_cpu_no_such_option": "1"})


@on_cpu
def test_a_model_with_convolutions_is_compiled_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled program of one has a plain convolution: the library's would stand in a fusion of kind `__ynn_fusion`."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    from torch_bridge.runtime import session

    torch.manual_seed(0)
    layer = torch.nn.Conv2d(32, 32, 3, padding=1)
    x = torch.randn(16, 32, 32, 32)
    expected = layer(x).detach().numpy()
    found = layer.to("xla")(x.to("xla")).cpu()
    text = next(p for p in reversed(session.current().recent) if xla_options.of(p.graph)).compiled.as_text()
    assert " convolution(" in text.split("ENTRY")[1], "the convolution is in a fusion"
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-5)


def test_products_of_one_matrix_for_the_whole_batch_and_sums_of_them() -> None:
    """What XLA for CPUs computes as one is wrong for them: attention to a single head of keys."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) for shape in ((4, 32, 8), (32, 8), (4, 32, 32))]

    def weighed(x: torch.Tensor, shared: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        z = torch.bmm(x, shared.expand(4, 32, 8).transpose(1, 2)) * p.softmax(-1)
        return z - p.softmax(-1) * z.sum(-1, keepdim=True)

    found = weighed(*(x.to("xla") for x in given)).cpu()
    torch.testing.assert_close(found, weighed(*given), rtol=1e-4, atol=1e-5)
    scores = torch.bmm(given[0].to("xla"), given[1].to("xla").expand(4, 32, 8).transpose(1, 2)).softmax(-1).cpu()
    torch.testing.assert_close(scores, torch.bmm(given[0], given[1].expand(4, 32, 8).transpose(1, 2)).softmax(-1), rtol=1e-4, atol=1e-5)


@on_cpu
@pytest.mark.parametrize(("expands", "alone"), [(True, True), (False, False)])
def test_products_that_may_read_what_was_expanded_are_computed_alone(expands: bool, alone: bool) -> None:
    graph = fx.Graph()
    x, shared = graph.placeholder("x"), graph.placeholder("shared")
    read = graph.call_function(aten.expand.default if expands else aten.tanh.default, (shared, [4, 32, 8]) if expands else (shared,))
    read = graph.call_function(aten.where.self, (x, read, x))
    read = graph.call_function(aten.permute.default, (read, [0, 2, 1]))
    graph.output((graph.call_function(aten.bmm.default, (x, read)),))
    options = xla_options.of(graph) or {}
    assert (options.get(OPTION) == "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT") is alone

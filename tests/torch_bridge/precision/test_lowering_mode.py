"""Lowerings are told the precision of their program: they do not look at the environment, which may have changed since."""

from __future__ import annotations

import inspect
import pathlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import fx

import torch_bridge
from torch_bridge import _compat, lowerings
from torch_bridge.collectives import attention_ops
from torch_bridge.compiler import interpret
from torch_bridge.lowerings import registered, update_rules
from torch_bridge.lowerings.kernels import cudnn_attention
from torch_bridge.optimizers import step_ops
from torch_bridge.precision import precision_mode
from torch_bridge.precision.precision_mode import Mode
from torch_bridge.recorder import fallback, subgraph

torch_bridge.register()
aten = torch.ops.aten
FUSED = aten._scaled_dot_product_fused_attention_overrideable
BF16 = Mode(float32="bf16")
P, G = np.array([1.0, 2.0, 3.0], np.float32), np.array([1 / 3, -1 / 7, 1 / 11], np.float32)
STEP = ("sgd", [0], [1], [], [], [], [0.0, 0.0, 1.0, -0.1], "")


def test_who_asks_for_it() -> None:
    assert attention_ops and step_ops  # they fill the registry
    assert {str(op) for op, found in registered().items() if found.mode} == {
        f"{FUSED.default}",
        "aten._scaled_dot_product_fused_attention_overrideable_backward.default",
        "aten._transformer_encoder_layer_fwd.default",
        "aten.native_layer_norm.default",
        "aten.native_layer_norm_backward.default",
        "aten.scaled_dot_product_attention.default",
        "torch_bridge.flash_attention.default",
        "torch_bridge.flash_attention_backward.default",
        "torch_bridge.optimizer_step.default",
    }


@pytest.mark.parametrize(("fact", "keyword"), [("mode", "mode"), ("rng", "key")])
def test_who_asks_takes_it_and_who_takes_it_asks(fact: str, keyword: str) -> None:
    wrong = []
    for op, found in registered().items():
        try:
            takes = inspect.signature(found.fn).parameters.get(keyword)
        except ValueError:  # a function of NumPy's or of JAX's own
            takes = None
        if any(a.name == keyword and a.kwarg_only for a in op._schema.arguments):
            assert not getattr(found, fact), f"{op} has a keyword of that name itself"
        elif (takes is not None and takes.kind is takes.KEYWORD_ONLY) != getattr(found, fact):
            wrong.append(str(op))
    assert wrong == []


READS = re.compile(r"environ\b|getenv|VARIABLES|SETTINGS|precision_mode\.current|compiler_flags")


def test_no_lowering_reads_the_environment() -> None:
    folder = pathlib.Path(lowerings.__file__).parent
    files = {*folder.rglob("*.py"), *(pathlib.Path(inspect.getfile(sys.modules[low.fn.__module__])) for low in registered().values())}
    files = {file for file in files if "torch_bridge" in file.parts}
    assert len(files) > 50
    assert [str(file) for file in sorted(files) if (found := READS.search(file.read_text())) and found] == []
    assert READS.search(pathlib.Path(precision_mode.__file__).read_text())


def step(mode: Mode | None) -> Any:
    """One step of SGD, evaluated as a graph."""
    graph = fx.Graph()
    p, g = graph.placeholder("p"), graph.placeholder("g")
    rule, _, _, *rest = STEP
    made = graph.call_function(step_ops.ops.optimizer_step.default, (rule, [p], [g], *rest))
    graph.output((graph.call_function(interpret.operator.getitem, (graph.call_function(interpret.operator.getitem, (made, 0)), 0)),))
    with _compat.enable_x64():
        return np.asarray(interpret.run(graph, [jnp.asarray(P), jnp.asarray(G)], lambda node: None, mode=mode)[0])


def rounded(x: Any) -> Any:
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))


def test_a_step_is_computed_in_the_mode_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, half = step(precision_mode.PLAIN), step(BF16)
    assert (plain != half).any() and (half == rounded(half)).all() and (plain != rounded(plain)).any()
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=all")
    assert precision_mode.current().float32 == "bf16"
    assert (step(precision_mode.PLAIN) == plain).all() and (step(BF16) == half).all()
    assert (step(None) == half).all()  # what the environment asks for now


def test_a_step_without_a_mode_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"optimizer_step\.default depends on the precision of the program, which nobody gave"):
        interpret.call(step_ops.ops.optimizer_step.default, STEP, {}, None, None)


def test_every_operation_of_a_rule_is_rounded() -> None:
    plain, half = update_rules.Arithmetic(precision_mode.PLAIN), update_rules.Arithmetic(BF16)
    x, y = jnp.asarray(P) / 7, jnp.asarray(G)
    arguments: dict[str, Any] = {
        "add": (x, y),
        "mul": (x, y),
        "div": (x, y),
        "sqrt": (x,),
        "lerp": (x, y, 0.3),
        "addcmul": (x, x, y),
        "addcdiv": (x, x, y),
    }
    for name, args in arguments.items():
        exact, near = getattr(plain, name)(*args), getattr(half, name)(*args)
        assert (np.asarray(exact) != np.asarray(near)).any(), name
        assert (rounded(exact) == np.asarray(near)).all(), name


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Mode]:
    """Modes that attention was traced in."""
    found: list[Mode] = []

    def refusal(*args: Any) -> str:
        found.append(args[-1])
        return "a test"

    monkeypatch.setattr(cudnn_attention, "refusal", refusal)
    return found


def attend(q: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)


def test_a_decomposition_is_evaluated_in_the_mode_of_its_program(asked: list[Mode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fallback.decomposition_table, aten.special_entr.default, attend)
    q = jnp.ones((1, 1, 4, 8), jnp.float32)
    with _compat.enable_x64():
        fallback.lower_by_decomposition(aten.special_entr.default, (q,), {}, None, BF16)
        subgraph.inline(attend, (q,), {}, None, precision_mode.PLAIN)
    assert asked == [BF16, precision_mode.PLAIN]


def test_programs_tell_their_mode(asked: list[Mode], monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 1, 4, 8)
    attend(q.to("xla") * 3).cpu()
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=matmult")
    attend(q.to("xla") * 3).cpu()
    assert asked == [precision_mode.PLAIN, Mode(matmul="bf16")]


@pytest.mark.parametrize("flags", ["", "--auto-cast=matmult"])
def test_modules_that_leave_for_jax_take_what_the_environment_asks_for(
    asked: list[Mode], monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return attend(q)

    monkeypatch.setenv("NEURON_CC_FLAGS", flags)
    function = torch_bridge.to_jax(Attention())
    jax.jit(function)({}, {}, None, jnp.ones((1, 1, 4, 8)))
    assert asked == [precision_mode.current()]


@pytest.mark.parametrize("op", ["flash_attention", "flash_attention_backward"])
def test_flash_attention_tells_its_mode(asked: list[Mode], op: str) -> None:
    q = jnp.ones((1, 1, 4, 8), jnp.float32)
    call = getattr(attention_ops.ops, op).default
    with _compat.enable_x64():
        given = (q, q, q, None) if op == "flash_attention" else (q, q, q, q, q, jnp.ones((1, 1, 4)), jnp.zeros((), jnp.int64))
        interpret.call(call, (*given, 0.0, True, 0.3), {}, None, BF16)
    assert asked == [BF16]

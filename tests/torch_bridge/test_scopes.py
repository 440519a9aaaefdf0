"""Names of ops in HLO are read as they were written, whatever JAX and XLA put around them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_bridge
from torch_bridge.ir import scopes
from torch_bridge.ir.scopes import NONE, Scope
from torch_bridge.source import NOWHERE, Source

MM = torch.ops.aten.mm.default
AROUND = [
    "{}",
    "jit(_apply)/{}/dot_general",
    "jit(f)/shard_map/{}",
    "jit(f)/while/body/closed_call/{}/jit(_where)/select_n",
    "jit(f)/cond/branch_1_fun/{}/mul",
]
PATHS = ["layers.0.mlp", "Model", "layers.*.mlp", "*", "", "aten.mm", "conv:3", "a b", "backward", "jit", "m" * 300]
JAX_WORDS = [
    "main",
    "body",
    "while",
    "cond",
    "scan",
    "shard_map",
    "closed_call",
    "checkpoint",
    "remat",
    "remat2",
    "pjit",
    "branch_0_fun",
    "jit(x)",
    "module(x)",
    "f(x)(y)",
]
FILES = [
    "/home/me/train.py",
    "train.py",
    "<stdin>",
    "<ipython-input-3-0a1b>",
    "/tmp/ipykernel_7/31.py",
    "<string>",
    "my file (1).py",
    "a:12",
    "x.tar.gz",
    "aten.mm",
    "",
]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_is_written_is_read(around: str, backward: bool) -> None:
    for module in PATHS + JAX_WORDS:
        for file in FILES:
            source = Source(module, "", file, 12, "f", backward)
            name = scopes.name(source, MM)
            line = f"{file.rpartition('/')[2]}:12" if file else ""
            assert scopes.read(around.format(name)) == Scope(module, line, "aten.mm", backward), name


def test_module_paths_with_a_slash() -> None:
    """Keys of a ModuleDict may have one; the parts of a name may not."""
    assert scopes.read(scopes.name(Source("a/b.c", "", "x.py", 1), MM)) == Scope("a_b.c", "x.py:1", "aten.mm")


@pytest.mark.parametrize(
    "op", ["aten.add.Tensor", "torch_bridge.optimizer_step", "prims.convert", "mylib.op", "_c10d_functional.all_reduce", "Upper.case.out"]
)
def test_ops_of_every_library(op: str) -> None:
    source = Source("layers.0", "", "train.py", 3)
    assert scopes.read(f"jit(f)/{scopes.name(source, op)}/add").op == op
    assert scopes.read(scopes.name(source._replace(backward=True), op)).op == op


def test_the_outermost_module_is_called_by_its_class() -> None:
    assert scopes.read(scopes.name(Source("", "Model", "x.py", 1), MM)).module == "Model"
    assert scopes.name(Source("", "", "x.py", 1), MM) == "x.py:1/aten.mm"
    assert scopes.name(NOWHERE, MM) == "aten.mm" and scopes.read("jit(f)/aten.mm/dot_general") == Scope("", "", "aten.mm")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "jit(_apply)",
        "jit(f)/jit(_where)/select_n",
        "inputs[0]",
        "x.py:3",
        "x.py:3/while",
        "reduce-window",
        "a/b/c",
        "/",
        "jit(f)/x.py:3",
    ],
)
def test_names_that_are_no_ops(text: str) -> None:
    assert scopes.read(text) == NONE


def test_the_outer_op_counts() -> None:
    """An op that is lowered by its decomposition has the others inside."""
    assert scopes.read("jit(f)/m/x.py:1/aten.gelu/aten.mul/y.py:2/aten.add/add") == Scope("m", "x.py:1", "aten.gelu")


def test_instructions_that_xla_made_one() -> None:
    """The first one's: XLA writes what they share, then the rest of each in parentheses."""
    merged = "jit(f)/shard_map/(train.py:124/torch_bridge.all_reduce/psum:train.py:131/torch_bridge.all_reduce/psum)"
    assert scopes.read(merged) == Scope("", "train.py:124", "torch_bridge.all_reduce")
    merged = "jit(f)/(backward(a.b)/x.py:1/aten.mm/dot:backward(c)/x.py:1/aten.mm/dot)"
    assert scopes.read(merged) == Scope("a.b", "x.py:1", "aten.mm", backward=True)
    assert scopes.read("jit(f)/(layers.0/x.py:1/aten.mm/dot:layers.1/x.py:2/aten.mm/dot)") == Scope("layers.0", "x.py:1", "aten.mm")


def test_names_that_are_escaped() -> None:
    """As in HLO's text and in StableHLO's."""
    assert scopes.unescaped(r"it\'s \303\251.py:3/aten.mm") == scopes.unescaped(r"it's \C3\A9.py:3/aten.mm") == "it's é.py:3/aten.mm"
    assert scopes.unescaped("plain.py:3") == "plain.py:3"


class Main(nn.Module):
    """Submodules that are called as JAX calls its own parts, with ops of their own."""

    class Add(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    def __init__(self) -> None:
        super().__init__()
        self.main, self.body, self.scan = self.Add(), self.Add(), nn.ModuleDict({"a(b)": self.Add(), "c/d": self.Add()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scan["c/d"](self.scan["a(b)"](self.body(self.main(x))))


@pytest.mark.parametrize("stage", ["stablehlo", "optimized"])
def test_such_modules_in_a_program(stage: str) -> None:
    """All that XLA keeps of four additions in a row, which it makes one, is the last one's name."""
    text = torch_bridge.hlo(Main(), torch.zeros(2), stage=stage)
    found = [scopes.read(part).module for part in text.split('"') if scopes.read(part).op == "aten.add.Tensor"]
    expected = ["main", "body", "scan.a(b)", "scan.c_d"]
    assert [m for m in dict.fromkeys(found) if m in expected] == (expected if stage == "stablehlo" else [m for m in expected if m in found])
    assert found and set(found) <= set(expected)

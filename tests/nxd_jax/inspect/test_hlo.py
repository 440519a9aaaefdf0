"""HLO lines know where they come from, and are found by module, op and text."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from torch import nn

from nxd_jax import inspect
from nxd_jax.inspect import HloText
from tests.nxd_jax.inspect.pages import read_html
from tests.nxd_jax.inspect.small import Block, Model, train


@pytest.fixture(scope="module")
def forward() -> inspect.Inspection:
    return inspect.look(Model(3), torch.zeros(2, 5, dtype=torch.int64))


@pytest.fixture(scope="module")
def step() -> inspect.Inspection:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NXD_JAX_FUSED_OPTIMIZERS", raising=False)
        return train()[1]


MODULES = ["embed", *(f"layers.{i}{m}" for i in range(3) for m in (".norm", ".up", "", ".down")), "drop", "head"]


def test_every_line_that_computes_has_a_module(forward: inspect.Inspection) -> None:
    computing = [h for h in forward.stablehlo.lines if re.search(r" = .*(stablehlo|call )", h.text) and "constant" not in h.text]
    assert len(computing) > 50
    shared = forward.stablehlo.find(text="stablehlo.").where(module="")
    assert not [h for h in computing if not h.op and "%arg" not in h.text]
    last = next(h for h in reversed(computing) if h.phase == "outside")
    assert (last.op, last.phase) == ("aten.reshape", "outside"), "a view is computed where it is read: here by whoever called the model"
    assert {h.op for h in shared if h.op and h is not last} == {"aten.relu"}, "only functions that several modules call have none"
    assert forward.stablehlo.modules() == MODULES
    assert {h.phase for h in computing if h is not last} <= {"forward", ""}


def test_lines_of_a_training_step_have_an_op_and_a_phase(step: inspect.Inspection) -> None:
    for h in step.stablehlo.lines:
        if (
            " = " in h.text and not h.op and not h.text.startswith("module")
        ):  # constants; Python numbers taken out of the vector they come in
            assert "stablehlo.constant" in h.text or re.search(r"tensor<\d*x?[fi]64>.*-> tensor<(1x)?[fi]64>|arg\d+", h.text), h
    phases = {h.phase for h in step.stablehlo.lines if h.op}
    assert phases == {"forward", "backward", "outside"}
    assert {h.phase for h in step.stablehlo.find(op="torch_bridge.optimizer_step")} == {"outside"}
    backward = step.stablehlo.find(module="layers.1.up", text="dot_general").where(phase="backward")
    assert len(backward) == 2, "for the weight and for what the layer read"


def test_find(forward: inspect.Inspection) -> None:
    text = forward.stablehlo
    dots = text.find(module="layers.1", text="stablehlo.dot_general")
    assert [(h.module, h.op) for h in dots] == [
        ("layers.1.norm", "aten.native_layer_norm"),  # its sum over rows
        ("layers.1.up", "aten.addmm"),
        ("layers.1.down", "aten.addmm"),
    ]
    assert all(h.line.startswith("small.py:") for h in dots)
    assert text.lines[0].number == text.text.splitlines().index(text.lines[0].text) + 1
    assert {h.module for h in text.find(module="layers.1", most=None)} == {"layers.1", "layers.1.norm", "layers.1.up", "layers.1.down"}
    assert [h.module for h in text.find(module="layers.*.up", text="dot_general")] == [f"layers.{i}.up" for i in range(3)]
    assert len(text.find(op="aten.addmm", text="dot_general")) == 7
    assert len(text.find()) == len(text.lines) and str(text.find(most=3)).count("\n") == 5
    assert not text.find(text="no such text") and "0 of" in str(text.find(text="no such text"))


def test_errors_name_the_modules_there_are(forward: inspect.Inspection) -> None:
    with pytest.raises(ValueError, match=r"comes from module 'layers.7'; there are embed, layers.0, layers.1, layers.2, drop, head$"):
        forward.stablehlo.find(module="layers.7")
    with pytest.raises(ValueError, match="comes from module 'layer'"):
        forward.stablehlo.find(module="layer")
    with pytest.raises(ValueError, match="there are no modules"):
        HloText("module {\n}", "stablehlo").find(module="x")


@pytest.mark.parametrize("stage", ["stablehlo", "optimized"])
def test_layers_in_a_loop_have_a_star(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number finds them, as does a star; another module's name does not."""
    monkeypatch.setenv("NXD_JAX_FOLD", "2")
    _, step = train(blocks=4, steps=1)
    text = getattr(step, stage)
    assert "layers.*.down" in text.modules()
    dot = "dot" if stage == "optimized" else "dot_general"
    for asked in ("layers.*.up", "layers.2.up", "layers.*", "layers"):
        found = text.find(module=asked, text=f"{dot}(" if stage == "optimized" else dot, most=None)
        assert any(h.module == "layers.*.up" for h in found), asked
    assert not any("*" in h.module for h in text.find(module="head"))
    with pytest.raises(ValueError, match=r"layers\.x"):
        text.find(module="layers.x")


def test_a_function_that_several_modules_call_has_what_they_have_in_common() -> None:
    """JAX writes `jnp.where` once for all three blocks."""
    text = """
#loc = loc(unknown)
module @m {
  func.func public @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {
    %0 = call @both(%arg0) : (tensor<2xf32>) -> tensor<2xf32> loc(#loc1)
    %1 = call @both(%0) : (tensor<2xf32>) -> tensor<2xf32> loc(#loc2)
    %2 = call @one(%1) : (tensor<2xf32>) -> tensor<2xf32> loc(#loc2)
    return %2 : tensor<2xf32> loc(#loc)
  } loc(#loc)
  func.func private @both(%arg0: tensor<2xf32>) -> tensor<2xf32> {
    %0 = stablehlo.negate %arg0 : tensor<2xf32> loc(#loc)
    return %0 : tensor<2xf32> loc(#loc)
  } loc(#loc1)
  func.func private @one(%arg0: tensor<2xf32>) -> tensor<2xf32> {
    %0 = stablehlo.negate %arg0 : tensor<2xf32> loc(#loc)
    return %0 : tensor<2xf32> loc(#loc)
  } loc(#loc2)
} loc(#loc)
#loc1 = loc("jit(f)/layers.0/a.py:3/aten.relu"(#loc))
#loc2 = loc("jit(f)/layers.1/a.py:3/aten.relu"(#loc))
"""
    lines = {h.number: h for h in HloText(text, "stablehlo").lines}
    places = {n: (h.module, h.line, h.op, h.phase) for n, h in lines.items()}
    assert places[5] == ("layers.0", "a.py:3", "aten.relu", "forward")
    assert places[11] == places[13] == ("", "a.py:3", "aten.relu", "forward")
    assert places[15] == ("layers.1", "a.py:3", "aten.relu", "forward")
    assert places[10] == places[4] == places[8] == ("", "", "", "")


def test_an_op_with_a_region_has_the_place_that_stands_at_its_end(step: inspect.Inspection) -> None:
    scatter = step.stablehlo.find(text='"stablehlo.scatter"')
    assert [(h.module, h.op, h.phase) for h in scatter] == [("embed", "aten.embedding_dense_backward", "backward")]


def test_optimized_lines(step: inspect.Inspection) -> None:
    text = step.optimized
    assert text.stage == "optimized" and str(text).startswith("HloModule") and len(text) == len(str(text))
    found = text.find(module="layers.0.up")
    assert found and all("metadata=" not in h.text and h.line.startswith("small.py:") for h in found)
    assert {"layers.0.up", "head", "embed"} <= set(text.modules())


def test_html_is_folded_and_can_be_searched(forward: inspect.Inspection) -> None:
    text = forward.stablehlo
    page = read_html(text.html())
    assert page.tags[:2] == ["details", "summary"] and "input" in page.tags
    rows = [a["data-nxd"] for tag, a in page.attributes if "data-nxd" in a]
    assert len(rows) == len(text.lines) and any("layers.1.up aten.addmm" in (r or "") for r in rows)
    script = next(a["oninput"] for tag, a in page.attributes if tag == "input")
    assert script and "dataset.nxd.includes(q)" in script and "http" not in text.html()
    assert "tensor<2x5xi64>" in page.text, "angle brackets are text"
    few = read_html(text.html(most=10))
    assert f"... and {len(text.lines) - 10} more lines" in few.text
    assert text._repr_html_() == text.html()


def test_text_save_and_note(tmp_path: pathlib.Path) -> None:
    text = HloText("module {\n}", "stablehlo", "a <note>")
    assert repr(text) == "HloText(stablehlo, 2 lines; print() shows them, .find(module=...) some of them; a <note>)"
    assert text.save(tmp_path / "x.mlir").read_text() == "module {\n}" == str(text)
    assert "a <note>" in read_html(text.html()).text and str(text.find()).endswith("a <note>")


def test_a_captured_block_alone() -> None:
    """Its own ops are under its class."""
    found = inspect.look(Block(), torch.zeros(3, 8)).stablehlo.modules()
    assert found == ["norm", "up", "Block", "down"]
    assert inspect.look(nn.Identity(), torch.zeros(3, 8)).stablehlo.modules() == []

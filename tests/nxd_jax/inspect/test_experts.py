"""`inspect.experts`: how busy experts are, as a table, as bars of text and as a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from neuronx_distributed.modules.moe import ExpertMLPs, MoE, RouterTopK
from torch import nn

from nxd_jax import inspect
from nxd_jax.inspect.experts import ExpertTable, bar
from nxd_jax.modules.moe import load
from nxd_jax.modules.moe.load import LoadStatistics
from nxd_jax.modules.moe.load_log import LoadOfStep
from tests.nxd_jax.conftest import Nxd

A, B = LoadStatistics((6, 0, 2, 0), 2), LoadStatistics((3, 3, 3, 3), 0)
FEW = LoadStatistics((1, 3), 0)
NOTHING = LoadStatistics((0, 0, 0, 0), 0)


@pytest.fixture(autouse=True)
def one_rank(nxd: Nxd) -> None:
    nxd(1)


def layer(k: int = 2) -> MoE:
    return MoE(RouterTopK(4, k, 8), ExpertMLPs(4, k, 8, 12, "silu", True, 1.0))


def test_a_model() -> None:
    model = nn.ModuleDict({"a": layer(), "b": layer()}).to("xla")
    load.track(model)
    for name in model:
        model[name](torch.randn(2, 6, 8).to("xla"))
    wanted = load.measure(model)
    found = inspect.experts(model)
    for row, (name, statistics) in zip(found, wanted.items(), strict=True):
        assert (row.layer, row.tokens, row.imbalance, row.dropped_share, row.idle) == (
            name,
            statistics.tokens,
            statistics.imbalance,
            statistics.dropped_share,
            statistics.idle_experts,
        )
        assert row.tokens[row.busiest] == max(row.tokens) and sum(row.relative) == pytest.approx(4)
    assert not found.steps


def test_a_log_adds_up_its_steps() -> None:
    model = nn.ModuleDict({"a": layer(), "b": layer()}).to("xla")
    log = load.LoadLog(model)
    with pytest.raises(
        ValueError, match=r"this log has noted no step yet: call log.step\(\) after each optimizer step, then experts\(log\)"
    ):
        inspect.experts(log)
    for _ in range(3):
        for name in model:
            model[name](torch.randn(2, 6, 8).to("xla"))
        log.step()
    found = inspect.experts(log)
    assert {row.layer: row.tokens for row in found} == {name: s.tokens for name, s in load.measure(model).items()}
    assert [step.step for step in found.steps] == [0, 1, 2] and found.note.startswith("3 steps: busiest of all is expert ")


def test_text() -> None:
    found = ExpertTable({"layers.0.mlp": A, "layers.1.mlp": B, "layers.2.mlp": FEW, "unused": NOTHING})
    assert str(found).splitlines() == [
        "Experts",
        "layer         experts  choices  busiest / mean  busiest  idle  dropped",
        "layers.0.mlp        4        8            3.00        0     2    25.0%",
        "layers.1.mlp        4       12            1.00        0     0     0.0%",
        "layers.2.mlp        2        4            1.50        1     0     0.0%",
        "unused              4        0             nan        0     4     nan%",
        "busiest of all is expert 0 of layers.0.mlp, with 3.00 times the mean",
        "",
        "layers.0.mlp █·▄·",
        "layers.1.mlp ▄▄▄▄",
        "layers.2.mlp ▂▆",
        "unused       ····",
        "▄ the mean, █ twice the mean or more, · nothing",
    ]
    assert ExpertTable({"": B}).note == "expert 0 gets 1.00 times the mean" and "the model ▄▄▄▄" in str(ExpertTable({"": B}))
    assert ExpertTable({"a": NOTHING}).note == "nothing was counted: it counts in training, after load.track(model)"
    assert "".join(map(bar, (0, 0.01, 0.5, 0.99, 1, 1.01, 1.5, 2, 9))) == "·▁▂▄▄▄▆██"


def test_data(tmp_path: Path) -> None:
    found = ExpertTable({"a": A, "b": NOTHING})
    rows = json.loads(found.save(tmp_path / "experts.json").read_text())
    assert rows[0] == {"layer": "a", "tokens": [6, 0, 2, 0], "imbalance": 3.0, "dropped_share": 0.25, "busiest": 0, "idle": 2}
    assert rows[1]["imbalance"] == "nan" and math.isnan(found[1].imbalance)
    assert [row.layer for row in found.where(idle=4)] == ["b"] and "<table" in found.html()


def test_mistakes() -> None:
    with pytest.raises(TypeError, match="experts takes a model or a load.LoadLog, got list"):
        inspect.experts([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no MoE layers"):
        inspect.experts(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"the MoE layer 0 does not count its tokens: call load.track\(model\) before training"):
        inspect.experts(nn.Sequential(layer()))


# -- as a picture -----------------------------------------------------------------------------------------


def run(*steps: dict[str, LoadStatistics]) -> ExpertTable:
    return ExpertTable(steps[-1], [LoadOfStep(5 + at, layers) for at, layers in enumerate(steps)])


def marks(axes: Any, name: str) -> list[str]:
    return [t.get_text() for t in axes.texts if (t.get_gid() or "").startswith(name)]


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = ExpertTable({"layers.0.mlp": A, "layers.1.mlp": FEW, "unused": NOTHING})
    made = found.picture(tmp_path / "made" / "experts.png")
    assert (tmp_path / "made" / "experts.png").stat().st_size > 5000 and made.get_suptitle() == found.note
    heat, imbalance, dropped, _ = made.axes
    (image,) = heat.images
    values = image.get_array().filled(math.nan).tolist()
    assert (
        values[0] == [3.0, 0.0, 1.0, 0.0] and values[1][:2] == [0.5, 1.5] and all(map(math.isnan, values[1][2:])) and values[2] == [0.0] * 4
    )
    assert image.get_clim() == (0, 2)
    assert [t.get_text() for t in heat.get_yticklabels()] == ["layers.0.mlp", "layers.1.mlp", "unused"]
    assert marks(imbalance, "busiest") == ["3.00", "1.50", "-"] and marks(dropped, "dropped") == ["25.0%", "0.0%", "-"]
    assert [p.get_x() + p.get_width() for p in imbalance.patches] == [3.0, 1.5, 1.0]
    with pytest.raises(ValueError, match=r"\.txt"):
        found.picture("experts.txt")


def test_picture_of_a_run() -> None:
    pytest.importorskip("matplotlib")
    made = run({"a": A, "b": B}, {"a": B, "b": B}, {"a": NOTHING, "b": NOTHING}).picture()
    *_, left, right = made.axes
    for axes, wanted in ((left, [3.0, 1.0]), (right, [0.25, 0.0])):
        (worst,) = [line for line in axes.lines if (line.get_gid() or "").startswith("worst")]
        assert worst.get_xdata().tolist() == [5, 6, 7] and worst.get_ydata()[:2].tolist() == wanted and math.isnan(worst.get_ydata()[2])
        assert len(axes.lines) - (axes is left) == 3, "a line for each layer, and the worst"
    quiet = run({"a": B}, {"a": B}).picture().axes[-1]
    assert [t.get_text() for t in quiet.texts] == ["nothing is dropped"]


def test_picture_of_many() -> None:
    pytest.importorskip("matplotlib")
    many = {f"layers.{n}.mlp": LoadStatistics(tuple(range(256)), 0) for n in range(60)}
    made = ExpertTable(many).picture()
    assert made.get_figwidth() <= 15 and len(made.axes[0].get_yticklabels()) <= 40 and not made.axes[0].texts
    assert str(ExpertTable({})).startswith("Experts")
    with pytest.raises(ValueError, match="there are no experts to draw: the MoE layers are in other processes"):
        ExpertTable({}).picture()

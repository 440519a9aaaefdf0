"""Which modules are played, and why others are not: as a table, in the report, and from `nxd-inspect`."""

from __future__ import annotations

import json
import pathlib
import textwrap

import pytest
import torch
import torch_xla
from torch import nn

import torch_bridge
from nxd_jax import inspect
from nxd_jax.inspect.replay import PlayedModule, summary, table
from nxd_jax.inspect.report import Report
from tests.nxd_jax.inspect.pages import read_html
from tests.nxd_jax.inspect.test_command import run
from tests.nxd_jax.inspect.test_watching import check

LOSSES: list[int] = []
REASON = "it changes a list that was there before (test_replay.py:"


class IsPlayed(nn.Module):
    """Nothing stands against playing it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


class Appends(IsPlayed):
    """Appends to a list that others read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOSSES.append(1)
        return super().forward(x)


def trained(calls: int = 6) -> list[nn.Module]:
    """One of each, after some steps. The list keeps them alive."""
    found = [torch_bridge.optimize(kind().to("xla")) for kind in (IsPlayed, Appends)]
    for _ in range(calls):
        for module in found:
            module(torch.ones(2, 4).to("xla")).sum().backward()
        torch_xla.sync()
    return found


def rows(*names: str) -> list[PlayedModule]:
    """The last of each class: modules of other tests may still be there."""
    return [inspect.replay().where(module=name)[-1] for name in names]


def test_a_module_that_is_played_and_one_that_is_not() -> None:
    kept = trained()
    played, appends = rows("IsPlayed", "Appends")
    assert played.calls == appends.calls == 6 and len(LOSSES) >= 6 and len(kept) == 2
    assert 0 < played.played < 6 and (played.reason, played.because, played.lasting) == ("", "", False)
    assert appends.played == 0 and appends.lasting and appends.because == appends.reason
    assert appends.reason.startswith(REASON)


def test_it_is_a_table() -> None:
    kept = trained()
    found = inspect.replay().where(lambda m: m.module in {"IsPlayed", "Appends"})[-2:]
    lines = str(found).splitlines()
    assert lines[0] == "Modules played" and lines[1].split("  ")[-1] == "recorded op by op because"
    assert lines[2].split()[:2] == ["IsPlayed", "6"] and f"Appends       6       0  {REASON}" in lines[3]
    cells = read_html(found.html()).cells
    assert cells[0] == ["module", "calls", "played", "recorded op by op because"]
    assert cells[2][:3] == ["Appends", "6", "0"] and cells[2][3].startswith(REASON)
    assert json.loads(found.to_json())[1]["lasting"] is True and len(kept) == 2


PLAYED = PlayedModule("Model", 6, 3, "", False)
PASSING = PlayedModule("Cached", 2, 0, "an argument of type Cache", False)
FOR_GOOD = PlayedModule("Logs", 6, 0, "it changes a list that was there before (a.py:3)", True)
NEW = PlayedModule("New", 2, 0, "", False)
ALL_PLAYED = PlayedModule("Whole", 3, 3, "", False)


def test_the_words_below_and_of_a_reason_that_may_pass() -> None:
    assert PASSING.because == "an argument of type Cache (this may pass)"
    note = table([PLAYED, PASSING, FOR_GOOD]).note
    assert note.startswith(
        "1 of 3 modules played.\nThe first calls of each kind (shapes, modes) are recorded and compared; of modules that nobody"
    )
    assert table([ALL_PLAYED, FOR_GOOD]).note == "1 of 2 modules played."


def test_the_lines_in_a_terminal() -> None:
    assert summary([PLAYED, FOR_GOOD, FOR_GOOD, PASSING]).splitlines() == [
        "modules played: 1 of 4",
        "  Logs is recorded op by op: it changes a list that was there before (a.py:3)",
        "  Cached is recorded op by op: an argument of type Cache (this may pass)",
    ]
    assert summary([NEW]) == "modules played: 0 of 1 (the first calls of each kind are recorded, and abstract runs)\n"
    assert summary([]) == ""


@pytest.mark.parametrize(
    ("switch", "text"),
    [
        (None, "No module is to be played: none was moved to xla, or those that were are gone."),
        (
            "1",
            "NXD_JAX_REPLAY=1 is for models of initialize_parallel_model; auto, the default, and all are for every module that is moved to xla;",
        ),
        ("auto", "No module is to be played: none was moved to xla, or those that were are gone."),
        ("all", "No module is to be played: none was moved to xla, or those that were are gone."),
        (
            "0",
            "No module is to be played. NXD_JAX_REPLAY=0 leaves that to torch_bridge.optimize and torch.compile(..., backend='openxla').",
        ),
    ],
)
def test_without_modules(switch: str | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence, which a report has too unless NXD_JAX_REPLAY is 0."""
    found = inspect.look(nn.Linear(4, 4), torch.zeros(2, 4))
    if switch is None:
        monkeypatch.delenv("NXD_JAX_REPLAY", raising=False)
    else:
        monkeypatch.setenv("NXD_JAX_REPLAY", switch)
    assert text in str(table([])) and "(nothing)" in str(table([]))
    page = read_html(Report(found, modules=[]).html(0)).text
    assert (text in page) == ("Modules played" in page) == (switch != "0")


def test_a_setting_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_REPLAY", "some")
    with pytest.raises(ValueError, match=r"NXD_JAX_REPLAY.*some"):
        table([])
    assert len(table([PLAYED])) == 1


def test_the_report_has_them_as_they_are_now(tmp_path: pathlib.Path) -> None:
    kept = trained()
    page = inspect.look().report(tmp_path / "report.html").read_text()
    check(page)
    assert ["Appends", "6", "0"] in [cells[:3] for cells in read_html(page).cells] and len(kept) == 2
    assert '<a href="#modules">Modules played</a>' in page


SCRIPT = """
    import torch
    import torch_xla

    LOG = []


    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x):
            return torch.tanh(self.inner(x))


    class Logs(Plain):
        def forward(self, x):
            LOG.append(x.shape)
            return super().forward(x)


    def main():
        first, second = Plain().to("xla"), Logs().to("xla")
        for _ in range(10):
            second(first(torch.zeros(4, 8).to("xla"))).square().mean().backward()
            torch_xla.sync()


    main()
"""


def test_the_command(tmp_path: pathlib.Path) -> None:
    """The modules are gone when the script has been ended; what became of them is told all the same."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    found = run(tmp_path, "--steps", "6", "--no-profile", "--json", "out.json", "train.py", NXD_JAX_REPLAY="all")
    assert found.returncode == 0, found.stderr
    reason = "it changes a list that was there before (train.py:19)"
    assert f"modules played: 1 of 2\n  Logs is recorded op by op: {reason}\n" in found.stdout
    page = (tmp_path / "report.html").read_text()
    check(page)
    (plain, logs) = (c for c in read_html(page).cells if c and c[0] in ("Plain", "Logs") and len(c) == 4)
    assert int(plain[2]) > 0 and plain[3] == "" and logs[2:] == ["0", reason]
    assert [m["module"] for m in json.loads((tmp_path / "out.json").read_text())["replay"]] == ["Plain", "Logs"]

"""A report: everything about a program on one HTML page that needs no network."""

from __future__ import annotations

import base64
import html
import io
import logging
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nxd_jax._version import __version__
from nxd_jax.inspect.recompiles import recompiles
from nxd_jax.inspect.replay import modules, section
from nxd_jax.inspect.schedules import schedule
from nxd_jax.inspect.statistics import statistics
from nxd_jax.inspect.tables import write

if TYPE_CHECKING:
    from nxd_jax.inspect.inspection import Inspection
    from nxd_jax.inspect.profiling import Profile
    from nxd_jax.inspect.replay import PlayedModule
    from nxd_jax.inspect.timeline_step import PipelineStep

logger = logging.getLogger("nxd_jax")

LIMIT = 5_000_000
"""Bytes that a report stays under."""

_HLO_LINES = (4000, 1000, 200, 0)
_STYLE = """
body{font:14px/1.55 system-ui,sans-serif;color:#1b1f24;background:#fff;margin:0 auto;max-width:1500px;padding:24px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:34px 0 8px;padding-top:8px;border-top:1px solid #d0d7de}
nav{position:sticky;top:0;background:#fffffff2;padding:8px 0;border-bottom:1px solid #d0d7de}nav a{margin-right:14px;color:#0969da;text-decoration:none}
.said{color:#57606a}.bad{color:#cf222e;font-weight:600}.good{color:#1a7f37;font-weight:600}
section{overflow-x:auto}img{max-width:100%;height:auto}pre{font-size:12px;overflow:auto;background:#f6f8fa;padding:10px}
table td{font-variant-numeric:tabular-nums}details{margin:8px 0}
"""


class Report:
    """A page about a program.

    inspection: what was looked at. title: above it; default its name. facts: lines below the title: (what, value). profile: of some steps, if one was taken.
    failures: checks that failed, in words (shown at the top). modules: rows of `inspect.replay()`; default: those of now. pipeline: a measured step.
    """

    def __init__(
        self,
        inspection: Inspection,
        title: str = "",
        facts: list[tuple[str, str]] | None = None,
        profile: Profile | None = None,
        failures: list[str] | None = None,
        modules: Sequence[PlayedModule] | None = None,
        pipeline: PipelineStep | None = None,
    ):
        self.inspection = inspection
        self.title = title or inspection.name
        self.facts = facts or []
        self.profile = profile
        self.failures = failures or []
        self.modules = modules
        self.pipeline = pipeline

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write the page; its path. HLO is cut short where the page would grow beyond `LIMIT`."""
        page = ""
        for lines in _HLO_LINES:
            page = self.html(lines)
            if len(page.encode()) < LIMIT:
                break
        return write(path, page)

    def html(self, hlo_lines: int = _HLO_LINES[0]) -> str:
        """The page. hlo_lines: of HLO that it shows, for each stage."""
        found = [(name, title, _attempt(make)) for name, title, make in self._sections(hlo_lines)]
        shown = [(name, title, body) for name, title, body in found if body]
        links = "".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, title, _ in shown)
        body = "".join(f'<section id="{name}"><h2>{html.escape(title)}</h2>{text}</section>' for name, title, text in shown)
        return (
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style></head><body>{self._head()}<nav>{links}</nav>{body}</body></html>"
        )

    def _head(self) -> str:
        made = time.strftime("%Y-%m-%d %H:%M:%S")
        facts = "".join(f"<div><b>{html.escape(k)}</b> {html.escape(v)}</div>" for k, v in self.facts)
        failed = "".join(f'<div class="bad">{html.escape(f)}</div>' for f in self.failures)
        return f'<h1>{html.escape(self.title)}</h1><div class="said">nxd_jax {__version__}, {made}</div>{facts}{failed}'

    def _sections(self, hlo_lines: int) -> list[tuple[str, str, Callable[[], str]]]:
        found = self.inspection
        return [
            ("overview", "Overview", self._overview),
            ("pipeline", "Pipeline", self._pipeline),
            ("stages", "Stages", found.stages_html),
            ("memory", "Memory", self._memory),
            ("collectives", "Collectives", self._collectives),
            ("operations", "Operations", lambda: found.costs.by("module", depth=3).html() + found.costs.by("op", most=15).html()),
            ("estimate", "Estimate", lambda: _text(_ESTIMATE) + found.estimate()._repr_html_()),
            ("compilations", "Compilations", lambda: recompiles().html() + statistics()._repr_html_()),
            ("modules", "Modules played", self._modules),
            ("time", "Time", self._time),
            ("graph", "Graph", lambda: _folded("Every op", found.graph.all()[:2000].html() if hlo_lines else found.graph.html())),
            ("hlo", "HLO", lambda: found.stablehlo.html(hlo_lines) + found.optimized.html(hlo_lines) if hlo_lines else _text(_NO_HLO)),
        ]

    def _overview(self) -> str:
        lines = str(self.inspection).splitlines()[:-1]
        verdict = "good" if self.inspection.memory.fits else "bad"
        return f'<div class="{verdict}">{html.escape(self.inspection.memory.verdict)}</div><pre>{html.escape(chr(10).join(lines))}</pre>'

    def _pipeline(self) -> str:
        step = self.pipeline
        if step is None or step.schedule is None:
            return ""
        if step.done:
            return step._repr_html_() + _picture(step.picture) + _folded("Every computation", step.tasks.all()[:2000].html())
        plan = schedule(step.schedule)
        return _text(_PLANNED) + plan.html() + _picture(plan.picture)

    def _memory(self) -> str:
        memory = self.inspection.memory
        return memory.table().html() + _picture(self.inspection.memory_picture) + _folded("Tensors", memory.tensors().html())

    def _collectives(self) -> str:
        table = self.inspection.collectives
        if not table.rows:
            return _text(table.note)
        traffic = self.inspection.traffic.table(most=20).html()
        return table.html() + _picture(self.inspection.topology_picture) + _folded("Traffic on the wires", traffic)

    def _modules(self) -> str:
        return section(modules() if self.modules is None else self.modules)

    def _time(self) -> str:
        found = self.profile
        if found is None:
            return ""
        from nxd_jax.inspect.pictures.timeline import timeline_picture

        return _picture(lambda: timeline_picture(found)) + found._repr_html_()


_ESTIMATE = (
    "How long one run would take on the emulated machine: a roofline over engines, memory and wires. Memory traffic counts every op as if none were fused, so "
    "times that memory limits are upper bounds."
)
_PLANNED = "No step was measured. This is the plan: every forward pass of a stage takes 1, every backward pass 2 (1 for each of its parts)."
_NO_HLO = "left out, for it would make this file too large; nxd-inspect --dump-hlo DIR and Inspection.dump(folder) write it to files"


def _text(said: str) -> str:
    return f'<div class="said">{html.escape(said)}</div>'


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def _picture(draw: Callable[[], Any]) -> str:
    """A figure as part of the page; a line that says why there is none."""
    try:
        figure = draw()
    except ImportError as error:
        return _text(f"no picture: {error}")
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=110, bbox_inches="tight")
    return f'<div><img alt="" src="data:image/png;base64,{base64.b64encode(target.getvalue()).decode()}"></div>'


def _attempt(make: Callable[[], str]) -> str:
    """A section; if it cannot be made, the reason: one part that fails does not take the others with it."""
    try:
        return make()
    except Exception as error:
        logger.debug("a section of the report could not be made", exc_info=True)
        return f'<div class="bad">could not be worked out: {html.escape(f"{type(error).__name__}: {error}")}</div>'

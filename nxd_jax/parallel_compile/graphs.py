"""The graphs that a script's processes have met so far, as `torch_bridge.telemetry.compile_log` tells."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Graph:
    """One graph, however many processes met it.

    name: 8 hex digits, and "-1", "-2", ... for those of the same ops and inputs that came later. ops: aten ops in it. source: 'file.py:line' of its last
    op, or ''. state: "found", "compiled", "cached" (it was in the cache, for every process) or "failed". seconds: of the slowest process. error: of a failure.
    """

    name: str
    ops: int
    source: str
    state: str = "found"
    seconds: float = 0.0
    error: str = ""


class Graphs:
    """All of them, by name. `read()` takes in what was written to the folder since the last time."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.by_name: dict[str, Graph] = {}

    def read(self) -> list[tuple[str, Graph]]:
        """New events in order, as (event, graph): "found", "compiled", "cached" or "failed". A line that is not complete yet is left for the next time."""
        return [found for event in self._events() if (found := self._take(event)) is not None]

    def count(self, *states: str) -> int:
        """How many are in one of these states; without any, all."""
        return sum(not states or g.state in states for g in self.by_name.values())

    def _events(self) -> Iterator[dict[str, Any]]:
        for file in sorted(self._folder.glob("*.jsonl")):
            with file.open("rb") as opened:
                opened.seek(self._read.get(file, 0))
                data = opened.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[file] = self._read.get(file, 0) + len(whole)
            for line in whole.splitlines():
                yield json.loads(line)

    def _take(self, event: dict[str, Any]) -> tuple[str, Graph] | None:
        name = event["graph"] + (f"-{event['number']}" if event["number"] else "")
        graph = self.by_name.get(name)
        new = graph is None
        if graph is None:
            graph = self.by_name[name] = Graph(name, event["ops"], event["source"])
        if event["event"] == "found":
            return ("found", graph) if new else None
        state = "cached" if event.get("cached") else event["event"]
        graph.seconds = max(graph.seconds, event["seconds"])
        if graph.state in ("compiled", "failed") and state != "failed":
            return None
        again = graph.state == state
        graph.state, graph.error = state, event.get("error", "")
        return None if again else (state, graph)

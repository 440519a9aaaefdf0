"""A small module, and the file of its trace."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_bridge.aot import files

X = torch.arange(6.0).view(2, 3)


class Net(nn.Module):
    """Weights in two dtypes, a state that begins with other values than zeros, and a table that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("calls", torch.tensor([7], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls = self.calls + 1
        return {"y": self.linear(x) * self.scale + self.table, "calls": self.calls}


def content(path: Path) -> tuple[Any, ...]:
    with files.opened(path) as opened:
        weights = opened.weights(range(opened.ranks))
        facts = {tag: (p.facts, p.forms, {n: t.tolist() for n, t in p.initial.items()}) for tag, p in opened.programs.items()}
        return opened.kind, opened.extra, facts, [{n: t.tolist() for n, t in w.items()} for w in weights]


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {i.filename: archive.read(i) for i in archive.infolist()}


def rewritten(path: Path, change: Callable[[dict[str, bytes]], Any]) -> None:
    found = members(path)
    change(found)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in found.items():
            archive.writestr(name, data)


def in_text(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A change of model.json, with the sizes that it names as they are."""

    def changed(found: dict[str, bytes]) -> None:
        text = json.loads(found["nxd_jax/model.json"])
        change(text)
        found["nxd_jax/model.json"] = json.dumps(text).encode()

    return lambda path: rewritten(path, changed)

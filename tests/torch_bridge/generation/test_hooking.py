"""transformers' `generate` is replaced when there are xla tensors and transformers is there, whichever comes last."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.torch_bridge.generation import models
from torch_bridge.config.late_imports import Finder
from torch_bridge.generation import hooking

SOURCE = '''
class GenerationMixin:
    def generate(self, inputs):
        """Its own words."""
        return inputs + 1
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "stands_for_transformers.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hooking, "WHERE", "stands_for_transformers")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "stands_for_transformers", raising=False)
    return "stands_for_transformers"


def _waiting(name: str) -> int:
    return sum(isinstance(f, Finder) and f.name == name for f in sys.meta_path)


def _check(module: Any) -> None:
    method = module.GenerationMixin.generate
    assert method.__doc__ == "Its own words." and method._of_transformers.__qualname__ == "GenerationMixin.generate"
    assert module.GenerationMixin().generate(2) == 3, "what is no model on xla runs as it is"


def test_imported_later(library: str) -> None:
    hooking.install()
    hooking.install()
    assert importlib.util.find_spec(library) is not None, "who asks where it is does not load it"
    assert library not in sys.modules and _waiting(library) == 1
    module = importlib.import_module(library)
    _check(module)
    assert module.__spec__ is not None and module.__file__ and _waiting(library) == 0


def test_imported_before(library: str) -> None:
    module = importlib.import_module(library)
    hooking.install()
    first = module.GenerationMixin.generate
    hooking.install()
    assert module.GenerationMixin.generate is first
    _check(module)


def test_transformers_own() -> None:
    models.prompt(1, 1).to("xla")
    method: Any = transformers.GenerationMixin.generate
    assert "generation_config" in importlib.import_module("inspect").signature(method).parameters
    assert method._of_transformers.__module__ == hooking.WHERE

"""A file that tests of a module copy and damage."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch_neuronx

from tests.torch_bridge.aot.nets import Net, X


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a traced `nets.Net`; not to be changed."""
    path = tmp_path_factory.mktemp("files") / "good.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch_neuronx.trace(Net(), X), path)
    return path

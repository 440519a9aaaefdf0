"""The names that users' copies of the original's files take from NeMo."""

from __future__ import annotations

import importlib.util
import sys

import nxd_jax_nemo
import pytest
import torch

from nxd_jax.training import _nemo, optim


@pytest.mark.skipif(importlib.util.find_spec("nemo_toolkit") is not None, reason="NeMo is installed")
def test_names_are_there() -> None:
    from nemo.core.config import hydra_runner
    from nemo.core.optim import register_optimizer
    from nemo.core.optim.lr_scheduler import register_scheduler
    from nemo.utils import logging

    assert (register_optimizer, register_scheduler) == (optim.register_optimizer, optim.register_scheduler)
    assert logging is _nemo.logger
    assert callable(hydra_runner(config_path="conf", config_name="x"))
    with pytest.raises(TypeError, match=r"hydra_runner\(schema=...\) is not supported without NeMo"):
        hydra_runner(schema=object)


def test_others_are_said_not_to_be() -> None:
    import nemo.utils

    with pytest.raises(AttributeError, match=r"nemo.utils.model_utils: NeMo is not installed.*only what NxD Training's own"):
        nemo.utils.model_utils  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="nemo.collections"):
        importlib.import_module("nemo.collections")


def test_asking_what_is_installed_finds_none() -> None:
    assert torch  # whose import put the finder there
    assert any(isinstance(finder, nxd_jax_nemo._Finder) for finder in sys.meta_path)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "nemo"}
    try:
        assert importlib.util.find_spec("nemo") is None
    finally:
        sys.modules.update(kept)

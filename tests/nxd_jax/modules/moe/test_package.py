"""The names of the package, and that tab completion finds them."""

from __future__ import annotations

import importlib

import neuronx_distributed.modules as modules
import pytest
from neuronx_distributed.modules import moe

OURS = ("assignment", "blockwise", "capacity", "dropless", "grouped_product", "load", "router_base")
"""Submodules that NxD has not under these names, or only with kernels."""


def test_names() -> None:
    assert modules.moe is moe
    assert set(moe.__all__) >= {"MoE", "ExpertMLPs", "RouterTopK", "RouterSinkhorn", "load_balancing_loss_func", "ACT2FN"}
    assert set(moe.__all__) == set(moe._FROM)
    assert {*moe.__all__, *moe._SUBMODULES} <= set(dir(moe))
    for name in moe.__all__:
        assert getattr(moe, name) is getattr(importlib.import_module(f"neuronx_distributed.modules.moe.{moe._FROM[name]}"), name)
    namespace: dict[str, object] = {}
    exec("from neuronx_distributed.modules.moe import *", namespace)
    assert set(moe.__all__) <= set(namespace)


def test_submodules() -> None:
    for name in moe._SUBMODULES:
        module = importlib.import_module(f"neuronx_distributed.modules.moe.{name}")
        assert getattr(moe, name) is module
        assert module.__doc__
        if name not in OURS:
            assert module.__doc__.startswith(f"`neuronx_distributed.modules.moe.{name}`"), name


def test_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'nxd_jax.modules.moe' has no attribute 'nothing'"):
        _ = moe.nothing

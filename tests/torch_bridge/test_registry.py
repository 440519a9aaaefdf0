"""registry.py: what may be registered, what is refused and how."""

from __future__ import annotations

import pytest
import torch

from torch_bridge.lowerings import registry
from torch_bridge.lowerings.registry import Lowering, lookup, lowering, registered

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def empty_table(monkeypatch):
    monkeypatch.setattr(registry, "_TABLE", {})


def test_registers_all_overloads_and_returns_the_function():
    def fn(x):
        return x

    assert lowering(aten.abs.default, aten.neg.default, rng=True, lift=False)(fn) is fn
    assert lookup(aten.abs.default) == lookup(aten.neg.default) == Lowering(fn, rng=True, lift=False)
    assert lookup(aten.sin.default) is None


def test_flags_default_to_deterministic_and_lifted():
    lowering(aten.abs.default)(abs)
    assert lookup(aten.abs.default) == Lowering(abs, rng=False, lift=True)


def test_second_registration_names_the_first():
    @lowering(aten.abs.default)
    def first(x):
        return x

    with pytest.raises(ValueError, match=r"aten\.abs\.default already has a lowering \(.*test_registry\..*first\)"):
        lowering(aten.abs.default)(abs)
    assert lookup(aten.abs.default).fn is first


def test_same_overload_twice_in_one_call_is_refused():
    with pytest.raises(ValueError, match=r"aten\.abs\.default already has a lowering"):
        lowering(aten.abs.default, aten.abs.default)(len)


@pytest.mark.parametrize("op", [aten.abs, "aten.abs.default", torch.abs, None])
def test_only_overloads_are_taken(op):
    with pytest.raises(TypeError, match=r"takes OpOverloads such as torch\.ops\.aten\.add\.Tensor, got "):
        lowering(op)(len)
    assert registered() == {}


def test_registered_is_a_copy():
    lowering(aten.abs.default)(abs)
    table = registered()
    table.clear()
    assert lookup(aten.abs.default) is not None

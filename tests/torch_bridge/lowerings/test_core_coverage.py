"""Every core ATen overload reaches JAX: by a lowering, a decomposition of torch's, or composite kernels above it."""

from __future__ import annotations

import pytest
import torch
from torch._decomp import decomposition_table

import torch_bridge.lowerings as lowerings

aten = torch.ops.aten

# Core overloads that no lowering can or should serve.
EXEMPT = {
    aten._local_scalar_dense.default: "a tensor's value as a Python number: the recorder runs the graph and reads it",
    aten.nonzero.default: "the shape of the result depends on values: the recorder computes it on the host",
    aten.resize_.default: "changes a tensor's storage, which only the recorder has",
    aten.atan2.out: "out= variants are derived from the functional overload by the recorder",
}

# Registered although their schema mutates an argument.
MUTABLE = {
    aten._native_batch_norm_legit.default: "serves calls that do not update the running statistics and refuses the others",
}


def overloads():
    for name in sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        try:
            yield getattr(getattr(aten, packet), overload or "default")
        except AttributeError:  # a name that only TorchScript sees
            continue


def how(op: torch._ops.OpOverload) -> str | None:
    if lowerings.lookup(op) is not None:
        return "lowering"
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return "composite"
    return "decomposition" if op in decomposition_table else None


CORE = [op for op in overloads() if torch.Tag.core in op.tags]


def test_the_core_set_is_found():
    assert len(CORE) > 170 and aten.add.Tensor in CORE and aten.convolution.default in CORE


@pytest.mark.parametrize("op", [op for op in CORE if op not in EXEMPT], ids=str)
def test_core_overload_is_covered(op):
    assert how(op) is not None, f"{op} is core ATen: write a lowering (see torch_bridge/lowerings/registry.py)"


@pytest.mark.parametrize("op", EXEMPT, ids=str)
def test_exemptions_are_needed(op):
    """An exemption that a lowering has made superfluous goes."""
    assert op in CORE
    assert lowerings.lookup(op) is None, f"{op} has a lowering now: take it out of EXEMPT"


def test_only_functional_overloads_are_registered():
    assert {op for op in lowerings.registered() if op._schema.is_mutable} == set(MUTABLE)


def test_random_lowerings_are_marked():
    """Each overload that torch calls nondeterministic by seed takes a key, unless it has no randomness in the form lowered here."""
    tagged = {op for op in lowerings.registered() if torch.Tag.nondeterministic_seeded in op.tags}
    assert {str(op) for op in tagged if not lowerings.lookup(op).rng} == set()

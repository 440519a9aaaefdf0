"""What the passes are told about each op: which ops have which facts, so that none is lost or won by accident."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from torch_bridge import _compat
from torch_bridge.lowerings import AxesRule, Lowering, batches, is_cast, is_collective, is_view, may_call_kernels, registered, stacks_of

aten = torch.ops.aten
PLAIN = Lowering(print)
OF_A_LOWERING = ("fn", "rng", "lift", "floats", "mode", "writes")
"""What is about the JAX function, not for the passes."""


@pytest.fixture(scope="module")
def table() -> dict[str, Lowering]:
    """All that is registered, by name, with the ops that are only there where ranks or optimizers are."""
    from torch_bridge.collectives import attention_ops, collective_ops, index_checks, rank_slices, row_shard_ops
    from torch_bridge.fsdp import apart
    from torch_bridge.optimizers import grad_norm_ops, step_ops
    from torch_bridge.recorder import annotate, barrier, grouped_mlp_ops, jax_calls, manual_regions

    assert all(
        (
            grouped_mlp_ops,
            attention_ops,
            collective_ops,
            index_checks,
            rank_slices,
            row_shard_ops,
            grad_norm_ops,
            step_ops,
            barrier,
            jax_calls,
            annotate,
            manual_regions,
            apart,
        )
    )
    return {str(op): found for op, found in registered().items()}


def facts(found: Lowering) -> dict[str, Any]:
    """What a registration says to the passes, but for what is usual; of its stacks, the arguments."""
    said = {f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.name not in OF_A_LOWERING}
    said = {name: value for name, value in said.items() if value != getattr(PLAIN, name)}
    if found.stacks is not None:
        said["stacks"] = {f.name: v for f in dataclasses.fields(found.stacks) if (v := getattr(found.stacks, f.name)) != f.default}
        said["stacks"].pop("when", None)
    if found.kernels is not None:
        said["kernels"] = True
    return said


REMOVES = dict(collective=True, axes=AxesRule.REMOVES)
ADDS = dict(collective=True, axes=AxesRule.ADDS)
OURS: dict[str, dict[str, Any]] = {
    "all_reduce": dict(**REMOVES, batches=True),
    "all_gather": dict(**REMOVES, batches=True),
    "broadcast": REMOVES,
    "reduce_scatter": dict(**ADDS, batches=True),
    "all_to_all": ADDS,
    "permute": dict(collective=True, axes=AxesRule.EVERY),
    "ring_attention": ADDS,
    "ring_attention_backward": ADDS,
    "gather_rows": dict(**REMOVES, entrywise=True, stacks=dict(lists=(0,), constants=1, bucket=3)),
    "scatter_rows": dict(**ADDS, entrywise=True, stacks=dict(lists=(0,), bucket=4)),
    "sum_powers": dict(entrywise=True, stacks=dict(lists=(0,))),
    "optimizer_step": dict(entrywise=True, stacks=dict(lists=(1, 2, 3, 4, 5), replaces=(1, 3, 4, 5), elementwise=True)),
    "rank_int": dict(rank_table=0),
    "rank_float": dict(rank_table=0),
    "rank_slice": dict(rank_table=2),
    "rank_slice_write": dict(rank_table=3),
    "rank_slice_backward": dict(rank_table=3),
    "barrier": {},
    "call_jax": {},
    "shard": {},
    "ramp": {},
    "enter_region": {},
    "leave_region": {},
    "reduce_blocks": {},
    "gather_blocks": {},
    "scatter_blocks": {},
    "apart": {},
    "recurrent_layer": {},
    "recurrent_layer_backward": {},
    "check_indices": {},
    "check_selected": {},
    "check_values": {},
    "check_info": {},
    "flash_attention": {},
    "flash_attention_backward": {},
    "grouped_mlp": dict(once=True, kernels=True),
    "grouped_mlp_backward": dict(once=True, kernels=True),
}
"""Every op of ours."""

VIEWS = (
    "reshape.default", "view.default", "_unsafe_view.default", "permute.default", "transpose.int", "t.default", "expand.default", "unsqueeze.default",
    "squeeze.default", "squeeze.dim", "squeeze.dims", "select.int", "slice.Tensor", "alias.default", "detach.default",
)  # fmt: skip
ONCE = (
    "_native_batch_norm_legit_functional.default", "native_batch_norm_backward.default", "native_layer_norm.default", "native_layer_norm_backward.default",
    "native_group_norm.default", "native_group_norm_backward.default", "native_dropout.default", "convolution_backward.default", "_grouped_mm.default",
    "max_pool2d_with_indices.default",
)  # fmt: skip
KERNELS = (
    "convolution.default", "convolution_overrideable.default", "_convolution.default", "convolution_backward.default",
    "convolution_backward_overrideable.default", "_grouped_mm.default",
)  # fmt: skip
REDUCTIONS = ("sum.dim_IntList", "sum.default", "linalg_vector_norm.default", "any.default", "all.default")
ENTRYWISE = ("aten._fused_adam", "aten._fused_sgd", "aten._fused_adagrad", "aten._foreach_", "aten._amp_foreach_")
"""torch's ops that treat each entry of their lists by itself begin with these, and no other op does."""


def test_every_op_of_ours_has_its_facts(table: dict[str, Lowering]) -> None:
    found = {name.split(".")[1]: facts(low) for name, low in table.items() if name.startswith("torch_bridge.")}
    assert found == OURS


def test_every_op_of_ours_has_a_lowering(table: dict[str, Lowering]) -> None:
    """In-place ones are recorded as others."""
    defined = {name.removeprefix("torch_bridge::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("torch_bridge::")}
    assert {name for name in defined if not name.endswith("_")} == set(OURS)


def test_every_op_of_torch_has_its_facts(table: dict[str, Lowering]) -> None:
    expected: dict[str, dict[str, Any]] = {f"aten.{name}": dict(view=True) for name in VIEWS}
    expected |= {f"aten.{name}": dict(batches=True) for name in REDUCTIONS}
    expected |= {f"aten.{name}": dict(once=True) for name in ONCE}
    expected |= {name: dict(entrywise=True) for name in table if name.startswith(ENTRYWISE)}
    for name in KERNELS:
        expected.setdefault(f"aten.{name}", {})["kernels"] = True
    expected["aten._to_copy.default"] = dict(cast=True, batches=True)
    expected["aten._foreach_mul.Tensor"] = dict(entrywise=True, stacks=dict(lists=(0,)))
    found = {name: said for name, low in table.items() if name.startswith("aten.") and (said := facts(low))}
    assert found == expected
    assert len([name for name in table if name.startswith(ENTRYWISE)]) == 84 + sum(map(_compat.has_foreach, ("clone", "mm")))


def test_the_passes_read_the_table(table: dict[str, Lowering]) -> None:
    every = registered()
    assert {str(op) for op in every if is_view(op)} == {f"aten.{name}" for name in VIEWS}
    assert [str(op) for op in every if is_cast(op)] == ["aten._to_copy.default"]
    assert {str(op) for op in every if is_collective(op)} == {
        f"torch_bridge.{n}.default" for n, said in OURS.items() if "collective" in said
    }
    assert {str(op) for op in every if stacks_of(op)} == {
        *(f"torch_bridge.{name}.default" for name, said in OURS.items() if "stacks" in said),
        "aten._foreach_mul.Tensor",
    }
    pointwise = {str(op) for op in every if torch.Tag.pointwise in op.tags}
    said = {name for name, found in table.items() if found.batches}
    assert {str(op) for op in every if batches(op)} == pointwise | said and not pointwise & said


def test_of_what_is_not_registered_only_torchs_tags_are_known(table: dict[str, Lowering]) -> None:
    assert "aten.isfinite.default" not in table
    for op in ("output", print, aten.isfinite.default):
        assert not is_view(op) and not is_cast(op) and not is_collective(op) and stacks_of(op) is None
    assert batches(aten.isfinite.default) and not batches("output") and not batches(print)


def test_what_is_elementwise_of_an_optimizers_step(table: dict[str, Lowering]) -> None:
    """Adafactor looks at many parameters together."""
    stacks = table["torch_bridge.optimizer_step.default"].stacks
    assert stacks is not None and stacks.when is not None
    assert [rule for rule in ("sgd", "adam", "adamw_fp32", "adagrad", "adafactor") if stacks.when((rule,))] == [
        "sgd",
        "adam",
        "adamw_fp32",
        "adagrad",
    ]
    args = ("adam", ["p", "q"], ["g", "h"], ["m", "n"], [], [], [0.1], "")
    assert stacks.columns(args) == [["p", "q"], ["g", "h"], ["m", "n"]]
    assert stacks.results(args) == 2


def test_what_calls_kernels_of_torch() -> None:
    """Grouped convolutions do."""
    for groups in (1, 2):
        geometry = ([1], [0], [1], False, [0], groups)
        assert may_call_kernels(aten.convolution.default, ("x", "w", None, *geometry)) == (groups > 1)
        assert may_call_kernels(aten._convolution.default, ("x", "w", None, *geometry, False, False, False, False)) == (groups > 1)
        assert may_call_kernels(aten.convolution_backward.default, ("grad", "x", "w", None, *geometry, [True] * 3)) == (groups > 1)
        assert may_call_kernels(aten.convolution_backward_overrideable.default, ("grad", "x", "w", *geometry, [True] * 3)) == (groups > 1)
    assert may_call_kernels(aten._grouped_mm.default, ("x", "w", "offs"))
    assert not may_call_kernels(aten.mm.default, ("x", "w")) and not may_call_kernels("output", ())


def test_an_empty_list_is_a_column() -> None:
    stacks = stacks_of(aten._foreach_mul.Tensor)
    assert stacks is not None and stacks.columns(([], 2.0)) == [[]] and stacks.results(([], 2.0)) == 1

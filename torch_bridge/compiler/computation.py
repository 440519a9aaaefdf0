"""The JAX function of a program spec: what `jax.jit` is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from torch_bridge.compiler import (
    channels_last,
    interpret,
    interpret_loops,
    kernel_calls,
    stored_results,
    transposed_products,
    verify_programs,
)
from torch_bridge.compiler.annotated_labels import AnnotatedLabels
from torch_bridge.compiler.manual_blocks import Blocks
from torch_bridge.compiler.program_spec import ProgramSpec
from torch_bridge.config.settings import SETTINGS
from torch_bridge.lowerings import torch_kernels
from torch_bridge.mesh.spmd_mode import MODE
from torch_bridge.precision import precision_mode


def of(spec: ProgramSpec) -> Callable[..., tuple[Any, ...]]:
    """A function of the arrays of all input ports, the packed numbers and the draws; it gives what leaves through each output port, in their order.

    With ranks this is what one rank computes of its blocks (`shard_mapping.RankLabels.wrap`).
    """

    def evaluate(*inputs: Any) -> Any:
        return _evaluate(spec, inputs)

    def rounded(*inputs: Any) -> Any:
        return _checked(spec, precision_mode.apply(spec.mode, evaluate, inputs), "rewrite_roundings")

    permutes = channels_last.suits(spec.graph)
    if not isinstance(spec.labels, AnnotatedLabels):  # a call is a border for shardings
        stored_results.mark(spec.graph)

    def _apply(*inputs: Any) -> Any:
        with torch_kernels.using(kernel_calls.allowed(spec.labels, spec.mode)):
            return _checked(spec, channels_last.evaluate(rounded, inputs), "channels_last") if permutes else rounded(*inputs)

    return _apply


def _evaluate(spec: ProgramSpec, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    ports, plan = spec.ports, spec.plan
    placeholders = [n for n in spec.graph.nodes if n.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(placeholders[len(spec.inputs) :], inputs[len(ports.inputs) :], strict=False))
    draws = next((x for n, x in values.items() if n.target == "draws"), None)
    if plan is not None:
        given = plan.given()
        alone = ports.inputs[len(given) :]
        values.update((placeholders[i], x) for (i,), x in zip(alone, inputs[len(given) :], strict=False))
        loops = interpret_loops.Evaluation(plan, spec.graph, values, dict(zip(given, inputs, strict=False)), spec.mode, draws)
        single, stacked = loops.run()
        outs = [*stacked, *single]
    else:
        key_of, store = interpret.draws_key_of(draws), precision_mode.store(spec.mode)
        more: dict[str, Any] = {}
        if isinstance(spec.labels, AnnotatedLabels):
            first = transposed_products.to_transpose_first(spec.graph)
            lying = transposed_products.find(spec.graph, but=first)
            more = {"transposed": lying, "kept": first, "blocks": Blocks(spec.graph) if MODE.regions else None}
        outs = interpret.run(spec.graph, inputs, key_of, store=store, mode=spec.mode, **more)
    return _checked(spec, tuple(outs[at] for at in ports.order), "interpret" if plan is None else "interpret_loops")


def _checked(spec: ProgramSpec, results: Any, after: str) -> Any:
    """Results of a program; `VerificationError`, if that is asked for, where they are not what its graph says."""
    if SETTINGS.verify:
        verify_programs.check_results(spec, results, after)
    return results

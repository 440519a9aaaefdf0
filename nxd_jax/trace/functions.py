"""`neuronx_distributed.trace.functions`: the steps that the builder is made of: trace, compile, cut checkpoints."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.trace import cuts, sharding, signatures
from nxd_jax.trace.model_builder_utils import (
    CompilationArtifacts,
    LayoutTransformerArtifacts,
    ModelBuilderConstants,
    TraceArtifacts,
    WLOArtifacts,
    generate_key,
)
from torch_bridge.aot import exporting, safetensors, traced_module, tracing
from torch_bridge.aot.files import rank_file
from torch_bridge.aot.model import Program
from torch_bridge.mesh import world

logger = logging.getLogger("nxd_jax")


def trace(
    model: torch.nn.Module | Callable[..., Any],
    args: Any = None,
    kwargs: dict[str, torch.Tensor] | None = None,
    spmd: bool = True,
    preserve_parameters: bool = True,
    weights_to_skip_layout_optimization: set[str] | None = None,
) -> TraceArtifacts:
    """`functions.trace`: the program of `model(*args, **kwargs)` for all ranks of the world, of which shapes and dtypes count.

    Buffers and parameters that forward assigns anew or updates in place are the program's state. preserve_parameters: accepted (the model is left as it is);
    weights_to_skip_layout_optimization: accepted (XLA chooses layouts).

    Raises NotImplementedError for spmd=False and for *args or **kwargs in the signature, ValueError for inputs that do not fit the signature, RuntimeError if
    the forward cannot be traced.
    """
    if not spmd:
        raise NotImplementedError("spmd=False (a program for each rank) is not supported: one program serves all ranks")
    given, params = signatures.provided(model, args, kwargs)
    module = traced_module.as_module(model)
    names = [a.param_name for a in given]
    try:
        with torch.no_grad():
            inputs = {a.param_name: a.tensor for a in given}
            traced = tracing.trace(module, (), inputs, names, describe=cuts.describe_in(module))
            forms = exporting.export_forms(traced)
    except Exception as error:
        raise RuntimeError(f"HLO generation failed: {error}") from error
    return TraceArtifacts(Program(traced.facts, forms, traced.initial), given, params)


def compile(
    hlo_module: Any,
    metaneff: Any = None,
    compiler_workdir: str | Path | None = None,
    compiler_args: str | None = None,
    key: str | None = None,
) -> CompilationArtifacts:
    """`functions.compile`: write a program (`TraceArtifacts.hlo`) to the working folder. XLA compiles it for the devices of whoever runs it, in `to_neuron()`.

    compiler_workdir: default the folder nxd_models of the system's temporary one. compiler_args: flags of neuronx-cc, accepted. key: the program's tag.
    """
    return CompilationArtifacts(str(_written(hlo_module, compiler_workdir, key)))


def compile_wlo(
    hlo_module: Any,
    metaneff: Any = None,
    compiler_workdir: str | Path | None = None,
    compiler_args: str | None = None,
    key: str | None = None,
) -> WLOArtifacts:
    """`functions.compile_wlo`: as `compile`, for the program whose weight layouts others follow. There are no such layouts here: results are the same."""
    path = str(_written(hlo_module, compiler_workdir, key))
    return WLOArtifacts(path, path)


def compile_layout_transformer(
    wlo_artifacts: WLOArtifacts, priority_model_weight_name_to_idx: dict[str, int], compiler_workdir: str | Path | None = None
) -> LayoutTransformerArtifacts:
    """`functions.compile_layout_transformer`: nothing has to be transformed; accepted."""
    if not isinstance(wlo_artifacts, WLOArtifacts):
        raise ValueError(f"wlo_artifacts must come from compile_wlo, got {type(wlo_artifacts).__name__}")
    return LayoutTransformerArtifacts(wlo_artifacts.wrapped_neff_hlo_filepath)


def _written(hlo: Any, workdir: str | Path | None, key: str | None) -> Path:
    if not isinstance(hlo, bytes):
        raise ValueError(f"hlo_module must be the hlo of TraceArtifacts (serialized StableHLO, bytes), got {type(hlo).__name__}")
    base = Path(workdir) if workdir is not None else Path(tempfile.gettempdir()) / ModelBuilderConstants.DEFAULT_COMPILER_WORKDIR
    folder = base / generate_key(hlo, key) / hashlib.sha256(hlo).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "graph.stablehlo"
    path.write_bytes(hlo)
    return path


def shard_checkpoint(
    checkpoint: dict[str, torch.Tensor],
    model: torch.nn.Module,
    start_rank: int | None = None,
    end_rank: int | None = None,
    load_on_device: bool = False,
    serialize_path: str | None = None,
) -> list[dict[str, torch.Tensor]]:
    """`functions.shard_checkpoint`: a full checkpoint cut for the ranks `start_rank` to `end_rank` (inclusive; default all), a dict for each.

    model: its parameters say how they are cut; it may be on "meta". The caller's dict stays as it is (the original changes it). load_on_device: accepted where
    the ranks are this process's: weights go to the devices in `set_weights`. serialize_path: a folder that gets `tp{rank}_sharded_checkpoint.safetensors`.

    Raises AssertionError without parallel state or for a bad range, RuntimeError for a shape that does not fit.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise AssertionError(
            "shard_checkpoint needs parallel state: call it within `with NxDParallelState(world_size=..., tensor_model_parallel_size=...):`"
        )
    size = world.size()
    first = 0 if start_rank is None else start_rank
    last = size - 1 if end_rank is None else end_rank
    if not 0 <= first <= last < size:
        raise AssertionError(
            f"start_rank {first} and end_rank {last} must be ranks of the {size} in the world, the first not above the last"
        )
    own = dict(checkpoint)
    sharding.preprocess_checkpoint(model, own)
    found = sharding.cut_for_ranks(model, own, range(first, last + 1))
    if serialize_path is not None:
        folder = Path(serialize_path)
        folder.mkdir(parents=True, exist_ok=True)
        for rank, state in enumerate(found, first):
            write_rank_file(folder / rank_file(rank), state)
    return found


def write_rank_file(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Write a rank's weights as safetensors; an older file stays until the new one is whole."""
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as f:
        safetensors.write(f, state)
    unfinished.replace(path)

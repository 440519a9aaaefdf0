"""`neuronx_distributed.trace.trace`: `parallel_model_trace`, its files, and the helpers that cut checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nxd_jax.trace import cuts, traced_weights
from nxd_jax.trace.parallel_context import NxDParallelState
from nxd_jax.trace.sharding import (
    create_local_weight,
    create_local_weight_qkv,
    get_sharded_checkpoint,
    preprocess_checkpoint,
    shard_children,
)
from nxd_jax.utils import model_utils
from torch_bridge.aot import files, traced_module
from torch_bridge.aot.model import Program
from torch_bridge.torch_neuronx import inference

KIND = "parallel model"
_FILE = re.compile(r"tp_(\d+)\.pt")

__all__ = [
    "ParallelModel",
    "TensorParallelNeuronModel",
    "create_local_weight",
    "create_local_weight_qkv",
    "get_sharded_checkpoint",
    "parallel_model_load",
    "parallel_model_save",
    "parallel_model_trace",
    "preprocess_checkpoint",
    "shard_children",
]


class ParallelModel(torch.nn.Module):
    """What the models of `parallel_model_trace` have in common."""


class TensorParallelNeuronModel(ParallelModel):
    """`trace.trace.TensorParallelNeuronModel`: a model of all tensor parallel ranks, called with CPU tensors; rank 0's result comes back."""

    def __init__(self, model: traced_module.TracedModule):
        super().__init__()
        self.model = model

    @property
    def models(self) -> list[traced_module.TracedModule]:
        """The original has a model for each rank; here one runs them all."""
        return [self.model]

    @property
    def tp_degree(self) -> int:
        """How many ranks."""
        return self.model.programs.ranks.size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all ranks."""
        return self.model(*args, **kwargs)


def parallel_model_trace(
    func: Callable[..., Any],
    example_inputs: Any,
    states: Any = None,
    compiler_workdir: str | Path | None = None,
    compiler_args: str | list[str] | None = None,
    inline_weights_to_neff: bool = True,
    bucket_config: inference.BucketModelConfig | None = None,
    tp_degree: int = 1,
    max_parallel_compilations: int | None = None,
    spmd_mode: bool = False,
    checkpoint_loader_callable: Callable[[], dict[str, torch.Tensor]] | None = None,
    force_custom_init_on_device: bool = False,
    serialization_path: str | Path | None = None,
) -> TensorParallelNeuronModel:
    """`neuronx_distributed.trace.parallel_model_trace`: a model of tensor parallel layers, traced for `tp_degree` ranks.

    func: makes (module, {parameter or buffer: index of the result that updates it}); it is called with parallel state of that size, once for all ranks.
    example_inputs: a tensor or a tuple of them; with bucket_config a list of these, one for each bucket. spmd_mode: the module is made on "meta", and weights
    come from `checkpoint_loader_callable()`, a full state dict. serialization_path: with spmd_mode, a folder that the model is saved to. states,
    compiler_workdir, compiler_args, max_parallel_compilations, force_custom_init_on_device: accepted.

    Embeddings may be cut along the vocabulary in spmd_mode, too (the original refuses them: there a rank's first row is a constant of the program).
    Raises ValueError for bucket_config or spmd_mode with inlined weights, spmd_mode without a checkpoint loader, serialization_path without spmd_mode, and for
    buckets whose modules have a weight with other values.
    """
    if inline_weights_to_neff and (bucket_config is not None or spmd_mode):
        what = "bucket_config" if bucket_config is not None else "spmd_mode"
        raise ValueError(f"{what} needs weights apart from the programs: set inline_weights_to_neff=False")
    if spmd_mode and checkpoint_loader_callable is None:
        raise ValueError("spmd_mode needs checkpoint_loader_callable, a function that returns the full state dict")
    if serialization_path is not None and not spmd_mode:
        raise ValueError("serialization_path needs spmd_mode=True; save other models with parallel_model_save")
    if bucket_config is not None:
        bucket_config.store_example_inputs(example_inputs)
    examples = [example_inputs] if bucket_config is None else bucket_config.example_inputs
    programs: dict[str, Program] = {}
    weights: list[dict[str, torch.Tensor]] = []
    with NxDParallelState(world_size=tp_degree, tensor_model_parallel_size=tp_degree):
        for bucket, example in enumerate(examples):
            kwargs = {} if bucket_config is None else bucket_config.get_func_kwargs_for_bucket_rank(bucket)
            module, aliases = _made(func, kwargs, spmd_mode)
            program, inputs = traced_module.trace_program(module, traced_module.as_tuple(example), aliases, cuts.describe_in(module))
            programs[traced_module.tag_of(bucket)] = program
            if not bucket or not spmd_mode:
                own = _weights(module, checkpoint_loader_callable if spmd_mode else None)
                weights = [
                    traced_module.with_more(w, more, module, bucket) for w, more in zip(weights or [{}] * len(own), own, strict=True)
                ]
    chosen = (
        None if bucket_config is None else traced_module.Buckets(bucket_config.bucket_kernel(), bucket_config.bucket_kernel_constant_args)
    )
    model = TensorParallelNeuronModel(traced_module.TracedModule(programs, inputs, traced_module.kept(weights), chosen, KIND))
    if serialization_path is not None:
        parallel_model_save(model, serialization_path)
    return model


def _made(func: Callable[..., Any], kwargs: Mapping[str, Any], on_meta: bool) -> tuple[torch.nn.Module, Mapping[torch.Tensor, int]]:
    if not on_meta:
        return inference.made(func, kwargs)
    with model_utils.init_on_device(torch.device("meta")):
        return inference.made(func, kwargs)


def _weights(module: torch.nn.Module, loader: Callable[[], dict[str, torch.Tensor]] | None) -> list[dict[str, torch.Tensor]]:
    if loader is None:
        return traced_weights.of_ranks(module)
    from nxd_jax.trace.functions import shard_checkpoint

    return shard_checkpoint(loader(), module)


def parallel_model_save(model: TensorParallelNeuronModel, save_dir: str | Path) -> None:
    """`neuronx_distributed.trace.parallel_model_save`: a folder with `tp_{rank}.pt` for each rank: the programs, and that rank's weights."""
    if not isinstance(model, TensorParallelNeuronModel):
        raise ValueError(f"parallel_model_save takes what parallel_model_trace returned, got {type(model).__name__}")
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("tp_*.pt"):
        if _FILE.fullmatch(old.name) and int(_FILE.fullmatch(old.name)[1]) >= model.tp_degree:  # type: ignore[index]
            old.unlink()
    for rank, own in enumerate(model.model.weights):
        model.model.save_rank(folder / f"tp_{rank}.pt", rank, own)


def parallel_model_load(model_dir: str | Path) -> TensorParallelNeuronModel:
    """`neuronx_distributed.trace.parallel_model_load`: the model of a folder that `parallel_model_save` wrote; it may be on a machine with one device.

    Raises FileNotFoundError without such files, ValueError for damaged ones, and for files that do not belong together.
    """
    folder = Path(model_dir)
    found = {int(m[1]): path for path in folder.glob("tp_*.pt") if (m := _FILE.fullmatch(path.name))} if folder.is_dir() else {}
    if not found:
        raise FileNotFoundError(f"{folder} has no tp_0.pt, tp_1.pt, ...: it is no folder that parallel_model_save wrote")
    models = []
    for rank in sorted(found):
        with files.opened(found[rank]) as opened:
            if opened.kind != KIND:
                raise ValueError(f"{found[rank]} is a model that {opened.kind} made: load it with torch.jit.load")
            if opened.extra["rank"] != rank:
                raise ValueError(
                    f"{found[rank]} holds the weights of rank {opened.extra['rank']}: the folder has files under wrong names. Save the model again"
                )
            models.append(traced_module.loaded(opened))
    degree = models[0].programs.ranks.size
    if sorted(found) != list(range(degree)):
        raise ValueError(
            f"the model has {degree} ranks, and {folder} has the files of ranks {', '.join(map(str, sorted(found)))}: all are needed"
        )
    first, *others = models
    for rank, other in enumerate(others, 1):
        if other.programs.programs != first.programs.programs:
            raise ValueError(
                f"tp_{rank}.pt holds other programs than tp_0.pt: the folder has files of several models. Save the model again"
            )
    first.weights = [m.weights[0] for m in models]
    return TensorParallelNeuronModel(first)


def loaded(opened: files.Opened) -> Any:
    """What `torch.jit.load` gives for one of the files: the model, if it has one rank."""
    if opened.programs and next(iter(opened.programs.values())).facts.ranks.size > 1:
        raise RuntimeError("this file is one rank of a model: load its folder with neuronx_distributed.trace.parallel_model_load")
    return traced_module.loaded(opened)

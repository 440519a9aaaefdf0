"""`neuronx_distributed.ModelBuilder`: traces of one model for several inputs, compiled into one `NxDModel`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nxd_jax.trace import functions
from nxd_jax.trace.model_builder_utils import ModelBuilderConstants, TraceArtifacts, generate_key
from nxd_jax.trace.nxd_model import NxDModel

logger = logging.getLogger("nxd_jax")


class ModelBuilder:
    """`ModelBuilder(model).trace(kwargs={...}, tag="prefill").trace(kwargs={...}, tag="decode").compile()` gives an `NxDModel`.

    model: an nn.Module or a function; within `NxDParallelState` its programs are for all ranks. Traces share weights and states by name: what one writes into a
    buffer, the next reads. weights_to_skip_layout_optimization: accepted.
    """

    def __init__(self, model: torch.nn.Module | Callable[..., Any], weights_to_skip_layout_optimization: set[str] | None = None):
        self.model = model
        self.weights_to_skip_layout_optimization = weights_to_skip_layout_optimization
        self.trace_artifacts_collection: dict[str, TraceArtifacts] = {}
        self.world_size = dist.get_world_size() if dist.is_initialized() else ModelBuilderConstants.DEFAULT_WORLD_SIZE

    def trace(
        self, args: Any = None, kwargs: dict[str, torch.Tensor] | None = None, tag: str | None = None, spmd: bool = True
    ) -> ModelBuilder:
        """Trace the model for these example inputs (their shapes and dtypes count) under a tag, default `model_` and 8 digits of the program's hash.

        Returns the builder. Raises as `functions.trace` does.
        """
        started = time.perf_counter()
        found = functions.trace(
            self.model, args, kwargs, spmd, weights_to_skip_layout_optimization=self.weights_to_skip_layout_optimization
        )
        key = generate_key(found.hlo, tag)
        self.trace_artifacts_collection[key] = found
        logger.info("traced %s in %.1f s: %s", key, time.perf_counter() - started, found.program.facts.route)
        return self

    def compile(
        self,
        priority_model_key: str | None = None,
        compiler_workdir: str | Path | None = None,
        compiler_args: str | dict[str, str] | None = None,
        max_workers: int | None = None,
    ) -> NxDModel:
        """The model of all traces; XLA compiles them in `to_neuron()`, for the devices that are there then.

        priority_model_key: the tag whose weight layouts the original gives to all; accepted. compiler_workdir: where programs are written, default the folder
        nxd_models of the system's temporary one. compiler_args: of neuronx-cc, for all or by tag; accepted. max_workers: accepted.

        Raises ValueError without traces, for an unknown priority_model_key, and for compiler_args that lack a tag.
        """
        traces = self.trace_artifacts_collection
        if not traces:
            raise ValueError("nothing is traced yet: call trace(...) before compile()")
        if priority_model_key and priority_model_key not in traces:
            raise ValueError(f"priority_model_key {priority_model_key!r} is no tag: there are {', '.join(traces)}")
        if isinstance(compiler_args, dict):
            missing = [tag for tag in traces if tag not in compiler_args]
            if missing:
                raise ValueError(f"compiler_args has no entry for {', '.join(missing)}: give one for every tag, or a string for all")
        model = NxDModel(self.world_size)
        for tag, found in traces.items():
            step = functions.compile_wlo if tag == priority_model_key else functions.compile
            own = compiler_args.get(tag) if isinstance(compiler_args, dict) else compiler_args
            try:
                model.add(tag, found, step(found.hlo, found.metaneff, compiler_workdir, own, tag))
            except (OSError, AssertionError) as error:
                raise RuntimeError(f"the compilation of {tag!r} failed: {error}") from error
        return model

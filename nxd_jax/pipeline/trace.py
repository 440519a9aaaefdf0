"""`neuronx_distributed.pipeline.trace`: what records a model to cut it into stages. Scripts subclass the tracers; they cannot be made yet."""

from __future__ import annotations

from typing import Any

from nxd_jax import _later


class NxDTracer:
    """`trace.NxDTracer`: raises NotImplementedError when constructed."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(f"neuronx_distributed.pipeline.trace.{type(self).__name__}: {_later.PIPELINE}")


class HFTracerWrapper(NxDTracer):
    """`trace.HFTracerWrapper`: for models of transformers."""


class TorchTracerWrapper(NxDTracer):
    """`trace.TorchTracerWrapper`: for other models."""


def trace_model(*args: Any, **kwargs: Any) -> Any:
    """`trace.trace_model`: raises NotImplementedError."""
    raise NotImplementedError(f"neuronx_distributed.pipeline.trace.trace_model: {_later.PIPELINE}")

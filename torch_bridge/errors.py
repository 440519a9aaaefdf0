"""Errors that users meet, each with what to do about it."""

from __future__ import annotations

from typing import Any

import torch


class DeadTensorError(RuntimeError):
    """A tensor's value was lost because the graph that computes it failed, or it belongs to a capture."""

    @classmethod
    def of(cls, segment: Any) -> DeadTensorError:
        if getattr(segment, "lost", None):
            return cls(segment.lost)
        reason = getattr(segment, "failure", None)
        if reason is None:
            return cls(
                "this xla tensor belongs to a graph that torch_bridge.capture records, and has no value: a captured module may not look at values "
                "(.item(), .cpu(), print, a Python branch on a tensor) nor keep its tensors on attributes or in globals. Return them, or use torch.where."
            )
        return cls(
            f"the value of this xla tensor was never computed: the graph it belongs to failed with {reason}. "
            "Tensors that existed before that graph still hold their last value; compute this one again."
        )


class XlaOutOfMemoryError(torch.OutOfMemoryError):
    """JAX ran out of device memory while a recorded graph ran."""


def explain_derivative(error: Exception) -> Exception:
    """The error of a backward pass, with what to do if torch has no derivative for an op (as a rule, for the backward of one)."""
    text = str(error)
    if "derivative for" not in text or "not implemented" not in text:
        return error
    if "fused_attention" in text:
        cure = "run the forward pass under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), which has gradients of any order"
    else:
        cure = "torch has none on any device. Write the op as simpler ones, or take gradients in JAX: torch_bridge.to_jax(module) works with jax.grad"
    return type(error)(f"{text.splitlines()[0].rstrip('.')}: {cure}.")


class UnsupportedOpError(NotImplementedError):
    """An aten op that can neither be lowered nor decomposed nor run on the CPU."""

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


class VerificationError(RuntimeError):
    """A pass of torch_bridge made something wrong of a recorded step (`NXD_JAX_VERIFY=1`): a bug to be reported."""


class XlaOutOfMemoryError(torch.OutOfMemoryError):
    """JAX ran out of device memory while a recorded graph ran."""


class PeerEndedError(RuntimeError):
    """Another process of the job has ended, so that its values do not come."""


_OF_ARGUMENTS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


def locate(error: Exception, op: Any, args: Any) -> Exception:
    """The error of an op that does not take its arguments (torch's own words), with the module, the user's line and the arguments; without the frames of what
    looked at them."""
    from torch_bridge import source

    if type(error) not in _OF_ARGUMENTS or len(error.args) != 1 or not isinstance(error.args[0], str) or hasattr(error, _LOCATED):
        return error
    at = source.of_error(2)
    module = f"in {f'{at.module} ({at.module_class})' if at.module else at.module_class}, " if at.module_class else ""
    line = f"called at {at.file}:{at.line} in {at.function}" if at.file else "in a backward pass"
    line = f"in the backward of what was {line}" if at.backward and at.file else line
    shown = ", ".join(_short(a) for a in args)
    error.args = (f"{error.args[0]}\n  {module}{line}: {op}({shown})",)
    setattr(error, _LOCATED, True)
    return error.with_traceback(None)


_LOCATED = "_nxd_jax_located"


def is_located(error: BaseException) -> bool:
    """Whether `locate` has dealt with it."""
    return hasattr(error, _LOCATED)


def _short(x: Any) -> str:
    """An argument in a few characters: float32[2, 8] for a tensor."""
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if isinstance(x, (list, tuple)):
        more = ", ..." if len(x) > 8 else ""
        return f"[{', '.join(_short(e) for e in x[:8])}{more}]"
    text = repr(x)
    return text if len(text) <= 40 else f"{text[:37]}..."


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

"""A module's forward on tensors without values: told that it is exported, and named by its line where it reads one."""

from __future__ import annotations

import contextlib
import linecache
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torch_bridge import source
from torch_bridge.aot import attributes
from torch_bridge.export import graph_capture

_READS = "torch_bridge.capture"
"""What both errors of a value that is read say: no others do."""


def capture(module: torch.nn.Module, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """`graph_capture.with_checks` of `module(*args, **kwargs)`: with checks of indices, if NXD_JAX_CHECK_INDICES says so.

    Meanwhile `torch.compiler.is_exporting()` is true: transformers' models then look at no values of masks.

    Raises RuntimeError, with the line, for a forward that reads a value.
    """
    return _captured(graph_capture.with_checks, module, args, kwargs)


def capture_unchecked(module: torch.nn.Module, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """The same with the module's own ops alone."""
    return _captured(graph_capture.capture, module, args, kwargs)


def _captured(how: Callable[..., fx.GraphModule], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    try:
        with _exporting(), attributes.kept(module):
            return how(module, *args, **kwargs)
    except RuntimeError as error:
        where = _reader(error) if _READS in str(error) else None
        if where is None:
            raise
        raise RuntimeError(f"{error} {where}") from error


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """A block in which `torch.compiler.is_exporting()` says so, but not within TorchScript modules: torch would call the function that a method was made of,
    and give it the module twice."""

    def call(script: torch.jit.ScriptModule, *args: Any, **kwargs: Any) -> Any:
        torch.compiler._is_exporting_flag = before
        try:
            return torch.nn.Module.__call__(script, *args, **kwargs)
        finally:
            torch.compiler._is_exporting_flag = True

    before = torch.compiler.is_exporting()
    torch.compiler._is_exporting_flag = True
    torch.jit.ScriptModule.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag = before
        del torch.jit.ScriptModule.__call__


def _reader(error: BaseException) -> str | None:
    """Which line read a value; None if nobody outside torch and this package did."""
    outside = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if source.is_user(frame.f_code)]
    if not outside:
        return None
    code, line = outside[-1]
    text = linecache.getline(code.co_filename, line).strip()
    of_masks = "transformers" in Path(code.co_filename).parts and "mask" in f"{Path(code.co_filename).name} {code.co_name}"
    advice = ' Make the model with attn_implementation="eager", which reads no values of masks.' if of_masks else ""
    return f"It was asked for at {code.co_filename}:{line} in {code.co_name}: {text}.{advice}"

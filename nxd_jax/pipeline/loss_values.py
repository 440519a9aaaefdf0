"""Where the loss is in what a model returns: `output_loss_value_spec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def find(output: Any, spec: Any) -> torch.Tensor:
    """The loss in an output. spec: True, or nested tuples, lists and dicts of booleans with one True, as the output is nested. A tuple also
    says it of transformers' `ModelOutput`, which is a dict with an order; a tuple or a dict says it of a dataclass.

    Raises RuntimeError for an output that is nested otherwise, whose part is no tensor, and for a spec without True.
    """
    found = _find(output, spec, "output")
    if found is None:
        raise RuntimeError(f"output_loss_value_spec={spec!r} has no True, so it does not say where the loss is")
    return found


def _find(output: Any, spec: Any, where: str) -> torch.Tensor | None:
    if isinstance(spec, bool):
        if not spec:
            return None
        if not isinstance(output, torch.Tensor):
            raise RuntimeError(
                f"output_loss_value_spec says that {where} is the loss, but it is of type {type(output).__name__} and no tensor"
            )
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        output = fields if isinstance(spec, Mapping) else tuple(fields.values())
    if isinstance(spec, Mapping):
        if not isinstance(output, Mapping) or set(output) != set(spec):
            said = f"a dict with {', '.join(map(str, output))}" if isinstance(output, Mapping) else f"a {_type(output)}"
            raise RuntimeError(f"output_loss_value_spec says that {where} is a dict with {', '.join(map(str, spec))}, but it is {said}")
        parts = [(output[key], spec[key], f"{where}[{key!r}]") for key in spec]
    elif isinstance(spec, (tuple, list)):
        if isinstance(output, Mapping) and hasattr(output, "to_tuple"):
            output = tuple(output.values())
        if not isinstance(output, (tuple, list)) or len(output) != len(spec):
            said = f"a {_type(output)} of {len(output)}" if isinstance(output, (tuple, list)) else f"a {_type(output)}"
            raise RuntimeError(f"output_loss_value_spec says that {where} is a {_type(spec)} of {len(spec)}, but it is {said}")
        parts = [(o, s, f"{where}[{k}]") for k, (o, s) in enumerate(zip(output, spec, strict=True))]
    else:
        raise RuntimeError(f"output_loss_value_spec must consist of tuples, lists, dicts and booleans, got {spec!r}")
    return next((loss for part in parts if (loss := _find(*part)) is not None), None)


def _type(value: object) -> str:
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__

"""`neuronx_distributed.utils.serialization`: nested Python data and the tensors in it, taken apart and put together again."""

from __future__ import annotations

import base64
import pickle
from typing import Any, NamedTuple

import torch

from torch_bridge import nested


class TensorMeta(NamedTuple):
    """`utils.serialization.TensorMeta`: stands for tensor number `tensor_index`."""

    tensor_index: int
    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool
    device: torch.device


class SerializationManager:
    """`utils.serialization.SerializationManager`: takes the tensors out of nested lists, tuples, sets, dicts and objects, and puts them back."""

    def serialize(self, obj: Any, return_stub_list: bool = True) -> tuple[Any, ...]:
        """(`obj` with a `TensorMeta` for each tensor, the tensors, the `TensorMeta`s); without the last one if not `return_stub_list`.

        A tensor that occurs several times is taken once. `obj` itself stays as it is.
        """
        tensors = nested.collect(obj, _is_tensor)
        stubs = [TensorMeta(k, t.dtype, t.shape, t.requires_grad, t.device) for k, t in enumerate(tensors)]
        stubbed = nested.replace(obj, _is_tensor, stubs)
        return (stubbed, tensors, stubs) if return_stub_list else (stubbed, tensors)

    def deserialize(self, stubbed_obj: Any, tensors: list[torch.Tensor]) -> Any:
        """What `serialize` was given, from what it returned (with any tensors in place of the old ones)."""
        stubs = nested.collect(stubbed_obj, _is_stub)
        return nested.replace(stubbed_obj, _is_stub, [tensors[s.tensor_index] for s in stubs])

    def extract_stubs(self, stubbed_obj: Any) -> list[TensorMeta]:
        """The `TensorMeta`s in nested data."""
        return nested.collect(stubbed_obj, _is_stub)


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def _is_stub(x: object) -> bool:
    return isinstance(x, TensorMeta)


def compress_to_string(obj: Any) -> str:
    """`utils.serialization.compress_to_string`: an object pickled, as base64 text (which is not smaller)."""
    return base64.b64encode(pickle.dumps(obj)).decode("ascii")


def uncompress_from_string(serialized_data_string: str) -> Any:
    """`utils.serialization.uncompress_from_string`: the object of such a text. Unpickling runs code: only for texts of your own."""
    return pickle.loads(base64.b64decode(serialized_data_string))


def is_instance_namedtuple(iterable: object) -> bool:
    """`utils.serialization.is_instance_namedtuple`: whether a value is a named tuple (NxD's never says so)."""
    return isinstance(iterable, tuple) and hasattr(iterable, "_fields")


def find_loss_from_output_and_spec(output_val: Any, spec_val: object) -> torch.Tensor | None:
    """`utils.serialization.find_loss_from_output_and_spec`: the tensor of a model's output where `spec_val`, nested alike, says True; None for False alone.

    Raises RuntimeError if the two are not nested alike, if True stands for no tensor or is nowhere.
    """
    if spec_val is False:
        return None
    found = _find(output_val, spec_val)
    if found is None:
        raise RuntimeError(f"the loss specification {spec_val!r} does not say where the loss is: True must stand in its place")
    return found


def _find(output: Any, spec: Any) -> torch.Tensor | None:
    if isinstance(spec, bool):
        if spec and not isinstance(output, torch.Tensor):
            raise RuntimeError(f"the loss specification says that the loss is here, but this is no tensor: {output!r}")
        return output if spec else None
    if not isinstance(spec, (dict, list, tuple)):
        raise RuntimeError(f"a loss specification consists of dicts, lists, tuples, True and False, got {type(spec).__name__}")
    return next((t for pair in _pairs(output, spec) if (t := _find(*pair)) is not None), None)


def _pairs(output: Any, spec: Any) -> list[tuple[Any, Any]]:
    if isinstance(spec, dict):
        if isinstance(output, dict) and set(output) == set(spec):
            return [(output[k], spec[k]) for k in spec]
    elif isinstance(output, (list, tuple)) and len(output) == len(spec):
        return list(zip(output, spec, strict=True))
    raise RuntimeError(f"the model's output of type {type(output).__name__} does not match the loss specification {spec!r}")

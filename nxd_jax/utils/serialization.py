"""`neuronx_distributed.utils.serialization`: nested Python data and the tensors in it, taken apart and put together again."""

from __future__ import annotations

import base64
import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class TensorMeta(NamedTuple):
    """`utils.serialization.TensorMeta`: stands for tensor number `tensor_index`."""

    tensor_index: int
    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool
    device: torch.device


class SerializationManager:
    """`utils.serialization.SerializationManager`: takes the tensors out of nested data, and puts them back.

    Nested data are lists, tuples, named tuples, sets and dicts, and subclasses of them; values and keys. Objects of other classes stay what they are, with the
    tensors that they hold.
    """

    def serialize(self, obj: Any, return_stub_list: bool = True) -> tuple[Any, ...]:
        """(`obj` with a `TensorMeta` for each tensor, the tensors, the `TensorMeta`s); without the last one if not `return_stub_list`.

        A tensor that occurs several times is taken once. `obj` itself stays as it is. Raises RuntimeError for data that contain themselves.
        """
        tensors: list[torch.Tensor] = []
        stubs: dict[int, TensorMeta] = {}

        def taken(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and id(x) not in stubs:
                stubs[id(x)] = TensorMeta(len(tensors), x.dtype, x.shape, x.requires_grad, x.device)
                tensors.append(x)
            return stubs[id(x)] if isinstance(x, torch.Tensor) else x

        stubbed = _mapped(obj, taken)
        return (stubbed, tensors, list(stubs.values())) if return_stub_list else (stubbed, tensors)

    def deserialize(self, stubbed_obj: Any, tensors: list[torch.Tensor]) -> Any:
        """What `serialize` was given, from what it returned (with any tensors in place of the old ones)."""
        return _mapped(stubbed_obj, lambda x: tensors[x.tensor_index] if isinstance(x, TensorMeta) else x)

    def extract_stubs(self, stubbed_obj: Any) -> list[TensorMeta]:
        """The `TensorMeta`s in nested data, in their order, as often as they are there."""
        found: list[TensorMeta] = []
        _mapped(stubbed_obj, lambda x: found.append(x) if isinstance(x, TensorMeta) else x)
        return found


def _mapped(data: Any, change: Callable[[Any], Any], around: tuple[int, ...] = ()) -> Any:
    """A copy of nested data with each leaf changed. around: `id`s of what it is inside of."""
    if isinstance(data, (TensorMeta, torch.Size, torch.Tensor)) or not isinstance(data, (list, tuple, set, frozenset, dict)):
        return change(data)
    if id(data) in around:
        raise RuntimeError(f"a {type(data).__name__} contains itself: serialize takes data that end; leave the inner one out")
    inner = (*around, id(data))
    if not isinstance(data, dict):
        items = [_mapped(x, change, inner) for x in data]
        return type(data)(*items) if is_instance_namedtuple(data) else type(data)(items)
    new = copy.copy(data)  # keeps what a subclass has besides its entries, such as a default factory
    new.clear()
    for key, value in data.items():
        new[_mapped(key, change, inner)] = _mapped(value, change, inner)
    return new


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

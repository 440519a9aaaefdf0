"""`torch.ops.xla`: what of torch_xla's ops scripts call themselves."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch

XLA_LIB = torch.library.Library("xla", "FRAGMENT")
"""`torch_xla.core.xla_model.XLA_LIB`: where scripts define ops of their own, `torch.ops.xla.<name>`."""


def dynamo_mark_sharding(
    input: torch.Tensor, device_ids: Sequence[int], mesh_shape: Sequence[int], axis_names: str, partition_spec: str
) -> torch.Tensor:
    """`torch.ops.xla.dynamo_mark_sharding`: `xs.mark_sharding` with a mesh and a partition spec as plain arguments, for code in `torch.compile`.

    axis_names, partition_spec: as text, such as "('data', 'model')". A tensor that is not on xla stays as it is. Returns the tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if input.device.type != "xla" or isinstance(input, FakeTensor):
        return input
    from torch_bridge.torch_xla.distributed.spmd import marking, meshes

    names, spec = (_read(name, text) for name, text in (("axis_names", axis_names), ("partition_spec", partition_spec)))
    marking.mark_sharding(input, meshes.Mesh(device_ids, mesh_shape, names), spec)
    return input


def _read(name: str, text: str) -> tuple[Any, ...]:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"dynamo_mark_sharding: {name} is a tuple as text, such as \"('data', None)\", got {text!r}") from error
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


XLA_LIB.define(
    "dynamo_mark_sharding(Tensor input, int[] device_ids, int[] mesh_shape, str axis_names, str partition_spec) -> Tensor",
)
XLA_LIB.impl("dynamo_mark_sharding", dynamo_mark_sharding, "CompositeImplicitAutograd")

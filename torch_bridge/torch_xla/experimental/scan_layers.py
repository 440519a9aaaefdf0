"""`torch_xla.experimental.scan_layers`: equal layers, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def scan_layers(layers: Iterable[torch.nn.Module], input_data: object, partition_fn: Any = None, is_layer_pure: bool = False) -> Any:
    """`torch_xla.experimental.scan_layers.scan_layers`: what the layers make of `input_data`, each of what the one before returned.

    A tuple is given as several arguments. Without layers it is `input_data`. Hooks, dropout and buffers are those of calling them; from `NXD_JAX_FOLD` (12)
    layers on they are compiled as one loop over stacked weights, asked for or not. `partition_fn` and `is_layer_pure`, which say how torch_xla traces a layer,
    are not needed. ValueError for layers whose parameters or buffers have other names or shapes than the first's.
    """
    layers = list(layers)
    expected = _tensors(layers[0]) if layers else {}
    for k, layer in enumerate(layers[1:], 1):
        found = _tensors(layer)
        for name in {**expected, **found}:
            if found.get(name) != expected.get(name):
                what = "Shape mismatch" if name in expected and name in found else "mismatched keys"
                a, b = (list(x[name]) if name in x else "missing" for x in (expected, found))
                raise ValueError(f"scan_layers: layers must be alike, but {name} is {a} in layer 0 and {b} in layer {k} ({what})")
    for layer in layers:
        input_data = layer(*input_data) if isinstance(input_data, tuple) else layer(input_data)
    return input_data


def _tensors(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in (*module.named_parameters(), *module.named_buffers())}

"""A torch module as a `flax.nnx.Module`."""

from __future__ import annotations

from typing import Any

import torch
from flax import nnx

from torch_bridge.export.jax_function import JaxFunction, to_jax


class Buffer(nnx.Variable):
    """A torch buffer: state that is not trained."""


class Branch(nnx.Module):
    """A node of the parameter tree; its attributes are sub-branches and variables, under torch's names."""


class TorchModule(Branch):
    """What `to_nnx` returns: the tree of variables, and a call that runs the torch module's graph on them.

    `torch.nn.Linear.weight` of `layers.0.proj` is the `nnx.Param` at `getattr(m.layers, "0").proj.weight`. Buffers that the forward updates are
    stored in place. `train()` and `eval()` switch dropout and batch norm, as in torch.
    """

    def __init__(self, module: torch.nn.Module, rngs: nnx.Rngs | None):
        self._function = to_jax(module)
        self._modes = tuple(m.training for m in module.modules())
        self.rngs = rngs if rngs is not None else nnx.Rngs(0)
        for name, value in self._function.params.items():
            _place(self, name, nnx.Param(value))
        for name, value in self._function.buffers.items():
            _place(self, name, Buffer(value))

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        function: JaxFunction = self._function
        params = {n: _find(self, n)[...] for n, _ in function.module.named_parameters()}
        buffers = {n: _find(self, n)[...] for n, _ in function.module.named_buffers()}
        _set_modes(function.module, self._modes)
        out, new_buffers = function(params, buffers, self.rngs(), *inputs, **kwargs)
        for name, value in new_buffers.items():
            if value is not buffers[name]:
                _find(self, name)[...] = value
        return out

    def train(self, **attributes: Any) -> None:
        """Training mode: dropout drops, batch norm uses batch statistics."""
        self._switch(True)

    def eval(self, **attributes: Any) -> None:
        """Evaluation mode."""
        self._switch(False)

    def _switch(self, mode: bool) -> None:
        self._modes = tuple(mode for _ in self._modes)


def to_nnx(module: torch.nn.Module, rngs: nnx.Rngs | None = None) -> TorchModule:
    """A `flax.nnx.Module` with named `nnx.Param`s (and `Buffer`s) that computes what `module` computes and trains with optax.

    rngs: where dropout and other random ops take their keys (default `nnx.Rngs(0)`). The module's weights are copied once; tied weights are one `nnx.Param`
    under the first of their names. It starts in the torch module's train/eval mode.
    """
    return TorchModule(module, rngs)


def _place(root: nnx.Module, name: str, variable: nnx.Variable) -> None:
    *path, leaf = name.split(".")
    node: Any = root
    for part in path:
        child = getattr(node, part, None)
        if not isinstance(child, Branch):
            child = Branch()
            setattr(node, part, child)
        node = child
    setattr(node, leaf, variable)


def _find(root: nnx.Module, name: str) -> Any:
    node: Any = root
    for part in name.split("."):
        node = getattr(node, part)
    return node


def _set_modes(module: torch.nn.Module, modes: tuple[bool, ...]) -> None:
    for m, training in zip(module.modules(), modes, strict=True):
        m.training = training

"""Layers that are one node each of a traced model, where a call of the layer alone is not all.

- Code around the layer switches gradients off, or autocast on or off: so does its stage (`InContext`).
- transformers' models collect something inside of the layer by hooks (router logits, attentions) and read it after the layers. In a pipeline the layer's own
  stage collects it, and hands it on beside what the layer returns (`Collecting`).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from torch_bridge.guards import allowed_hooks

if TYPE_CHECKING:
    from nxd_jax.pipeline.call_recorder import Context

KEYS = "collected"
"""In the `meta` of a layer's node: what is collected inside of the layer, by transformers' names, and how many tensors of each. Its value is a pair then."""

CONTEXT = "context"
"""In the `meta` of a layer's node: the torch state (`call_recorder.Context`) in which it is called, if that is not the model's."""

_INSTALLED = "_output_capturing_hooks_installed"
"""What transformers notes of a module whose layers have its hooks."""


class InContext(nn.Module):
    """A layer that is called without gradients, or with autocast on or off.

    Args:
        layer: the module.
        context: the torch state in which the model calls it.
    """

    def __init__(self, layer: nn.Module, context: Context):
        super().__init__()
        self.layer = layer
        self.context = context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.context.entered():
            return self.layer(*args, **kwargs)


class Collecting(nn.Module):
    """A layer that returns (its result, what is collected inside, in order).

    Args:
        layer: the module.
        counts: by transformers' name ("router_logits"), how many tensors that is.
    """

    def __init__(self, layer: nn.Module, counts: Mapping[str, int]):
        super().__init__()
        self.layer = layer
        self.counts = dict(counts)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Raises RuntimeError if the layer's hooks collect more or fewer tensors than when the model was traced."""
        collected: dict[str, list[torch.Tensor]] = {key: [] for key in self.counts}
        active = allowed_hooks.collector()
        token = active.set(collected)
        try:
            found = self.layer(*args, **kwargs)
        finally:
            active.reset(token)
        for key, count in self.counts.items():
            if len(collected[key]) != count:
                raise RuntimeError(
                    f"{type(layer_of(self.layer)).__name__} gave {len(collected[key])} {key}, and {count} when the pipeline was cut: its hooks are others now. "
                    "Make the NxDPPModel anew"
                )
        return found, tuple(t for key in self.counts for t in collected[key])


class Watched:
    """What is collected during a call of a layer."""

    def __init__(self) -> None:
        self._lists: Mapping[str, list[Any]] = allowed_hooks.collected() or {}
        self._before = {key: len(held) for key, held in self._lists.items() if isinstance(held, list)}

    def forget(self) -> None:
        """The call is made again."""
        for key, count in self._before.items():
            del self._lists[key][count:]

    def inside(self, results: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """The tensors that were made inside, by name. results: tensors that the layer takes or returns: these are known."""
        known = set(map(id, results))
        new = {key: self._lists[key][count:] for key, count in self._before.items()}
        return {key: found for key, found in new.items() if any(isinstance(t, torch.Tensor) and id(t) not in known for t in found)}


def hooked(model: nn.Module) -> list[nn.Module]:
    """The modules in whose layers transformers has put its hooks. It does so when a model first collects something."""
    return [module for module in model.modules() if module.__dict__.get(_INSTALLED)]


def give(traced: fx.GraphModule, hooked: Sequence[nn.Module]) -> None:
    """Put around the layers of a traced model what their nodes say. hooked: what had hooks in the run that was traced, which have been taken out again.

    Raises RuntimeError for a layer that is called several times, and not each time in the same way.
    """
    calls: dict[str, list[tuple[dict[str, int], Context | None]]] = {}
    for node in traced.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append((node.meta.get(KEYS, {}), node.meta.get(CONTEXT)))
    for name, found in calls.items():
        if any(other != found[0] for other in found):
            keys = dict.fromkeys(key for counts, _ in found for key in counts)
            what = f"transformers collects {', '.join(keys)} inside of it" if keys else "gradients or autocast are switched around it"
            raise RuntimeError(
                f"{name} is called {len(found)} times, and {what} in some of these calls only, which a traced model cannot say: do it in all of them or in none"
            )
        counts, context = found[0]
        layer = traced.get_submodule(name)
        if context is not None:
            layer = InContext(layer, context)
        if counts:
            for module in hooked:
                sys.modules[allowed_hooks.COLLECTS].maybe_install_capturing_hooks(module)
            layer = Collecting(layer, counts)
        if counts or context is not None:
            parent, _, last = name.rpartition(".")
            setattr(traced.get_submodule(parent), last, layer)


def is_part(node: fx.Node) -> bool:
    """Whether a node takes the result of such a layer, or one of the tensors beside it."""
    whole = node.args[0] if node.target is operator.getitem else None
    return isinstance(whole, fx.Node) and (KEYS in whole.meta or is_part(whole))


def layer_of(module: nn.Module) -> nn.Module:
    """The model's own module behind one of a traced model."""
    while isinstance(module, Collecting | InContext):
        module = module.layer
    return module

"""The forward of a module under `checkpoint_module`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from torch_bridge.guards import calls, probes

_ORIGINAL = "_xla_checkpointed_forward_original"


class Checkpointed:
    """Takes the place of a module's `forward`, which becomes `module._xla_checkpointed_forward_original`: an activation checkpoint of it."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.run(getattr(self.module, _ORIGINAL), inputs, named)

    def run(self, forward: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """`forward(*inputs, **named)`, a checkpoint if a tensor among the arguments requires gradients."""
        from torch_bridge.torch_xla.utils.checkpoint import checkpoint

        given = (*inputs, *named.values())
        if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
            return forward(*inputs, **named)
        n = len(inputs)
        kind: list[TreeSpec] = []

        def flat(*xs: Any) -> tuple[Any, ...]:  # autograd sees tensors in a tuple only, not those in a dict
            leaves, spec = tree_flatten(forward(*xs[:n], **dict(zip(named, xs[n:], strict=True))))
            kind.append(spec)
            return tuple(leaves)

        return tree_unflatten(list(checkpoint(flat, *given)), kind[0])


def _followed(observer: Any, f: Checkpointed, args: Any, kwargs: Any) -> Any:
    """While a module around is looked at to be played: the forward is followed now, and runs again in the backward pass."""
    observer.recomputes = True
    forward = probes.attribute(f.module, _ORIGINAL)
    return f.run(lambda *inputs, **named: probes.call(forward, *inputs, **named), args, kwargs)


calls.add_rule(Checkpointed, _followed)

"""`neuronx_distributed.modules.lora.layer`: torch's layers with a low-rank adapter: base(x) + scaling * B(A(dropout(x))).

Adapters are float32, whatever the base layer's dtype; inputs are cast to that and results back to the base's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nxd_jax.modules.lora.config import LoraConfig

Init = Callable[[torch.Tensor], Any]

ADAPTER_DTYPE = torch.float32

_BASE = "base_layer."
_ADAPTER = "lora_"


class LoraLayer(nn.Module):
    """A layer with an adapter in the place of the layer itself, which is its `base_layer`.

    lora_A, lora_B: the adapter, two modules without biases. lora_dropout. scaling: of the adapter's result. merged: whether the base's weights contain the
    adapter now.

    Other attributes are the base layer's, and in a state dict its parameters have the names that they have without an adapter.
    """

    base_layer: Any
    lora_A: Any
    lora_B: Any
    zero_at_start = "lora_B"
    """The factor that starts at zero, so that a new adapter changes nothing."""

    def __init__(self, base_layer: nn.Module, lora_config: LoraConfig):
        super().__init__()
        _check_base(base_layer)
        self.base_layer = base_layer
        self.lora_rank = lora_config.lora_rank
        self.scaling = lora_config.scaling
        self.lora_dropout: nn.Module = nn.Dropout(lora_config.lora_dropout) if lora_config.lora_dropout else nn.Identity()
        self._init_lora_weights = lora_config.init_lora_weights
        self._before_merging: dict[str, torch.Tensor] = {}
        self.lora_A, self.lora_B = self._make_adapter()
        self.register_state_dict_post_hook(_hide_base)
        self.register_load_state_dict_pre_hook(_show_base)
        self.train(base_layer.training)

    # -- for subclasses ------------------------------------------------------------------------------

    def _make_adapter(self) -> tuple[nn.Module, nn.Module]:
        """A and B, on the base's device."""
        raise NotImplementedError

    def _update(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the adapter adds to the base's result."""
        return self.lora_B(self.lora_A(self.lora_dropout(x.to(ADAPTER_DTYPE))) * self.scaling)

    def _deltas(self) -> dict[str, torch.Tensor]:
        """What merging adds to the base's weights, by their names; of each rank's own part."""
        return {"weight": self.lora_B.weight @ self.lora_A.weight * self.scaling}

    def merged_names(self) -> list[str]:
        """The base's weights that merging changes."""
        return ["weight"]

    def _init_a(self, weight: torch.Tensor) -> torch.Tensor:
        if self._init_lora_weights == "gaussian":
            return nn.init.normal_(weight, std=1 / self.lora_rank)
        return nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

    # -- forward -------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the base layer returns, with the adapter's result added. Undoes a merge first: adapters train beside their base."""
        self.unmerge()
        return self._added(self.base_layer(x, *args, **kwargs), self._update(x, *args, **kwargs))

    def _added(self, base: Any, update: Any) -> Any:
        return (base + update).to(base.dtype)

    # -- merging -------------------------------------------------------------------------------------

    @property
    def merged(self) -> bool:
        """Whether the base's weights contain the adapter now."""
        return bool(self._before_merging)

    @torch.no_grad()
    def merged_weights(self) -> dict[str, torch.Tensor]:
        """The base's weights with the adapter added, by their names, as new tensors; of each rank's own part. Neither changes."""
        parameters = self.base_layer._parameters
        if self.merged:
            return {name: parameters[name].detach().clone() for name in self._before_merging}
        return {name: (parameters[name] + delta).to(parameters[name].dtype) for name, delta in self._deltas().items()}

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the base's weights. What they were is kept, so that `unmerge` restores it bit for bit."""
        if self.merged:
            return
        new = self.merged_weights()
        self._before_merging = {name: self.base_layer._parameters[name].detach().clone() for name in new}
        self._write(new)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Undo `merge`."""
        if self.merged:
            kept, self._before_merging = self._before_merging, {}
            self._write(kept)

    def _write(self, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self.base_layer._parameters[name].copy_(value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.unmerge()
        return super()._apply(fn, recurse)

    # -- in the place of the base layer --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            base = self.__dict__.get("_modules", {}).get("base_layer")
            if base is None:
                raise
            return getattr(base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        base = self.__dict__.get("_modules", {}).get("base_layer")
        if base is not None and isinstance(value, nn.Parameter) and name in base._parameters:
            setattr(base, name, value)  # models tie weights so
        else:
            super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"rank={self.lora_rank}, scaling={self.scaling:g}"


class LoraLinear(LoraLayer):
    """`lora.layer.LoraLinear`: `torch.nn.Linear` with an adapter; A [r, in], B [out, r]."""

    def _make_adapter(self) -> tuple[nn.Module, nn.Module]:
        base, r = self.base_layer, self.lora_rank
        device = base.weight.device
        return linear(base.in_features, r, self._init_a, device), linear(r, base.out_features, nn.init.zeros_, device)


class LoraEmbedding(LoraLayer):
    """`lora.layer.LoraEmbedding`: `torch.nn.Embedding` with an adapter: A is a table [num_embeddings, r], B [embedding_dim, r]. Without dropout."""

    zero_at_start = "lora_A"

    def _make_adapter(self) -> tuple[nn.Module, nn.Module]:
        base: Any = self.base_layer
        refuse(base.max_norm is not None, "max_norm", base, "merged and separate rows would be shrunk differently")
        return table(base, self.lora_rank), linear(self.lora_rank, base.embedding_dim, nn.init.normal_, base.weight.device)

    def _update(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.lora_B(self.lora_A(x) * self.scaling)

    def _deltas(self) -> dict[str, torch.Tensor]:
        return {"weight": self.lora_A.weight @ self.lora_B.weight.t() * self.scaling}


class LoraConv2d(LoraLayer):
    """`lora.layer.LoraConv2d`: `torch.nn.Conv2d` with an adapter: A convolves with the base's kernel to r channels, [r, in, *kernel], B is [out, r, 1, 1]."""

    def _make_adapter(self) -> tuple[nn.Module, nn.Module]:
        base: Any = self.base_layer
        refuse(base.groups != 1, f"groups={base.groups}", base, "one adapter would mix the groups")
        how = {k: getattr(base, k) for k in ("stride", "padding", "dilation", "padding_mode")}
        device = base.weight.device
        a = convolution(base.in_channels, self.lora_rank, base.kernel_size, self._init_a, device, **how)
        return a, convolution(self.lora_rank, base.out_channels, 1, nn.init.zeros_, device)

    def _deltas(self) -> dict[str, torch.Tensor]:
        return {"weight": convolution_delta(self.lora_A.weight, self.lora_B.weight) * self.scaling}


# -- parts -------------------------------------------------------------------------------------------


def linear(inputs: int, outputs: int, init: Init, device: Any) -> nn.Linear:
    """A linear layer that all ranks hold, without a bias; drawn on the CPU, so that one seed gives the same on every device."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, dtype=ADAPTER_DTYPE)
    with torch.no_grad():
        init(layer.weight)
    return layer.to(device)


def convolution(inputs: int, outputs: int, kernel: Any, init: Init, device: Any, **how: Any) -> nn.Conv2d:
    """`linear` for convolutions."""
    layer = nn.utils.skip_init(nn.Conv2d, inputs, outputs, kernel, bias=False, dtype=ADAPTER_DTYPE, **how)
    with torch.no_grad():
        init(layer.weight)
    return layer.to(device)


def table(base: Any, columns: int) -> nn.Embedding:
    """A table of zeros that all ranks hold, with the rows and options of an embedding."""
    options = {k: getattr(base, k) for k in ("padding_idx", "scale_grad_by_freq")}
    layer = nn.utils.skip_init(nn.Embedding, base.num_embeddings, columns, dtype=ADAPTER_DTYPE, **options)
    nn.init.zeros_(layer.weight)
    return layer.to(base.weight.device)


def convolution_delta(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The kernel of a convolution with A, [r, in, h, w], and then with B, [out, r, 1, 1]."""
    return (b.flatten(1) @ a.flatten(1)).unflatten(1, a.shape[1:])


def refuse(condition: bool, what: str, base: nn.Module, why: str) -> None:
    """Raise NotImplementedError about a base layer's option if it is set."""
    if condition:
        raise NotImplementedError(
            f"LoRA cannot adapt a {type(base).__name__} with {what}: {why}. Leave it out of target_modules, or list it in modules_to_save to train it whole"
        )


def _check_base(base: nn.Module) -> None:
    if any(p is not None and p.is_meta for p in base._parameters.values()):
        raise RuntimeError(
            f"LoRA needs the weights of a {type(base).__name__}, which is on 'meta': give the model its values first (get_model_sequential with "
            "param_init_fn, or initialize_parallel_model, which does it in this order)"
        )


# -- names in state dicts ----------------------------------------------------------------------------


def _hide_base(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    inner = prefix + _BASE
    for name in [n for n in state if n.startswith(inner)]:
        state[prefix + name[len(inner) :]] = state.pop(name)


def _show_base(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    ours = (prefix + _ADAPTER, prefix + _BASE)
    for name in [n for n in state if n.startswith(prefix) and not n.startswith(ours)]:
        state[f"{prefix}{_BASE}{name[len(prefix) :]}"] = state.pop(name)

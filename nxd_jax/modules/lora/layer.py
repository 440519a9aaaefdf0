"""`neuronx_distributed.modules.lora.layer`: torch's layers with a low-rank adapter: base(x) + scaling * B(A(dropout(x))).

Adapters are float32, whatever the base layer's dtype; inputs are cast to that and results back to the base's.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.types import Device

from nxd_jax.modules.lora.config import LoraConfig
from torch_bridge.recorder import sharded

Init = Callable[[torch.Tensor], Any]

ADAPTER_DTYPE = torch.float32

_BASE = "base_layer."
_ADAPTER = "lora_"


class LoraLayer(nn.Module):
    """A layer with an adapter in the place of the layer itself, which is its `base_layer`.

    lora_A, lora_B: the adapter, two modules without biases. lora_rank, lora_alpha, lora_dropout. scaling: of the adapter's result. merged: whether the base's
    weights contain the adapter now. lora_embedding_A, lora_embedding_B: NxD's names of an embedding's factors; None for other layers.

    Other attributes are the base layer's, and in a state dict its parameters have the names that they have without an adapter.
    """

    base_layer: Any
    lora_A: Any
    lora_B: Any
    lora_embedding_A: Any = None
    lora_embedding_B: Any = None
    adapter_layer_names = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
    zero_at_start = "lora_B"
    """The factor that starts at zero, so that a new adapter changes nothing."""

    def __init__(self, base_layer: nn.Module, lora_config: LoraConfig):
        super().__init__()
        _check_base(base_layer)
        self.base_layer = base_layer
        self.lora_rank = lora_config.lora_rank
        self.lora_alpha = lora_config.lora_alpha
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the base layer returns, with the adapter's result added. Undoes a merge first: adapters train beside their base.

        The input may be given by name: `x`, or what the base layer calls it.
        """
        self.unmerge()
        args, kwargs = self._input_first(args, kwargs)
        return self._added(self.base_layer(*args, **kwargs), self._update(*args, **kwargs))

    def _input_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the input before the others."""
        if args:
            return args, kwargs
        own = next(iter(inspect.signature(self.base_layer.forward).parameters))
        name = next((n for n in ("x", own) if n in kwargs), None)
        if name is None:
            raise TypeError(f"{type(self).__name__}.forward: the input is missing: give it first, or as {own}=")
        return (kwargs[name],), {n: value for n, value in kwargs.items() if n != name}

    def _added(self, base: Any, update: Any) -> Any:
        return (base + update).to(base.dtype)

    # -- merging -------------------------------------------------------------------------------------

    @property
    def merged(self) -> bool:
        """Whether the base's weights contain the adapter now."""
        return bool(self._before_merging)

    @torch.no_grad()
    def merged_weights(self) -> dict[str, torch.Tensor]:
        """The base's weights with the adapter added, by their names, as new tensors; of each rank's own part. Neither changes.

        Raises NotImplementedError for quantized weights.
        """
        if hasattr(self.base_layer, "quantized_dtype"):
            raise NotImplementedError(
                f"{type(self).__name__}: the weight is quantized to {self.base_layer.weight.dtype}, and with the adapter added it would be rounded anew: "
                "keep the adapter beside it, or merge before quantize.convert"
            )
        parameters = self.base_layer._parameters
        if self.merged:
            return {name: parameters[name].detach().clone() for name in self._before_merging}
        return {name: (parameters[name] + delta).to(parameters[name].dtype) for name, delta in self._deltas().items()}

    def get_delta_weight(self) -> Any:
        """What merging adds to the base's weight, of each rank's own part; of a GQA layer a tuple, for q, k and v."""
        return self._deltas()["weight"]

    @torch.no_grad()
    def merge(self, safe_merge: bool = False) -> None:
        """Add the adapter to the base's weights. What they were is kept, so that `unmerge` restores it bit for bit.

        safe_merge: raise ValueError, and change nothing, if a merged weight is not finite.
        """
        if self.merged:
            return
        new = self.merged_weights()
        broken = [name for name, value in new.items() if safe_merge and any_on_ranks(~torch.isfinite(value))]
        if broken:
            raise ValueError(
                f"{type(self).__name__}: {', '.join(broken)} would have NaNs or infinities when merged: the adapter, or the base, is broken"
            )
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
            return inner_attribute(self, base, name)

    def get_base_layer(self) -> nn.Module:
        """The layer without the adapter."""
        base: nn.Module = self.base_layer
        return base

    def __setattr__(self, name: str, value: Any) -> None:
        base = self.__dict__.get("_modules", {}).get("base_layer")
        if base is not None and isinstance(value, nn.Parameter) and name in base._parameters:
            setattr(base, name, value)  # models tie weights so
        else:
            super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"rank={self.lora_rank}, scaling={self.scaling:g}"


class LoraLinear(LoraLayer):
    """`lora.layer.LoraLinear`: `torch.nn.Linear` with an adapter; A [r, in], B [out, r].

    Or transformers' `Conv1D`, whose weight is [in, out]; is_conv_1d_layer: the base is another layer with such a weight. Raises ValueError if it is a Linear.
    """

    def __init__(self, base_layer: nn.Module, lora_config: LoraConfig, is_conv_1d_layer: bool = False):
        if is_conv_1d_layer and isinstance(base_layer, nn.Linear):
            raise ValueError(
                f"LoraLinear: is_conv_1d_layer=True is for layers with a weight [in, out], a {type(base_layer).__name__} has [out, in]"
            )
        self.is_conv_1d_layer = is_conv_1d_layer or is_conv_1d(base_layer)
        super().__init__(base_layer, lora_config)

    @property
    def in_features(self) -> int:
        """The base's inputs."""
        return int(self.base_layer.weight.shape[0 if self.is_conv_1d_layer else 1])

    @property
    def out_features(self) -> int:
        """The base's outputs."""
        return int(self.base_layer.weight.shape[1 if self.is_conv_1d_layer else 0])

    def _make_adapter(self) -> tuple[nn.Module, nn.Module]:
        r, device = self.lora_rank, self.base_layer.weight.device
        return linear(self.in_features, r, self._init_a, device), linear(r, self.out_features, nn.init.zeros_, device)

    def _deltas(self) -> dict[str, torch.Tensor]:
        found = super()._deltas()
        return {name: delta.t() for name, delta in found.items()} if self.is_conv_1d_layer else found


class LoraEmbedding(LoraLayer):
    """`lora.layer.LoraEmbedding`: `torch.nn.Embedding` with an adapter: A is a table [num_embeddings, r], B [embedding_dim, r]. Without dropout."""

    zero_at_start = "lora_A"

    @property
    def lora_embedding_A(self) -> torch.Tensor:
        """A as NxD has it, [r, num_embeddings]: a view of `lora_A.weight`, which is the parameter."""
        rows: torch.Tensor = self.lora_A.weight
        return rows.t()

    @property
    def lora_embedding_B(self) -> nn.Parameter:
        """B, [embedding_dim, r]: `lora_B.weight`."""
        weight: nn.Parameter = self.lora_B.weight
        return weight

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


def linear(inputs: int, outputs: int, init: Init, device: Device) -> nn.Linear:
    """A linear layer that all ranks hold, without a bias; drawn on the CPU, so that one seed gives the same on every device."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, dtype=ADAPTER_DTYPE)
    with torch.no_grad():
        init(layer.weight)
    return layer.to(device)


def convolution(inputs: int, outputs: int, kernel: Any, init: Init, device: Device, **how: Any) -> nn.Conv2d:
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


def is_conv_1d(layer: nn.Module) -> bool:
    """Whether a layer is transformers' `Conv1D`, a linear layer with a weight [in, out]. Does not import transformers."""
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and isinstance(layer, library.Conv1D)


def any_on_ranks(t: torch.Tensor) -> bool:
    """Whether a tensor is not zero on some rank here."""
    values = sharded.shards(t.detach()) if t.device.type == "xla" else [t]
    return any(bool(v.any()) for v in values)


def inner_attribute(outer: nn.Module, inner: nn.Module, name: str) -> Any:
    """An attribute of the module inside another. Raises AttributeError naming both."""
    try:
        return getattr(inner, name)
    except AttributeError as error:
        raise AttributeError(
            f"'{type(outer).__name__}' object has no attribute '{name}', nor has the '{type(inner).__name__}' inside it",
            name=name,
            obj=outer,
        ) from error


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

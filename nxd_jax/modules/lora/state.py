"""What a model with adapters saves and loads: which tensors, under which names, and full tensors cut for the ranks.

Names are those of the model without adapters, and `<module>.lora_A.*`, `<module>.lora_B.*` beside them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nxd_jax.checkpoint import heads
from nxd_jax.modules.lora.layer import LoraLayer
from nxd_jax.tensor_parallel import expert_shares, full_weights, parallel_groups
from nxd_jax.tensor_parallel.partition import copy_tensor_model_parallel_attributes
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike

CONFIG = "lora_config"
"""The key of a checkpoint under which the configuration is."""

_PREFIXES = ("module.", "base_model.model.", "base_model.")
_INSERTED = ("base_layer", "default", "modules_to_save")
"""What other programs have in names, and what is left out of ours."""

_TABLES = {"lora_embedding_A": "lora_A.weight", "lora_embedding_B": "lora_B.weight"}
"""What NxD and PEFT call the factors of an embedding's adapter, and what they are called here. Their A is [r, num_embeddings], ours the other way round."""


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers themselves, by their names in checkpoints; `model` is the one that has adapters inside."""
    return {name: t for name, t in nn.Module.state_dict(model, keep_vars=True).items() if isinstance(t, torch.Tensor)}


def own_name(name: str, known: Mapping[str, Any]) -> str:
    """The name here of what a checkpoint of NxD or PEFT may call otherwise; unknown names as they are."""
    if name in known:
        return name
    short = name
    for prefix in _PREFIXES:
        short = short.removeprefix(prefix)
        parts = [p for p in short.split(".") if p not in _INSERTED]
        for candidate in (short, ".".join(parts), ".".join(_TABLES.get(p, p) for p in parts)):
            if candidate in known:
                return candidate
    return name


def own_entries(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with our names, and an embedding's A lying as ours does."""

    def value_of(name: str, own: str) -> Any:
        return given[name].t() if own != name and "lora_embedding_A" in name.split(".") else given[name]

    owns = {name: own_name(name, known) for name in given}
    return {own: value_of(name, own) for name, own in owns.items()}


# -- which -------------------------------------------------------------------------------------------


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias, by its name: `bias`, or `bias_q`, `bias_qkv` of a GQA layer."""
    last = name.rpartition(".")[2]
    return last == "bias" or last.startswith("bias_")


def adapter_names(names: Iterable[str], layers: Mapping[str, LoraLayer], whole: Iterable[str], bias: str) -> list[str]:
    """Those of a model's names that are not the base model's: adapters, `whole` modules that train as they are, and biases that train."""
    prefixes = tuple(f"{name}." for name in whole)
    found = []
    for name in names:
        parts = name.split(".")
        owner = next((n for k in range(len(parts) - 1, 0, -1) if (n := ".".join(parts[:k])) in layers), None)
        adapter = owner is not None and parts[owner.count(".") + 1].startswith("lora_")
        trains = is_bias(name) and not adapter and (bias == "all" or (bias == "lora_only" and owner is not None))
        if adapter or trains or name.startswith(prefixes):
            found.append(name)
    return found


def merged(layers: Mapping[str, LoraLayer]) -> dict[str, torch.Tensor]:
    """The base's weights with the adapters added, by name, with the attributes that say how ranks share them; the model stays as it is."""
    found = {}
    for name, layer in layers.items():
        for last, value in layer.merged_weights().items():
            like = layer.base_layer._parameters[last]
            assert like is not None
            copy_tensor_model_parallel_attributes(value, like)
            for attribute in ("qkv_partition", "expert_model_parallel", "expert_distribution", heads.ATTRIBUTE):
                if hasattr(like, attribute):
                    setattr(value, attribute, getattr(like, attribute))
            found[f"{name}.{last}"] = value
    return found


def refuse_tied(layers: Mapping[str, LoraLayer], model: nn.Module) -> None:
    """Raise ValueError if a weight that merging would change is another module's too."""
    owners: dict[int, list[str]] = {}
    for name, parameter in tensors_of(model).items():
        owners.setdefault(id(parameter), []).append(name)
    for name, layer in layers.items():
        for last in layer.merged_names():
            names = owners.get(id(layer.base_layer._parameters[last]), [])
            if len(names) > 1:
                raise ValueError(
                    f"{name} cannot be merged: {' and '.join(names)} are one tied weight, and the adapter is only for {name}. Save the adapter separately "
                    "(merge_lora=False), or untie the weights"
                )


def entries(parameter: torch.Tensor) -> int:
    """How many entries the undivided parameter has: those of all tensor and expert parallel ranks, and copies of K/V heads once."""
    count = parameter.numel()
    if full_weights.is_shared_out(parameter):
        parts: int = parameter.num_partitions  # type: ignore[attr-defined]
        q, kv, copies = getattr(parameter, "qkv_partition", (1, 0, 1))
        count = count // (q + 2 * kv) * (q * parts + 2 * kv * parts // copies)
    if getattr(parameter, "expert_model_parallel", False):
        count *= parallel_groups.size("ep")
    return count


# -- full tensors and parts --------------------------------------------------------------------------


def groups_of(model: nn.Module) -> dict[int, Any]:
    """The group that shares out each parallel layer's parameters, by their ids. Notes, too, where query heads come in an order of the ranks'."""
    heads.mark(model)
    return {
        id(p): module.tensor_parallel_group
        for module in model.modules()
        if "tensor_parallel_group" in module.__dict__
        for p in module._parameters.values()
        if p is not None
    }


def is_divided(parameter: torch.Tensor) -> bool:
    """Whether no rank has all of a parameter."""
    fused = getattr(parameter, "qkv_partition", None)
    cut = full_weights.is_shared_out(parameter) and (parameter.num_partitions > 1 or fused is not None)  # type: ignore[attr-defined]
    return cut or expert_shares.is_shared_out(parameter)


def whole(value: torch.Tensor, parameter: torch.Tensor, group: GroupLike) -> torch.Tensor:
    """The full tensor on the CPU of a value that lies as a parameter does; of fused q, k and v, below each other. All processes must call it.

    Query heads come in the model's order, whatever order ranks that hold copies of K/V heads have them in (`groups_of` must have been called). Where nobody
    can tell how many heads there are, they stay in the ranks' order, with a warning.
    """
    if heads.arrangement(parameter):
        warnings.warn(
            "adapters, or weights that they were added to, are saved with their query heads in the order in which ranks hold copies of K/V heads "
            "(kv_size_multiplier): with another number of ranks or copies, and in Hugging Face's model, they compute something else. Nothing says how many "
            f"heads there are, or which layer is the output projection: {heads.ADVICE}",
            stacklevel=2,
        )
    full = full_weights.gather_full(value, like=parameter, group=group)
    return heads.in_model_order(full if isinstance(full, torch.Tensor) else torch.cat(full), parameter)


def local(name: str, parameter: torch.Tensor, value: object, group: GroupLike) -> Any:
    """What to load into a parameter: a value of its shape as it is; of a full one, as `whole` gives it, each rank's part. Raises ValueError, naming it, for
    other shapes.
    """
    if not isinstance(value, torch.Tensor) or value.shape == parameter.shape or not full_weights.is_divided(parameter):
        return value
    full = heads.in_ranks_order(value.detach().cpu(), parameter)
    try:
        if parameter.device.type != "xla":
            return full_weights.cut_full(parameter, full, world.first(), group)
        return sharded.from_ranks(
            lambda r: full_weights.cut_full(parameter, full, r, group).contiguous(), full_weights.cuts_now(parameter, group)
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None

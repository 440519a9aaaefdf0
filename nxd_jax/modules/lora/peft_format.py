"""Adapters in Hugging Face PEFT's format, both ways. (NxD has nothing like it.)

    adapter_config.json           r, lora_alpha, target_modules, ...
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight, ...: full tensors, whatever the ranks

Fused projections become the separate ones of Hugging Face models and back (`FUSED`): `qkv_proj` of a GQA layer, `gate_up_proj` of a column parallel layer
with stride 2. Their parts share one A; separate adapters of PEFT, each with its own A, are stacked in a fused one whose rank is the sum of theirs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxd_jax.modules.lora import folders, targets
from nxd_jax.modules.lora import state as lora_state
from nxd_jax.modules.lora.config import LoraConfig
from nxd_jax.modules.lora.layer import LoraLayer, LoraLinear
from nxd_jax.modules.lora.peft_tensors import PREFIX, Fused, adapter, others, outgoing, parts, plain
from torch_bridge.mesh import processes, world

TENSORS_FILE = "adapter_model.safetensors"
FUSED: dict[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The last name of a fused layer, and those of the layers that Hugging Face models have in its place."""

Change = Callable[[str, torch.Tensor], torch.Tensor]

_UNSUPPORTED = ("use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "target_parameters", "trainable_token_indices")
_OTHER_PRODUCTS = ("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "velora_config")
"""Options of PEFT with which an adapter is something else than scaling * B(A(x))."""
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""What PEFT's `init_lora_weights` can be. Adapters with other starts (PiSSA, OLoRA, CorDA, LoftQ) go with weights of the base that they have changed."""


# -- folders -----------------------------------------------------------------------------------------


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    base_model_name_or_path: str | None = None,
    fused: Fused = FUSED,
    change: Change | None = None,
) -> None:
    """Write the adapters of a `LoraModel` as a folder that `peft.PeftModel.from_pretrained` takes. All processes must call it.

    base_model_name_or_path: what PEFT is to find the base model by. fused, change: as in `to_peft`.
    """
    config, tensors = to_peft(model, fused, change)
    config["base_model_name_or_path"] = base_model_name_or_path
    if world.first() == 0:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, TENSORS_FILE)
        _safetensors().save_file(tensors, f"{path}.unfinished", metadata={"format": "pt"})
        os.replace(f"{path}.unfinished", path)
        folders.write_config(os.fspath(folder), config)
    processes.barrier("save_pretrained")


def load_pretrained(model: nn.Module, folder: str | os.PathLike[str], fused: Fused = FUSED, change: Change | None = None) -> None:
    """Load a folder of PEFT into a `LoraModel`. Raises FileNotFoundError naming the file, and as `from_peft`."""
    path = os.path.join(folder, TENSORS_FILE)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no {path}: save adapters with PEFT's save_pretrained (safe_serialization=True)")
    config = folders.read_json(os.path.join(folder, folders.CONFIG_FILE))
    model.load_state_dict(from_peft(model, config, _safetensors().load_file(path), fused, change))


def source(folder: str) -> folders.Source | None:
    """What `LoraConfig(load_lora_from_ckpt=True)` loads if the folder is one of PEFT's."""
    path = os.path.join(folder, TENSORS_FILE)
    if not os.path.isfile(path):
        return None
    config = folders.read_json(os.path.join(folder, folders.CONFIG_FILE))
    return folders.Source(path, config, lambda model: from_peft(model, config, _safetensors().load_file(path)))


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("PEFT's format needs safetensors: pip install safetensors") from None
    return safetensors.torch


# -- configurations ----------------------------------------------------------------------------------


def is_peft(config: object) -> bool:
    """Whether a configuration is PEFT's."""
    return isinstance(config, Mapping) and "peft_type" in config


def config_from_peft(config: Mapping[str, Any], model: nn.Module | None = None, fused: Fused = FUSED) -> LoraConfig:
    """The `LoraConfig` of a PEFT configuration, the contents of adapter_config.json.

    model: the one that is to have the adapters. Where it has a fused layer for targets of PEFT, that is the target, and the rank is multiplied
    by the number of targets in it, so that their adapters fit. Ranks of single modules (`rank_pattern`) raise the rank to the largest.

    Raises ValueError for kinds of adapters that are not LoRA's, options that it does not have here, and starts that changed the base model.
    """
    _check_peft(config)
    r = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    names = config.get("target_modules")
    times = 1
    if model is not None and isinstance(names, (list, tuple, set)):
        names, times = _fused_targets(sorted(names), targets.modules_of(model), fused)
    elif isinstance(names, (list, tuple, set)):
        names = sorted(names)
    rslora = bool(config.get("use_rslora"))
    return LoraConfig(
        lora_rank=r * times,
        lora_alpha=config["lora_alpha"] * (math.sqrt(times) if rslora else times),
        lora_dropout=config.get("lora_dropout") or 0.0,
        target_modules=names,
        bias=config.get("bias") or "none",
        use_rslora=rslora,
        init_lora_weights="gaussian" if config.get("init_lora_weights") == "gaussian" else "default",
        modules_to_save=config.get("modules_to_save"),
    )


def _fused_targets(names: list[str], modules: Mapping[str, nn.Module], fused: Fused) -> tuple[list[str], int]:
    """Targets of PEFT as targets here, and how many of them go into one fused layer at most."""
    found: dict[str, int] = {}
    for name in names:
        path, _, last = name.rpartition(".")
        joined = [f"{path}.{one}" if path else one for one, parts_of_one in fused.items() if last in parts_of_one]
        here = [name, *joined]
        chosen = next((n for n in here if any(targets.matches(m, [n]) for m in modules)), name)
        found[chosen] = found.get(chosen, 0) + 1
    return list(found), max(found.values())


def _check_peft(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"the PEFT adapters are of type {config.get('peft_type')!r}: only 'LORA' can be loaded")
    found = [name for name in (*_UNSUPPORTED, *_OTHER_PRODUCTS) if config.get(name)]
    if found:
        raise ValueError(
            f"the PEFT adapters use {', '.join(found)}, which LoRA layers here do not have: merge them in PEFT and load the merged model"
        )
    start = config.get("init_lora_weights")
    if start not in _STARTS:
        raise ValueError(
            f"the PEFT adapters have init_lora_weights={start!r}, a start that changes the base model's weights, too, which this model has as they are: save "
            "them with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), or merge them in PEFT and load the merged model"
        )


# -- out ---------------------------------------------------------------------------------------------


def to_peft(model: Any, fused: Fused = FUSED, change: Change | None = None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(the contents of adapter_config.json, full CPU tensors by PEFT's names) of a `LoraModel`. All processes must call it.

    fused: how fused layers are called here and in Hugging Face's model; those that are not in it keep their names. change: called with each PEFT name and its
    tensor, gives what is written (query heads in another order, say).
    """
    config = model.lora_config
    known, groups, layers = model.tensors(), lora_state.groups_of(model.module), model._layers
    modules = targets.modules_of(model.module)
    found: dict[str, torch.Tensor] = {}
    for name in model._adapter_names():
        parameter = known[name]
        full = lora_state.whole(parameter, parameter, groups.get(id(parameter)))
        path, rest = _owner(name, modules, layers)
        module = layers.get(path) or modules.get(path)
        for key, tensor in outgoing(path, rest, full, module, fused) if module is not None else [(name, full)]:
            found[PREFIX + key] = (tensor if change is None else change(PREFIX + key, tensor)).detach().clone().contiguous()
    out = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "bias": config.bias,
        "use_rslora": config.use_rslora,
        "init_lora_weights": "gaussian" if config.init_lora_weights == "gaussian" else True,
        "fan_in_fan_out": any(isinstance(m, LoraLinear) and m.is_conv_1d_layer for m in layers.values()),
        "target_modules": _target_names(layers, modules, fused),
        "modules_to_save": config.modules_to_save,
    }
    return out, found


def _owner(name: str, modules: Mapping[str, nn.Module], layers: Mapping[str, LoraLayer]) -> tuple[str, str]:
    """The layer (the adapted one, if there is one) that holds a parameter, and the rest of its name."""
    parts = name.split(".")
    paths = [".".join(parts[:k]) for k in range(len(parts) - 1, 0, -1)]
    path = next((p for p in paths if p in layers), None) or next((p for p in paths if p in modules), "")
    return path, name[len(path) + 1 :] if path else name


def _target_names(layers: Mapping[str, LoraLayer], modules: Mapping[str, nn.Module], fused: Fused) -> list[str]:
    """PEFT's target_modules: last names, if they mean the adapted layers and no others; else whole names."""
    short = sorted({name.rpartition(".")[2] for name in layers})
    meant = {n for n, m in modules.items() if targets.matches(n, short) and not _inside(n, layers)}
    names = short if meant == set(layers) and _same_kind(short, layers, fused) else list(layers)
    found = [
        part for name in names for part in (parts(layers[name], name, fused) if name in layers else _parts_of_last(name, layers, fused))
    ]
    return list(dict.fromkeys(found))


def _inside(name: str, layers: Mapping[str, LoraLayer]) -> bool:
    return any(name.startswith(f"{n}.") for n in layers)


def _parts_of_last(last: str, layers: Mapping[str, LoraLayer], fused: Fused) -> list[str]:
    layer = next(m for n, m in layers.items() if n.rpartition(".")[2] == last)
    return parts(layer, last, fused)


def _same_kind(short: Sequence[str], layers: Mapping[str, LoraLayer], fused: Fused) -> bool:
    """Whether layers with the same last name stand for the same layers of Hugging Face."""
    return all(len({tuple(parts(m, last, fused)) for n, m in layers.items() if n.rpartition(".")[2] == last}) == 1 for last in short)


# -- in ----------------------------------------------------------------------------------------------


def from_peft(
    model: Any, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], fused: Fused = FUSED, change: Change | None = None
) -> dict[str, Any]:
    """The state dict for a `LoraModel` of PEFT's adapters: what `to_peft` gave, or PEFT itself. fused, change: as there (`change` the other way).

    B is multiplied so that the model's scaling gives PEFT's product. Adapters of a lower rank than the model's are filled up with zeros, which
    then stay zero in training; separate ones in a fused layer are stacked.

    Raises ValueError for a rank that is too high, saying which it must be, for a layer without adapter here, and for missing parts of fused layers.
    """
    _check_peft(config)
    given = {plain(k): v if change is None else change(k, v) for k, v in tensors.items()}
    layers: Mapping[str, LoraLayer] = model._layers
    found: dict[str, Any] = {}
    for path, layer in layers.items():
        found |= adapter(path, layer, given, config, fused)
    for path, module in targets.modules_of(model.module).items():
        if not _inside(path, layers):
            found |= others(path, module, given, fused)
    if given:
        raise ValueError(
            f"the PEFT adapters have tensors for which the model has no place, such as {', '.join(list(given)[:3])}: its target_modules must cover theirs "
            f"({config.get('target_modules')}), and its bias and modules_to_save too"
        )
    return found

"""What a conversion is about: the model's sizes and the ranks, from flags, config.json and a YAML file. A flag says more than the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_jax.tensor_parallel import kv_groups
from nxd_jax.training.converters import megatron_plan
from nxd_jax.training.converters.arguments import given
from nxd_jax.training.converters.sizes import Layout, Sizes, of_json

_MEGATRON = {
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "hidden_size": "hidden_size",
    "num_kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
}
"""Keys of `model` in a YAML file for Megatron, as config.json has them."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """config: as config.json has it. sizes: of the model. layout: of the ranks. megatron: whether it is NxD Training's Megatron. backend: trn1, trn2, None if
    nobody says."""

    config: dict[str, Any]
    sizes: Sizes
    layout: Layout
    megatron: bool
    backend: str | None


def setting(args: Any, beside: Mapping[str, Any]) -> Setting:
    """The setting of a command line. beside: config.json of the weights, for where neither --config nor --nxdt_yaml_config is given.

    Raises ValueError for sizes that are missing, and for --n_layers that are not the configuration's.
    """
    values = _yaml(getattr(args, "nxdt_yaml_config", None))
    config, where = _config(args, values, beside)
    sizes = of_json(config, where)
    said = int(getattr(args, "n_layers", 0) or 0)
    if said and said != sizes.layers:
        raise ValueError(
            f"--n_layers {said} and {where} with {sizes.layers} layers: give the config.json of this model, or leave --n_layers out"
        )
    backend = getattr(args, "hw_backend", None) or _backend(values)
    style = getattr(args, "model_style", "hf")
    megatron = style == "megatron" or (values.get("model_source") == "megatron" and not given(args, "model_style"))
    return Setting(config, sizes, _layout(args, values, backend, sizes), megatron, backend)


def _layout(args: Any, values: Mapping[str, Any], backend: str | None, sizes: Sizes) -> Layout:
    strategy, model = values.get("distributed_strategy") or {}, values.get("model") or {}

    def pick(flag: str, said: Any, default: Any) -> Any:
        if given(args, flag):
            return getattr(args, flag)
        return default if said is None else said

    tp = int(pick("tp_size", strategy.get("tensor_model_parallel_size"), 1))
    copies = int(pick("kv_size_multiplier", strategy.get("kv_replicator"), 1))
    fit = kv_groups.fitting_copies(sizes.heads, sizes.kv_heads, tp)
    if values and copies == 1 and fit and copies not in fit and not given(args, "kv_size_multiplier"):
        copies = fit[0]  # what the model takes then
    pp, vpp = int(pick("pp_size", strategy.get("pipeline_model_parallel_size"), 1)), strategy.get("virtual_pipeline_model_parallel_size")
    cuts = model.get("pipeline_cuts") or ()
    return Layout(
        tp,
        pp,
        int(pick("ep_size", strategy.get("expert_model_parallel_size"), 1)),
        int(pick("virtual_pp_size", vpp, 1)),
        copies,
        kv_groups.adjacent(backend or ""),
        tuple(map(str, cuts)) if pp > 1 else (),
        bool(pick("qkv_linear", model.get("qkv_linear"), False)),
        bool(pick("fuse_qkv", model.get("fuse_qkv", True) if values else None, False)),
        bool(getattr(args, "coalesce_qkv", False)),
        int(model.get("make_vocab_size_divisible_by", megatron_plan.VOCABULARY_UNIT)) * tp
        if values.get("model_source") == "megatron"
        else 1,
    )


def _yaml(path: Any) -> dict[str, Any]:
    if path is None:
        return {}
    from nxd_jax.training.config import loading

    found: dict[str, Any] = loading.plain(loading.load(path))
    return found


def _backend(values: Mapping[str, Any]) -> str | None:
    """The machine of a YAML file."""
    from nxd_jax.training import launching

    devices = (values.get("trainer") or {}).get("devices")
    found = launching.machine(devices)[0] if isinstance(devices, int) else None
    return None if found is None else found.partition(".")[0]


def _config(args: Any, values: Mapping[str, Any], beside: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The model's config.json, with what a YAML file says besides, and where it is from."""
    model = values.get("model") or {}
    path = getattr(args, "config", None) or model.get("model_config")
    if path is not None:
        file = Path(str(path)).expanduser()
        file = file / "config.json" if file.is_dir() else file
        found, where = _read(file), str(file)
    elif model.get("num_attention_heads"):
        found, where = of_megatron(model), str(args.nxdt_yaml_config)
    elif beside:
        return dict(beside), "config.json beside the weights"
    else:
        raise ValueError("the model's sizes are not known: give its config.json (--config), or a YAML file (--nxdt_yaml_config)")
    for name, key in (("num_layers", "num_hidden_layers"), ("hidden_size", "hidden_size")):
        if isinstance(model.get(name), int) and model[name] > 0:
            found[key] = model[name]
    _add_experts(found, model.get("moe") or {})
    return found, where


def _add_experts(found: dict[str, Any], moe: Mapping[str, Any]) -> None:
    """What a YAML file says of experts, in place of config.json. Raises NotImplementedError for layers without: Hugging Face's Mixtral has none of those."""
    if int(moe.get("frequency") or 1) > 1:
        raise NotImplementedError(
            f"model.moe.frequency={moe['frequency']}: Hugging Face's Mixtral has experts in every layer, so this model has no counterpart there"
        )
    for name, key in (("num_experts", "num_local_experts"), ("top_k", "num_experts_per_tok")):
        if moe.get(name) is not None and ("num_local_experts" in found or int(moe.get("num_experts") or 0) > 1):
            found[key] = int(moe[name])


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--config {file}: there is no such file") from None
    except ValueError as error:
        raise ValueError(f"--config {file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {file} must hold an object with sizes such as hidden_size")
    return found


def of_megatron(model: Mapping[str, Any]) -> dict[str, Any]:
    """What `model` of a YAML file for Megatron says, as config.json of Llama or Mixtral. Raises ValueError naming sizes that are missing."""
    missing = [key for key in ("num_layers", "num_attention_heads", "hidden_size") if not model.get(key)]
    if missing:
        raise ValueError(f"the YAML file's model has no {', '.join(missing)}, and no model_config: give the model's config.json (--config)")
    found: dict[str, Any] = {theirs: model[ours] for ours, theirs in _MEGATRON.items() if model.get(ours) is not None}
    found.setdefault("tie_word_embeddings", True)  # as Megatron's models have it where the file is silent
    experts = (model.get("moe") or {}).get("num_experts") or 0
    kind = "Mixtral" if experts > 1 else "Llama"
    found |= {"model_type": kind.lower(), "architectures": [f"{kind}ForCausalLM"]}
    if experts > 1:
        found |= {"num_local_experts": int(experts), "num_experts_per_tok": int(model["moe"].get("top_k", 1))}
    for ours, theirs in (("layernorm_epsilon", "rms_norm_eps"), ("position_freq_base", "rope_theta"), ("max_position_embeddings",) * 2):
        if model.get(ours) is not None:
            found[theirs] = model[ours]
    return found

"""Hugging Face weights in and out of the models of this folder: those of examples/llama, and experts.

`to_full`, `from_full`, `load` and `save` are as in `hf_weights`. transformers' Mixtral and Glm4Moe have all of it; of DeepSeek-V3's own files the names of the
experts, routers and dense MLPs are these, too, while its attention is another.

    our `mlp`                                  transformers' model                        files
    router.linear_router.weight                mlp.gate.weight                            Mixtral: block_sparse_moe.gate.weight
    router.e_score_correction_bias             mlp.gate.e_score_correction_bias           the same
    expert_mlps.mlp_op.gate_up_proj.weight     mlp.experts.gate_up_proj                   mlp.experts.j.{gate,up}_proj.weight; Mixtral:
        [E, H, 2 I]                                [E, 2 I, H]                                block_sparse_moe.experts.j.{w1,w3}.weight
    expert_mlps.mlp_op.down_proj.weight        mlp.experts.down_proj                      mlp.experts.j.down_proj.weight; Mixtral:
        [E, I, H]                                  [E, H, I]                                  block_sparse_moe.experts.j.w2.weight
    shared_experts.*                           mlp.shared_experts.*                       the same

Legend: E experts, H hidden, I their width, j the number of an expert.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from modeling_moe_nxd import MixtralForCausalLM  # first: it knows where examples/llama is

# isort: split
import hf_weights
from neuronx_distributed.utils.full_weights import scatter_full

OURS, THEIRS = "expert_mlps.mlp_op.", "experts."
NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Of an expert's weights in files: of most models, and of Mixtral."""
ONE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def their_name(name: str) -> str:
    """What the tensor of a router, of experts or of shared experts is called in transformers' model; other names as they are."""
    name = name.replace(".router.linear_router.", ".gate.").replace(".router.", ".gate.")
    return name.replace(OURS, THEIRS).removesuffix(".weight") if OURS in name else name


def full_names(name: str, value, back: list[int]) -> dict[str, torch.Tensor]:
    """`hf_weights.full_names`, with experts."""
    if OURS in name:
        return {their_name(name): value.transpose(1, 2)}
    if ".router." in name or ".shared_experts." in name:
        return {their_name(name): value}
    return hf_weights.full_names(name, value, back)


def full_value(name: str, take: hf_weights.Take, order: list[int]):
    """`hf_weights.full_value`, with experts."""
    if OURS in name:
        return take(their_name(name)).transpose(1, 2)
    if ".router." in name or ".shared_experts." in name:
        return take(their_name(name))
    return hf_weights.full_value(name, take, order)


def _corrections(model: MixtralForCausalLM) -> dict[str, torch.Tensor]:
    """The routers' biases, by their names in transformers' model. (Its Mixtral has none, and leaves them out.)"""
    return {their_name(name): buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}


def to_full(model: MixtralForCausalLM, grads: bool = False) -> dict[str, torch.Tensor]:
    """The full CPU tensors of all parameters and routers' biases (or the gradients of all parameters) by their names in transformers' model."""
    full = hf_weights.to_full(model, grads, full_names)
    return full if grads else full | {name: bias.detach().cpu() for name, bias in _corrections(model).items()}


def from_full(model: MixtralForCausalLM, full: dict[str, torch.Tensor]) -> None:
    """Give the model the full weights of a state dict or of files. Raises KeyError for a missing one."""
    full = stacked(full)
    hf_weights.from_full(model, full, full_value)
    for name, bias in _corrections(model).items():
        if model.config.model_type != "mixtral" or name in full:
            scatter_full(bias, full[name])


def stacked(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of files under the names of transformers' model, which has an expert below the other in one tensor."""
    found: dict[str, torch.Tensor] = {}
    single: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in full.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        for usual, mixtral in NAMES.items():
            name = re.sub(rf"(\.experts\.\d+)\.{mixtral}\.", rf"\1.{usual}.", name)
        match = ONE_EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            single.setdefault((match[1], match[3]), {})[int(match[2])] = tensor
    rows = {key: torch.stack([tensors[j] for j in range(len(tensors))]) for key, tensors in single.items()}
    for prefix, kind in rows:
        if kind == "gate":
            found[f"{prefix}.gate_up_proj"] = torch.cat([rows[prefix, "gate"], rows[prefix, "up"]], dim=1)
        elif kind == "down":
            found[f"{prefix}.down_proj"] = rows[prefix, "down"]
    return found


def apart(full: dict[str, torch.Tensor], mixtral: bool) -> dict[str, torch.Tensor]:
    """The inverse of `stacked`: what files of every version of transformers hold."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in full.items():
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith(".experts"):
            found[name] = tensor
            continue
        parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True)) if kind == "gate_up_proj" else {kind: tensor}
        for part, experts in parts.items():
            found |= {f"{prefix}.{j}.{NAMES[part] if mixtral else part}.weight": expert for j, expert in enumerate(experts)}
    return found


def load(model: MixtralForCausalLM, path: Path) -> None:
    """Weights from a safetensors file, or from all of a Hugging Face folder."""
    from_full(model, hf_weights.read(path))


def save(model: MixtralForCausalLM, folder: Path) -> None:
    """A Hugging Face folder that transformers loads."""
    hf_weights.write(folder, model.config, apart(to_full(model), model.config.model_type == "mixtral"))

"""Hugging Face Llama weights in and out of the model of this folder.

`to_full(model)` gives the full tensors under Hugging Face's names, whatever the ranks; `from_full` is the inverse; `load` and `save` do the same with a
safetensors file. `to_full(model, grads=True)` gives gradients instead.

Query heads are reordered: a rank's query heads are those that its K/V heads serve.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from modeling_llama_nxd import LlamaForCausalLM
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.utils.full_weights import gather_full, scatter_full
from safetensors.torch import load_file, save_file
from torch import nn


def query_order(heads: int, kv_heads: int, copies: int) -> list[int]:
    """For each place in the ranks' order of query heads: which head of the Hugging Face model stands there."""
    if copies == 1:
        return list(range(heads))
    tp = parallel_state.get_tensor_model_parallel_size()
    group = parallel_state.get_tensor_model_parallel_group(as_list=True)[0]
    sharing = [g for g in parallel_state.get_kv_shared_group(as_list=True) if g[0] in group]
    served, held = heads // kv_heads, kv_heads * copies // tp
    order: list[int] = []
    for rank in group:
        part = next(k for k, members in enumerate(sharing) if rank in members)
        copy = sharing[part].index(rank)
        for kv in range(part * held, (part + 1) * held):
            first = kv * served + copy * (served // copies)
            order += range(first, first + served // copies)
    return order


def reordered(weight: torch.Tensor, order: list[int], dim: int = 0) -> torch.Tensor:
    """A weight whose blocks of heads along `dim` come in another order."""
    size = weight.shape[dim] // len(order)
    index = torch.cat([torch.arange(h * size, (h + 1) * size) for h in order])
    return weight.index_select(dim, index)


def _order(model: LlamaForCausalLM) -> tuple[list[int], list[int]]:
    config = model.config
    order = query_order(config.num_attention_heads, config.num_key_value_heads, model.options.kv_size_multiplier)
    return order, [order.index(h) for h in range(len(order))]


def to_full(model: LlamaForCausalLM, grads: bool = False) -> dict[str, torch.Tensor]:
    """The full CPU tensors of all parameters (of their gradients) by Hugging Face name."""
    _, back = _order(model)
    full: dict[str, torch.Tensor] = {}

    def value(parameter: nn.Parameter):
        return gather_full(parameter.grad, like=parameter) if grads else gather_full(parameter.detach(), like=parameter)

    for name, parameter in model.named_parameters():
        kind = name.rsplit(".", 1)[-1].split("_")[0]
        prefix = name.rsplit(".", 2)[0]
        if "qkv_proj" in name:
            parts = value(parameter) if name.endswith("_qkv") else (value(parameter),)
            names = "qkv" if name.endswith("_qkv") else name[-1]
            for letter, part in zip(names, parts, strict=True):
                full[f"{prefix}.{letter}_proj.{kind}"] = reordered(part, back) if letter == "q" else part
        elif "gate_up_proj" in name:
            full[f"{prefix}.gate_proj.{kind}"], full[f"{prefix}.up_proj.{kind}"] = value(parameter).chunk(2)
        elif name.endswith("o_proj.weight"):
            full[name] = reordered(value(parameter), back, dim=1)
        else:
            full[name] = value(parameter)
    return full


def from_full(model: LlamaForCausalLM, full: dict[str, torch.Tensor]) -> None:
    """Give the model the full weights of a Hugging Face state dict. Raises KeyError for a missing one."""
    order, _ = _order(model)
    take: Callable[[str], torch.Tensor] = lambda name: full[name].detach().cpu()  # noqa: E731
    for name, parameter in model.named_parameters():
        kind = name.rsplit(".", 1)[-1].split("_")[0]
        prefix = name.rsplit(".", 2)[0]
        if "qkv_proj" in name:
            parts = {letter: take(f"{prefix}.{letter}_proj.{kind}") for letter in "qkv"}
            parts["q"] = reordered(parts["q"], order)
            scatter_full(parameter, tuple(parts.values()) if name.endswith("_qkv") else parts[name[-1]])
        elif "gate_up_proj" in name:
            scatter_full(parameter, torch.cat([take(f"{prefix}.gate_proj.{kind}"), take(f"{prefix}.up_proj.{kind}")]))
        elif name.endswith("o_proj.weight"):
            scatter_full(parameter, reordered(take(name), order, dim=1))
        else:
            scatter_full(parameter, take(name))


def load(model: LlamaForCausalLM, path: Path) -> None:
    """Weights from a safetensors file, or from all of a Hugging Face folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} holds no .safetensors file")
    from_full(model, {name: tensor for file in files for name, tensor in load_file(file).items()})


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """A Hugging Face folder: config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    full = to_full(model)
    if torch.distributed.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in full.items()}, folder / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(folder)

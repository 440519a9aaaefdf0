"""Hugging Face Llama weights in and out of the model of this folder.

`to_full(model)` gives the full tensors under Hugging Face's names, whatever the ranks; `from_full` is the inverse; `load` and `save` do the same with a
safetensors file. `to_full(model, grads=True)` gives gradients instead.

Query heads are reordered: a rank's query heads are those that its K/V heads serve.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from modeling_llama_nxd import LlamaForCausalLM
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.utils.full_weights import gather_full, scatter_full
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

Take = Callable[[str], torch.Tensor]


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


def full_names(name: str, value: torch.Tensor | tuple[torch.Tensor, ...], back: list[int]) -> dict[str, torch.Tensor]:
    """What the full value of our parameter `name` (q, k and v of a fused one) is under Hugging Face's names. back: the place of each query head."""
    kind = name.rsplit(".", 1)[-1].split("_")[0]
    prefix = name.rsplit(".", 2)[0]
    if "qkv_proj" in name:
        names = "qkv" if name.endswith("_qkv") else name[-1]
        parts = zip(names, value if name.endswith("_qkv") else (value,), strict=True)
        return {f"{prefix}.{letter}_proj.{kind}": reordered(part, back) if letter == "q" else part for letter, part in parts}
    if "gate_up_proj" in name:
        return dict(zip([f"{prefix}.{part}_proj.{kind}" for part in ("gate", "up")], value.chunk(2), strict=True))
    return {name: reordered(value, back, dim=1) if name.endswith("o_proj.weight") else value}


def full_value(name: str, take: Take, order: list[int]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The inverse: the full value of our parameter `name`. take: gives the full tensor with a Hugging Face name. order: of the query heads."""
    kind = name.rsplit(".", 1)[-1].split("_")[0]
    prefix = name.rsplit(".", 2)[0]
    if "qkv_proj" in name:
        parts = {letter: take(f"{prefix}.{letter}_proj.{kind}") for letter in "qkv"}
        parts["q"] = reordered(parts["q"], order)
        return tuple(parts.values()) if name.endswith("_qkv") else parts[name[-1]]
    if "gate_up_proj" in name:
        return torch.cat([take(f"{prefix}.gate_proj.{kind}"), take(f"{prefix}.up_proj.{kind}")])
    return reordered(take(name), order, dim=1) if name.endswith("o_proj.weight") else take(name)


def to_full(
    model: LlamaForCausalLM, grads: bool = False, names: Callable[..., dict[str, torch.Tensor]] = full_names
) -> dict[str, torch.Tensor]:
    """The full CPU tensors of all parameters (of their gradients) by Hugging Face name."""
    _, back = _order(model)
    full: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        full |= names(name, gather_full(parameter.grad if grads else parameter.detach(), like=parameter), back)
    return full


def from_full(model: LlamaForCausalLM, full: dict[str, torch.Tensor], value: Callable[..., Any] = full_value) -> None:
    """Give the model the full weights of a Hugging Face state dict. Raises KeyError for a missing one."""
    order, _ = _order(model)
    take: Take = lambda name: full[name].detach().cpu()  # noqa: E731
    for name, parameter in model.named_parameters():
        scatter_full(parameter, value(name, take, order))


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, or of a Hugging Face folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} holds no .safetensors file")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def write(folder: Path, config: PretrainedConfig, full: dict[str, torch.Tensor]) -> None:
    """A Hugging Face folder: config.json and model.safetensors, from the first rank."""
    folder.mkdir(parents=True, exist_ok=True)
    if torch.distributed.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in full.items()}, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)


def load(model: LlamaForCausalLM, path: Path) -> None:
    """Weights from a safetensors file, or from all of a Hugging Face folder."""
    from_full(model, read(path))


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """A Hugging Face folder that transformers loads."""
    write(folder, model.config, to_full(model))

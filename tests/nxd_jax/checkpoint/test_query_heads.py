"""With copies of K/V heads, ranks hold query heads in an order of their own: a checkpoint gives another layout the same function, not the same order."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch
from neuronx_distributed.parallel_layers import parallel_state

from torch_bridge.recorder import sharded

LAYOUTS = [(1, 1, True), (2, 2, False), (4, 4, True)]
"""(tensor parallel size, copies, fused): with 4 query and 2 or 4 K/V heads."""


@pytest.fixture(scope="module")
def llama() -> Any:
    path = Path(__file__).parents[3] / "examples" / "llama" / "modeling_llama_nxd.py"
    spec = importlib.util.spec_from_file_location("modeling_llama_nxd", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["modeling_llama_nxd"] = module
    spec.loader.exec_module(module)
    return module


def made(llama: Any, kv_heads: int, tp: int, copies: int, fuse: bool, zero1: bool, seed: int, lora: Any = None) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=kv_heads,
        max_position_embeddings=16, tie_word_embeddings=False, attention_bias=True,
    )  # fmt: skip
    options = llama.NxDLlamaOptions(kv_size_multiplier=copies, fuse_qkv=fuse)
    run = nxd.neuronx_distributed_config(tensor_parallel_size=tp, optimizer_config={"zero_one_enabled": zero1}, lora_config=lora)
    torch.manual_seed(seed)
    model = nxd.initialize_parallel_model(run, lambda: llama.LlamaForCausalLM(config, options))
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, nxd.initialize_parallel_optimizer(run, torch.optim.AdamW, trained, lr=1e-2)


def losses(job: tuple[Any, Any], steps: int) -> list[float]:
    model, optimizer = job
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    size, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = ids.view(size, -1, 8).to("xla")[rank]
        loss = model.run_train(x, labels=x)
        optimizer.step()
        held = sharded.shards(loss.detach())
        found.append(sum(v.item() for v in held) / len(held))
    return found


def loss(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1)).to("xla")
    with torch.no_grad():
        return sharded.shards(model(ids, labels=ids)[0])[0]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_same_function_for_any_number_of_copies(nxd: Any, llama: Any, tmp_path: Path, kv_heads: int) -> None:
    import neuronx_distributed

    nxd(4, tp=4)
    job = made(llama, kv_heads, 4, 2, True, False, 0)
    losses(job, 1)
    neuronx_distributed.save_checkpoint(tmp_path, "t", *job)
    want = losses(job, 2)
    for tp, copies, fuse in LAYOUTS:
        if kv_heads * copies % tp or kv_heads * copies > 8:
            continue
        nxd(4, tp=tp)
        job = made(llama, kv_heads, tp, copies, fuse, True, 5)
        neuronx_distributed.load_checkpoint(tmp_path, "t", *job)
        torch.testing.assert_close(losses(job, 2), want, rtol=2e-5, atol=0)


@pytest.mark.parametrize("fuse, copies", [(True, 1), (False, 2)])
def test_adapters(nxd: Any, llama: Any, tmp_path: Path, fuse: bool, copies: int) -> None:
    """Adapters of projections, and the projections beneath them, have their query heads in the same order as the model."""
    import neuronx_distributed
    from neuronx_distributed.modules.lora import LoraConfig

    from nxd_jax.modules.lora import peft_format
    from tests.nxd_jax.lora.models import full, stir

    lora = LoraConfig(
        lora_rank=2, lora_alpha=8, target_modules=["qkv_proj", "o_proj"], bias="all", save_lora_base=True, lora_save_dir=str(tmp_path)
    )
    nxd(4, tp=4)
    model = made(llama, 2, 4, 2, True, False, 0, lora)[0]
    stir(model.module)
    neuronx_distributed.save_checkpoint(tmp_path, "all", model)
    model.module.lora_config = dataclasses.replace(lora, merge_lora=True)
    neuronx_distributed.save_checkpoint(tmp_path, "merged", model)
    model.module.lora_config = dataclasses.replace(lora, save_lora_base=False)
    model.module.save_lora(str(tmp_path), "alone")
    adapters, want = peft_format.to_peft(model.module)[1], loss(model)
    joined = {n: full(p) for n, p in model.module.tensors().items() if ".lora_" in n}  # as NxD joins them: rank after rank
    (tmp_path / "original").mkdir()
    for rank in range(4):
        torch.save(joined, tmp_path / "original" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    stir(model.module, seed=9)
    model.module.load_lora(str(tmp_path), "original")
    torch.testing.assert_close(loss(model), want, rtol=1e-5, atol=0)

    nxd(2, tp=2)
    model = made(llama, 2, 2, copies, fuse, False, 5, lora)[0]
    neuronx_distributed.load_checkpoint(tmp_path, "all", model)
    torch.testing.assert_close(loss(model), want, rtol=1e-5, atol=0)
    if fuse:
        stir(model.module, seed=9)
        model.module.load_lora(str(tmp_path), "alone")
        torch.testing.assert_close(loss(model), want, rtol=1e-5, atol=0)
    for name, tensor in peft_format.to_peft(model.module)[1].items():
        torch.testing.assert_close(tensor, adapters[name], rtol=0, atol=0)
    model = made(llama, 2, 2, copies, fuse, False, 5)[0]
    neuronx_distributed.load_checkpoint(tmp_path, "merged", model)
    torch.testing.assert_close(loss(model), want, rtol=1e-5, atol=0)


def test_a_warning_where_nobody_can_tell(nxd: Any, tmp_path: Path) -> None:
    import neuronx_distributed

    from tests.nxd_jax.checkpoint import job

    nxd(4, tp=4)
    neuronx_distributed.save_checkpoint(tmp_path, "t", job.build(4, kv=2)[0])
    neuronx_distributed.load_checkpoint(tmp_path, "t", job.build(4, kv=2, fuse=False)[0])
    nxd(2, tp=2)
    with pytest.warns(UserWarning, match="the query heads of qkv.weight_q, qkv.bias_q come in another order now"):
        neuronx_distributed.load_checkpoint(tmp_path, "t", job.build(2)[0])


def test_adapters_that_are_saved_where_nobody_can_tell(nxd: Any, tmp_path: Path) -> None:
    from nxd_jax.modules.lora import peft_format
    from tests.nxd_jax.lora.test_model import made as made_adapters

    nxd(4, tp=4)
    model = made_adapters(copies=2)
    with pytest.warns(
        UserWarning, match=r"adapters, .* are saved with their query heads in the order in which ranks hold .*: give the attention module"
    ):
        peft_format.to_peft(model)
    with pytest.warns(UserWarning, match="query heads in the order in which ranks hold"):
        model.save_lora(str(tmp_path), "t")
    nxd(2, tp=2)
    peft_format.to_peft(made_adapters(copies=1))

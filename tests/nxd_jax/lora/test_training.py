"""The documented way: a configuration with LoRA, wrapped model and optimizer, sequence parallelism, activation checkpoints, save and resume."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest
import torch

import nxd_jax as nxd_api
from nxd_jax.modules.lora import LoraConfig, peft_format
from nxd_jax.utils.batch_utils import shift_labels
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.lora.models import batch, llama, losses

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "examples" / "llama"))
import hf_weights
from modeling_llama_nxd import DecoderLayer, LlamaForCausalLM, NxDLlamaOptions

pytest.importorskip("nxd_jax.trainer.checkpoint")

TARGETS = ["o_proj", "down_proj", "lm_head", "embed_tokens"]
"""Row parallel, column parallel and the vocabulary; the fused projections share an A, which PEFT's do not."""


def parallel_model(base: Any, sp: bool, config: LoraConfig) -> tuple[Any, Any]:
    """The model with adapters, and its optimizer."""
    nxd_config = nxd_api.neuronx_distributed_config(
        tensor_parallel_size=2,
        sequence_parallel=sp,
        activation_checkpoint_config=DecoderLayer,
        optimizer_config={"zero_one_enabled": False, "grad_clipping": False},
        lora_config=config,
    )

    def make() -> LlamaForCausalLM:
        model = LlamaForCausalLM(base.config, NxDLlamaOptions(sequence_parallel=sp))
        hf_weights.from_full(model, base.state_dict())
        return model

    model = nxd_api.initialize_parallel_model(nxd_config, make)
    return model, nxd_api.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-2)


def steps(model: Any, optimizer: Any, count: int) -> list[float]:
    ids = batch().to("xla")
    found = []
    for _ in range(count):
        loss, _ = model(**shift_labels({"input_ids": ids, "labels": ids}))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("sp", [False, True])
def test_train_save_and_resume(nxd: Nxd, tmp_path: pathlib.Path, sp: bool) -> None:
    peft = pytest.importorskip("peft")
    nxd(2, tp=2)
    base = llama()
    torch.manual_seed(1)
    config = LoraConfig(lora_rank=4, lora_alpha=8, target_modules=TARGETS, save_lora_config_adapter=True)
    model, optimizer = parallel_model(base, sp, config)
    tensors = peft_format.to_peft(model.original_module())[1]

    first = steps(model, optimizer, 3)
    nxd_api.save_checkpoint(str(tmp_path), tag="t", model=model, optimizer=optimizer)
    rest = steps(model, optimizer, 2)

    resumed, optimizer = parallel_model(base, sp, LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path), lora_load_tag="t"))
    nxd_api.load_checkpoint(str(tmp_path), tag="t", model=resumed, optimizer=optimizer)
    assert steps(resumed, optimizer, 2) == rest

    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))
    peft.set_peft_model_state_dict(theirs, tensors)
    want = losses(theirs, 5, "cpu")
    assert want[-1] < want[0] - 0.02
    torch.testing.assert_close([*first, *rest], want, rtol=1e-4, atol=0)

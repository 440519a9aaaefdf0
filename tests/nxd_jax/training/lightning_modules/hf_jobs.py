"""Small trainings of Llama and Mixtral from configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.training import environment
from nxd_jax.training.lightning_modules.model.hf_models.llama_model import HFLLamaModule
from nxd_jax.training.lightning_modules.nlp_overrides import NLPDDPStrategy, NLPTrainer
from tests.nxd_jax.training import small

SIZES = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": small.WORDS,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""A config.json as transformers 4 writes it."""
MOE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

TP, PP, CP, EP, VPP = (
    f"distributed_strategy.{name}_size"
    for name in (
        "tensor_model_parallel",
        "pipeline_model_parallel",
        "context_parallel",
        "expert_model_parallel",
        "virtual_pipeline_model_parallel",
    )
)
ROWS = 4
DEVICES, SP = "trainer.devices", "distributed_strategy.sequence_parallel=True"


def module_of(cfg: Any, kind: Any = HFLLamaModule) -> Any:
    """The module of a configuration, without a model."""
    return kind(cfg, trainer(cfg))


def config(folder: Path, *changes: str, sizes: dict[str, Any] | None = None) -> Any:
    """A configuration whose config.json lies in `folder`. sizes: what it has in place of, or besides, SIZES; None takes a key out."""
    found = {name: value for name, value in {**SIZES, **(sizes or {})}.items() if value is not None or name == "pad_token_id"}
    (folder / "config.json").write_text(json.dumps(found))
    model = OmegaConf.create({"model": {"model_config": str(folder / "config.json")}})
    return OmegaConf.merge(
        small.config(f"data.global_batch_size={ROWS}", "data.micro_batch_size=2"), model, OmegaConf.from_dotlist(list(changes))
    )


def trainer(cfg: Any) -> NLPTrainer:
    """The Trainer of a configuration, with the environment as it says."""
    environment.process_config(cfg)
    return NLPTrainer(strategy=NLPDDPStrategy(), enable_progress_bar=False, **OmegaConf.to_container(cfg.trainer))


def made(cfg: Any, module: Any = HFLLamaModule) -> Any:
    """The module, with its model."""
    run = trainer(cfg)
    found = module(cfg, run)
    run.strategy.connect(found)
    found.setup()
    return found


def rows() -> torch.Tensor:
    """Token ids of all data-parallel ranks."""
    return torch.randint(0, small.WORDS, (ROWS, small.LENGTH), generator=torch.Generator().manual_seed(0))


def stepped(folder: Path, *changes: str, module: Any = HFLLamaModule, sizes: dict[str, Any] | None = None) -> tuple[float, Any]:
    """The loss of a step's forward and backward passes, and the module with gradients."""
    found = made(config(folder, *changes, sizes=sizes), module)
    ids = rows()
    own = {"input_ids": ids, "labels": ids}
    if (size := parallel_state.get_data_parallel_size()) > 1:
        first = parallel_state.get_data_parallel_rank() * (ROWS // size)
        own = {name: rows.to("xla")[first : first + ROWS // size] for name, rows in own.items()}
    loss, _ = found.forward_backward_step(own, is_training=True)
    return float(loss), found

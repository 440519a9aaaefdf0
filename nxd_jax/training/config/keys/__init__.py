"""All keys of a YAML file, as tables: what each may be, whether something reads it."""

from nxd_jax.training.config.keys.data import ALIGNMENT, DATA
from nxd_jax.training.config.keys.exp_manager import EXP_MANAGER
from nxd_jax.training.config.keys.kinds import Key, section
from nxd_jax.training.config.keys.model import MODEL
from nxd_jax.training.config.keys.top import PRECISION, STRATEGY, TOP
from nxd_jax.training.config.keys.trainer import TRAINER

__all__ = ["ALIGNMENT", "LOOSE", "ROOT", "STRICT", "Key"]

ROOT: Key = section(
    {
        **TOP,
        "trainer": section(TRAINER, required=True, null=False),
        "exp_manager": section(EXP_MANAGER, required=True, null=False),
        "distributed_strategy": section(STRATEGY, required=True, null=False),
        "data": section(DATA, required=True, null=False),
        "model": section(MODEL, required=True, null=False),
        "precision": section(PRECISION, required=True, null=False),
        "model_alignment_strategy": section(ALIGNMENT),
    }
)

STRICT = ("trainer", "exp_manager", "model_alignment_strategy.peft")
"""Sections in which an unknown key stops the original, and here that of adapters, whose class refuses it."""

LOOSE = {
    "context_parallel_size": "distributed_strategy",
    "ring_attention": "model.fusions",
    "hidden_size": "model",
    "seq_length": "data",
    "max_prompt_length": "model_alignment_strategy.dpo",
    "truncation_mode": "model_alignment_strategy.dpo",
    "dpo": "model_alignment_strategy",
    "orpo": "model_alignment_strategy",
    "peft": "model_alignment_strategy",
    "model_alignment_strategy": "",
    **dict.fromkeys(ALIGNMENT["peft"].inside or {}, "model_alignment_strategy.peft"),
}
"""Keys that count in any section, and the section that they are from."""

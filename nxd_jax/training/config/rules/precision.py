"""`precision`, and what it needs of others."""

from __future__ import annotations

from nxd_jax.training.config.facts import Facts
from nxd_jax.training.config.keys.top import MANUAL_ONLY
from nxd_jax.training.config.problems import Problems
from nxd_jax.training.environment import PRECISIONS, SPELLINGS


def check(facts: Facts, problems: Problems) -> None:
    kind = facts.precision
    said = facts.get("precision.type")
    if said in SPELLINGS:
        problems.note(
            "precision.type", f"{said} is {SPELLINGS[said]}, with master weights (which the original switches off for this spelling)"
        )
    if kind == "manual":
        missing = [k for k in MANUAL_ONLY[2:] if facts.get(f"precision.{k}") is None]
        if missing:
            problems.warn("precision.type", f"manual: {', '.join(missing)} is not given, and stays as the environment has it")
    wide = (kind in PRECISIONS and PRECISIONS[kind].masters) or (kind == "manual" and facts.get("precision.master_weights", False))
    if wide and not facts.zero1 and not facts.loose("peft"):
        problems.warn(
            "distributed_strategy.zero1",
            f"False: precision.type={said} keeps float32 master weights in the ZeRO-1 optimizer, so there are none: set it to True, or precision.type to fp32",
        )
    if facts.get("precision.parallel_layers_reduce_dtype") == "fp16":
        problems.warn("precision.parallel_layers_reduce_dtype", "fp16 is read as bf16, as in the original")
    if facts.get("exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt") and not facts.masters:
        problems.warn(
            "exp_manager.checkpoint_callback_params.use_master_weights_in_ckpt", "True: there are no master weights (precision.type, zero1)"
        )

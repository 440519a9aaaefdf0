"""How long a training step would take on a machine that is not at hand: a roofline over the engines, the memory and the wires, every term shown.

    work = transformer_work(LLAMA31_8B, seq=8192, global_batch=1024, tp=32, dp=32, recompute="selective", flash=True)
    print(estimate(work, Topology("trn1.32xlarge", nodes=32)))

The method, where its constants come from and how far off it is: docs/explanation/estimate.md.
"""

from nxd_jax.inspect.estimate.constants import DOCUMENTED, PEAK, Constants
from nxd_jax.inspect.estimate.models import (
    BERT_LARGE,
    GLM45_AIR,
    GPT_6B,
    GPT_23B,
    GPT_46B,
    GPT_175B,
    LLAMA2_7B,
    LLAMA2_13B,
    LLAMA2_70B,
    LLAMA31_8B,
    LLAMA31_70B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    Transformer,
)
from nxd_jax.inspect.estimate.roofline import Estimate, Term, estimate
from nxd_jax.inspect.estimate.transformer import transformer_work
from nxd_jax.inspect.estimate.work import Phase, Work, program_work

__all__ = [
    "BERT_LARGE",
    "DOCUMENTED",
    "GLM45_AIR",
    "GPT_6B",
    "GPT_23B",
    "GPT_46B",
    "GPT_175B",
    "LLAMA2_7B",
    "LLAMA2_13B",
    "LLAMA2_70B",
    "LLAMA31_8B",
    "LLAMA31_70B",
    "MIXTRAL_8X7B",
    "PEAK",
    "QWEN3_30B_A3B",
    "Constants",
    "Estimate",
    "Phase",
    "Term",
    "Transformer",
    "Work",
    "estimate",
    "program_work",
    "transformer_work",
]

"""Llama and Mixtral, each as transformers' model and as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """Classes: of the configuration, of transformers' model, of ours."""

    config: Any
    theirs: Any
    ours: Any

    def read(self, said: Mapping[str, Any]) -> Any:
        """The configuration that a config.json says. For our model: experts take all tokens, and it gives no router logits."""
        found = self.config.from_dict({name: value for name, value in said.items() if name not in ("model_type", "architectures")})
        found.capacity_factor, found.output_router_logits = None, False
        return found


def llama() -> Kind:
    """Llama."""
    import transformers

    from nxd_jax.training.models.hf_models import modeling_llama

    return Kind(transformers.LlamaConfig, transformers.LlamaForCausalLM, modeling_llama.LlamaForCausalLM)


def mixtral() -> Kind:
    """Mixtral."""
    import transformers

    from nxd_jax.training.models.hf_models import modeling_mixtral

    return Kind(transformers.MixtralConfig, transformers.MixtralForCausalLM, modeling_mixtral.MixtralForCausalLM)

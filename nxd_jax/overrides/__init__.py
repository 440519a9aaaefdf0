"""`neuronx_distributed.overrides`: functions of transformer models, for the layouts of our kernels."""

from nxd_jax.overrides.transformer_overrides import apply_rotary_pos_emb

__all__ = ["apply_rotary_pos_emb"]

"""`neuronx_distributed.kernels`: attention kernels."""

from nxd_jax.kernels.flash_attn import nki_flash_attn_func
from nxd_jax.kernels.ring_attention_kernel import nki_ring_attn_func

__all__ = ["nki_flash_attn_func", "nki_ring_attn_func"]

"""The full tensor of a parameter that tensor parallel ranks share out, and back; how is in `tensor_parallel.full_weights`. (NxD has no such functions.)"""

from nxd_jax.tensor_parallel.full_weights import Full, Shares, cut_full, gather_full, is_shared_out, scatter_full, write

__all__ = [
    "Full",
    "Shares",
    "cut_full",
    "gather_full",
    "is_shared_out",
    "scatter_full",
    "write",
]

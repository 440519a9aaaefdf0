"""`neuronx_distributed.quantization.microscaling`: OCP's formats of four bits, and of exponents that are scales.

`transform_weights` has NxD's names.
"""

from nxd_jax.quantization.microscaling.formats import FP4_VALUES, e8m0_to_float, float_to_e8m0, fp4_to_float, nibbles

__all__ = ["FP4_VALUES", "e8m0_to_float", "float_to_e8m0", "fp4_to_float", "nibbles"]

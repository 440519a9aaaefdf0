"""`neuronx_distributed_training.utils`."""

from nxd_jax.training.utils.utils import Throughput, _distributed_available, get_attribute_from_cfg, get_dtype, get_lnc_size

__all__ = ["Throughput", "_distributed_available", "get_attribute_from_cfg", "get_dtype", "get_lnc_size"]

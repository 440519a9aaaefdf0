"""`neuronx_distributed.utils`: helpers around models and batches, and the few calls that work with and without a device."""

from nxd_jax.utils._device import cpu_mode, get_device, mark_step, master_print
from nxd_jax.utils.utils import hardware

__all__ = ["cpu_mode", "get_device", "hardware", "mark_step", "master_print"]

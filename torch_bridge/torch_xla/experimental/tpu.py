"""`torch_xla.experimental.tpu`: the older place of `torch_xla._internal.tpu`."""

from torch_bridge.torch_xla._internal.tpu import get_tpu_env, num_available_devices, num_local_processes, version

__all__ = ["get_tpu_env", "num_available_devices", "num_local_processes", "version"]

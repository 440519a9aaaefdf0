"""`torch_xla.distributed.xla_backend`: importing it registers backend "xla" with torch.distributed.

`torch.distributed.init_process_group("xla")` works under torchrun, with `init_method="xla://"` or `"pjrt://"`, and, in a process that no
launcher started, with no further arguments.
"""

from torch_bridge.collectives.backend import ProcessGroupXla, new_xla_process_group

__all__ = ["ProcessGroupXla", "new_xla_process_group"]

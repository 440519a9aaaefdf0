"""`torch.distributed.init_process_group()` without a backend, in a script that has not asked for xla's (`import torch_xla.distributed.xla_backend`): gloo.

torch looks for the backend of the machine's accelerator. That is xla as soon as torch is imported where this package is installed, and scripts for the CPU
would end with an error about an accelerator that they do not use. With the original torch_xla they get gloo, too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def install() -> None:
    """Once, when the device is registered."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    config: Any = distributed_c10d.BackendConfig
    known = distributed_c10d.Backend
    original = config.__init__

    @functools.wraps(original)
    def init(self: Any, backend: Any) -> None:
        unasked = str(backend) == known.UNDEFINED and "XLA" not in known._plugins and torch._C._get_accelerator().type == "xla"
        original(self, "cpu:gloo" if unasked else backend)

    config.__init__ = init

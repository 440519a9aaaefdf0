"""The `torch.backends` entry point: runs at the end of `import torch`.

A module of its own, because `import torch` may itself happen inside `import torch_bridge` (a script that imports torch_xla first): then the package
is half-made, and registers the device when it is done.
"""

from __future__ import annotations

import sys


def autoload() -> None:
    """Register device xla unless the original torch_xla owns it; never raises."""
    device = sys.modules.get("torch_bridge.device.registration")
    if device is None or hasattr(device, "autoload"):
        from torch_bridge.device.registration import autoload as run

        run()

"""The ranks of the job, as Lightning asks for them."""

from __future__ import annotations

import os
from typing import Any

from lightning_fabric.plugins.environments import ClusterEnvironment

from torch_bridge.mesh import world


class NeuronXLAEnvironment(ClusterEnvironment):
    """The world of ranks (`torch_bridge.mesh.world`): torchrun's, our launcher's, or the one that a plain script needs.

    In a process that hosts several ranks, `global_rank()` and `local_rank()` are each rank's own number; they read as the first hosted rank's.
    """

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "29500"))

    @staticmethod
    def detect() -> bool:
        """Only where the strategy asks for it."""
        return False

    def world_size(self) -> int:
        return world.size()

    def set_world_size(self, size: int) -> None:
        """The world knows."""

    def global_rank(self) -> Any:
        return world.rank()

    def set_global_rank(self, rank: int) -> None:
        """The world knows."""

    def local_rank(self) -> Any:
        return world.local_rank()

    def node_rank(self) -> int:
        return world.first() // world.local_size()

"""How programs are run, as the environment says: read once, when JAX comes up (`device.debug_modes`)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Settings:
    """What the environment says about running programs (`debug_modes.configure`).

    Attributes:
        donate: whether buffers that only the segment holds are donated (XLA_ENABLE_PARAM_ALIASING).
        max_in_flight: executions that may be queued at each place (`mesh.places`) before recording waits for the oldest.
        max_traces: structures kept, with their executables; the one unused for longest goes first.
        extract_only: compile programs and give zeros for their results (NEURON_EXTRACT_GRAPHS_ONLY).
        cold_shapes: run programs of new shapes in eager torch first where several of the same ops were compiled (NXD_JAX_COLD_SHAPES).
        torch_kernels: programs of one CPU device call kernels of torch (NXD_JAX_TORCH_KERNELS).
        speculate: MiB of weights and states up to which a training step may start before it is recorded; 0: never (NXD_JAX_SPECULATE).
        verify: check what every pass makes of a recorded step (NXD_JAX_VERIFY).
    """

    donate: bool = True
    max_in_flight: int = 4
    max_traces: int = 512
    extract_only: bool = False
    cold_shapes: bool = True
    torch_kernels: bool = True
    speculate: int = 4
    verify: bool = False


SETTINGS = Settings()
"""Of this process."""

"""Where the time of some steps goes: `profile` records them with JAX's profiler and reads the trace back."""

from nxd_jax.inspect.profiling.recording import profile
from nxd_jax.inspect.profiling.results import (
    DeviceRow,
    DeviceSpan,
    ExecutableRow,
    HostRow,
    HostSpan,
    InstructionRow,
    ModuleRow,
    OpRow,
    Profile,
    StepRow,
)

__all__ = [
    "DeviceRow",
    "DeviceSpan",
    "ExecutableRow",
    "HostRow",
    "HostSpan",
    "InstructionRow",
    "ModuleRow",
    "OpRow",
    "Profile",
    "StepRow",
    "profile",
]

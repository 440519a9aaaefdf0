"""`torch.xla`: the device module torch asks for counts, the current device and random state (as `torch.cuda` is for CUDA)."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.types import Device

from torch_bridge.config import fork_guard
from torch_bridge.mesh import random_state

_initialized = True
"""`torch.utils.checkpoint` saves the random state of devices that say so."""


class device:
    """Context manager in which a device is current, as `torch.cuda.device`; there is only device 0."""

    def __init__(self, device: Device):
        set_device(device)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    """Devices that this process's script sees: one (each worker owns one core)."""
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    """Accepts device 0, the only one."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index not in (None, 0, -1):
        raise ValueError(f"this process has one xla device, xla:0; got {device!r}")


def _is_in_bad_fork() -> bool:
    return fork_guard.is_forked()


def manual_seed(seed: int) -> None:
    """Seed the device's random state (also done by `torch.manual_seed`)."""
    random_state.DEFAULT.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    random_state.DEFAULT.manual_seed(seed)


def seed() -> None:
    random_state.DEFAULT.manual_seed(torch.seed())


def initial_seed() -> int:
    return random_state.DEFAULT.seed


def get_rng_state(device: Device = "xla") -> torch.Tensor:
    """The random state as a CPU uint8 tensor."""
    state = random_state.DEFAULT.get_state()
    if _asked_by_checkpointing(sys._getframe(1)):
        state._beside = random_state.beside()  # type: ignore[attr-defined]
    return state


def set_rng_state(state: torch.Tensor, device: Device = "xla") -> None:
    random_state.DEFAULT.set_state(state)
    if (restore := getattr(state, "_beside", None)) is not None:
        restore()


def _asked_by_checkpointing(frame: FrameType | None) -> bool:
    """Whether the caller is `torch.utils.checkpoint`, or `torch.random.fork_rng` that it calls. What others put back is the default state alone."""
    for name in ("torch.random", "contextlib"):
        while frame is not None and frame.f_globals.get("__name__") == name:
            frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for state in states:
        set_rng_state(state)


def synchronize(device: Device = None) -> None:
    """Run what is recorded and wait until the device is done."""
    from torch_bridge.runtime import executor

    executor.sync(wait=True)


class Stream:
    """As `torch.cuda.Stream`, for code that asks for one (`torch.distributed.checkpoint`): JAX orders work by itself, so there is only one."""

    device_type = "xla"

    def synchronize(self) -> None:
        """Wait for all work."""
        synchronize()

    def wait_stream(self, stream: Stream) -> None:
        """Nothing: work is ordered."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


_STREAM = Stream()


def current_stream(device: Device = None) -> Stream:
    """The only stream."""
    return _STREAM


def stream(stream: Stream | None) -> Stream:
    """Context manager in which a stream is current; there is only one."""
    return _STREAM


def empty_cache() -> None:
    """Nothing to do: JAX owns the memory."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def get_device_name(device: Device = None) -> str:
    import jax

    return jax.devices()[0].device_kind


def is_bf16_supported() -> bool:
    return True

"""`torch_xla._internal.tpu`: there are no TPUs of torch_xla's own here. Lightning asks, for every Trainer, whether there are."""

from __future__ import annotations


def num_available_devices() -> int:
    """Of TPU chips that torch_xla would take by itself: none."""
    return 0


def num_local_processes() -> int:
    """Processes for them."""
    return 1


def get_tpu_env() -> dict[str, str]:
    """What is known of the chips: a name that no table of TPUs has, so that Lightning's ThroughputMonitor leaves out their use in percent."""
    return {"TYPE": "NeuronCore"}


def version() -> int:
    """Raises OSError: there is no TPU."""
    raise OSError(
        "torch_xla sees no TPU here: device 'xla' is what JAX has, or virtual devices of the CPU. Use torch_xla.runtime.device_type()"
    )

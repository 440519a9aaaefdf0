"""`torch_xla.experimental.plugins`: devices that are added to torch_xla. Here JAX finds devices, so a plugin says at most what JAX knows already."""

from __future__ import annotations

import importlib.metadata

from torch_bridge.torch_xla import runtime

OF_JAX = ("CPU", "CUDA", "GPU", "NEURON", "ROCM", "TPU")
"""Kinds of devices that JAX (NEURON: nxd_jax) brings up itself."""


class DevicePlugin:
    """`plugins.DevicePlugin`: what a kind of device says of itself. Subclasses say it; nothing is loaded from `library_path()`."""

    def library_path(self) -> str:
        """The PJRT library. Raises NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} has no library_path()")

    def host_index(self) -> int:
        """The number of this machine."""
        return 0

    def configure_single_process(self) -> None:
        """Set this process up as the only one. Raises NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} has no configure_single_process()")

    def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
        """Set this process up as one of several. It is not called here."""

    def physical_chip_count(self) -> int:
        """Devices of this machine."""
        return 1

    def client_create_options(self) -> dict[str, object]:
        """Options of the PJRT client."""
        return {}

    def requires_xla_coordinator(self) -> bool:
        """Whether processes must find each other first."""
        return False


_plugins: dict[str, DevicePlugin] = {}
_asked = False


def register_plugin(name: str, device_plugin: DevicePlugin) -> None:
    """`plugins.register_plugin`: note a plugin for a kind of device that JAX brings up itself (CPU, CUDA, TPU, ...).

    Raises NotImplementedError for others.
    """
    if name.upper() not in OF_JAX:
        raise NotImplementedError(
            f"torch_xla.experimental.plugins.register_plugin({name!r}, ...): devices come from JAX here, which loads no plugin of torch_xla. Install the "
            "maker's plugin for JAX (a package with the entry point jax_plugins), and set JAX_PLATFORMS to its name"
        )
    _plugins[name.upper()] = device_plugin


def register_installed_plugins() -> None:
    """`plugins.register_installed_plugins`: those of installed packages (entry points `torch_xla.plugins`)."""
    for entry in importlib.metadata.entry_points(group="torch_xla.plugins"):
        register_plugin(entry.name, entry.load()())


def use_dynamic_plugins() -> None:
    """`plugins.use_dynamic_plugins`: noted for `using_dynamic_plugins`; devices are JAX's either way."""
    global _asked
    _asked = True


def using_dynamic_plugins() -> bool:
    """`plugins.using_dynamic_plugins`: whether `use_dynamic_plugins` was called."""
    return _asked


def default() -> DevicePlugin:
    """`plugins.default`: the plugin of this job's kind of device. Raises KeyError if none was registered."""
    kind = runtime.device_type()
    if kind not in _plugins:
        raise KeyError(f"no plugin was registered for {kind}; there are {', '.join(_plugins) or 'none'}: devices are JAX's")
    return _plugins[kind]

"""`torch.Generator(device="xla")`.

torch lets an external backend make generators from C++ only, so `torch.Generator` becomes a subclass of itself that asks which device is meant. For every
other device it returns torch's own objects. An xla generator is one of torch's CPU generators that says `device="xla"`: it has all of its methods
(`manual_seed`,
`get_state`, `set_state`, `initial_seed`, ...), and each random op on the device draws its seed from it (`rng.of_generator`).
"""

from __future__ import annotations

from typing import Any

import torch

_Original = torch._C.Generator


class XLAGenerator(_Original):
    """What `torch.Generator(device="xla")` returns."""

    def __new__(cls) -> XLAGenerator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xla:0")

    def clone_state(self) -> XLAGenerator:
        """A generator of its own in the same state."""
        new = XLAGenerator()
        new.set_state(self.get_state())
        return new

    def __reduce__(self) -> Any:
        return _rebuild, (self.get_state(),)


def _rebuild(state: torch.Tensor) -> XLAGenerator:
    generator = XLAGenerator()
    generator.set_state(state)
    return generator


class _AnyDevice(type(_Original)):  # type: ignore[misc]
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Generator:
            return super().__call__(*args, **kwargs)
        device = args[0] if args else kwargs.get("device")
        if device is not None and torch.device(device).type == "xla":
            return XLAGenerator()
        return _Original(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Original) if cls is Generator else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Original) if cls is Generator else super().__subclasscheck__(subclass)


class Generator(_Original, metaclass=_AnyDevice):
    __doc__ = _Original.__doc__
    __module__ = "torch"


def install() -> None:
    """Put the class that knows xla in torch's place (once)."""
    torch.Generator = Generator  # type: ignore[misc]

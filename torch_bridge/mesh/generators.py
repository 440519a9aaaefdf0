"""`torch.Generator(device="xla")`.

torch lets an external backend make generators from C++ only, so `torch.Generator` becomes a subclass of itself that asks which device is meant. For every
other device but the CPU it returns torch's own objects. An xla generator is one of torch's CPU generators that says `device="xla"`: it has all of its
methods (`manual_seed`, `get_state`, `set_state`, `initial_seed`, ...), and each random op on the device draws its seed from it (`random_state.of_generator`).
Both kinds take a seed that differs by rank: `rank_random` has what a CPU generator then does.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.types import Device

from torch_bridge.mesh import rank_numbers, world

_Original = torch._C.Generator
_MADE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def known(generator: Any) -> Any:
    """The object that the script has: torch hands its operators another one around the same generator."""
    found = _MADE.get(generator._cdata)
    return generator if found is None else found


class CPUGenerator(_Original):
    """What `torch.Generator()` returns: torch's own, which also takes a seed that differs by rank."""

    _streams: Any = None

    def __new__(cls, device: Device = None) -> CPUGenerator:
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        _MADE[made._cdata] = made  # type: ignore[attr-defined]
        return made

    def manual_seed(self, seed: int | torch.SymInt) -> CPUGenerator:
        if type(seed) is int and self._streams is None:
            super().manual_seed(seed)
            return self
        rank_numbers.hooks().seed(self, seed, super().manual_seed)
        return self

    def seed(self) -> int:
        self._streams = None
        return super().seed()

    def get_state(self) -> torch.Tensor:
        return super().get_state() if self._streams is None else self._joined()

    def _joined(self) -> torch.Tensor:
        return rank_numbers.hooks().get_state(self)

    def set_state(self, new_state: torch.Tensor) -> CPUGenerator:
        rank_numbers.hooks().set_state(self, new_state)
        return self

    def clone_state(self) -> CPUGenerator:
        """A generator of its own in the same state."""
        new = type(self)()
        new.set_state(self.get_state())
        return new

    def __reduce__(self) -> Any:
        return super().__reduce__() if self._streams is None else (_rebuild, (self.get_state(), type(self)))


CPUGenerator.__name__ = "Generator"


class XLAGenerator(CPUGenerator):
    """What `torch.Generator(device="xla")` returns. differences: how much larger each rank's seed is than rank 0's, if seeds differ by rank."""

    differences: tuple[int, ...] | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xla:0")

    def manual_seed(self, seed: int | torch.SymInt) -> XLAGenerator:
        if type(seed) is int:
            self.differences = None
            _Original.manual_seed(self, seed)
            return self
        from torch_bridge.mesh import random_state

        self.differences = random_state.differences_of(seed)
        _Original.manual_seed(self, int(rank_numbers.per_rank(seed)[0]))
        return self

    def seed(self) -> int:
        self.differences = None
        return super().seed()

    def get_state(self) -> torch.Tensor:
        """As on the CPU; after a seed that differs by rank with 8 more bytes for each rank."""
        state = _Original.get_state(self)
        return (
            state if self.differences is None else torch.cat([state, torch.tensor(self.differences, dtype=torch.int64).view(torch.uint8)])
        )

    def set_state(self, new_state: torch.Tensor) -> XLAGenerator:
        size = _Original.get_state(self).numel()
        more = new_state[size:].clone().view(torch.int64).tolist() if new_state.numel() > size else []
        _Original.set_state(self, new_state[:size].clone() if more else new_state)
        self.differences = tuple(more) or None
        return self

    def __reduce__(self) -> Any:
        return _rebuild, (self.get_state(),)


def _rebuild(state: torch.Tensor, kind: type[CPUGenerator] = XLAGenerator) -> CPUGenerator:
    generator = kind()
    generator.set_state(state)
    return generator


class _AnyDevice(type(_Original)):  # type: ignore[misc]
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Generator:
            return super().__call__(*args, **kwargs)
        device = args[0] if args else kwargs.get("device")
        kind = "cpu" if device is None else torch.device(device).type
        if kind == "xla":
            return XLAGenerator()
        return CPUGenerator() if kind == "cpu" and world.may_have_several_ranks() else _Original(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Original) if cls is Generator else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Original) if cls is Generator else super().__subclasscheck__(subclass)


class Generator(_Original, metaclass=_AnyDevice):
    __doc__ = _Original.__doc__
    __module__ = "torch"


def install() -> None:
    """Put the class that knows xla in torch's place (once)."""
    torch.Generator = Generator  # type: ignore[misc]

"""What `XlaFullyShardedDataParallel.module` gives.

torch_xla has a wrapper of its own between the outer one and the module, so scripts write `model.module.module`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_OWN = "_fpw_module"


class XlaFlattenParamsWrapper(nn.Module):
    """`xla_flatten_params_wrapper.XlaFlattenParamsWrapper`: the wrapped module by another name. Whatever is asked of it, called, read or set is the module's;
    `module` is the module itself. Made by `XlaFullyShardedDataParallel.module` alone; unlike torch_xla's it has no part in names of states."""

    def __init__(self, module: nn.Module):
        self.__dict__[_OWN] = module  # all else, hooks and parameters included, is the module's, so nn.Module.__init__ has nothing to do

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def module(self) -> nn.Module:
        """The module that was wrapped."""
        found: nn.Module = self.__dict__[_OWN]
        return found

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.module(*args, **kwargs)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The module's, without its hooks."""
        return self.module.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if _OWN not in self.__dict__:  # a copy in the making
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

    def __bool__(self) -> bool:
        return True

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """The module and those inside."""
        return self.module.named_modules(*args, **kwargs)

    def named_children(self) -> Any:
        """Of the module."""
        return self.module.named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def apply(self, fn: Any) -> Any:
        """To the module and those inside."""
        self.module.apply(fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.module._apply(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Any:
        """The module's mode."""
        self.module.train(mode)
        return self

"""The few names that users' copies of NxD Training's training.py take from NeMo, for where NeMo is not installed.

`install` runs at the end of `import torch` (an entry point of `torch.backends`), because those files import NeMo before anything of ours. It imports nothing:
names come from `nxd_jax.training` when they are asked for. An installed NeMo always wins.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_NAMES: dict[str, dict[str, str]] = {
    "nemo": {},
    "nemo.utils": {"logging": "nxd_jax.training._nemo:logger"},
    "nemo.utils.exp_manager": {
        "StatelessTimer": "nxd_jax.training.utils.callbacks:StatelessTimer",
        "exp_manager": "nxd_jax.training.utils.exp_manager:exp_manager",
    },
    "nemo.core": {},
    "nemo.core.config": {
        "hydra_runner": "nxd_jax.training._nemo:hydra_runner",
        **{name: f"nxd_jax.training.optim.params:{name}" for name in ("OptimizerParams", "AdamWParams", "SchedulerParams")},
    },
    "nemo.core.config.optimizers": {name: f"nxd_jax.training.optim.params:{name}" for name in ("OptimizerParams", "AdamWParams")},
    "nemo.core.config.schedulers": {"SchedulerParams": "nxd_jax.training.optim.params:SchedulerParams"},
    "nemo.core.optim": {
        name: f"nxd_jax.training.optim:{name}"
        for name in ("get_optimizer", "prepare_lr_scheduler", "register_optimizer", "register_scheduler")
    },
    "nemo.core.optim.optimizers": {name: f"nxd_jax.training.optim:{name}" for name in ("get_optimizer", "register_optimizer")},
    "nemo.core.optim.lr_scheduler": {name: f"nxd_jax.training.optim:{name}" for name in ("prepare_lr_scheduler", "register_scheduler")},
    "lightning_lite": {},
    "lightning_lite.plugins": {},
    "lightning_lite.plugins.environments": {"TorchElasticEnvironment": "lightning_fabric.plugins.environments:TorchElasticEnvironment"},
}
"""Modules, and where their names come from."""


def install() -> None:
    """Let those names be imported. Calling it again does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """The last to be asked, so that what is installed comes first."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if fullname not in _NAMES or not _importing():
            return None
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is not None and not isinstance(parent, _Module):  # an installed NeMo without that module
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=any(name.startswith(f"{fullname}.") for name in _NAMES))


def _importing() -> bool:
    """Whether an import asks, and not `importlib.util.find_spec`, which wants to know what is installed."""
    asking = sys._getframe(2).f_back
    return asking is not None and asking.f_code.co_name == "_find_and_load_unlocked"


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name, "A few names of NeMo, by nxd_jax (NeMo is not installed).")

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """Looks names up when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        names = _NAMES[self.__name__]
        if name in names:
            module, _, attribute = names[name].partition(":")
            found = getattr(importlib.import_module(module), attribute)
            setattr(self, name, found)
            return found
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self.__name__}.{name}: NeMo is not installed, and nxd_jax supplies only what NxD Training's own training.py takes from it "
            f"({', '.join(names) or 'no names here'}): install NeMo, or use neuronx_distributed_training's own modules"
        )

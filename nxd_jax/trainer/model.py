"""`neuronx_distributed.trainer.model`: the model of a run, whatever parallelism is behind it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nxd_jax._wrapper import Wrapper
from nxd_jax.pipeline.model import NxDPPModel


class NxDModel(Wrapper, nn.Module):
    """`neuronx_distributed.trainer.model.NxDModel`: a module that stands for the model it wraps.

    Names of parameters, buffers and modules, and the state dict, are the wrapped model's, without a prefix, also within a larger module (a LightningModule,
    say). Of a pipeline it stands for the whole model, which `run_train` and `run_eval` run; it has no forward then.

    Attributes that this class does not have are looked up there (`generate`, `lm_head`, ...), and set there if they exist there or are modules or
    parameters. Hooks on this module are called around the model. The model is put into training mode.
    """

    def __init__(self, module: nn.Module, nxd_config: dict[str, Any]):
        super().__init__()
        self.__dict__["pipeline"] = module if isinstance(module, NxDPPModel) else None
        self.module = module.original_torch_module if isinstance(module, NxDPPModel) else module
        self.nxd_config = nxd_config
        self.pp_enabled = nxd_config["pipeline_parallel_size"] > 1
        self.train()

    def __repr__(self) -> str:
        return f"NxDModel({self.module!r})"

    # -- running --------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.module if self.pipeline is None else self.pipeline)(*args, **kwargs)

    def run_train(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward; returns the loss: what the model returns, or its `.loss`, or the first of several. Gradients are added to those that are there.

        Raises TypeError if the model returns no scalar loss. Of a pipeline: `NxDPPModel.run_train`.
        """
        if self.pipeline is not None:
            found: torch.Tensor = self.pipeline.run_train(*args, **kwargs)
            return found
        loss = _loss_of(self(*args, **kwargs))
        loss.backward()
        return loss

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Forward alone, without gradients. (NxD: for pipelines only.)"""
        if self.pipeline is not None:
            return self.pipeline.run_eval(*args, **kwargs)
        with torch.no_grad():
            return self(*args, **kwargs)

    # -- the model inside -----------------------------------------------------------------------------

    def local_modules(self) -> list[nn.Module]:
        """The parts of the model that this process has: without a pipeline, all of it; with one, its stages."""
        return [self.module] if self.pipeline is None else self.pipeline.local_stage_modules

    def local_module(self) -> nn.Module:
        """The unwrapped model (or its first local part)."""
        return self.local_modules()[0]

    def original_module(self) -> nn.Module:
        """The model as `model_fn` made it."""
        return self.module

    def _nxd_inner(self) -> nn.Module:
        return self.module

    def _nxd_pipeline(self) -> NxDPPModel | None:
        return self.pipeline

    @property
    def dtype(self) -> torch.dtype:
        """The model's `dtype` if it says one, else its first floating-point parameter's (float32 without parameters)."""
        found = getattr(self.module, "dtype", None)
        if isinstance(found, torch.dtype):
            return found
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    @property
    def config(self) -> Any:
        """The configuration of a model of transformers."""
        return self.module.config

    @property
    def name_or_path(self) -> Any:
        """Where a model of transformers came from."""
        return self.module.name_or_path

    def __deepcopy__(self, memo: dict[int, Any]) -> NxDModel:
        """A copy of the model. The configuration is shared: it may name Python modules (`autowrap_modules`), which cannot be copied."""
        new = memo[id(self)] = object.__new__(type(self))
        memo[id(self.nxd_config)] = self.nxd_config
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return new

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_modules", {}).get("module")
        if inner is None or name == "module" or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif isinstance(value, (nn.Module, nn.Parameter)) or hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name == "module":
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self.module.add_module(name, module)

    register_module = add_module

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self.module.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        self.module.register_buffer(name, tensor, persistent)

    def get_submodule(self, target: str) -> nn.Module:
        return self.module.get_submodule(target)

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> None:
        self.module.set_submodule(target, module, strict)

    def get_parameter(self, target: str) -> nn.Parameter:
        return self.module.get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        return self.module.get_buffer(target)

    def apply(self, fn: Any) -> NxDModel:
        """Call `fn` with every module of the model, innermost first; returns self."""
        self.module.apply(fn)
        return self

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    # -- views: names without a prefix ----------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.module.parameters(recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return self.module.buffers(recurse)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_modules(*args, **kwargs)

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        return self.module.modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_children()

    def children(self) -> Iterator[nn.Module]:
        return self.module.children()

    def local_parameters(self, *args: Any, **kwargs: Any) -> Iterator[nn.Parameter]:
        """This rank's parameters; so for `local_named_parameters` and buffers, children and modules."""
        return self.parameters(*args, **kwargs)

    def local_named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.named_parameters(*args, **kwargs)

    def local_buffers(self, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
        return self.buffers(*args, **kwargs)

    def local_named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.named_buffers(*args, **kwargs)

    def local_children(self) -> Iterator[nn.Module]:
        return self.children()

    def local_named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.named_children()

    def local_named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self.named_modules(*args, **kwargs)

    # -- state ----------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.module.state_dict(*args, **kwargs)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state of what this rank has."""
        return self.state_dict(*args, **kwargs) if self.pipeline is None else self.pipeline.local_state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> Any:  # type: ignore[override]
        whole = self.module if self.pipeline is None else self.pipeline
        return whole.load_state_dict(state_dict, strict=strict, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """As a part of another module: entries have no `module.` in their names."""
        for key in [k for k in state_dict if k.startswith(prefix)]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def train(self, mode: bool = True) -> NxDModel:
        self.training = mode
        self.module.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> NxDModel:
        """What `.to(...)`, `.half()` and the like go through."""
        self.module._apply(fn, recurse)
        return self


def _loss_of(output: object) -> torch.Tensor:
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
        raise TypeError(
            f"run_train needs a model that returns its loss, a scalar, an output with `.loss` or a tuple that starts with it; got {found}"
        )
    return loss

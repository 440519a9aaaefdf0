"""`neuronx_distributed.modules.lora.model`: a model of which only low-rank adapters train."""

from __future__ import annotations

import collections
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from nxd_jax._wrapper import Adapted
from nxd_jax.modules.lora import loading, making, peft_format, storage, targets
from nxd_jax.modules.lora import state as lora_state
from nxd_jax.modules.lora.config import LoraConfig, as_config
from nxd_jax.modules.lora.layer import LoraLayer, inner_attribute
from torch_bridge.mesh import world

logger = logging.getLogger("nxd_jax")


class LoraModel(Adapted, nn.Module):
    """`lora.LoraModel` (`LoRAModel` in the documentation): a model with adapters in it; only they train. The model itself is changed.

    module: with its weights, on the device it will train on. config: a `LoraConfig` or a dict of its fields; with `load_lora_from_ckpt` the checkpoint's fields
    are taken, and its adapters loaded.

    Calls, `generate` and attributes are the model's. Attributes of its own: module, lora_config; is_checkpoint_loaded: whether the adapters came from a
    checkpoint, so that loading base weights leaves them; lora_ckpt: None, or a state dict of one, as NxD has there, which `load_state_dict` loads.

    Raises ValueError if no module matches `target_modules` or a module of another kind does, or if nothing would train; NotImplementedError for options of
    layers that cannot be adapted; ValueError for a pipeline, which is made of the model with adapters; TypeError for an NxDModel; FileNotFoundError without
    the checkpoint.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, config: LoraConfig | Mapping[str, Any]):
        super().__init__()
        config = as_config(config)
        making.check_model(module, config)
        source = storage.find(config.lora_save_dir, config.lora_load_tag) if config.load_lora_from_ckpt else None
        if source is not None:
            config = _config_of(source, config, module)
        self.lora_config = config
        self.module = module
        self._layers: dict[str, LoraLayer] = {}
        self._whole: dict[str, nn.Module] = {}
        self._holders: list[nn.Module] = []
        self._loading = loading.Loading()
        self.lora_ckpt: dict[str, Any] | None = None
        self.is_checkpoint_loaded = False
        self.inject_adapter()
        self.register_load_state_dict_pre_hook(loading.before)
        self.register_load_state_dict_post_hook(loading.after)
        if source is not None:
            self._load(source)

    # -- making --------------------------------------------------------------------------------------

    def inject_adapter(self) -> None:
        """Give the target modules adapters and freeze everything else. Called when the model is made; a second call does nothing."""
        if self._layers:
            return
        config, model = self.lora_config, self.module
        wanted = config.target_modules if config.target_modules is not None else targets.usual_targets(model)
        found = targets.find(model, wanted, "target_modules")
        self._whole = targets.find(model, config.modules_to_save, "modules_to_save") if config.modules_to_save else {}
        making.check_apart(found, self._whole)
        made = {module: making.adapter(name, module, config) for name, module in found.items()}
        targets.replace(model, made)
        self._layers = {name: made[module] for name, module in found.items()}
        making.connect_embeddings(model)
        self._choose_trained()
        if config.lora_verbose:
            logger.info("LoRA adapters for %d modules: %s", len(found), ", ".join(found))

    def _choose_trained(self) -> None:
        tensors = self.tensors()
        trained = {id(tensors[name]) for name in self._adapter_names()}
        making.check_trained(self.module, self._layers, tensors, trained)
        for parameter in self.module.parameters():
            parameter.requires_grad_(id(parameter) in trained)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and persistent buffers themselves, by their names in checkpoints: those of the model without adapters, and the adapters'."""
        return lora_state.tensors_of(self.module)

    def _adapter_names(self) -> list[str]:
        return lora_state.adapter_names(self.tensors(), self._layers, self._whole, self.lora_config.bias)

    # -- in the place of the model -------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return inner_attribute(self, module, name)

    def get_base_model(self) -> nn.Module:
        """The model inside, with its adapters."""
        return self.module

    @property
    def is_lora_enabled(self) -> bool:
        """Whether the model has its adapters."""
        return bool(self._layers)

    # -- merging -------------------------------------------------------------------------------------

    @property
    def is_lora_merged(self) -> bool:
        """Whether the base's weights contain the adapters now."""
        return any(layer.merged for layer in self._layers.values())

    def merge_lora(self) -> None:
        """Add the adapters to the base's weights, on every rank its part. Raises ValueError for weights that other modules share.

        The next forward, `unmerge_lora`, a load or a move undoes it, bit for bit; until then the weights that changed exist twice.
        """
        lora_state.refuse_tied(self._layers, self.module)
        for layer in self._layers.values():
            layer.merge()

    def unmerge_lora(self) -> None:
        """Undo `merge_lora`."""
        for layer in self._layers.values():
            layer.unmerge()

    def merge_and_unload(self) -> nn.Module:
        """Merge for good and return the model, without adapters and their cost; this wrapper is of no more use. (PEFT's name; NxD has none.)"""
        self.merge_lora()
        for layer in self._layers.values():
            layer._before_merging = {}
        for holder in (self.module, *self._holders):
            targets.replace(holder, {layer: layer.base_layer for layer in self._layers.values()})
        self._layers = {}
        return self.module

    def also_held_by(self, holders: Iterable[nn.Module]) -> None:
        """Other modules that have adapted layers in them, such as the stages of a pipeline: `merge_and_unload` takes the adapters out there, too."""
        self._holders += holders

    # -- counting ------------------------------------------------------------------------------------

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(entries of parameters that train, entries of all, adapters included), each of the whole model: what tensor and expert parallel ranks hold is
        added up, copies of K/V heads and tied weights count once. (NxD counts one rank's.)
        """
        found = [(p.requires_grad, lora_state.entries(p)) for p in self.module.parameters()]
        return sum(n for trains, n in found if trains), sum(n for _, n in found)

    def print_trainable_parameters(self) -> None:
        """Print the two numbers of `get_nb_trainable_parameters` and their ratio in per cent, on rank 0."""
        trained, every = self.get_nb_trainable_parameters()
        if world.first() == 0:
            print(f"trainable params: {trained:,} || all params: {every:,} || trainable%: {100 * trained / every:.4f}")  # noqa: T201

    # -- state dicts ---------------------------------------------------------------------------------

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """What `save_lora_base` and `merge_lora` say: the adapters; all; or the base model with the adapters merged. The model does not change.

        Names are those of the model without adapters; adapters have `.lora_A.` or `.lora_B.` in them. The adapters include `modules_to_save` and biases that
        train. With `save_lora_config_adapter`, adapters come with their configuration, a dict under "lora_config".
        Adapters alone are full tensors on the CPU where ranks share them out, with `merge_sharded_lora`; then all processes must call this.
        keep_vars: all parameters and buffers themselves, whatever the configuration says: what can be loaded into.
        """
        found: dict[str, Any] = collections.OrderedDict() if destination is None else destination
        config = self.lora_config
        if keep_vars:
            state = nn.Module.state_dict(self.module, keep_vars=True)
        elif config.merge_sharded_lora and not config.save_lora_base:
            state = self._full(self._saved())
        else:
            state = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in self._saved().items()}
        for name, value in state.items():
            found[prefix + name] = value
        if not keep_vars and self._config_inside():
            found[prefix + lora_state.CONFIG] = config.to_dict()
        return found

    def _config_inside(self) -> bool:
        """Whether the configuration goes where the adapters go. Merged ones have none."""
        return self.lora_config.save_lora_config_adapter and not self.lora_config.merge_lora

    def _saved(self) -> dict[str, Any]:
        """What the configuration says is saved: the parameters themselves, and merged ones as new tensors with their attributes."""
        state = nn.Module.state_dict(self.module, keep_vars=True)
        if self.lora_config.merge_lora:
            lora_state.refuse_tied(self._layers, self.module)
            inside = tuple(f"{name}.lora_" for name in self._layers)
            return {name: value for name, value in state.items() if not name.startswith(inside)} | lora_state.merged(self._layers)
        if not self.lora_config.save_lora_base:
            return {name: state[name] for name in self._adapter_names()}
        self.unmerge_lora()
        return state

    def _full(self, state: dict[str, Any]) -> dict[str, Any]:
        groups, known = lora_state.groups_of(self.module), self.tensors()

        def full(name: str, value: object) -> Any:
            like = known.get(name)
            if like is None or not isinstance(value, torch.Tensor):
                return value
            return lora_state.whole(value, like, groups.get(id(like))) if lora_state.is_divided(like) else value.detach()

        return {name: full(name, value) for name, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any] | None = None, strict: bool = False, assign: bool = False) -> Any:
        """Load what `state_dict()` gave, in any of its kinds; None: `lora_ckpt`, or else the checkpoint that the configuration names.

        Tensors may be full or each rank's part. Names of NxD's and PEFT's state dicts are understood.
        Missing names are those that the kind of state dict should have: of the base model's only if it has some. strict: raise RuntimeError for missing and
        unexpected ones; else they are logged. A state dict of the base model alone leaves adapters that came from a checkpoint (`is_checkpoint_loaded`), with
        the biases and `modules_to_save` that trained beside them; and `lora_ckpt` is loaded again. Other adapters it sets to zero, as their effect may be in
        it; and all of them if its configuration says that they are merged.
        Returns what is missing and unexpected.

        Raises ValueError if nothing in it belongs to the model, for another scaling of adapters, and for shapes that do not fit.
        """
        if state_dict is None:
            source = self._checkpoint()
            self._check_scaling(source.config, source.path)
            return self._load(source, strict, assign)
        found = super().load_state_dict(state_dict, strict=strict, assign=assign)
        for what, names in (("missing", found.missing_keys), ("unexpected", found.unexpected_keys)):
            if names:
                logger.warning("LoRA: %d %s names in the state dict, such as %s", len(names), what, ", ".join(names[:4]))
        return found

    def _checkpoint(self) -> storage.Source:
        given = self.lora_ckpt
        if given is not None:
            return storage.Source("lora_ckpt", given.get(lora_state.CONFIG), lambda model: given)
        return storage.find(self.lora_config.lora_save_dir, self.lora_config.lora_load_tag)

    def _load(self, source: storage.Source, strict: bool = False, assign: bool = False, anew: bool = True) -> Any:
        """Load a checkpoint. anew: if it has the base's weights alone, adapters start at zero, also those of another checkpoint."""
        kept = self.is_checkpoint_loaded and not anew
        self.is_checkpoint_loaded = kept
        state = source.read(self)
        found = self.load_state_dict(state, strict, assign) if state else _IncompatibleKeys([], [])
        self.is_checkpoint_loaded = kept or self._loading.adapters
        return found

    def checkpoint_state(self) -> dict[str, Any]:
        """What `save_checkpoint` is to write: the names of `state_dict`, but the parameters themselves, which say how ranks share them out.

        A configuration that does not go into the checkpoint is written to `<lora_save_dir>/adapter_config.json` now, by the process of rank 0.
        """
        self._save_separate_config(self.lora_config.lora_save_dir)
        inside = {lora_state.CONFIG: self.lora_config.to_dict()} if self._config_inside() else {}
        return self._saved() | inside

    def checkpoint_targets(self, names: Iterable[str], config: Any = None) -> dict[str, torch.Tensor]:
        """What `load_checkpoint` is to fill, by name, from a checkpoint with these names (and this "lora_config"): the tensors themselves.

        The adapters if it has some, the base model's if it has some; weights of the base alone do to adapters what they do in `load_state_dict`.
        Raises ValueError if it has neither, or adapters with another scaling.
        """
        self.unmerge_lora()
        self._check_scaling(config, "the checkpoint")
        known = self.tensors()
        fused = {re.sub(r"_[qkv]$", "_qkv", name) for name in names}
        stored = {lora_state.own_name(name, known) for name in {*names, *fused}}
        self._loading = loading.begin(self, stored, known, config)
        return {name: known[name] for name in known if name in self._loading.expected}

    def _save_separate_config(self, directory: str) -> None:
        if not self.lora_config.save_lora_config_adapter and not self.lora_config.merge_lora:
            storage.write_config(directory, self.lora_config.to_dict())

    def _check_scaling(self, saved: Any, where: str) -> None:
        if saved is None or peft_format.is_peft(saved) or loading.is_merged(saved):  # PEFT's adapters are scaled as they are loaded
            return
        other, own = storage.config_of(saved, where), self.lora_config
        if (other.lora_rank, other.scaling) != (own.lora_rank, own.scaling):
            raise ValueError(
                f"the adapters of {where} have {_shown(other)}, this model's {_shown(own)}: their products would be scaled wrongly. Pass the same values, or "
                "load_lora_from_ckpt=True, which takes the checkpoint's"
            )

    # -- files ---------------------------------------------------------------------------------------

    def save_lora(self, save_dir: str | None = None, adapter_tag: str | None = None) -> None:
        """Write `<save_dir>[/<adapter_tag>]/adapter_model.pt`: full tensors of what `state_dict` holds, for any number of ranks; and the configuration, in the
        file or as `<save_dir>/adapter_config.json`. All processes must call it. save_dir: default `lora_save_dir`.
        """
        directory = save_dir or self.lora_config.lora_save_dir
        data = {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in self._full(self._saved()).items()}
        if self._config_inside():
            data[lora_state.CONFIG] = self.lora_config.to_dict()
        self._save_separate_config(directory)
        path = storage.write(directory, adapter_tag, data)
        logger.info("LoRA: saved %s", path)

    def load_lora(
        self,
        save_dir: str | None = None,
        adapter_tag: str | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        adapter_only: bool = True,
    ) -> Any:
        """Load what `save_lora`, `save_checkpoint` or PEFT wrote into this model, whose configuration must fit. Defaults: `lora_save_dir`, `lora_load_tag`.

        ckpt_path: a file (of torch or safetensors), or a folder without tags, in place of these. adapter_only: what to do to adapters if there are weights of
        the base model alone. True: they are taken for merged ones, adapters start at zero. False: adapters stay that came from another checkpoint.
        Returns what is missing and unexpected. Raises FileNotFoundError saying what is there, and as `load_state_dict`.
        """
        config = self.lora_config
        if ckpt_path is not None:
            source = storage.at(ckpt_path)
        else:
            source = storage.find(save_dir or config.lora_save_dir, adapter_tag if adapter_tag is not None else config.lora_load_tag)
        self._check_scaling(source.config, source.path)
        return self._load(source, anew=adapter_only)


LoRAModel = LoraModel


def get_lora_model(model: nn.Module, lora_config: LoraConfig | Mapping[str, Any] | None) -> nn.Module:
    """`lora.get_lora_model`: a model with adapters; an `NxDModel` gets them inside, as its `module`, and is returned itself. Without a configuration, or with
    `enable_lora=False`, the model as it is.
    """
    if lora_config is None or not as_config(lora_config).enable_lora:
        return model
    if making.is_nxd_model(model):
        making.check_model(getattr(model, "pipeline", None) or model.module, as_config(lora_config))
        model.module = LoraModel(model.module, lora_config)  # type: ignore[arg-type]
        return model
    return LoraModel(model, lora_config)


# -- configurations ----------------------------------------------------------------------------------


def _config_of(source: storage.Source, config: LoraConfig, module: nn.Module) -> LoraConfig:
    if source.config is None:
        logger.warning("LoRA: no configuration with %s: that of this run is used", source.path)
        return config
    if peft_format.is_peft(source.config):
        return config.of_checkpoint(peft_format.config_from_peft(source.config, module))
    return config.of_checkpoint(storage.config_of(source.config, source.path))


def _shown(config: LoraConfig) -> str:
    return f"lora_rank={config.lora_rank}, lora_alpha={config.lora_alpha:g}, use_rslora={config.use_rslora}"

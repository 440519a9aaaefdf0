"""`neuronx_distributed.modules.lora.model`: a model of which only low-rank adapters train."""

from __future__ import annotations

import collections
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from nxd_jax.modules.lora import making, peft_format, storage, targets
from nxd_jax.modules.lora import state as lora_state
from nxd_jax.modules.lora.config import LoraConfig, as_config
from nxd_jax.modules.lora.layer import LoraLayer
from torch_bridge import sharded, world

logger = logging.getLogger("nxd_jax")

_OWN = "module."


class LoraModel(nn.Module):
    """`lora.LoraModel` (`LoRAModel` in the documentation): a model with adapters in it; only they train. The model itself is changed.

    module: with its weights, on the device it will train on. config: a `LoraConfig` or a dict of its fields; with `load_lora_from_ckpt` the checkpoint's fields
    are taken, and its adapters loaded.

    Calls, `generate` and attributes are the model's. Attributes of its own: module, lora_config.

    Raises ValueError if no module matches `target_modules` or a module of another kind does, NotImplementedError for options of layers that cannot be
    adapted and for pipeline models, FileNotFoundError without the checkpoint.
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
        self._loading = _Loading()
        self.inject_adapter()
        self.register_load_state_dict_pre_hook(_before_loading)
        self.register_load_state_dict_post_hook(_after_loading)
        if source is not None:
            self.load_state_dict(source.read(self))

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
            return getattr(module, name)

    def get_base_model(self) -> nn.Module:
        """The model inside, with its adapters."""
        return self.module

    # -- merging -------------------------------------------------------------------------------------

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
        targets.replace(self.module, {layer: layer.base_layer for layer in self._layers.values()})
        self._layers = {}
        return self.module

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

        def full(name: str, value: Any) -> Any:
            like = known.get(name)
            if like is None or not isinstance(value, torch.Tensor):
                return value
            return lora_state.whole(value, like, groups.get(id(like))) if lora_state.is_divided(like) else value.detach()

        return {name: full(name, value) for name, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any] | None = None, strict: bool = False, assign: bool = False) -> Any:
        """Load what `state_dict()` gave, in any of its kinds; None: the checkpoint that the configuration names.

        Tensors may be full or each rank's part. Names of NxD's and PEFT's state dicts are understood.
        Missing names are those that the kind of state dict should have: of the base model's only if it has some. strict: raise RuntimeError for missing and
        unexpected ones; else they are logged. A state dict of the base model alone (merged, say) sets the adapters to zero, as their effect may be in it.
        Returns what is missing and unexpected.

        Raises ValueError if nothing in it belongs to the model, for another scaling of adapters, and for shapes that do not fit.
        """
        if state_dict is None:
            source = storage.find(self.lora_config.lora_save_dir, self.lora_config.lora_load_tag)
            self._check_scaling(source.config, source.path)
            state_dict = source.read(self)
        found = super().load_state_dict(state_dict, strict=strict, assign=assign)
        for what, names in (("missing", found.missing_keys), ("unexpected", found.unexpected_keys)):
            if names:
                logger.warning("LoRA: %d %s names in the state dict, such as %s", len(names), what, ", ".join(names[:4]))
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

        The adapters if it has some, the base model's if it has some; as in `load_state_dict` the adapters start anew if it has weights of the base alone.
        Raises ValueError if it has neither, or adapters with another scaling.
        """
        self.unmerge_lora()
        self._check_scaling(config, "the checkpoint")
        known = self.tensors()
        fused = {re.sub(r"_[qkv]$", "_qkv", name) for name in names}
        stored = {lora_state.own_name(name, known) for name in {*names, *fused}}
        expected = self._expected(stored, known)
        return {name: known[name] for name in known if name in expected}

    def _expected(self, stored: Collection[str], known: Mapping[str, Any]) -> frozenset[str]:
        """Which of our names a state dict with these ones should have. Adapters whose base's weights come without them start anew."""
        if stored and not known.keys() & stored:
            there, here = ", ".join(list(stored)[:3]), ", ".join(self._adapter_names()[:3])
            raise ValueError(f"none of the {len(stored)} names in the state dict is in the model. It has {there}; the model has {here}")
        adapters = set(self._adapter_names())
        base = known.keys() - adapters
        if _adapts_nothing(stored, self._layers):
            _reset(self._layers)
        return frozenset((adapters if adapters & set(stored) else set()) | (base if base & set(stored) else set()))

    def _save_separate_config(self, directory: str) -> None:
        if not self.lora_config.save_lora_config_adapter and not self.lora_config.merge_lora:
            storage.write_config(directory, self.lora_config.to_dict())

    def _check_scaling(self, saved: Any, where: str) -> None:
        if saved is None or peft_format.is_peft(saved):  # PEFT's adapters are scaled as they are loaded
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

    def load_lora(self, save_dir: str | None = None, adapter_tag: str | None = None) -> None:
        """Load what `save_lora`, `save_checkpoint` or PEFT wrote into this model, whose configuration must fit. Defaults: `lora_save_dir`, `lora_load_tag`."""
        config = self.lora_config
        source = storage.find(save_dir or config.lora_save_dir, adapter_tag if adapter_tag is not None else config.lora_load_tag)
        self._check_scaling(source.config, source.path)
        self.load_state_dict(source.read(self))


LoRAModel = LoraModel


def get_lora_model(model: nn.Module, lora_config: LoraConfig | Mapping[str, Any] | None) -> nn.Module:
    """`lora.get_lora_model`: a model with adapters. Without a configuration, or with `enable_lora=False`, the model as it is."""
    if lora_config is None or not as_config(lora_config).enable_lora:
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


# -- loading -----------------------------------------------------------------------------------------


class _Loading(NamedTuple):
    """What `_before_loading` found: where the model is in the state dict, and the names (ours) that should be in it."""

    prefix: str = ""
    expected: frozenset[str] = frozenset()


def _before_loading(model: LoraModel, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Names and shapes of a state dict made those of the model: full tensors cut, `module.` inserted."""
    model.unmerge_lora()
    given = {name[len(prefix) :]: state.pop(name) for name in list(state) if name.startswith(prefix)}
    model._check_scaling(given.pop(lora_state.CONFIG, None), "the state dict")
    known = nn.Module.state_dict(model.module, keep_vars=True)
    groups = lora_state.groups_of(model.module)
    named = {lora_state.own_name(name, known): value for name, value in given.items()}
    model._loading = _Loading(prefix, model._expected(named, known))
    for name, value in named.items():
        like = known.get(name)
        state[f"{prefix}{_OWN}{name}"] = (
            lora_state.local(name, like, value, groups.get(id(like))) if isinstance(like, torch.Tensor) else value
        )


def _after_loading(model: LoraModel, keys: Any) -> None:
    """Leave of the missing names those that should be there; all as they are in state dicts."""
    prefix, expected = model._loading
    inner = prefix + _OWN
    shown = [(name, name[len(inner) :].replace(".base_layer.", ".") if name.startswith(inner) else None) for name in keys.missing_keys]
    keys.missing_keys[:] = [name if own is None else prefix + own for name, own in shown if own is None or own in expected]
    keys.unexpected_keys[:] = [prefix + name.removeprefix(inner) if name.startswith(inner) else name for name in keys.unexpected_keys]


def _adapts_nothing(named: Collection[str], layers: Mapping[str, LoraLayer]) -> bool:
    """Whether a state dict has weights of layers with adapters, but no adapters."""
    adapters = tuple(f"{name}.lora_" for name in layers)
    return not any(n.startswith(adapters) for n in named) and any(
        f"{name}.{last}" in named for name, layer in layers.items() for last in layer.base_layer._parameters if not lora_state.is_bias(last)
    )


def _reset(layers: Mapping[str, LoraLayer]) -> None:
    used = False
    with torch.no_grad():
        for layer in layers.values():
            for factor in getattr(layer, layer.zero_at_start).parameters():
                used = used or _any(factor)
                factor.zero_()
    if used:
        logger.warning(
            "LoRA: the state dict has weights of the base model alone. The adapters, which had been trained, start at zero again"
        )


def _any(t: torch.Tensor) -> bool:
    """Whether a tensor is not zero on some rank here."""
    values = sharded.shards(t.detach()) if t.device.type == "xla" else [t]
    return any(bool(v.any()) for v in values)

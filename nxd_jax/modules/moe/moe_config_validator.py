"""`neuronx_distributed.modules.moe.moe_config_validator`: whether the settings of a training script's mixture of experts can be run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from nxd_jax.utils.utils import get_dict_from_json

logger = logging.getLogger("nxd_jax")

_MISSING = object()


class MoeConfigValidator:
    """Checks `cfg.model.moe` of an NxD Training configuration: objects with attributes, OmegaConf sections or plain dicts.

    cfg.model_source: "hf" (cfg.model.model_config is the path of the model's config.json) or "megatron" (cfg.model.activation).
    """

    def __init__(self, cfg: Any):
        self.cfg = cfg
        self.hf_model_config: dict[Any, Any] = {}

    def validate_moe_config(self) -> None:
        """Raise for settings that contradict each other; with `dropless`, set capacity_factor to 0.0.

        Dropless (default False): the activation must be silu (swiglu will do for megatron models), and glu_mlp (default True) on. Otherwise
        capacity_factor must be positive, or None, which keeps all tokens at full capacity.

        Raises AttributeError without a moe section, ValueError for the rest, also for a capacity_factor that is no number (NxD: TypeError).
        """
        model = _get(self.cfg, "model")
        moe = _get(model, "moe") if model is not None else None
        if moe is None:
            raise AttributeError("the model's configuration has no moe section: add model.moe, or do not ask for mixture of experts")
        dropless = bool(_get(moe, "dropless", False))
        factor = _number(_get(moe, "capacity_factor"))
        if dropless:
            self._check_activation(model)
            if not _get(moe, "glu_mlp", True):
                raise ValueError("dropless=True needs glu_mlp=True: switch it on, or set dropless=False with a capacity_factor")
            if factor != 0.0:
                logger.warning("dropless mixture of experts: capacity_factor %s is set to 0.0", factor)
                _set(moe, "capacity_factor", 0.0)
        elif factor is not None and factor <= 0.0:
            raise ValueError(
                f"capacity_factor={factor} with dropless=False: it must be greater than 0.0, or None to drop nothing; or set dropless=True"
            )

    def _check_activation(self, model: Any) -> None:
        source = _get(self.cfg, "model_source")
        if source == "hf":
            self.hf_model_config = get_dict_from_json(_get(model, "model_config"))
            _check_silu(*_hugging_face_activation(self.hf_model_config), ("silu",))
        elif source == "megatron":
            _check_silu("model.activation", _get(model, "activation"), ("silu", "swiglu"))


def _hugging_face_activation(config: Mapping[str, Any]) -> tuple[str, Any]:
    """The name and value of the setting that says which activation the experts have."""
    if config.get("model_type") == "dbrx":
        return "ffn_config.ffn_act_fn.name of this dbrx model", config.get("ffn_config", {}).get("ffn_act_fn", {}).get("name")
    return "hidden_act", config.get("hidden_act")


def _check_silu(name: str, found: Any, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise ValueError(
            f"dropless=True needs {name} to be {' or '.join(allowed)}, got {found!r}; change it, or set dropless=False with a capacity_factor"
        )


def _number(factor: Any) -> float | None:
    if factor is None or (isinstance(factor, (int, float)) and not isinstance(factor, bool)):
        return factor
    raise ValueError(f"capacity_factor={factor!r} must be a number, or null to drop nothing")


def _get(section: Any, name: str, default: Any = None) -> Any:
    if isinstance(section, Mapping):
        return section.get(name, default)
    found = getattr(section, name, _MISSING)
    return default if found is _MISSING else found


def _set(section: Any, name: str, value: Any) -> None:
    if isinstance(section, MutableMapping):
        section[name] = value
    else:
        setattr(section, name, value)

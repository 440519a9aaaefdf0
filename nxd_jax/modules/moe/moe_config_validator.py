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
        """Raise for settings that contradict each other; with `dropless`, set a capacity_factor that is None or positive to 0.0.

        Dropless (default False): the activation must be silu (swiglu will do for megatron models), and glu_mlp (default True) on. Otherwise
        capacity_factor must be positive, or None, which keeps all tokens at full capacity.

        Raises AttributeError without a moe section, ValueError for the rest, also for a capacity_factor that is no number (NxD: TypeError). Texts begin as
        NxD's do.
        """
        model = _get(self.cfg, "model")
        moe = _get(model, "moe") if model is not None else None
        if moe is None:
            raise AttributeError(
                "MoE configuration is missing in model config: it has no moe section. Add model.moe, or do not ask for mixture of experts"
            )
        dropless = bool(_get(moe, "dropless", False))
        factor = _number(_get(moe, "capacity_factor"))
        if dropless:
            self._check_activation(model)
            if not _get(moe, "glu_mlp", True):
                raise ValueError(
                    "Dropless mode requires GLU_MLP to be True: set glu_mlp=True with dropless=True, or dropless=False with a capacity_factor"
                )
            if factor is None or factor > 0.0:  # those below 0 drop nothing, either
                logger.warning(
                    "Dropless mode expects a capacity_factor set to 0.0. Current value: %s. Setting capacity_factor to 0.0.", factor
                )
                _set(moe, "capacity_factor", 0.0)
        elif factor is not None and factor <= 0.0:
            raise ValueError(
                f"Dropping requires a capacity factor greater than 0.0, got capacity_factor={factor} with dropless=False: raise it, or set it to None to drop "
                "nothing, or set dropless=True"
            )

    def _load_hf_config(self) -> dict[Any, Any]:
        """What the config.json of the Hugging Face model holds. Raises ValueError for one that cannot be read."""
        return get_dict_from_json(_get(_get(self.cfg, "model"), "model_config"))

    def _check_activation(self, model: Any) -> None:
        source = _get(self.cfg, "model_source")
        if source == "hf":
            self.hf_model_config = self._load_hf_config()
            only = "Dropless mode is only supported with SiLU activation function"
            _check_silu(only, *_hugging_face_activation(self.hf_model_config), ("silu",))
        elif source == "megatron":
            only = "For Megatron models, dropless mode is only supported with SiLU or SwiGLU activation functions"
            _check_silu(only, "model.activation", _get(model, "activation"), ("silu", "swiglu"))


def _hugging_face_activation(config: Mapping[str, Any]) -> tuple[str, Any]:
    """The name and value of the setting that says which activation the experts have."""
    if config.get("model_type") == "dbrx":
        return "ffn_config.ffn_act_fn.name of this dbrx model", config.get("ffn_config", {}).get("ffn_act_fn", {}).get("name")
    return "hidden_act", config.get("hidden_act")


def _check_silu(only: str, name: str, found: Any, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise ValueError(
            f"{only}: with dropless=True {name} must be {' or '.join(allowed)}, got {found!r}; change it, or set dropless=False with a capacity_factor"
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

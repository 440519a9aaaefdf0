"""The values of a configuration with interpolations resolved, one by one, so that one that cannot be resolved hides no other."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nxd_jax.training.config.loading import register_resolvers
from nxd_jax.training.config.problems import Problems


def resolved(cfg: DictConfig, problems: Problems) -> dict[str, Any]:
    """A configuration as dicts and lists. What cannot be resolved is None and an error of `problems`."""
    register_resolvers()
    if not isinstance(cfg, DictConfig):
        cfg = OmegaConf.create(cfg)
    found: dict[str, Any] = _dict(cfg, "", problems)
    return found


def _dict(cfg: DictConfig, prefix: str, problems: Problems) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in cfg:
        key: Any = name
        path = f"{prefix}{key}"
        try:
            value = cfg[key]
        except OmegaConfBaseException as error:
            problems.error(path, _why(cfg._get_node(key), error))
            value = None
        except Exception as error:  # what a resolver raises
            problems.error(path, f"{_raw(cfg._get_node(key))} cannot be worked out: {error}")
            value = None
        found[str(key)] = _value(value, path, problems)
    return found


def _value(value: Any, path: str, problems: Problems) -> Any:
    if isinstance(value, DictConfig):
        return None if value._is_none() else _dict(value, f"{path}.", problems)
    if isinstance(value, ListConfig):
        try:
            return OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            problems.error(path, str(error).splitlines()[0])
            return None
    return value


def _raw(node: Any) -> str:
    return str(node._value())


def _why(node: Any, error: Exception) -> str:
    said = str(error).splitlines()[0]
    raw = _raw(node)
    if raw == "???":
        return "must be given: it is ???"
    return f"{raw} cannot be resolved: {said}"

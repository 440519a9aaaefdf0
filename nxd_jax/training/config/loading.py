"""From a YAML file and `key=value` words to a configuration, by Hydra's rules."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

SWEEP = "start one training for each value: for x in 1 2; do nxdt-train CONFIG.yaml KEY=$x exp_manager.name=NAME_$x; done"
"""What to do in place of Hydra's --multirun."""


class ConfigError(ValueError):
    """A configuration that cannot be read. Its text names the file and what to change."""


def register_resolvers() -> None:
    """`${multiply:a, b}`, which the original has from NeMo. Calling it again does nothing."""
    if not OmegaConf.has_resolver("multiply"):
        OmegaConf.register_new_resolver("multiply", lambda *factors: math.prod(factors))


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration in a YAML file with Hydra's overrides: `key=value`, `+new.key=value`, `~key`.

    Interpolations stay unresolved. Raises ConfigError for a file that is not there or no YAML, and for overrides that Hydra refuses.
    """
    register_resolvers()
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"there is no configuration file {file}{_beside(file)}")
    if file.suffix != ".yaml":
        raise ConfigError(f"{file} must have a name that ends with .yaml, the only files that Hydra reads: rename it")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(file.parent), version_base="1.2", job_name=file.stem):
            found = compose(file.stem, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{file}: {_said(error)}") from error
    except Exception as error:  # what the YAML reader raises
        if type(error).__module__.split(".")[0] != "yaml":
            raise
        raise ConfigError(f"{file} is no YAML: {error}") from error
    assert isinstance(found, DictConfig)
    return found


def plain(cfg: object) -> Any:
    """A configuration as dicts and lists, with interpolations resolved."""
    register_resolvers()
    return OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else cfg


def _beside(file: Path) -> str:
    found = sorted(f.name for f in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
    return f"; in {file.parent} there are {', '.join(found[:12])}" if found else ""


def _said(error: BaseException) -> str:
    """Hydra's words and those of its cause, each once."""
    override = getattr(error, "override", None)
    texts: list[str] = [] if override is None else [f"the override {override!r}"]
    at: BaseException | None = error
    while at is not None:
        text = str(at).strip()
        if text and not any(text in other for other in texts):
            texts.append(text)
        at = at.__cause__
    return "; ".join(texts).replace("To sweep over it, add --multirun to your command line", f"To sweep over it, {SWEEP}")


register_resolvers()  # configurations that Hydra made without us have them, too

"""`neuronx_distributed_training.utils.utils`: looking things up in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

_NONE = object()


def get_attribute_from_cfg(cfg: DictConfig | Mapping[str, Any], attr_name: str, default: Any = None) -> Any:
    """The value at a dotted path; if there is none, that of the first key anywhere in the tree with the path's last name; else the default.

    So keys such as `context_parallel_size`, `ring_attention`, `peft` and `seq_length` work in any section of a file.
    """
    found = value_at(cfg, attr_name, _NONE)
    if found is _NONE:
        found = _anywhere(cfg, attr_name.rpartition(".")[2])
    return default if found is _NONE else found


def value_at(cfg: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path of nested mappings; the default if there is none."""
    for key in path.split("."):
        if not _is_mapping(cfg) or key not in cfg:
            return default
        cfg = cfg[key]
    return cfg


def _anywhere(cfg: Any, key: str) -> Any:
    """Level by level, so that what stands higher wins."""
    level = [cfg]
    while level:
        for part in level:
            if key in part:
                return part[key]
        level = [part[name] for part in level for name in part if _is_mapping(_value(part, name))]
    return _NONE


def _value(part: Any, name: Any) -> Any:
    return part._get_node(name) if isinstance(part, DictConfig) else part[name]


def _is_mapping(value: Any) -> bool:
    return isinstance(value, (Mapping, DictConfig))

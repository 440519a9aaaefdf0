"""`neuronx_distributed_training.utils.utils`: keys of a configuration, dtypes and cores by their names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig

from nxd_jax.training.utils.throughput import Throughput

__all__ = ["Throughput", "get_attribute_from_cfg", "get_dtype", "get_lnc_size", "get_platform_target", "value_at"]

logger = logging.getLogger("nxd_jax")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By the names that YAML files have for them."""

_NONE = object()


def get_attribute_from_cfg(cfg: DictConfig | Mapping[str, Any], attr_name: str, default: Any = None) -> Any:
    """The value at a dotted path; if there is none, that of the first key anywhere in the tree with the path's last name; else the default.

    So keys such as `context_parallel_size`, `ring_attention`, `peft` and `seq_length` work in any section of a file.
    """
    found = value_at(cfg, attr_name, _NONE)
    if found is _NONE:
        found = _anywhere(cfg, attr_name.rpartition(".")[2])
    return default if found is _NONE else found


def get_dtype(dtype: str = "bf16") -> torch.dtype:
    """The dtype of a name: "fp32", "fp16" or "bf16". Another name is bfloat16, as in the original, with a warning."""
    if str(dtype).lower() not in DTYPES:
        logger.warning("dtype %r is none of %s: bf16 is taken", dtype, ", ".join(DTYPES))
    return DTYPES.get(str(dtype).lower(), torch.bfloat16)


def get_platform_target() -> str:
    """`torch_neuronx.utils.get_platform_target`: the chip that is emulated."""
    from torch_bridge.torch_neuronx import utils

    return utils.get_platform_target()


def get_lnc_size(lnc: int | None) -> int:
    """How many physical cores make a logical one: on trn2 lnc, or 2 for None; 1 on other chips, whatever lnc is. Raises ValueError for others than 1 and 2."""
    if lnc not in (None, 1, 2):
        raise ValueError(f"trainer.lnc={lnc}: a logical NeuronCore is one or two physical cores; give 1, 2 or null")
    return (lnc or 2) if get_platform_target() == "trn2" else 1


def _distributed_available() -> bool:
    """Whether ranks of this process can exchange tensors: `torch.distributed` is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


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

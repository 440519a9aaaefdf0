"""torch's `Optimizer.load_state_dict` for state of shards: one rank's file is not every rank's.

torch copies what it is given to the parameter's device. In a process that hosts several ranks all of them would get the moments of the rank whose file it
is. transformers' Trainer and Lightning call torch's function, so it is that one that must know.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_bridge.fsdp.state import is_one_ranks, is_shard
from torch_bridge.mesh import world

_NAME = "_process_value_according_to_param_policy"


def install() -> None:
    """Called when a module is wrapped. State of parameters that are no shards goes to torch's function, as before."""
    original = getattr(torch.optim.Optimizer, _NAME)
    if not hasattr(original, "_of_torch"):
        setattr(torch.optim.Optimizer, _NAME, staticmethod(_knowing_shards(original)))


def _knowing_shards(original: Any) -> Any:
    @functools.wraps(original)
    def loaded(param: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if value.dim() and is_shard(param):
            _check(value)
        found: torch.Tensor = original(param, value, *args, **kwargs)
        return found

    loaded._of_torch = original  # type: ignore[attr-defined]
    return loaded


def _check(value: torch.Tensor) -> None:
    """Raises ValueError for one rank's state of a shard where there are several."""
    if is_one_ranks(value):
        raise ValueError(
            f"optimizer.load_state_dict was given one rank's state of a shard (shape {list(value.shape)}), and this process hosts "
            f"{len(world.current().hosted)} ranks, which have different ones. Load every rank's file: "
            "ckpt = torch_bridge.each_rank(lambda rank: torch.load(path_of(rank)), xm.get_ordinal()); or cut the state of whole "
            "parameters: wrapper.cut_optimizer_state(whole, optimizer)"
        )

"""Models without weights: within `models_on_meta()` parameters that would be on the CPU are on "meta", and nothing is drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nxd_jax.tensor_parallel import sharded_weights
from nxd_jax.utils import model_utils


@contextlib.contextmanager
def models_on_meta() -> Iterator[None]:
    """As `model_utils.init_on_device("meta")`, but parameters made on xla stay there (they are abstract anyway), and no function mode is on, in whose frame
    every recorded op would have its source. Buffers are real.

    `.to("xla")` then gives abstract tensors of the same shapes; attributes, ties and integer parameters stay.
    """
    register = nn.Module.register_parameter
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or is_lazy(param) or param.device.type != "cpu" or not (param.is_floating_point() or param.is_complex()):
            register(module, name, param)
            return
        if id(param) not in moved:
            moved[id(param)] = param, model_utils._moved(param, torch.device("meta"))
        register(module, name, moved[id(param)][1])

    with contextlib.ExitStack() as block:
        block.callback(setattr, nn.Module, "register_parameter", register)
        nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
        block.enter_context(sharded_weights.shapes_only())
        yield

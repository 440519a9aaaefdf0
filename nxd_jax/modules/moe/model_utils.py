"""`neuronx_distributed.modules.moe.model_utils`: activations, kinds of gated MLPs, and the numbers that the other files start from."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F

ACT2FN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""What `hidden_act` may be."""

DEFAULT_BLOCK_SIZE = 512
"""Tokens in a block of the dropless path."""
DEFAULT_SELECTIVE_LOADING_THRESHOLD = 1.0
"""Below this share of experts in use (tokens * top_k / experts) a token that is generated reads the weights of its own experts only."""
DEFAULT_SKIP_MODE = (False, False)
"""Whether Neuron's kernel skips loads of tokens and of weights; without effect here."""
DEFAULT_LNC_SIZE = 1
"""Physical cores of a logical one; without effect here."""
DEFAULT_PADDING_VALUE = -1
"""In maps of blocks: places without a token."""
DEFAULT_HIDDEN_ACT_SCALING_FACTOR = 1.702
"""The factor in the gate of gpt-oss, the only one that Neuron's SWIGLU kernel knows."""


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of `ACT2FN` with this name. Raises ValueError, with all names, if there is none."""
    if name not in ACT2FN:
        raise ValueError(f"hidden_act={name!r} is not one of {', '.join(ACT2FN)}")
    return ACT2FN[name]


class _Named(Enum):
    """Members that may be given by their value or name, too."""

    @classmethod
    def validate(cls, value: Any) -> Any:
        """The member that is meant: itself, its value or its name in any case. Raises ValueError, with all values, for anything else."""
        if isinstance(value, cls):
            return value
        found = next((m for m in cls if isinstance(value, str) and value.lower() in (m.value, m.name.lower())), None)
        if found is None:
            raise ValueError(f"{cls.__name__}: {value!r} is not one of {', '.join(m.value for m in cls)}")
        return found


class GLUType(_Named):
    """How a gated MLP joins its gate and up projections, s and b being `hidden_act_scaling_factor` and `hidden_act_bias`."""

    GLU = "glu"
    """act(s * gate) * (up + b)."""
    SWIGLU = "swiglu"
    """gate * act(s * gate) * (up + b); with act = sigmoid, the form of gpt-oss."""


class ACTFunc(_Named):
    """The keys of `ACT2FN` as members."""

    GELU = "gelu"
    LEAKY_RELU = "leaky_relu"
    RELU = "relu"
    SIGMOID = "sigmoid"
    SILU = "silu"
    TANH = "tanh"


_KERNEL_IDS = {(ACTFunc.SILU, GLUType.GLU): 0, (ACTFunc.SIGMOID, GLUType.SWIGLU): 3}


def get_kernel_activation_func_id(act_fn: ACTFunc, glu_type: GLUType) -> int:
    """The number of an activation in Neuron's blockwise kernel. Raises ValueError for gates that it does not know; layers here take all of them."""
    if (act_fn, glu_type) not in _KERNEL_IDS:
        known = ", ".join(f"{act.name} for {glu.name}" for act, glu in _KERNEL_IDS)
        raise ValueError(f"Neuron's blockwise kernel knows {known}, not {act_fn} for {glu_type}")
    return _KERNEL_IDS[act_fn, glu_type]

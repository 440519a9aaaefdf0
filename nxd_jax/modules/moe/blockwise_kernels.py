"""Names of NxD's blockwise kernels: for which sizes they exist, and their products in torch. Dropless layers here need no kernel, for any size."""

from __future__ import annotations

import dataclasses
import enum
import logging
from typing import Any

import torch
import torch.nn.functional as F

from nxd_jax.modules.moe import dropless
from nxd_jax.modules.moe.grouped_product import grouped_product
from nxd_jax.modules.moe.model_utils import ACTFunc, GLUType, get_kernel_activation_func_id

logger = logging.getLogger("nxd_jax")

BLOCK_SIZES = (128, 256, 512, 1024)
_HIDDEN = range(512, 8193, 512)
_INTERMEDIATE_UNIT = 16


class ExpertAffinityScaleMode(enum.Enum):
    """Whether a kernel weighs results (POST_SCALE), inputs (PRE_SCALE) or neither with the affinities."""

    NO_SCALE = 0
    POST_SCALE = 1
    PRE_SCALE = 2


@dataclasses.dataclass(frozen=True)
class SkipMode:
    """Whether a kernel skips loads of tokens and of weights; without effect here."""

    skip_token: bool
    skip_weight: bool


def check_blockwise_mm_kernel_compatibility(hidden_size: int, block_size: int, intermediate_size_tp: int) -> None:
    """Raise AssertionError for sizes that NxD's kernel does not take: blocks of 128 to 1024 tokens, hidden sizes 512 to 8192 in steps of 512, and an
    intermediate size per tensor-parallel rank that 16 divides. Layers here take all sizes.
    """
    if block_size not in BLOCK_SIZES:
        raise AssertionError(f"block_size={block_size} must be one of {', '.join(map(str, BLOCK_SIZES))}")
    if hidden_size not in _HIDDEN:
        raise AssertionError(f"hidden_size={hidden_size} must be a multiple of 512 from 512 to 8192")
    if intermediate_size_tp % _INTERMEDIATE_UNIT:
        raise AssertionError(f"intermediate_size_tp={intermediate_size_tp} must be a multiple of {_INTERMEDIATE_UNIT}")


_NAMES = ("use_torch_block_wise", "device", "logical_nc_config", "use_block_parallel")


def can_use_blockwise_matmul_nki(
    hidden_size: int, intermediate_size_tp: int, block_size: int, glu_mlp: bool, *args: Any, **kwargs: Any
) -> bool:
    """Whether NxD's blockwise kernel takes an MLP, by the arithmetic of its releases: where it does not, NxD computes all experts for every token. Here both
    are grouped products of the routed tokens, so nothing depends on the answer; the reason of a no is in the log (level INFO).

    args: [glu_type,] use_torch_block_wise, device, logical_nc_config, use_block_parallel; older scripts leave glu_type out. kwargs: the same, and act_fn.
    A no for the CPU, MLPs without a gate, use_torch_block_wise, one physical core in a logical one (as on trn1), gates other than silu for GLU and sigmoid for
    SWIGLU, and for what `check_blockwise_mm_kernel_compatibility` refuses.
    """
    with_type = bool(args) and isinstance(args[0], (GLUType, str))
    given = dict(zip(("glu_type", *_NAMES) if with_type else _NAMES, args, strict=False)) | kwargs
    reason = _reason_against(hidden_size, intermediate_size_tp, block_size, glu_mlp, given)
    if reason:
        logger.info("NxD's blockwise kernel would not run: %s. Grouped products run here", reason)
    return not reason


def _reason_against(hidden_size: int, intermediate_size_tp: int, block_size: int, glu_mlp: bool, given: dict[str, Any]) -> str:
    if torch.device(given.get("device", "xla")).type == "cpu":
        return "the device is the CPU"
    if not glu_mlp:
        return "glu_mlp=False"
    if given.get("use_torch_block_wise", False):
        return "use_torch_block_wise=True"
    if int(getattr(given.get("logical_nc_config", 2), "value", given.get("logical_nc_config", 2))) == 1:
        return "logical_nc_config=1"
    try:
        kind = GLUType.validate(given.get("glu_type", GLUType.GLU))
        get_kernel_activation_func_id(ACTFunc.validate(given.get("act_fn", "sigmoid" if kind is GLUType.SWIGLU else "silu")), kind)
        check_blockwise_mm_kernel_compatibility(hidden_size, block_size, intermediate_size_tp)
    except (AssertionError, ValueError) as error:
        return str(error)
    return ""


class TorchBlockwiseTraining:
    """NxD's products of blocks in torch, with `apply` as an autograd function has it; gradients are autograd's."""

    @staticmethod
    def apply(
        hidden_states: torch.Tensor,
        expert_affinities_masked: torch.Tensor,
        token_position_to_id: torch.Tensor,
        block_to_expert: torch.Tensor,
        gate_up_proj_weight: torch.Tensor,
        down_proj_weight: torch.Tensor,
    ) -> torch.Tensor:
        """[T, H]: for each token the sum over its blocks of affinity * down(silu(gate(x)) * up(x)).

        hidden_states: [T, H]. expert_affinities_masked: [T, E]. token_position_to_id: [N * B] and block_to_expert: [N], as of
        `get_blockwise_expert_and_token_mapping`. gate_up_proj_weight: [E, H, 2 I]. down_proj_weight: [E, I, H].
        """
        experts = down_proj_weight.shape[0]
        size = token_position_to_id.shape[0] // block_to_expert.shape[0]
        expert, used = block_to_expert.reshape(-1).repeat_interleave(size), token_position_to_id >= 0
        token = token_position_to_id.clamp(min=0).long()
        assigned, ends = dropless.assign(torch.where(used, expert, experts).unsqueeze(1), experts, complete=False)
        rows = assigned.to_rows(hidden_states.index_select(0, token))
        gate, up = grouped_product(rows, gate_up_proj_weight, ends).chunk(2, dim=-1)
        out = assigned.to_tokens(grouped_product(F.silu(gate) * up, down_proj_weight, ends))
        weights = expert_affinities_masked[token, expert].masked_fill(~used, 0).unsqueeze(1)
        return torch.zeros_like(hidden_states).index_add(0, token, (out * weights).to(hidden_states.dtype))

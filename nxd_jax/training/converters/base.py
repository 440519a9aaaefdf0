"""`neuronx_distributed.scripts.checkpoint_converter.CheckpointConverterBase`, and the original's subclass for Mixtral."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch

from nxd_jax.training.converters import arguments, converting, hooked

logger = logging.getLogger("nxd_jax")

State = dict[str, torch.Tensor]

HOOKS = (
    "load_full_state",
    "pre_process_full_state_before_tp_conversion",
    "get_partition_dim",
    "post_process_full_state_after_tp_conversion",
)
_INSIDE = (
    *("get_hf_to_nxd_model_keys", "get_weight_key", "get_fused_qkv_key", "is_qkv_weight", "coalesce_qkv", "rename_keys_for_megatron"),
    *("modify_qkv_for_megatron", "is_q_or_o_for_megatron", "find_size", "convert_partial_state_to_non_fused_qkv"),
    *(
        "convert_partial_state_to_fused_qkv",
        "merge_tp_checkpoints",
        "convert_full_state_to_tp",
        "get_input_filename",
        "get_output_filename",
    ),
    *("load_partial_xser", "load_partial_no_xser", "prune_state", "save_full", "save_partial_xser", "save_partial_no_xser"),
    "download_and_save_hf_model",
)
"""Methods of the original's class that nothing calls here."""


class CheckpointConverterBase:
    """Converts between Hugging Face and NxD Training: `run(args)`, with a namespace of `get_arg_parser()`.

    Subclasses may override `get_arg_parser`, `load_full_state`, the two `..._full_state_..._tp_conversion` hooks, `get_partition_dim` and the partition dims,
    which say how tensor-parallel ranks share out tensors that hooks name. Without hooks one tensor at a time is in memory.
    """

    embedding_partition_dim = 0
    qkv_partition_dim = 0
    gate_up_proj_partition_dim = 0
    down_proj_partition_dim = 1
    o_proj_partition_dim = 1

    def get_partition_dim(self, name: str) -> int:
        """Along which dim tensor-parallel ranks share out a tensor. Raises AssertionError for names that are not known: every rank has all of those."""
        found = (
            (self.embedding_partition_dim, ("embed_tokens", "lm_head")),
            (self.qkv_partition_dim, ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")),
            (self.gate_up_proj_partition_dim, ("gate_proj", "up_proj")),
            (self.down_proj_partition_dim, ("down_proj",)),
            (self.o_proj_partition_dim, ("o_proj",)),
        )
        for dim, parts in found:
            if any(part in name for part in parts):
                return dim
        raise AssertionError(f"Unknown partition_dim for {name}")

    def get_arg_parser(self) -> argparse.ArgumentParser:
        """The command line; subclasses may add flags of their own."""
        return arguments.parser()

    def load_full_state(self, args: Any) -> State:
        """The Hugging Face state dict that a command line names, mapped to memory."""
        source = converting.source_of(args)
        return {name: source.read(name) for name in source.shapes}

    def pre_process_full_state_before_tp_conversion(self, state_dict: State, args: Any) -> State:
        """What the full state is to be before ranks share it out. args.config is the path of a config.json."""
        return state_dict

    def post_process_full_state_after_tp_conversion(self, state_dict: State, args: Any) -> State:
        """What the full state is to be before it is written as Hugging Face's."""
        return state_dict

    def run(self, args: Any) -> str:
        """Do what a command line asks for; returns the line that says what became what, which is also logged.

        Raises ValueError for flags and sizes that do not fit, FileExistsError for a target that holds weights already (without `force`), NotImplementedError
        for a subclass that overrides what nothing calls here.
        """
        self._check_overrides()
        asked = arguments.direction(args)
        if asked == "convert_from_full_state":
            line = self.convert_from_full_state(args)
        elif asked == "convert_to_full_state":
            line = self.convert_to_full_state(args)
        else:
            line = converting.change_form(args, asked == "convert_to_xser")
        logger.info("%s", line)
        return line

    def convert_from_full_state(self, args: Any) -> str:
        """Hugging Face to NxD Training."""
        own = self._overridden(*HOOKS[:3])
        return hooked.from_full_state(self, args, own) if own else converting.from_full_state(args)

    def convert_to_full_state(self, args: Any) -> str:
        """NxD Training to Hugging Face."""
        own = self._overridden(*HOOKS[2:])
        return hooked.to_full_state(self, args, own) if own else converting.to_full_state(args)

    def _overridden(self, *names: str) -> list[str]:
        return [name for name in names if getattr(type(self), name) is not getattr(CheckpointConverterBase, name)]

    def _check_overrides(self) -> None:
        own = [name for name in _INSIDE if hasattr(self, name)]
        if own:
            raise NotImplementedError(
                f"{type(self).__name__} overrides {', '.join(own)}, which nothing calls here: "
                f"a subclass may override {', '.join(HOOKS)}, and the partition dims"
            )


class CheckpointConverterNxDTMixtral(CheckpointConverterBase):
    """The original's subclass for Mixtral. Nothing of it is needed: `CheckpointConverterBase` stacks the experts of a model whose config.json has some."""

    gate_up_proj_partition_dim = 2
    down_proj_partition_dim = 1

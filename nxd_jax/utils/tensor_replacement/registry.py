"""`neuronx_distributed.utils.tensor_replacement.registry`: the tensors of the forward that is running."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RuntimeRegister:
    """`module_superset`: names of the modules whose outputs can be replaced, in the order in which tensors are given. One for the process."""

    _tr_runtime_list: dict[str, torch.Tensor] = {}
    _tr_mask_list: dict[str, torch.Tensor] = {}
    module_superset: list[str] = []

    @classmethod
    def register_runtime_args(cls, tr_args: Sequence[torch.Tensor], mask_args: Sequence[torch.Tensor]) -> None:
        """Copies of a tensor and a mask for each module, in place of those there are.

        Raises ValueError for another number, TypeError for what is no tensor.
        """
        count = len(cls.module_superset)
        if len(tr_args) != count or len(mask_args) != count:
            raise ValueError(
                f"Expected {count} tensors and {count} masks, got {len(tr_args)} and {len(mask_args)}: one of each for {cls.module_superset}"
            )
        for what, values in (("tensor", tr_args), ("mask", mask_args)):
            for name, value in zip(cls.module_superset, values, strict=True):
                if not isinstance(value, torch.Tensor):
                    raise TypeError(f"the {what} for {name} must be a torch.Tensor, got {type(value).__name__}")
        cls._tr_runtime_list = {name: tensor.detach().clone() for name, tensor in zip(cls.module_superset, tr_args, strict=True)}
        cls._tr_mask_list = {name: mask.detach().clone() for name, mask in zip(cls.module_superset, mask_args, strict=True)}

    @classmethod
    def clear_runtime_args(cls) -> None:
        """Forget the tensors and masks."""
        cls._tr_runtime_list = {}
        cls._tr_mask_list = {}

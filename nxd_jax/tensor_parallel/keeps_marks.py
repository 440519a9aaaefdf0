"""Parameters that stay marked where others are put in their place."""

from __future__ import annotations

from typing import Any

import torch


class KeepsMarks(torch.nn.Module):
    """A module whose parameters say how ranks hold them (`tensor_model_parallel`, `sequence_parallel_enabled`): `load_state_dict(assign=True)` puts others
    in their place, which then say the same. (Gradients would be summed and counted as those of parameters that all ranks share.)"""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        before = dict(self._parameters)
        super()._load_from_state_dict(*args, **kwargs)
        for name, old in before.items():
            new = self._parameters.get(name)
            if old is None or new is None or new is old:
                continue
            for key, value in vars(old).items():
                if not key.startswith("_") and not hasattr(new, key):
                    setattr(new, key, value)

"""What files of NxD Training's ranks hold, as far as their names and shapes tell: which projections, how many copies of K/V heads, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from nxd_jax.checkpoint import original_files, original_states
from nxd_jax.checkpoint.original_files import Files
from nxd_jax.checkpoint.original_states import ModelState
from nxd_jax.training.converters.held import Held
from nxd_jax.training.converters.sizes import Sizes


class RankFiles(Held):
    """The files of ranks."""

    def __init__(self, folder: Path, files: Files, state: ModelState):
        super().__init__(folder, {name: state.local(name) for name in state.parts})
        self.files = files
        self.state = state

    def copies(self, sizes: Sizes) -> int:
        """How many ranks hold each K/V head. Raises ValueError if the rows are no whole number of heads."""
        rows, full = sum(len(k) for k in self._keys(sizes)), sizes.kv_heads * sizes.head_dim
        if not rows:
            return 1
        if rows % full:
            raise ValueError(
                f"{self.folder}: all {self.files.sizes['tp']} ranks together hold {rows} rows of a K weight, and {sizes.kv_heads} K/V heads of "
                f"{sizes.head_dim} have {full}: is it the model's config.json (--config)?"
            )
        return rows // full

    def neighbours(self, sizes: Sizes, said: bool | None) -> bool:
        """Whether copies of a K/V head are with ranks side by side (trn2) or not (trn1). said: what the user says.

        Raises ValueError if the values say otherwise.
        """
        keys, copies = self._keys(sizes), self.copies(sizes)
        parts = len(keys) // copies
        if copies == 1 or parts == 1:
            return bool(said)
        side_by_side = _equal([keys[k * copies + c] for k in range(parts) for c in range(copies)], copies)
        round_the_ranks = _equal([keys[c * parts + k] for k in range(parts) for c in range(copies)], copies)
        if said is None:
            said = side_by_side and not round_the_ranks
        if not (side_by_side if said else round_the_ranks):
            other = "trn1" if said else "trn2"
            raise ValueError(
                f"{self.folder}: ranks do not hold copies of K/V heads as on {'trn2' if said else 'trn1'}"
                + (f", but as on {other}: give --hw_backend {other}" if side_by_side or round_the_ranks else ": the files are damaged")
            )
        return said

    def _keys(self, sizes: Sizes) -> list[torch.Tensor]:
        """The rows of K that each rank holds in the first layer that has any of its own; none where it is not by itself."""
        tp, q = self.files.sizes["tp"], sizes.heads * sizes.head_dim
        for name, held in self.state.parts.items():
            if name.endswith("qkv_proj.weight_k"):
                return [h.read() for h in held]
            if name.endswith("qkv_proj.weight_qkv"):
                local, rows = q // tp, (held[0].shape[0] - q // tp) // 2
                return [h.read()[local : local + rows] for h in held]
        return []

    def same(self, one: str, other: str) -> bool:
        """Whether ranks hold the same values in two tensors."""
        return original_states.same_values(self.state.parts[one], self.state.parts[other])


def _equal(keys: Sequence[torch.Tensor], copies: int) -> bool:
    """Whether every run of so many tensors is one tensor."""
    runs = [keys[k : k + copies] for k in range(0, len(keys), copies)]
    return all(torch.equal(own[0], other) for own in runs for other in own[1:])


def open_files(path: Path, trust: bool = False) -> RankFiles:
    """The files in a checkpoint's folder, or in its model/. Raises FileNotFoundError if there are none or some rank's is missing."""
    folder = path.parent if path.name == "model" and not original_files.is_original(path) else path
    files = original_files.find(folder, trust)
    if not files.model:
        raise FileNotFoundError(f"{folder} holds no files of a model")
    state = original_states.model_state(files.model)
    if differing := state.differing():
        raise ValueError(f"{folder}: " + "; ".join(differing[:8]))
    return RankFiles(folder, files, state)

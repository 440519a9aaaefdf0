"""What a checkpoint of NxD Training holds, as far as names tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nxd_jax.checkpoint import joining, reading
from nxd_jax.training.converters import megatron_plan
from nxd_jax.training.converters.entries import Plan, is_computed
from nxd_jax.training.converters.hf_plan import GQA, SEPARATE, STACKED


class Held:
    """The tensors of a checkpoint, without those that follow from the configuration. folder: what has model/ in it. shapes: of each tensor (of ranks' files:
    of a rank's). dims: how many dims each has."""

    def __init__(self, folder: Path, shapes: Mapping[str, Sequence[int]]):
        self.folder = folder
        self.shapes = {name: tuple(shape) for name, shape in shapes.items() if not is_computed(name)}
        self.dims = {name: len(shape) for name, shape in self.shapes.items()}

    @property
    def megatron(self) -> bool:
        """Whether it is a model of NxD Training's Megatron."""
        return any(name.startswith(f"{megatron_plan.ROOT}.") for name in self.dims)

    @property
    def attention(self) -> str:
        """Which projections the attention has: GQA, STACKED or SEPARATE."""
        ends = {name.rpartition("self_attn.")[2] for name in self.dims}
        if any(end.startswith("qkv_proj.weight_") for end in ends):
            return GQA
        return STACKED if "qkv_proj.weight" in ends else SEPARATE

    @property
    def fused(self) -> bool:
        """Whether q, k and v are one weight."""
        return any(name.endswith(("qkv_proj.weight_qkv", "qkv_proj.weight")) for name in self.dims)

    def check_names(self, plan: Plan) -> None:
        """Raise ValueError naming tensors that are missing, and those that the model has no place for."""
        sources = {e.ours: self._source(e.ours) for e in plan.entries}
        missing = [name for name, source in sources.items() if source not in self.dims]
        extra = [name for name in self.dims if name not in sources.values()]
        problems = [f"missing: {reading.listed(missing)}"] * bool(missing) + [f"not of this model: {reading.listed(extra)}"] * bool(extra)
        if problems:
            raise ValueError(f"{self.folder} does not fit the model's configuration: " + "; ".join(problems))

    def _source(self, name: str) -> str:
        """The name under which a tensor is there, by itself or fused."""
        fused = joining.fused_name(name)
        return name if name in self.dims or fused is None else fused[0]

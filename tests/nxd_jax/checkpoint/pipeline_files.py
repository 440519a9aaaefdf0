"""NxD's files of a pipeline, by hand: a file for each data-, tensor- and pipeline-parallel rank, from the facts of the layout, of `pipeline_job.Model`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tests.nxd_jax.checkpoint.pipeline_job import HIDDEN, LAYERS, WORDS
from tests.nxd_jax.checkpoint.test_original import rows, write

Full = dict[str, torch.Tensor]

_BLOCK = {
    "scale": (2,),
    "norm.weight": (HIDDEN,),
    "norm.bias": (HIDDEN,),
    "up.weight": (2 * HIDDEN, HIDDEN),
    "up.bias": (2 * HIDDEN,),
    "down.weight": (HIDDEN, 2 * HIDDEN),
}
SHAPES = {
    "embedding.weight": (WORDS, HIDDEN),
    "head.weight": (WORDS, HIDDEN),
    "norm.weight": (HIDDEN,),
    "norm.bias": (HIDDEN,),
    **{f"layers.{k}.{name}": shape for k in range(LAYERS) for name, shape in _BLOCK.items()},
}


def drawn(seed: int, tied: bool = False) -> Full:
    """A full tensor for each of the model's."""
    source = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}
    return {**found, "head.weight": found["embedding.weight"]} if tied else found


MOMENTS = {"exp_avg": drawn(1, True), "exp_avg_sq": {name: t.abs() for name, t in drawn(2, True).items()}}
"""An embedding that is also the head has the same moments on both of its ranks."""


@dataclasses.dataclass(frozen=True)
class Written:
    """Who wrote the files. stages: on each pipeline rank."""

    pp: int
    tp: int = 1
    dp: int = 1
    stages: int = 1
    zero1: bool = False
    tied: bool = False
    xser: bool = False

    def names(self, rank: int) -> list[str]:
        """What a pipeline rank has: its stages, in the order in which the model runs."""
        count = self.pp * self.stages
        size = LAYERS // count
        found = []
        for stage in range(rank, count, self.pp):
            found += ["embedding.weight"] if stage == 0 else []
            found += [f"layers.{k}.{name}" for k in range(stage * size, (stage + 1) * size) for name in _BLOCK]
            found += ["norm.weight", "norm.bias", "head.weight"] if stage == count - 1 else []
        return found

    def groups(self, rank: int) -> list[list[str]]:
        """The parameters of a pipeline rank: matrices, then vectors; a tied weight that the rank has twice counts once."""
        own = [name for name in self.names(rank) if not name.endswith("scale")]
        if self.tied and "embedding.weight" in own and "head.weight" in own:
            own.remove("head.weight")
        return [[n for n in own if len(SHAPES[n]) > 1], [n for n in own if len(SHAPES[n]) == 1]]

    def part(self, full: Full, name: str, rank: int) -> torch.Tensor:
        """What a tensor-parallel rank holds."""
        dim = 1 if name.endswith("down.weight") else 0 if ".up." in name else None
        return (full[name] if dim is None else full[name].chunk(self.tp, dim)[rank]).clone()

    def model(self, full: Full, tp: int, pp: int) -> Full:
        return {name: self.part(full, name, tp) for name in self.names(pp)}

    def optimizer(self, moments: dict[str, Full], tp: int, pp: int, dp: int) -> Any:
        """The state with parameters numbered from 0 on each pipeline rank."""
        groups, param_groups, k = self.groups(pp), [], 0
        for own, decay in zip(groups, (0.1, 0.0), strict=True):
            options = {"lr": 0.004, "initial_lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay, "amsgrad": False}
            param_groups.append({**options, "params": list(range(k, k + len(own)))})
            k += len(own)
        names = [name for own in groups for name in own]
        held = [{kind: self.part(full, name, tp) for kind, full in moments.items()} for name in names]
        if not self.zero1:
            return {"state": {k: {"step": torch.tensor(7.0), **own} for k, own in enumerate(held)}, "param_groups": param_groups}
        shapes = {k: own["exp_avg"].shape for k, own in enumerate(held)}
        cut = [{kind: rows(t, self.dp, dp) for kind, t in own.items()} for own in held]
        masters = {k: own.pop("master") for k, own in enumerate(cut) if "master" in own}
        found = {"state": {}, "param_groups": param_groups, "shape_info": shapes}
        found["base_state"] = {k: {"step": torch.tensor(7.0), **own} for k, own in enumerate(cut)}
        return {**found, "sharded_master_weights": masters} if masters else found

    def files(self, full: Full, moments: dict[str, Full] | None = None) -> dict[str, Any]:
        """What every file holds, by its path in the tag."""
        found = {}
        for pp in range(self.pp):
            for tp in range(self.tp):
                found[f"model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"] = self.model(full, tp, pp)
                for dp in range(self.dp if self.zero1 else 1) if moments else ():
                    assert moments is not None
                    found[f"optim/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"] = self.optimizer(moments, tp, pp, dp)
        return found

    def write(self, folder: Path, full: Full, moments: dict[str, Full] | None = None) -> Path:
        """A tag as NxD's save_checkpoint leaves it."""
        folder.mkdir(parents=True)
        (folder / "checkpoint").write_text("1")
        for name, data in self.files(full, moments).items():
            write(folder / name, data, self.xser)
        scheduler = {"last_epoch": 4, "_step_count": 5, "base_lrs": [0.01, 0.01], "_last_lr": [0.004, 0.004], "lr_lambdas": [None]}
        torch.save(scheduler, folder / "scheduler.pt")
        torch.save({"steps": 7}, folder / "user_content.pt")
        (folder / "done").write_text("1")
        return folder

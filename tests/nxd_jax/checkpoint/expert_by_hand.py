"""NxD's files of a model with experts, by hand, from the facts of the layout: what its `save_checkpoint` leaves of `modules/moe/training.Model`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tests.nxd_jax.checkpoint.test_original import rows
from tests.nxd_jax.modules.moe.training import EXPERTS, HIDDEN, WORDS
from torch_bridge.torch_xla.utils.serialization import TensorReference

Full = dict[str, torch.Tensor]

INSIDE = 12
_LAYER = {
    "norms.0.weight": (HIDDEN,),
    "norms.1.weight": (HIDDEN,),
    "up.weight": (2 * HIDDEN, HIDDEN),
    "down.weight": (HIDDEN, 2 * HIDDEN),
    "mlp.router.linear_router.weight": (EXPERTS, HIDDEN),
    "mlp.expert_mlps.mlp_op.gate_up_proj.weight": (EXPERTS, HIDDEN, 2 * INSIDE),
    "mlp.expert_mlps.mlp_op.down_proj.weight": (EXPERTS, INSIDE, HIDDEN),
}
BIAS = {"mlp.router.e_score_correction_bias": (EXPERTS,)}


def shapes(bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Of the undivided model's tensors. bias: routers have one to choose by."""
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (WORDS, HIDDEN)}
    for k in range(2):
        own = dict(_LAYER)
        if bias:
            items = list(own.items())
            own = dict([*items[:4], *BIAS.items(), *items[4:]])
        found |= {f"layers.{k}.{name}": shape for name, shape in own.items()}
    return {**found, "head.weight": (WORDS, HIDDEN)}


def drawn(seed: int, bias: bool = False) -> Full:
    """A full tensor for each of the model's."""
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in shapes(bias).items()}


def moments(seed: int = 1) -> dict[str, Full]:
    """Full state of AdamW for each parameter."""
    return {"exp_avg": drawn(seed), "exp_avg_sq": {name: t.abs() for name, t in drawn(seed + 1).items()}}


def is_expert(name: str) -> bool:
    return ".mlp_op." in name


@dataclasses.dataclass(frozen=True)
class Written:
    """Who wrote the files. dp: data-parallel ranks, expert-parallel ones among them. bias: routers have one to choose by. held: the experts of each
    expert-parallel rank, if not equal runs. steps: of the optimizer."""

    tp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    zero1: bool = False
    xser: bool = False
    bias: bool = False
    held: tuple[tuple[int, ...], ...] | None = None
    steps: int = 7

    def names(self, stage: int) -> list[str]:
        """What a pipeline rank has, in order."""
        every = list(shapes(self.bias))
        if self.pp == 1:
            return every
        return [n for n in every if n.startswith(("embedding", "layers.0.") if stage == 0 else ("layers.1.", "head"))]

    def groups(self, stage: int) -> list[list[str]]:
        """The optimizer's: matrices, then vectors."""
        own = [n for n in self.names(stage) if not n.endswith("correction_bias")]
        return [[n for n in own if len(shapes()[n]) > 1], [n for n in own if len(shapes()[n]) == 1]]

    def part(self, t: torch.Tensor, name: str, tp: int, ep: int) -> torch.Tensor:
        """What a rank holds of a full tensor."""
        if is_expert(name):
            size = EXPERTS // self.ep
            own = list(range(ep * size, (ep + 1) * size)) if self.held is None else list(self.held[ep])
            t = t[own]
            if name.endswith("down_proj.weight"):
                return t.chunk(self.tp, 1)[tp].clone()
            gate, up = t.chunk(2, 2)
            return torch.cat([gate.chunk(self.tp, 2)[tp], up.chunk(self.tp, 2)[tp]], 2)
        dim = 0 if name.endswith(".up.weight") else 1 if name.endswith(".down.weight") else None
        return t.clone() if dim is None else t.chunk(self.tp, dim)[tp].clone()

    def model(self, full: Full, tp: int, ep: int, stage: int) -> Full:
        return {name: self.part(full[name], name, tp, ep) for name in self.names(stage)}

    def _options(self, decay: float, numbers: list[int]) -> dict[str, Any]:
        return {"lr": 0.004, "initial_lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay, "params": numbers}

    def _groups(self, groups: list[list[str]]) -> list[dict[str, Any]]:
        found, k = [], 0
        for own, decay in zip(groups, (0.1, 0.0), strict=True):
            found.append(self._options(decay, list(range(k, k + len(own)))))
            k += len(own)
        return found

    def optimizer(self, state: dict[str, Full], tp: int, ep: int, stage: int) -> dict[str, Any]:
        """A rank's state of an optimizer without ZeRO-1."""
        names = [n for own in self.groups(stage) for n in own]
        kept = {
            k: {"step": torch.tensor(float(self.steps)), **{kind: self.part(full[n], n, tp, ep) for kind, full in state.items()}}
            for k, n in enumerate(names)
        }
        return {"state": kept, "param_groups": self._groups(self.groups(stage))}

    def zero(self, state: dict[str, Full], tp: int, dp: int, stage: int) -> dict[str, Any]:
        """What data-parallel rank `dp` has of ZeRO-1's state: that of two optimizers, the second one of experts alone, in one dict."""
        ep, edp = dp % self.ep, dp // self.ep

        def side(experts: bool) -> dict[str, Any]:
            groups = [[n for n in own if is_expert(n) is experts] for own in self.groups(stage)]
            base: dict[int, Any] = {}
            shape_info, master = {}, {}
            for k, n in enumerate(n for own in groups for n in own):
                parts = {kind: self.part(full[n], n, tp, ep) for kind, full in state.items()}
                shape_info[k] = next(iter(parts.values())).shape
                count, index = (self.dp // self.ep, edp) if experts else (self.dp, dp)
                cut = {kind: rows(t, count, index) for kind, t in parts.items()}
                if "master" in cut:
                    master[k] = cut.pop("master")
                base[k] = {"step": torch.tensor(float(self.steps)), **cut}
            found = {"state": {}, "param_groups": self._groups(groups), "base_state": base, "shape_info": shape_info}
            return {**found, "sharded_master_weights": master} if master else found

        if self.ep == 1:
            raise AssertionError("by hand with experts only")
        others, experts = side(False), side(True)

        def after(kept: dict[int, Any]) -> int:
            return max(kept) + 1 if kept else 1

        offsets = {
            "ep_param_id_offset": after(others["state"]),
            "ep_param_group_offset": len(others["param_groups"]),
            "ep_base_state_offset": after(others["base_state"]),
            "ep_shape_info_offset": after(others["shape_info"]),
        }
        found: dict[str, Any] = {**offsets, "param_groups": others["param_groups"] + experts["param_groups"]}
        starts = {"state": "ep_param_id_offset", "base_state": "ep_base_state_offset", "shape_info": "ep_shape_info_offset"}
        for key, start in {**starts, "sharded_master_weights": "ep_shape_info_offset"}.items():
            if key in others:
                found[key] = {**others[key], **{offsets[start] + k: v for k, v in experts[key].items()}}
        return found

    def files(self, full: Full, state: dict[str, Full] | None = None) -> dict[str, Any]:
        """What every file holds, by its path in the tag."""
        found: dict[str, Any] = {}
        for pp in range(self.pp):
            for tp in range(self.tp):
                for ep in range(self.ep):
                    middle = f"_ep_rank_{ep:02d}" if self.ep > 1 else ""
                    rank = f"dp_rank_00{middle}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
                    found[f"model/{rank}"] = self.model(full, tp, ep, pp)
                    if state is not None and not self.zero1:
                        found[f"optim/{rank}"] = self.optimizer(state, tp, ep, pp)
                for dp in range(self.dp) if state is not None and self.zero1 else ():
                    assert state is not None
                    found[f"optim/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"] = self.zero(state, tp, dp, pp)
        return found

    def write(self, folder: Path, full: Full, state: dict[str, Full] | None = None) -> Path:
        """A tag as NxD's save_checkpoint leaves it."""
        folder.mkdir(parents=True)
        (folder / "checkpoint").write_text("1")
        for name, data in self.files(full, state).items():
            write(folder / name, data, self.xser)
        scheduler = {"last_epoch": 4, "_step_count": 5, "base_lrs": [0.01, 0.01], "_last_lr": [0.004, 0.004], "lr_lambdas": [None]}
        torch.save(scheduler, folder / "scheduler.pt")
        torch.save({"steps": 7}, folder / "user_content.pt")
        (folder / "done").write_text("1")
        return folder


def write(path: Path, data: Any, xser: bool = False) -> None:
    """torch.save; or each tensor in a file of its own, below expert-parallel ranks after the first those of experts only, as info.pt says of a model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        torch.save(data, path)
        return
    of_model = path.parent.name == "model"
    later = "_ep_rank_" in path.name and "_ep_rank_00" not in path.name
    folder = path.with_name(path.name + ".tensors")
    folder.mkdir()
    info: dict[int, Any] = {}

    def taken(x: Any, name: object = "") -> Any:
        if isinstance(x, torch.Tensor):
            tid = len(info)
            info[tid] = {"dtype": x.dtype, "shape": x.shape, "expert_model_parallel": of_model and is_expert(str(name))}
            if not later or info[tid]["expert_model_parallel"]:
                torch.save(x, folder / f"tensor_{tid}.pt")
            return TensorReference(tid)
        if isinstance(x, dict):
            return {k: taken(v, k) for k, v in x.items()}
        return [taken(v) for v in x] if isinstance(x, list) else x

    torch.save(taken(data), path)
    torch.save(info, path.with_name(path.name + ".info.pt"))


def read(path: Path) -> Any:
    """A file as plain torch reads it, tensors of its own in place; None for those that are not there."""
    with torch.serialization.safe_globals([TensorReference]):
        data = torch.load(path, weights_only=True)

    def back(x: Any) -> Any:
        if isinstance(x, TensorReference):
            own = Path(f"{path}.tensors/tensor_{x.tid}.pt")
            return torch.load(own, weights_only=True) if own.exists() else None
        if isinstance(x, dict):
            return {k: back(v) for k, v in x.items()}
        return [back(v) for v in x] if isinstance(x, list) else x

    return back(data)

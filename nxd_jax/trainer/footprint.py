"""What a model, its gradients and its optimizer take of one core's memory, worked out from shapes before anything is made. (NxD has no such module.)

found = footprint(nxd_config, get_model, config, optimizer_class=torch.optim.AdamW)
print(found)                        # a table, and the total beside the core's memory
found.total, found.bytes_of("gradient")

Experts are counted as `ep` and `tp` share them out; with `tokens=` also what they keep for the backward pass.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nxd_jax.tensor_parallel import casting, full_weights, grads, layer_groups, parallel_groups
from nxd_jax.topology import Topology
from nxd_jax.trainer import building, expert_activations
from torch_bridge.collectives.row_shards import RowShards
from torch_bridge.mesh import sharding
from torch_bridge.recorder import sharded

KINDS = ("parameter", "buffer", "gradient", "master weight", "optimizer state")
EXPERT_ACTIVATION = "expert activation"
"""What routed experts keep for the backward pass: of a tensor that is there only within a step."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor that a core holds.

    name: of the parameter, buffer or module it belongs to. kind: one of `KINDS`, or `EXPERT_ACTIVATION`. shape, dtype: of what the core holds. axes: mesh axes
    along which cores hold different parts (or, for experts, different tensors), outermost first. label: of a tensor of the optimizer's state, its key; of an
    activation, which one.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...] = ()
    label: str = ""

    @property
    def bytes(self) -> int:
        """What it takes on a core."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one core holds between two steps, and what its experts keep within one, if `footprint` was told how many tokens there are. Other activations, what
    collectives need meanwhile and compiled programs are not in it.

    entries: every tensor. hbm_bytes: the core's memory. core: what kind of core. All cores hold as much; in a pipeline all of a rank along pp, and this is the
    rank that holds most. ranks: of a pipeline, of every rank; () without.
    """

    entries: tuple[Entry, ...]
    hbm_bytes: int
    core: str
    ranks: tuple[Footprint, ...] = ()

    @property
    def total(self) -> int:
        """Bytes per core."""
        return sum(e.bytes for e in self.entries)

    @property
    def left(self) -> int:
        """Bytes of the core's memory that are left for everything else; negative if it does not fit."""
        return self.hbm_bytes - self.total

    def bytes_of(self, kind: str) -> int:
        """Bytes per core of one kind of tensor. Raises ValueError for a word that is not in `KINDS` and not `EXPERT_ACTIVATION`."""
        if kind not in (*KINDS, EXPERT_ACTIVATION):
            raise ValueError(f"kind={kind!r} must be one of {', '.join(map(repr, (*KINDS, EXPERT_ACTIVATION)))}")
        return sum(e.bytes for e in self.entries if e.kind == kind)

    def __str__(self) -> str:
        """A table with a line for each group of parameters that differ in a number in their names alone."""
        lines = [*_aligned(_table(self)), _verdict(self)]
        if self.ranks:
            lines.append("pipeline ranks: " + ", ".join(f"{k} {_shown(rank.total)}" for k, rank in enumerate(self.ranks)))
        return "\n".join(lines)


def footprint(
    nxd_config: dict[str, Any],
    model_fn: Callable[..., torch.nn.Module],
    *model_args: Any,
    optimizer_class: type[torch.optim.Optimizer] | None = torch.optim.AdamW,
    optimizer_options: dict[str, Any] | None = None,
    topology: Topology | None = None,
    tokens: int | None = None,
    **model_kwargs: Any,
) -> Footprint:
    """What `initialize_parallel_model` and `initialize_parallel_optimizer` would put on a core of the current world, after a first step.

    The model is made on "meta", as with `meta_device_init`, and the optimizer steps there: no weights, no device. `model_fn`, `model_args` and
    `model_kwargs` are those of `initialize_parallel_model`. optimizer_class: None for inference, without gradients. optimizer_options: its options.
    topology: whose cores; default the one that the environment describes. tokens: of a micro-batch on a rank, sequences undivided: also count what experts keep
    of it from the forward to the backward pass; where layers are computed again in the backward pass, of the one that keeps most.

    With a pipeline the model is cut into its stages on "meta"; a weight that several of them use counts on each, for those after the first have a copy.

    Raises NotImplementedError for configurations with LoRA and for a model whose stages take a batch to be known, RuntimeError for an optimizer that makes no
    state from shapes alone.
    """
    building.check_config(nxd_config)
    building.lay_out(nxd_config)
    if nxd_config["lora_config"] is not None:
        raise NotImplementedError("footprint: adapters are not worked out yet; use a configuration without lora_config")
    model = building.on_meta(nxd_config, lambda: model_fn(*model_args, **model_kwargs))
    parameters = list(_parameters(model))
    buffers = [Entry(name, "buffer", tuple(b.shape), b.dtype) for name, b in model.named_buffers()]
    chosen = topology or Topology.from_environment()
    core = chosen.hbm_per_core, f"{chosen.chip.name} at LNC {chosen.lnc}"

    kept = [] if tokens is None else list(expert_activations.kept(model, tokens, nxd_config["activation_checkpoint_config"]))

    def of(own: list[Named], copies: list[Named]) -> Footprint:
        entries = [Entry(name, "parameter", tuple(p.shape), p.dtype, axes) for name, p, axes in (*own, *copies)] + buffers
        entries += _at_once(kept, {name for name, _, _ in own})
        if optimizer_class is not None:
            entries += _of_training(nxd_config, own, optimizer_class, optimizer_options or {})
            entries += [Entry(name, "gradient", tuple(p.shape), p.dtype, axes) for name, p, axes in copies if p.requires_grad]
        return Footprint(tuple(entries), *core)

    if parallel_groups.size("pp") == 1:
        return of(parameters, [])
    ranks = tuple(of(*shares) for shares in _by_rank(nxd_config, model, parameters))
    return dataclasses.replace(max(ranks, key=lambda rank: rank.total), ranks=ranks)


def _by_rank(nxd_config: dict[str, Any], model: torch.nn.Module, parameters: list[Named]) -> list[tuple[list[Named], list[Named]]]:
    """For each rank of the pipeline, the parameters that it has, and those of other ranks that it has copies of."""
    pipeline = building.pipeline_on_meta(nxd_config, model)
    try:
        modules = pipeline.local_stage_modules
    except RuntimeError as error:
        raise NotImplementedError(
            f"footprint: the stages of {type(model).__name__} are known only when there is a batch, for it is traced by running it; abstract_run says what "
            "every stage takes"
        ) from error
    known = {id(p): (name, p, axes) for name, p, axes in parameters}
    owner: dict[int, int] = {}
    own: list[dict[int, Named]] = [{} for _ in range(parallel_groups.size("pp"))]
    copies: list[dict[int, Named]] = [{} for _ in own]
    for module, rank in zip(modules, pipeline.schedule.placement, strict=True):
        for key in (id(p) for p in module.parameters()):
            (own if owner.setdefault(key, rank) == rank else copies)[rank][key] = known[key]
    return [(list(a.values()), list(b.values())) for a, b in zip(own, copies, strict=True)]


Named = tuple[str, torch.Tensor, tuple[str, ...]]
"""A parameter's name, the parameter, and the axes along which ranks hold different parts."""


def _parameters(model: torch.nn.Module) -> Iterator[Named]:
    """The parameters, tied ones once."""
    seen: set[torch.Tensor] = set()
    for path, module in model.named_modules():
        partitions = getattr(module, "_partitions", {})
        for name, p in module._parameters.items():
            if p is None or p in seen:
                continue
            seen.add(p)
            groups: list[Any] = []
            if full_weights.is_shared_out(p):
                groups.append(partitions[name].group if name in partitions else layer_groups.tensor_parallel())
            if grads.is_expert(p):
                groups.append(parallel_groups.group("ep"))
            yield f"{path}.{name}".lstrip("."), p, _along(groups)


def _at_once(kept: Iterable[expert_activations.Kept], parameters: set[str]) -> list[Entry]:
    """Of the experts that have these parameters, what they keep at the same time: all that is not computed again, and the layer that takes most of the rest."""
    layers: dict[tuple[bool, str], list[Entry]] = {}
    for k in kept:
        if any(name.startswith(f"{k.name}.") for name in parameters):
            layers.setdefault((k.recomputed, k.name), []).append(Entry(k.name, EXPERT_ACTIVATION, k.shape, k.dtype, label=k.label))
    again = [entries for (recomputed, _), entries in layers.items() if recomputed]
    most = max(again, key=lambda entries: sum(e.bytes for e in entries), default=[])
    return [e for (recomputed, _), entries in layers.items() if not recomputed for e in entries] + most


def _along(groups: Iterable[Any], more: Iterable[str] = ()) -> tuple[str, ...]:
    return sharding.ordered({*more, *(a for g in groups for a in sharded.axes_of(g))})


# -- training ------------------------------------------------------------------------------------------


def _of_training(
    nxd_config: dict[str, Any], parameters: list[Named], optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]
) -> Iterator[Entry]:
    """Gradients, and under ZeRO-1 each core's parts, and the optimizer's state of them or of the parameters."""
    zero1 = nxd_config["optimizer_config"]["zero_one_enabled"]
    precision = nxd_config["mixed_precision_config"]
    dtype = casting.wide_dtype() if precision["use_master_weights"] else torch.float32
    updated: list[Named] = []
    for name, p, axes in parameters:
        if p.requires_grad:
            yield Entry(name, "gradient", tuple(p.shape), dtype if precision["use_fp32_grad_acc"] else p.dtype, axes)
        held = p
        if zero1:
            cuts = RowShards(_zero1_groups(p))
            axes = _along([cuts.among], axes)
            held = torch.empty(cuts.shape(p.shape), dtype=dtype, device="meta")
            yield Entry(name, "master weight", tuple(held.shape), held.dtype, axes)
        if p.requires_grad:
            updated.append((name, held, axes))
    yield from _states(updated, optimizer_class, options)


def _zero1_groups(p: torch.Tensor) -> Any:
    """The ranks that share a parameter's optimizer state out."""
    if grads.is_expert(p):
        return parallel_groups.lists("edp")
    return parallel_groups.layout().zero1_lists()


def _states(held: list[Named], optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]) -> Iterator[Entry]:
    """What the optimizer keeps of each tensor once it has stepped. Step counters stay on the host."""
    copies = [torch.nn.Parameter(torch.empty_like(t, device="meta")) for _, t, _ in held]
    optimizer = optimizer_class(copies, **options)
    for p in copies:
        p.grad = torch.empty_like(p)
    try:
        optimizer.step()
    except Exception as error:  # some ask for numbers, but only after they have made their state
        if not all(optimizer.state.get(p) for p in copies):
            raise RuntimeError(
                f"footprint cannot work out the state of {optimizer_class.__name__}, whose step on 'meta' raises {type(error).__name__}: {error}. "
                "optimizer_class=None leaves gradients and optimizer out"
            ) from error
    for (name, _, axes), p in zip(held, copies, strict=True):
        for key, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield Entry(name, "optimizer state", tuple(value.shape), value.dtype, axes, str(key))


# -- the table -----------------------------------------------------------------------------------------


def _table(found: Footprint) -> list[list[str]]:
    columns = [*(k for k in KINDS if k != "buffer"), *([EXPERT_ACTIVATION] if found.bytes_of(EXPERT_ACTIVATION) else [])]
    rows: dict[tuple[Any, ...], list[Entry]] = {}
    others: dict[str, dict[str, int]] = {}
    for e in found.entries:
        others.setdefault(e.name, {}).setdefault(e.kind, 0)
        others[e.name][e.kind] += e.bytes
    for e in found.entries:
        if e.kind in KINDS[:2]:
            key = re.sub(r"\d+", "*", e.name), e.shape, e.dtype, e.axes, tuple(others[e.name].items())
            rows.setdefault(key, []).append(e)
        elif e.kind == EXPERT_ACTIVATION:
            rows.setdefault((re.sub(r"\d+", "*", e.name), e.shape, e.dtype, e.axes, e.label), []).append(e)
    table = [["tensor", "shape on a core", "dtype", "differs along", *(f"{k}s" for k in columns)]]
    for (pattern, shape, dtype, axes, _), entries in rows.items():
        several = len(entries) > 1
        of = f" {entries[0].label}" if entries[0].kind == EXPERT_ACTIVATION else ""
        sizes = {EXPERT_ACTIVATION: sum(e.bytes for e in entries)} if of else _sizes(entries, others)
        table.append(
            [
                f"{pattern if several else entries[0].name}{of}{f' ({len(entries)})' if several else ''}",
                "x".join(map(str, shape)) or "one number",
                str(dtype).removeprefix("torch."),
                ", ".join(axes) or "-",
                *(_shown(sizes.get(k, 0)) for k in columns),
            ]
        )
    sums = {k: found.bytes_of(k) for k in columns} | {"parameter": found.bytes_of("parameter") + found.bytes_of("buffer")}
    return [*table, ["all", "", "", "", *(_shown(sums[k]) for k in columns)]]


def _sizes(entries: Iterable[Entry], others: dict[str, dict[str, int]]) -> dict[str, int]:
    """By kind the bytes of all that belongs to parameters or buffers, which count as parameters."""
    found = {k: sum(others[e.name].get(k, 0) for e in entries) for k in KINDS}
    return found | {"parameter": found["parameter"] + found["buffer"]}


def _aligned(table: list[list[str]]) -> list[str]:
    """Lines of a table: texts to the left, sizes to the right."""
    widths = [max(len(row[c]) for row in table) for c in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(w) if c < 4 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in table
    ]


def _shown(size: int) -> str:
    if not size:
        return "-"
    return f"{size / 2**20:,.1f} MiB" if size >= 2**17 else f"{size / 2**10:,.1f} KiB"


def _verdict(found: Footprint) -> str:
    share = f"{found.total / 2**30:.2f} of {found.hbm_bytes / 2**30:g} GiB per core of {found.core} ({found.total / found.hbm_bytes:.0%})"
    if found.left < 0:
        return f"{share}: does not fit. More tensor-parallel ranks, ZeRO-1 over more data-parallel ranks, or bfloat16 parameters take less."
    return f"{share}; {found.left / 2**30:.2f} GiB are left for activations and everything else"

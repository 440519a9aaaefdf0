"""The norm of a divided model's gradients, clipping, and the reductions between `backward` and `step`.

The norm is that of the undivided model: parts are added up, and what several ranks hold alike counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nxd_jax.tensor_parallel import casting, parallel_groups
from torch_bridge.collectives import functional
from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh import places, world
from torch_bridge.mesh.places import Place
from torch_bridge.optimizers import grad_norm
from torch_bridge.recorder import placed

Parameters = torch.Tensor | Iterable[torch.Tensor]


def param_is_not_shared(param: torch.Tensor) -> bool:
    """False for the copies of a parameter that several pipeline stages share, except the first (attribute `shared`)."""
    return not getattr(param, "shared", False)


def get_grad_norm(
    parameters: Parameters,
    norm_type: float | str = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Any = None,
    force_spmd: bool = True,
) -> torch.Tensor:
    """The norm of all gradients of the whole model, as one vector: a tensor of shape [1], the same on all ranks; float32, or float64 for float64
    gradients.

    parameters: those of this rank (parameters without a gradient count nothing). norm_type: a positive number or 'inf'. Their attributes say how they are
    divided: `tensor_model_parallel` over the tensor-parallel ranks, `expert_model_parallel` over the expert-parallel ranks; all others
    (sequence-parallel ones too, whose gradients `allreduce_sequence_parallel_gradients` has added up) are copies, and copies with `shared` are left
    out. zero1_optimizer: gradients are shards over `zero1_optimizer_groups` (default: all data- and context-parallel ranks of a stage). force_spmd is
    accepted: both of NxD's ways give this number.

    Call it after gradients were reduced. Raises ValueError for a norm_type that is not positive.
    """
    parameters = _listed(parameters)
    grads = [(x, g) for x in parameters if param_is_not_shared(x) and (g := gradient(x)) is not None]
    return _norm(grads, parameters, _exponent(norm_type), _Divisions(zero1_optimizer, zero1_optimizer_groups))


def parameter_norm(parameters: Parameters, norm_type: float | str = 2) -> torch.Tensor:
    """The norm of all parameters of the whole model, as one vector: a tensor of shape [1], the same on all ranks. The arguments are `get_grad_norm`'s."""
    parameters = _listed(parameters)
    values = [(x, x.detach()) for x in parameters if param_is_not_shared(x)]
    return _norm(values, parameters, _exponent(norm_type), _Divisions(False, None))


def _norm(grads: list[tuple[torch.Tensor, torch.Tensor]], parameters: list[torch.Tensor], p: float, divisions: _Divisions) -> torch.Tensor:
    """The norm of what is given with each parameter, which lies as the parameter does (or in shards of ZeRO-1)."""
    wide = torch.float64 if any(g.dtype == torch.float64 for _, g in grads) else casting.wide_dtype()
    device = next((t.device for t in (*(g for _, g in grads), *parameters)), torch.device("xla" if world.size() > 1 else "cpu"))
    with torch.no_grad():
        by_stage = _by_stage(grads)
        if by_stage is None:
            total = _over(divisions.of_stage(_sums(grads, p, wide, device), p), divisions.stages, p)
        else:
            everywhere = by_stage.pop(None, [])
            sums = {place: divisions.of_stage(_sums(found, p, wide, device), p) for place, found in by_stage.items()}
            total = _over(placed.joined(sums, "pp"), divisions.stages, p)
            if everywhere:
                total = _combined([total, divisions.of_stage(_sums(everywhere, p, wide, device), p)], p)
        return (total if p == torch.inf else total ** (1 / p)).reshape(1)


def _by_stage(grads: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[Place | None, list[tuple[torch.Tensor, torch.Tensor]]] | None:
    """Gradients by the pipeline stage that they, or at least their parameters, lie with (a GradScaler's gradients are on all ranks), for stages of this process
    without any, too; under None those on all ranks. None: no pipeline."""
    if not places.in_use() or not all(g.device.type == "xla" for _, g in grads):
        return None
    lying = [placed.place_of(g) or (placed.place_of(x) if x.device.type == "xla" else None) for x, g in grads]
    if grads and not any(lying):
        return None
    found: dict[Place | None, list[tuple[torch.Tensor, torch.Tensor]]] = {place: [] for place in places.hosted("pp")}
    for pair, place in zip(grads, lying, strict=True):
        found.setdefault(place, []).append(pair)
    return found


def clip_grad_norm(
    parameters: Parameters,
    max_norm: float,
    norm_type: float | str = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Any = None,
    force_spmd: bool = True,
) -> torch.Tensor:
    """Scale gradients down, in place, so that their norm is at most `max_norm`; returns the norm before that (see `get_grad_norm`)."""
    parameters = _listed(parameters)
    norm = get_grad_norm(parameters, norm_type, zero1_optimizer, zero1_optimizer_groups, force_spmd)
    clip_grads_with_norm(parameters, norm, max_norm)
    return norm


def clip_grads_with_norm(parameters: Parameters, total_norm: Any, max_norm: float) -> None:
    """Multiply gradients, in place, by max_norm / (total_norm + 1e-6) if that is below 1."""
    grads = [g for x in _listed(parameters) if (g := gradient(x)) is not None]
    if not grads:
        return
    with torch.no_grad():
        norm = torch.as_tensor(total_norm, device=grads[0].device).reshape(())
        grad_norm.scale(grads, (float(max_norm) / (norm + 1e-6)).clamp(max=1.0))


# -- reductions -------------------------------------------------------------------------------------


def bucket_allreduce_gradients(grads_list: Sequence[torch.Tensor], reduce_over_ep_group: bool = False) -> None:
    """Average gradients over the data-parallel ranks, in place.

    With expert parallelism, experts (`reduce_over_ep_group=False`) are added up over the ranks that hold the same experts, and everything else
    (`reduce_over_ep_group=True`) over all; both are divided by the data-parallel size. Call `allreduce_context_parallel_gradients` first if there is
    context parallelism. Gradients of different dtypes may be mixed; NxD fills buckets of 512 MB itself, here the compiler combines reductions.
    """
    _no_numbers(grads_list)
    experts = parallel_groups.size("ep") > 1 and not reduce_over_ep_group
    group = parallel_groups.group("edp") if experts else parallel_groups.group("dp")
    functional.all_reduce("sum", list(grads_list), 1.0 / parallel_groups.size("dp"), group)


def average_over_data_parallel_ranks(parameters: Iterable[torch.Tensor]) -> None:
    """`bucket_allreduce_gradients` for all gradients of a model, in place: experts over the ranks that hold the same ones, everything else over all."""
    experts: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for x in parameters:
        if (g := gradient(x)) is not None:
            (experts if is_expert(x) else others).append(g)
    average_gradients(others, experts)


def average_gradients(others: Sequence[torch.Tensor], experts: Sequence[torch.Tensor]) -> None:
    """Average gradients over data-parallel ranks, in place: those of experts, and those of everything else."""
    if experts:
        bucket_allreduce_gradients(experts)
    if others:
        bucket_allreduce_gradients(others, reduce_over_ep_group=True)


def allreduce_sequence_parallel_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Add up over the tensor-parallel ranks, in place, the gradients of an optimizer's parameters with attribute `sequence_parallel_enabled`.

    Such parameters (layer norms, biases of row-parallel layers) are copies that each rank applied to its own part of the sequence.
    """
    grads = [g for x in _parameters_of(optimizer) if getattr(x, "sequence_parallel_enabled", False) and (g := gradient(x)) is not None]
    if grads:
        functional.all_reduce("sum", grads, groups=parallel_groups.group("tp"))


def allreduce_context_parallel_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Average the gradients of an optimizer's parameters over the context-parallel ranks, in place.

    Experts that are divided over expert-parallel ranks are only divided by the context-parallel size: their data-parallel groups cover the
    context-parallel ranks that hold the same experts (NxD adds up different experts' gradients there).
    """
    size = parallel_groups.size("cp")
    if size == 1:
        return
    pairs = [(x, g) for x in _parameters_of(optimizer) if (g := gradient(x)) is not None]
    divided = [g for x, g in pairs if is_expert(x)]
    with torch.no_grad():
        for g in divided:
            g.mul_(1.0 / size)
    copies = [g for x, g in pairs if not is_expert(x)]
    if copies:
        functional.all_reduce("sum", copies, 1.0 / size, parallel_groups.group("cp"))


# -- whose part is what -----------------------------------------------------------------------------


class _Kind(NamedTuple):
    """How a parameter is divided."""

    tensor: bool
    expert: bool


_KINDS = [_Kind(t, e) for t in (False, True) for e in (False, True)]
"""All of them: pipeline stages that hold different kinds still run the same collectives."""


def _kind(param: torch.Tensor) -> _Kind:
    return _Kind(bool(getattr(param, "tensor_model_parallel", False)), is_expert(param))


def is_expert(param: torch.Tensor) -> bool:
    """Whether expert-parallel ranks hold different ones of a parameter."""
    return bool(getattr(param, "expert_model_parallel", False)) and parallel_groups.size("ep") > 1


class _Divisions:
    """The groups that share out each kind of parameter, and those that hold copies."""

    def __init__(self, zero1: bool, zero1_groups: Any):
        self.tensor = rank_groups.resolve(parallel_groups.group("tp"))
        self.experts = rank_groups.resolve(parallel_groups.group("ep"))
        self.stages = rank_groups.resolve(parallel_groups.group("pp"))
        self.shards = rank_groups.resolve(zero1_groups or parallel_groups.layout().zero1_lists()) if zero1 else None

    def of_stage(self, sums: dict[_Kind, torch.Tensor], p: float) -> torch.Tensor:
        """What the sums of |g|^p (maxima for p = inf) of a stage's ranks come to. Copies are averaged, so that all of them get the same number."""
        if self.experts.size == 1:
            found = self._over_tensor_parallel({k: part for k, part in sums.items() if not k.expert}, p)
        else:
            experts, others = (self._over_tensor_parallel({k: part for k, part in sums.items() if k.expert is e}, p) for e in (True, False))
            if not self._shards_cover_experts():
                experts = _over(experts, self.experts, p)
            found = _combined([experts, others], p)
        if self.shards is not None:
            found = _over(found, self.shards, p)
        return found

    def _over_tensor_parallel(self, sums: dict[_Kind, torch.Tensor], p: float) -> torch.Tensor:
        """The sum over tensor-parallel ranks of experts, or of others: together, what all ranks have alike would count as different along ep."""
        share = 1.0 if p == torch.inf else 1.0 / self.tensor.size
        stacked = torch.stack([part if kind.tensor else part * share for kind, part in sums.items()])
        return _combined(list(_over(stacked, self.tensor, p).unbind(0)), p)

    def _shards_cover_experts(self) -> bool:
        """Whether adding up over the ZeRO-1 groups adds up over the expert-parallel ranks too."""
        members = self.experts.members[0]
        return self.shards is not None and set(members) <= set(self.shards.of(members[0]))


def _over(part: torch.Tensor, among: rank_groups.Groups, p: float) -> torch.Tensor:
    if among.size == 1:
        return part
    return functional.all_reduce("max" if p == torch.inf else "sum", part, groups=[list(m) for m in among.members])


# -- sums of powers ---------------------------------------------------------------------------------


def _exponent(norm_type: float | str) -> float:
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be a positive number or 'inf', got {norm_type!r}")
    return p


def shares_of(param: torch.Tensor) -> Any:
    """What a part of a K/V weight that several tensor-parallel ranks hold alike counts on each: a number, or one for each row of a fused q, k and v.

    1.0 for everything else. A shard of such a parameter says it in `norm_shares`. (NxD counts every copy.)
    """
    said = getattr(param, "norm_shares", None)
    if said is not None:
        return said
    fused = getattr(param, "qkv_partition", None)
    if fused is not None:
        q, kv, copies = fused
        return 1.0 if copies == 1 else torch.tensor([1.0] * q + [1.0 / copies] * (2 * kv), device=param.device)
    if not getattr(param, "tensor_model_parallel", False) or getattr(param, "num_partitions", -1) < 1:
        return 1.0
    return min(param.num_partitions / parallel_groups.size("tp"), 1.0)  # type: ignore[attr-defined]


def _sums(
    grads: Sequence[tuple[torch.Tensor, torch.Tensor]], p: float, dtype: torch.dtype, device: torch.device
) -> dict[_Kind, torch.Tensor]:
    """The sum of |g|^p (the maximum for p = inf) of each kind of parameter that this rank holds."""
    parts: dict[_Kind, list[torch.Tensor]] = {kind: [torch.zeros((), dtype=dtype, device=device)] for kind in _KINDS}
    for (x, _), part in zip(grads, _powers(grads, p, dtype), strict=True):
        parts[_kind(x)].append(part)
    return {kind: _combined(found, p) for kind, found in parts.items()}


def _powers(grads: Sequence[tuple[torch.Tensor, torch.Tensor]], p: float, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """For each parameter's gradient the sum of |g|^p, each entry as often as it counts; the maximum of |g| for p = inf."""
    shares = [1.0 if p == torch.inf else shares_of(x) for x, _ in grads]
    whole = [g for (_, g), share in zip(grads, shares, strict=True) if not isinstance(share, torch.Tensor)]
    sums = iter(grad_norm.sum_powers(whole, p, dtype))
    for (_, g), share in zip(grads, shares, strict=True):
        if isinstance(share, torch.Tensor):
            g = g.to(dtype)
            rows = ((g * g) if p == 2 else g.abs() ** p).reshape(g.shape[0], -1).sum(1)
            yield (rows * share.to(dtype)).sum()
        else:
            yield next(sums) if share == 1.0 else next(sums) * share


def _combined(parts: list[torch.Tensor], p: float) -> torch.Tensor:
    stacked = torch.stack(parts)
    return stacked.amax() if p == torch.inf else stacked.sum()


# -- parameters and their gradients -----------------------------------------------------------------


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def gradient(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient, or what ZeRO-1 collects in its place (`main_grad`)."""
    return param.grad if param.grad is not None else getattr(param, "main_grad", None)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [x for group in optimizer.param_groups for x in group["params"]]


def _no_numbers(grads: Sequence[Any]) -> None:
    if not all(isinstance(g, torch.Tensor) for g in grads):
        raise TypeError(f"bucket_allreduce_gradients takes gradients, got {sorted({type(g).__name__ for g in grads})}")

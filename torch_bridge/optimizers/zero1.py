"""ZeRO-1: ranks that hold the same parameters share out the optimizer's work and state.

Every parameter is cut by rows (padded until they divide) among the ranks of a group. A rank keeps its part in `optimizer_dtype`, the master
weights, with the optimizer's state for it. A step reduce-scatters gradients, updates the parts and all-gathers the new weights.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from torch_bridge.collectives import functional
from torch_bridge.collectives.row_shards import BUCKET, RowShards
from torch_bridge.mesh import groups as rank_groups
from torch_bridge.mesh.groups import GroupLike
from torch_bridge.optimizers import fused_step, param_partition
from torch_bridge.optimizers import grad_norm as clipping
from torch_bridge.optimizers.scaled_steps import StepsTogether
from torch_bridge.recorder import autograd_engine
from torch_bridge.runtime import backend, executor

__all__ = ["ZeroRedundancyOptimizer"]

_KEPT = {"params", "fused", "foreach"}
"""Options that the inner optimizer's groups have by themselves."""


class ZeroRedundancyOptimizer(StepsTogether, torch.optim.Optimizer):
    """`torch_xla.distributed.zero_redundancy_optimizer.ZeroRedundancyOptimizer`.

    params: parameters on xla, or groups of them. optimizer_class, defaults: what updates the parts, and its options; torch's SGD, Adam, AdamW, Adagrad
    and Adafactor take a step that is recorded as one op. optimizer_dtype: of parts and state, float32 by default. grad_clipping, max_norm: clip the
    global norm, to 1.0 by default. sharding_groups: lists of the ranks that share parameters out, default one group of all; gradients are averaged over
    a group. grad_norm_groups: ranks over which squared norms are added up besides. lazy_init: cut only when `init_zero()` is called.
    bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter: megabytes of tensors that one collective moves (0: 130). use_grad_acc_hook: gradients are added
    up in `param.main_grad`, of `optimizer_dtype`, at the end of each backward pass, and `param.grad` is None afterwards. higher_cc_precision: gradients are
    reduced in `optimizer_dtype`, else in their own. save_master_weights: `state_dict()` holds the parts. pin_layout is accepted without effect.

    `param_groups` are the full parameters' (schedulers change their options there); `base_optimizer` updates the parts. What else is written into a parameter
    (`load_state_dict`, a clamp, `copy_`, through `.data` too) counts: the next step starts from it. Parameters that have no gradient are left alone. `device`
    is theirs. `grad_norm` is the norm before clipping, shape [1], None before the first step and without clipping.

    An optimizer that works element by element gives the numbers that it gives on whole parameters; so does torch's Adafactor. One of your own that takes
    norms, means or products over a parameter sees rows of it, and padding, here: use it without ZeRO-1.

    Raises RuntimeError for parameters that are not on xla, NotImplementedError for optimizers known to need whole parameters (Muon, LBFGS, SparseAdam, LAMB,
    Shampoo, ...).
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Any = None,
        grad_norm_groups: Any = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: int = 0,
        bucket_cap_mb_reduce_scatter: int = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        **defaults: Any,
    ):
        defaults.pop("coalesce_cc", None)  # an option of older releases: several tensors in one collective, which is always so here
        super().__init__(params, defaults)
        self.optimizer_class = optimizer_class
        self.optimizer_dtype = optimizer_dtype or torch.float32
        self.grad_clipping = grad_clipping
        self.max_norm = 1.0 if max_norm is None else max_norm
        self.sharding_groups = sharding_groups
        self.grad_norm_groups = grad_norm_groups
        self.use_grad_acc_hook = use_grad_acc_hook
        self.save_master_weights = save_master_weights
        self.higher_cc_precision = higher_cc_precision
        self._gather_bytes = bucket_cap_mb_all_gather * 2**20 or BUCKET
        self._scatter_bytes = bucket_cap_mb_reduce_scatter * 2**20 or BUCKET
        self._options = dict(defaults)  # torch keeps the other one
        self._grad_norm: torch.Tensor | None = None
        self._zeros: dict[torch.Tensor, torch.Tensor] = {}
        self._fed: set[torch.Tensor] = set()  # what has had a gradient since `zero_grad`
        self._check_parameters(self._all())
        self.device = self._all()[0].device
        self._check_class()
        self.base_optimizer: torch.optim.Optimizer
        self.inited = False
        self._watch(self._all())
        if not lazy_init:
            self.init_zero()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The gradients' norm at the last step, before clipping."""
        return self._grad_norm

    def stepping_together(self) -> Sequence[GroupLike]:
        """Ranks that share parameters out, and those whose norms are added up."""
        return (self.sharding_groups,) if self.grad_norm_groups is None else (self.sharding_groups, self.grad_norm_groups)

    def shards_of(self, param: torch.Tensor) -> RowShards:
        """How a parameter is cut."""
        return RowShards(self.sharding_groups)

    def init_zero(self) -> None:
        """Cut the parameters as they are now, and start the optimizer's state anew."""
        self.inited = False  # until all is done: what is interrupted is done again
        self.shard_of: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._cuts: dict[torch.Tensor, RowShards] = {}
        self._written: dict[torch.Tensor, Any] = {}
        groups = [self._cut_group(group) for group in self.param_groups]
        self.base_optimizer = self.optimizer_class(groups, **self._options)
        self._fill_in_options()
        self.inited = True
        executor.sync()  # so that the first step is the same program as all others

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are cut as all others; the state of the others stays."""
        super().add_param_group(param_group)
        if not hasattr(self, "inited"):  # while torch's constructor adds the first ones
            return
        new = self.param_groups[-1]
        self._check_parameters(new["params"])
        self._watch(new["params"])
        if self.inited:
            self.base_optimizer.add_param_group(self._cut_group(new))
            self._fill_in_options()

    def prepare(self) -> None:
        """Cut what is not cut yet: all parameters, or those of groups that somebody assigned to `param_groups` (Lightning's BaseFinetuning after a resume).
        The state of the others stays."""
        if not self.inited:
            self.init_zero()
            return
        parts = [[id(self.shard_of.get(p)) for p in group["params"]] for group in self.param_groups]
        if parts == [[id(part) for part in group["params"]] for group in self.base_optimizer.param_groups]:
            return
        new = [p for p in self._all() if p not in self.shard_of]
        self._check_parameters(new)
        self._watch(new)
        self.base_optimizer.param_groups = [self._cut_group(group, set(self.shard_of)) for group in self.param_groups]
        self._fill_in_options()

    def _cut_group(self, group: dict[str, Any], known: Container[torch.Tensor] = ()) -> dict[str, Any]:
        """The same options for the parts of a group's parameters. known: parameters that are cut already."""
        for p in group["params"]:
            if p in known:
                continue
            self._cuts[p] = self.shards_of(p)
            self.shard_of[p] = self._new_shard(p)
            self._written[p] = _writes(p)
        return {**group, "params": [self.shard_of[p] for p in group["params"]]}

    def _new_shard(self, p: torch.Tensor) -> torch.nn.Parameter:
        cuts = self._cuts[p]
        with torch.no_grad():
            shard = torch.nn.Parameter(cuts.cut(p.detach()).to(self.optimizer_dtype), requires_grad=p.requires_grad)
        param_partition.mark(shard, self.whole_of(p).cut(0, cuts.among))
        return shard

    @torch.no_grad()
    def take_writes(self) -> None:
        """Take over what others wrote into parameters since they were cut, or since the last step. A part stays where the parameter holds it, rounded."""
        for p in self._all() if self.inited else ():
            if _writes(p) != self._written[p]:
                shard, written = self.shard_of[p], self._cuts[p].cut(p.detach())
                shard.copy_(torch.where(shard.to(p.dtype) == written, shard, written.to(shard.dtype)))
                self._written[p] = _writes(p)

    def whole_of(self, p: torch.Tensor) -> param_partition.Divided:
        """What a parameter is itself a part of."""
        return param_partition.of(p)

    def _fill_in_options(self) -> None:
        """Options that the inner optimizer's class gave its groups, for schedulers to find."""
        for key, value in self.base_optimizer.defaults.items():
            if key not in _KEPT:
                self.defaults.setdefault(key, value)  # OneCycleLR looks here for momentum or betas
        for own, base in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            for key, value in base.items():
                own.setdefault(key, value)

    def _watch(self, params: Sequence[torch.Tensor]) -> None:
        """Have gradients added up when backward has them all, for as long as the optimizer lives.

        At once would be another program for each order in which they come, and a module that is played from a recording gives them all at its end.
        """
        if not self.use_grad_acc_hook:
            return
        own = weakref.ref(self)
        arrived: set[torch.Tensor] = set()

        def accumulate() -> None:
            optimizer = own()
            for p in optimizer._all() if optimizer is not None and arrived else ():
                if p in arrived:
                    optimizer._accumulate(p)  # type: ignore[union-attr]
            arrived.clear()

        def arrive(p: torch.Tensor) -> None:
            arrived.add(p)
            torch.autograd.Variable._execution_engine.queue_callback(accumulate)  # the first one does it for all

        for p in params:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(autograd_engine.adds_up(arrive))

    # -- a step ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Reduce gradients, clip them, update this rank's parts, gather the new weights. Returns what `closure`, which computes the loss anew, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.prepare()
        self.take_writes()
        self._share_options(self.param_groups, self.base_optimizer.param_groups)
        updated = [p for p in self._all() if self._gradient(p) is not None]
        self._reduce(updated)
        if self.grad_clipping:
            self._grad_norm = None
            norm = self._clip_grad_norm(max_norm=self.max_norm)
            if norm is not None:  # a script's own `_clip_grad_norm` returns nothing, as torch_xla's
                self._grad_norm = norm
        self._step_inside(self.base_optimizer, **kwargs)
        self._publish(updated)
        self.base_optimizer.zero_grad(set_to_none=True)
        self._share_options(self.base_optimizer.param_groups, self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; with set_to_none=False they become zeros. `main_grad` becomes zeros either way, as in torch_xla: from its first gradient on, a
        parameter is updated in every step, unless it is frozen."""
        super().zero_grad(set_to_none)
        self._fed.clear()
        for p in self._all():
            held = getattr(p, "main_grad", None)
            if held is not None:
                p.main_grad = self._zeros[p] = torch.zeros_like(held)  # type: ignore[attr-defined]

    def _holds_nothing(self, p: torch.Tensor) -> bool:
        """Whether `main_grad` is the zeros of `zero_grad` still. What comes next replaces them: so the first step is the same program as all others, and
        none adds to zeros."""
        held: Any = getattr(p, "main_grad", None)
        zeros = self._zeros.pop(p, None)
        return held is None or (held is zeros and zeros is not None and zeros._version == 0)

    def _accumulate(self, p: torch.Tensor) -> None:
        """Add a complete gradient to those before it."""
        if p.grad is None:
            return
        with torch.no_grad():
            grad = p.grad.detach()
            if self._holds_nothing(p):
                p.main_grad = grad.to(self.optimizer_dtype)  # type: ignore[attr-defined]
            else:
                p.main_grad.add_(grad)  # type: ignore[attr-defined]
        self._fed.add(p)
        p.grad = None

    def _gradient(self, p: torch.Tensor) -> torch.Tensor | None:
        if not self.use_grad_acc_hook:
            return p.grad
        self._accumulate(p)  # one that no hook saw: set by hand, or of a parameter that was frozen at first
        return getattr(p, "main_grad", None) if p.requires_grad or p in self._fed else None

    def _reduce(self, params: Sequence[torch.Tensor]) -> None:
        """Give every part the mean of its gradients."""
        within = self.optimizer_dtype if self.higher_cc_precision else None
        for cuts, chosen in self._by_cuts(params):
            grads = [g for g in map(self._gradient, chosen) if g is not None]
            parts = cuts.reduce_scatter(grads, self.gradient_scale(cuts), self.optimizer_dtype, within, self._scatter_bytes)
            for p, part in zip(chosen, parts, strict=True):
                self.shard_of[p].grad = part

    def gradient_scale(self, cuts: RowShards) -> float:
        """What summed gradients are multiplied by."""
        return 1.0 / cuts.size

    @torch.no_grad()
    def _publish(self, params: Sequence[torch.Tensor]) -> None:
        """Write every rank's parts into the parameters."""
        backend.ensure()
        from torch_bridge.recorder import op_rules

        for dtype in dict.fromkeys(p.dtype for p in params):
            for cuts, chosen in self._by_cuts([p for p in params if p.dtype == dtype]):
                parts = [self.shard_of[p] for p in chosen]
                op_rules.copy_all(chosen, cuts.all_gather(parts, [p.shape for p in chosen], dtype, self._gather_bytes))
        self._written.update((p, _writes(p)) for p in params)

    @torch.no_grad()
    def _calc_grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all ranks' parts of the gradients together, without dims."""
        norm_type = float(norm_type)
        grads = self._shards_gradients()
        if not grads:
            return torch.zeros((), dtype=self.optimizer_dtype, device=self.device)
        kind = "max" if norm_type == math.inf else "sum"
        parts = torch.stack(clipping.sum_powers(grads, norm_type))
        total = parts.max() if norm_type == math.inf else parts.sum()
        total = functional.all_reduce(kind, total, groups=self.sharding_groups)
        if self.grad_norm_groups is not None:
            total = functional.all_reduce(kind, total, groups=self.grad_norm_groups)
        return total if norm_type == math.inf else total ** (1.0 / norm_type)

    @torch.no_grad()
    def _clip_grad_norm(self, max_norm: float | None = None, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the parts' gradients down to a global norm of `max_norm`; returns the norm before, shape [1]."""
        norm = self._calc_grad_norm(norm_type)
        factor = ((self.max_norm if max_norm is None else max_norm) / (norm + 1e-6)).clamp(max=1.0)
        clipping.scale(self._shards_gradients(), factor)
        return norm.reshape(1)

    def _shards_gradients(self) -> list[torch.Tensor]:
        return [s.grad for s in self.shard_of.values() if s.grad is not None]

    # -- state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: `param_groups`, `base_state` (of the inner optimizer, by parameter), `shape_info` (full shapes), and the parts if
        `save_master_weights` (`sharded_master_weights`)."""
        self.prepare()
        self.take_writes()
        inner = self.base_optimizer.state_dict()
        found = super().state_dict()
        found["base_state"] = inner["state"]
        found["shape_info"] = {i: torch.Size(p.shape) for i, p in enumerate(self._all())}
        if self.save_master_weights:
            found["sharded_master_weights"] = {i: self.shard_of[p].detach() for i, p in enumerate(self._all())}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict()` gave, in a world laid out alike: cut the parameters anew, then load state and master weights.

        Raises ValueError, before anything changes, for the state of another model or another number of ranks.
        """
        missing = {"param_groups", "base_state", "shape_info"} - set(state_dict)
        if missing:
            raise ValueError(
                f"not a ZeRO-1 optimizer's state: it has no {', '.join(sorted(missing))}, only {', '.join(map(str, state_dict))}"
            )
        self._check_state(state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.init_zero()
        inner = self.base_optimizer.state_dict()
        groups = [{**g, "params": own["params"]} for g, own in zip(state_dict["param_groups"], inner["param_groups"], strict=True)]
        groups = [{**own, **{k: v for k, v in g.items() if k not in _KEPT}} for g, own in zip(groups, inner["param_groups"], strict=True)]
        self.base_optimizer.load_state_dict({"state": state_dict["base_state"], "param_groups": groups})
        master = state_dict.get("sharded_master_weights")
        if master is not None:
            with torch.no_grad():
                for i, p in enumerate(self._all()):
                    self.shard_of[p].copy_(master[i])
                self._publish(self._all())

    def _check_state(self, state: dict[str, Any]) -> None:
        params = self._all()
        shapes = state["shape_info"]
        if len(shapes) != len(params):
            raise ValueError(f"the state is of {len(shapes)} parameters, the optimizer has {len(params)}")
        for i, p in enumerate(params):
            if list(shapes[i]) != list(p.shape):
                raise ValueError(f"parameter {i} has shape {list(p.shape)}, the state is of one of shape {list(shapes[i])}")
            part = self.shards_of(p).shape(p.shape)
            for key, value in state["base_state"].get(i, {}).items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.dim() == len(part)
                    and any(n not in (1, m) for n, m in zip(value.shape, part, strict=True))
                ):
                    raise ValueError(
                        f"{key} of parameter {i} has shape {list(value.shape)}, a part here has {part}: the state was saved with another number of ranks "
                        "in a sharding group. neuronx_distributed's load_checkpoint loads any number"
                    )

    # -- parameters -----------------------------------------------------------------------------------

    def _all(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _by_cuts(self, params: Sequence[torch.Tensor]) -> list[tuple[RowShards, list[torch.Tensor]]]:
        """Parameters that are cut among the same groups share collectives."""
        found: dict[Any, tuple[RowShards, list[torch.Tensor]]] = {}
        for p in params:
            cuts = self._cuts[p]
            found.setdefault(cuts.among.members, (cuts, []))[1].append(p)
        return list(found.values())

    def _check_parameters(self, params: Sequence[torch.Tensor]) -> None:
        kinds = {p.device.type for p in params}
        if kinds - {"xla"}:
            where = ", ".join(sorted(kinds))
            raise RuntimeError(
                f"To use {type(self).__name__}, all parameters must be on one xla device; they are on {where}. Move the model with .to('xla') first"
            )

    def _check_class(self) -> None:
        reason = fused_step.why_whole(self.optimizer_class)
        if reason is not None and rank_groups.resolve(self.sharding_groups).size > 1:
            raise NotImplementedError(
                f"{self.optimizer_class.__name__} {reason}: on the rows of parameters that ZeRO-1 gives each rank it would compute other numbers. Use it with "
                "optimizer_config={'zero_one_enabled': False}, or an optimizer that works element by element (AdamW), or torch.optim.Adafactor"
            )

    @staticmethod
    def _share_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
        """What schedulers change: the options of groups."""
        for a, b in zip(source, target, strict=True):
            b.update({k: v for k, v in a.items() if k not in _KEPT})


def _writes(p: Any) -> tuple[Any, ...]:
    """The same as long as nobody writes into a parameter, nor gives it another memory."""
    return p._version, weakref.ref(p._storage), p._storage.writes

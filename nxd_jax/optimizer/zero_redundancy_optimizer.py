"""`neuronx_distributed.optimizer.zero_redundancy_optimizer`: ZeRO-1 whose gradient norm is that of the undivided model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nxd_jax.optimizer import sharded_states, wholes
from nxd_jax.tensor_parallel import expert_states, grads, parallel_groups, partition
from torch_bridge.collectives.row_shards import RowShards
from torch_bridge.mesh.groups import GroupLike
from torch_bridge.optimizers.param_partition import Divided
from torch_bridge.optimizers.zero1 import ZeroRedundancyOptimizer

_ATTRIBUTES = (*partition.UNMARKED, "expert_model_parallel", "sequence_parallel_enabled", "shared")


class NeuronZero1Optimizer(ZeroRedundancyOptimizer):
    """`neuronx_distributed.optimizer.NeuronZero1Optimizer`: `ZeroRedundancyOptimizer` for parallel models.

    sharding_groups: default all data- and context-parallel ranks of a stage. The norm adds up the parts of all ranks, and counts what several hold alike once.
    Raises RuntimeError before `initialize_model_parallel`.
    """

    def __init__(self, params: Any, optimizer_class: type[torch.optim.Optimizer], *args: Any, **kwargs: Any):
        if not parallel_groups.initialized():
            raise RuntimeError(f"{type(self).__name__} needs parallel_state.initialize_model_parallel(...) to be called first")
        if not args[4:] and kwargs.get("sharding_groups") is None:
            kwargs["sharding_groups"] = parallel_groups.layout().zero1_lists()
        super().__init__(params, optimizer_class, *args, **kwargs)

    def stepping_together(self) -> Sequence[GroupLike]:
        """All ranks: the norm is of the undivided model."""
        return (None,)

    def whole_of(self, p: torch.Tensor) -> Divided:
        """What a parameter is itself a part of, if tensor- or expert-parallel ranks share it out."""
        return wholes.whole_of(p)

    def _check_class(self) -> None:
        super()._check_class()
        wholes.check(self.optimizer_class, self._all())

    def _new_shard(self, p: torch.Tensor) -> torch.nn.Parameter:
        shard = super()._new_shard(p)
        for name in _ATTRIBUTES:
            if hasattr(p, name):
                setattr(shard, name, getattr(p, name))
        shares = grads.shares_of(p)
        if isinstance(shares, torch.Tensor):
            shard.norm_shares = self.shards_of(p).cut(shares)  # type: ignore[attr-defined]
        return shard

    @torch.no_grad()
    def _reduce_gradients(self, **kwargs: Any) -> None:
        """What `step` begins with: give every part the mean of its gradients."""
        self.prepare()
        self._reduce([p for p in self._all() if self._gradient(p) is not None])

    def _calc_grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the undivided model's gradients, without dims."""
        shards = list(self.shard_of.values())
        return grads.get_grad_norm(shards, norm_type, zero1_optimizer=True, zero1_optimizer_groups=self.sharding_groups).reshape(())

    def save_sharded_state_dict(self, output_dir: str, save_serially: bool = True, num_workers_per_step: int = 8) -> None:
        """Write every rank's state as `<output_dir>/optim.dp_rank_DD.tp_rank_TT` (with pipeline stages `.pp_rank_PP` besides)."""
        sharded_states.save(self.state_dict(), output_dir)

    def load_sharded_state_dict(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Load what `save_sharded_state_dict` wrote in a world laid out alike. Raises FileNotFoundError naming the first missing file."""
        self.load_state_dict(sharded_states.load(output_dir))


class NeuronEPZero1Optimizer(NeuronZero1Optimizer):
    """`NeuronEPZero1Optimizer`: with expert parallelism. Experts are cut among the ranks that hold the same ones, everything else among all.

    State dicts have NxD's numbers (`tensor_parallel.expert_states`), and master weights too, which NxD leaves out of them.

    Raises ValueError for sharding_groups of your own.
    """

    def __init__(self, params: Any, optimizer_class: type[torch.optim.Optimizer], *args: Any, **kwargs: Any):
        if args[4:] or kwargs.get("sharding_groups") is not None:
            raise ValueError("NeuronEPZero1Optimizer chooses the sharding groups itself: experts and other parameters have different ones")
        super().__init__(params, optimizer_class, *args, **kwargs)

    @property
    def ep_zero_optimizer(self) -> _OfAKind:
        """What updates the experts."""
        return _OfAKind(self, True)

    @property
    def non_ep_zero_optimizer(self) -> _OfAKind:
        """What updates everything else."""
        return _OfAKind(self, False)

    def shards_of(self, param: torch.Tensor) -> RowShards:
        if grads.is_expert(param):
            return RowShards(parallel_groups.lists("edp"))
        return super().shards_of(param)

    def state_dict(self) -> dict[str, Any]:
        """As in the base class, parameters of experts after all others: `ep_param_id_offset` and the other offsets say from which number on."""
        return expert_states.combined(super().state_dict(), self._are_experts())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict()` gave. Raises ValueError, before anything changes, for a state without the offsets."""
        super().load_state_dict(expert_states.plain(state_dict, self._are_experts()))

    def _are_experts(self) -> list[list[bool]]:
        return [[grads.is_expert(p) for p in group["params"]] for group in self.param_groups]

    def gradient_scale(self, cuts: RowShards) -> float:
        """Experts' gradients were divided by the context-parallel size before (`allreduce_context_parallel_gradients`)."""
        everyone = parallel_groups.size("dp") * parallel_groups.size("cp")
        return 1.0 / (everyone if cuts.size == everyone else parallel_groups.size("dp"))


class _OfAKind:
    """What NxD has an optimizer of its own for: the experts of a `NeuronEPZero1Optimizer`, or everything else."""

    def __init__(self, everything: NeuronEPZero1Optimizer, experts: bool):
        self.everything = everything
        self.experts = experts

    @property
    def base_optimizer(self) -> _OfAKind:
        """What has `step`."""
        return self

    def step(self) -> None:
        """Update the parts of this kind by the gradients that `_reduce_gradients` gave them."""
        shards = self.everything.shard_of
        others = {s: s.grad for p, s in shards.items() if bool(grads.is_expert(p)) != self.experts}
        for s in others:
            s.grad = None
        self.everything.base_optimizer.step()
        for s, grad in others.items():
            s.grad = grad

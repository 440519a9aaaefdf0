"""`neuronx_distributed.modules.moe.expert_mlps_v2`: tokens to the experts that they chose, and back as a weighted sum.

Two ways of computing serve all that NxD distinguishes:

    NxD                                       here
    capacity factor > 0                       capacity: C slots for each expert, later tokens are dropped
    capacity factor None (all experts),       dropless: rows sorted by expert, grouped products, at the cost of the tokens that are routed
    <= 0 (blockwise), selective loading

One token per sequence is generated without dropping.

With expert parallelism in training, ranks have tokens of their own: capacity slots go to the ranks of their experts and back (all-to-all); without a
capacity, ranks see each other's tokens (all-gather), compute what is for their own experts, and sum up (reduce-scatter). In inference all ranks have the same
tokens: each computes what is for its own experts, and the layer sums up (`expert_ranks`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from nxd_jax.modules.moe import blockwise, capacity, dropless, expert_ranks
from nxd_jax.modules.moe.assignment import Assignment
from nxd_jax.modules.moe.experts import Experts
from nxd_jax.modules.moe.model_utils import DEFAULT_SELECTIVE_LOADING_THRESHOLD, activation
from nxd_jax.modules.moe.moe_configs import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig
from nxd_jax.tensor_parallel import layer_groups, parallel_groups, regions
from nxd_jax.tensor_parallel.spmd_rank import SPMDRank
from torch_bridge.mesh import world


class ExpertMLPsV2(torch.nn.Module):
    """The experts of a mixture: attribute `mlp_op` (`Experts`) holds this rank's, `forward` sends tokens through them.

    routed_experts_mlp_config: sizes, activation, capacity and so on; it is copied. blockwise_matmul_config: kept; the grouped products choose their blocks.
    sequence_parallel_enabled: in eval mode, affinities and indices may be those of this rank's part of the tokens; they are gathered. dtype, device: of the
    weights. tensor_model_parallel_group, expert_model_parallel_group: the ranks that share out experts (default: `parallel_state`'s). is_prefill: a mark on
    the weights. cte_*_group and tkg_*_group, NxD's groups for prefill and decode, take the place of these two; both must have the same ranks.

    Attributes moe_tensor_model_parallel_group and moe_expert_model_parallel_group are the groups that the experts are shared out in.

    `MoE` says which ranks it sums results over (`summed_over`), and so whether expert-parallel ranks have the same tokens. Experts that are in no `MoE` go by
    NxD's rule: in training they have tokens of their own, in eval mode the same, and the result is a partial sum over expert-parallel ranks, too.

    Attribute SELECTIVE_LOADING_THRESHOLD is kept for scripts that set it. It changes nothing: grouped products read the weights of chosen experts only, for
    any number of tokens.

    Raises ValueError for a top_k outside of 1..num_experts, an unknown activation, normalised affinities with top_k 1, an expert_distribution that does not
    fit the ranks, and AssertionError for experts that do not divide by the ranks; NotImplementedError for return_bias and for hybrid sharding.
    """

    SELECTIVE_LOADING_THRESHOLD = DEFAULT_SELECTIVE_LOADING_THRESHOLD
    _places: torch.Tensor | None

    def __init__(
        self,
        routed_experts_mlp_config: RoutedExpertsMLPOpsConfig,
        blockwise_matmul_config: BlockwiseMatmulConfig | None = None,
        return_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        sequence_parallel_enabled: bool = False,
        device: Any = None,
        tensor_model_parallel_group: Any = None,
        expert_model_parallel_group: Any = None,
        tkg_tensor_model_parallel_group: Any = None,
        tkg_expert_model_parallel_group: Any = None,
        cte_tensor_model_parallel_group: Any = None,
        cte_expert_model_parallel_group: Any = None,
        is_prefill: bool = True,
        enabled_hybrid_sharding: bool = False,
    ):
        super().__init__()
        if return_bias:
            raise NotImplementedError(
                "return_bias=True: the experts' biases are added where they belong and cannot be returned; leave it False"
            )
        if enabled_hybrid_sharding:
            raise NotImplementedError(
                "enabled_hybrid_sharding=True would keep the experts twice, cut differently for prefill and decode; one copy serves both here: leave it False"
            )
        self.routed_experts_mlp_config = _checked(routed_experts_mlp_config)
        self.blockwise_matmul_config = blockwise_matmul_config or BlockwiseMatmulConfig.default()
        self.return_bias = return_bias
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.dtype = dtype
        self.device = device
        self.is_prefill = is_prefill
        self.tensor_parallel_group = layer_groups.of_layer(tensor_model_parallel_group)
        self.expert_model_parallel_group = (
            parallel_groups.group("ep") if expert_model_parallel_group is None else expert_model_parallel_group
        )
        tensor = expert_ranks.of_phases("tensor", cte_tensor_model_parallel_group, tkg_tensor_model_parallel_group)
        expert = expert_ranks.of_phases("expert", cte_expert_model_parallel_group, tkg_expert_model_parallel_group)
        self.moe_tensor_model_parallel_group = self.tensor_parallel_group if tensor is None else tensor
        self.moe_expert_model_parallel_group = self.expert_model_parallel_group if expert is None else expert
        self.mlp_op = self._make_experts()
        self._same_tokens: bool | None = None
        self._together = layer_groups.Members(
            expert_ranks.together(self.moe_tensor_model_parallel_group, self.moe_expert_model_parallel_group)
        )
        self.register_buffer("_places", None, persistent=False)
        self._buffers["_places"] = _places(self.routed_experts_mlp_config.expert_distribution)
        if self.routed_experts_mlp_config.enable_spmd_rank:
            self.spmd_rank = self._make_rank()

    def _make_rank(self) -> SPMDRank:
        found = SPMDRank(world.size(), layer_groups.size(self.moe_tensor_model_parallel_group))
        count = layer_groups.size(self.moe_expert_model_parallel_group)
        if count > 1:
            distribution = self.routed_experts_mlp_config.expert_distribution or None
            found.initialize_expert_indices(self.num_experts // count, self.moe_expert_model_parallel_group, distribution)
        return found

    def _make_experts(self) -> Experts:
        config = self.routed_experts_mlp_config
        return Experts(
            num_experts=config.num_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            glu_mlp=config.glu_mlp,
            glu_type=config.glu_type,
            bias=config.bias,
            hidden_act_scaling_factor=config.hidden_act_scaling_factor,
            hidden_act_bias=config.hidden_act_bias,
            gate_clamp_upper_limit=config.gate_clamp_upper_limit,
            gate_clamp_lower_limit=config.gate_clamp_lower_limit,
            up_clamp_upper_limit=config.up_clamp_upper_limit,
            up_clamp_lower_limit=config.up_clamp_lower_limit,
            init_method=config.input_layer_init_method,
            output_layer_init_method=config.output_layer_init_method,
            dtype=self.dtype,
            device=self.device,
            tensor_model_parallel_group=self.moe_tensor_model_parallel_group,
            expert_model_parallel_group=self.moe_expert_model_parallel_group,
            expert_distribution=config.expert_distribution or None,
            is_prefill=self.is_prefill,
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What `.to(...)` and `.to_empty(...)` go through: where experts stand follows from the configuration, and has values on every device."""
        before = self._places
        super()._apply(fn, recurse)
        made = None if self._places is before else _places(self.routed_experts_mlp_config.expert_distribution)
        if made is not None and self._places is not None:
            self._buffers["_places"] = made.to(self._places.device)
        return self

    # -- what scripts ask ------------------------------------------------------------------------------

    @property
    def num_experts(self) -> int:
        return self.routed_experts_mlp_config.num_experts

    @property
    def top_k(self) -> int:
        return self.routed_experts_mlp_config.top_k

    @property
    def hidden_size(self) -> int:
        return self.routed_experts_mlp_config.hidden_size

    @property
    def intermediate_size(self) -> int:
        return self.routed_experts_mlp_config.intermediate_size

    @property
    def capacity_factor(self) -> float | None:
        """None for experts that take all tokens: not given, or at least num_experts / top_k."""
        return self.routed_experts_mlp_config.capacity_factor

    @property
    def normalize_top_k_affinities(self) -> bool:
        return self.routed_experts_mlp_config.normalize_top_k_affinities

    @normalize_top_k_affinities.setter
    def normalize_top_k_affinities(self, value: bool) -> None:
        self.routed_experts_mlp_config.normalize_top_k_affinities = value

    def get_mlp_op(self) -> Experts:
        """The experts (NxD has others for decode with hybrid sharding)."""
        return self.mlp_op

    def get_spmd_rank(self) -> SPMDRank:
        """The module that holds each rank's number, with `enable_spmd_rank`."""
        return self.spmd_rank

    def drops_tokens(self, seq_len: int) -> bool:
        """Whether experts have a capacity in this mode: a positive factor, and not one token per sequence that is generated."""
        factor = self.capacity_factor
        return factor is not None and factor > 0 and (self.training or seq_len != 1)

    def summed_over(self, group: Any) -> None:
        """Be told which ranks the results are summed over by the layer that these experts are in, as `MoE` does: the tensor-parallel ranks of the experts, if
        expert-parallel ranks have tokens of their own, or those and the expert-parallel ones, if these have the same tokens. Raises ValueError for others.
        """
        self._same_tokens = expert_ranks.same_tokens(group, self.moe_tensor_model_parallel_group, self.moe_expert_model_parallel_group)

    def has_same_tokens(self) -> bool:
        """Whether expert-parallel ranks have the same tokens in this mode; False without expert parallelism."""
        if layer_groups.size(self.moe_expert_model_parallel_group) == 1:
            return False
        return not self.training if self._same_tokens is None else self._same_tokens

    # -- running ---------------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: torch.Tensor,
        expert_affinities: torch.Tensor,
        expert_index: torch.Tensor,
        seq_len: int,
        padding_mask: torch.Tensor | None = None,
        expert_affinities_masked_full: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H] -> [T, H], partial sums over the tensor parallel ranks; so is the gradient of the affinities, while that of hidden_states is whole.
        Where expert parallel ranks have the same tokens (`has_same_tokens`), partial sums are over these ranks, too.

        expert_affinities: [T, E] for all experts on every rank. expert_index: [T, k] int64, k different experts of each token. seq_len: tokens of a
        sequence; in eval mode 1 means that one token of each is generated. padding_mask: T entries, 0 (or False) for tokens that are padding: they give
        zeros, and take no slot of an expert with a capacity (NxD looks at it in one of its paths, the blockwise one in eval mode).
        expert_affinities_masked_full: [T, E], weights as they shall be, 0 for experts that a token did not choose; in place of expert_affinities and their
        normalisation.

        Raises ValueError for shapes that do not fit together.
        """
        drops = self.drops_tokens(seq_len)
        return self._run(hidden_states, expert_affinities, expert_index, drops, padding_mask, expert_affinities_masked_full)

    def forward_all_experts(
        self, hidden_states: torch.Tensor, expert_affinities: torch.Tensor, expert_index: torch.Tensor, chosen_expert_indices: Any = None
    ) -> torch.Tensor:
        """NxD's way of dropping nothing; here the same as `forward_blockwise`. chosen_expert_indices: accepted; experts that nobody chose cost nothing."""
        return self._run(hidden_states, expert_affinities, expert_index, drops=False)

    def forward_selective_loading(
        self, hidden_states: torch.Tensor, expert_affinities: torch.Tensor, expert_index: torch.Tensor
    ) -> torch.Tensor:
        """NxD's way for few tokens, with expert parallelism as well; here the same as `forward_blockwise`."""
        return self._run(hidden_states, expert_affinities, expert_index, drops=False)

    def forward_blockwise(
        self,
        hidden_states: torch.Tensor,
        expert_affinities: torch.Tensor,
        expert_index: torch.Tensor,
        expert_affinities_masked_full: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Without dropping, at the cost of the routed tokens, whatever the capacity factor and the mode. Arguments and result are those of `forward`."""
        return self._run(hidden_states, expert_affinities, expert_index, False, padding_mask, expert_affinities_masked_full)

    def forward_capacity_factor(
        self, hidden_states: torch.Tensor, expert_affinities: torch.Tensor, expert_index: torch.Tensor
    ) -> torch.Tensor:
        """With a capacity, in any mode. Raises ValueError for experts that have none (a capacity factor that is None or not positive)."""
        if self.capacity_factor is None or self.capacity_factor <= 0:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} gives these experts no capacity: build them with a factor between 0 and num_experts / top_k, or call "
                "forward_blockwise"
            )
        return self._run(hidden_states, expert_affinities, expert_index, drops=True)

    def _run(
        self,
        hidden_states: torch.Tensor,
        expert_affinities: torch.Tensor,
        expert_index: torch.Tensor,
        drops: bool,
        padding_mask: torch.Tensor | None = None,
        masked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        affinities = expert_affinities if masked is None else masked
        affinities, expert_index = self._whole(affinities, hidden_states), self._whole(expert_index, hidden_states)
        self._check(hidden_states, affinities, expert_index, padding_mask)
        keys = expert_index if self._places is None else self._places[expert_index]
        if padding_mask is not None:
            keys = torch.where(padding_mask.reshape(-1, 1) != 0, keys, self.num_experts)
        normalize = self.normalize_top_k_affinities and masked is None
        hidden_states = self._used_by_ranks(hidden_states)
        if drops:
            return self._with_capacity(hidden_states, affinities, expert_index, keys, normalize)
        kept = None if padding_mask is None else keys < self.num_experts
        weights = capacity.pair_weights(affinities, expert_index, kept, normalize)
        return self._dropless(hidden_states, weights, keys, complete=padding_mask is None)

    def _with_capacity(
        self, x: torch.Tensor, affinities: torch.Tensor, expert_index: torch.Tensor, keys: torch.Tensor, normalize: bool
    ) -> torch.Tensor:
        assert self.capacity_factor is not None
        slots = capacity.expert_capacity(x.shape[0], self.top_k, self.capacity_factor, self.num_experts)
        assigned = capacity.assign(keys, self.num_experts, slots)
        weights = capacity.pair_weights(affinities, expert_index, assigned.kept, normalize)
        if self.has_same_tokens():
            keys, own = self._own(keys)
            assigned = capacity.assign(keys, own, slots)
            out = self.mlp_op(self._entering(x, weights, assigned).reshape(own, slots, x.shape[1]), sum_gradient=self._weighs_rows())
            return self._leaving(out.reshape(-1, x.shape[1]), weights, assigned)
        rows = self._entering(x, weights, assigned).reshape(self.num_experts, slots, x.shape[1])
        group = self.moe_expert_model_parallel_group
        entered = regions.enter_expert_parallel_region(rows, process_group=group)
        out = regions.exit_expert_parallel_region(self.mlp_op(entered, sum_gradient=self._weighs_rows()), process_group=group)
        return self._leaving(out.reshape(-1, x.shape[1]), weights, assigned)

    def _dropless(self, x: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, complete: bool) -> torch.Tensor:
        """All pairs go to their experts. With expert parallelism each rank computes the pairs that are for its own experts: of all ranks, or of the tokens
        that all have.
        """
        group = self.moe_expert_model_parallel_group
        travel = layer_groups.size(group) > 1 and not self.has_same_tokens()
        if travel:
            x, weights, keys = _gathered(x, group), _gathered(weights, group), regions.gather_along_dim(keys, 0, group)
        keys, own = self._own(keys)
        assigned, ends = dropless.assign(keys, own, complete and own == self.num_experts)
        rows = self.mlp_op.rows(self._entering(x, weights, assigned), ends, sum_gradient=self._weighs_rows())
        out = self._leaving(rows, weights, assigned)
        return _summed(out, group) if travel else out

    def _own(self, keys: torch.Tensor) -> tuple[torch.Tensor, int]:
        """keys, with this rank's experts counted from 0 and their number in place of others; and their number."""
        group = self.moe_expert_model_parallel_group
        count = layer_groups.size(group)
        own = self.num_experts // count
        if count == 1:
            return keys, own
        keys = keys - layer_groups.rank(group) * own
        return torch.where((keys >= 0) & (keys < own), keys, own), own

    def _used_by_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens as they are. Their gradient is summed over the ranks that use them for their parts of experts: of tokens, as there are fewer than rows.

        Rows that are weighed get the sum over tensor parallel ranks themselves, as the weights' gradient needs it.
        """
        if not self._weighs_rows():
            return self.mlp_op.entering(x, self._together if self.has_same_tokens() else None)
        return regions.copy_to_tensor_model_parallel_region(x, self.moe_expert_model_parallel_group) if self.has_same_tokens() else x

    def _weighs_rows(self) -> bool:
        """Whether affinities weigh what goes into the experts."""
        return self.routed_experts_mlp_config.early_expert_affinity_modulation

    def _entering(self, x: torch.Tensor, weights: torch.Tensor, assigned: Assignment) -> torch.Tensor:
        rows = assigned.to_rows(x)
        if not self._weighs_rows():
            return rows
        # the rows' gradient has been summed over the tensor parallel ranks, unlike that of the results: each takes its share, for the sum that MoE makes
        weights = regions.region(weights, self.moe_tensor_model_parallel_group, regions.same, _share)
        return (rows * assigned.of_rows(weights).unsqueeze(1)).to(x.dtype)

    def _leaving(self, rows: torch.Tensor, weights: torch.Tensor, assigned: Assignment) -> torch.Tensor:
        return assigned.to_tokens(rows, None if self._weighs_rows() else weights)

    def _whole(self, of_tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What a router with sequence parallelism gives in eval mode is of this rank's tokens; gathered, it is of all that the experts see."""
        count = layer_groups.size(self.tensor_parallel_group)
        if not self.sequence_parallel_enabled or self.training or of_tokens.shape[0] * count != x.shape[0]:
            return of_tokens
        return regions.gather_from_sequence_parallel_region(of_tokens, 0, to_model_parallel=False, process_group=self.tensor_parallel_group)

    def _check(self, x: torch.Tensor, affinities: torch.Tensor, expert_index: torch.Tensor, padding_mask: torch.Tensor | None) -> None:
        tokens = x.shape[0]
        expected = {
            "hidden_states": (x, [tokens, self.hidden_size]),
            "expert_affinities": (affinities, [tokens, self.num_experts]),
            "expert_index": (expert_index, [tokens, self.top_k]),
        }
        wrong = [f"{name} {list(t.shape)} (expected {shape})" for name, (t, shape) in expected.items() if list(t.shape) != shape]
        if padding_mask is not None and padding_mask.numel() != tokens:
            wrong.append(f"padding_mask {list(padding_mask.shape)} (expected {tokens} entries)")
        if wrong:
            raise ValueError(
                f"experts with hidden size {self.hidden_size}, {self.num_experts} experts and top_k {self.top_k} were given {', '.join(wrong)}"
            )

    # -- NxD's names -----------------------------------------------------------------------------------

    get_blockwise_expert_and_token_mapping = staticmethod(blockwise.get_blockwise_expert_and_token_mapping)
    get_block_conditions = staticmethod(blockwise.get_block_conditions)
    allocate_token_blocks = staticmethod(blockwise.allocate_token_blocks)
    generate_local_expert_mask_with_redundancy = staticmethod(blockwise.generate_local_expert_mask_with_redundancy)
    get_expert_mask = staticmethod(blockwise.get_expert_mask)
    get_expert_affinities_masked = staticmethod(blockwise.get_expert_affinities_masked)


def _checked(given: RoutedExpertsMLPOpsConfig) -> RoutedExpertsMLPOpsConfig:
    """A copy of the configuration, in which None stands for every factor that keeps all tokens. (NxD changes the one that it is given.)"""
    config = copy.copy(given)
    if not 0 < config.top_k <= config.num_experts:
        raise ValueError(f"top_k={config.top_k} must be between 1 and num_experts={config.num_experts}")
    activation(config.hidden_act)
    if config.normalize_top_k_affinities and config.top_k == 1:
        raise ValueError(
            "normalize_top_k_affinities=True needs top_k > 1: with one expert a token every weight would be 1, and the router would get no gradient"
        )
    if config.capacity_factor is not None and config.capacity_factor >= config.num_experts / config.top_k:
        config.capacity_factor = None
    return config


def _places(distribution: Any) -> torch.Tensor | None:
    """Where each expert stands when ranks' experts are counted through, [E] int64; None if that is its number."""
    if not distribution:
        return None
    order = torch.tensor([expert for own in distribution for expert in own], device="cpu")  # also where modules are made on "meta"
    return torch.argsort(order)


def _share(grad: torch.Tensor, process_group: Any) -> torch.Tensor:
    return grad / layer_groups.size(process_group)


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All ranks' tokens, of which each uses its own part: gradients are summed."""
    return regions.gather_from_sequence_parallel_region(x, 0, process_group=group)


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's tokens, summed over what the ranks computed of them."""
    return regions.reduce_scatter_to_sequence_parallel_region(x, 0, process_group=group)

"""`neuronx_distributed.modules.moe.model`: the layer that takes the place of a decoder's MLP, of a router, experts, and experts that every token takes.

How the parts of a layer are joined over tensor-parallel ranks, each of which has a part of every expert:

    tokens       all of them on each rank; with sequence parallelism gathered, and each rank keeps its part of their gradient
    affinities   the same on all ranks; each has its share of their gradient, and the shares are summed
    result       partial sums of routed and shared experts, reduced once: to all ranks, or with sequence parallelism to each rank's part

Expert-parallel ranks may be among these ranks, as in inference: then they have the same tokens, and each computes its own experts of them.

Legend: S sequence, B batch, T = S * B tokens, H hidden, E experts, k experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch

from nxd_jax.modules.moe import expert_ranks, token_shuffling
from nxd_jax.modules.moe.expert_load import ExpertLoad
from nxd_jax.modules.moe.moe_configs import MoEFusedTKGConfig as MoEFusedTKGConfig  # scripts import it from here, too
from nxd_jax.tensor_parallel import layer_groups, regions, shuffle_groups


class MoE(torch.nn.Module):
    """A mixture of experts: `router` chooses for each token, `expert_mlps` computes, and `shared_experts` (if any) take every token besides.

    The input is [B, S, H]; with sequence parallelism this rank's part of [S, B, H]. The result is always a tuple: the output, as the input lies, then the
    router's logits [T, E] if `return_router_logits`, then the chosen experts [T, k] if `return_expert_index` (or attribute `is_test`), then the residual if
    one was given.

    router: a `RouterBase`. expert_mlps: `ExpertMLPs` or `ExpertMLPsV2`. shared_experts: `SharedExperts`. rmsnorm: applied to the input first.
    sequence_parallel_enabled, sequence_dimension: the input is this rank's part of that dim (0 if None). Without it, sequence_dimension says which dim is
    the sequence (1 if None): where that has one entry in eval mode, tokens are being generated, and none is dropped.
    token_shuffle_group_size, token_shuffle_seed: mix the tokens of that many data-parallel ranks first (`token_shuffling`).
    tensor_model_parallel_group: the ranks that share out each expert; default the tensor-parallel group. Expert-parallel ranks that have the same tokens
    belong to it as well (NxD then takes all ranks of the world).
    init_tkg_module, tkg_config: NxD's fused kernel for decoding. Its arguments are accepted; tokens are decoded by the same program.

    The order in which tokens are flattened decides whose are dropped: (s, b) if the sequence comes first, else (b, s).

    Attribute `load` is None, or the `ExpertLoad` that counts tokens by expert (`load.track`).

    Raises ValueError for a router and experts that differ in hidden_size, num_experts or top_k, for a router with sequence parallelism in a layer without,
    or along another dim, and for experts that are shared out among other ranks than the layer's; RuntimeError for a token shuffle group that does not divide
    the data-parallel ranks.
    """

    def __init__(
        self,
        router: Any,
        expert_mlps: Any,
        shared_experts: Any = None,
        rmsnorm: Any = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
        token_shuffle_group_size: int = 1,
        token_shuffle_seed: int | None = None,
        tensor_model_parallel_group: Any = None,
        init_tkg_module: bool = False,
        tkg_config: Any = None,
    ):
        super().__init__()
        if sequence_parallel_enabled and sequence_dimension is None:
            sequence_dimension = 0
        _check_agree(router, expert_mlps)
        _check_sequence(router, sequence_parallel_enabled, sequence_dimension)
        self.router = router
        self.expert_mlps = expert_mlps
        self.shared_experts = shared_experts
        self.rmsnorm = rmsnorm
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.return_router_logits = return_router_logits
        self.return_expert_index = return_expert_index
        self.token_shuffle_group_size = token_shuffle_group_size
        self.token_shuffle_seed = token_shuffle_seed
        self.tensor_parallel_group = layer_groups.of_layer(tensor_model_parallel_group)
        self._agree_on_groups()
        self.tkg_config = tkg_config
        self.is_test = False
        self.load: ExpertLoad | None = None
        if token_shuffle_group_size > 1:
            shuffle_groups.initialize(token_shuffle_group_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        is_speculative_decoding: bool = False,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The tuple that the class describes.

        padding_mask: [B, S] of the whole sequence, 0 (or False) for padding: such tokens give zeros and take no slot of an expert. is_speculative_decoding: in
        eval mode the tokens are proposals for generation, none of which is dropped. residual: is added to the input first; the sum comes back at the end of
        the tuple, for the output to be added to.
        """
        if residual is not None:
            hidden_states = residual = hidden_states + residual
        x = hidden_states if self.rmsnorm is None else self.rmsnorm(hidden_states)
        permutation = None
        if self.token_shuffle_group_size > 1:
            if padding_mask is not None:
                raise NotImplementedError(
                    "padding_mask with token_shuffle_group_size > 1: the mask would have to travel with the tokens. Leave the mask out in training, "
                    "or set token_shuffle_group_size=1"
                )
            x, permutation = token_shuffling.token_shuffle(x, self.token_shuffle_seed)
        logits, index, output = self._routed(x, padding_mask, is_speculative_decoding)
        if permutation is not None:
            output = token_shuffling.token_unshuffle(output, permutation)
        found = [output]
        if self.return_router_logits:
            found.append(logits)
        if self.return_expert_index or self.is_test:
            found.append(index)
        if residual is not None:
            found.append(residual)
        return tuple(found)

    def _agree_on_groups(self) -> None:
        """The experts learn which ranks are summed over. Experts that are not ours, and do not ask, know by themselves."""
        if hasattr(self.expert_mlps, "summed_over"):
            self.expert_mlps.summed_over(self.tensor_parallel_group)
        shared_by = getattr(self.shared_experts, "shared_by", None)
        if shared_by is not None:
            expert_ranks.check_equal(self.tensor_parallel_group, shared_by)

    def _routed(self, x: torch.Tensor, padding_mask: torch.Tensor | None, speculative: bool) -> tuple[torch.Tensor, ...]:
        """(logits, chosen experts, output as x lies)."""
        every = self._gathered(x)
        logits, affinities, index = self.router(x if self.router.sequence_parallel_enabled else every)
        dim = 1 if self.sequence_dimension is None else self.sequence_dimension
        seq_len = every.shape[dim]
        mask = None if padding_mask is None else self._flat(padding_mask, every, dim)
        tokens = every.reshape(-1, every.shape[-1])
        if self.load is not None:
            self.load.count(index, mask, self.expert_mlps, seq_len)
        affinities = regions.copy_to_tensor_model_parallel_region(affinities, self.tensor_parallel_group)
        output = self.expert_mlps(tokens, affinities, index, 1 if speculative and not self.training else seq_len, mask)
        apart = self._shared_apart(seq_len)
        if self.shared_experts is not None and not apart:
            output = output + self.shared_experts(tokens, seq_len)
        output = self._reduced(output.reshape(every.shape))
        if apart:
            output = output + self.shared_experts(x, seq_len)
        return logits, index, output

    def _shared_apart(self, seq_len: int) -> bool:
        """Whether shared experts give complete results of this rank's tokens, which are added when the others have been reduced."""
        if self.shared_experts is None or not self.shared_experts.sequence_parallel_enabled:
            return False
        if self.training and not self.sequence_parallel_enabled:
            raise ValueError(
                "the shared experts have sequence_parallel_enabled=True and MoE has not: their weights' gradients would be added up over ranks that had "
                "the same tokens. Set it on MoE, too, or on none"
            )
        return self.training or seq_len != 1

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        if not self.sequence_parallel_enabled:
            return x
        return regions.gather_from_sequence_parallel_region(
            x, self.sequence_dimension, to_model_parallel=False, process_group=self.tensor_parallel_group
        )

    def _reduced(self, output: torch.Tensor) -> torch.Tensor:
        if not self.sequence_parallel_enabled:
            return regions.reduce_from_tensor_model_parallel_region(output, self.tensor_parallel_group)
        return regions.reduce_scatter_to_sequence_parallel_region(output, self.sequence_dimension, self.tensor_parallel_group)

    def _flat(self, padding_mask: torch.Tensor, every: torch.Tensor, dim: int) -> torch.Tensor:
        """The mask in the order of the tokens."""
        tokens = every.shape[:-1]
        if every.dim() != 3:
            return padding_mask.reshape(-1)
        turned = padding_mask.t() if dim == 0 else padding_mask
        if turned.shape != tokens:
            raise ValueError(
                f"padding_mask has shape {list(padding_mask.shape)}: it must be [batch, sequence] of the whole sequence, "
                f"{[tokens[1], tokens[0]] if dim == 0 else list(tokens)}"
            )
        return turned.reshape(-1)


def _check_agree(router: Any, expert_mlps: Any) -> None:
    for name in ("hidden_size", "num_experts", "top_k"):
        a, b = getattr(router, name), getattr(expert_mlps, name)
        if a != b:
            raise ValueError(
                f"Inconsistent {name} across the router and expert_mlps: {a} in the router, {b} in the experts; build both with the same"
            )


def _check_sequence(router: Any, enabled: bool, dim: int | None) -> None:
    if not router.sequence_parallel_enabled:
        return
    if not enabled:
        raise ValueError(
            "the router has sequence_parallel_enabled=True and MoE has not: the router would see a part of the tokens. Set it on MoE, too, or on none"
        )
    if router.sequence_dimension != dim:
        raise ValueError(
            f"Inconsistent sequence_dimension across the router and MoE: {router.sequence_dimension} in the router, {dim} in MoE; give both the same"
        )

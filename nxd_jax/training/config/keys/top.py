"""Keys at the top of a file, and `precision`, `distributed_strategy`."""

from __future__ import annotations

from nxd_jax.training.config.keys.kinds import Key, anything, switch, text, whole
from nxd_jax.training.environment import PRECISION_TYPES, SPELLINGS

TOP: dict[str, Key] = {
    "name": text(null=False),
    "model_source": text(null=False, required=True),
    "seed": whole(0),
    "compiler_flags": text(),
    "compiler_cache_url": text(),
    "aync_exec_max_inflight_requests": whole(1, unread="executions that the Neuron runtime queues; JAX queues by itself"),
    "bucket_size_collectives": whole(1, unread="megabytes of gradients that torch_xla reduces at once; XLA chooses here"),
    "neuron_rt_exec_timeout": whole(1, unread="seconds after which the Neuron runtime gives an execution up"),
    "neuron_experimental_compress_rg": switch(unread="how the Neuron compiler writes groups of ranks"),
    "data_module": text(),
    "model_module": text(),
}
"""Sections aside."""

STRATEGY: dict[str, Key] = {
    "tensor_model_parallel_size": whole(1),
    "pipeline_model_parallel_size": whole(1),
    "virtual_pipeline_model_parallel_size": whole(1),
    "context_parallel_size": whole(1),
    "expert_model_parallel_size": whole(1),
    "token_shuffle_group_size": whole(1),
    "zero1": switch(),
    "sequence_parallel": switch(),
    "kv_replicator": whole(1),
    "pipeline_model_parallel_split_rank": whole(0, unread="where an encoder ends and a decoder begins; there are decoders only"),
}


PRECISION: dict[str, Key] = {
    "type": text(*PRECISION_TYPES, *SPELLINGS, null=False, required=True),
    "master_weights": switch(),
    "fp32_grad_acc": switch(),
    "fp32_grads_cc": switch(unread="float32 in collectives of gradients, which follows from the type"),
    "xla_use_bf16": anything(values=("0", "1", 0, 1)),
    "xla_downcast_bf16": anything(values=("0", "1", 0, 1)),
    "neuron_rt_stochastic_rounding_en": anything(values=("0", "1", 0, 1)),
    "parallel_layers_reduce_dtype": text("bf16", "fp32", "fp16"),
}

MANUAL_ONLY = ("master_weights", "fp32_grad_acc", "xla_use_bf16", "xla_downcast_bf16", "neuron_rt_stochastic_rounding_en")
"""Keys of `precision` that count if the type is manual."""

"""`torch_xla.distributed.fsdp.state_dict_utils`: joining shards."""

from torch_bridge.fsdp.consolidation import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_optimizer_states,
    consolidate_sharded_state_dicts,
)

__all__ = ["consolidate_sharded_model_checkpoints", "consolidate_sharded_optimizer_states", "consolidate_sharded_state_dicts"]

"""`neuronx_distributed_training.models.megatron`."""

"""`neuronx_distributed_training.lightning_modules.model.megatron`."""

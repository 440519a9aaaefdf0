"""`neuronx_distributed_training.lightning_modules.data.megatron`."""

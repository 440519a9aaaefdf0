"""`neuronx_distributed_training.lightning_modules.data`: what a training reads."""

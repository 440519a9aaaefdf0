"""`neuronx_distributed_training.lightning_modules.model`: the modules that a Trainer trains."""

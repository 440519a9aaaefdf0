"""`neuronx_distributed_training.models`: the models themselves."""

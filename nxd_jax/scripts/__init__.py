"""`neuronx_distributed.scripts`: names of NxD for `training.converters`."""

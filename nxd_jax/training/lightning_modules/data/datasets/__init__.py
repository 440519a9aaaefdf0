"""`neuronx_distributed_training.lightning_modules.data.datasets`: tokenized rows, packed or filled to one length."""

"""`neuronx_distributed.utils`: helpers around models and batches."""

"""Fully sharded data parallelism (ZeRO-3): parameters shared out among ranks, gathered for a module's forward and backward, gradients reduce-scattered."""

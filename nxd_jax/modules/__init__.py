"""`neuronx_distributed.modules`: blocks built on the parallel layers."""

"""`neuronx_distributed.modules.attention`: rotary position embeddings, in `utils`."""

"""`neuronx_distributed_training.models.hf_models`: Llama and Mixtral of transformers' configurations, with parallel layers."""

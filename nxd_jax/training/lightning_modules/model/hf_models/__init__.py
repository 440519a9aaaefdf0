"""`neuronx_distributed_training.lightning_modules.model.hf_models`: modules that train models of Hugging Face's configurations."""

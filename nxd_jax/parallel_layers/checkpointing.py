"""`neuronx_distributed.parallel_layers.checkpointing`: a checkpoint with one file for each tensor and pipeline parallel rank."""

from nxd_jax.tensor_parallel.rank_files import NXD_SKIP_RENDEZVOUS, ensure_directory_exists, get_sharded_model_dict, load, save

__all__ = [
    "NXD_SKIP_RENDEZVOUS",
    "ensure_directory_exists",
    "get_sharded_model_dict",
    "load",
    "save",
]

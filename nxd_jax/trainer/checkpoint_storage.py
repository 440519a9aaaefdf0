"""`neuronx_distributed.trainer.checkpoint_storage`: where checkpoints are: a directory, or an address such as s3://bucket/path that fsspec knows."""

from nxd_jax.checkpoint.storage import (
    BaseCheckpointStorage,
    FilesysCheckpointStorage,
    FsspecCheckpointStorage,
    S3CheckpointStorage,
    create_checkpoint_storage,
)

__all__ = [
    "BaseCheckpointStorage",
    "FilesysCheckpointStorage",
    "FsspecCheckpointStorage",
    "S3CheckpointStorage",
    "create_checkpoint_storage",
]

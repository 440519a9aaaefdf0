"""Checkpoints that any layout of ranks can load: full arrays, whatever ranks held of them. `neuronx_distributed.trainer.checkpoint` is made of this.

In the order a save goes: `contents` (what a model and an optimizer consist of), `placement` (which part of which full array a rank's tensor is), `arrays` (full
`jax.Array`s out of what ranks hold, and back), `orbax_files` (arrays to disk), `tags` (folders, completion marks, retention), `worker` (in the background),
`saving` (one save of all that).
"""

"""`neuronx_distributed_training.lightning_modules`: modules, data modules and the Trainer of YAML workflows."""

import nxd_jax.lightning  # noqa: F401  (makes pytorch_lightning and lightning.pytorch one package, before anything here imports it)

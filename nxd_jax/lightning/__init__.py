"""`neuronx_distributed.lightning`: PyTorch Lightning's Trainer on (emulated) NeuronCores.

Importing it makes `pytorch_lightning` and `lightning.pytorch` one package, so that scripts may use either (`_one_lightning`).
"""

from nxd_jax.lightning import _one_lightning

_one_lightning.unify()

from nxd_jax.lightning.accelerator import NeuronXLAAccelerator  # noqa: E402
from nxd_jax.lightning.checkpoint_io import NeuronCheckpointIO  # noqa: E402
from nxd_jax.lightning.launcher import _NeuronXLALauncher  # noqa: E402
from nxd_jax.lightning.logger import NeuronTensorBoardLogger  # noqa: E402
from nxd_jax.lightning.module import NeuronLTModule  # noqa: E402
from nxd_jax.lightning.neuron_hooks_callback import NeuronHooksCallback  # noqa: E402
from nxd_jax.lightning.precision_plugin import NeuronXLAPrecisionPlugin  # noqa: E402
from nxd_jax.lightning.progress_bar import NeuronTQDMProgressBar  # noqa: E402
from nxd_jax.lightning.strategy import NeuronXLAStrategy  # noqa: E402

__all__ = [
    "NeuronCheckpointIO",
    "NeuronHooksCallback",
    "NeuronLTModule",
    "NeuronTQDMProgressBar",
    "NeuronTensorBoardLogger",
    "NeuronXLAAccelerator",
    "NeuronXLAPrecisionPlugin",
    "NeuronXLAStrategy",
    "_NeuronXLALauncher",
]

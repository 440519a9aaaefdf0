"""What `import lightning` finds where only the package pytorch-lightning is installed: the names that Lightning has at its top level.

Imported under the name `lightning` only, by `_one_lightning`.
"""

import lightning_fabric as fabric
import pytorch_lightning as pytorch
from lightning_fabric import Fabric
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer, __version__, seed_everything

__all__ = [
    "Callback",
    "Fabric",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "fabric",
    "pytorch",
    "seed_everything",
]

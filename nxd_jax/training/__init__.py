"""`neuronx_distributed_training`: one YAML file in, a trained model out.

| module | what it does |
|---|---|
| `command` | `nxdt-train CONFIG.yaml key=value ...` |
| `config` | reads and checks the file |
| `environment` | what of it goes to environment variables |
| `registry` | which data module and which model a file names |
| `workflow` | `train(cfg)`: puts them together and trains |
| `lightning_modules`, `models`, `optim`, `utils` | under the original's names |

Needs the extra `nxdt` (`pip install "nxd-jax[nxdt]"`): hydra-core, omegaconf, datasets, Lightning, transformers.
"""

from nxd_jax._distribution import __version__

__all__ = ["__version__"]

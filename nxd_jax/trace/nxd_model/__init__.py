"""`neuronx_distributed.trace.nxd_model`: a model of traced programs."""

from nxd_jax.trace.nxd_model.base_nxd_model import BaseNxDModel, StateInitializer
from nxd_jax.trace.nxd_model.nxd_model import NxDModel
from nxd_jax.trace.nxd_model.torchscript import TorchScriptNxDModel, convert_nxd_model_to_torchscript_model

__all__ = ["BaseNxDModel", "NxDModel", "StateInitializer", "TorchScriptNxDModel", "convert_nxd_model_to_torchscript_model"]

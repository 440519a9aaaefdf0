"""`neuronx_distributed.utils.tensor_capture`: what modules inside a model got and gave, and tensors that its forward names, to look at or to return.

    model = enable_tensor_capture(model, ["layers.0", "lm_head"])
    model(x)
    get_captured_tensors_dict()  # {"layers.0.outputs": ..., "lm_head.outputs": ...}

On xla nothing is read. Of a tensor that differs by rank every rank has its own (`torch_bridge.shards`). A forward that returns the dict gives it in graphs
of `torch_bridge.capture` and in traced models, too. One model at a time: enabling another one ends the capture of the first.
"""

from nxd_jax.utils.tensor_capture.api import (
    disable_tensor_capture,
    enable_tensor_capture,
    get_available_modules,
    get_captured_tensors_dict,
    register_tensor,
)

__all__ = ["disable_tensor_capture", "enable_tensor_capture", "get_available_modules", "get_captured_tensors_dict", "register_tensor"]

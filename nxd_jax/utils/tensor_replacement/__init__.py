"""`neuronx_distributed.utils.tensor_replacement`: put given tensors in place of what modules give, where a mask says so.

    RuntimeRegister.module_superset = ["layers.0", "layers.1"]  # of tensor_replacement.registry
    model, hooks = modify_model_for_tensor_replacement(model)
    model(x, tensor_0, tensor_1, mask_0, mask_1)

With the right values forced in layer by layer, one sees where a model begins to differ from another. Nothing is read on xla: it works in graphs, too.
"""

from nxd_jax.utils.tensor_replacement.model_modification import modify_model_for_tensor_replacement, patch_forward_with_additional_args

__all__ = ["modify_model_for_tensor_replacement", "patch_forward_with_additional_args"]

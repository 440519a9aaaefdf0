"""`neuronx_distributed.modules.lora`: low-rank adapters, of torch's layers and of parallel ones.

config.py says what adapters a model gets, targets.py where; layer.py and tp_layer.py are the adapted layers, making.py puts them in; model.py is the wrapper,
state.py, loading.py and storage.py what it saves and loads, and where; peft_format.py and peft_tensors.py Hugging Face PEFT's files.
"""

from nxd_jax.modules.lora.config import LoraConfig
from nxd_jax.modules.lora.layer import LoraConv2d, LoraEmbedding, LoraLayer, LoraLinear
from nxd_jax.modules.lora.model import LoRAModel, LoraModel, get_lora_model
from nxd_jax.modules.lora.tp_layer import LoraGQAQKVParallelLinear, LoraParallelConv2d, LoraParallelEmbedding, LoraParallelLinear

__all__ = [
    "LoRAModel",
    "LoraConfig",
    "LoraConv2d",
    "LoraEmbedding",
    "LoraGQAQKVParallelLinear",
    "LoraLayer",
    "LoraLinear",
    "LoraModel",
    "LoraParallelConv2d",
    "LoraParallelEmbedding",
    "LoraParallelLinear",
    "get_lora_model",
]

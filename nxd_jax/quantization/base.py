"""What all quantized parallel layers have in common: their parameters, and how ranks share them out."""

from __future__ import annotations

import logging
import math
from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from nxd_jax.quantization import scale_parts
from nxd_jax.quantization.quantization_config import (
    _DEFAULT_CUSTOM_QCONFIG_DICT,
    ActivationQuantizationType,
    QuantizationType,
    QuantizedDtype,
    ScaleDtype,
    validate_block_axis_size,
)
from nxd_jax.quantization.schemes import Scheme
from nxd_jax.quantization.state_dict_adaptor import QuantizedParallelLinearLayerStateDictAdaptor as Adaptor
from nxd_jax.tensor_parallel import full_weights, sharded_weights
from nxd_jax.tensor_parallel.base_layer import BaseParallelLinear
from nxd_jax.tensor_parallel.sharded_weights import Partition
from torch_bridge.mesh import abstract_arrays

logger = logging.getLogger("nxd_jax")

Config = Any
"""A dict that one of the functions of `quantization_config` made."""


class BaseQuantizeParallelLinear(BaseParallelLinear, metaclass=ABCMeta):
    """A parallel linear layer whose weight is int8 or float8, with a scale: for inference, nothing of it is trained.

    State: `weight` (zeros at first), `scale` (ones), `bias` (zeros, if any), and `input_scale` [1] if inputs are quantized with a static scale. Values come
    from a quantized checkpoint, or with `from_float(..., quantize_weights=True)` from the float layer. Casts such as `.to(torch.bfloat16)` leave the weight and
    the scales in their dtypes. Attributes: quantization_type, quantized_dtype, scale_dtype, activation_quantization_type (members of those enums),
    dequantized_dtype (of the bias), clamp_bound.

    Raises AssertionError for unknown types and dtypes, a `quantization_per_channel_axis` that is not the output dim, and blocks that do not fit;
    NotImplementedError for packed dtypes and types that are not for this layer.
    """

    scale: torch.nn.Parameter
    input_scale: torch.nn.Parameter | None
    _scheme: Scheme
    _channel_axis = 0
    """The weight's output dim: 0, or 2 in a layer of experts, which has three dims."""

    # -- configuration -------------------------------------------------------------------------------

    def _set_quantization(
        self,
        quantization_type: QuantizationType | str,
        quantized_dtype: QuantizedDtype | torch.dtype,
        dequantized_dtype: torch.dtype,
        per_channel_axis: int | None = None,
        block_axis: list[int] | None = None,
        block_size: list[int] | None = None,
        scale_dtype: ScaleDtype | torch.dtype = torch.float32,
        activation_quantization_type: ActivationQuantizationType | str | None = None,
        clamp_bound: float = math.inf,
    ) -> None:
        """What must be known before the constructor of a linear layer makes weights."""
        for given, kinds in ((quantization_type, QuantizationType), (quantized_dtype, QuantizedDtype), (scale_dtype, ScaleDtype)):
            if given not in kinds:
                allowed = [kind.value for kind in kinds]
                raise AssertionError(f"{given} quantization is not supported currently. Specify from {allowed} ({kinds.__name__})")
        self.quantization_type = QuantizationType(quantization_type)
        self.quantized_dtype = QuantizedDtype(quantized_dtype)
        self.dequantized_dtype = dequantized_dtype
        self.scale_dtype = ScaleDtype(scale_dtype)
        self.activation_quantization_type = ActivationQuantizationType(activation_quantization_type)
        self.clamp_bound = clamp_bound
        self._check_supported()
        axis: int | None = None
        blocks: tuple[tuple[int, int], ...] = ()
        if self.quantization_type is QuantizationType.BLOCKWISE_SYMMETRIC:
            blocks = scale_parts.blocks_of(*validate_block_axis_size(block_axis, block_size), dims=3 if self._channel_axis else 2)
        elif self.quantization_type is not QuantizationType.PER_TENSOR_SYMMETRIC:
            axis = self._channel_axis
            if per_channel_axis not in (None, axis):
                raise AssertionError(
                    f"Only per_channel_axis={axis} supported for post-matmul output dequantization by {type(self).__name__}; got {per_channel_axis}"
                )
        self._scheme = Scheme(self.quantization_type, self.quantized_dtype.value, axis, blocks, self.scale_dtype.value)

    def _check_supported(self) -> None:
        name, kind = type(self).__name__, self.quantization_type
        if self.quantized_dtype.get_packed_count() > 1:
            raise NotImplementedError(
                f"{name} does not take {self.quantized_dtype.name}, four numbers packed in one, which Neuron's kernels read: dequantize the checkpoint "
                "with quantization.dequantize.blockwise_scale_dequantize and quantize it anew, to F8E4M3 or INT8"
            )
        if kind is QuantizationType.PER_KEY_SYMMETRIC:
            raise NotImplementedError(f"{name} does not take {kind.value}, which is for KV caches: use per_channel_symmetric")
        if kind is QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC and not self._channel_axis:
            raise NotImplementedError(
                f"{name} has no experts and does not take {kind.value}: use per_channel_symmetric here; quantize.convert's `include` chooses layers"
            )

    # -- parameters ----------------------------------------------------------------------------------

    def initialize_weight_and_bias(self) -> None:
        super().initialize_weight_and_bias()
        shape = scale_parts.local_shape(self._scheme, self.weight_shape, self._partition, type(self).__name__)
        partition = scale_parts.partition_of(self._scheme, self._partition)
        self._make("scale", shape, self.scale_dtype.value, partition)
        if self.activation_quantization_type is ActivationQuantizationType.STATIC:
            self._make("input_scale", [1], torch.float32, None)
        else:
            self.register_parameter("input_scale", None)
        if partition is not None:
            self._partitions["scale"] = partition
            partition.mark(self.scale)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self._set_readers()

    def _set_readers(self) -> None:
        """How whole state dicts are read for these parameters (`trace.shard_checkpoint`)."""
        for name, parameter in self.named_parameters(recurse=False):
            if name != "input_scale":
                parameter.get_tensor_from_state_dict = getattr(Adaptor, f"get_{name}_from_state_dict")  # type: ignore[attr-defined]
            if name in ("weight", "bias"):
                parameter.set_tensor_to_state_dict = getattr(Adaptor, f"set_{name}_to_state_dict")  # type: ignore[attr-defined]

    def _make_weight(self) -> None:
        self._make("weight", self.weight_shape, self.quantized_dtype.value, self._partition)
        self._partition.mark(self.weight)
        if self.keep_master_weight and not self.weight.is_meta:
            self.master_weight = torch.zeros(self._partition.full_shape(self.weight_shape), dtype=self.weight.dtype, device="cpu")

    def _draw_weight(self) -> None:
        self._fill("weight", self._partition)

    def _init_bias(self, bias: torch.Tensor | None = None) -> None:
        target = self.bias if bias is None else bias
        assert target is not None
        with torch.no_grad():
            target.zero_()

    def init_weight_cpu(self) -> None:
        """Fill the parameters with what they hold at first: also what gives a layer made on "meta" its values."""
        super().init_weight_cpu()
        self._fill("scale", self._partitions.get("scale"))
        if self.input_scale is not None:
            self._fill("input_scale", None)

    reset_parameters = init_weight_cpu

    def _make(self, name: str, shape: Any, dtype: torch.dtype, partition: Partition | None) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False))
        if not sharded_weights.is_meta(self.device):
            self._fill(name, partition)

    def _fill(self, name: str, partition: Partition | None) -> None:
        """Zeros in a weight, what stands for 1 in a scale."""
        like = self.get_parameter(name)
        value = {"weight": 0.0, "scale": self.scale_dtype.get_default_scale(), "input_scale": 1.0}[name]
        part = torch.full(like.shape, value, dtype=like.dtype, device="cpu")
        made: torch.Tensor
        device = sharded_weights.home(self.device)
        if partition is not None and partition.hosts_several():
            made = sharded_weights.from_parts(lambda r: part, partition, device)
        else:
            made = part.to(device) if partition is None else sharded_weights.placed_alone(part, partition, device)
        sharded_weights.assign(self, name, made)

    def _check_pad_false_for_training(self) -> None:
        """Nothing is trained, so padding is no mistake in training mode either."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Casts leave the quantized numbers and their scales alone."""
        kept = [p for p in (self.weight, self.scale, self.input_scale) if p is not None]

        def moved(t: torch.Tensor) -> torch.Tensor:
            made = fn(t)
            keeps = made.dtype is not t.dtype and any(t is p for p in kept)
            return t.to(made.device) if keeps else made

        return super()._apply(moved, recurse)

    # -- values --------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def from_float(cls, mod: Any, q_config: Config = _DEFAULT_CUSTOM_QCONFIG_DICT, quantize_weights: bool = False) -> Any:
        """The quantized layer of a float one: with zeros for weights, or with `quantize_weights` the float layer's, quantized, and its bias."""

    def _taking(self, mod: Any, quantize_weights: bool) -> Any:
        """This layer, with a float layer's values if they are asked for, after the hook `post_create_quantized_module_hook` that the float one may have."""
        if self.weight.is_meta and not mod.weight.is_meta:  # in an abstract run layers are made on "meta"
            self.to(mod.weight.device)
        if quantize_weights and not abstract_arrays.active():
            self._take_values(mod)
        hook = getattr(mod, "post_create_quantized_module_hook", None)
        if hook is not None:
            hook(self)
        self.train(mod.training)
        return self

    def _take_values(self, mod: Any) -> None:
        group = self.tensor_parallel_group
        full = full_weights.gather_full(mod.weight, group=group)
        assert isinstance(full, torch.Tensor)
        weight, scale = self._scheme.quantize(full)
        full_weights.scatter_full(self.weight, weight, group)
        full_weights.scatter_full(self.scale, self._spread(scale), group)
        if self.bias is not None:
            with torch.no_grad():
                self.bias.copy_(mod.bias)
        if self.keep_master_weight:
            self.master_weight, self.master_bias = weight, mod.master_bias
        if self.input_scale is not None:
            logger.warning(
                "%s: inputs are quantized with a static scale, and input_scale is 1 until it is loaded or set", type(self).__name__
            )

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What the weight stands for, numbers times scale: a rank's part. (NxD has no such function.)"""
        return self._scheme.dequantize(self.weight, self.scale, dtype)

    def quantized(self, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(numbers, scale) of a whole float weight, padded as the layer's is, as a checkpoint that is cut for ranks has them. (NxD has no such function.)"""
        weight, scale = self._scheme.quantize(full)
        if scale.is_floating_point():  # of outputs of zeros, such as padding adds: what `scale_parts.spread` fills up with
            scale = scale.masked_fill(self._scheme.largest(full.detach().abs()) == 0, 0)
        return weight, self._spread(scale)

    def _spread(self, scale: torch.Tensor) -> torch.Tensor:
        partition = self._partitions.get("scale")
        shape = list(self.scale.shape) if partition is None else partition.full_shape(self.scale.shape)
        return scale_parts.spread(scale, self._scheme, self._full_shape(), (self._partition.dim, self._padding()), shape)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Pad the whole weight or bias `prefix` of a state dict as the layer is, and with the weight bring its scale into the shape that ranks share out.

        Raises RuntimeError for a size that is not the layer's, ValueError for a scale that does not belong to the weight.
        """
        super().preshard_hook(model_state_dict, prefix)
        name = prefix.rpartition(".")[2]
        scale = f"{prefix.removesuffix(name)}scale"
        if name == "weight" and prefix in model_state_dict and scale in model_state_dict:
            model_state_dict[scale] = self._spread(model_state_dict[scale])

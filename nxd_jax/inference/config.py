"""How a language model is traced for inference: ranks, batch, lengths, sampling."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nxd_jax.inference import quantized_weights
from nxd_jax.inference.buckets import generate_buckets
from nxd_jax.inference.kv_cache import check_quantization
from nxd_jax.inference.lora_serving import LoraServingConfig
from nxd_jax.quantization import KVQuantizationConfig
from nxd_jax.tensor_parallel.head_plans import GQA

_SMALLEST_BUCKET = 128
"""Tokens: where buckets begin with `enable_bucketing`, as in the original's examples."""
_KV = "kv_quant_config"


_HEADS = (
    "heads that guess ahead are not traced: give a draft model to generate(draft=...), with speculation_length, or put "
    "nxd_jax.utils.speculative_decoding.NeuronSpeculation around a model of your own"
)
_INSTEAD = {
    **dict.fromkeys(("is_medusa", "medusa_speculation_length", "num_medusa_heads", "medusa_tree"), _HEADS),
    **dict.fromkeys(("enable_eagle_speculation", "is_eagle_draft", "enable_fused_speculation"), _HEADS),
    **dict.fromkeys(("n_positions", "max_length"), "say seq_len, the tokens of a prompt with its answer"),
    "max_new_tokens": "give it to generate(max_new_tokens=...), and a seq_len that has room for them",
    "pp_degree": "raise tp_degree: there are no pipeline stages here",
    "world_size": "it follows from tp_degree and ep_degree",
    "padding_side": "leave it out: prompts are lists, which LanguageModel pads itself",
}
"""NeuronConfig's fields that are not here."""


@dataclasses.dataclass(frozen=True)
class InferenceConfig:
    """What the original's examples call NeuronConfig; fields have its names where it has them.

    tp_degree: tensor-parallel ranks. batch_size: lines of the KV cache, and rows of each decode. seq_len: tokens that a line holds, those of the prompt
    included. max_context_length: tokens of the longest prompt; default seq_len. torch_dtype: of weights and cache, a dtype or its name, as
    config.json has it ("bfloat16"); default what config.json says, else float32.

    ctx_batch_size: prompts that one prefill takes; default batch_size, with is_continuous_batching 1: there, prompts come and go while others are decoded.
    enable_bucketing: trace prefill and decode for several lengths (`generate_buckets` from 128 on); context_buckets, decode_buckets: these instead.

    on_device_sampling: programs return tokens in place of logits, greedy (top_k 1) or drawn among the top_k likeliest. speculation_length: also trace a
    program that scores so many tokens at once (0: none). gqa: how K/V heads are shared out (`head_plans.plan`); default: the rule's choice.
    ep_degree: expert-parallel ranks for each tensor-parallel one, of which each has some of the experts, and what else there is besides: there are
    tp_degree * ep_degree ranks. fused_qkv: queries, keys and values are one weight and one product (`Wqkv`); same results.

    flash_decoding_enabled: ranks that would hold copies of a K/V head's cache share out its slots instead (`flash_decoding`); there must be such ranks.

    kv_quant_config: keep the KV cache in float8, a byte for each number: `KVQuantizationConfig()` (`kv_cache.KVCacheManager`); default torch_dtype.

    quantized: weights of linear layers, experts and all but lm_head, in int8 or float8, quantized as a folder is read. quantization_type: what shares a scale,
    "per_tensor_symmetric" (the original's default) or "per_channel_symmetric", each output by itself, which is nearer to the float weights.
    quantization_dtype: "int8", "f8e4m3" (up to 240, or what `NXD_JAX_FP8_MAX` says) or "f8e5m2", or another name of these, such as torch's
    "float8_e4m3fn", or the dtype; it is kept under the first names. quantized_checkpoints_path: not needed, must be None.

    lora_config: room for LoRA adapters, of which each row has one or none (`lora_serving.LoraServingConfig`); default none.

    Raises ValueError for numbers that do not fit together and a torch_dtype that weights cannot have, NotImplementedError for quantized=True with lora_config
    and for quantized_checkpoints_path, TypeError for fields that are not here, saying what to do instead, and what `KVCacheManager` does.
    """

    tp_degree: int = 1
    batch_size: int = 1
    seq_len: int = 128
    max_context_length: int | None = None
    torch_dtype: torch.dtype | None = None
    is_continuous_batching: bool = False
    ctx_batch_size: int | None = None
    enable_bucketing: bool = False
    context_buckets: tuple[int, ...] = ()
    decode_buckets: tuple[int, ...] = ()
    on_device_sampling: bool = False
    top_k: int = 1
    speculation_length: int = 0
    gqa: GQA | None = None
    kv_quant_config: KVQuantizationConfig | None = None
    lora_config: LoraServingConfig | None = None
    fused_qkv: bool = False
    ep_degree: int = 1
    flash_decoding_enabled: bool = False
    quantized: bool = False
    quantization_type: str = "per_tensor_symmetric"
    quantization_dtype: str | torch.dtype = "int8"
    quantized_checkpoints_path: str | None = None

    def __new__(cls, *args: object, **given: object) -> InferenceConfig:
        """Say what to do in place of the original's fields that are not here."""
        for name in given:
            if name in _INSTEAD:
                raise TypeError(f"InferenceConfig has no {name}: {_INSTEAD[name]}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("tp_degree", "ep_degree", "batch_size", "seq_len", "top_k"):
            _check_number(name, getattr(self, name), 1)
        _check_number("speculation_length", self.speculation_length, 0)
        check_quantization(self.kv_quant_config)
        if self.lora_config is not None and not isinstance(self.lora_config, LoraServingConfig):
            raise TypeError(f"lora_config must be a LoraServingConfig or None, got {type(self.lora_config).__name__}")
        quantized_weights.check(self.quantized, self.quantization_type, self.quantized_checkpoints_path, self.lora_config is not None)
        set_ = object.__setattr__
        set_(self, "quantization_dtype", quantized_weights.dtype_name(self.quantization_dtype))
        set_(self, "torch_dtype", _dtype(self.torch_dtype))
        set_(self, "max_context_length", self.seq_len if self.max_context_length is None else self.max_context_length)
        set_(self, "ctx_batch_size", self.ctx_batch_size or (1 if self.is_continuous_batching else self.batch_size))
        _check_number("max_context_length", self.max_context_length, 1)
        _check_number("ctx_batch_size", self.ctx_batch_size, 1)
        self._check_sizes()
        set_(self, "context_buckets", self._buckets("context_buckets", self.longest_prompt))
        set_(self, "decode_buckets", self._buckets("decode_buckets", self.seq_len))

    def _check_sizes(self) -> None:
        if self.longest_prompt > self.seq_len:
            raise ValueError(
                f"max_context_length={self.max_context_length} must be at most seq_len={self.seq_len}, which a line of the cache holds"
            )
        if self.prompts_at_once > self.batch_size:
            raise ValueError(f"ctx_batch_size={self.ctx_batch_size} must be at most batch_size={self.batch_size}, the lines of the cache")
        if self.speculation_length == 1 or self.speculation_length >= self.seq_len:
            raise ValueError(f"speculation_length={self.speculation_length} must be 0 (none) or from 2 to below seq_len={self.seq_len}")
        if self.speculation_length and self.on_device_sampling and self.top_k > 1:
            raise ValueError(f"speculation is greedy: with speculation_length={self.speculation_length} top_k must be 1, got {self.top_k}")

        adapted = [name for name in ("q_proj", "k_proj", "v_proj") if self.lora_config and name in self.lora_config.target_modules]
        if self.fused_qkv and adapted:
            raise ValueError(
                f"fused_qkv=True has no separate {', '.join(adapted)} that adapters could be of: leave it out, or those out of target_modules of lora_config"
            )

    def _buckets(self, name: str, most: int) -> tuple[int, ...]:
        given = tuple(getattr(self, name))
        if not given:
            return tuple(generate_buckets(min(_SMALLEST_BUCKET, most), most)) if self.enable_bucketing else (most,)
        if list(given) != sorted(set(given)) or given[0] < 1 or given[-1] != most:
            raise ValueError(f"{name}={list(given)} must be ascending numbers of tokens, the last of them {most}")
        return given

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp_degree * self.ep_degree

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return int(self.max_context_length or 0)

    @property
    def prompts_at_once(self) -> int:
        """Rows of a prefill."""
        return int(self.ctx_batch_size or 0)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        found = dataclasses.asdict(self)
        kept = self.kv_quant_config and self.kv_quant_config.quant_dtype
        names = {
            name: str(dtype).removeprefix("torch.") if dtype else None for name, dtype in (("torch_dtype", self.torch_dtype), (_KV, kept))
        }
        return found | names | {"gqa": self.gqa.value if self.gqa else None}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> InferenceConfig:
        """The other way."""
        given = dict(found)
        given["gqa"] = GQA(given["gqa"]) if given["gqa"] else None
        kept = given.get(_KV)
        given[_KV] = KVQuantizationConfig(quant_dtype=getattr(torch, kept)) if kept else None
        for name in ("context_buckets", "decode_buckets"):
            given[name] = tuple(given[name])
        room = given.get("lora_config")
        given["lora_config"] = LoraServingConfig(**room) if room else None
        return cls(**given)


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")


def _dtype(given: Any) -> torch.dtype | None:
    if given is None:
        return None
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise ValueError(
            f"torch_dtype={given!r} must be torch.bfloat16, torch.float16, torch.float32, torch.float64, or the name of one of these"
        )
    return found

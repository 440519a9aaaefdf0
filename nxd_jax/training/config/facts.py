"""What a configuration says, as numbers that rules can compare: layout, batches, the model's sizes, the machine."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxd_jax.inspect.estimate import Transformer
from nxd_jax.topology import Topology
from nxd_jax.training import environment
from nxd_jax.training.optim.registry import OPTIMIZERS
from nxd_jax.training.utils.utils import get_attribute_from_cfg, value_at


@dataclass
class Facts:
    """values: the configuration as plain dicts. bad: keys whose value is wrong, which read as if they were not there. json: of model_config, None if it
    cannot be read."""

    values: Mapping[str, Any]
    bad: Collection[str] = ()
    json: dict[str, Any] | None = None
    custom: bool = False
    rows: int | None = field(default=None)

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path; the default if it is missing, null or wrong."""
        found = value_at(self.values, path)
        return default if found is None or path in self.bad else found

    def has(self, path: str) -> bool:
        """Whether a key is there, perhaps as null."""
        section, _, name = path.rpartition(".")
        found = self.get(section) if section else self.values
        return isinstance(found, Mapping) and name in found

    def loose(self, path: str, default: Any = None) -> Any:
        """As `get`, and if it is not there the key of that name anywhere."""
        if path in self.bad:
            return default
        found = get_attribute_from_cfg(self.values, path, None)
        return default if found is None else found

    # -- layout ---------------------------------------------------------------------------------------

    def size(self, name: str) -> int:
        """Of `distributed_strategy`: tp, pp, cp, ep, vpp or kv, 1 if it is not said."""
        found = self.loose(f"distributed_strategy.{SIZES[name]}", 1)
        return found if isinstance(found, int) and found > 0 else 1

    @property
    def devices(self) -> int | None:
        found = self.get("trainer.devices")
        if isinstance(found, str) and found.isdigit():
            return int(found)
        if isinstance(found, (list, tuple)):
            return len(found) or None
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    @property
    def nodes(self) -> int:
        return int(self.get("trainer.num_nodes", 1))

    @property
    def world(self) -> int | None:
        return None if self.devices is None else self.devices * self.nodes

    @property
    def shared(self) -> int:
        """tp * pp * cp: ranks that hold one copy of the model."""
        return self.size("tp") * self.size("pp") * self.size("cp")

    @property
    def dp(self) -> int | None:
        """Data-parallel ranks; None if they do not come out."""
        return None if self.world is None or self.world % self.shared else self.world // self.shared

    @property
    def gbs(self) -> int:
        return int(self.get("data.global_batch_size", 0))

    @property
    def mbs(self) -> int:
        return int(self.get("data.micro_batch_size", 1))

    @property
    def microbatches(self) -> int | None:
        """Of a step on each data-parallel rank; None if they do not come out."""
        if not self.dp or not self.gbs or self.gbs % (self.mbs * self.dp):
            return None
        return self.gbs // (self.mbs * self.dp)

    @property
    def seq(self) -> int:
        return int(self.get("model.encoder_seq_length", 0))

    @property
    def steps(self) -> int:
        return int(self.get("trainer.max_steps", -1))

    @property
    def sequence_parallel(self) -> bool:
        return bool(self.get("distributed_strategy.sequence_parallel", False)) and self.size("tp") > 1

    @property
    def zero1(self) -> bool:
        return bool(self.get("distributed_strategy.zero1", True))

    # -- the model ------------------------------------------------------------------------------------

    @property
    def source(self) -> Any:
        return self.get("model_source")

    @property
    def hf(self) -> bool:
        return self.source == "hf" and not self.custom

    @property
    def megatron(self) -> bool:
        return self.source == "megatron" and not self.custom

    @property
    def mixtral(self) -> bool:
        return self.hf and "mixtral" in str(self.get("name") or "")

    @property
    def kind(self) -> str:
        """ "llama", "mixtral" or "megatron"."""
        return "megatron" if self.megatron else "mixtral" if self.mixtral else "llama"

    def model_size(self, key: str, json_key: str, default: int = 0) -> int:
        """A size: of `model` if it is said there (and not -1), else of config.json."""
        said = self.loose(f"model.{key}") if key == "hidden_size" else self.get(f"model.{key}")
        if isinstance(said, int) and said > 0:
            return said
        found = (self.json or {}).get(json_key, default)
        return found if isinstance(found, int) else default

    @property
    def layers(self) -> int:
        return self.model_size("num_layers", "num_hidden_layers")

    @property
    def hidden(self) -> int:
        return self.model_size("hidden_size", "hidden_size")

    @property
    def heads(self) -> int:
        return int(self.get("model.num_attention_heads", 0)) if self.megatron else int((self.json or {}).get("num_attention_heads") or 0)

    @property
    def kv_heads(self) -> int:
        if self.megatron:
            return int(self.get("model.num_kv_heads") or self.heads)
        return int((self.json or {}).get("num_key_value_heads") or self.heads)

    @property
    def vocabulary(self) -> int:
        """Of config.json; for Megatron models, whose tokenizer has it, the usual one of that tokenizer, padded."""
        if not self.megatron:
            return int((self.json or {}).get("vocab_size") or 0)
        size = 50257 if "GPT2" in str(self.get("data.tokenizer.type", "")) else 32000
        unit = int(self.get("model.make_vocab_size_divisible_by", 128)) * self.size("tp")
        return -(-size // unit) * unit

    @property
    def experts(self) -> int:
        if not self.get("model.moe") and not self.mixtral:
            return 0
        found = int(self.get("model.moe.num_experts") or (self.json or {}).get("num_local_experts") or 1)
        return 0 if self.megatron and found == 1 else found

    @property
    def top_k(self) -> int:
        return int(self.get("model.moe.top_k") or (self.json or {}).get("num_experts_per_tok") or 1)

    @property
    def capacity_factor(self) -> float | None:
        """None: experts take all tokens."""
        said = self.get("model.moe.capacity_factor", None if self.has("model.moe.capacity_factor") else 1.0)
        return None if not self.experts or self.get("model.moe.dropless") or said is None or float(said) <= 0 else float(said)

    def transformer(self) -> Transformer | None:
        """The model's sizes; None if some are not known."""
        ffn = int(self.get("model.ffn_hidden_size", 0)) if self.megatron else int((self.json or {}).get("intermediate_size") or 0)
        head = int((self.get("model.kv_channels") if self.megatron else (self.json or {}).get("head_dim")) or 0)
        if not all((self.layers, self.hidden, self.heads, ffn, self.vocabulary)) or (not head and self.hidden % self.heads):
            return None
        gated = self.get("model.activation", "gelu") != "gelu" if self.megatron else True
        experts, frequency = self.experts, int(self.get("model.moe.frequency", 1))
        return Transformer(
            name=str(self.get("name") or "model"),
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=ffn,
            vocabulary=self.vocabulary,
            gated=gated,
            rope=not self.megatron or self.get("model.position_embedding_type") == "rope",
            norm="layer" if self.megatron and self.get("model.normalization", "layernorm") != "rmsnorm" else "rms",
            dropout=self.megatron and self.get("model.hidden_dropout", 0.1) > 0,
            head_dim=head,
            tied=bool(
                self.get("model.share_embeddings_and_output_weights", True)
                if self.megatron
                else (self.json or {}).get("tie_word_embeddings")
            ),
            experts=experts,
            dense_layers=self.layers - self.layers // frequency if experts else 0,
            top_k=min(self.top_k, experts),
        )

    @property
    def positions(self) -> int:
        """Rows of the table of learned positions; 0 if there is none."""
        learned = self.megatron and self.get("model.position_embedding_type", "learned_absolute") == "learned_absolute"
        return self.model_size("max_position_embeddings", "max_position_embeddings") if learned else 0

    @property
    def flash(self) -> bool:
        return bool(self.get("model.fusions.flash_attention")) or bool(self.loose("model.fusions.ring_attention"))

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of what the backward pass computes again; ("full",): every layer."""
        granularity = self.get("model.activations_checkpoint_granularity")
        if granularity == "full":
            return ("full",)
        said = self.get("model.activations_checkpoint_recompute", [])
        both = ["CoreAttention", "NeuronSwitchMLP"] if self.megatron and self.experts else ["CoreAttention"]
        names = ([said] if isinstance(said, str) else said) or both if granularity == "selective" else []
        if granularity is None and self.hf and not self.mixtral and not self.flash:
            names = ["CoreAttention"]
        return tuple(map(str, names))

    # -- precision and optimizer ----------------------------------------------------------------------

    @property
    def precision(self) -> str:
        said = self.get("precision.type")
        found = environment.SPELLINGS.get(said, said)
        return found if found in environment.PRECISION_TYPES else ""

    @property
    def itemsize(self) -> int:
        """Bytes of a weight and an activation on the device."""
        return 4 if self.precision == "fp32" else 2

    @property
    def masters(self) -> bool:
        """Whether the optimizer keeps float32 weights."""
        if self.precision == "manual":
            return self.zero1 and bool(self.get("precision.master_weights", False))
        found = environment.PRECISIONS.get(self.precision)
        return self.zero1 and found is not None and found.masters

    @property
    def wide_gradients(self) -> bool:
        """Whether gradients add up in float32."""
        if self.precision == "manual":
            return self.zero1 and bool(self.get("precision.fp32_grad_acc", False))
        return self.masters or self.precision == "fp32"

    @property
    def optimizer(self) -> str | None:
        said = self.get("model.optim.name")
        return said if isinstance(said, str) and said in OPTIMIZERS else None

    # -- the machine ----------------------------------------------------------------------------------

    def topology(self) -> Topology | None:
        """The machine with so many devices on a node; a part of one for other numbers; None if there is none."""
        if self.devices is None:
            return None
        lnc = self.get("trainer.lnc")
        if self.devices <= 32 and lnc != 2:
            return Topology("trn1.32xlarge", nodes=self.nodes, visible=range(self.devices))
        if self.devices <= 64:
            return Topology("trn2.48xlarge", nodes=self.nodes, lnc=2, visible=range(self.devices))
        return Topology("trn2.48xlarge", nodes=self.nodes, lnc=1, visible=range(self.devices)) if self.devices <= 128 else None

    def path(self, key: str) -> Path | None:
        """A key's value as a path of this machine, with ~ and variables in it; None if there is none, or it is an address."""
        said = self.get(key)
        if not isinstance(said, str) or "://" in said:
            return None
        return Path(os.path.expandvars(os.path.expanduser(said)))


SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "kv": "kv_replicator",
}


def read_json(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The contents of a config.json (or of that in a folder), and what is wrong with it."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        return None, f"there is no file {file}"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, f"{file} is no JSON: {error}"
    if not isinstance(found, dict):
        return None, f"{file} must hold an object with sizes such as hidden_size"
    return found, ""

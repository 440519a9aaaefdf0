"""Whether both sides of a conversion compute the same: transformers' model from Hugging Face's weights, ours from the files of ranks, on random tokens.

Both models are in memory, in float32. Ours is on as many tensor-parallel ranks as the files are of, in a process of its own on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nxd_jax.training.converters import megatron_plan, merging, rank_files, sources
from nxd_jax.training.converters.entries import COMPUTED
from nxd_jax.training.converters.held import Held
from nxd_jax.training.converters.hf_plan import GQA
from nxd_jax.training.converters.rank_files import RankFiles
from nxd_jax.training.converters.sizes import Layout
from nxd_jax.training.models.hf_models import kinds
from nxd_jax.training.models.hf_models.kinds import Kind

TOLERANCE = 1e-5
"""Largest difference of logits that counts as equal, as a share of the largest logit (at least 1)."""

ROWS, LENGTH = 2, 16


def verify(hub: Path, files: Path, config: Mapping[str, Any], layout: Layout, model_key: str = "model") -> tuple[float, float]:
    """The largest difference of two models' logits, and the largest logit. Raises RuntimeError with what the process said if it failed."""
    from nxd_jax import run

    backend = "trn2" if layout.neighbours else "trn1"
    given = run.hosting(layout.tp, "nxdt-convert")
    said = {"tp": layout.tp, "hub": str(hub), "files": str(files), "config": dict(config), "copies": layout.copies, "model_key": model_key}
    variables = {**os.environ, **given, "NEURON_PLATFORM_TARGET_OVERRIDE": backend, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(said), env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise RuntimeError(f"the models could not be compared: {last.removeprefix('[rank0]: ')}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return float(found[0]), float(found[1])


def equal(difference: float, largest: float) -> bool:
    """Whether logits are the same but for rounding. (Not a number is not.)"""
    return difference <= TOLERANCE * max(1.0, largest)


def tokens(vocabulary: int) -> torch.Tensor:
    """Random token ids [2, 16]."""
    return torch.randint(0, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def of_transformers(hub: Path, config: Mapping[str, Any], ids: torch.Tensor, model_key: str = "model") -> torch.Tensor:
    """The logits [2, 16, vocabulary] of transformers' model, eager, in float32."""
    from nxd_jax.training.models.hf_models import hf_weights

    kind = _kind(config)
    made = kind.read(config)
    made._attn_implementation = "eager"
    model = kind.theirs(made).float().eval()
    source = sources.open_source(hub, model_key, trust=False)
    state = hf_weights.stacked({name: source.read(name).float() for name in source.shapes})
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if not (made.tie_word_embeddings and name == "lm_head.weight")]:
        raise ValueError(
            f"{hub}: transformers' model has no {', '.join(unexpected) or 'others'}, and misses {', '.join(missing) or 'none'}"
        )
    model.tie_weights()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def of_files(folder: Path, config: Mapping[str, Any], copies: int, ids: torch.Tensor) -> torch.Tensor:
    """The logits of our model, filled from files of ranks. Tensor-parallel ranks must be laid out."""
    from nxd_jax.checkpoint import full_states, original, reading
    from nxd_jax.tensor_parallel.regions import gather_from_tensor_model_parallel_region

    folder = merging.folder_of(folder)
    own = full_states.format_of(folder) == full_states.NXD
    held = _held(folder) if own else rank_files.open_files(folder)
    model = _megatron(config, held) if held.megatron else _hf(config, held, copies)
    if own:
        reading.load_model(folder / "model", model, True, None)
    else:
        original.load(folder, model, None, None, True, COMPUTED)
    model = model.to("xla").eval()
    where = {"position_ids": torch.arange(LENGTH).expand(ROWS, -1).to("xla")} if held.megatron else {}
    with torch.no_grad():
        found = model(ids.to("xla"), **where)
        logits = gather_from_tensor_model_parallel_region(found if held.megatron else found[0]).cpu()
    return logits[..., : int(config["vocab_size"])]  # Megatron's is padded


def _held(folder: Path) -> Held:
    """What nxdt-train saved."""
    from nxd_jax.checkpoint import reading

    found = reading.Folder(folder / "model")
    return Held(folder, {name: found.entry(name)["shape"] for name in found.names()})


def _hf(config: Mapping[str, Any], held: Held, copies: int) -> torch.nn.Module:
    """Llama or Mixtral with the projections that files have; experts take all tokens."""
    kind = _kind(config)
    made = kind.read(config)
    made.qkv_linear, made.fuse_qkv, made.kv_shared_group_size = held.attention == GQA, held.fused, copies
    found: torch.nn.Module = kind.ours(made)
    return found


def _megatron(config: Mapping[str, Any], held: Held) -> torch.nn.Module:
    """Megatron GPT as it is Llama or Mixtral."""
    from nxd_jax.tensor_parallel import parallel_groups
    from nxd_jax.training.models.hf_models.rotary import theta_of
    from nxd_jax.training.models.megatron.gpt_model import GPTModel

    made = _kind(config).read(config)
    rows = held.shapes[megatron_plan.EMBEDDING][0] * (parallel_groups.size("tp") if isinstance(held, RankFiles) else 1)
    return GPTModel(
        vocab_size=rows,
        hidden_size=made.hidden_size,
        max_position_embeddings=made.max_position_embeddings,
        num_layers=made.num_hidden_layers,
        num_attention_heads=made.num_attention_heads,
        num_kv_heads=made.num_key_value_heads,
        kv_channels=made.head_dim,
        ffn_hidden_size=made.intermediate_size,
        normalization="rmsnorm",
        layernorm_epsilon=made.rms_norm_eps,
        activation="swiglu",
        bias=False,
        position_embedding_type="rope",
        position_freq_base=theta_of(made),
        share_embeddings_and_output_weights=made.tie_word_embeddings,
        num_moe_experts=int(config.get("num_local_experts") or 1),
        moe_top_k=int(config.get("num_experts_per_tok") or 1),
        moe_capacity_factor=None,
    )


def _kind(config: Mapping[str, Any]) -> Kind:
    return kinds.mixtral() if config.get("num_local_experts") else kinds.llama()


def difference(hub: Path, files: Path, config: Mapping[str, Any], copies: int, model_key: str = "model") -> tuple[float, float]:
    """The largest difference of the logits, and the largest logit. Tensor-parallel ranks must be laid out."""
    ids = tokens(int(config["vocab_size"]))
    want, got = of_transformers(hub, config, ids, model_key), of_files(files, config, copies, ids)
    return float((got - want).abs().max()), float(want.abs().max())


def main(argv: Sequence[str] | None = None) -> None:
    """The process that compares: what to compare as JSON on stdin, the numbers as JSON on stdout."""
    from nxd_jax.trainer import building, neuronx_distributed_config

    said = json.load(sys.stdin)
    building.lay_out(neuronx_distributed_config(tensor_parallel_size=said["tp"]))
    found = difference(Path(said["hub"]), Path(said["files"]), said["config"], said["copies"], said["model_key"])
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()

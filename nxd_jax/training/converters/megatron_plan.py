"""Plans for Megatron GPT of NxD Training, made of Hugging Face's Llama and Mixtral.

NxD Training (language_model.)                       files of Hugging Face (model.)
embedding.word_embeddings.weight                     embed_tokens.weight
encoder.layers.N.self_attention.query_key_value      self_attn.{q,k,v}_proj     rows: for each head its q, k and v
encoder.layers.N.self_attention.{query,key_value}    the same, grouped queries   key_value: for each K/V head its k and v
encoder.layers.N.self_attention.dense                self_attn.o_proj
encoder.layers.N.mlp.dense_h_to_4h                   mlp.{gate,up}_proj         each rank: its gate, then its up
encoder.layers.N.mlp.dense_4h_to_h                   mlp.down_proj
encoder.layers.N.mlp.moe.{router,expert_mlps}        block_sparse_moe
encoder.final_layernorm.weight, output_layer.weight  norm.weight, lm_head.weight
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from nxd_jax.checkpoint.joining import Split
from nxd_jax.training.converters import entries
from nxd_jax.training.converters.entries import FIRST, LAST, Entry, Plan
from nxd_jax.training.converters.hf_plan import WHOLE, expert_entries
from nxd_jax.training.converters.sizes import Sizes

ROOT = "language_model"
EMBEDDING = f"{ROOT}.embedding.word_embeddings.weight"
VOCABULARY_UNIT = 128
"""`make_vocab_size_divisible_by`, where nobody says it."""


def plan(sizes: Sizes, unit: int = 1) -> Plan:
    """The plan of a model. unit: the vocabulary is padded with zeros to a multiple of it (`make_vocab_size_divisible_by` times the ranks).

    Raises NotImplementedError for biases, which Llama's MLPs and norms have none of in these names."""
    if sizes.attention_bias or sizes.mlp_bias:
        raise NotImplementedError(
            "attention_bias or mlp_bias of config.json with --model_style megatron: only models without biases are converted (has_bias: False in the YAML file)"
        )
    found = [_words(EMBEDDING, "model.embed_tokens.weight", FIRST, sizes, unit)]
    for n in range(sizes.layers):
        ours, theirs = f"{ROOT}.encoder.layers.{n}", f"model.layers.{n}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found.append(Entry(f"{ours}.{norm}.weight", (f"{theirs}.{norm}.weight",), ((sizes.hidden,),), WHOLE, n))
        found += _attention(f"{ours}.self_attention", f"{theirs}.self_attn", n, sizes)
        if sizes.experts:
            found += expert_entries(f"{ours}.mlp.moe", f"{theirs}.block_sparse_moe", n, sizes)
        else:
            found += _mlp(f"{ours}.mlp", f"{theirs}.mlp", n, sizes)
    found.append(Entry(f"{ROOT}.encoder.final_layernorm.weight", ("model.norm.weight",), ((sizes.hidden,),), WHOLE, LAST))
    if not sizes.tied:
        found.append(_words(f"{ROOT}.output_layer.weight", "lm_head.weight", LAST, sizes, unit))
    return Plan(found)


def _words(ours: str, theirs: str, stage: str, sizes: Sizes, unit: int) -> Entry:
    """Embedding or head, padded; without what pads it if the size of the vocabulary is known."""
    known = sizes.vocabulary

    def cut(t: torch.Tensor, _: int) -> torch.Tensor:
        if known is not None and t.shape[0] - known >= unit:
            raise ValueError(
                f"{ours} has {t.shape[0]} rows, and vocab_size={known} padded to a multiple of {unit} has fewer: is it the model's config.json?"
            )
        return t[:known]

    return Entry(
        ours,
        (theirs,),
        ((known, sizes.hidden),),
        Split(0),
        stage,
        lambda t: F.pad(t, (0, 0, 0, -t.shape[0] % unit)),
        cut,
    )


def _attention(ours: str, theirs: str, n: int, sizes: Sizes) -> list[Entry]:
    q, kv, hidden = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.hidden
    names = [f"{theirs}.{letter}_proj.weight" for letter in "qkv"]
    shapes = [(q, hidden), (kv, hidden), (kv, hidden)]
    dense = Entry(f"{ours}.dense.weight", (f"{theirs}.o_proj.weight",), ((hidden, q),), Split(1), n)
    if not sizes.grouped:
        rows = f"{ours}.query_key_value.weight"
        return [Entry(rows, tuple(names), tuple(shapes), Split(0), n, _by_head(sizes.heads), _of_heads(sizes.heads, 3)), dense]
    query = Entry(f"{ours}.query.weight", (names[0],), (shapes[0],), Split(0), n)
    both = tuple(names[1:]), tuple(shapes[1:])
    rows = f"{ours}.key_value.weight"
    return [query, Entry(rows, *both, Split(0), n, _by_head(sizes.kv_heads), _of_heads(sizes.kv_heads, 2)), dense]


def _mlp(ours: str, theirs: str, n: int, sizes: Sizes) -> list[Entry]:
    names, shape = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"), (sizes.intermediate, sizes.hidden)
    return [
        Entry(f"{ours}.dense_h_to_4h.weight", names, (shape, shape), Split(0, 2), n, entries.below, entries.chunk(2)),
        Entry(f"{ours}.dense_4h_to_h.weight", (f"{theirs}.down_proj.weight",), ((sizes.hidden, sizes.intermediate),), Split(1), n),
    ]


def _by_head(heads: int) -> Callable[..., torch.Tensor]:
    """Rows of several weights as one: for each head its rows of the first, of the second and so on."""
    return lambda *parts: torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)


def _of_heads(heads: int, count: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """The inverse of `_by_head`."""
    return lambda t, k: t.unflatten(0, (heads, count, -1))[:, k].flatten(0, 1)

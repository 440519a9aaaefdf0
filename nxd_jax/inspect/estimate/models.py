"""The sizes of transformers, and those of models whose training on Trainium is published."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

NORMS = ("rms", "layer")


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer: a decoder, or an encoder such as BERT.

    name: as it is shown. layers, hidden, heads: as usual. ffn: width of the MLP. vocabulary: of the embedding and of the head, which is applied to every
    token. kv_heads: default `heads`. gated: whether the MLP has a gate (three matrices, two of width ffn first). rope: whether q and k are rotated.
    norm: "rms" or "layer". dropout: whether hidden states and attention probabilities go through dropout. head_dim: default hidden / heads.
    head_hidden: matrices of [hidden, hidden] before the head (BERT: 1). tied: whether the head is the embedding's matrix.

    With experts: experts: of a layer that has them; 0: none has. top_k: of them each token goes to. expert_ffn: their width, default ffn. shared_experts: so
    many more of that width, that every token goes to. dense_layers: how many layers, the first ones, have an MLP of width ffn instead.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    kv_heads: int = 0
    gated: bool = False
    rope: bool = False
    norm: str = "layer"
    dropout: bool = False
    head_dim: int = 0
    head_hidden: int = 0
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise ValueError(f"Transformer: norm={self.norm!r} must be one of {', '.join(map(repr, NORMS))}")
        if self.experts and not 0 < self.top_k <= self.experts:
            raise ValueError(f"Transformer: top_k={self.top_k} must be in 1..{self.experts}, the number of experts")
        if not self.experts and (self.top_k or self.expert_ffn or self.shared_experts or self.dense_layers):
            raise ValueError(
                "Transformer: top_k, expert_ffn, shared_experts and dense_layers are of models with experts; give experts, too"
            )
        if self.dense_layers > self.layers:
            raise ValueError(f"Transformer: dense_layers={self.dense_layers} of {self.layers} layers")

    @property
    def q_size(self) -> int:
        """Width of q, all heads."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_size(self) -> int:
        """Width of k (and of v), all heads."""
        return self.q_size // self.heads * (self.kv_heads or self.heads)

    @property
    def expert_width(self) -> int:
        """The width of an expert."""
        return self.expert_ffn or self.ffn

    def mlp_parameters(self, width: int) -> int:
        """Of the matrices of an MLP (or an expert) of a width."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of a layer without experts (norms and biases left out): h (q + 2 kv) + q h + (3 or 2) h f."""
        h = self.hidden
        return h * (self.q_size + 2 * self.kv_size) + self.q_size * h + self.mlp_parameters(self.ffn)

    @property
    def parameters(self) -> int:
        """Of all matrices: layers, embedding, head."""
        return self._with_experts(self.experts)

    @property
    def active_parameters(self) -> int:
        """Of all matrices that a token meets: as `parameters`, with the top_k experts that it is sent to in place of all."""
        return self._with_experts(self.top_k)

    def _with_experts(self, experts: int) -> int:
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden
        found = self.layers * self.layer_parameters + tables + self.head_hidden * self.hidden**2
        if not self.experts:
            return found
        instead = (experts + self.shared_experts) * self.mlp_parameters(self.expert_width) + self.experts * self.hidden
        return found + (self.layers - self.dense_layers) * (instead - self.mlp_parameters(self.ffn))


_llama = partial(Transformer, gated=True, rope=True, norm="rms")
_gpt = partial(Transformer, vocabulary=50257, dropout=True, tied=True)

LLAMA2_7B = _llama("Llama 2 7B", layers=32, hidden=4096, heads=32, ffn=11008, vocabulary=32000)
LLAMA2_13B = _llama("Llama 2 13B", layers=40, hidden=5120, heads=40, ffn=13824, vocabulary=32000)
LLAMA2_70B = _llama("Llama 2 70B", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=32000)
LLAMA31_8B = _llama("Llama 3.1 8B", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
LLAMA31_70B = _llama("Llama 3.1 70B", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=128256)
GPT_6B = _gpt("GPT-3 6.7B", layers=32, hidden=4096, heads=32, ffn=16384)
GPT_23B = _gpt("GPT-3 23B", layers=28, hidden=8192, heads=64, ffn=32768)
GPT_46B = _gpt("GPT-3 46B", layers=56, hidden=8192, heads=64, ffn=32768)
GPT_175B = _gpt("GPT-3 175B", layers=96, hidden=12288, heads=96, ffn=49152)
BERT_LARGE = Transformer("BERT-Large", layers=24, hidden=1024, heads=16, ffn=4096, vocabulary=30522, dropout=True, head_hidden=1, tied=True)
"""Its head is applied to every token, masked or not, as the Hugging Face model does."""
_mixture = partial(_llama, experts=128, top_k=8)
MIXTRAL_8X7B = _llama("Mixtral 8x7B", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=32000, experts=8, top_k=2)
QWEN3_30B_A3B = _mixture(
    "Qwen3 30B-A3B", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144, vocabulary=151936, expert_ffn=768
)
GLM45_AIR = _mixture(
    "GLM-4.5-Air",
    layers=46,
    hidden=4096,
    heads=96,
    kv_heads=8,
    head_dim=128,
    ffn=10944,
    vocabulary=151552,
    expert_ffn=1408,
    shared_experts=1,
    dense_layers=1,
)
"""Of DeepSeek-V3's shape: shared experts, and a first layer without any."""

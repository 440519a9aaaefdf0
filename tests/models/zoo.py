"""Tiny randomly initialised models, each with a function that gives its loss on a random batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

Loss = Callable[[nn.Module, torch.Generator, str], torch.Tensor]
"""(model, generator of the batch, device) -> loss."""


class Task(NamedTuple):
    """How to build a model (seed torch first) and what to train it on."""

    build: Callable[[], nn.Module]
    loss: Loss


VOCAB = 64
DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
ENCODER = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))


def _mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=4, output_router_logits=True))


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return hf.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=VOCAB, max_position_embeddings=32, **ENCODER))


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=4, num_labels=5, **ENCODER))


def _whisper() -> nn.Module:
    # fmt: off
    config = hf.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16, max_target_positions=32, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )
    # fmt: on
    return hf.WhisperForConditionalGeneration(config)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def _resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, ResidualBlock(8, 8), ResidualBlock(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


class LSTMModel(nn.Module):
    """A two-layer LSTM language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


def tokens(generator: torch.Generator, length: int = 12) -> torch.Tensor:
    """Token ids of two sequences."""
    return torch.randint(3, VOCAB, (2, length), generator=generator)


def causal(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    """The next-token loss of sequences that are their own labels."""
    ids = tokens(generator).to(device)
    return model(input_ids=ids, labels=ids).loss


def masked(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    """The loss of every other token, with the end of one sequence padded."""
    ids = tokens(generator)
    attention, labels = torch.ones_like(ids), ids.clone()
    attention[0, 8:] = 0
    labels[:, ::2] = -100
    return model(input_ids=ids.to(device), attention_mask=attention.to(device), labels=labels.to(device)).loss


def _images(generator: torch.Generator, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 16, 16, generator=generator).to(device), torch.randint(0, 5, (4,), generator=generator).to(device)


def _classified(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    images, labels = _images(generator, device)
    return model(pixel_values=images, labels=labels).loss


def classification_loss(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    images, labels = _images(generator, device)
    return F.cross_entropy(model(images), labels)


def _transcribed(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    sound = torch.randn(2, 8, 32, generator=generator).to(device)
    return model(input_features=sound, labels=tokens(generator, 8).to(device)).loss


def _next_token(model: nn.Module, generator: torch.Generator, device: str) -> torch.Tensor:
    ids = tokens(generator, 8).to(device)
    return F.cross_entropy(model(ids)[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


TASKS = {
    "llama": Task(_llama, causal),
    "gpt2": Task(_gpt2, causal),
    "bert": Task(_bert, masked),
    "t5": Task(_t5, causal),
    "vit": Task(_vit, _classified),
    "mixtral": Task(_mixtral, causal),
    "whisper": Task(_whisper, _transcribed),
    "resnet": Task(_resnet, classification_loss),
    "lstm": Task(LSTMModel, _next_token),
}

"""The models of `zoo.py`: fifteen kinds, three sizes each, in plain torch. Each is made with its batches and a function that gives its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = ("small", "medium", "large")
BATCHES = 4


@dataclass(frozen=True)
class Workload:
    """A model on the CPU, its batches, and `loss(model, *batch)`."""

    model: nn.Module
    batches: list[tuple[Tensor, ...]]
    loss: Callable[..., Tensor]


@dataclass(frozen=True)
class Size:
    """What a size means to most kinds: width of a layer, number of layers, batch, and tokens (or pixels along a side, or time steps)."""

    width: int
    layers: int
    batch: int
    length: int

    @property
    def heads(self) -> int:
        return max(self.width // 32, 2)


TEXT = {"small": Size(64, 4, 4, 32), "medium": Size(256, 6, 4, 128), "large": Size(512, 12, 4, 128)}
IMAGES = {"small": Size(16, 2, 8, 32), "medium": Size(32, 2, 16, 32), "large": Size(64, 3, 16, 48)}
VOCAB = 512


def _tokens(size: Size, kinds: int = 1) -> list[tuple[Tensor, ...]]:
    return [tuple(torch.randint(0, VOCAB, (size.batch, size.length)) for _ in range(kinds)) for _ in range(BATCHES)]


def _images(size: Size, targets: Callable[[], Tensor]) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(size.batch, 3, size.length, size.length), targets()) for _ in range(BATCHES)]


def _own_loss(model: nn.Module, ids: Tensor, *labels: Tensor) -> Tensor:
    return model(input_ids=ids, labels=labels[0] if labels else ids).loss


def _classes(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels)


def _squares(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(inputs), target)


# ------------------------------------------------------------------------------------------------------------------ in plain torch


def mlp(name: str) -> Workload:
    """A perceptron with GELU and dropout."""
    width, layers, batch = {"small": (128, 4, 64), "medium": (512, 6, 128), "large": (1024, 12, 256)}[name]
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)]
    batches = [(torch.randn(batch, width), torch.randint(0, 10, (batch,))) for _ in range(BATCHES)]
    return Workload(nn.Sequential(*parts, nn.Linear(width, 10)), batches, _classes)


class Residual(nn.Module):
    """Two convolutions with batch norm around a shortcut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


def _in_stages(size: Size, activation: nn.Module, block: Callable[[int, int, int], nn.Module], first: int) -> Workload:
    """A classifier of three stages of blocks, each of which doubles the width. block: of inputs, outputs and stride; first: the first one's stride."""
    parts: list[nn.Module] = [nn.Conv2d(3, size.width, 3, 1, 1, bias=False), nn.BatchNorm2d(size.width), activation]
    width = size.width
    for stage in range(3):
        for k in range(size.layers):
            outputs = size.width << stage
            parts.append(block(width, outputs, 1 if k else 2 if stage else first))
            width = outputs
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return Workload(model, _images(size, lambda: torch.randint(0, 10, (size.batch,))), _classes)


def resnet(name: str) -> Workload:
    """A ResNet of basic blocks."""
    return _in_stages(IMAGES[name], nn.ReLU(), Residual, 1)


class Twice(nn.Sequential):
    """Two convolutions with group norm and SiLU."""

    def __init__(self, inputs: int, outputs: int):
        parts: list[nn.Module] = []
        for channels in (inputs, outputs):
            parts += [nn.Conv2d(channels, outputs, 3, 1, 1), nn.GroupNorm(8, outputs), nn.SiLU()]
        super().__init__(*parts)


class UNet(nn.Module):
    """Three scales, with transposed convolutions on the way up."""

    def __init__(self, width: int):
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(Twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(Twice(2 * w, w) for w in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for k, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if k else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), kept.pop()], 1))
        return self.last(x)


def unet(name: str) -> Workload:
    """A U-Net that predicts an image."""
    size = IMAGES[name]
    return Workload(UNet(size.width), _images(size, lambda: torch.randn(size.batch, 3, size.length, size.length)), _squares)


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution of 7 x 7, layer norm over channels and a perceptron, around a shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + (self.scale * inner).permute(0, 3, 1, 2)


def convnext(name: str) -> Workload:
    """A ConvNeXt of three stages."""
    size = IMAGES[name]
    parts: list[nn.Module] = [nn.Conv2d(3, 2 * size.width, 2, 2)]
    for stage in range(3):
        width = 2 * size.width << stage
        parts += [nn.Conv2d(width // 2, width, 2, 2)] if stage else []
        parts += [ConvNeXtBlock(width) for _ in range(size.layers)]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return Workload(model, _images(size, lambda: torch.randint(0, 10, (size.batch,))), _classes)


class InvertedResidual(nn.Module):
    """A pointwise convolution to more channels, a depthwise one and one back, each with batch norm, as in MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        inner = 4 * inputs
        self.parts = nn.Sequential(
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x) if self.same else self.parts(x)


def mobilenet(name: str) -> Workload:
    """A MobileNetV2 of three stages."""
    return _in_stages(IMAGES[name], nn.ReLU6(), InvertedResidual, 2)


class Recurrent(nn.Module):
    """Embedding, LSTM, linear."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCAB, width), nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.last = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.lstm(self.embed(ids))[0])


def lstm(name: str) -> Workload:
    """A language model of LSTM layers."""
    width, layers, batch, steps = {"small": (64, 2, 8, 32), "medium": (256, 2, 16, 64), "large": (512, 3, 16, 128)}[name]
    size = Size(width, layers, batch, steps)
    return Workload(Recurrent(width, layers), _tokens(size), lambda model, ids: F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:]))


class LoopOfCells(nn.Module):
    """Embedding, a Python loop of LSTM cells, linear."""

    def __init__(self, width: int):
        super().__init__()
        self.embed, self.cell, self.last = nn.Embedding(VOCAB, width), nn.LSTMCell(width, width), nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        state, found = None, []
        for t in range(ids.shape[1]):
            state = self.cell(self.embed(ids[:, t]), state)
            found.append(self.last(state[0]))
        return torch.stack(found, 1)


def cells(name: str) -> Workload:
    """A language model that is a Python loop over time."""
    width, batch, steps = {"small": (64, 8, 24), "medium": (256, 16, 48), "large": (512, 16, 64)}[name]
    size = Size(width, 1, batch, steps)
    return Workload(LoopOfCells(width), _tokens(size), lambda model, ids: F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:]))


class DiffusionBlock(nn.Module):
    """A transformer block whose norms are scaled and shifted by what depends on the time (DiT)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, -1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x) * (1 + scale1) + shift1).chunk(3, -1)
        )
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Diffusion(nn.Module):
    """Patches, blocks that know the time, patches."""

    def __init__(self, width: int, heads: int, layers: int, patch: int):
        super().__init__()
        self.width = width
        self.patches, self.unpatch = nn.Conv2d(3, width, patch, patch), nn.ConvTranspose2d(width, 3, patch, patch)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-9.2 / (self.width // 2)))
        angles = time[:, None] * rates
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.patches(x)
        shape, x = x.shape[2:], x.flatten(2).mT
        for block in self.blocks:
            x = block(x, embedded)
        return self.unpatch(x.mT.unflatten(2, shape))


def diffusion(name: str) -> Workload:
    """A diffusion transformer that predicts noise."""
    size = TEXT[name]
    side = 32
    model = Diffusion(size.width, size.heads, size.layers, 4 if name == "small" else 2)
    batches = [
        (torch.randn(size.batch, 3, side, side), torch.rand(size.batch) * 1000, torch.randn(size.batch, 3, side, side))
        for _ in range(BATCHES)
    ]
    return Workload(model, batches, lambda model, x, time, noise: F.mse_loss(model(x, time), noise))


# ------------------------------------------------------------------------------------------------------------------ of transformers


def vit(name: str) -> Workload:
    """A vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    size = TEXT[name]
    config = ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        image_size=32,
        patch_size=4,
        num_labels=10,
    )
    images = [(torch.randn(size.batch, 3, 32, 32), torch.randint(0, 10, (size.batch,))) for _ in range(BATCHES)]
    return Workload(ViTForImageClassification(config), images, lambda model, x, y: model(pixel_values=x, labels=y).loss)


def bert(name: str) -> Workload:
    """BERT with a masked language model's head, and dropout."""
    from transformers import BertConfig, BertForMaskedLM

    size = TEXT[name]
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=size.length,
    )
    return Workload(BertForMaskedLM(config), _tokens(size, 2), _own_loss)


def gpt2(name: str) -> Workload:
    """GPT-2, with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = TEXT[name]
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=size.length,
        use_cache=False,
        **_no_tokens(),
    )
    return Workload(GPT2LMHeadModel(config), _tokens(size), _own_loss)


def _no_tokens() -> dict[str, Any]:
    return {"bos_token_id": None, "eos_token_id": None}


def _decoder(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": size.width,
        "intermediate_size": 8 * size.width // 3 // 8 * 8,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2,
        "max_position_embeddings": size.length,
        "use_cache": False,
        **_no_tokens(),
    }


def llama(name: str) -> Workload:
    """Llama with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return Workload(LlamaForCausalLM(LlamaConfig(**_decoder(TEXT[name]))), _tokens(TEXT[name]), _own_loss)


def mixtral(name: str) -> Workload:
    """Mixtral with four experts, of which each token takes two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_decoder(TEXT[name]), num_local_experts=4, num_experts_per_tok=2)
    return Workload(MixtralForCausalLM(config), _tokens(TEXT[name]), _own_loss)


def t5(name: str) -> Workload:
    """T5, encoder and decoder, with dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    size = TEXT[name]
    config = T5Config(
        vocab_size=VOCAB,
        d_model=size.width,
        d_kv=32,
        d_ff=4 * size.width,
        num_layers=size.layers // 2,
        num_heads=size.heads,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return Workload(T5ForConditionalGeneration(config), _tokens(size, 2), _own_loss)


def mamba(name: str) -> Workload:
    """Mamba, whose recurrence transformers writes as a Python loop over time."""
    from transformers import MambaConfig, MambaForCausalLM

    size = {"small": Size(32, 2, 2, 16), "medium": Size(64, 2, 4, 32), "large": Size(128, 4, 4, 64)}[name]
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=size.width, num_hidden_layers=size.layers, state_size=16, use_cache=False, **_no_tokens()
    )
    return Workload(MambaForCausalLM(config), _tokens(size), _own_loss)


KINDS: dict[str, Callable[[str], Workload]] = {
    f.__name__: f for f in (mlp, resnet, mobilenet, convnext, unet, lstm, cells, vit, bert, gpt2, llama, t5, mixtral, mamba, diffusion)
}


def make(kind: str, size: str) -> Workload:
    """A workload with the same weights and batches in every process."""
    torch.manual_seed(0)
    return KINDS[kind](size)


def names(kinds: Sequence[str], sizes: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs of them."""
    return [(kind, size) for kind in kinds for size in sizes]

"""Programs that must be played: what ordinary models do. They keep replay from being sound by never playing.

Each must be played and equal eager torch. Some change state that their forward does not read, or only numbers that are arguments.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import math
import types
import typing

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.torch_bridge.replay_programs.running import Net, Run
from tests.torch_bridge.replay_programs.table import program

played = functools.partial(program, played=True)


@played("plain")
def mlp(run: Run) -> None:
    run.train(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)))


@played("plain")
def one_layer(run: Run) -> None:
    run.train(Net())


@played("plain")
def many_activations(run: Run) -> None:
    run.train(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.LeakyReLU(), nn.Softplus(), nn.ELU()))


@played("plain")
def functional_activations(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return F.gelu(F.silu(self.layer(x))) + F.softmax(x, dim=-1)

    run.train(Model())


@played("plain")
def convolution_and_batch_norm(run: Run) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    run.train(model, call=lambda m, x, k: m(run.batch(k, 2, 2, 4, 4)))


@played("plain")
def recurrent_layer(run: Run) -> None:
    """It compares its weights with weak references to them."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)

        def forward(self, x):
            return self.lstm(x.unflatten(1, (2, 3)).repeat(1, 4, 2))[0].sum(1)

    run.train(Model())


@played("plain")
def layers_backwards(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.scales = [1.0, 0.5, 0.25]

        def forward(self, x):
            pairs = [(layer, scale) for layer, scale in zip(self.layers, self.scales, strict=True)]
            for layer, scale in reversed(pairs):
                x = layer(x).relu() * scale
            for scale in reversed(self.scales):
                x = x + scale
            return x

    run.train(Model())


@played("plain")
def layer_norm(run: Run) -> None:
    run.train(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)))


@played("plain")
def dropout_of_nothing(run: Run) -> None:
    """With p=0, so that eager torch draws alike; that numbers of the device are drawn anew is `dropout_draws_anew`."""
    run.train(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 6)))


@played("plain")
def dropout_draws_anew(run: Run) -> None:
    model = run.place(nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5)))
    masks = set()
    for k in range(8):
        out = model(run.batch(0))
        out.square().mean().backward()
        run.sync()
        masks.add(tuple((out == 0).flatten().tolist()))
    run.note(len(masks))


@played("plain")
def embedding(run: Run) -> None:
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 6))
    run.train(model, call=lambda m, x, k: m((run.batch(k).abs() * 4).long().clamp(max=9)))


@played("plain")
def residual(run: Run) -> None:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)

        def forward(self, x):
            return x + self.layer(self.norm(x))

    run.train(nn.Sequential(Block(), Block()))


@played("plain")
def attention(run: Run) -> None:
    class Attention(nn.Module):
        def __init__(self, width=6, heads=2):
            super().__init__()
            self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

        def forward(self, x):
            b, s, w = x.shape
            q, k, v = (t.view(b, s, self.heads, w // self.heads).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            scores = (q @ k.transpose(-2, -1) / math.sqrt(w // self.heads)).softmax(-1)
            return self.out((scores @ v).transpose(1, 2).reshape(b, s, w))

    run.train(Attention(), call=lambda m, x, k: m(run.batch(k, 2, 4, 6)))


@played("plain")
def scaled_dot_product(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            q = self.layer(x).unsqueeze(1)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    run.train(Model(), call=lambda m, x, k: m(run.batch(k, 2, 4, 6)))


@played("plain")
def multihead_attention(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    run.train(Model(), call=lambda m, x, k: m(run.batch(k, 2, 4, 6)))


@played("plain", form="function")
def transformer_encoder_layer(run: Run) -> None:
    model = nn.TransformerEncoderLayer(6, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
    run.train(model, call=lambda m, x, k: m(run.batch(k, 2, 4, 6)))


@played("plain")
def causal_mask_in_a_buffer(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tril(torch.ones(4, 4)))

        def forward(self, x):
            y = self.layer(x)
            scores = (y @ y.transpose(-2, -1)).masked_fill(self.mask == 0, float("-inf"))
            return scores.softmax(-1) @ y

    run.train(Model(), call=lambda m, x, k: m(run.batch(k, 2, 4, 6)))


@played("plain")
def tied_weights(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    run.train(Model(), call=lambda m, x, k: m((run.batch(k).abs() * 4).long().clamp(max=9)))


@played("plain")
def loss_inside(run: Run) -> None:
    class Model(Net):
        def forward(self, x, labels=None):
            logits = self.layer(x)
            loss = F.cross_entropy(logits, labels) if labels is not None else None
            return {"loss": loss, "logits": logits}

    run.train(Model(), call=lambda m, x, k: m(x, labels=torch.arange(4).to(run.device))["loss"], loss=lambda out: out)


@played("structure")
def loop_over_a_module_list(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x) * (i + 1)
            return x

    run.train(Model())


@played("structure")
def module_dict(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)})

        def forward(self, x):
            return self.parts["down"](self.parts["up"](x).relu())

    run.train(Model())


@played("structure")
def own_methods(run: Run) -> None:
    class Model(Net):
        def project(self, x, scale=1.0):
            return self.layer(x) * scale

        def activate(self, y):
            return torch.tanh(y)

        def forward(self, x):
            return self.activate(self.project(x, scale=2.0))

    run.train(Model())


@played("structure")
def super_forward(run: Run) -> None:
    class Base(Net):
        def forward(self, x):
            return self.layer(x)

    class Model(Base):
        def forward(self, x):
            return super().forward(x).tanh()

    run.train(Model())


@played("structure")
def helper_function(run: Run) -> None:
    def rotate(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)

    class Model(Net):
        def forward(self, x):
            return rotate(self.layer(x))

    run.train(Model())


@played("structure")
def table_of_activations(run: Run) -> None:
    ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh}

    class Model(Net):
        kind = "tanh"

        def forward(self, x):
            return ACTIVATIONS[self.kind](self.layer(x))

    run.train(Model())


@played("structure")
def keyword_arguments(run: Run) -> None:
    class Model(Net):
        def forward(self, x, *, mask=None, scale=1.0, **others):
            y = self.layer(x) * scale
            return y if mask is None else y * mask

    run.train(Model(), call=lambda m, x, k: m(x, mask=(x > 0).float(), scale=2.0, name="a"))


@played("structure")
def dict_of_tensors_as_argument(run: Run) -> None:
    class Model(Net):
        def forward(self, batch):
            return self.layer(batch["x"]) * batch["weight"]

    run.train(Model(), call=lambda m, x, k: m({"x": x, "weight": x.abs()}))


@played("structure")
def named_tuple_as_result(run: Run) -> None:
    class Output(typing.NamedTuple):
        y: torch.Tensor
        z: torch.Tensor

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return Output(y, y * 2)

    run.train(Model(), call=lambda m, x, k: (lambda out: out.y + out.z)(m(x)))


@played("structure")
def shapes_asked_for(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            b, w = x.shape
            if x.dim() == 2 and w % 2 == 0:
                x = x.view(b, 2, w // 2).flatten(1)
            return self.layer(x) / math.sqrt(x.size(-1))

    run.train(Model())


@played("structure")
def dtype_and_device_asked_for(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
            return self.layer(x) + positions

    run.train(Model())


@played("structure")
def checkpointed(run: Run) -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            for layer in (self.a, self.b):
                x = checkpoint(layer, x, use_reentrant=False).tanh()
            return x

    run.train(Model())


@played("structure")
def nothing_but_evaluation(run: Run) -> None:
    model = run.place(nn.Sequential(nn.Linear(6, 6), nn.Tanh())).eval()
    with torch.no_grad():
        for k in range(8):
            run.note(model(run.batch(k)))
            run.sync()


@played("structure")
def two_shapes_in_turn(run: Run) -> None:
    run.train(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), call=lambda m, x, k: m(x if k % 2 else x[:2]), steps=12)


@played("structure")
def training_and_evaluation_in_turn(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    run.train(model, call=lambda m, x, k: m.train(k % 4 != 3)(x), steps=12)


@played("settings")
def config_object(run: Run) -> None:
    config = types.SimpleNamespace(scale=2.0, bias=True, act="tanh")

    class Model(Net):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def forward(self, x):
            y = self.layer(x) * self.config.scale
            return torch.tanh(y) if self.config.act == "tanh" else y

    run.train(Model(config))


@played("settings")
def config_dataclass(run: Run) -> None:
    @dataclasses.dataclass
    class Inner:
        scale: float = 2.0
        names: tuple = ("a", "b")

    @dataclasses.dataclass
    class Config:
        inner: Inner = dataclasses.field(default_factory=Inner)
        depth: int = 2

    class Model(Net):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def forward(self, x):
            for _ in range(self.config.depth):
                x = self.layer(x) * self.config.inner.scale / len(self.config.inner.names)
            return x

    run.train(Model(Config()))


@played("settings")
def config_dict(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.config = {"scale": 2.0, "head": {"act": "relu"}}

        def forward(self, x):
            y = self.layer(x) * self.config["scale"]
            return F.relu(y) if self.config["head"]["act"] == "relu" else y

    run.train(Model())


@played("settings")
def config_with_properties(run: Run) -> None:
    class Config:
        width, heads = 6, 2

        @property
        def head_size(self):
            return self.width // self.heads

    class Model(Net):
        config = Config()

        def forward(self, x):
            return self.layer(x) / math.sqrt(self.config.head_size)

    run.train(Model())


@played("settings")
def global_constants(run: Run) -> None:
    EPSILON = 1e-5
    SCALES = (0.5, 2.0)

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y * SCALES[1] / (y.std() + EPSILON)

    run.train(Model())


@played("settings")
def global_class_with_settings(run: Run) -> None:
    class Settings:
        scale = 2.0
        limits = [-1.0, 1.0]

    class Model(Net):
        def forward(self, x):
            return (self.layer(x) * Settings.scale).clamp(*Settings.limits)

    run.train(Model())


@played("settings")
def enum_setting(run: Run) -> None:
    class Pooling(enum.Enum):
        MEAN = "mean"
        MAX = "max"

    class Model(Net):
        pooling = Pooling.MEAN

        def forward(self, x):
            y = self.layer(x)
            return y.mean(0) if self.pooling is Pooling.MEAN else y.amax(0)

    run.train(Model())


@played("settings")
def partial_of_a_torch_function(run: Run) -> None:
    class Model(Net):
        act = staticmethod(functools.partial(F.leaky_relu, negative_slope=0.2))

        def forward(self, x):
            return self.act(self.layer(x))

    run.train(Model())


@played("settings")
def state_changes_that_forward_does_not_read(run: Run) -> None:
    class Config:
        scale = 2.0
        unread = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.train(Model(), watch=lambda: setattr(Config, "unread", Config.unread + 1))


@played("settings")
def settings_that_change_once(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.train(Model(), lambda: setattr(Config, "scale", 3.0), steps=12)


@played("settings")
def trainer_keeps_state_beside_it(run: Run) -> None:
    class Trainer:
        def __init__(self):
            self.step, self.losses = 0, []

    trainer = Trainer()

    def watch():
        trainer.step += 1
        trainer.losses.append(trainer.step)
        return trainer.step

    run.train(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), watch=watch)


@played("torch")
def custom_function_without_state(run: Run) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            return y * y

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            return 2 * y * g

    class Model(Net):
        def forward(self, x):
            return Square.apply(self.layer(x))

    run.train(Model())


@played("torch")
def no_grad_block(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            with torch.no_grad():
                norm = x.norm()
            return self.layer(x / norm)

    run.train(Model())


@played("torch")
def gradients_for_what_it_makes(run: Run) -> None:
    """As speech models do it, for activation checkpoints."""

    class Model(Net):
        def forward(self, x):
            x = x[:, None]
            x.requires_grad = True
            return self.layer(x)

    run.train(Model())


@played("torch")
def settings_of_cudnn(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            with torch.backends.cudnn.flags(enabled=False):
                return self.layer(x)

    run.train(Model())


@played("torch")
def gradient_of_the_input(run: Run) -> None:
    def call(model, x, k):
        x.requires_grad_()
        out = model(x)
        (g,) = torch.autograd.grad(out.square().mean(), x, retain_graph=True)
        run.note(g)
        return out

    run.train(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), call=call)


@played("torch")
def adam(run: Run) -> None:
    model = run.place(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for k in range(8):
        optimizer.zero_grad()
        loss = model(run.batch(k)).square().mean()
        loss.backward()
        optimizer.step()
        run.sync()
        run.note(loss)


@played("torch")
def frozen_half(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    run.train(model)


@played("torch")
def accumulation_over_two_batches(run: Run) -> None:
    model = run.place(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    for k in range(12):
        model(run.batch(k)).square().mean().backward()
        if k % 2:
            run.note([p.grad for p in model.parameters()])
            model.zero_grad()
            run.sync()


@played("torch")
def weight_norm(run: Run) -> None:
    model = Net()
    nn.utils.parametrizations.weight_norm(model.layer)
    run.train(model)


@played("torch")
def copied_model(run: Run) -> None:
    model = run.train(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    run.train(copy.deepcopy(model), place=False)


def tiny(kind: str, **settings) -> nn.Module:
    """A model of transformers from a configuration, with no dropout."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    head = (
        "ForConditionalGeneration"
        if kind == "T5"
        else "LMHeadModel"
        if kind == "GPT2"
        else "ForMaskedLM"
        if kind == "Bert"
        else "ForCausalLM"
    )
    return getattr(transformers, kind + head)(config)


def train_tiny(run: Run, model: nn.Module) -> None:
    """Train it on random tokens, with labels."""

    def call(model, x, k):
        ids = torch.randint(32, (2, 5), generator=torch.Generator().manual_seed(k)).to(run.device)
        return model(input_ids=ids, labels=ids).loss

    run.train(model.train(), call=call, loss=lambda out: out, steps=6)


@played("structure")
def copied_config(run: Run) -> None:
    """As models of transformers do it, to have other settings for a part of them."""

    class Config:
        def __init__(self):
            self.scale, self.sizes = 2.0, [3, 4]

        def __getattribute__(self, name):
            return super().__getattribute__(name)

    config = Config()

    class Model(Net):
        def forward(self, x):
            mine = copy.copy(config)
            mine.scale = mine.scale * 3
            sizes = copy.copy(mine.sizes)
            sizes.append(5)
            return self.layer(x) * mine.scale + functools.reduce(lambda a, b: a * b, sizes)

    run.train(Model())


@played("structure")
def arguments_bound_by_a_signature(run: Run) -> None:
    """As transformers' models of images and text find out which hidden states are asked for."""

    def scaled(model, x, scale=2.0, *others, **more):
        return model.layer(x) * scale + sum(others) + more.get("shift", 0.0)

    signature = inspect.signature(scaled)

    class Model(Net):
        def forward(self, x):
            bound = signature.bind(self, x, shift=1.5)
            bound.apply_defaults()
            bound.arguments["more"]["shift"] = 2.5
            return scaled(self, x, **bound.arguments["more"]) * bound.arguments["scale"]

    run.train(Model())


@played("transformers", form="function")
def tiny_llama(run: Run) -> None:
    sizes = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    train_tiny(run, tiny("Llama", **sizes, max_position_embeddings=16))


@played("transformers", form="function")
def tiny_gpt2(run: Run) -> None:
    rates = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    train_tiny(run, tiny("GPT2", vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=16, **rates))


@played("transformers", form="function")
def tiny_bert(run: Run) -> None:
    sizes = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    train_tiny(run, tiny("Bert", **sizes, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


@played("transformers", form="function")
def tiny_t5(run: Run) -> None:
    sizes = dict(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    train_tiny(run, tiny("T5", **sizes, dropout_rate=0.0, decoder_start_token_id=0))

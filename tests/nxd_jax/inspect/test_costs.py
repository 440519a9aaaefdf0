"""Operations by module: against arithmetic by hand, and against XLA's own analysis of the compiled program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch_xla
from jax import lax
from torch import nn

from nxd_jax import inspect
from nxd_jax.inspect.costs import costs
from tests.nxd_jax.inspect.pages import read_html
from tests.nxd_jax.inspect.small import BATCH, INNER, LENGTH, WIDTH, WORDS, train
from torch_bridge.config.settings import SETTINGS

TOKENS = BATCH * LENGTH


class Attention(nn.Module):
    """4 heads of 4, 2 sequences of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 6, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind()
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(2, 6, 16))


LINEAR = (nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False)), (5, 8), 2 * 5 * (8 * 16 + 16 * 4))
CASES: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "mlp": LINEAR,
    "conv": (nn.Conv2d(3, 6, 3, bias=False), (2, 3, 8, 8), 2 * 2 * 6 * 6 * 6 * 3 * 9),
    "conv-padded": (nn.Conv2d(3, 6, 3, padding=1, bias=False), (2, 3, 8, 8), 2 * 2 * 6 * 3 * (3 * 8 - 2) ** 2),
    "conv-strided": (nn.Conv2d(3, 6, 3, stride=2, bias=False), (2, 3, 9, 9), 2 * 2 * 6 * 4 * 4 * 3 * 9),
    "conv-dilated": (nn.Conv2d(3, 6, 3, dilation=2, bias=False), (2, 3, 9, 9), 2 * 2 * 6 * 5 * 5 * 3 * 9),
    "conv-groups": (nn.Conv2d(4, 8, 3, groups=2, bias=False), (2, 4, 8, 8), 2 * 2 * 8 * 6 * 6 * 2 * 9),
    "conv-transposed": (nn.ConvTranspose2d(3, 6, 3, stride=2, bias=False), (2, 3, 4, 4), 2 * 2 * 3 * 4 * 4 * 6 * 9),
    "attention": (Attention(), (2, 6, 16), 2 * 12 * 16 * 48 + 2 * (2 * 2 * 4 * 6 * 6 * 4) + 2 * 12 * 16 * 16),
    "lstm": (nn.LSTM(4, 8, bias=False, batch_first=True), (2, 5, 4), 2 * 2 * 5 * 4 * 8 * (4 + 8)),
    "embedding": (nn.Embedding(10, 4), (2, 5), 0),
}


def xla_flops(found: inspect.Inspection) -> float:
    analysis = found._subject.compiled.cost_analysis()
    return float(analysis.get("flops", 0))


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_arithmetic_and_of_xla(name: str) -> None:
    module, shape, expected = CASES[name]
    x = torch.zeros(shape, dtype=torch.int64 if name == "embedding" else torch.float32)
    found = inspect.look(module, x)
    assert found.costs.flops == expected
    assert found.costs.complete
    theirs = xla_flops(found)  # counts elementwise operations too, and what is in a loop once
    assert expected <= theirs <= expected + 2 * found.costs.other or name in ("embedding", "lstm", "conv-groups")
    if name.startswith("conv") and name != "conv-groups":
        assert abs(theirs - expected) <= found.costs.other, "padding and holes count in neither"


@pytest.mark.parametrize(
    "module", [nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Conv2d(4, 8, 3, groups=2), LINEAR[0]], ids=["strided", "groups", "mlp"]
)
def test_gradients_are_those_of_xla(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input's gradient of a strided convolution has holes between its elements; a grouped one is a loop over its groups, which XLA counts once.

    XLA knows nothing of what kernels of torch compute, so here are none.
    """
    monkeypatch.setattr(SETTINGS, "torch_kernels", False)
    channels = {"Sequential": 8}.get(type(module).__name__) or module.in_channels
    model = module.to("xla")
    x = torch.ones((5, 8) if channels == 8 else (2, channels, 9, 9)).to("xla").requires_grad_()
    model(x).square().sum().backward()
    torch_xla.sync()
    found = inspect.look()
    by_phase = {c.phase: c.flops for c in found.costs.by("phase") if c.flops}
    assert by_phase["backward"] == 2 * by_phase["forward"]
    theirs = xla_flops(found) * getattr(module, "groups", 1)
    assert found.costs.flops == pytest.approx(theirs, rel=0.2) and found.costs.flops < theirs
    module.to("cpu")


def test_a_training_step_is_three_forward_passes() -> None:
    """But for the gradient of what the first layer reads, which nobody asks for: here an embedding, so none is missing."""
    _, step = train()
    block = 2 * TOKENS * 2 * WIDTH * INNER
    head = 2 * TOKENS * WIDTH * WORDS
    assert step.costs.flops == 3 * (2 * block + head)
    rows = {c.module: c for c in step.costs.by("module")}
    assert rows["layers.0.up"].flops == rows["layers.1.down"].flops == 3 * block // 2
    assert rows["head"].flops == 3 * head and rows["embed"].flops == 0
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to("xla")
    model(torch.ones(5, 8).to("xla")).square().sum().backward()
    torch_xla.sync()
    assert inspect.look().costs.flops == 3 * 2 * 5 * (8 * 16 + 16 * 4) - 2 * 5 * 8 * 16


def test_loops_count_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in a loop, with stars for their numbers, add up to the same."""
    found = []
    for fold in ("0", "2"):
        monkeypatch.setenv("NXD_JAX_FOLD", fold)
        found.append(train(blocks=4, steps=1)[1].costs)
    plain, folded = found
    assert any("*" in r.module for r in folded.rows) and not any("*" in r.module for r in plain.rows)
    assert folded.flops == plain.flops and folded.complete
    assert [(c.op, c.flops) for c in folded.by("op") if c.flops] == [(c.op, c.flops) for c in plain.by("op") if c.flops]


def test_by_places() -> None:
    _, step = train()
    c = step.costs
    for keys in (("module",), ("line",), ("op",), ("phase",), ("module", "phase"), ("module", "line", "op", "phase")):
        table = c.by(*keys, most=None)
        for name in ("flops", "other", "bytes"):
            assert sum(getattr(r, name) for r in table) == getattr(c, name), keys
        assert [r.flops for r in table] == sorted((r.flops for r in table), reverse=True)
    top = {r.module: r for r in c.by(depth=1)}
    assert set(top) == {"", "layers", "head", "embed", "drop"}
    assert top["layers"].flops == sum(r.flops for r in c.rows if r.module.startswith("layers."))
    assert {r.module for r in c.by("module", depth=2)} >= {"layers.0", "layers.1", "head"}
    assert str(c).startswith("Operations by module\nmodule") and "(outside modules)" in str(c)
    assert str(c).endswith("other operations on one core") and read_html(c._repr_html_()).cells[0][:2] == ["module", "product FLOP"]
    assert sum(r.calls for r in c.rows) > 100


def test_wrong_key() -> None:
    c = costs(jax.make_jaxpr(lambda x: x + 1)(1.0))
    with pytest.raises(ValueError, match=r"by\('module', 'layer'\): 'layer' must be one of 'module', 'line', 'op', 'phase'"):
        c.by("module", "layer")


# -- jaxprs ------------------------------------------------------------------------------------------------


def of(function: Any, *args: Any) -> inspect.Costs:
    return costs(jax.make_jaxpr(function)(*args))


X, W = jnp.ones((6, 4)), jnp.ones((4, 5))


def test_loops_of_known_and_unknown_length() -> None:
    body = lambda i, x: x @ jnp.ones((4, 4))  # noqa: E731
    known = of(lambda x: lax.fori_loop(0, 7, body, x), X)
    assert known.flops == 7 * 2 * 6 * 4 * 4 and known.complete
    unknown = of(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: body(0, x), x), X)
    assert unknown.flops == 2 * 6 * 4 * 4 and not unknown.complete
    assert str(unknown).endswith("; loops whose length is known only when they run count as one round")
    nested = of(lambda x: lax.scan(lambda x, _: (lax.fori_loop(0, 3, body, x), None), x, None, length=5)[0], X)
    assert nested.flops == 15 * 2 * 6 * 4 * 4 and nested.complete


def test_grouped_products_count_all_rows() -> None:
    """However many blocks their loops run for; forward, and each of the two products of backward."""
    x, weight = torch.ones(32, 16).to("xla").requires_grad_(), torch.ones(3, 16, 8).to("xla").requires_grad_()
    ends = torch.tensor([3, 9, 20], dtype=torch.int32).to("xla")
    torch._grouped_mm(x, weight, offs=ends).square().sum().backward()
    torch_xla.sync()
    found = inspect.look().costs
    assert found.flops == 3 * 2 * 32 * 16 * 8 and found.complete


def test_batched_and_ragged_products() -> None:
    assert of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), jnp.ones((3, 6, 4)), jnp.ones((3, 4, 5))).flops == 2 * 3 * 6 * 4 * 5
    sizes = jnp.array([1, 2, 3])
    ragged = lambda x, w: lax.ragged_dot(x, w, sizes)  # noqa: E731
    weights = jnp.ones((3, 4, 5))
    assert of(ragged, X, weights).flops == 2 * 6 * 4 * 5, "each row meets one group's weights"
    gradients = jax.grad(lambda x, w: ragged(x, w).sum(), (0, 1))
    assert of(gradients, X, weights).flops == 3 * 2 * 6 * 4 * 5


def test_elementwise_moves_and_what_is_free() -> None:
    assert (of(lambda x: x * 2 + 1, X).flops, of(lambda x: x * 2 + 1, X).other) == (0, 48)
    assert of(lambda x: x.reshape(4, 6), X).rows == ()
    moved = of(lambda x: x.T, X)
    assert (moved.flops, moved.other, moved.bytes) == (0, 0, 2 * 24 * 4)
    assert of(jax.nn.relu, X).other == 24, "once, though it has its own rule for gradients"
    assert of(jax.jit(lambda x: x + x), X).other == 24


def test_branches_all_count() -> None:
    found = of(lambda x: lax.cond(x.sum() > 0, lambda x: x @ W, lambda x: (x * 2) @ W, x), X)
    assert found.flops == 2 * 2 * 6 * 4 * 5

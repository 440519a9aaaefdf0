"""What can be traced, and what comes back: structures, dtypes, states, functions, models of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import nn

from nxd_jax.trace.functions import shard_checkpoint
from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.nxd_model import NxDModel
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.trace import nets
from tests.nxd_jax.trace.nets import PROMPT, built

X = torch.arange(6.0).view(2, 3)
IDS, POS = nets.tokens()[:, :PROMPT], torch.arange(PROMPT)


def made(module: Any, *examples: Any, tags: Any = (), **weights: torch.Tensor) -> NxDModel:
    """A model on one rank, ready to be called; the weights are the module's own."""
    builder = ModelBuilder(module)
    for i, example in enumerate(examples):
        builder.trace(example, tag=tags[i] if tags else None)
    found = builder.compile()
    state = module.state_dict() if isinstance(module, nn.Module) else {}
    found.set_weights([{name: t.detach() for name, t in state.items()}])
    found.to_neuron()
    return found


@pytest.fixture(autouse=True)
def own_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_programs_of_equal_shapes_are_told_apart_by_name() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            self.n = self.n + 1
            return x + self.n

    builder = ModelBuilder(Counter()).trace(X, tag="a").trace(X, tag="b").trace((X, X), tag="c")
    model = builder.compile()
    model.to_neuron()
    with pytest.raises(AssertionError, match="2 programs take these inputs: say which with model_name, one of a, b"):
        model(X)
    assert torch.equal(model(X, model_name="b"), X + 1) and torch.equal(model(X, model_name="a"), X + 2)
    assert torch.equal(model(y=X, x=X), X + 3) and torch.equal(model(X, None, model_name="a"), X + 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_with_transposes_on_several_ranks(dtype: torch.dtype) -> None:
    """Such as write a cache by a one-hot product. XLA for CPUs had no code for those of bfloat16: exported programs have a branch for each platform."""

    def products(onehot: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.einsum("bts,bthd->bshd", onehot, x), onehot[0].mT @ x[0].flatten(1), onehot.mT @ x.flatten(2).contiguous().mT[:, :4]

    onehot = torch.nn.functional.one_hot(torch.tensor([[3, 0, 9, 15], [1, 4, 2, 8]]), 16).to(dtype)
    x = torch.arange(2 * 4 * 2 * 8).view(2, 4, 2, 8).to(dtype)
    with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        model = ModelBuilder(products).trace((onehot, x)).compile()
    model.set_weights([{}, {}])
    model.to_neuron()
    for found, expected in zip(model(onehot, x), products(onehot, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Many(nn.Module):
    """Results of many kinds: two programs with two structures."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.w
        if x.shape[0] == 2:
            return {"y": y, "more": (y + 1, [y.sum(), None, 7, "text", True], {3: y > 1}), "none": None, "x": x, "y again": y}
        return [y, 2.5]


def test_structures_of_results() -> None:
    model, y = made(Many(), X, X[:1]), X * 2
    got = model(X)
    assert list(got) == ["y", "more", "none", "x", "y again"] and got["none"] is None
    more = got["more"]
    assert isinstance(more, tuple) and isinstance(more[1], list) and more[1][1:] == [None, 7, "text", True]
    for one, wanted in ((got["y"], y), (more[0], y + 1), (more[1][0], y.sum()), (more[2][3], y > 1), (got["x"], X), (got["y again"], y)):
        torch.testing.assert_close(one, wanted)
    first, number = model(X[:1])
    assert torch.equal(first, y[:1]) and number == 2.5
    assert all(t.startswith("model_") and len(t) == 14 for t in model.get_available_keys())


class Wrong(nn.Module):
    def __init__(self, what: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("state", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.what(x)


def grows(module: Wrong) -> Any:
    module.state = torch.cat([module.state, module.state])
    return module.state


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (lambda x: x[: int(x.sum())], r"asked for the value of a tensor \(\.item\(\)"),
        (lambda x: {1.5: x}, r"returns a dict with key 1\.5: keys must be strings or integers"),
        (lambda x: {"a": {2, 3}, "x": x}, "a traced forward returns set: only tensors, constants"),
        (lambda x: (x, torch.float32), "a traced forward returns dtype: only tensors, constants"),
        (lambda x: (x, torch.zeros(2, device="meta")), r"a traced forward returns a meta tensor \(make it on the device of an input\)"),
        (lambda x: (x, 1j), "a traced forward returns complex: only tensors, constants"),
        (None, r"the forward sets state to torch\.float32 \[4, 3\] on xla.*, which was torch\.float32 \[2, 3\]: what is kept"),
    ],
)
def test_forwards_that_cannot_be_traced(what: Any, text: str) -> None:
    module = Wrong(what)
    if what is None:
        module.what = lambda x: grows(module)
    with pytest.raises(RuntimeError, match=f"HLO generation failed: (.|\n)*{text}"):
        ModelBuilder(module).trace(X)


def test_functions_are_models() -> None:
    def double(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x * 2 if y is None else x * 2 + y

    model = made(double, X, (X, X))
    assert torch.equal(model(X), X * 2) and torch.equal(model(X, y=X), X * 3)


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Weights are cast to the dtype that was traced, inputs too."""
    torch.manual_seed(1)
    linear = nn.Linear(3, 4).to(dtype)
    model = ModelBuilder(linear).trace(X.to(dtype)).compile()
    wide = {name: t.detach().to(torch.float64) for name, t in linear.state_dict().items()}
    model.set_weights([wide])
    model.to_neuron()
    assert model.read_from_neuron_buffer("weight", 0).dtype == dtype
    for x in (X.to(dtype), X.double()):
        got = model(x)
        assert got.dtype == dtype
        torch.testing.assert_close(got, linear(X.to(dtype)).detach())
    copies = shard_checkpoint_alone(wide, linear)
    assert {t.dtype for t in copies[0].values()} == {dtype}


def shard_checkpoint_alone(full: dict[str, torch.Tensor], module: nn.Module) -> list[dict[str, torch.Tensor]]:
    with NxDParallelState():
        return shard_checkpoint(full, module)


def test_buffers_and_parameters() -> None:
    """What nobody saves comes with the program; a parameter that forward updates is a state; a buffer that one program writes is read by another."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.tensor([1.0, 2.0, 3.0]), persistent=False)
            self.register_buffer("log", torch.tensor([9.0, 9.0]))
            self.p = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> Any:
            if x.shape[0] == 1:
                return self.log, self.p, self.table
            self.log[0] += x.sum()
            self.p.add_(self.table)
            return x + self.p

    model = ModelBuilder(Mixed()).trace(X).trace(X[:1]).compile()
    model.to_neuron()
    before = model(X[:1])
    assert [t.tolist() for t in before] == [[9.0, 9.0], [0.0] * 3, [1.0, 2.0, 3.0]]
    assert torch.equal(model(X), X + torch.tensor([1.0, 2.0, 3.0]))
    log, p, _ = model(X[:1])
    assert log.tolist() == [24.0, 9.0] and p.tolist() == [1.0, 2.0, 3.0]
    assert [t.tolist() for t in before[:2]] == [[9.0, 9.0], [0.0] * 3]  # results are copies
    model.replace_weights([{}])
    assert model(X[:1])[0].tolist() == [9.0, 9.0]


def test_results_are_the_callers_own() -> None:
    model = made(nn.Linear(3, 2), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = model(X)
        wanted = got.clone()
        got.zero_()
    assert torch.equal(model(X), wanted) and not got.requires_grad


def test_no_jax_array_is_left_behind() -> None:
    """A call gives back the buffers of the states before it."""
    model = built(2).model()
    model(IDS, POS)
    before = len(jax.live_arrays())
    for _ in range(3):
        model(IDS, POS)
    assert len(jax.live_arrays()) <= before


def test_results_on_the_device_outlive_the_states(tmp_path: Path) -> None:
    """Also one that is a state of another program, which gives that program's memory away; and they can be inputs."""

    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("log", torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, x: torch.Tensor) -> Any:
            if x.shape[0] == 1:
                return self.log, x
            self.log.add_(x[0])
            return self.log, self.log + 1

    with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
        model = ModelBuilder(Log()).trace(X).trace(X[:1]).compile(compiler_workdir=tmp_path)
    model.to_neuron()
    log, same = model([X[:1], X[:1] + 1], forward_mode="ranked")
    after, more = model([X, X + 1], forward_mode="ranked")
    model([X, X], forward_mode="async")
    assert log[0].cpu().tolist() == log[1].cpu().tolist() == [1.0, 2.0, 3.0] and torch.equal(same[1].cpu(), X[:1] + 1)
    assert torch.equal(after[1].cpu(), torch.tensor([1.0, 2.0, 3.0]) + X[0] + 1) and torch.equal(more[0].cpu(), after[0].cpu() + 1)
    again = model([same[0], same[1]], forward_mode="ranked_to_cpu")[1]
    assert torch.equal(again[1], X[:1] + 1)


def test_buffers_of_several_ranks_that_nobody_updates(tmp_path: Path) -> None:
    """They are read from the program where no checkpoint has them, and from the ranks' weights where it does."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(3.0), persistent=False)
            self.register_buffer("shift", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.table + self.shift

    for form in ("mesh", "one"):
        with NxDParallelState(world_size=2, tensor_model_parallel_size=2):
            model = ModelBuilder(Reads()).trace(X).compile(compiler_workdir=tmp_path)
        nets.put_on(model, form)
        model.set_weights([{"shift": torch.full((3,), float(rank))} for rank in range(2)])
        model.to_neuron()
        [got] = model([X, X], forward_mode="ranked_to_cpu")
        assert torch.equal(got[0], X + torch.arange(3.0)) and torch.equal(got[1], got[0] + 1)


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_of_transformers(attention: str) -> None:
    """Results become dicts; weights that are tied go by either name; sdpa's masks are made without a look at their values."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = hf.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    config._attn_implementation = attention
    llama = hf.LlamaForCausalLM(config).eval()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
            return self.llama(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)

    ids = torch.randint(0, 32, (2, 5))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    model = ModelBuilder(Wrapped()).trace(ids).trace((ids, mask)).compile()
    model.set_weights([{f"llama.{n}": t for n, t in llama.state_dict().items()}])
    model.to_neuron()
    with torch.no_grad():
        torch.testing.assert_close(model(ids)["logits"], llama(ids).logits, rtol=1e-4, atol=1e-5)
        got = model(input_ids=ids, attention_mask=mask)
        assert type(got) is dict
        torch.testing.assert_close(got["logits"][:, 2:], llama(ids, attention_mask=mask).logits[:, 2:], rtol=1e-4, atol=1e-5)


READS_A_MASK = """
def skips(mask):
    return not mask.all()

def forward(mask):
    return mask * 2 if skips(mask) else mask
"""


@pytest.mark.parametrize(
    ("file", "advised"),
    [
        ("/site-packages/transformers/masking_utils.py", True),
        ("/site-packages/transformers/models/llama/modeling_llama.py", False),
        ("/home/me/masking_utils.py", False),
    ],
)
def test_values_that_are_read_are_named_by_their_line(file: str, advised: bool) -> None:
    """The innermost line outside torch; where transformers looks at a mask, what to do instead. `is_exporting` is true for the forward alone."""
    scope: dict[str, Any] = {}
    exec(compile(READS_A_MASK, file, "exec"), scope)
    with pytest.raises(RuntimeError, match=rf"It was asked for at {file}:3 in skips") as raised:
        ModelBuilder(scope["forward"]).trace(X)
    assert ('attn_implementation="eager"' in str(raised.value)) is advised
    assert not torch.compiler.is_exporting()


def test_calls_of_several_threads() -> None:
    """They wait for each other, and each step of the state is counted once."""

    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> Any:
            self.n += 1
            return x * 2, self.n

    model = made(Count(), X)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: (k, *model(X + k)), range(40)))
    assert all(torch.equal(y, (X + k) * 2) for k, y, _ in found) and sorted(int(n) for _, _, n in found) == list(range(1, 41))

"""`capture`, `to_jax`, `to_nnx`: the graphs of modules, and what JAX computes from them, against eager torch."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers as hf
from flax import nnx
from torch import fx, nn

import torch_bridge

CLOSE = dict(rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return hf.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Batch norm, dropout, a plain buffer that the forward counts in, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 4)
        self.last.bias = nn.Parameter(torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def arrays(tensors: Any) -> dict[str, jax.Array]:
    return {n: jnp.asarray(t.detach().numpy()) for n, t in tensors}


def close(got: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(np.asarray(got), expected.detach().numpy(), **CLOSE)


# -- capture ---------------------------------------------------------------------------------------


def run_graph(graph: fx.GraphModule, module: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    signature: Any = graph.signature
    return graph(*[params[n] for n in signature.params], *[buffers[n] for n in signature.buffers], *inputs)


def test_a_captured_llama_runs_in_eager_torch(llama: nn.Module, ids: torch.Tensor) -> None:
    graph = torch_bridge.capture(llama, input_ids=ids, labels=ids, use_cache=False)
    assert isinstance(graph, fx.GraphModule)
    graph.graph.lint()
    expected = llama(input_ids=ids, labels=ids, use_cache=False)
    loss, logits = run_graph(graph, llama, ids, ids)[:2]
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(logits, expected.logits)
    loss.backward()
    got = {n: p.grad.clone() for n, p in llama.named_parameters()}
    llama.zero_grad()
    expected.loss.backward()
    for name, p in llama.named_parameters():
        torch.testing.assert_close(got[name], p.grad)
    llama.zero_grad()


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, **self.options)


@pytest.mark.parametrize(
    ("options", "mask", "key_heads"),
    [
        ({}, None, 4),
        ({"is_causal": True}, None, 4),
        ({"is_causal": True, "enable_gqa": True, "scale": 0.3}, None, 2),
        ({}, torch.rand(2, 1, 5, 6) > 0.4, 4),
        ({"enable_gqa": True}, torch.randn(1, 4, 5, 6), 1),
    ],
)
def test_captured_attention_runs_and_differentiates_in_eager_torch(
    options: dict[str, Any], mask: torch.Tensor | None, key_heads: int
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, n, 8, requires_grad=True) for h, n in ((4, 5), (key_heads, 6), (key_heads, 6))]
    if options.get("is_causal"):
        inputs[0] = torch.randn(2, 4, 6, 8, requires_grad=True)
    module = Attention(**options)
    extra = [] if mask is None else [mask]
    graph = torch_bridge.capture(module, *(t.detach() for t in inputs), *extra)
    out, expected = graph(*inputs, *extra)[0], module(*inputs, *extra)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    torch.testing.assert_close(got, torch.autograd.grad((expected * weight).sum(), inputs))


def test_nodes_know_their_module_and_line(llama: nn.Module, ids: torch.Tensor) -> None:
    graph = torch_bridge.capture(llama, input_ids=ids)
    calls = [n for n in graph.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert all(isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "aten" for n in calls)
    sources = [n.meta["source"] for n in calls]
    assert all(s.file.endswith(".py") and s.line > 0 for s in sources)
    projections = [n for n in calls if n.meta["source"].module == "model.layers.1.self_attn.q_proj"]
    assert projections
    assert projections[0].meta["source"].module_class == "Linear"
    assert any("modeling_llama.py" in n.meta["stack_trace"] for n in calls)
    assert all(n.meta["val"].device.type == "meta" for n in calls if isinstance(n.meta.get("val"), torch.Tensor))
    assert len(calls) < 600


def test_a_module_is_captured_from_meta_weights(llama: nn.Module, ids: torch.Tensor) -> None:
    with torch.device("meta"):
        empty = hf.LlamaForCausalLM(llama.config)
    on_meta = torch_bridge.capture(empty, input_ids=ids.to("meta"))
    real = torch_bridge.capture(llama, input_ids=ids)
    assert [str(n.target) for n in on_meta.graph.nodes] == [str(n.target) for n in real.graph.nodes]
    with torch.no_grad():
        torch.testing.assert_close(run_graph(on_meta, llama, ids)[0], llama(input_ids=ids).logits)


def test_captured_on_the_device_itself(llama: nn.Module, ids: torch.Tensor) -> None:
    import copy

    on_xla = copy.deepcopy(llama).to("xla")
    graph = torch_bridge.capture(on_xla, input_ids=ids.to("xla"))
    with torch.no_grad():
        torch.testing.assert_close(run_graph(graph, llama, ids)[0], llama(input_ids=ids).logits)


def test_buffers_that_change_are_results(net: nn.Module) -> None:
    x = torch.randn(3, 4)
    net.dropout.p = 0.0
    graph = torch_bridge.capture(net, x)
    signature: Any = graph.signature
    assert signature.params == [n for n, _ in net.named_parameters()]
    assert signature.n_outs == 1
    assert set(signature.mutated) == {"calls", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    before = {n: b.clone() for n, b in net.named_buffers()}
    out, *new = run_graph(graph, net, x)
    for name, value in net.named_buffers():
        torch.testing.assert_close(value, before[name])
    torch.testing.assert_close(out, net(x))
    after = dict(net.named_buffers())
    for name, value in zip(signature.mutated, new, strict=True):
        torch.testing.assert_close(value, after[name])


class Assigns(nn.Module):
    """Assigns one buffer anew, another to itself, a third in place through a view, and adds to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(4.0))
        self.register_buffer("same", torch.ones(2))
        self.register_buffer("view", torch.zeros(2, 3))
        self.inner = nn.Linear(4, 4)
        self.inner.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.where(x > 0, x, self.cache)
        self.same = self.same
        self.view[0].add_(1)
        self.inner.count = self.inner.count + 2
        with torch.no_grad():
            self.inner.bias.add_(self.cache)
        return self.inner(x)


def test_what_the_forward_assigns_anew_is_a_result() -> None:
    torch.manual_seed(0)
    module = Assigns()
    before = {n: t.detach().clone() for n, t in [*module.named_parameters(), *module.named_buffers()]}
    x = torch.tensor([1.0, -1.0, 2.0, -2.0])
    graph = torch_bridge.capture(module, x)
    signature: Any = graph.signature
    assert set(signature.mutated) == {"cache", "view", "inner.count", "inner.bias"} and signature.left_out == []
    now = dict([*module.named_parameters(), *module.named_buffers()])
    assert all(torch.equal(now[n], t) and now[n].device.type == "cpu" for n, t in before.items())  # the module is as it was
    with torch.no_grad():
        y, *new = run_graph(graph, module, x)
    found = dict(zip(signature.mutated, new, strict=True))
    expected = Assigns()
    expected.load_state_dict(before)
    torch.testing.assert_close(y, expected(x).detach())
    for name, t in [*expected.named_buffers(), *expected.named_parameters()]:
        if name in found:
            torch.testing.assert_close(found[name], t.detach())
    with pytest.raises(
        ValueError,
        match=r"the forward updates parameters \(inner\.bias\), and a JAX function of params and buffers returns new buffers alone",
    ):
        torch_bridge.to_jax(module)(arrays(module.named_parameters()), arrays(module.named_buffers()), None, jnp.asarray(x.numpy()))


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (
            lambda b, x: torch.cat([b, b]),
            r"sets state to torch\.float32 \[4\] on xla.*, which was torch\.float32 \[2\]: what is kept from call to call must",
        ),
        (lambda b, x: b.to(torch.bfloat16), r"sets state to torch\.bfloat16 \[2\] on xla.*, which was torch\.float32 \[2\]"),
        (lambda b, x: torch.zeros(3), r"sets state to torch\.float32 \[3\] on .*, which was torch\.float32 \[2\]"),
        (lambda b, x: None, r"sets state to NoneType, which was torch\.float32 \[2\]"),
    ],
)
def test_a_state_keeps_its_shape_dtype_and_device(new: Any, text: str) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = new(self.state, x)
            return x

    module = Changes()
    with pytest.raises(ValueError, match=f"the forward {text}"):
        torch_bridge.capture(module, torch.ones(2))
    assert module.state.tolist() == [0.0, 0.0]


def test_a_state_on_xla_stays_there() -> None:
    net = Assigned(lambda b, x: torch.zeros(2))
    with pytest.raises(ValueError, match=r"the forward sets state to torch\.float32 \[2\] on cpu, which was torch\.float32 \[2\]"):
        torch_bridge.capture(net.to("xla"), torch.ones(2))
    graph = torch_bridge.capture(Assigned(lambda b, x: torch.zeros(2)), torch.ones(2))  # on the CPU it is there already
    assert graph(torch.ones(2), torch.full((2,), 3.0))[1].tolist() == [0.0, 0.0]


class Assigned(nn.Module):
    """Its forward assigns a buffer what a function says."""

    def __init__(self, new: Any) -> None:
        super().__init__()
        self.new = new
        self.register_buffer("state", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.new(self.state, x)
        return x


def test_buffers_assigned_anew_come_back_from_jax() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n = self.n + x
            return self.n * 2

    f = torch_bridge.to_jax(Counts())
    y, buffers = f({}, {"n": jnp.ones(2)}, None, jnp.arange(2.0))
    assert y.tolist() == [2.0, 4.0] and buffers["n"].tolist() == [1.0, 2.0]


def test_results_that_are_no_tensors_are_named() -> None:
    graph: Any = torch_bridge.capture(Returns(lambda x: (x, {1}, torch.zeros(1, device="meta"), None, 3)), torch.ones(2))
    assert graph.signature.left_out == ["set", "a meta tensor (make it on the device of an input)"]


class Returns(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        return self.what(x)


def test_capturing_changes_nothing(net: nn.Module) -> None:
    before = {n: t.clone() for n, t in net.state_dict().items()}
    pending = torch.ones(2, device="xla") + 1
    torch_bridge.capture(net, torch.randn(3, 4))
    assert {n: t.device.type for n, t in net.state_dict().items()} == dict.fromkeys(before, "cpu")
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert pending.tolist() == [2, 2]


def test_structures_of_inputs_and_results_are_kept() -> None:
    class Structured(nn.Module):
        def forward(self, pair: Any, *, scale: float, flag: bool) -> Any:
            a, b = pair["a"], pair["b"][0]
            return {"sum": (a + b) * scale, "rest": [a - b, None, "text", flag]}

    module = Structured()
    x, y = torch.ones(2), torch.full((2,), 3.0)
    f = torch_bridge.to_jax(module)
    out, _ = f({}, {}, None, {"a": jnp.ones(2), "b": [jnp.full(2, 3.0)]}, scale=0.5, flag=True)
    expected = module({"a": x, "b": [y]}, scale=0.5, flag=True)
    close(out["sum"], expected["sum"])
    close(out["rest"][0], expected["rest"][0])
    assert out["rest"][1:] == [None, "text", True]


def test_closed_over_tensors_become_attributes() -> None:
    constant = torch.arange(3.0)

    class Closed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + constant.to(x.device)

    graph = torch_bridge.capture(Closed(), torch.ones(3))
    torch.testing.assert_close(graph(torch.ones(3))[0], torch.tensor([1.0, 2.0, 3.0]))
    out, _ = torch_bridge.to_jax(graph)({}, {}, None, jnp.ones(3))
    close(out, torch.tensor([1.0, 2.0, 3.0]))


class Attributes(nn.Module):
    """Tensors that are no buffers, of which two layers use one; and a buffer and a weight that come to forward by other ways than the module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0, 3.0])
        self.calls = torch.zeros((1,))
        self.layer = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))
        shift, weight = self.shift, self.layer.weight
        self.others = lambda: (shift, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, weight = self.others()
        self.calls += 1  # on the CPU: nothing depends on it
        self.shift += 1
        x = self.layer(x * self.scale) * self.scale[1:2] + shift
        return (torch.where(torch.tensor([True, False, True]), x, self.scale) @ weight + shift) * self.scale


@pytest.mark.parametrize("inference", [False, True])
def test_attributes_that_are_no_buffers_are_constants(inference: bool) -> None:
    x = torch.randn(2, 3)
    with torch.inference_mode(inference):
        net = Attributes().eval()
        graph = torch_bridge.capture(net, x)
        again = copy.deepcopy(graph)
        found = again(*net.parameters(), *net.buffers(), x)
        torch.testing.assert_close(found, (net(x), net.shift))
    assert graph.signature.mutated == ["shift"] and len([n for n in graph.graph.nodes if n.op == "get_attr"]) == 3


def counts(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return x * m.calls


def counts_later(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * m.calls
    m.calls.add_(1)
    return x


def writes_to_a_buffer_by_another_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.others()[0].add_(1)
    return x * m.shift


def writes_to_a_closure(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * CLOSURE
    CLOSURE.add_(1)
    return x


CLOSURE = torch.ones(3)


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (counts, "writes to calls, which is no buffer: register it as one"),
        (counts_later, "writes to calls, which is no buffer: register it as one"),
        (writes_to_a_buffer_by_another_name, "writes to shift, by another way than the module's name for it"),
        (writes_to_a_closure, r"writes to a CPU tensor of shape \[3\] after it took it"),
    ],
)
def test_constants_that_the_forward_writes_to(forward: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attributes, "forward", forward)
    with pytest.raises(ValueError, match=text):
        torch_bridge.capture(Attributes(), torch.ones(3))


# -- to_jax ----------------------------------------------------------------------------------------


def test_llama_under_jit_and_grad(llama: nn.Module, ids: torch.Tensor) -> None:
    f = torch_bridge.to_jax(llama)
    x = jnp.asarray(ids.numpy())

    def loss(params: Any) -> Any:
        return f(params, f.buffers, None, input_ids=x, labels=x, use_cache=False)[0].loss

    expected = llama(input_ids=ids, labels=ids, use_cache=False).loss
    expected.backward()
    value, grads = jax.jit(jax.value_and_grad(loss))(f.params)
    close(value, expected)
    assert value.dtype == jnp.float32
    for name, p in llama.named_parameters():
        close(grads[name], p.grad)
    llama.zero_grad()


def test_results_keep_their_class_under_jit(llama: nn.Module, ids: torch.Tensor) -> None:
    f = torch_bridge.to_jax(llama)
    out = jax.jit(lambda p, x: f(p, f.buffers, None, input_ids=x, use_cache=False)[0])(f.params, jnp.asarray(ids.numpy()))
    assert type(out).__name__ == "CausalLMOutputWithPast"
    close(out.logits, llama(input_ids=ids).logits)


def test_vmap_over_inputs_and_over_models(net: nn.Module) -> None:
    net.eval()
    f = torch_bridge.to_jax(net)
    x = torch.randn(5, 3, 4)
    got = jax.vmap(lambda row: f(f.params, f.buffers, None, row)[0])(jnp.asarray(x.numpy()))
    close(got, torch.stack([net(row) for row in x]))
    twice = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), f.params)
    both = jax.vmap(lambda p: f(p, f.buffers, None, jnp.asarray(x[0].numpy()))[0])(twice)
    close(both[0], net(x[0]))
    assert both.shape == (2, 3, 4)


def test_per_example_gradients(net: nn.Module) -> None:
    net.eval()
    f = torch_bridge.to_jax(net)
    x = torch.randn(3, 1, 4)
    grads = jax.vmap(jax.grad(lambda p, row: (f(p, f.buffers, None, row)[0] ** 2).sum()), in_axes=(None, 0))(
        f.params, jnp.asarray(x.numpy())
    )
    for i in range(3):
        net.zero_grad()
        net(x[i]).square().sum().backward()
        close(grads["first.weight"][i], net.first.weight.grad)


def test_batch_norm_buffers_come_back(net: nn.Module) -> None:
    net.dropout.p = 0.0
    f = torch_bridge.to_jax(net)
    buffers = f.buffers
    for _ in range(2):
        x = torch.randn(6, 4)
        out, buffers = jax.jit(f)(f.params, buffers, None, jnp.asarray(x.numpy()))
        close(out, net(x))
    assert int(buffers["calls"]) == 2
    for name, value in net.named_buffers():
        close(buffers[name], value)


def test_dropout_draws_from_the_given_key(net: nn.Module) -> None:
    f = torch_bridge.to_jax(net)
    x = jnp.ones((64, 4))
    run = jax.jit(lambda key: f(f.params, f.buffers, key, x)[0])
    a, again, b = run(jax.random.key(1)), run(jax.random.key(1)), run(jax.random.key(2))
    assert (a == again).all()
    assert (a != b).any()

    class Only(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, 0.25)

    out, _ = torch_bridge.to_jax(Only())({}, {}, jax.random.key(0), jnp.ones(10_000))
    assert abs(float(out.mean()) - 1) < 0.03
    assert set(np.unique(np.asarray(out)).round(4)) == {0.0, np.float32(4 / 3).round(4)}


def test_training_and_evaluation_modes_are_captured_apart(net: nn.Module) -> None:
    f = torch_bridge.to_jax(net)
    x = torch.randn(3, 4)
    net.eval()
    close(f(f.params, f.buffers, None, jnp.asarray(x.numpy()))[0], net(x))
    net.train()
    net.dropout.p = 0.0
    close(f(f.params, f.buffers, None, jnp.asarray(x.numpy()))[0], net(x))


def test_64_bit_where_jax_has_it() -> None:
    class Wide(nn.Module):
        def forward(self, n: torch.Tensor) -> torch.Tensor:
            return n * (2**40 + 1)

    f = torch_bridge.to_jax(Wide())
    with jax.enable_x64(True):
        out, _ = f({}, {}, None, jnp.arange(3))
        assert out.dtype == jnp.int64
        assert out.tolist() == [0, 2**40 + 1, 2**41 + 2]
    assert f({}, {}, None, jnp.arange(3))[0].dtype == jnp.int32


def test_a_graph_module_becomes_a_jax_function(net: nn.Module) -> None:
    net.eval()
    x = torch.randn(3, 4)
    f = torch_bridge.to_jax(torch_bridge.capture(net, x))
    out, _ = f(arrays(net.named_parameters()), arrays(net.named_buffers()), None, jnp.asarray(x.numpy()))
    close(out, net(x))


# -- to_nnx ----------------------------------------------------------------------------------------


def test_nnx_trains_as_torch_does(net: nn.Module) -> None:
    net.dropout.p = 0.0
    module = torch_bridge.to_nnx(net)
    optimizer = nnx.Optimizer(module, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    torch_optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    @nnx.jit
    def step(module: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(module)
        optimizer.update(module, grads)
        return loss

    for x in torch.randn(6, 8, 4):
        y = x.roll(1, 1)
        loss = step(module, optimizer, jnp.asarray(x.numpy()), jnp.asarray(y.numpy()))
        torch_optimizer.zero_grad()
        expected = (net(x) - y).square().mean()
        expected.backward()
        torch_optimizer.step()
        close(loss, expected)
    close(module.first.weight[...], net.first.weight)
    close(module.last.bias[...], net.last.bias)
    close(module.norm.running_var[...], net.norm.running_var)
    assert int(module.calls[...]) == 6


def test_nnx_names_and_modes(net: nn.Module) -> None:
    module = torch_bridge.to_nnx(net)
    params = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    assert params == {n for n, _ in net.named_parameters()}
    x = jnp.asarray(torch.randn(4, 4).numpy())
    assert (module(x) != module(x)).any()
    module.eval()
    assert (module(x) == module(x)).all()
    module.train()
    assert (module(x) != module(x)).any()


def test_nnx_keeps_ties() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))

    torch.manual_seed(0)
    tied = Tied()
    module = torch_bridge.to_nnx(tied)
    ids = torch.tensor([1, 3])
    grads = nnx.grad(lambda m: (m(jnp.asarray(ids.numpy())) ** 2).sum())(module)
    tied(ids).square().sum().backward()
    close(grads["embedding"]["weight"][...], tied.embedding.weight.grad)
    assert len(nnx.to_flat_state(nnx.state(module, nnx.Param))) == 1


# -- errors ----------------------------------------------------------------------------------------


@pytest.fixture
def f(net: nn.Module) -> Iterator[Any]:
    return torch_bridge.to_jax(net)


def test_wrong_names(f: Any) -> None:
    with pytest.raises(
        ValueError, match=r"params must have exactly.*missing: \['last\.bias'\].*unexpected: \['extra'\].*to_jax\(module\)\.params"
    ):
        params = dict(f.params)
        params["extra"] = params.pop("last.bias")
        f(params, f.buffers, None, jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="buffers must have exactly"):
        f(f.params, {}, None, jnp.ones((2, 4)))


def test_a_missing_key(f: Any) -> None:
    with pytest.raises(ValueError, match=r"draws random numbers.*rng=jax\.random\.key.*module\.eval\(\)"):
        f(f.params, f.buffers, None, jnp.ones((2, 4)))


def test_another_shape_than_captured(net: nn.Module) -> None:
    f = torch_bridge.to_jax(torch_bridge.capture(net.eval(), torch.ones(2, 4)))
    with pytest.raises(ValueError, match=r"captured for an input of shape \(2, 4\), got \(3, 4\)"):
        f(f_params := arrays(net.named_parameters()), arrays(net.named_buffers()), None, jnp.ones((3, 4)))
    assert f_params


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module or a captured GraphModule, got function"):
        torch_bridge.to_jax(lambda x: x)  # type: ignore[arg-type]


def test_the_package_lists_its_names() -> None:
    assert {"capture", "to_jax", "to_nnx", "hlo", "last_graphs", "register"} <= set(dir(torch_bridge))
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = torch_bridge.nothing
    assert Path(torch_bridge.__file__).name == "__init__.py"


def test_last_graphs() -> None:
    for n in (7, 9, 7):
        torch.ones(n, device="xla").sin_().sum().item()
    graphs = torch_bridge.last_graphs()
    shapes = [[tuple(node.meta["val"].shape) for node in graph.nodes if node.target is torch.ops.aten.sin.default] for graph in graphs]
    assert shapes[-2:] == [[(9,)], [(7,)]] and len(set(map(id, graphs))) == len(graphs)


def test_every_name_is_there() -> None:
    for name in torch_bridge.__all__:
        assert callable(getattr(torch_bridge, name)), name


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_regions_of_autocast_for_the_cpu_cast_nothing_and_say_so(device: str) -> None:
    class Casts(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return super().forward(x)

    module, x = Casts(4, 4), torch.ones(2, 4)
    with pytest.warns(UserWarning, match=r"autocast\('cpu'\) casts nothing") if device == "cpu" else contextlib.nullcontext():
        graph = torch_bridge.capture(module, x)
    made = next(iter(next(n for n in graph.graph.nodes if n.op == "output").args[0])).meta["val"]
    assert made.dtype == (torch.float32 if device == "cpu" else torch.bfloat16)
    assert module(x).dtype == (torch.bfloat16 if device == "cpu" else torch.float32)

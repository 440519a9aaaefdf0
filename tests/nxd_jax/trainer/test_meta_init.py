"""`meta_device_init`: models that the host never holds, with the numbers that it would have given them."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from neuronx_distributed.trainer import initialize_parallel_model, neuronx_distributed_config
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.modules.rms_norm import RMSNorm
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, OutputChannelParallelConv2d, ParallelEmbedding, RowParallelLinear
from nxd_jax.utils import model_utils
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "examples" / "llama"))
from modeling_llama_nxd import LlamaForCausalLM, NxDLlamaOptions


def fill(module: nn.Module, device: torch.device) -> None:
    """What scripts pass as `param_init_fn`."""
    for name in ("init_weight_cpu", "reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            return


def fill_weights(module: nn.Module, device: torch.device) -> None:
    """`fill` without the buffers of normalisations."""
    if isinstance(module, nn.BatchNorm1d):
        module.weight.data.fill_(1.0)
        module.bias.data.zero_()
    else:
        fill(module, device)


class Model(nn.Module):
    """One of every kind of layer, a tie, a frozen weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(8, 8)
        self.up = ColumnParallelLinear(8, 16, gather_output=False, stride=2, dtype=torch.bfloat16)
        self.qkv = GQAQKVColumnParallelLinear(8, [8, 4], bias=False)
        self.conv = OutputChannelParallelConv2d(2, 4, 3)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True)
        self.norm = RMSNorm(8, sequence_parallel_enabled=True)
        self.batch = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(2, 3)
        self.head = ColumnParallelLinear(8, 8, bias=False, gather_output=False)
        self.head.weight = self.embed.weight
        self.plain = nn.Linear(8, 2)
        self.plain.weight.requires_grad_(False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def on_meta(model_fn: Callable[[], nn.Module], init: Any = fill, include_buffers: bool = False, **config: Any) -> Any:
    options = {"meta_device_init": True, "param_init_fn": init}
    found = neuronx_distributed_config(tensor_parallel_size=config.pop("tp", 1), model_init_config=options, **config)
    torch.manual_seed(3)
    return initialize_parallel_model(found, model_fn, include_buffers)


def on_the_host(model_fn: Callable[[], nn.Module], init: Any = fill) -> nn.Module:
    """The model made with its weights, filled by the same function from the same seed on the CPU, and moved."""
    model = model_fn()
    torch.manual_seed(3)
    model_utils.reinit_model(model, torch.device("cpu"), init)
    return model.to("xla")


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    assert list(found.state_dict()) == list(expected.state_dict())
    for (name, p), q in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert p.device.type == "xla" and p.dtype == q.dtype and p.requires_grad == q.requires_grad, name
        assert sharded.varying(p) == sharded.varying(q), name
        assert all(torch.equal(s, t) for s, t in zip(sharded.shards(p), sharded.shards(q), strict=True)), name
        assert model_utils._attributes(p) == model_utils._attributes(q), name
    for (name, b), c in zip(found.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(b.cpu(), c.cpu()), name


# -- numbers, ties, attributes -----------------------------------------------------------------------------


def test_the_hosts_numbers(nxd: Nxd) -> None:
    nxd(4, tp=2)
    model = on_meta(Model, tp=2)
    assert model.head.weight is model.embed.weight and not model.plain.weight.requires_grad
    assert_equal(model, on_the_host(Model))


class Llama(LlamaForCausalLM):
    def __init__(self, **options: Any):
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
        )
        super().__init__(config, NxDLlamaOptions(**options))


@pytest.mark.parametrize(
    ("world", "tp", "options"),
    [(1, 1, {}), (4, 2, {"sequence_parallel": True}), (4, 4, {"kv_size_multiplier": 2, "fuse_qkv": False, "dtype": torch.bfloat16})],
)
def test_the_llama_of_the_examples(nxd: Nxd, world: int, tp: int, options: dict[str, Any]) -> None:
    """Making it on the host gives the same numbers from the same seed by itself: its modules draw in the order in which they are visited."""
    nxd(world, tp=tp)
    model = on_meta(lambda: Llama(**options), tp=tp)
    torch.manual_seed(3)
    assert_equal(model, Llama(**options).to("xla"))


def test_a_model_of_transformers(nxd: Nxd) -> None:
    nxd(1)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
    )

    def init(module: nn.Module, device: torch.device) -> None:
        transformers.LlamaForCausalLM._init_weights(reference, module)

    reference = transformers.LlamaForCausalLM(config)
    model = on_meta(lambda: transformers.LlamaForCausalLM(config), init)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal(model, on_the_host(lambda: transformers.LlamaForCausalLM(config), init))


def test_functions_of_one_argument(nxd: Nxd) -> None:
    nxd(1)
    assert_equal(on_meta(lambda: nn.Linear(2, 3), lambda module: module.reset_parameters()), on_the_host(lambda: nn.Linear(2, 3)))


def test_the_model_runs(nxd: Nxd) -> None:
    nxd(1)
    x = torch.randn(4, 1, 2)
    model, reference = on_meta(lambda: nn.LSTM(2, 3)), on_the_host(lambda: nn.LSTM(2, 3)).cpu()
    torch.testing.assert_close(model(x.to("xla"))[0].cpu(), reference(x)[0])


def test_no_random_number_is_drawn_on_meta(nxd: Nxd) -> None:
    nxd(2, tp=2)
    before = torch.get_rng_state()
    with model_utils.init_on_device("meta"):
        model = Model()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.is_meta for p in model.parameters()) and model.table.tolist() == [0, 1, 2]
    assert model.batch.running_var.tolist() == [1.0] * 4 and model.batch.num_batches_tracked.device.type == "cpu"
    assert not ColumnParallelLinear(2, 2).weight.is_meta  # the block is over


@pytest.mark.parametrize("buffers", [False, True])
def test_integer_parameters_stay(nxd: Nxd, buffers: bool) -> None:
    nxd(2, tp=2)

    class Ranked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = ParallelEmbedding(4, 2, use_spmd_rank=True)

    model = on_meta(Ranked, include_buffers=buffers, tp=2)
    assert [int(s) for s in sharded.shards(model.embed.rank_util.rank)] == [0, 1]


# -- what is left without values -----------------------------------------------------------------------------


def test_parameters_without_values_are_named_and_nan(nxd: Nxd) -> None:
    nxd(1)

    def some(module: nn.Module, device: torch.device) -> None:
        if isinstance(module, nn.Linear):
            module.weight.normal_()

    with pytest.warns(
        UserWarning,
        match=re.escape("param_init_fn left parameters without values, which are NaN now: 0.bias, 1.weight, 1.bias. It is called"),
    ):
        model = on_meta(lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), some)
    assert (
        model.get_parameter("0.weight").isfinite().all()
        and model.get_parameter("0.bias").isnan().all()
        and model.get_parameter("1.bias").isnan().all()
    )


def test_buffers_without_values_are_named(nxd: Nxd) -> None:
    nxd(1)
    with pytest.raises(
        RuntimeError,
        match=re.escape("buffers without values: table, batch.running_mean, batch.running_var, batch.num_batches_tracked. They"),
    ):
        on_meta(Model, fill_weights, include_buffers=True)


def test_buffers_that_the_function_sets(nxd: Nxd) -> None:
    nxd(2, tp=2)

    def init(module: nn.Module, device: torch.device) -> None:
        fill_weights(module, device)
        if isinstance(module, Model):
            module.table = torch.arange(3.0)
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean, module.running_var, module.num_batches_tracked = torch.zeros(4), torch.ones(4), torch.tensor(0)

    assert_equal(on_meta(Model, init, include_buffers=True, tp=2), on_the_host(Model))


# -- the host's memory ---------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Bytes of CPU tensors that were made within the block and are alive. `peak`: the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in _tensors(out):
            if t.device.type == "cpu":
                storage = t.untyped_storage()
                ref = StorageWeakRef(storage)
                self.alive.setdefault(ref.cdata, (ref, storage.nbytes()))
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _tensors(item)


def test_the_host_holds_one_parameter_at_a_time(nxd: Nxd) -> None:
    nxd(2, tp=2)
    size, layers = 64, 6

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = ColumnParallelLinear(size, 4 * size, bias=False, gather_output=False)
            self.down = RowParallelLinear(4 * size, size, bias=False, input_is_parallel=True)
            self.plain = nn.Linear(size, 4 * size)

    largest = 4 * size * 4 * size
    with Watch() as shapes, model_utils.init_on_device("meta"):
        nn.Sequential(*(Layer() for _ in range(layers)))
    assert shapes.peak < 100
    with Watch() as both:
        model = on_meta(lambda: nn.Sequential(*(Layer() for _ in range(layers))), tp=2)
    total = sum(p.numel() * 4 * (2 if hasattr(p, "tensor_model_parallel") else 1) for p in model.parameters())
    assert total > 17 * largest
    assert largest <= both.peak < 2.6 * largest  # one full weight and its parts

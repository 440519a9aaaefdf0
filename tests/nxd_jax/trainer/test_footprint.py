"""What a core will hold, worked out from shapes, is what the arrays of the same model take."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch_xla
from neuronx_distributed.trainer import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config
from torch import nn

from nxd_jax.abstract import abstract_run
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_jax.topology import Topology
from nxd_jax.trainer.footprint import KINDS, footprint
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import HIDDEN, WORDS, Block, Layout
from tests.nxd_jax.pipeline.models import Model as Blocks
from tests.nxd_jax.trainer.test_meta_init import Llama, Watch, fill
from torch_bridge.recorder import sharded

TRN1, TRN2 = Topology("trn1.32xlarge"), Topology("trn2.48xlarge")


class Small(nn.Module):
    """Rows that do not divide, a tie, a frozen weight, a number, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(12, 6, dtype=dtype)
        self.up = ColumnParallelLinear(6, 10, gather_output=False, dtype=dtype)
        self.down = RowParallelLinear(10, 6, input_is_parallel=True, dtype=dtype)
        self.head = ColumnParallelLinear(6, 12, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(7, 3)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("table", torch.zeros(5, dtype=torch.int64))


def sizes_on_each_core(t: torch.Tensor) -> set[int]:
    return {s.data.nbytes for s in t._storage.array.addressable_shards}  # type: ignore[attr-defined]


def held(model: nn.Module, optimizer: Any) -> dict[tuple[str, str, str], tuple[int, tuple[str, ...]]]:
    """Bytes on a core, and the axes along which cores differ, of everything that lives on xla."""
    found: dict[tuple[str, str, str], Any] = {}

    def add(name: str, kind: str, t: Any, label: str = "") -> None:
        if isinstance(t, torch.Tensor) and t.device.type == "xla":
            axes = sharded.varying(t).axes  # runs what is pending
            sizes = sizes_on_each_core(t)
            assert len(sizes) == 1, name
            found[name, kind, label] = sizes.pop(), axes

    zero1 = optimizer.optimizer if hasattr(optimizer.optimizer, "shard_of") else None
    state = zero1.base_optimizer.state if zero1 else optimizer.optimizer.state
    for name, p in model.named_parameters():
        add(name, "parameter", p)
        add(name, "gradient", p.grad if p.grad is not None else getattr(p, "main_grad", None))
        part = zero1.shard_of[p] if zero1 else p
        if zero1:
            add(name, "master weight", part)
        for key, value in state.get(part, {}).items():
            add(name, "optimizer state", value, key)
    for name, b in model.named_buffers():
        add(name, "buffer", b)
    return found


ADAMW = (torch.optim.AdamW, {"lr": 1e-3})


@pytest.mark.thorough(keep=3)
@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
@pytest.mark.parametrize(
    ("world", "tp", "cp", "zero1", "precision", "dtype", "optimizer", "model_fn"),
    [
        (4, 2, 1, True, None, torch.bfloat16, ADAMW, Small),
        (4, 2, 1, False, None, torch.float32, (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), Small),
        (4, 1, 2, True, {"use_fp32_grad_acc": False}, torch.bfloat16, (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}), Small),
        (4, 2, 1, False, None, torch.bfloat16, (torch.optim.SGD, {"lr": 0.1}), Small),
        (2, 2, 1, True, None, torch.float32, (torch.optim.Adafactor, {"lr": 0.1}), Small),
        (8, 4, 1, True, None, torch.bfloat16, ADAMW, lambda dtype: Llama(dtype=dtype, kv_size_multiplier=2)),
    ],
    ids=["zero1", "momentum", "cp", "sgd", "adafactor", "llama"],
)
def test_the_arrays_take_as_much(
    nxd: Nxd, world: int, tp: int, cp: int, zero1: bool, precision: Any, dtype: torch.dtype, optimizer: Any, model_fn: Any
) -> None:
    nxd(world, tp=tp, cp=cp)
    config = neuronx_distributed_config(
        tensor_parallel_size=tp, context_parallel_size=cp, optimizer_config={"zero_one_enabled": zero1}, mixed_precision_config=precision
    )
    expected = footprint(config, model_fn, dtype, optimizer_class=optimizer[0], optimizer_options=optimizer[1])
    model = initialize_parallel_model(config, model_fn, dtype)
    made = initialize_parallel_optimizer(config, optimizer[0], model.parameters(), **optimizer[1])
    sum(p.float().square().sum() for p in model.parameters() if p.requires_grad).backward()  # type: ignore[union-attr]
    made.step()
    torch_xla.sync()
    found = held(model, made)
    assert {(e.name, e.kind, e.label): e.bytes for e in expected.entries} == {key: size for key, (size, _) in found.items()}
    assert expected.total == sum(size for size, _ in found.values())
    for e in expected.entries:
        if e.kind != "gradient":  # data-parallel ranks' gradients happen to be equal here
            assert set(found[e.name, e.kind, e.label][1]) <= set(e.axes)
            assert e.kind not in ("parameter", "master weight") or found[e.name, e.kind, e.label][1] == e.axes


def test_the_table(nxd: Nxd) -> None:
    nxd(4, tp=2)
    config = neuronx_distributed_config(tensor_parallel_size=2, optimizer_config={"zero_one_enabled": True})
    found = footprint(config, lambda: Llama(dtype=torch.bfloat16), topology=TRN2)
    lines = str(found).splitlines()
    assert re.split(r"\s{2,}", lines[0]) == [
        "tensor",
        "shape on a core",
        "dtype",
        "differs along",
        "parameters",
        "gradients",
        "master weights",
        "optimizer states",
    ]
    row = next(line for line in lines if line.startswith("model.layers.*.mlp.down_proj.weight (2)"))
    assert row.split() == [
        "model.layers.*.mlp.down_proj.weight",
        "(2)",
        "16x12",
        "bfloat16",
        "tp",
        "0.8",
        "KiB",
        "1.5",
        "KiB",
        "0.8",
        "KiB",
        "1.5",
        "KiB",
    ]
    assert lines[-2].startswith("all ") and re.search(
        r"0.00 of 24 GiB per core of Trainium2 at LNC 2 \(0%\); 24.00 GiB are left", lines[-1]
    )
    assert found.total == sum(found.bytes_of(kind) for kind in KINDS) == found.hbm_bytes - found.left
    with pytest.raises(
        ValueError, match="kind='weights' must be one of 'parameter', 'buffer', 'gradient', 'master weight', 'optimizer state'"
    ):
        found.bytes_of("weights")


def test_what_does_not_fit(nxd: Nxd) -> None:
    nxd(1)
    found = footprint(neuronx_distributed_config(), lambda: nn.Linear(32768, 65536), topology=TRN1)
    assert found.left < 0 and "32.00 of 16 GiB per core of Trainium1 at LNC 1 (200%): does not fit. More tensor-parallel ranks" in str(
        found
    )
    assert (
        footprint(neuronx_distributed_config(), lambda: nn.Linear(32768, 65536), optimizer_class=None, topology=TRN1).total
        == 4 * 65536 * 32769
    )


def test_what_cannot_be_worked_out(nxd: Nxd) -> None:
    from nxd_jax.modules.lora import LoraConfig

    nxd(1)
    with pytest.raises(NotImplementedError, match="adapters are not worked out yet; use a configuration without lora_config"):
        footprint(neuronx_distributed_config(lora_config=LoraConfig(target_modules=["x"])), lambda: nn.Linear(1, 1))
    with pytest.raises(
        RuntimeError, match="cannot work out the state of LBFGS, whose step on 'meta' raises TypeError: .*optimizer_class=None leaves"
    ):
        footprint(neuronx_distributed_config(), lambda: nn.Linear(1, 1), optimizer_class=torch.optim.LBFGS)


# -- pipelines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(16, 4, 4, tp=2, zero1=True), Layout(8, 4, 4, tp=2, tied=True)], ids=str)
def test_every_rank_of_a_pipeline(layout: Layout) -> None:
    """Each rank holds its stages; an abstract run of the same training finds as much on its cores."""
    with abstract_run(layout.ranks) as run:
        found = footprint(layout.config(), Blocks, layout.layers, layout.tied)
        model, optimizer = layout.make()
        ids = torch.zeros(2 * layout.microbatches, 4, dtype=torch.int64)
        model.run_train(ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        pipeline = run.report().pipeline
    assert pipeline is not None and len(found.ranks) == layout.pp
    for expected, memory in zip(found.ranks, pipeline.ranks, strict=True):
        for kind in ("master weight", "optimizer state"):
            assert expected.bytes_of(kind) == memory.stays.get(kind, 0), (memory.rank, kind)
        copies = 4 * WORDS * HIDDEN if layout.tied and memory.rank == 3 else 0  # of the embedding, beside the head
        assert expected.bytes_of("parameter") == memory.stays["parameter"] + copies
    assert found.total == max(rank.total for rank in found.ranks) < sum(rank.total for rank in found.ranks)
    names = [e.name for rank in found.ranks for e in rank.entries if e.kind == "optimizer state" and e.label == "exp_avg"]
    assert len(names) == len(set(names)) == 4 * layout.layers + (1 if layout.tied else 2)
    assert "\npipeline ranks: 0 " in str(found)


def test_stages_that_take_a_batch_to_be_known(nxd: Nxd) -> None:
    """A model that is traced by running it, with inputs that are no token ids."""
    nxd(2, pp=2)
    config = Layout(2, 2, 2).config()
    config["pipeline_config"] |= {"input_names": ["x"], "output_loss_value_spec": True}

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != HIDDEN:
                raise ValueError("the last dim is HIDDEN")
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    with pytest.raises(
        NotImplementedError, match="the stages of Branches are known only when there is a batch, .*; abstract_run says what"
    ):
        footprint(config, Branches)


# -- large models ------------------------------------------------------------------------------------------

SEVEN_BILLION = """
import re, sys, torch, torch_xla
sys.path.insert(0, "examples/llama")
from modeling_llama_nxd import LlamaForCausalLM, NxDLlamaOptions
from neuronx_distributed.trainer import neuronx_distributed_config
from nxd_jax.topology import Topology
from nxd_jax.trainer.footprint import footprint
from torch_bridge.mesh import world
from transformers import LlamaConfig
from jax._src import xla_bridge

def highest():  # KiB; ru_maxrss would count the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1))
before = highest()
world.configure(world.World(32))
config = neuronx_distributed_config(tensor_parallel_size=8, optimizer_config={"zero_one_enabled": True})
llama = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32)
found = footprint(config, LlamaForCausalLM, llama, NxDLlamaOptions(dtype=torch.bfloat16, sequence_parallel=True), topology=Topology("trn1.32xlarge"))
peak = highest()
print(*(found.bytes_of(k) for k in ("parameter", "buffer", "gradient", "master weight", "optimizer state")), found.left, peak - before, peak)
assert not xla_bridge.backends_are_initialized()
"""


def test_seven_billion_parameters_on_a_trn1_32xlarge() -> None:
    """tp 8, dp 4, ZeRO-1, bfloat16 weights with float32 gradients and master weights: the arithmetic, with no weight made and no device started."""
    out = subprocess.run(
        [sys.executable, "-c", SEVEN_BILLION], capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[3], check=False
    )
    assert out.returncode == 0, out.stderr[-2000:]
    parameter, buffer, gradient, master, state, left, grown, peak = map(int, out.stdout.split())
    shared = 2 * 32000 * 4096 + 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    norms = 65 * 4096
    assert shared + norms == 6_738_415_616
    local = shared // 8 + norms
    assert (parameter, gradient, master, state) == (2 * local, 4 * local, local, 2 * local)  # rows divide by 4: float32 parts of a quarter
    assert buffer == 4 * 64
    assert left == 16 * 2**30 - 9 * local - buffer > 8 * 2**30
    assert grown < 100_000 and peak < 1_000_000  # KiB


@pytest.mark.thorough
@pytest.mark.slow
def test_a_hundred_million_parameters_for_real(nxd: Nxd) -> None:
    """The same path: made on meta, materialised, an optimizer with ZeRO-1, one step. The bytes are those of the footprint."""
    import transformers
    from modeling_llama_nxd import LlamaForCausalLM, NxDLlamaOptions

    nxd(4, tp=2)
    llama = transformers.LlamaConfig(
        vocab_size=16000, hidden_size=768, intermediate_size=2048, num_hidden_layers=11, num_attention_heads=12, num_key_value_heads=12
    )
    options = NxDLlamaOptions(dtype=torch.bfloat16, sequence_parallel=True)
    config = neuronx_distributed_config(
        tensor_parallel_size=2,
        optimizer_config={"zero_one_enabled": True},
        model_init_config={"meta_device_init": True, "param_init_fn": fill},
    )
    expected = footprint(config, LlamaForCausalLM, llama, options)
    with Watch() as host:
        model = initialize_parallel_model(config, LlamaForCausalLM, llama, options)
    assert host.peak < 3 * 4 * 16000 * 768  # the largest weight in float32 and its parts, a third of the whole model
    assert 95e6 < sum(p.numel() * (2 if hasattr(p, "tensor_model_parallel") else 1) for p in model.parameters()) < 115e6
    made = initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-3)
    ids = torch.randint(0, 16000, (1, 16)).to("xla")
    loss = model.run_train(ids, ids)
    made.step()
    torch_xla.sync()
    assert 9 < loss.item() < 11  # about log(16000)
    assert {(e.name, e.kind, e.label): e.bytes for e in expected.entries} == {key: size for key, (size, _) in held(model, made).items()}

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
from nxd_jax.modules.moe import ExpertMLPs, MoE
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_jax.topology import Topology
from nxd_jax.trainer.footprint import EXPERT_ACTIVATION, KINDS, footprint
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.inspect.mixture import ExpertDecoderLayer, Job
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


@pytest.mark.thorough(keep=1)
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


# -- experts -----------------------------------------------------------------------------------------------

JOBS = {
    "ep, zero1, bf16": Job(tp=2, ep=2, zero1=True, dtype=torch.bfloat16),
    "slots": Job(tp=2, factor=1.0),
    "shared, ep": Job(tp=2, ep=4, dense=1, zero1=True),
    "slots, ep, sequence parallel": Job(tp=4, ep=2, factor=0.5, sequence_parallel=True),
}


def saved(model: nn.Module, run: Any) -> int:
    """Bytes on a core of the wide tensors that experts keep for the backward pass, parameters left out; a tensor that is kept twice counts once."""
    kept: dict[int, torch.Tensor] = {}
    weights = {id(p._storage) for p in model.parameters()}  # type: ignore[attr-defined]
    hooks: list[Any] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.is_floating_point() and t.dim() > 1 and t.shape[-1] > 8 and id(t._storage) not in weights:  # type: ignore[attr-defined]
            kept[id(t._storage)] = t  # type: ignore[attr-defined]
        return t

    def enter(*_: Any) -> None:
        hooks.append(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
        hooks[-1].__enter__()

    handles = [m.register_forward_pre_hook(enter) for m in model.modules() if isinstance(m, ExpertMLPs)]
    handles += [m.register_forward_hook(lambda *_: hooks.pop().__exit__()) for m in model.modules() if isinstance(m, ExpertMLPs)]
    run()
    for handle in handles:
        handle.remove()
    return sum(t.numel() * t.element_size() for t in kept.values())


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_experts_take_as_much(nxd: Nxd, job: Job) -> None:
    nxd(8, tp=job.tp, ep=job.ep)
    tokens = job.batch * job.seq
    expected = footprint(job.config(), job.model, tokens=tokens)
    model, optimizer = job.build()
    ids = torch.zeros(job.batch, job.seq, dtype=torch.int64).to("xla")
    losses: list[torch.Tensor] = []
    kept = saved(model, lambda: losses.append(model(ids, ids)[0]))
    losses[0].backward()
    optimizer.step()
    torch_xla.sync()
    found = held(model, optimizer)
    stays = [e for e in expected.entries if e.kind != EXPERT_ACTIVATION]
    assert {(e.name, e.kind, e.label): e.bytes for e in stays} == {key: size for key, (size, _) in found.items()}
    for e in stays:
        assert e.kind not in ("parameter", "master weight") or found[e.name, e.kind, e.label][1] == e.axes, e.name
    experts = next(e for e in stays if e.kind == "parameter" and e.name.endswith("mlp_op.down_proj.weight"))
    assert experts.shape == (8 // job.ep, 48 // job.tp, 64)
    # what lies between the two products may be kept besides, and the room of tiles
    between = sum(e.bytes for e in expected.entries if e.label == "first product")
    assert expected.bytes_of(EXPERT_ACTIVATION) <= kept <= expected.bytes_of(EXPERT_ACTIVATION) + 2 * between


def test_what_experts_keep(nxd: Nxd) -> None:
    """By arithmetic: 64 tokens, two of eight experts each; in the table; and with layers that are computed again."""
    nxd(8, tp=2, ep=2)

    def kept(job: Job, **options: Any) -> int:
        return footprint(job.config(), job.model, tokens=64, **options).bytes_of(EXPERT_ACTIVATION)

    row = 4 * (2 * 64 + 2 * 48 // 2)
    assert kept(Job(tp=2, ep=2)) == 2 * 256 * row  # a rank sees the tokens of two
    assert kept(Job(tp=2, ep=2, factor=1.0)) == 2 * 128 * row
    assert kept(Job(tp=2, ep=2, factor=0.5)) == 2 * 64 * row
    assert kept(Job(tp=2, ep=2, factor=1.0, checkpoints=True)) == 128 * row
    config = Job(tp=2, ep=2).config()
    for classes in ("full", [MoE]):
        assert (
            footprint(config | {"activation_checkpoint_config": classes}, Job().model, tokens=64).bytes_of(EXPERT_ACTIVATION) == 256 * row
        )
    assert footprint(config | {"activation_checkpoint_config": nn.Linear}, Job().model, tokens=64).bytes_of(EXPERT_ACTIVATION) == 512 * row
    assert footprint(config, Job().model).bytes_of(EXPERT_ACTIVATION) == 0
    lines = str(footprint(config, Job().model, tokens=64, topology=TRN2)).splitlines()
    assert lines[0].endswith("optimizer states  expert activations")
    (found,) = [line for line in lines if "first product" in line]
    assert re.split(r"\s{2,}", found) == [
        "model.layers.*.mlp.expert_mlps first product (2)",
        "256x48",
        "float32",
        "-",
        "-",
        "-",
        "-",
        "-",
        "96.0 KiB",
    ]
    assert lines[-2].split()[-2:] == ["0.3", "MiB"]


def test_experts_of_a_pipeline(nxd: Nxd) -> None:
    """Each rank has its own layers' experts, and what they keep."""
    nxd(8, tp=2, pp=2, ep=2)
    job = Job(tp=2, ep=2, layers=4)
    pipeline = {
        "transformer_layer_cls": ExpertDecoderLayer,
        "leaf_module_cls": ["RotaryEmbedding"],
        "auto_partition": True,
        "input_names": ["input_ids", "labels"],
        "output_loss_value_spec": (True, False),
        "num_microbatches": 2,
        "use_optimizer_wrapper": True,
    }
    found = footprint(job.config() | {"pipeline_parallel_size": 2, "pipeline_config": pipeline}, job.model, tokens=64)
    for rank, held in enumerate(found.ranks):
        layers = {e.name.split(".")[2] for e in held.entries if e.kind == EXPERT_ACTIVATION}
        assert layers == ({"0", "1"}, {"2", "3"})[rank]
        assert held.bytes_of(EXPERT_ACTIVATION) == 2 * 256 * 4 * (2 * 64 + 48)


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

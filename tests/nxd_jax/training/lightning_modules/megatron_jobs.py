"""Small trainings of Megatron GPT from configurations, on random tokens."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, DistributedSampler

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.tensor_parallel.full_weights import scatter_full
from nxd_jax.training import environment
from nxd_jax.training.lightning_modules.data.base import BaseDataModule
from nxd_jax.training.lightning_modules.model.megatron.megatron_gpt_model import MegatronGPTModel
from nxd_jax.training.lightning_modules.nlp_overrides import NLPDDPStrategy, NLPTrainer
from tests.nxd_jax.training import small
from tests.nxd_jax.training.models import megatron_cases
from tests.nxd_jax.training.models.megatron_cases import HEADS, HIDDEN, SEQ, VOCAB

ROWS, SAMPLES = 4, 32
TP, PP, EP, VPP = (
    f"distributed_strategy.{name}_size"
    for name in ("tensor_model_parallel", "pipeline_model_parallel", "expert_model_parallel", "virtual_pipeline_model_parallel")
)
DEVICES, SP = "trainer.devices", "distributed_strategy.sequence_parallel=True"
FULL, SELECTIVE = (f"model.activations_checkpoint_granularity={word}" for word in ("full", "selective"))
GPT2 = {
    "encoder_seq_length": SEQ,
    "max_position_embeddings": SEQ,
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 64,
    "num_attention_heads": HEADS,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "ffn_dropout": 0,
    "make_vocab_size_divisible_by": 8,
}
LLAMA = {
    **GPT2,
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "has_bias": False,
    "position_embedding_type": "rope",
    "rotary_percentage": 1,
    "num_kv_heads": 2,
    "share_embeddings_and_output_weights": False,
}
MISTRAL = {**LLAMA, "sliding_window_size": 5}
MIXTRAL = {
    **LLAMA,
    "position_freq_base": 1e6,
    "moe": {
        "num_experts": 4,
        "top_k": 2,
        "capacity_factor": None,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
        "sinkhorn_tol": "None",
    },
}
MODELS = {"gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "mixtral": MIXTRAL}


class Tokens(BaseDataModule):
    """Random tokens: data-parallel rank r has rows r, r + dp, ... of each step."""

    padded_vocab_size = VOCAB

    def train_dataloader(self) -> DataLoader[Any]:
        dp = parallel_state.get_data_parallel_size()
        sampler = DistributedSampler(samples(), dp, parallel_state.get_data_parallel_rank(), shuffle=False, drop_last=True)  # type: ignore[arg-type]
        return DataLoader(samples(), ROWS // dp, sampler=sampler, collate_fn=_columns)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = train_dataloader

    def get_batch_length(self, batch: Any) -> int:
        return len(batch[0])


def _columns(rows: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.stack, zip(*rows, strict=True)))


def samples() -> list[tuple[torch.Tensor, ...]]:
    """tokens, labels, loss_mask, attention_mask, position_ids of each sample."""
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (SAMPLES, SEQ + 1), generator=made)
    masks = (torch.rand(SAMPLES, SEQ, generator=made) < 0.7).float()
    places = torch.arange(SEQ)
    return [(row[:-1], row[1:], mask, torch.ones(1, dtype=torch.bool), places) for row, mask in zip(ids, masks, strict=True)]


def config(kind: str, *changes: str) -> Any:
    """A configuration, with `key=value` words."""
    base = small.config(f"data.global_batch_size={ROWS}", "data.micro_batch_size=2", "model_source=megatron", "trainer.limit_val_batches=0")
    found = OmegaConf.merge(base, OmegaConf.create({"name": f"megatron_{kind}", "model": MODELS[kind]}))
    if (gone := "~model.optim.sched") in changes:
        del found.model.optim.sched
    return OmegaConf.merge(found, OmegaConf.from_dotlist([change for change in changes if change != gone]))


class Trained(MegatronGPTModel):
    """Keeps the losses in `seen`. kind: it begins with the weights of transformers' model of that kind, which is kept in `references`; None: with its own."""

    kind: str | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[float] = []
        self.references: list[Any] = []

    def setup(self, *args: Any, **kwargs: Any) -> None:
        super().setup(*args, **kwargs)
        if self.kind is not None:
            self.references.append(with_reference(self, self.kind))

    def log_metrics(self, log_fn: Any, loss: Any, *rest: Any) -> None:
        super().log_metrics(log_fn, loss, *rest)
        self.seen.append(float(loss))


def train(cfg: Any, with_weights: bool = False, kind: type[Trained] = Trained) -> tuple[Any, list[float]]:
    """The module after training, and its losses. with_weights: begin with those of transformers' model."""
    run = trainer(cfg)
    module = kind(cfg, run)
    module.kind = str(cfg.name).removeprefix("megatron_") if with_weights else None
    run.fit(module, datamodule=Tokens(cfg, run))
    return module, module.seen


def arguments(kind: str) -> dict[str, Any]:
    """Of `GPTModel`, for the configuration of a kind."""
    return megatron_cases.arguments(megatron_cases.Case(kind, kv=MODELS[kind].get("num_kv_heads", HEADS)))


def trainer(cfg: Any) -> NLPTrainer:
    environment.process_config(cfg)
    return NLPTrainer(strategy=NLPDDPStrategy(), enable_progress_bar=False, **OmegaConf.to_container(cfg.trainer))


def made(cfg: Any, module: Any = MegatronGPTModel) -> Any:
    """The module, with its model."""
    run = trainer(cfg)
    found = module(cfg, run)
    run.datamodule = Tokens(cfg, run)  # type: ignore[attr-defined]
    run.strategy.connect(found)
    found.setup()
    return found


def inner(module: Any) -> Any:
    """The model itself."""
    found = module.model
    while not hasattr(found, "language_model"):
        found = found.original_torch_module if hasattr(found, "original_torch_module") else found.module
    return found


def case(module: Any, kind: str) -> megatron_cases.Case:
    """What transformers' model of a module is."""
    model = module.config.model
    layers = int(model.num_layers)
    return megatron_cases.Case(
        kind, kv=int(model.get("num_kv_heads") or HEADS), config={"n_layer" if kind == "gpt2" else "num_hidden_layers": layers}
    )


def with_reference(module: Any, kind: str) -> Any:
    """transformers' model, whose weights the module's gets."""
    torch.manual_seed(5)
    want = megatron_cases.reference(case(module, kind))
    full = megatron_cases.KINDS[kind].mapped(dict(want.named_parameters()), case(module, kind).kv)
    for name, parameter in inner(module).named_parameters():
        scatter_full(parameter, full[name].detach())
    return want


def batch() -> tuple[torch.Tensor, ...]:
    """The first step's rows of this data-parallel rank; those of all ranks of a process in one tensor."""
    columns = _columns(samples()[:ROWS])
    dp, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    if dp == 1:
        return columns
    return tuple(x.to("xla")[rank * (ROWS // dp) : (rank + 1) * (ROWS // dp)] for x in columns)

"""Megatron GPT from configurations: steps that are those of transformers' model with the same weights, what is refused, and weight decay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch_xla.debug import metrics

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.tensor_parallel import grads
from nxd_jax.tensor_parallel.full_weights import gather_full
from nxd_jax.training.lightning_modules.model.megatron.megatron_gpt_model import NUMBERS, MegatronGPTModel
from nxd_jax.training.models.megatron.transformer import CoreAttention, NeuronSwitchMLP
from tests.nxd_jax.training.lightning_modules import megatron_jobs
from tests.nxd_jax.training.lightning_modules.megatron_jobs import DEVICES, EP, FULL, PP, ROWS, SELECTIVE, SP, TP, VPP
from tests.nxd_jax.training.models import megatron_cases
from tests.nxd_jax.training.models.test_megatron import balance
from torch_bridge.passes import find_repeats

pytestmark = pytest.mark.usefixtures("ranks", "variables")

UNTIED = "model.share_embeddings_and_output_weights=False"
CASES: list[tuple[str, tuple[str, ...]]] = [
    ("llama", (f"{DEVICES}=4", f"{TP}=2", f"{PP}=2", SP, FULL)),
    ("gpt2", (f"{DEVICES}=2", f"{TP}=2", SP, SELECTIVE, "model.activations_checkpoint_recompute=[CoreAttention]")),
    ("mixtral", (f"{DEVICES}=2", f"{PP}=2", SELECTIVE)),
    ("mixtral", (f"{DEVICES}=4", f"{EP}=2", f"{TP}=2", SP, "model.moe.dropless=True", SELECTIVE)),
    ("llama", (f"{DEVICES}=2", f"{PP}=2", f"{VPP}=2", "model.num_layers=4")),
    ("mistral", (f"{DEVICES}=2", f"{PP}=2", "model.save_logits=True")),
]


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("kind", "changes"), CASES, ids=lambda x: "-".join(x) if isinstance(x, tuple) else x)
def test_a_step_equals_transformers(kind: str, changes: tuple[str, ...]) -> None:
    module = megatron_jobs.made(megatron_jobs.config(kind, *changes))
    want = megatron_jobs.with_reference(module, kind)
    loss, _ = module.forward_backward_step(megatron_jobs.batch(), is_training=True)
    parameters = list(module.model.parameters())
    if SP in changes:
        grads.allreduce_sequence_parallel_gradients(torch.optim.SGD(parameters))
    grads.average_over_data_parallel_ranks(parameters)
    case = megatron_jobs.case(module, kind)
    columns = [torch.stack(x) for x in zip(*megatron_jobs.samples()[:ROWS], strict=True)]
    torch.testing.assert_close(float(loss), megatron_cases.expected(want, *columns[:3], more=balance(case)), rtol=1e-5, atol=1e-5)
    megatron_cases.check_gradients(case, megatron_jobs.inner(module), want, rtol=2e-4)


def test_the_same_model_in_a_pipeline() -> None:
    found = []
    for changes in ((), (f"{DEVICES}=4", f"{TP}=2", f"{PP}=2", SP)):
        model = megatron_jobs.inner(megatron_jobs.made(megatron_jobs.config("gpt2", UNTIED, *changes)))
        found.append({name: gather_full(value) for name, value in model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name  # type: ignore[arg-type]


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_routers_and_frequencies_in_a_pipeline_are_as_without(kind: str) -> None:
    found = []
    for changes in ((), (f"{DEVICES}=2", f"{PP}=2")):
        model = megatron_jobs.inner(megatron_jobs.made(megatron_jobs.config(kind, "model.rotary_percentage=0.5", *changes)))
        named = [*model.named_parameters(), *((name, value) for name, value in model.named_buffers() if "inv_freq" in name)]
        found.append({name: gather_full(value) for name, value in named})
    assert found[0].keys() == found[1].keys() and sum("inv_freq" in name for name in found[0]) == 2
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name  # type: ignore[arg-type]


M, D = "model.", "distributed_strategy."
MISTAKES: list[tuple[str, tuple[str, ...], str]] = [
    ("gpt2", (f"{D}zero1=False",), "distributed_strategy.zero1=False: Megatron models train with ZeRO-1 only"),
    ("gpt2", (f"{M}megatron_amp_o2=True",), "model.megatron_amp_o2=True is refused: precision.type says the precision"),
    ("gpt2", (f"{M}gradient_accumulation_fusion=True",), "model.gradient_accumulation_fusion=True is refused: it is a CUDA kernel"),
    ("gpt2", (f"{M}use_emha=True",), "model.use_emha=True is refused"),
    ("gpt2", (f"{M}bias_dropout_add_fusion=True",), "model.bias_dropout_add_fusion=True is refused"),
    ("gpt2", (f"{M}bias_activation_fusion=True",), "model.bias_activation_fusion=True is refused"),
    ("gpt2", (f"{M}activations_checkpoint_num_layers=2",), "model.activations_checkpoint_num_layers=2 is refused"),
    ("gpt2", (f"{M}activations_checkpoint_method=block",), "model.activations_checkpoint_method='block' is refused"),
    ("gpt2", (f"{M}activations_checkpoint_layers_per_pipeline=1",), "activations_checkpoint_layers_per_pipeline=1 is refused"),
    ("gpt2", (f"{M}num_micro_batches_with_partial_activation_checkpoints=1",), "partial_activation_checkpoints=1 is refused"),
    ("gpt2", (f"{M}disable_layer_norm_checkpointing=False",), "model.disable_layer_norm_checkpointing=False is refused"),
    ("gpt2", (f"{M}moe_dropout=0.1",), "model.moe_dropout=0.1 is refused"),
    (
        "gpt2",
        (f"{M}optim.name=distributed_fused_adam",),
        "model.optim.name=distributed_fused_adam is a CUDA kernel: use adamw_fp32OptState",
    ),
    ("gpt2", ("trainer.precision=16",), "trainer.precision=16 must be 32"),
    ("gpt2", (f"{DEVICES}=2", f"{PP}=2"), "share_embeddings_and_output_weights=True with pipeline_model_parallel_size=2"),
    ("llama", (f"{DEVICES}=2", f"{PP}=2", f"{M}num_layers=3"), "model.num_layers=3 must be a multiple of the 2 stages"),
    ("llama", (f"{DEVICES}=2", f"{PP}=2", f"{VPP}=2"), "model.num_layers=2 must be a multiple of the 4 stages"),
    ("gpt2", (f"{M}fusions.flash_attention=True",), "model.fusions.flash_attention=True: Megatron models have no blockwise attention"),
    ("gpt2", (f"{DEVICES}=2", f"{D}context_parallel_size=2"), "context_parallel_size=2: Megatron models are not for context parallelism"),
    ("gpt2", (SELECTIVE, f"{M}activations_checkpoint_recompute=[MLP]"), "unknown MLP; it takes CoreAttention"),
    ("gpt2", (f"{M}activations_checkpoint_granularity=some",), "'some' must be null, selective or full"),
    ("mixtral", (f"{M}moe.glu_mlp=False",), "model.moe.glu_mlp=False: the experts of Megatron models are gated"),
    ("mixtral", (f"{M}moe.capacity_factor=0.0",), "capacity_factor=0.0 with dropless=False"),
    (
        "mixtral",
        (f"{M}moe.dropless=True", f"{M}activation=geglu"),
        "model.activation must be silu or swiglu, got 'geglu'",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "text"), MISTAKES, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_mistakes(kind: str, changes: tuple[str, ...], text: str) -> None:
    cfg = megatron_jobs.config(kind, *changes)
    with pytest.raises(ValueError, match=text):
        MegatronGPTModel(
            cfg, megatron_jobs.trainer(megatron_jobs.config(kind, *(c for c in changes if not c.startswith("trainer.precision"))))
        )


def test_what_a_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = megatron_jobs.config(
        "mixtral",
        *("model.positition_interpolation_factor=2.0", "model.sliding_window_size=7", "model.kv_channels=null", SP),
        *("model.moe.routing_algorithm=sinkhorn", "model.moe.top_k=1", "model.moe.sinkhorn_tol=0.1", "model.moe.sinkhorn_iterations=3"),
    )
    module = megatron_jobs.made(cfg)
    options = megatron_jobs.inner(module).options
    assert not cfg.distributed_strategy.sequence_parallel and not options.sequence_parallel
    assert (options.position_interpolation_factor, options.sliding_window, options.kv_channels, options.bias) == (2.0, 7, None, False)
    assert (options.moe_routing_algorithm, options.moe_sinkhorn_tol, options.moe_sinkhorn_iterations) == ("sinkhorn", 0.1, 3)
    assert (options.normalize_top_k_affinities, options.vocab_size, options.init_method_std) == (False, megatron_jobs.VOCAB, 0.02)
    assert module._recomputed() is None
    cfg.model.activations_checkpoint_granularity = "selective"
    assert module._recomputed() == (CoreAttention, NeuronSwitchMLP)
    cfg.model.activations_checkpoint_recompute = ["CoreAttention"]
    assert module._recomputed() == (CoreAttention,)
    monkeypatch.delattr(megatron_jobs.Tokens, "padded_vocab_size")
    with pytest.raises(ValueError, match=r"Tokens has no padded_vocab_size, the rows of the embedding: set self.tokenizer"):
        module.gpt_arguments()
    del module.trainer.datamodule
    assert module.gpt_arguments()["vocab_size"] == 32000  # the tokenizer is not known


def test_numbers_may_be_text() -> None:
    module = megatron_jobs.made(megatron_jobs.config("mixtral", 'model.init_method_std="0.01"', 'model.layernorm_epsilon="1e-6"'))
    found = module.gpt_arguments()
    assert found["init_method_std"] == 0.01 and found["layernorm_epsilon"] == 1e-6
    assert "moe_capacity_factor" in NUMBERS and "num_layers" not in NUMBERS


def test_batches_and_weight_decay() -> None:
    cfg = megatron_jobs.config("gpt2", "model.num_layers=1", "model.optim.weight_decay=0.3")
    module = megatron_jobs.made(cfg)
    tokens, labels, mask, _, places = batch = megatron_jobs.batch()
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    for given in (batch, list(batch), dict(zip(names, batch, strict=True))):
        found = module.process_global_batch(given)
        assert list(found) == ["input_ids", "position_ids", "labels", "loss_mask"] and module.get_batch_length(given) == ROWS
        assert all(map(torch.equal, found.values(), (tokens, places, labels, mask)))
    bare = module.process_global_batch({"input_ids": tokens, "labels": labels})
    assert torch.equal(bare["position_ids"], places) and bare["loss_mask"].all()
    for wrong, kind, text in (
        (batch[:4], ValueError, "a batch that is a tuple has tokens, labels, loss_mask, attention_mask, position_ids, got 4 of them"),
        ({"text": tokens}, KeyError, "a batch has no tokens and no labels; it has text"),
        ((tokens[:, :7], *batch[1:]), ValueError, "sequences of 7 tokens, and model.encoder_seq_length is 16"),
    ):
        with pytest.raises(kind, match=text):
            module.process_global_batch(wrong)
    module.trainer.datamodule.shifted_labels = False  # as of Hugging Face's data modules
    with pytest.raises(ValueError, match=r"Tokens gives the label of a token at the token's own place.*use model_source: hf"):
        module.process_global_batch(batch)
    of = {id(p): name for name, p in megatron_jobs.inner(module).named_parameters()}
    for decays_norms in (False, True):
        cfg.model.do_layer_norm_weight_decay = decays_norms
        module.setup_optimizer_param_groups()
        groups = {group["weight_decay"]: {of[id(p)] for p in group["params"]} for group in module._optimizer_param_groups}
        spared = {name for name in of.values() if name.endswith("bias") or (not decays_norms and "layernorm" in name)}
        assert groups == {0.3: set(of.values()) - spared, 0.0: spared}


LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama: tp 2, pp 2, dp 2": ("llama", (f"{DEVICES}=8", f"{TP}=2", f"{PP}=2", SP, "data.micro_batch_size=1")),
    "gpt2: tp 2, dp 2": ("gpt2", (f"{DEVICES}=4", f"{TP}=2", SP, SELECTIVE)),
    "mixtral: ep 2": ("mixtral", (f"{DEVICES}=4", f"{TP}=2", f"{EP}=2", "model.moe.dropless=True", "model.moe.output_router_logits=False")),
}


def plain_losses(kind: str, module: Any, want: Any) -> list[float]:
    """transformers' model in a plain loop on one device with torch's AdamW; the mean over micro-batches of their masked means."""
    cfg = module.config
    optim = cfg.model.optim
    decays = lambda name: not (name.endswith("bias") or "norm" in name or ".ln_" in name)  # noqa: E731
    named = list(want.named_parameters())
    groups = [
        {"params": [p for name, p in named if decays(name) == decay], "weight_decay": optim.weight_decay * decay} for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=1e-6)
    found, dp = [], parallel_state.get_data_parallel_size()
    for step in range(cfg.trainer.max_steps):
        rows, total = megatron_jobs.samples()[step * ROWS : (step + 1) * ROWS], 0.0
        for part in (
            own[k : k + cfg.data.micro_batch_size]
            for own in (rows[rank::dp] for rank in range(dp))
            for k in range(0, ROWS // dp, cfg.data.micro_batch_size)
        ):
            tokens, labels, mask = (torch.stack(x) for x in list(zip(*part, strict=True))[:3])
            losses = torch.nn.functional.cross_entropy(want(input_ids=tokens).logits.flatten(0, 1), labels.flatten(), reduction="none")
            loss = (losses * mask.flatten()).sum() / mask.sum() * len(part) / ROWS
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(want.parameters(), cfg.trainer.gradient_clip_val)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("kind", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_training_is_that_of_a_plain_loop(kind: str, changes: tuple[str, ...]) -> None:
    """With ZeRO-1, several ranks of each kind, weight decay and clipping: every loss."""
    cfg = megatron_jobs.config(kind, "model.optim.lr=0.003", "model.optim.weight_decay=0.1", "~model.optim.sched", *changes)
    module, seen = megatron_jobs.train(cfg, with_weights=True)
    assert seen == pytest.approx(plain_losses(kind, module, module.references[0]), rel=1e-4)
    assert len(seen) == cfg.trainer.max_steps


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "changes", [("model.num_layers=1",), (f"{DEVICES}=4", f"{TP}=2", f"{PP}=2", SP, UNTIED, "model.fp32_residual_connection=True")], ids=len
)
def test_mixed_precision_learns_about_what_float32_learns(changes: tuple[str, ...]) -> None:
    kinds = ("fp32", "mixed_precision")
    found = {kind: megatron_jobs.train(megatron_jobs.config("gpt2", f"precision.type={kind}", *changes))[1] for kind in kinds}
    assert found["mixed_precision"] == pytest.approx(found["fp32"], rel=0.02) and found["mixed_precision"] != found["fp32"]


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_all_layers_are_one_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, also with experts."""
    seen: list[list[int]] = []

    def find(*args: Any) -> list[find_repeats.Run]:
        found = original(*args)
        seen.append([run.count for run in found])
        return found

    original = find_repeats.find
    monkeypatch.setattr(find_repeats, "find", find)
    module = megatron_jobs.made(megatron_jobs.config(kind, "model.num_layers=12", "data.micro_batch_size=4"))
    loss, _ = module.forward_backward_step(megatron_jobs.batch(), is_training=True)
    assert math.isfinite(float(loss)) and [12, 12] in seen


DROPOUT = ("model.hidden_dropout=0.2", "model.attention_dropout=0.2", "model.ffn_dropout=0.2")


@pytest.mark.core(keep=0)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("changes", [("model.num_layers=1",), (f"{DEVICES}=4", f"{TP}=2", f"{PP}=2", SP, UNTIED)], ids=len)
def test_dropout(changes: tuple[str, ...]) -> None:
    """New numbers in each step, the same ones where they are computed again, and no new programs."""

    class Counting(megatron_jobs.Trained):
        counts: list[int]

        def log_metrics(self, *args: Any) -> None:
            super().log_metrics(*args)
            self.counts = [*getattr(self, "counts", []), metrics.metric_data("CompileTime")[0]]

    seen = []
    for again in ((), (FULL,)):
        cfg = megatron_jobs.config("gpt2", *DROPOUT, "model.optim.lr=0.0", "trainer.max_steps=4", *changes, *again)
        module, losses = megatron_jobs.train(cfg, kind=Counting)
        assert module.counts[1] == module.counts[3]
        seen.append(losses)
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)
    plain = megatron_jobs.train(megatron_jobs.config("gpt2", "model.optim.lr=0.0", "trainer.max_steps=4", *changes))[1]
    differences = [a - b for a, b in zip(seen[0], plain, strict=True)]
    assert all(differences) and len(set(differences)) == 4

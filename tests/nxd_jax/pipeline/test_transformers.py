"""Models of transformers in a pipeline as they are: traced by running them without values, and equal to eager torch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch_xla
from neuronx_distributed.pipeline import NxDPPModel, partition
from neuronx_distributed.trainer import initialize_parallel_model, neuronx_distributed_config

from tests.nxd_jax.conftest import Nxd

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "Llama": {**SIZES, "max_position_embeddings": 64},
    "Qwen3": {**SIZES, "max_position_embeddings": 64, "head_dim": 4, "tie_word_embeddings": True},
    "Mixtral": {**SIZES, "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2": {
        "vocab_size": 32,
        "n_embd": 16,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **NO_DROPOUT,
    },
}
LAYERS = {"GPT2": "GPT2Block"}


def decoder(kind: str, **changes: Any) -> Any:
    """A model with few weights, from a seed."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**MODELS[kind], **changes})
    return getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)


def layer_class(model: Any, kind: str) -> type:
    name = LAYERS.get(kind, f"{kind}DecoderLayer")
    return next(type(module) for module in model.modules() if type(module).__name__ == name)


def batch(rows: int = 4, length: int = 8) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded at the start."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (rows, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[::2, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def eager_step(model: Any, given: dict[str, torch.Tensor], microbatches: int) -> float:
    """The mean loss of micro-batches, with its gradients."""
    parts = {name: t.chunk(microbatches) for name, t in given.items()}
    losses = [model(**{name: t[k] for name, t in parts.items()}, use_cache=False).loss for k in range(microbatches)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach())


def cut(model: Any, kind: str, results: int, schedule: str, chunks: int) -> NxDPPModel:
    """A model in even stages, for four micro-batches. results: how many things it returns, the loss first; chunks: stages of a rank."""
    return NxDPPModel(
        model,
        transformer_layer_cls=layer_class(model, kind),
        num_microbatches=4,
        virtual_pipeline_size=chunks,
        schedule=schedule,
        output_loss_value_spec=(True, *[False] * (results - 1)),
        input_names=["input_ids", "attention_mask", "labels"],
        auto_partition=True,
    )


def train_alike(eager: Any, pipeline: Any) -> None:
    """Steps of four micro-batches: the same losses and gradients."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, pipeline)]
    for given in (batch(), batch(), batch(), batch(8, 5)):  # the last one has another shape
        expected = eager_step(eager, given, 4)
        assert float(pipeline.run_train(**given)) == pytest.approx(expected, rel=1e-5)
        for (name, one), other in zip(eager.named_parameters(), pipeline.parameters(), strict=True):
            torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync()


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("kind", "schedule", "chunks"), [("Llama", "1f1b", 1), ("Qwen3", "zbv", 2), ("Mixtral", "1f1b", 1), ("GPT2", "interleaved", 2)]
)
def test_decoders_train_as_in_eager_torch(nxd: Nxd, kind: str, schedule: str, chunks: int) -> None:
    nxd(2, pp=2)
    eager = decoder(kind)
    model = copy.deepcopy(eager)
    pipeline = cut(model, kind, 2, schedule, chunks)
    assert len(pipeline.local_stage_modules) == 2 * chunks
    train_alike(eager, pipeline)
    eager.eval()
    with torch.no_grad():
        expected = float(torch.stack([eager(**{n: t.chunk(4)[k] for n, t in batch().items()}).loss for k in range(4)]).mean())
    assert float(pipeline.run_eval(**batch())) == pytest.approx(expected, rel=1e-5)


def test_a_config_that_asks_for_tuples(nxd: Nxd) -> None:
    """NxD's scripts set `return_dict=False`, with which these models do not run in plain torch: the pipeline gives a tuple."""
    nxd(2, pp=2)
    model = decoder("Llama", return_dict=False)
    pipeline = NxDPPModel(model, layer_class(model, "Llama"), input_names=["input_ids", "labels"], auto_partition=True)
    given = {name: batch()[name] for name in ("input_ids", "labels")}
    with torch.no_grad():
        expected = decoder("Llama")(**given)
    loss, logits = pipeline.run_eval(**given)
    torch.testing.assert_close((loss.cpu(), logits.cpu()), (expected.loss, expected.logits), rtol=1e-4, atol=1e-5)
    assert model.config.return_dict is False
    pipeline.output_loss_value_spec = (True, False)
    assert float(pipeline.run_eval(**given)) == pytest.approx(float(expected.loss), rel=1e-5)


def test_stages_of_gpt2_as_nxds_tests_cut_it(nxd: Nxd) -> None:
    nxd(8, pp=8)
    config = transformers.GPT2Config(n_positions=512, n_layer=8, use_cache=False, return_dict=False, **NO_DROPOUT)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    pipeline = NxDPPModel(model, layer_class(model, "GPT2"))
    pipeline.trace(input_names=["input_ids", "attention_mask", "labels"], leaf_modules=["GPT2Block"])
    for k in range(1, 8):
        pipeline.cut_pipeline_stage(f"transformer.h.{k}")
    stages = partition.partition_traced_model(pipeline.traced_model)
    assert [sum(p.numel() for p in stage.parameters()) for stage in stages.children()] == [53166336, *[7087872] * 6, 38598912]
    shared = partition.analyze_shared_weights_across_stages(pipeline.traced_model, list(stages.children()))
    assert shared == [[("transformer_wte.weight", 0), ("lm_head.weight", 7)]]
    received, inputs, _, _ = partition.analyze_pipeline_module(stages)
    assert [next(iter(found), None) for found in received.values()] == [None, *(f"transformer_h_{k}" for k in range(1, 8))]
    assert [list(found) for found in inputs.values()] == [["input_ids", "attention_mask"], *[[]] * 6, ["labels"]]


def test_checkpointed_layers_and_sequences_without_a_mask(nxd: Nxd) -> None:
    nxd(2, pp=2)
    eager = decoder("Llama")
    model = copy.deepcopy(eager)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers renames it
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pipeline = NxDPPModel(
        model,
        transformer_layer_cls=layer_class(model, "Llama"),
        num_microbatches=2,
        output_loss_value_spec=(True, False),
        input_names=["input_ids", "labels"],
        pipeline_cuts=["model.layers.0"],
    )
    given = {name: t for name, t in batch().items() if name != "attention_mask"}
    assert float(pipeline.run_train(**given)) == pytest.approx(eager_step(eager, given, 2), rel=1e-5)
    for one, other in zip(eager.parameters(), pipeline.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-4, atol=1e-6)


def test_nxds_own_checkpoints_of_the_layers(nxd: Nxd) -> None:
    """A checkpoint has the name of the layer in it: it is one node, and what is inside is not looked into."""
    nxd(2, pp=2)
    eager = decoder("Llama")
    config = neuronx_distributed_config(
        pipeline_parallel_size=2,
        activation_checkpoint_config=layer_class(eager, "Llama"),
        pipeline_config={
            "transformer_layer_cls": layer_class(eager, "Llama"),
            "num_microbatches": 2,
            "output_loss_value_spec": (True, False),
            "input_names": ["input_ids", "labels", "attention_mask"],
            "auto_partition": True,
        },
    )
    model = initialize_parallel_model(config, lambda: copy.deepcopy(eager))
    assert float(model.run_train(**batch())) == pytest.approx(eager_step(eager, batch(), 2), rel=1e-5)
    expected = dict(eager.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.cpu(), expected[name].grad, rtol=1e-4, atol=1e-6)


def test_outputs_of_a_model_without_a_loss(nxd: Nxd) -> None:
    nxd(2, pp=2)
    model = decoder("Llama")
    expected = copy.deepcopy(model).eval()(batch()["input_ids"], use_cache=False)
    pipeline = NxDPPModel(model, transformer_layer_cls=layer_class(model, "Llama"), input_names=["input_ids"], auto_partition=True)
    found = pipeline.run_eval(input_ids=batch()["input_ids"])
    assert type(found) is type(expected)
    torch.testing.assert_close(found.logits.cpu(), expected.logits, rtol=1e-4, atol=1e-5)


def test_the_traced_model_has_the_layers(nxd: Nxd) -> None:
    nxd(2, pp=2)
    model = decoder("Llama")
    pipeline = NxDPPModel(model, transformer_layer_cls=layer_class(model, "Llama"))
    pipeline.trace(input_names=["input_ids", "labels"])
    calls = [node.target for node in pipeline.traced_model.graph.nodes if node.op == "call_module"]
    assert calls == ["model.embed_tokens", "model.rotary_emb", *(f"model.layers.{k}" for k in range(4)), "model.norm", "lm_head"]
    with pytest.raises(RuntimeError, match=r"has no layer 'model.layers.4' to cut after; its layers are model, model.embed_tokens"):
        pipeline.cut_pipeline_stage("model.layers.4")
    pipeline.cut_pipeline_stage("model.layers.1.self_attn")  # inside a layer: it is looked into
    pipeline.partition()
    assert len(list(pipeline.local_stage_modules[0].parameters())) == 1 + 9 + 1 + 4


def test_tracing_leaves_no_trace(nxd: Nxd) -> None:
    nxd(2, pp=2)
    model = decoder("Llama")
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    NxDPPModel(model, transformer_layer_cls=layer_class(model, "Llama")).trace(input_names=["input_ids"])
    torch.testing.assert_close(torch.rand(3), expected)
    assert torch.nn.Module.__call__.__name__ == "_wrapped_call_impl" and not torch.compiler.is_compiling()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    for name, t in model.state_dict(keep_vars=True).items():
        assert id(t) == before[name][0] and torch.equal(t, before[name][1])


def test_a_forward_that_takes_no_use_cache(nxd: Nxd) -> None:
    """Its inner model would make a cache by its configuration, which is left as it is."""
    nxd(2, pp=2)
    torch.manual_seed(0)
    eager = transformers.LlamaForQuestionAnswering(transformers.LlamaConfig(**MODELS["Llama"]))
    model = copy.deepcopy(eager)
    given = {"input_ids": batch()["input_ids"], "start_positions": torch.arange(4), "end_positions": torch.arange(4) + 2}
    pipeline = NxDPPModel(
        model, layer_class(model, "Llama"), output_loss_value_spec=(True, False, False), input_names=[*given], auto_partition=True
    )
    expected = float(eager(**given).loss.detach())
    assert float(pipeline.run_train(**given)) == pytest.approx(expected, rel=1e-5)
    assert eager.config.use_cache and model.config.use_cache

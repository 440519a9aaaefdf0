"""Fine-tuning and preferences from files in the original's shape: losses are those of transformers' model in a plain loop on one device.

Rows of ids are made here once more, in the plainest way.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nxd_jax.training.data.alignment import examples, packing, preferences
from tests.nxd_jax.training import reference, yaml_runs
from tests.nxd_jax.training.data import corpus
from tests.nxd_jax.training.yaml_runs import LENGTH

pytestmark = [pytest.mark.usefixtures("ranks", "variables"), *corpus.MARKS]

S = "distributed_strategy"
STEPS = 4
SMALLER = "model.num_layers=1"
QUIET = ("exp_manager.create_checkpoint_callback=False", f"trainer.max_steps={STEPS}", SMALLER)
TP2 = ("trainer.devices=2", f"{S}.tensor_model_parallel_size=2", f"{S}.sequence_parallel=True")
DP2 = ("trainer.devices=2",)
SFT = [{"input": f"{k} and ", "output": f"{k + 1}" * (k % 3 + 1)} for k in range(24)]
PAIRS = [{"prompt": f"{k} or", "chosen": f" {k + 1}", "rejected": " no" * (k % 2 + 1)} for k in range(24)]


def order(count: int, step: int, size: int = 4) -> list[int]:
    """The rows of a step: shuffled anew in each epoch, what fills no batch left out."""
    epoch, within = divmod(step, count // size)
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()
    found: list[int] = shuffled[within * size : (within + 1) * size]
    return found


def stacked(rows: Any, step: int) -> dict[str, torch.Tensor]:
    found = [rows[k] for k in order(len(rows), step)]
    return {name: torch.stack([row[name] for row in found]) for name in found[0]}


# -- fine-tuning ------------------------------------------------------------------------------------------


def sft_rows(packed: bool, separate: bool = False) -> Any:
    rules = examples.Rules(corpus.tokenizer(), LENGTH - packed)
    found = examples.tokenize(SFT, rules, "rows")
    return packing.PackedRows(found, LENGTH, corpus.tokenizer().eos_token_id, separate) if packed else packing.PaddedRows(found, LENGTH)


def sft_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over micro-batches of one row. Documents are kept apart by a mask that transformers is given."""
    found = []
    for k in range(len(batch["labels"])):
        row = {name: values[k : k + 1] for name, values in batch.items()}
        if "position_ids" in row:
            document = (row["position_ids"] == 0).cumsum(1)
            see = (document[:, :, None] == document[:, None, :]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            row["attention_mask"] = torch.zeros(see.shape).masked_fill(~see, -math.inf)[:, None]
        found.append(model(**row).loss)
    return torch.stack(found).mean()


@pytest.mark.thorough(keep=2)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize(
    ("layout", "packed"),
    [(TP2, True), (DP2, True), (DP2, False), (TP2, False)],
    ids=["packed, tp", "packed, dp", "padded, dp", "padded, tp"],
)
def test_fine_tuning(layout: tuple[str, ...], packed: bool, tmp_path: Path) -> None:
    file = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_SFT", SFT)
    changes = (*QUIET, f"model_alignment_strategy.sft.packing={packed}")
    rows = sft_rows(packed)
    assert len(rows) > 4 and (rows[0]["labels"] >= 0).sum() < (rows[0]["attention_mask"]).sum()
    plain = reference.losses(file, *changes, batch=lambda step: stacked(rows, step), loss=sft_loss)
    found = yaml_runs.train(file, *changes, *layout)
    assert found == pytest.approx(plain, rel=1e-5) and len(found) == STEPS


@pytest.mark.core(keep=0)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "more", [(), ("model.fusions.flash_attention=True",), (f"{S}.pipeline_model_parallel_size=2", "trainer.devices=4")]
)
def test_documents_of_a_row_do_not_see_each_other(more: tuple[str, ...], tmp_path: Path) -> None:
    file = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_SFT", SFT)
    layers = f"model.num_layers={2 if more and 'pipeline' in more[0] else 1}"
    changes = (*QUIET, layers, "+model_alignment_strategy.sft.separate_documents=True")
    rows = sft_rows(True, separate=True)
    plain = reference.losses(file, *changes, batch=lambda step: stacked(rows, step), loss=sft_loss)
    assert yaml_runs.train(file, *changes, *TP2, *more) == pytest.approx(plain, rel=1e-5)
    assert plain != pytest.approx(yaml_runs.train(file, *QUIET, layers, *TP2, "exp_manager.name=across"), rel=1e-3)


PEFT = "model_alignment_strategy.peft"
ADAPTED = (
    f"{PEFT}.lora_rank=4",
    f"{PEFT}.lora_dropout=0.0",
    f"{PEFT}.target_modules=[o_proj, down_proj]",
    "model.optim.lr=0.02",
    "precision.type=fp32",
)


@pytest.mark.core(keep=0)
@pytest.mark.thorough(keep=1)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks transformers so
@pytest.mark.parametrize("layout", [TP2, DP2], ids=["tp", "dp"])
def test_adapters(layout: tuple[str, ...], tmp_path: Path) -> None:
    """Losses are PEFT's on transformers' model."""
    file = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_SFT_lora", SFT)
    changes = (*QUIET, *ADAPTED)
    rows = sft_rows(True)
    plain = reference.losses(file, *changes, batch=lambda step: stacked(rows, step), loss=sft_loss)
    found = yaml_runs.train(file, *changes, *layout)
    assert found == pytest.approx(plain, rel=1e-5) and found[-1] < found[0]


# -- preferences ------------------------------------------------------------------------------------------


def pairs() -> preferences.PreferenceRows:
    return preferences.tokenize(PAIRS, preferences.Rules(corpus.tokenizer(), LENGTH), "rows")


def logps(model: Any, batch: dict[str, torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of an answer's log-probabilities, and how many there are, of each row."""
    ids, labels = batch[f"{side}_input_ids"], batch[f"{side}_labels"][:, 1:]
    each = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return (each * (labels >= 0)).sum(1), (labels >= 0).sum(1)


class Dpo:
    """DPO in a plain loop; before the first step the model scores what it sees then."""

    def __init__(self, beta: float):
        self.beta = beta
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not self.before:
            rows = pairs()
            with torch.no_grad():
                for k in range(len(rows)):
                    one = {name: values[None] for name, values in rows[k].items()}
                    self.before[k] = logps(model, one, "chosen")[0], logps(model, one, "rejected")[0]
        chosen, rejected = logps(model, batch, "chosen")[0], logps(model, batch, "rejected")[0]
        first, second = (torch.cat([self.before[int(k)][n] for k in batch["row"]]) for n in (0, 1))
        return -F.logsigmoid(self.beta * ((chosen - rejected) - (first - second))).mean()


def orpo(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    chosen, rejected = (total / count for total, count in (logps(model, batch, side) for side in ("chosen", "rejected")))
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen.mean() - 0.1 * F.logsigmoid(odds).mean()


@pytest.mark.thorough(keep=1)
@pytest.mark.core(keep=0)
@pytest.mark.parametrize("layout", [DP2, TP2, (*DP2, "data.micro_batch_size=2")], ids=["dp", "tp", "two in a micro-batch"])
def test_dpo(layout: tuple[str, ...], tmp_path: Path) -> None:
    file = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_DPO", PAIRS)
    changes = (*QUIET, "model_alignment_strategy.dpo.kl_beta=0.5", "model.optim.lr=0.003")
    rows = pairs()
    plain = reference.losses(file, *changes, batch=lambda step: stacked(rows, step), loss=Dpo(0.5))
    found = yaml_runs.train(file, *changes, *layout)
    assert found == pytest.approx(plain, rel=1e-5) and len(found) == STEPS
    assert found[0] == pytest.approx(math.log(2), rel=1e-5) and found[-1] < found[0]


@pytest.mark.core(keep=0)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("layout", [TP2, DP2], ids=["tp", "dp"])
def test_orpo(layout: tuple[str, ...], tmp_path: Path) -> None:
    file = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_ORPO", PAIRS)
    changes = QUIET
    rows = pairs()
    plain = reference.losses(file, *changes, batch=lambda step: stacked(rows, step), loss=orpo)
    found = yaml_runs.train(file, *changes, *layout)
    assert found == pytest.approx(plain, rel=1e-5) and found[-1] < found[0]


@pytest.mark.core(keep=0)
def test_a_training_that_goes_on_keeps_the_first_reference(tmp_path: Path) -> None:
    """The model that goes on was trained: what it makes of the rows is no reference. Validation rows have one too."""
    file = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_DPO", PAIRS)
    changes = (
        *DP2,
        SMALLER,
        "model_alignment_strategy.dpo.kl_beta=0.5",
        "model.optim.lr=0.003",
        f"data.val_dir={tmp_path / 'rows.jsonl'}",
        "trainer.val_check_interval=3",
        "trainer.limit_val_batches=2",
        "~model.optim.sched",
        "exp_manager.resume_if_exists=True",
        "exp_manager.resume_ignore_no_checkpoint=True",
    )
    whole = yaml_runs.train(file, *changes, "exp_manager.name=whole", "trainer.max_steps=6")
    yaml_runs.train(file, *changes, "exp_manager.name=parts", "trainer.max_steps=3")
    assert yaml_runs.train(file, *changes, "exp_manager.name=parts", "trainer.max_steps=6") == whole
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 8)
    with pytest.raises(
        ValueError, match=r"rows.jsonl has other rows than when training began, and only the model of then gives their reference"
    ):
        yaml_runs.train(file, *changes, "exp_manager.name=parts", "trainer.max_steps=9")


@pytest.mark.core(keep=0)
def test_a_set_that_comes_later_has_another_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_DPO", PAIRS)
    changes = (
        SMALLER,
        "~model.optim.sched",
        "exp_manager.resume_if_exists=True",
        "exp_manager.checkpoint_callback_params.every_n_train_steps=1",
    )
    yaml_runs.train(file, *changes, "exp_manager.resume_ignore_no_checkpoint=True", "trainer.max_steps=1")
    assert "was not there when training began" not in caplog.text
    validated = (f"data.val_dir={tmp_path / 'rows.jsonl'}", "trainer.limit_val_batches=1", "trainer.val_check_interval=1")
    yaml_runs.train(file, *changes, *validated, "trainer.max_steps=2")
    assert "rows.jsonl was not there when training began: its reference values are those of the model at step 1" in caplog.text


@pytest.mark.core(keep=0)
def test_weights_of_another_run_are_where_fine_tuning_begins(tmp_path: Path) -> None:
    """`model.weight_init_only`: steps and learning rates begin anew."""
    first = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_SFT", SFT)
    yaml_runs.train(first, *DP2, SMALLER, "trainer.max_steps=3", "exp_manager.name=first")
    (trained,) = (tmp_path / "experiments" / "first").rglob("*.ckpt")
    begun = f"exp_manager.resume_from_checkpoint='{trained}'"
    found = yaml_runs.train(first, *DP2, *QUIET, begun, "model.weight_init_only=True", "exp_manager.name=second")
    assert len(found) == STEPS
    (tmp_path / "pairs").mkdir()
    pairs_file = yaml_runs.write_aligned(tmp_path / "pairs", "hf_llama3_8B_DPO", PAIRS)
    found = yaml_runs.train(pairs_file, *TP2, *QUIET, begun, "model.weight_init_only=True")
    assert found[0] == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.core(keep=0)
def test_adapters_alone_go_on_with_the_weights_that_they_were_trained_on(tmp_path: Path) -> None:
    """Checkpoints without the base: the run's own are adapters, and the weights are those of `resume_from_checkpoint`."""
    first = yaml_runs.write_aligned(tmp_path / "first", "hf_llama3_8B_SFT", SFT)
    yaml_runs.train(first, SMALLER, "trainer.max_steps=3", "model.optim.lr=0.05")
    (trained,) = (tmp_path / "first" / "experiments").rglob("*.ckpt")
    file = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_SFT_lora", SFT)
    begun = (f"exp_manager.resume_from_checkpoint='{trained}'", "model.weight_init_only=True")
    changes = (*ADAPTED, SMALLER, f"{PEFT}.save_lora_base=False", "~model.optim.sched")
    whole = yaml_runs.train(file, *TP2, *changes, *begun, "exp_manager.name=whole")
    yaml_runs.train(file, *TP2, *changes, *begun, "exp_manager.name=parts", "trainer.max_steps=3")
    with pytest.raises(ValueError, match=r"holds adapters alone .*save_lora_base: False.*Say exp_manager.resume_from_checkpoint=.* again"):
        yaml_runs.train(file, *TP2, *changes, "exp_manager.name=parts")
    with pytest.raises(FileNotFoundError, match=r"exp_manager.resume_from_checkpoint: there is no checkpoint .*/gone.ckpt"):
        yaml_runs.train(file, *TP2, *changes, "exp_manager.resume_from_checkpoint=/tmp/gone.ckpt", "exp_manager.name=parts")
    (alone,) = (tmp_path / "experiments" / "parts").rglob("*.ckpt")
    with pytest.raises(ValueError, match=r"holds adapters alone .*Begin with a checkpoint of peft.save_lora_base=True"):
        yaml_runs.train(file, *TP2, *changes, f"exp_manager.resume_from_checkpoint='{alone}'", "exp_manager.name=other")
    assert yaml_runs.train(file, *TP2, *changes, *begun, "exp_manager.name=parts") == whole


@pytest.mark.slow
@pytest.mark.core(keep=0)
@pytest.mark.thorough
@pytest.mark.parametrize("base", [False, True])
def test_adapters_are_saved_and_go_on(base: bool, tmp_path: Path) -> None:
    """In the precision of the original's file. The weights under the adapters stay as they were."""
    from nxd_jax.checkpoint import reading

    file = yaml_runs.write_aligned(tmp_path, "hf_llama3_8B_SFT_lora", SFT)
    changes = (
        *TP2,
        f"{PEFT}.save_lora_base={base}",
        f"{PEFT}.target_modules=[qkv_proj, o_proj, gate_up_proj, down_proj]",
        "precision.type=autocast",
        "model.optim.lr=0.02",
        "~model.optim.sched",
        "exp_manager.checkpoint_callback_params.save_top_k=-1",
    )
    whole = yaml_runs.train(file, *changes, "exp_manager.name=whole")
    tags = {int(tag.name.partition("step=")[2].partition("-")[0]): tag for tag in (tmp_path / "experiments" / "whole").rglob("*.ckpt")}
    first, last = (reading.Folder(tags[step] / "model") for step in (3, 6))
    names = set(first.names())
    assert any("lora_A" in name for name in names) and base == any("embed_tokens" in name for name in names)
    for name in names:
        assert torch.equal(first.full(name), last.full(name)) == ("lora_" not in name), name
    yaml_runs.train(file, *changes, "exp_manager.name=parts", "trainer.max_steps=3")
    assert yaml_runs.train(file, *changes, "exp_manager.name=parts") == whole

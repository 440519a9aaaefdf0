"""`nxdt-evaluate`: answers are those of transformers' `generate`, metrics those of the library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_jax.inference import evaluate as command
from nxd_jax.training.evaluation import MetricFactory, generation, prompts
from tests.nxd_jax.training import yaml_runs
from tests.nxd_jax.training.data import corpus

ROOT = Path(__file__).resolve().parents[4]
ROWS = [{"input": f"Line {k} of", "output": f"a text. {k}"} for k in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights, a tokenizer and rows."""
    import transformers

    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{k: v for k, v in yaml_runs.MODEL.items() if k != "model_type"} | {"initializer_range": 0.2})
    config.dtype = torch.float32
    transformers.LlamaForCausalLM(config).float().save_pretrained(place)
    corpus.tokenizer().save_pretrained(place)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return place


def by_transformers(folder: Path, length: int) -> list[str]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = corpus.tokenizer()
    found = []
    for row in ROWS:
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(row["input"], add_special_tokens=False)["input_ids"]]])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_length=length,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0,
        )
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def run(folder: Path, *more: str) -> Any:
    words = ["--model_path", str(folder), "--data_dir", str(folder / "rows.jsonl"), "--sequence_length", "80", *more]
    return command.evaluate(command.parser().parse_args(words))


@pytest.mark.parametrize("tp", [1, 2])
def test_answers_are_those_of_transformers(tp: int, folder: Path, tmp_path: Path) -> None:
    """In batches whose rows have other lengths."""
    found = run(
        folder, "--tp_degree", str(tp), "--batch_size", "2", "--log_path", str(tmp_path / "log.json"), "--metric", "ROUGE,EXACT_MATCH"
    )
    log = json.loads((tmp_path / "log.json").read_text())
    assert [r["prediction"] for r in log] == by_transformers(folder, 80)
    assert [(r["prompt"], r["label"]) for r in log] == [(row["input"], row["output"]) for row in ROWS]
    assert found["EXACT_MATCH"] == 0.0 and set(found["ROUGE"]) >= {"rouge1_fmeasure", "rougeLsum_recall"}


def test_metrics() -> None:
    rouge, exact = MetricFactory.get_metric("ROUGE"), MetricFactory.get_metric("EXACT_MATCH")
    for metric in (rouge, exact):
        metric.update("the cat sat on the mat", "the cat was on the mat")
        metric.update(" yes ", "yes")
    assert exact.compute() == 0.5
    found = rouge.compute()
    assert found["rouge1_precision"] == pytest.approx((5 / 6 + 1) / 2)
    assert found["rouge2_fmeasure"] == pytest.approx((3 / 5 + 0) / 2)
    assert found["rougeL_recall"] == pytest.approx((5 / 6 + 1) / 2)
    with pytest.raises(ValueError, match="BLEU is not a registered metric; there are EXACT_MATCH, ROUGE"):
        MetricFactory.get_metric("BLEU")


def test_a_metric_of_yours(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_metrics.py").write_text(
        "from nxd_jax.training.evaluation import MetricFactory\n"
        "class Count:\n"
        "    def __init__(self): self.n = 0\n"
        "    def update(self, prediction, label): self.n += 1\n"
        "    def compute(self): return self.n\n"
        "MetricFactory.register_metric('COUNT', Count)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MetricFactory, "metrics", dict(MetricFactory.metrics))
    assert run(folder, "--metrics_module", "own_metrics", "--metric", "COUNT", "--sequence_length", "20") == {"COUNT": 5}


def test_templates(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"dialogue": "a: b", "summary": "c"}\n')
    place = str(tmp_path / "rows.jsonl")
    (found,) = prompts.read(place, "Sum:\n{{dialogue}}\n", "{{summary}}")
    assert found == ("Sum:\na: b\n", "c")
    with pytest.raises(ValueError, match=r"--prompt_template: 'text' is undefined in row 0 of .*, which has dialogue, summary"):
        prompts.read(place, "{{text}}", "{{summary}}")
    with pytest.raises(ValueError, match="row 0 of .* has no text in prompt or input; it has dialogue, summary"):
        prompts.read(place)
    with pytest.raises(ValueError, match="--label_template is no Jinja template"):
        prompts.read(place, "a", "{{")


def test_sampling() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, -1)
    source = torch.Generator().manual_seed(0)

    def shares(**how: Any) -> list[float]:
        drawn = generation.Choosing(sample=True, **how)(logits, source)
        return (drawn.bincount(minlength=4) / len(drawn)).tolist()

    assert shares(temperature=1.0, top_k=0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(temperature=1.0, top_k=2) == pytest.approx([5 / 8, 3 / 8, 0, 0], abs=0.03)
    assert shares(temperature=1.0, top_k=0, top_p=0.6) == pytest.approx([5 / 8, 3 / 8, 0, 0], abs=0.03)
    assert shares(temperature=0.5, top_k=0)[0] == pytest.approx(0.25 / 0.365, abs=0.03)
    assert generation.Choosing()(logits, source).unique().tolist() == [0]
    with pytest.raises(ValueError, match="top_p=0"):
        generation.Choosing(top_p=0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model_path", "nowhere"], "nowhere is no Hugging Face model: there is no config.json"),
        (["--data_dir", "none.jsonl"], "--data_dir: there is no file or folder none.jsonl"),
        (["--metric", "BLEU"], "BLEU is not a registered metric"),
        (
            ["--sequence_length", "200", "--max_input_length", "150", "--prompt_template", "a" * 140],
            "the prompt of row 0 has 141 tokens, and the model knows 128 positions",
        ),
        (["--max_input_length", "3"], "the prompt of row 0 has 7 tokens, and 3 fit"),
    ],
)
def test_mistakes(words: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--model_path": str(folder), "--data_dir": str(folder / "rows.jsonl"), "--tokenizer_path": str(folder)}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    assert command.main([w for pair in given.items() for w in pair]) == 2
    assert f"nxdt-evaluate: {text}" in capsys.readouterr().err


def test_the_command(folder: Path) -> None:
    """In a process of its own, which hosts both ranks."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "NEURON_RT_NUM_CORES", "JAX_NUM_CPU_DEVICES")}
    words = ["--model_path", str(folder), "--data_dir", str(folder / "rows.jsonl"), "--sequence_length", "12", "--tp_degree", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "nxd_jax.inference.evaluate", *words, "--metric", "EXACT_MATCH"],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"EXACT_MATCH": 0.0}

"""`nxdt-evaluate`: have a fine-tuned model answer the prompts of a set, and compare its answers with the right ones.

    nxdt-evaluate --model_path finetuned --data_dir test.jsonl --metric ROUGE
    nxdt-evaluate --model_path finetuned --data_dir test.jsonl --metric ROUGE,EXACT_MATCH --tp_degree 8 --log_path answers.json \\
        --prompt_template 'Summarize:\\n{{dialogue}}\\nSummary:' --label_template '{{summary}}'

The flags are those of the original's evaluate.py. --model_path is a Hugging Face folder: nxdt-convert --convert_to_full_state makes one of a checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxd_jax import interpreter

_UNUSED = ("skip_nxd_trace", "nxd_inference_path", "traced_model_path", "tnx_model_precision")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    words = __doc__ or ""
    found = argparse.ArgumentParser(
        "nxdt-evaluate",
        description=words.split("\n\n")[0].replace("`", ""),
        epilog=words.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--model_path", required=True, help="a folder with config.json and weights")
    found.add_argument("--tokenizer_path", help="a folder, or a name on the Hugging Face hub; default: --model_path")
    found.add_argument(
        "--data_dir", required=True, help="rows: .jsonl, .json, .parquet, .arrow, a folder, or a set of the hub (its split test)"
    )
    found.add_argument("--prompt_template", help="Jinja, of a row's columns; default: its column prompt, or input")
    found.add_argument("--label_template", help="Jinja, of a row's columns; default: its column label, or output")
    found.add_argument("--metric", default="ROUGE", help="names with commas between; default: ROUGE")
    found.add_argument("--metrics_module", help="a module to import first, which registers metrics (MetricFactory.register_metric)")
    found.add_argument("--log_path", help="a JSON file for prompts, answers and labels")
    found.add_argument("--sequence_length", type=int, default=4096, help="most tokens of a prompt with its answer; default: 4096")
    found.add_argument(
        "--max_input_length", type=int, default=2048, help="most tokens of a prompt; longer ones are an error; default: 2048"
    )
    found.add_argument("--batch_size", type=int, default=1, help="prompts that are answered together; default: 1")
    found.add_argument("--tp_degree", type=int, default=1, help="tensor-parallel ranks; default: 1 (the original's: 32)")
    found.add_argument("--temperature", type=float, default=0.0)
    found.add_argument("--top_p", type=float, default=1.0)
    found.add_argument("--top_k", type=int, default=1)
    found.add_argument("--do_sample", action=argparse.BooleanOptionalAction, default=False)
    found.add_argument("--seed", type=int, default=42)
    found.add_argument("--framework", choices=("nxd", "tnx"), default="nxd", help="without effect")
    found.add_argument(
        "--skip_nxd_trace", action=argparse.BooleanOptionalAction, default=False, help="without effect: nothing is traced before"
    )
    for name in _UNUSED[1:]:
        found.add_argument(f"--{name}", help="without effect")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The `nxdt-evaluate` command; returns its status."""
    if argv is None:
        interpreter.use("nxdt-evaluate", "nxd_jax.training.evaluation.command")
    args = parser().parse_args(argv)
    if argv is None and not os.environ.get("WORLD_SIZE"):
        from nxd_jax import run

        os.environ.update({name: value for name, value in run.hosting(args.tp_degree, "nxdt-evaluate").items() if name not in os.environ})
    try:
        sys.stdout.write(f"{json.dumps(evaluate(args), indent=1)}\n")
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.stderr.write(f"nxdt-evaluate: {error}\n")
        return 2
    return 0


def evaluate(args: Any) -> dict[str, Any]:
    """The metrics by name; writes `log_path`. args: of `parser`."""
    from nxd_jax.training.data import tokenizing
    from nxd_jax.training.evaluation import generation, models, prompts
    from nxd_jax.training.evaluation.metrics import MetricFactory

    if args.metrics_module:
        sys.path.insert(0, os.getcwd())
        importlib.import_module(args.metrics_module)
    metrics = {name: MetricFactory.get_metric(name) for name in args.metric.split(",")}
    choosing = generation.Choosing(args.do_sample, args.temperature, args.top_k, args.top_p)
    questions = prompts.read(args.data_dir, args.prompt_template, args.label_template)
    tokenizer = tokenizing.load_tokenizer(args.tokenizer_path or args.model_path, "--tokenizer_path")
    ids = _ids(tokenizer, [q.prompt for q in questions], args)
    model = models.load(Path(args.model_path), args.tp_degree)
    answers = _answers(model, ids, tokenizer, choosing, args)
    for question, answer in zip(questions, answers, strict=True):
        for metric in metrics.values():
            metric.update(answer, question.label)
    if args.log_path:
        records = [{"prompt": q.prompt, "prediction": a, "label": q.label} for q, a in zip(questions, answers, strict=True)]
        Path(args.log_path).write_text(json.dumps(records, indent=1, ensure_ascii=False))
    return {name: metric.compute() for name, metric in metrics.items()}


def _ids(tokenizer: Any, texts: list[str], args: Any) -> list[list[int]]:
    from nxd_jax.training.data import tokenizing

    most = min(args.max_input_length, args.sequence_length - 1)
    found = []
    for number, ids in enumerate(tokenizing.encode(tokenizer, texts)):
        ids = tokenizing.begun(tokenizer, ids)
        if len(ids) > most:
            raise ValueError(
                f"the prompt of row {number} has {len(ids)} tokens, and {most} fit: raise --max_input_length and --sequence_length, or shorten it"
            )
        found.append(ids)
    return found


def _answers(model: Any, ids: list[list[int]], tokenizer: Any, choosing: Any, args: Any) -> list[str]:
    from nxd_jax import _progress
    from nxd_jax.training.evaluation import generation

    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    found: list[str] = []
    for first in _progress.bar(range(0, len(ids), args.batch_size), "answering", 2):
        batch = ids[first : first + args.batch_size]
        filled = [*batch, *[batch[-1]] * (args.batch_size - len(batch))]  # one program for all batches
        answers = generation.generate(model, filled, args.sequence_length, end, choosing, args.seed + first)[: len(batch)]
        found += [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return found


if __name__ == "__main__":
    sys.exit(main())

"""`nxdt-evaluate`: have a fine-tuned model answer the prompts of a set, and compare its answers with the right ones.

    nxdt-evaluate --model_path finetuned --data_dir test.jsonl --metric ROUGE
    nxdt-evaluate --model_path finetuned --data_dir test.jsonl --metric ROUGE,EXACT_MATCH --tp_degree 8 --log_path answers.json \\
        --prompt_template 'Summarize:\\n{{dialogue}}\\nSummary:' --label_template '{{summary}}'

The flags are those of the original's evaluate.py. Models are those of nxd-generate, with a KV cache. --model_path is a Hugging Face folder:
nxdt-convert --convert_to_full_state makes one of a checkpoint.
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
        interpreter.use("nxdt-evaluate", "nxd_jax.inference.evaluate")
    args = parser().parse_args(argv)
    try:
        sys.stdout.write(f"{json.dumps(evaluate(args), indent=1)}\n")
    except (OSError, ValueError, KeyError, ModuleNotFoundError) as error:
        sys.stderr.write(f"nxdt-evaluate: {error.args[0] if isinstance(error, KeyError) else error}\n")
        return 2
    return 0


def evaluate(args: Any) -> dict[str, Any]:
    """The metrics by name; writes `log_path`. args: of `parser`."""
    from nxd_jax.inference import building
    from nxd_jax.training.data import tokenizing
    from nxd_jax.training.evaluation import prompts
    from nxd_jax.training.evaluation.generation import Choosing
    from nxd_jax.training.evaluation.metrics import MetricFactory

    if args.metrics_module:
        sys.path.insert(0, os.getcwd())
        importlib.import_module(args.metrics_module)
    metrics = {name: MetricFactory.get_metric(name) for name in args.metric.split(",")}
    choosing = Choosing(args.do_sample, args.temperature, args.top_k, args.top_p)
    questions = prompts.read(args.data_dir, args.prompt_template, args.label_template)
    config = building.read_config(Path(args.model_path))
    tokenizer = tokenizing.load_tokenizer(args.tokenizer_path or args.model_path, "--tokenizer_path")
    ids = _ids(tokenizer, [q.prompt for q in questions], args, getattr(config, "max_position_embeddings", None) or sys.maxsize)
    answers = _answers(config, ids, tokenizer, None if choosing.likeliest else choosing, args)
    for question, answer in zip(questions, answers, strict=True):
        for metric in metrics.values():
            metric.update(answer, question.label)
    if args.log_path:
        records = [{"prompt": q.prompt, "prediction": a, "label": q.label} for q, a in zip(questions, answers, strict=True)]
        Path(args.log_path).write_text(json.dumps(records, indent=1, ensure_ascii=False))
    return {name: metric.compute() for name, metric in metrics.items()}


def _ids(tokenizer: Any, texts: list[str], args: Any, positions: int) -> list[list[int]]:
    from nxd_jax.training.data import tokenizing

    most = min(args.max_input_length, args.sequence_length - 1)
    found = []
    for number, ids in enumerate(tokenizing.encode(tokenizer, texts)):
        ids = tokenizing.begun(tokenizer, ids)
        if len(ids) > most:
            raise ValueError(
                f"the prompt of row {number} has {len(ids)} tokens, and {most} fit: raise --max_input_length and --sequence_length, or shorten it"
            )
        if len(ids) >= positions:
            raise ValueError(f"the prompt of row {number} has {len(ids)} tokens, and the model knows {positions} positions: shorten it")
        found.append(ids)
    return found


def _answers(config: Any, ids: list[list[int]], tokenizer: Any, choosing: Any, args: Any) -> list[str]:
    """choosing: None for the likeliest tokens."""
    from nxd_jax import _progress
    from nxd_jax.inference import generation

    model = _model(config, max(map(len, ids), default=1), choosing is None, args)
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    found: list[str] = []
    for first in _progress.bar(range(0, len(ids), args.batch_size), "answering", 2):
        batch = ids[first : first + args.batch_size]
        answers = generation.generate(model, batch, end=end, choosing=choosing, seed=args.seed + first)
        found += [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return found


def _model(config: Any, longest: int, greedy: bool, args: Any) -> Any:
    """The model of a folder on its devices, with a KV cache of `--sequence_length` (at most the positions that it knows) for each of `--batch_size` texts."""
    from nxd_jax.inference import building
    from nxd_jax.inference.buckets import power_above
    from nxd_jax.inference.config import InferenceConfig
    from nxd_jax.inference.language_model import About, LanguageModel
    from nxd_jax.training.converters import sources

    length = min(args.sequence_length, getattr(config, "max_position_embeddings", None) or args.sequence_length)
    options = InferenceConfig(
        tp_degree=args.tp_degree,
        batch_size=args.batch_size,
        seq_len=length,
        max_context_length=min(power_above(longest), length),
        on_device_sampling=greedy,
    )
    source = sources.open_source(Path(args.model_path), "model", trust=False)
    made = building.build(config, options, {name: source.read(name) for name in source.shapes})
    return LanguageModel(made, options, About(config.model_type, config.vocab_size, ()))


if __name__ == "__main__":
    sys.exit(main())

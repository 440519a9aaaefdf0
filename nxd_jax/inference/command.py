"""`nxd-generate`: have a language model go on from texts, on tensor-parallel ranks.

    nxd-generate llama-hf "Once upon a time" --tp 8
    nxd-generate llama-hf "Once upon a time" "The capital of France is" --tp 8 --max-new-tokens 64 --temperature 0.8 --top-p 0.9 --seed 1
    nxd-generate llama-hf --tp 8 --seq-len 4096 --batch-size 4 --save llama.pt
    nxd-generate llama.pt --chat "Why is the sky blue?"
    nxd-generate llama-70b-hf "Once upon a time" --tp 8 --draft llama-1b-hf --speculation-length 5
    nxd-generate llama-hf "Once upon a time" "Dear Sir" --lora poet=poet-lora --lora clerk=clerk-lora --adapter poet --adapter clerk

MODEL is a Hugging Face folder (config.json, safetensors files, a tokenizer), or a file that --save wrote, which starts without tracing. Answers go to stdout as
they are made, speed to stderr. Wrong arguments and models that cannot be read end with status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nxd_jax import interpreter
from nxd_jax.inference import dtype_names

_SMALLEST, _DEFAULT_LENGTH, _NEW = 128, 1024, 128
_DTYPES = ("float32", "bfloat16", "float16")
_QUANTIZED = "{int8,float8_e4m3,float8_e5m2}"
_KV_DTYPES = "{float8_e4m3,float8_e5m2}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    words = __doc__ or ""
    found = argparse.ArgumentParser(
        "nxd-generate",
        description=words.split("\n\n")[0].replace("`", ""),
        epilog=words.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or a file that --save wrote")
    found.add_argument("texts", metavar="TEXT", nargs="*", help="texts to go on from; - reads one from stdin")
    found.add_argument("--tokenizer", help="a folder, or a name on the Hugging Face hub; default: MODEL's own")
    found.add_argument("--chat", action="store_true", help="each TEXT is a user's message: put it into the tokenizer's chat template")
    found.add_argument("--max-new-tokens", type=int, help=f"of an answer (default {_NEW}, or as many as fit)")
    found.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token; above, tokens are drawn")
    found.add_argument("--top-k", type=int, default=0, help="draw among so many (default 0: all)")
    found.add_argument("--top-p", type=float, default=1.0, help="draw among those with so much of the probability (default 1)")
    found.add_argument("--seed", type=int, default=42, help="of draws (default %(default)s)")
    lora = found.add_argument_group("adapters")
    lora.add_argument(
        "--lora", metavar="NAME=FOLDER", action="append", default=[], help="load a LoRA adapter of PEFT under a name; may be repeated"
    )
    lora.add_argument(
        "--adapter",
        metavar="NAME",
        action="append",
        help="that answers: once for all texts or once for each, - for none (default: the only --lora)",
    )
    trace = found.add_argument_group("how a folder is traced")
    trace.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    trace.add_argument("--ep", type=int, default=1, help="of a mixture: expert-parallel ranks for each tensor-parallel one (default 1)")
    trace.add_argument("--batch-size", type=int, help="texts that are answered together (default: all, at most 8)")
    trace.add_argument(
        "--seq-len", type=int, help=f"most tokens of a text with its answer (default: as needed; with --save {_DEFAULT_LENGTH})"
    )
    trace.add_argument("--dtype", choices=_DTYPES, help="of weights and KV cache (default: as config.json says)")
    trace.add_argument(
        "--kv-dtype",
        type=_float8,
        metavar=_KV_DTYPES,
        help="keep the KV cache in float8, a byte for each number, cast without scales (default: --dtype)",
    )
    trace.add_argument(
        "--quantize",
        type=_quantized_dtype,
        metavar=_QUANTIZED,
        help="weights of all linear layers but the last one in int8 or float8, a byte for each number, with a scale for each output (default: --dtype)",
    )
    trace.add_argument("--save", metavar="FILE", help="write the model, compiled for these sizes, its weights and tokenizer to a file")
    trace.add_argument(
        "--draft", metavar="FOLDER", help="a small model of the same vocabulary that guesses tokens ahead; same answers, sooner"
    )
    trace.add_argument("--speculation-length", type=int, help="tokens that are checked at once, with --draft (default 4)")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The `nxd-generate` command; returns its status."""
    if argv is None:
        interpreter.use("nxd-generate", "nxd_jax.inference.command")
    args = parser().parse_intermixed_args(argv)  # texts may stand behind options
    try:
        _check(args)
        _run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError, ModuleNotFoundError) as error:
        sys.stderr.write(f"nxd-generate: {error.args[0] if isinstance(error, KeyError) else error}\n")
        return 2
    return 0


def _check(args: argparse.Namespace) -> None:
    if not args.texts and not args.save:
        raise ValueError("there is nothing to do: give a text to go on from, or --save FILE")
    if not Path(args.model).exists():
        raise ValueError(f"MODEL {args.model} does not exist: give a Hugging Face folder (with config.json), or a file that --save wrote")
    for name in ("tp", "ep", "batch_size", "seq_len", "max_new_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.speculation_length is not None and not args.draft:
        raise ValueError("--speculation-length is about --draft: give both")
    if args.draft and args.temperature > 0:
        raise ValueError("--draft goes with the likeliest tokens only: leave --temperature out")
    if args.draft and args.save:
        raise ValueError("--save writes one model, and --draft is another: save without it")
    _adapters(args)
    if Path(args.model).is_file():
        given = [
            f"--{n.replace('_', '-')}"
            for n in ("tp", "ep", "batch_size", "seq_len", "dtype", "kv_dtype", "quantize", "save", "draft")
            if getattr(args, n) not in (None, 1)
        ]
        if given:
            raise ValueError(
                f"{args.model} is traced already, and {', '.join(given)} would need another trace: give the Hugging Face folder"
            )


def _folders(args: argparse.Namespace) -> dict[str, str]:
    """By name the folders of adapters."""
    found = dict(one.partition("=")[::2] for one in args.lora)
    if len(found) < len(args.lora) or not all(name not in ("", "-") and folder for name, folder in found.items()):
        raise ValueError(f"--lora takes NAME=FOLDER, each with a name of its own, got {', '.join(args.lora)}")
    return found


def _adapters(args: argparse.Namespace) -> list[str | None]:
    """The adapter of each text."""
    names, given = list(_folders(args)), args.adapter
    if given is None and len(names) > 1 and args.texts:
        raise ValueError(
            f"there are adapters {', '.join(names)}: say which one answers with --adapter NAME (- for none), once or for each text"
        )
    given = (names or ["-"])[:1] if given is None else given
    if len(given) not in (1, len(args.texts)) and args.texts:
        raise ValueError(f"--adapter is given {len(given)} times for {len(args.texts)} texts: give it once, or once for each")
    unknown = [name for name in given if name not in ("-", *names)]
    if unknown and not Path(args.model).is_file():
        raise ValueError(f"--adapter {unknown[0]} is none of {', '.join(names) or 'no --lora'}: load it with --lora {unknown[0]}=FOLDER")
    each = given * len(args.texts) if len(given) == 1 else given
    return [None if name == "-" else name for name in each]


def _quantized(dtype: str | None) -> dict[str, Any]:
    return {"quantized": True, "quantization_type": "per_channel_symmetric", "quantization_dtype": dtype} if dtype else {}


def _quantized_dtype(given: str, integers: bool = True) -> str:
    try:
        return dtype_names.quantized(given, integers)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _float8(given: str) -> str:
    return _quantized_dtype(given, integers=False)


def _run(args: argparse.Namespace) -> None:
    from nxd_jax.inference import building

    choosing = _choosing(args)
    if not Path(args.model).is_file():
        building.read_config(Path(args.model))  # what is wrong there comes first
    with _tokenizer(args) as tokenizer:
        prompts = [_ids(tokenizer, sys.stdin.read() if text == "-" else text, args) for text in args.texts]
        started = time.perf_counter()
        model, draft = _models(args, prompts)
        _say(f"{model.about.kind} on {model.options.world_size} ranks is ready after {time.perf_counter() - started:.1f} s")
        if args.save:
            from nxd_jax.inference import model_files

            model_files.save(model, args.save, args.tokenizer or args.model)
            _say(f"{args.save}: {Path(args.save).stat().st_size / 1e6:.1f} MB")
        if prompts:
            _answer(args, model, draft, tokenizer, prompts, choosing)


@contextlib.contextmanager
def _tokenizer(args: argparse.Namespace) -> Iterator[Any]:
    """The tokenizer, None where no text needs one."""
    from nxd_jax.inference import model_files

    place = Path(args.model)
    with contextlib.ExitStack() as stack:
        if not args.tokenizer and place.is_file():
            found = stack.enter_context(model_files.tokenizer_folder(place))
        else:
            found = Path(args.tokenizer or place)
        if not args.texts:
            yield None
            return
        if found is None or (found.is_dir() and not any((found / name).is_file() for name in model_files.TOKENIZER_FILES)):
            raise ValueError(
                f"{args.tokenizer or args.model} has no tokenizer ({model_files.TOKENIZER_FILES[0]} or the like): name one with --tokenizer"
            )
        from nxd_jax.training.data import tokenizing

        yield tokenizing.load_tokenizer(found, "--tokenizer")


def _ids(tokenizer: Any, text: str, args: argparse.Namespace) -> list[int]:
    if not args.chat:
        return list(tokenizer(text, verbose=False)["input_ids"])
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: leave --chat out")
    written = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
    return list(tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"])


def _models(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """The model, and the draft or None."""
    import dataclasses

    from nxd_jax.inference import building, model_files
    from nxd_jax.inference.language_model import LanguageModel

    place = Path(args.model)
    if place.is_file():
        model = model_files.load(place)
        for name, folder in _folders(args).items():
            model.load_adapter(name, folder)
        return model, None
    options = _options(args, building.read_config(place), prompts)
    if not args.draft:
        return LanguageModel.from_pretrained(place, options), None
    checked = dataclasses.replace(options, speculation_length=args.speculation_length or 4)
    guessing = dataclasses.replace(options, ep_degree=1, lora_config=None)
    return LanguageModel.from_pretrained(place, checked), LanguageModel.from_pretrained(args.draft, guessing)


def _options(args: argparse.Namespace, config: Any, prompts: Sequence[Sequence[int]]) -> Any:
    import torch

    from nxd_jax.inference.buckets import power_above
    from nxd_jax.inference.config import InferenceConfig
    from nxd_jax.inference.lora_serving import LoraServingConfig
    from nxd_jax.quantization import KVQuantizationConfig

    longest = max(map(len, prompts), default=0)
    limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if longest >= limit:
        raise ValueError(
            f"the longest text has {longest} tokens, and the model knows {limit} positions (max_position_embeddings): shorten it"
        )
    if args.seq_len is not None and args.seq_len > limit:
        raise ValueError(f"--seq-len {args.seq_len} is more than the model's {limit} positions (max_position_embeddings)")
    room = args.seq_len or limit
    needed = longest + (args.max_new_tokens or max(min(_NEW, room - longest), 1))
    if needed > room:
        which = f"--seq-len {room}: raise it" if args.seq_len else f"the model's {room} positions (max_position_embeddings): shorten it"
        raise ValueError(
            f"the longest text has {longest} tokens, with --max-new-tokens {needed - longest} that is more than {which}, or ask for fewer"
        )
    dtype = getattr(torch, args.dtype) if args.dtype else None
    kept = KVQuantizationConfig(quant_dtype=getattr(torch, dtype_names.TORCH[args.kv_dtype])) if args.kv_dtype else None
    paths = _folders(args)
    sizes: dict[str, Any] = {"lora_config": LoraServingConfig.of_folders(paths) if paths else None}
    sizes |= {
        "tp_degree": args.tp,
        "ep_degree": args.ep,
        "batch_size": args.batch_size or min(max(len(prompts), 1), 8),
        "torch_dtype": dtype,
        "kv_quant_config": kept,
        **_quantized(args.quantize),
    }
    if args.save:
        length = args.seq_len or min(max(_DEFAULT_LENGTH, power_above(needed)), limit)
        return InferenceConfig(**sizes, seq_len=length, enable_bucketing=True)
    length = args.seq_len or min(max(power_above(needed), _SMALLEST), limit)
    return InferenceConfig(
        **sizes, seq_len=length, max_context_length=min(power_above(longest), length), on_device_sampling=args.temperature == 0
    )


def _choosing(args: argparse.Namespace) -> Any:
    """How tokens are chosen on the CPU, None for the likeliest."""
    from nxd_jax.training.evaluation.generation import Choosing

    found = Choosing(True, args.temperature, args.top_k, args.top_p)
    return found if args.temperature else None


def _answer(args: argparse.Namespace, model: Any, draft: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], choosing: Any) -> None:
    from nxd_jax.inference import generation
    from nxd_jax.inference.printing import Printer

    ends = model.about.end or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    most = args.max_new_tokens or max(min(_NEW, model.options.seq_len - max(map(len, prompts))), 1)
    printer, made, first = Printer(sys.stdout, tokenizer, args.texts), 0, 0.0
    started = time.perf_counter()
    for one in generation.stream(model, prompts, most, ends, choosing, args.seed, draft, _adapters(args)):
        made += one.token is not None
        first = first or time.perf_counter() - started
        printer.add(one)
    taken = time.perf_counter() - started
    _say(
        f"{sum(map(len, prompts))} tokens read, the first answered after {first:.3f} s; {made} tokens made in {taken:.2f} s, "
        f"{made / taken if taken else 0:.1f} tokens/s"
    )


def _say(text: str) -> None:
    sys.stderr.write(f"nxd-generate: {text}\n")


if __name__ == "__main__":
    sys.exit(main())

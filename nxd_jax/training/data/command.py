"""`nxdt-data`: sets for `nxdt-train`, from text.

    nxdt-data tokenizer --text corpus/ --vocab-size 8192 --out tokenizer      train a byte-level tokenizer
    nxdt-data make --text corpus/ --tokenizer tokenizer --length 4096 --out wiki_4k
    nxdt-data check wiki_4k --config conf/hf_llama3_8B_config.yaml            does it fit, and how long does it last
    nxdt-data show wiki_4k --tokenizer tokenizer --row 7
    nxdt-data megatron --text corpus/ --tokenizer tokenizer --append-eod --output-prefix wiki    wiki_text_document.bin and .idx, for data.data_prefix
    nxdt-data check wiki_text_document --config conf/megatron_gpt_config.yaml

Text: files and folders of .txt, .jsonl, .json (all three also with .gz), .parquet, .arrow, and folders that datasets' save_to_disk wrote.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nxd_jax import interpreter


def parser() -> argparse.ArgumentParser:
    """The command line."""
    words = __doc__ or ""
    found = argparse.ArgumentParser(
        prog="nxdt-data",
        description=words.split("\n\n")[0].replace("`", ""),
        epilog=words.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = found.add_subparsers(dest="command", required=True, metavar="make|tokenizer|megatron|check|show")

    make = commands.add_parser("make", help="cut text into rows of one length: a folder for data.train_dir")
    _add_text(make)
    make.add_argument("--tokenizer", required=True, help="a tokenizer's folder, or tokenizer.json")
    make.add_argument("--length", type=int, default=4096, help="ids in a row: model.encoder_seq_length (default: %(default)s)")
    make.add_argument("--out", required=True, help="the folder to write")
    make.add_argument("--overwrite", action="store_true", help="replace what is there, when the new set is complete")

    train = commands.add_parser("tokenizer", help="train a byte-level BPE tokenizer on text")
    _add_text(train)
    train.add_argument("--vocab-size", type=int, default=8192, help="tokens, 245 at least (default: %(default)s)")
    train.add_argument("--add-bos", action="store_true", help="put <s> before each text, as Llama's tokenizers do")
    train.add_argument("--out", required=True, help="the folder to write")
    train.add_argument("--overwrite", action="store_true", help="replace what is there")

    _add_megatron(
        commands.add_parser("megatron", help="make a Megatron set of text: PREFIX_text_document.bin and .idx, for data.data_prefix")
    )

    check = commands.add_parser("check", help="look at every row of a set, and at what a configuration makes of it")
    check.add_argument("set", nargs="+", help="what data.train_dir would name, or the prefix of a Megatron set")
    check.add_argument("--config", help="a YAML file of nxdt-train")
    check.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="change a key of --config (may be given again)")
    check.add_argument("--tokenizer", help="the tokenizer that made the set")

    show = commands.add_parser("show", help="print rows of a set")
    show.add_argument("set", nargs="+", help="what data.train_dir would name, or the prefix of a Megatron set")
    show.add_argument("--row", type=int, default=0, help="the first one (default: 0)")
    show.add_argument("--count", type=int, default=1, help="how many (default: 1)")
    show.add_argument("--tokenizer", help="print text too")
    return found


def _add_text(to: argparse.ArgumentParser) -> None:
    to.add_argument("--text", nargs="+", required=True, help="files or folders")
    to.add_argument("--column", default="text", help="where the text is in other files than .txt (default: text)")
    _add_sample_by(to)


def _add_sample_by(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--sample-by",
        choices=("document", "paragraph", "line"),
        default="document",
        help="what of a .txt file is one text (default: all of it)",
    )


def _add_megatron(to: argparse.ArgumentParser) -> None:
    to.add_argument("--text", "--input", nargs="+", required=True, help="files or folders")
    to.add_argument(
        "--json-keys", nargs="+", default=["text"], help="where texts are in other files than .txt; each key makes a set (default: text)"
    )
    _add_sample_by(to)
    to.add_argument("--tokenizer", help="a tokenizer's folder, or tokenizer.json; instead of the following")
    to.add_argument("--tokenizer-library", help="as data.tokenizer.library: megatron, huggingface or sentencepiece")
    to.add_argument("--tokenizer-type", help="as data.tokenizer.type, such as GPT2BPETokenizer")
    to.add_argument("--tokenizer-model", help="a model file of sentencepiece")
    to.add_argument("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    to.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    to.add_argument("--append-eod", action="store_true", help="end each document with the tokenizer's end of text")
    to.add_argument("--output-prefix", required=True, help="PREFIX of PREFIX_KEY_document.bin and .idx")
    to.add_argument("--overwrite", action="store_true", help="replace what is there, when the new set is complete")


def main(argv: Sequence[str] | None = None) -> None:
    """The `nxdt-data` command."""
    if argv is None:
        interpreter.use("nxdt-data", "nxd_jax.training.data.command")
    args = parser().parse_args(argv)
    try:
        code = _COMMANDS[args.command](args)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("hydra", "omegaconf", "datasets", "pyarrow", "tokenizers", "transformers"):
            raise
        raise SystemExit(f"nxdt-data: {error.name} is not installed: pip install 'nxd-jax[nxdt]'") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"nxdt-data: {error}") from None
    raise SystemExit(code)


def _make(args: argparse.Namespace) -> int:
    from nxd_jax.training.data import making, records, sets, tokenizing

    tokenizer = tokenizing.load_tokenizer(args.tokenizer, "--tokenizer")
    texts = records.documents(args.text, args.column, args.sample_by)
    with sets.quiet():
        made = making.make(_shown(texts, "tokenising"), tokenizer, args.length, args.out, args.overwrite)
    said = f"{made.folder}: {made.rows:,} rows of {made.length} ids from {made.documents:,} texts with {made.tokens:,} tokens"
    sys.stdout.write(f"{said}; the last {made.left_over:,} fill no row\n")
    longest = getattr(tokenizer, "model_max_length", None) or args.length
    if args.length > longest:
        sys.stdout.write(f"note: the tokenizer's model_max_length is {longest}\n")
    return 0


def _tokenizer(args: argparse.Namespace) -> int:
    from nxd_jax.training.data import records, tokenizing

    texts = records.documents(args.text, args.column, args.sample_by)
    made = tokenizing.train_tokenizer(_shown(texts, "reading"), args.vocab_size, args.out, args.add_bos, args.overwrite)
    fewer = (
        f" (the text has no more pairs that occur twice than make these; {args.vocab_size:,} were asked for)"
        if len(made) < args.vocab_size
        else ""
    )
    sys.stdout.write(f"{args.out}: a tokenizer with {len(made):,} tokens{fewer}\n")
    return 0


def _megatron(args: argparse.Namespace) -> int:
    from nxd_jax.training.data import records
    from nxd_jax.training.data.megatron import making, tokenizers

    if args.tokenizer is None and args.tokenizer_library is None:
        raise ValueError("--tokenizer FOLDER must be given, or --tokenizer-library with its files")
    section = args.tokenizer or {
        "library": args.tokenizer_library,
        "type": args.tokenizer_type,
        "model": args.tokenizer_model,
        "vocab_file": args.vocab_file,
        "merge_file": args.merge_file,
    }
    tokenizer = tokenizers.load(section)
    for key in args.json_keys:
        texts = _shown(records.documents(args.text, key, args.sample_by), f"tokenising {key}")
        made = making.make(texts, tokenizer, f"{args.output_prefix}_{key}_document", args.append_eod, args.overwrite)
        none = f"; {made.left_out:,} texts have no tokens" if made.left_out else ""
        sys.stdout.write(f"{made.prefix}: {made.documents:,} documents with {made.tokens:,} tokens ({made.dtype}){none}\n")
    return 0


def _check(args: argparse.Namespace) -> int:
    from nxd_jax.training.config import loading
    from nxd_jax.training.data import checking, sets, tokenizing
    from nxd_jax.training.data.megatron import inspecting

    cfg = loading.load(args.config, args.override) if args.config else None
    prefixes = [inspecting.prefix_of(path) for path in args.set]
    if all(prefixes):
        reports = [inspecting.check(str(prefix), _tokenizer_of(args.tokenizer, cfg), cfg, args.config or "") for prefix in prefixes]
        sys.stdout.write("\n\n".join(map(str, reports)) + "\n")
        return 0 if all(report.ok for report in reports) else 1
    tokenizer = tokenizing.load_tokenizer(args.tokenizer, "--tokenizer") if args.tokenizer else None
    report = checking.check(args.set, cfg, args.config or "", None if cfg is None else sets.vocab_size_of(cfg), tokenizer)
    sys.stdout.write(f"{report}\n")
    return 0 if report.ok else 1


def _tokenizer_of(said: str | None, cfg: Any) -> Any:
    """That of --tokenizer, or of the configuration."""
    from nxd_jax.training.config.loading import plain
    from nxd_jax.training.data.megatron import tokenizers

    section = said or (plain(cfg.data.get("tokenizer")) if cfg is not None else None)
    return None if section is None else tokenizers.load(section)


def _show(args: argparse.Namespace) -> int:
    from nxd_jax.training.data import showing, tokenizing
    from nxd_jax.training.data.megatron import inspecting

    prefixes = [inspecting.prefix_of(path) for path in args.set]
    if all(prefixes):
        tokenizer = _tokenizer_of(args.tokenizer, None)
        sys.stdout.write("\n\n".join(inspecting.show(str(prefix), args.row, args.count, tokenizer) for prefix in prefixes) + "\n")
        return 0
    tokenizer = tokenizing.load_tokenizer(args.tokenizer, "--tokenizer") if args.tokenizer else None
    sys.stdout.write(f"{showing.show(args.set, args.row, args.count, tokenizer)}\n")
    return 0


def _shown(texts: Iterable[str], what: str) -> Iterator[str]:
    """With a progress bar on a terminal."""
    bar: Any = None
    if sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(desc=what, unit="B", unit_scale=True)
    for text in texts:
        yield text
        if bar is not None:
            bar.update(len(text))
    if bar is not None:
        bar.close()


_COMMANDS = {"make": _make, "tokenizer": _tokenizer, "megatron": _megatron, "check": _check, "show": _show}

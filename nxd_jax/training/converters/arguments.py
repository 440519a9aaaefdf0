"""The command line of `checkpoint_converter.py`, and what it means: the original's flags, and some besides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from nxd_jax.checkpoint.safetensors_files import MAX_BYTES

DIRECTIONS = ("convert_from_full_state", "convert_to_full_state", "convert_from_xser", "convert_to_xser")
_GIVEN = "given_arguments"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to a parser. What was given is noted, so that a YAML file can say the rest."""
    add = _Adder(parser)
    add("--input_dir", help="a folder or torch file of Hugging Face; of NxD Training a checkpoint's folder, or its model/")
    add("--hf_model_name", help="in place of --input_dir: a model of the Hugging Face Hub, or one that was downloaded before")
    add("--output_dir", required=True, help="the folder to write; for Hugging Face a name that ends with .pt makes one torch file")
    add("--config", help="the model's config.json (default: the one beside the weights)")
    add("--nxdt_yaml_config", help="a YAML file of NxD Training: sizes, ranks and pipeline_cuts, where no flag says them")
    add(
        "--hw_backend",
        choices=["trn1", "trn2"],
        help="in which order ranks hold copies of K/V heads (default: the YAML file's machine, else trn1)",
    )
    add("--model_style", choices=["hf", "megatron"], default="hf", help="which of NxD Training's models (default: %(default)s)")
    add("--model_key", default="model", help="the key of the state dict in a torch file (default: %(default)s)")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        add(f"--{name}_size", type=int, default=1, help=f"{what}-parallel ranks (default: 1; of files: as they are)")
    add("--virtual_pp_size", type=int, default=1, help="stages on each pipeline rank (default: 1)")
    add("--kv_size_multiplier", type=int, default=1, help="ranks that hold each K/V head (default: 1; of files: as they are)")
    add("--n_layers", type=int, default=0, help="layers of the model, to be compared with the configuration (default: 0, not compared)")
    for name, what in (
        ("qkv_linear", "the model has a GQA layer for q, k and v"),
        ("fuse_qkv", "q, k and v are one weight"),
        ("coalesce_qkv", "the same, without qkv_linear and with as many K/V heads as heads"),
        ("load_xser", "accepted: what files are is seen"),
        ("save_xser", "write a file for each tensor"),
    ):
        add(f"--{name}", type=truth, nargs="?", const=True, default=False, metavar="True|False", help=f"{what} (default: False)")
    for name, what in zip(
        DIRECTIONS,
        ("Hugging Face to NxD Training", "NxD Training to Hugging Face", "xser to plain files", "plain files to xser"),
        strict=True,
    ):
        add(f"--{name}", action="store_true", help=what)
    add(
        "--verify",
        action="store_true",
        help="compare the logits of both sides afterwards, or of what is there (with --force: convert again)",
    )
    add("--max_shard_gb", type=float, default=MAX_BYTES / 1e9, help="gigabytes in a .safetensors file (default: %(default)g)")
    add("--force", action="store_true", help="replace what is there")
    add("--trust", action="store_true", help="read torch files that hold more than tensors and plain data; this runs code in them")
    return parser


def truth(text: str) -> bool:
    """True or False of a word. (The original's `type=bool` takes "False" for True.) Raises ArgumentTypeError for other words."""
    found = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"True or False, got {text!r}")
    return found


def direction(args: Any) -> str:
    """Which conversion is asked for. Raises ValueError unless it is one."""
    asked = [name for name in DIRECTIONS if getattr(args, name, False)]
    if len(asked) != 1:
        said = ", ".join(f"--{name}" for name in asked) or "none"
        raise ValueError(f"exactly one of {', '.join(f'--{name}' for name in DIRECTIONS)} must be given, got {said}")
    return asked[0]


def given(args: Any, name: str) -> bool:
    """Whether a flag was on the command line; of a namespace that no parser made, whether it is there at all."""
    noted = getattr(args, _GIVEN, None)
    return hasattr(args, name) if noted is None else name in noted


class _Adder:
    """`add_argument` whose flags are noted when they are given."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._parser = parser
        parser.set_defaults(**{_GIVEN: frozenset()})

    def __call__(self, flag: str, **options: Any) -> None:
        switch = options.pop("action", None) == "store_true"
        if switch:
            options |= {"nargs": 0, "const": True, "default": False}
        self._parser.add_argument(flag, action=_Noted, **options)


class _Noted(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        setattr(namespace, _GIVEN, getattr(namespace, _GIVEN, frozenset()) | {self.dest})


def parser(prog: str | None = None, description: str | None = None) -> argparse.ArgumentParser:
    """The command line by itself."""
    return add_arguments(argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parsed words."""
    return parser().parse_args(words)

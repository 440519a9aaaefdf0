"""`nxdt-convert`: checkpoints of Hugging Face into those of NxD Training, and back.

    nxdt-convert --convert_from_full_state --input_dir Llama-3-8B --output_dir nxdt --tp_size 8 --pp_size 4 --qkv_linear True
    nxdt-convert --convert_from_full_state --input_dir Llama-3-8B --output_dir nxdt --nxdt_yaml_config conf/hf_llama3_8B_config.yaml --verify
    nxdt-convert --convert_to_full_state --input_dir run/checkpoints/NAME.ckpt --output_dir llama --config Llama-3-8B/config.json
    nxdt-convert --convert_to_xser --input_dir nxdt/model --output_dir xser

The flags are those of the original's checkpoint_converter.py. Training begins with the weights by exp_manager.resume_from_checkpoint: nxdt and
model.weight_init_only: True. Status: 0; 1 if --verify finds a difference; 2 if nothing could be converted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nxd_jax import interpreter
from nxd_jax.training.converters import arguments, converting, logits, merging
from nxd_jax.training.converters.base import CheckpointConverterBase

DIFFERENT, FAILED = 1, 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    words = __doc__ or ""
    found = arguments.parser("nxdt-convert", words.split("\n\n")[0].replace("`", ""))
    found.epilog, found.formatter_class = words.split("\n\n", 1)[1], argparse.RawDescriptionHelpFormatter
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The `nxdt-convert` command; returns its status."""
    if argv is None:
        from nxd_jax.ckpt import _own_process

        interpreter.use("nxdt-convert", "nxd_jax.training.converters.command")
        _own_process()
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return run(CheckpointConverterBase(), parser().parse_args(argv))


def run(converter: CheckpointConverterBase, args: Any) -> int:
    """Convert and say so; with --verify compare both sides. Returns the status."""
    try:
        if args.verify:
            _check_verify(args)
        sys.stdout.write(f"{converter.run(args)}\n")
        return _verify(args) if args.verify else 0
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("hydra", "omegaconf", "transformers", "huggingface_hub"):
            raise
        sys.stderr.write(f"nxdt-convert: {error.name} is not installed: pip install 'nxd-jax[nxdt]'\n")
    except (OSError, ValueError, RuntimeError) as error:  # NotImplementedError and DamagedCheckpointError among them
        sys.stderr.write(f"nxdt-convert: {error}\n")
    return FAILED


def _check_verify(args: Any) -> None:
    """Raise ValueError where nothing could be compared."""
    if arguments.direction(args) not in ("convert_from_full_state", "convert_to_full_state"):
        raise ValueError(
            "--verify compares Hugging Face with NxD Training: it goes with --convert_from_full_state or --convert_to_full_state"
        )


def _verify(args: Any) -> int:
    into = args.convert_from_full_state
    hub = converting.source_of(args).path if into else Path(args.output_dir)
    files = Path(args.output_dir) if into else Path(args.input_dir)
    words = {name: getattr(args, name) for name in ("config", "nxdt_yaml_config", "hw_backend", "trust")}
    if arguments.given(args, "model_style"):
        words["model_style"] = args.model_style
    if into and not words["config"] and not words["nxdt_yaml_config"]:
        words["config"] = str((hub if hub.is_dir() else hub.parent) / "config.json")
    made = merging.merged(argparse.Namespace(input_dir=str(files), **words))
    difference, largest = logits.verify(hub, files, made.setting.config, made.setting.layout, args.model_key)
    same = logits.equal(difference, largest)
    sys.stdout.write(
        f"logits of {logits.ROWS} x {logits.LENGTH} random tokens differ by at most {difference:.3g} (the largest is {largest:.3g}): "
        f"{'the same' if same else 'DIFFERENT'}\n"
    )
    return 0 if same else DIFFERENT


if __name__ == "__main__":
    sys.exit(main())

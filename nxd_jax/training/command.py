"""`nxdt-train`: train what a YAML file of NxD Training describes.

    nxdt-train conf/hf_llama3_8B_config.yaml                          all ranks in this process, on an emulated machine
    nxdt-train conf/hf_llama3_8B_config.yaml trainer.max_steps=20 data.global_batch_size=64
    nxdt-train --config-path conf --config-name hf_llama3_8B_config trainer.devices=8
    nxdt-train --check conf/hf_llama3_8B_config.yaml                  say what is wrong, what it costs, and train nothing
    nxdt-train --plan conf/hf_llama3_8B_config.yaml                   layouts that fit, best first
    nxdt-train --abstract conf/hf_llama3_8B_config.yaml               two steps on shapes alone: programs, collectives, memory of a core
    nxdt-train --example                                              a first run without anything at hand
    torchrun --nproc_per_node 8 --no-python nxdt-train conf.yaml      one process for each rank

Words with "=" change keys, by Hydra's rules: `key=value`, `+new.key=value`, `~key`. Modules of yours are looked for where Python looks, then in the working
folder and beside the file.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nxd_jax import interpreter
from nxd_jax.training import completion, own_code

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONF_DIR = "conf"
"""Where a configuration is looked for by its name, if no path is given."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="nxdt-train",
        description=(__doc__ or "").split("\n\n")[0].replace("`", ""),
        epilog=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("config", nargs="?", help="a YAML file, or the name of one in conf/")
    found.add_argument("overrides", nargs="*", metavar="key=value", help="keys to change")
    found.add_argument("--config-path", "--config-dir", "-cp", "-cd", help="the folder of --config-name (default: conf)")
    found.add_argument("--config-name", "-cn", help="a file in --config-path, with or without .yaml")
    found.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE", help="import this first: it registers classes of yours"
    )
    found.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    what = found.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="report errors, memory, time and learning rates; train nothing")
    what.add_argument("--plan", action="store_true", help="print layouts that fit the machine, best first; train nothing")
    what.add_argument(
        "--abstract",
        action="store_true",
        help="run two steps on shapes alone: programs, collectives and memory of every core; train nothing",
    )
    what.add_argument("--show", action="store_true", help="print the configuration with overrides and interpolations in it; train nothing")
    what.add_argument(
        "--example", action="store_true", help="write a small configuration, tokenizer and data, and train for about a minute"
    )
    what.add_argument("--cfg", "-c", choices=["job"], help="print the configuration with overrides in it, as Hydra does; train nothing")
    found.add_argument("--resolve", action="store_true", help="with --cfg: also fill interpolations in")
    found.add_argument("--out", help="with --example: the folder to write to (default: nxdt_example)")
    found.add_argument(
        "--completion", choices=completion.SHELLS, help='print what a shell needs to complete keys: eval "$(nxdt-train --completion bash)"'
    )
    found.add_argument("--plot", help="with --check: write a picture of the learning rates to this file")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """The `nxdt-train` command."""
    if argv is None:
        interpreter.use("nxdt-train", "nxd_jax.training")
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--complete"]:
        options = [option for action in parser()._actions if action.help != argparse.SUPPRESS for option in action.option_strings]
        sys.stdout.write("".join(f"{found}\n" for found in completion.complete(" ".join(words[1:]), options)))
        return
    args = parser().parse_intermixed_args(argv)
    try:
        raise SystemExit(_run(args))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("hydra", "omegaconf", "datasets", "pytorch_lightning", "lightning", "transformers"):
            raise
        raise SystemExit(f"nxdt-train: {error.name} is not installed: pip install 'nxd-jax[nxdt]'") from None


def _run(args: argparse.Namespace) -> int:
    if args.completion:
        sys.stdout.write(completion.script(args.completion))
        return 0
    if args.example:
        from nxd_jax.training.example import run_example

        return int(run_example(Path(args.out or "nxdt_example")) or 0)
    from nxd_jax.training.config import loading

    if args.multirun:
        raise SystemExit(f"nxdt-train: --multirun is not there: {loading.SWEEP}")
    file, overrides = _file_and_overrides(args)
    own_code.find_beside(file)
    try:
        if args.check:
            own_code.load(args.imports)
            return _check(file, overrides, args.plot)
        cfg = loading.load(file, overrides)
    except loading.ConfigError as error:
        raise SystemExit(f"nxdt-train: {error}") from None
    if args.show or args.cfg:
        from omegaconf import OmegaConf

        sys.stdout.write(OmegaConf.to_yaml(cfg, resolve=args.show or args.resolve))
        return 0
    if not (args.plan or args.abstract):
        return _train(cfg, file, overrides, args.imports)
    own_code.load(args.imports)
    if args.plan:
        from nxd_jax.training.config.plans import plan

        try:
            sys.stdout.write(f"{plan(cfg)}\n")
        except ValueError as error:
            raise SystemExit(f"nxdt-train --plan: {error}") from None
        return 0
    from nxd_jax.training.abstract_step import abstract_step

    sys.stdout.write(f"{abstract_step(cfg)}\n")
    return 0


def _train(cfg: DictConfig, file: Path, overrides: list[str], imports: Sequence[str]) -> int:
    from nxd_jax.training import launching

    wrong: ValueError | None = None
    try:
        line = launching.prepare(cfg)  # before what is imported below asks how many ranks there are
    except ValueError as error:
        wrong = error
    own_code.load(imports)
    from nxd_jax.training import environment
    from nxd_jax.training.config.checking import check

    report = check(cfg, file, overrides)
    if not report.ok:
        sys.stderr.write(f"{report.problems()}\n")
        return 2
    if wrong is not None:
        raise SystemExit(f"nxdt-train: {wrong}")
    environment.process_config(cfg)
    if int(os.environ.get("RANK") or 0) == 0:
        sys.stderr.write(f"{line}\n")
        _say_warnings()
    from pytorch_lightning.utilities.exceptions import SIGTERMException

    from nxd_jax.training.workflow import train

    try:
        train(cfg)
    except SIGTERMException:
        sys.stderr.write("nxdt-train: SIGTERM: the training is saved, and the same command goes on\n")
        return 128 + signal.SIGTERM
    return 0


def _say_warnings() -> None:
    """Let the log's lines be seen."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("nxd_jax").setLevel(logging.INFO)


def _check(file: Path, overrides: list[str], plot: str | None) -> int:
    from nxd_jax.training.config.checking import check_file

    report = check_file(file, overrides)
    sys.stdout.write(f"{report}\n")
    if plot:
        try:
            report.plot(plot)
        except (ImportError, ValueError) as error:
            raise SystemExit(f"nxdt-train --plot: {error}") from None
    return 0 if report.ok else 2


def _file_and_overrides(args: argparse.Namespace) -> tuple[Path, list[str]]:
    """The file that is meant, and the words that change it."""
    words = [w for w in (args.config, *args.overrides) if w is not None]
    if args.config_name:
        name = args.config_name
        folder = Path(args.config_path or CONF_DIR)
        return folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"), words
    if not words or "=" in words[0] or words[0].startswith("~"):
        raise SystemExit(
            "nxdt-train: say which configuration: nxdt-train CONFIG.yaml [key=value ...] (nxdt-train --help, nxdt-train --example)"
        )
    said, rest = words[0], words[1:]
    for candidate in (
        Path(said),
        Path(f"{said}.yaml"),
        Path(args.config_path or CONF_DIR) / said,
        Path(args.config_path or CONF_DIR) / f"{said}.yaml",
    ):
        if candidate.is_file():
            return candidate, rest
    return Path(said), rest

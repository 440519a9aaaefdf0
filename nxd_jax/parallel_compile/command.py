"""`neuron_parallel_compile`: run a script so that it only compiles, and keep what it compiled for the real run.

    neuron_parallel_compile torchrun --nproc_per_node=2 train.py --steps 10
    neuron_parallel_compile nxd-run --instance trn1.32xlarge train.py --steps 10
    neuron_parallel_compile train.py --steps 10

The script runs with NEURON_EXTRACT_GRAPHS_ONLY=1: every graph is compiled, none is executed, all results are zero. A short run that meets every graph is
enough. Compiled programs go to the folder that NEURON_COMPILE_CACHE_URL (or NEURON_CC_FLAGS --cache_dir) names; a run that has the same setting
finds them there and compiles nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from nxd_jax import interpreter
from nxd_jax.parallel_compile import cache
from nxd_jax.parallel_compile.graphs import Graphs
from nxd_jax.parallel_compile.progress import Progress, say, summary, write_report

COMMANDS = ("compile", "collect", "clear-locks", "clean")
IGNORE_ERRORS = "NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE"
DUMP = "NEURON_PARALLEL_COMPILE_DUMP_RESULTS"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="neuron_parallel_compile", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    found.add_argument(
        "--command",
        choices=COMMANDS,
        default="compile",
        help="compile (default): run and compile; collect: run and only say which graphs there are; clear-locks: remove locks that a killed process left "
        "in the cache; clean: remove all compiled programs from it",
    )
    found.add_argument("--dump-results", action="store_true", help=f"write the results as JSON to the current folder, as {DUMP}=1 does")
    found.add_argument(
        "run", nargs=argparse.REMAINDER, help="the command of the run: torchrun, nxd-run, python3 or a script, and its arguments"
    )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """The `neuron_parallel_compile` command; exits with the script's status, or 1 if a graph could not be compiled."""
    interpreter.use("neuron_parallel_compile", "nxd_jax.parallel_compile")
    args = parser().parse_args(argv)
    place = cache.folder(os.environ)
    if args.command == "clear-locks":
        say(f"removed {cache.clear_locks(place)} locks from {place}")
    elif args.command == "clean":
        say(f"removed {cache.clean(place)} files of compiled programs from {place}")
    else:
        dump, ignore = args.dump_results or _is_on(DUMP), _is_on(IGNORE_ERRORS)
        raise SystemExit(_run(args.command, launch(args.run), place, dump, ignore))


def launch(run: Sequence[str]) -> list[str]:
    """The command to start. A Python file is run by this Python; a program is looked up on the path. Raises SystemExit, saying why, for what cannot be run."""
    run = run[1:] if run[:1] == ["--"] else run
    if not run:
        raise SystemExit(
            "neuron_parallel_compile: say what to run: neuron_parallel_compile [--command compile] torchrun --nproc_per_node=2 train.py"
        )
    first, *rest = run
    if first.endswith(".py"):
        if not os.path.exists(first):
            raise SystemExit(f"neuron_parallel_compile: no such script: {first}")
        return [sys.executable, first, *rest]
    beside = shutil.which(first, path=os.path.dirname(sys.executable))  # torchrun and python3 of this environment, whatever the path says
    found = beside or shutil.which(first)
    if found is None:
        raise SystemExit(f"neuron_parallel_compile: no such command: {first}; give torchrun, nxd-run, python3 or a script that ends in .py")
    return [found, *rest]


def environment(command: str, place: Path, folder: str) -> dict[str, str]:
    """The variables of the run."""
    from torch_bridge.telemetry import compile_log

    found = os.environ | {"NEURON_EXTRACT_GRAPHS_ONLY": "1", compile_log.VARIABLE: f"{command}:{folder}"}
    if not cache.is_chosen(os.environ):
        found["NEURON_COMPILE_CACHE_URL"] = str(place)
    return found


def _run(command: str, run: list[str], place: Path, dump: bool, ignore: bool) -> int:
    """Run, watch, say what came of it; the exit status."""
    started, clock = time.time(), time.monotonic()
    say(f"{'compiling' if command == 'compile' else 'collecting'} the graphs of: {' '.join(run)}")
    with tempfile.TemporaryDirectory(prefix="neuron_parallel_compile_") as folder:
        graphs = Graphs(Path(folder))
        status = _watched(run, environment(command, place, folder), graphs)
    seconds = time.monotonic() - clock
    sys.stderr.write(summary(graphs, seconds) + "\n")
    if dump:
        say(f"wrote {write_report(graphs, started, seconds, Path.cwd())}")
    return _status(status, graphs, place, ignore)


def _watched(run: list[str], variables: dict[str, str], graphs: Graphs) -> int:
    """Start the run and show what it tells until it ends; its exit status. Ctrl-C goes to it as well, and is waited for."""
    progress = Progress(graphs)
    with subprocess.Popen(run, env=variables) as process:
        try:
            while process.poll() is None:
                progress.show()
                time.sleep(0.1)
        except KeyboardInterrupt:
            process.wait()
        finally:
            progress.stop()
    return process.returncode


def _status(status: int, graphs: Graphs, place: Path, ignore: bool) -> int:
    """What to exit with, and the last line."""
    if status:
        code = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        if not ignore:
            say(
                f"the script ended with {code}; the graphs that it met before are compiled. {IGNORE_ERRORS}=1 takes such a run for a success"
            )
            return status if status > 0 else 128 - status
        say(f"the script ended with {code}, which does not count ({IGNORE_ERRORS}=1)")
    if graphs.count("failed"):
        return 1
    if not graphs.count():
        say("no graph was found: does the script use device 'xla', and does it call torch_xla.sync() (or xm.mark_step())?")
    elif not cache.is_chosen(os.environ):
        say(f"compiled programs are in {place}; set NEURON_COMPILE_CACHE_URL={place} for the runs that are to use them")
    return 0


def _is_on(name: str) -> bool:
    """Whether a variable is set to 1 or true. Raises SystemExit, saying what is allowed, for what is neither on nor off."""
    from torch_bridge.config.variables import VARIABLES

    try:
        return bool(VARIABLES[name].now())
    except ValueError as error:
        raise SystemExit(f"neuron_parallel_compile: {error}") from None

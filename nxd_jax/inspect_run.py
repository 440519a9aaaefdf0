"""`nxd-inspect`: run a script for a few steps, or on shapes alone, and write a report of what it does.

    nxd-inspect train.py --epochs 3                                  # a few steps, then report.html
    nxd-inspect --instance trn1.32xlarge --abstract train.py         # 32 cores, without computing anything
    nxd-inspect --fail-if-over-hbm --max-recompiles 2 train.py       # in continuous integration

The report is one HTML file that needs no network: memory of a core against its HBM, collectives and the links they use, operations by module, an estimate for
the machine, compilations and why they happened, modules that are played from recordings, the time of each module, the graph, HLO.

Exit status: that of the script if it failed; 3 if a check (--fail-if-over-hbm, --max-recompiles) failed; else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any

from nxd_jax import interpreter
from nxd_jax import run as running
from nxd_jax.topology import INSTANCES

CHECK_FAILED = 3


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about, _, examples = (__doc__ or "").partition("\n\n")
    found = argparse.ArgumentParser(
        prog="nxd-inspect", description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    found.add_argument("-o", "--out", type=pathlib.Path, default=pathlib.Path("report.html"), help="the report (default report.html)")
    found.add_argument("--json", type=pathlib.Path, help="write the numbers to this file too")
    found.add_argument(
        "--steps",
        type=_count,
        help="end the script when its training step has run this often (default 4, or 2 with --abstract); 0: at its end",
    )
    found.add_argument("--abstract", action="store_true", help="shapes alone: nothing is computed, so any number of cores will do")
    found.add_argument("--no-profile", action="store_true", help="do not profile the last two steps")
    found.add_argument("--trace", type=pathlib.Path, metavar="DIR", help="keep the profile's trace there, for Perfetto and XProf")
    found.add_argument("--dump-hlo", type=pathlib.Path, metavar="DIR", help="write the graph and HLO of every program there")
    found.add_argument("--fail-if-over-hbm", action="store_true", help=f"exit with {CHECK_FAILED} if a core's memory is too small")
    found.add_argument(
        "--max-recompiles", type=_count, metavar="N", help=f"exit with {CHECK_FAILED} if more programs than that were compiled again"
    )
    found.add_argument("--instance", help=f"the machine to emulate: {', '.join(INSTANCES)}")
    found.add_argument("--nnodes", default="1", help="machines (default 1)")
    found.add_argument("--nproc_per_node", "--nproc-per-node", type=int, help="ranks per machine (default: its cores)")
    found.add_argument("--lnc", type=int, choices=[1, 2], help="physical cores per logical core on Trn2")
    found.add_argument("-m", "--module", action="store_true", help="the script is a module name, as with python -m")
    found.add_argument("script", help="the training script")
    found.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    found.set_defaults(master_addr="127.0.0.1", master_port="29500")
    return found


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def main(argv: Sequence[str] | None = None) -> None:
    """The `nxd-inspect` command."""
    interpreter.use("nxd-inspect", "nxd_jax.inspect_run")
    args = parser().parse_args(argv)
    if (misplaced := running.after_the_script(parser(), args)) is not None:
        _say(misplaced)
    if not args.module and not os.path.exists(args.script):
        raise SystemExit(f"nxd-inspect: no such script: {args.script}")
    if args.out.is_dir():
        raise SystemExit(f"nxd-inspect: --out {args.out} is a folder; give the name of a file in it")
    if args.instance or args.nproc_per_node:
        variables, line = running.environment(args)
        os.environ.update(variables)
        _say(line.removeprefix("nxd-run: "))
    raise SystemExit(_inspect(args))


def _inspect(args: argparse.Namespace) -> int:
    from nxd_jax.inspect.watching import Watch

    runs = args.steps if args.steps is not None else 2 if args.abstract else 4
    watch = Watch(runs, 0 if args.abstract or args.no_profile else 2, args.trace)
    with contextlib.ExitStack() as block:
        if args.abstract:
            from nxd_jax.abstract import abstract_run

            block.enter_context(abstract_run(values="zeros"))
        with watch:
            status = _run(args)
            if watch.inspection is None:
                watch.look()
        if watch.inspection is None:
            _say(
                "the script ran no program on device 'xla'"
                + ("" if status else ": does it use that device, and call torch_xla.sync() (or xm.mark_step())?")
            )
            return status or 1
        return _report(args, watch, status)


def _run(args: argparse.Namespace) -> int:
    """Run the script until it ends or is ended; its exit status."""
    from nxd_jax.inspect.watching import Stopped

    try:
        with _as_main(args) as (code, names):
            exec(code, names)  # that is what the command is for
    except Stopped:
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException as error:  # also Ctrl-C: what was seen so far is worth a report
        traceback.print_exception(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


@contextlib.contextmanager
def _as_main(args: argparse.Namespace) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The script's code, and the names of a `__main__` that stays when it has run, so that its model can still be looked at."""
    main_module = types.ModuleType("__main__")
    names = vars(main_module)
    if args.module:
        import importlib.util

        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(args.script)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{args.script}.__main__")
        if spec is None or spec.origin is None:
            raise SystemExit(f"nxd-inspect: no module is called {args.script}")
        path = spec.origin
        names.update(__spec__=spec, __package__=spec.parent)
    else:
        path = os.path.abspath(args.script)
        sys.path.insert(0, os.path.dirname(path))
    names["__file__"] = path
    sys.argv = [path if args.module else args.script, *args.args]
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main_module
    try:
        with open(path, "rb") as file:
            yield compile(file.read(), path, "exec"), names
    finally:
        sys.modules["__main__"] = before


# -- what came of it -----------------------------------------------------------------------------------


def _report(args: argparse.Namespace, watch: Any, status: int) -> int:
    from nxd_jax.inspect.replay import summary
    from nxd_jax.inspect.report import Report

    found = watch.inspection
    failures = _failures(args, found)
    if status:
        failures.insert(0, f"the script ended with exit status {status}")
    facts = [
        ("script", " ".join([args.script, *args.args])),
        ("machine", repr(found.topology)),
        ("run", f"{'on shapes alone' if args.abstract else 'for real'}; the training step ran {found.runs} times"),
    ]
    page = Report(
        found, f"nxd-inspect {os.path.basename(args.script)}", facts, _profile(watch), failures, watch.modules, watch.pipeline
    ).save(args.out)
    sys.stderr.write("\n")  # after a progress bar that was cut off
    sys.stdout.write(f"{found}\n{summary(watch.modules)}")
    sys.stdout.flush()
    _say(f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB)")
    if args.json:
        step = watch.pipeline
        from nxd_jax.inspect.recompiles import recompiles
        from nxd_jax.inspect.statistics import statistics
        from nxd_jax.inspect.tables import plain, write

        more = {"recompiles": plain(recompiles()), "statistics": plain(statistics()), "replay": plain(watch.modules), "failures": failures}
        more |= {"pipeline": step.data()} if step is not None and step.done else {}
        _say(f"wrote {write(args.json, json.dumps(found.data() | more, indent=1))}")
    if args.dump_hlo:
        _say(f"wrote {_dumped(found, args.dump_hlo)} programs to {args.dump_hlo}")
    for failure in failures:
        _say(failure)
    return status or (CHECK_FAILED if failures else 0)


def _profile(watch: Any) -> Any:
    """The profile as it will be when this process has ended."""
    found = watch.profile
    if found is None or found.kept or not found.trace:
        return found
    return dataclasses.replace(
        found, trace="", perfetto="", notes=(*found.notes, "nxd-inspect --trace DIR keeps the trace, for Perfetto and XProf")
    )


def _failures(args: argparse.Namespace, found: Any) -> list[str]:
    """The checks that failed, in words."""
    from nxd_jax.inspect import units
    from nxd_jax.inspect.recompiles import recompiles

    failures = []
    if args.fail_if_over_hbm and not found.memory.fits:
        failures.append(f"--fail-if-over-hbm: {found.memory.verdict}")
    again = recompiles(again_only=True)
    if args.max_recompiles is not None and len(again) > args.max_recompiles:
        reasons = "; ".join(f"program {c.number}: {c.reason}" for c in again[-3:])
        failures.append(f"--max-recompiles {args.max_recompiles}: {units.many(len(again), 'program')} compiled again ({reasons})")
    return failures


def _dumped(found: Any, folder: pathlib.Path) -> int:
    """Write every program that is still there, the one that was looked at first; how many."""
    from torch_bridge.compiler import dump
    from torch_bridge.runtime import session

    found.dump(folder)
    others = {p for trace in session.current().traces.values() for programs in trace.programs.values() for p in programs if p.begun}
    others -= {found.program}
    for program in others:
        dump.dump(program, folder)
    return 1 + len(others)


def _say(line: str) -> None:
    sys.stderr.write(f"nxd-inspect: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()

"""`python -m tests.opinfo`: print how every entry of torch's operator, module and optimizer databases runs on device xla, then the counts."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.opinfo.table import Row
    from tests.opinfo.workers import Case

os.environ.setdefault("JAX_PLATFORMS", "cpu")

_CASES_BETWEEN_CLEANINGS = 60


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__)
    parser.add_argument("--databases", default="op,module,optim")
    parser.add_argument(
        "--ops", default="", help="names of entries, comma-separated, as the table prints them, or without the variant (default: all)"
    )
    parser.add_argument("--cases", default="float32,int64,bfloat16,errors", help="for operators: dtypes, and the database's error inputs")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a case may take before its process is killed")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _serve() -> None:
    """Be one of the processes that run cases."""
    from tests.opinfo import databases, workers
    from tests.opinfo.compare import attempt, forget_caches
    from tests.opinfo.table import Row

    found = {(e.database, e.name): e for e in databases.entries(["op", "module", "optim"])}
    done = 0

    def answer(case: Case) -> Row:
        nonlocal done
        done += 1
        if done % _CASES_BETWEEN_CLEANINGS == 0:
            forget_caches()
        row, error = attempt(found[case[:2]].cases[case[2]])
        return row if error is None else Row(*case, "fail", " ".join(f"the harness raised {type(error).__name__}: {error}".split()))

    workers.serve(answer)


def _print_table(args: argparse.Namespace) -> int:
    from tests.opinfo import databases, workers
    from tests.opinfo.table import summary

    names = [n for n in args.ops.split(",") if n]
    chosen = databases.entries(args.databases.split(","), names, args.cases.split(","))
    todo = [(e.database, e.name, case) for e in chosen for case in e.cases]
    done: list[Row] = []
    for row in workers.run(todo, args.jobs, args.timeout, [sys.executable, "-m", "tests.opinfo", "--worker"]):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        done.append(row)
    sys.stdout.write(summary(done) + "\n")
    return int(any(row.status == "fail" for row in done))


def main() -> int:
    """The exit status: 1 if anything failed."""
    args = _arguments()
    if args.worker:
        _serve()
        return 0
    return _print_table(args)


if __name__ == "__main__":
    sys.exit(main())

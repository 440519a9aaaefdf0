"""`python -m tests.opinfo`: print how every entry of torch's operator, module and optimizer databases runs on device xla, then the counts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.opinfo.databases import Entry
    from tests.opinfo.table import Row

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__)
    parser.add_argument("--databases", default="op,module,optim")
    parser.add_argument(
        "--ops", default="", help="names of entries, comma-separated, as the table prints them, or without the variant (default: all)"
    )
    parser.add_argument("--dtypes", default="float32,int64", help="for operators")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--part", default="1/1", help="k/n: every n-th entry from the k-th")
    return parser.parse_args()


def _run_part(args: argparse.Namespace) -> int:
    """Run this process's entries, print their rows as they are made, then the counts; 1 if anything failed."""
    from tests.opinfo.databases import entries
    from tests.opinfo.table import summary

    chosen = entries(args.databases.split(","), [n for n in args.ops.split(",") if n], args.dtypes.split(","))
    first, step = map(int, args.part.split("/"))
    done: list[Row] = []
    for row in _rows(chosen[first - 1 :: step]):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        done.append(row)
    sys.stdout.write(summary(done) + "\n")
    return int(any(row.status == "fail" for row in done))


def _rows(chosen: list[Entry]) -> Iterator[Row]:
    from tests.opinfo.compare import forget_caches

    for i, entry in enumerate(chosen, 1):
        for run in entry.runs:
            yield run()
        if i % 40 == 0:
            forget_caches()


def _run_jobs(args: argparse.Namespace) -> int:
    """Spread the entries over processes, print their rows in one table; a process that dies is a failure."""
    from tests.opinfo.table import Row, summary

    given = ["--databases", args.databases, "--ops", args.ops, "--dtypes", args.dtypes]
    commands = [[sys.executable, "-m", "tests.opinfo", *given, "--part", f"{k}/{args.jobs}"] for k in range(1, args.jobs + 1)]
    started = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
    done: list[Row] = []
    for k, process in enumerate(started, 1):
        out, _ = process.communicate()
        done += [row for line in out.splitlines() if (row := Row.parse(line)) is not None]
        if process.returncode not in (0, 1):
            last = done[-1].name if done else "its start"
            done.append(Row("op", f"part {k}/{args.jobs}", "", "fail", f"the process died with {process.returncode} after {last}"))
    sys.stdout.write("\n".join(map(str, done)) + "\n" + summary(done) + "\n")
    return int(any(row.status == "fail" for row in done))


def main() -> int:
    """The exit status: 1 if anything failed."""
    args = _arguments()
    return _run_jobs(args) if args.jobs > 1 else _run_part(args)


if __name__ == "__main__":
    sys.exit(main())

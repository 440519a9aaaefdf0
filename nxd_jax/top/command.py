"""The `nxd-top` command.

nxd-top                    live; q or Ctrl-C leaves
nxd-top --once             once, also into a pipe
nxd-top --json             what the processes published, as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from nxd_jax.top import records, view
from nxd_jax.top.jobs import Watch

LEAST_INTERVAL = 0.1
_FOOT = 1
_HEAD = 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="nxd-top",
        description="What the emulated NeuronCores of the jobs on this machine do: activity, memory, steps per second, the last graph.",
        epilog="Keys: q or Ctrl-C leaves. A job publishes this by itself unless NXD_JAX_TOP=0 is set for it.",
        allow_abbrev=False,
    )
    found.add_argument("--once", action="store_true", help="print once and leave (also where the output is no terminal)")
    found.add_argument("-j", "--json", action="store_true", help="print the records of the processes as JSON and leave")
    found.add_argument("--interval", type=_interval, default=1.0, metavar="SECONDS", help="between two refreshes (default 1)")
    found.add_argument(
        "--dir", metavar="FOLDER", help="of the records (default: NXD_JAX_TOP_DIR, else where processes of this user put them)"
    )
    return found


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_INTERVAL <= seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds, {LEAST_INTERVAL} or more")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args = parser().parse_args(arguments)
    if args.dir and not Path(args.dir).expanduser().is_dir():
        sys.stderr.write(f"nxd-top: there is no folder {args.dir} (--dir; NXD_JAX_TOP_DIR of a job says where it publishes)\n")
        return 2
    if args.json:
        sys.stdout.write(as_json(records.folders(args.dir)) + "\n")
        return 0
    console = Console(highlight=False)
    watch = Watch(lambda: records.folders(args.dir))
    if args.once or not console.is_terminal or console.is_dumb_terminal:
        console.print(view.screen(watch.look(), console.width, None, console.options.ascii_only))
        return 0
    live(console, watch, args.interval)
    return 0


def as_json(places: Sequence[Path]) -> str:
    """All records as they were published, each with `file`, its path, and `life`: whether its process is live, stopped, dead or far (another machine's)."""
    found: list[dict[str, Any]] = []
    known = dict(records.read(places))
    for file, data in records.published(places):
        if file in known:
            found.append({**data, "file": str(file), "life": records.life(known[file])})
    return json.dumps(found, indent=1)


def live(console: Console, watch: Watch, interval: float) -> None:
    """Show the jobs until q, Ctrl-C or SIGTERM; the terminal is then as it was."""
    with _Terminated(), Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as shown:
        try:
            while True:
                shown.update(_page(console, watch, interval), refresh=True)
                if keyboard.wait(interval) in ("q", "Q"):
                    return
        except (KeyboardInterrupt, OSError):  # a terminal that is gone ends it too
            return


def _page(console: Console, watch: Watch, interval: float) -> Group:
    jobs, now = watch.look(), time.time()
    width, height = console.size
    body = view.screen(jobs, width, max(1, height - _HEAD - _FOOT), console.options.ascii_only, now)
    return Group(view.heading(jobs, now), body, Text(f"q leaves, refreshed every {interval:g} s", style="dim", no_wrap=True))


class Keyboard:
    """Keys one by one, without Enter, while entered. Without a terminal on stdin, none."""

    def __enter__(self) -> Keyboard:
        self._saved: Any = None
        if sys.stdin is not None and sys.stdin.isatty():
            import termios
            import tty

            self._saved = termios.tcgetattr(sys.stdin.fileno())
            tty.setcbreak(sys.stdin.fileno())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._saved is not None:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._saved)

    def wait(self, seconds: float) -> str:
        """The next key within these seconds, else ''. OSError when the terminal is gone."""
        if self._saved is None:
            time.sleep(seconds)
            return ""
        if not select.select([sys.stdin.fileno()], [], [], seconds)[0]:
            return ""
        key = os.read(sys.stdin.fileno(), 1)
        if not key:
            raise OSError("the terminal was closed")
        return key.decode(errors="replace")


class _Terminated:
    """While entered, SIGTERM leaves as an exit does, so that the terminal is restored."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, _leave)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGTERM, self._before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

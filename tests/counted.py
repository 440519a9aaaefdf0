"""`python tests/counted.py SCRIPT ...` (or `-m MODULE ...`): run it as Python does, then write one more line, the counters of compilation as JSON."""

from __future__ import annotations

import json
import os
import runpy
import sys

NAMES = ("UncachedCompile", "PersistentCacheHit", "PersistentCacheMiss")


def main(arguments: list[str]) -> None:
    """Run what the arguments name; what it raises, an exit code too, is raised here after the counters are written."""
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        from torch_bridge import metrics

        sys.stdout.write(json.dumps({name: metrics.COUNTERS.get(name, 0) for name in NAMES}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

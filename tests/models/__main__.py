"""Train models on the CPU and on device xla and compare: `python -m tests.models [name ...]`, by default all that the tests leave out. `--played`: with
`torch_bridge.optimize` and without it, on device xla.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.models.training import OPTIMIZERS, played, train_and_compare
from tests.models.zoo import TASKS
from tests.models.zoo_more import MORE, REST

EVERY = {**TASKS, **MORE, **REST}


def main(arguments: list[str] | None = None) -> int:
    """One line per model; the exit status is the number of models that fail."""
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(EVERY)}; by default {', '.join(REST)}")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--played", action="store_true", help="compare with torch_bridge.optimize, and say whether the model is played")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in EVERY]
    if unknown:
        parser.error(f"no model {', '.join(unknown)}: choose from {', '.join(EVERY)}")
    failures = 0
    for name in options.names or REST:
        begin = time.time()
        try:
            task = EVERY[name].build, EVERY[name].loss, OPTIMIZERS[options.optimizer]
            if options.played:
                outcome = f"equal, {played(*task)}"
            else:
                train_and_compare(*task)
                outcome = "equal"
        except Exception as error:  # one line of the table, not its end
            outcome, failures = f"{type(error).__name__}: {error}", failures + 1
        sys.stdout.write(f"{name:12} {options.optimizer:6} {time.time() - begin:6.1f} s  {outcome}\n")
        sys.stdout.flush()
    return failures


if __name__ == "__main__":
    sys.exit(main())

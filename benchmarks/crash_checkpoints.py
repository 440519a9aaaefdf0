"""Kill a process with SIGKILL at random moments while it saves checkpoints, again and again; each successor must resume from the newest complete one.

    python benchmarks/crash_checkpoints.py --count 200

Every tag holds a number that all of its arrays must equal. A successor loads the newest tag, checks every array, that no complete tag was lost (beyond
retention) and that no tag without `done` was chosen; then it goes on saving, now in the foreground, now in the background, until it is killed. Exit status 1
with the reason if something is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import neuronx_distributed as nxd
import torch
import torch_xla  # noqa: F401  # imported before processes fork; JAX starts in each of them

from nxd_jax.checkpoint import tags
from nxd_jax.trainer import checkpoint  # noqa: F401

KEPT = 2


class Numbers(torch.nn.Module):
    """Arrays that all hold one number."""

    def __init__(self, arrays: int, rows: int):
        super().__init__()
        self.values = torch.nn.ParameterList([torch.zeros(rows, 64) for _ in range(arrays)])

    def fill(self, number: int) -> None:
        with torch.no_grad():
            for p in self.values:
                p.fill_(float(number))


def resume_and_save(root: Path, ready: int, arrays: int, rows: int) -> None:
    """The child: check what is there, tell the parent, go on saving until killed."""
    model = Numbers(arrays, rows).to("xla")
    step = 0
    if nxd.has_checkpoint(root):
        newest = tags.completed(root)[-1]
        step = nxd.load_checkpoint(root, model=model)
        if f"step_{step}" != newest.removesuffix(tags._NEW).removesuffix(tags._OLD):
            raise SystemExit(f"loaded step {step}, but the newest complete tag is {newest}")
        wrong = [k for k, p in enumerate(model.values) if not bool((p == step).all())]
        if wrong:
            raise SystemExit(f"arrays {wrong} of step {step} do not hold {step}")
    os.write(ready, f"{step}\n".encode())
    while True:
        step += 1
        model.fill(step)
        tag = f"step_{step}" if step % 5 else f"step_{step - 1}"  # now and then the same tag again
        number = step if step % 5 else step - 1
        model.fill(number)
        nxd.save_checkpoint(root, tag, model, user_content=number, num_kept_ckpts=KEPT, async_save=bool(step % 2))


def one_life(root: Path, limit: float, arrays: int, rows: int) -> int:
    """Fork a child, kill it after a random time; the step it resumed from."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 1
        try:
            resume_and_save(root, write, arrays, rows)
        except SystemExit as error:
            sys.stderr.write(f"{error}\n")
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        line = pipe.readline()
    if not line:
        os.waitpid(child, 0)
        raise SystemExit("a successor could not resume")
    time.sleep(random.uniform(0.0, limit))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise SystemExit("a process failed while it was saving")
    return int(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="processes to kill")
    parser.add_argument("--seconds", type=float, default=1.0, help="longest life after resuming")
    parser.add_argument("--arrays", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2048, help="rows of 64 numbers in each array")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    last = incomplete = moved = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        for life in range(args.count):
            expected = tags.completed(root)
            step = one_life(root, args.seconds, args.arrays, args.rows)
            newest = int(expected[-1].split("_")[1].split(".")[0]) if expected else 0
            if step != newest:
                raise SystemExit(f"life {life} resumed from step {step}, the newest complete tag was {newest}")
            if step < last - 1:
                raise SystemExit(f"life {life} resumed from step {step}, after step {last}")
            moved += step > last
            last = max(last, step)
            incomplete += bool(tags.unfinished(root))
    print(
        f"{args.count} processes killed, every successor resumed from the newest complete tag; last step {last}, "
        f"{incomplete} kills left an unfinished tag, {moved} lives got further"
    )


if __name__ == "__main__":
    main()

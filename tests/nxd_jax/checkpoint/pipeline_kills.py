"""Processes that save checkpoints of a pipeline until they are killed; each successor, in another layout, must resume from the newest complete one.

    python -m tests.nxd_jax.checkpoint.pipeline_kills FOLDER KILL...
    python -m tests.nxd_jax.checkpoint.pipeline_kills --experts FOLDER KILL...      models with experts

KILL is when SIGKILL comes: a number, that of the file operation (of Python) in the folder; or seconds, such as 0.3s, after resuming. In every checkpoint all
weights and moments hold one number, that of its step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import neuronx_distributed as nxd
import torch
import torch_xla  # imported before processes fork; JAX starts in each of them

from nxd_jax.checkpoint import tags
from nxd_jax.pipeline import NxDPPModel  # noqa: F401
from nxd_jax.trainer import checkpoint  # noqa: F401
from tests.nxd_jax.checkpoint import expert_job
from tests.nxd_jax.checkpoint.pipeline_job import Layout, values
from torch_bridge.mesh import world

LAYOUTS = [Layout(8, 4, 2), Layout(4, 2, 1, 2, True), Layout(1), Layout(8, 2, 2, 1, True)]
EXPERTS = [
    expert_job.Layout(8, tp=2, ep=2, pp=2, microbatches=2, rows=1, zero1=True),
    expert_job.Layout(4, ep=4),
    expert_job.Layout(1),
    expert_job.Layout(8, tp=2, ep=4, zero1=True),
]
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.utime")


class Kind(NamedTuple):
    """What is trained. start: makes a world and a job for a life, by its number; values: full weights and moments by name; least: how many there are."""

    start: Callable[[int], Any]
    values: Callable[[Any], dict[str, torch.Tensor]]
    least: int


def pipeline(life: int) -> Any:
    layout = LAYOUTS[life % len(LAYOUTS)]
    world.configure(world.World(layout.ranks))
    return layout.build(seed=life, tied=True)


def experts(life: int) -> Any:
    layout = EXPERTS[life % len(EXPERTS)]
    world.configure(world.World(layout.ranks))
    return expert_job.build(layout, seed=life)


KINDS = {"--pipeline": Kind(pipeline, values, 4 * 20), "--experts": Kind(experts, expert_job.values, 4 * 16)}


def kill_at(root: Path, when: str) -> None:
    """Let this process be killed."""
    if when.endswith("s"):
        threading.Timer(float(when[:-1]), os.kill, (os.getpid(), signal.SIGKILL)).start()
        return
    left, place = [int(when)], str(root)

    def count(event: str, arguments: Any) -> None:
        if event in EVENTS and any(str(a).startswith(place) for a in arguments if isinstance(a, (str, bytes, Path))):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def fill(made: Any, number: float) -> None:
    """Give all weights and moments one number."""
    model, optimizer, _ = made
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(number)
        inside = optimizer.optimizer
        for state in getattr(inside, "base_optimizer", inside).state.values():
            state["exp_avg"].fill_(number)
            state["exp_avg_sq"].fill_(number)
    torch_xla.sync()


def check(kind: Kind, made: Any, number: int) -> None:
    """Exit if they do not."""
    found = kind.values(made)
    wrong = [name for name, t in found.items() if not name.startswith("step/") and not bool((t == number).all())]
    if wrong or len(found) < kind.least:
        raise SystemExit(f"of step {number} these hold something else: {wrong[:8]}")


def resume_and_save(kind: Kind, root: Path, ready: int, life: int, when: str) -> None:
    """The child: check what is there, tell the parent, go on saving until killed."""
    made = kind.start(life)
    for p in made[0].parameters():
        p.grad = torch.zeros_like(p)
    made[1].step()
    torch_xla.sync()
    step = 0
    if nxd.has_checkpoint(root):
        step = nxd.load_checkpoint(root, None, *made)
        check(kind, made, step)
    os.write(ready, f"{step}\n".encode())
    kill_at(root, when)
    while True:
        step += 1
        fill(made, step)
        nxd.save_checkpoint(root, f"step_{step}", *made, user_content=step, num_kept_ckpts=2, async_save=bool(step % 2))


def one_life(kind: Kind, root: Path, life: int, when: str) -> int:
    """Fork a child that gets killed; the step it resumed from."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            resume_and_save(kind, root, write, life, when)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as pipe:
        line = pipe.readline()
    _, status = os.waitpid(child, 0)
    if not line or not os.WIFSIGNALED(status):
        raise SystemExit(f"life {life} {'failed while it was saving' if line else 'could not resume'}")
    return int(line)


def main(arguments: list[str]) -> None:
    kind = KINDS[arguments.pop(0)] if arguments[0] in KINDS else KINDS["--pipeline"]
    root, kills = Path(arguments[0]), arguments[1:]
    found = []
    for life, when in enumerate(kills):
        complete = tags.completed(root) if root.is_dir() else []
        step = one_life(kind, root, life, when)
        newest = int(complete[-1].split("_")[1].split(".")[0]) if complete else 0
        if step != newest:
            raise SystemExit(f"life {life} resumed from step {step}, the newest complete tag was {newest}")
        found.append(f"{step}{'+' * bool(tags.unfinished(root))}")
    sys.stdout.write(f"resumed from {' '.join(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

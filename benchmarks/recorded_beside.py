"""Time a training step whose program is started before Python has recorded it: what that design of replay can hide (docs/explanation/replay_designs.md).

    python benchmarks/recorded_beside.py

The design: as soon as a step's inputs are known, start the program that the last steps predict, record the step beside it, and commit when the recording
agreed to its end. Forward and backward may then donate nothing; the optimizer's update, a program of its own, runs at the commit. This does not build it: it
takes the program of a real step, splits it at the optimizer, runs the parts on copies of the step's arrays, records the same script beside it and throws the
recording away. All ways take turns in one process. The step is that of replay_designs.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import quiet
import rounds

WARM = 10
MEBI = 2**20


class Parts:
    """The program of a step: whole as compiled, whole without donation, and split at the optimizer into `first` (loss and gradients) and `update`.

    args: the inputs of a run. Every array is a copy: the script's own are never touched.
    """

    def __init__(self, program: Any, args: list[Any]):
        import jax

        from torch_bridge import _compat
        from torch_bridge.compiler import computation

        self.jax, self.compat = jax, _compat
        self.program = program
        self.args = [a if isinstance(a, np.ndarray) else jax.numpy.array(a, copy=True) for a in args]
        with _compat.enable_x64():
            self.kept = jax.jit(computation.of(program.spec)).lower(*self.args).compile()
            self._split()

    def _split(self) -> None:
        from torch_bridge.compiler import interpret

        graph = self.program.graph
        late = _optimizer_nodes(graph)
        places = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
        results = list(next(n for n in graph.nodes if n.op == "output").args[0])
        results = [results[k] for (k,) in (self.program.spec.ports.outputs[at] for at in self.program.spec.ports.order)]
        numbers = {n for n in late if n not in _descendants(graph)}
        early = [n for n in graph.nodes if n not in late - numbers and n.op == "call_function"]
        crossing = list(dict.fromkeys(i for n in late - numbers for i in n.all_input_nodes if i in early and i not in numbers))
        self.results_early = [k for k, n in enumerate(results) if n not in late]
        self.results_late = [k for k, n in enumerate(results) if n in late]
        takes = list(dict.fromkeys(i for n in late for i in n.all_input_nodes if n.op == "call_function" and i in places))
        self.update_takes = [places[n] for n in takes]
        self.crossing = len(crossing)
        first = _copy(graph, list(places), [n for n in early if n not in numbers], [*crossing, *(results[k] for k in self.results_early)])
        update = _copy(graph, [*takes, *crossing], [n for n in graph.nodes if n in late], [results[k] for k in self.results_late])
        self.pairs = {k: self.program.spec.ports.donated[k] for k in self.results_late if k < len(self.program.spec.ports.donated)}
        donated = tuple(self.update_takes.index(at) for at in self.pairs.values())
        jit = self.jax.jit
        self.first = jit(lambda *a: tuple(interpret.run(first, a, interpret.draws_key_of(None)))).lower(*self.args).compile()
        grads = self.first(*self.args)[: self.crossing]
        inner = [self.args[at] for at in self.update_takes]
        run = jit(lambda *a: tuple(interpret.run(update, a, interpret.draws_key_of(None))), donate_argnums=donated)
        self.update = run.lower(*inner, *grads).compile()

    def run_whole(self) -> Any:
        """The step as it is compiled today: it takes the weights over."""
        with self.compat.enable_x64():
            results = self.program.compiled(*self.args)
        for k, at in enumerate(self.program.spec.ports.donated):
            self.args[at] = results[k]
        return self._loss(results)

    def run_kept(self) -> Any:
        """The same program, donating nothing."""
        with self.compat.enable_x64():
            results = self.kept(*self.args)
        for k, at in enumerate(self.program.spec.ports.donated):
            self.args[at] = results[k]
        return self._loss(results)

    def run_first(self) -> tuple[Any, Any]:
        """Start forward and backward; the loss, and what `commit` takes."""
        with self.compat.enable_x64():
            results = self.first(*self.args)
        return self._loss(results[self.crossing :]), results[: self.crossing]

    def commit(self, grads: Any) -> None:
        """Run the update, in place."""
        with self.compat.enable_x64():
            new = self.update(*(self.args[at] for at in self.update_takes), *grads)
        for k, result in zip(self.results_late, new, strict=True):
            if k in self.pairs:
                self.args[self.pairs[k]] = result

    @staticmethod
    def _loss(results: Any) -> Any:
        return next(r for r in results if r.ndim == 0)

    def memory(self) -> list[str]:
        """Bytes of each program as XLA counts them, as rows of a table."""
        rows = []
        named = [("one program, donating (today)", self.program.compiled), ("one program, donating nothing", self.kept)]
        for title, compiled in (*named, ("forward and backward", self.first), ("update", self.update)):
            m = compiled.memory_analysis()
            sizes = (m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, m.temp_size_in_bytes)
            total = sizes[0] + sizes[1] - sizes[2] + sizes[3]
            rows.append(f"| {title} | " + " | ".join(f"{x / MEBI:.1f}" for x in (*sizes, total)) + " |")
        return rows


def _descendants(graph: Any) -> set[Any]:
    """The optimizer's steps, and all that is computed from them."""
    found: set[Any] = set()
    for n in graph.nodes:
        if n.op == "call_function" and ("optimizer_step" in str(n.target) or any(i in found for i in n.all_input_nodes)):
            found.add(n)
    return found


def _optimizer_nodes(graph: Any) -> set[Any]:
    """Those, and the numbers that only they read."""
    from torch_bridge.ir.graph import number

    found = _descendants(graph)
    return found | {n for n in graph.nodes if n.target is number and n.users and all(u in found for u in n.users)}


def _copy(graph: Any, inputs: list[Any], nodes: list[Any], outputs: list[Any]) -> Any:
    """A graph of some of another's nodes, with `inputs` as its placeholders."""
    from torch import fx

    new = fx.Graph()
    env: dict[Any, Any] = {}
    for n in inputs:
        env[n] = new.placeholder(n.name)
        env[n].meta = dict(n.meta)
    for n in nodes:
        env[n] = new.node_copy(n, lambda old: env[old])
    new.output([env[n] for n in outputs])
    return new


def prepare() -> tuple[Callable[[np.ndarray], Any], Callable[[], None], Callable[[], None], Parts]:
    """The script's step, `torch_xla.sync`, what throws a recording away, and the parts of the step's program."""
    os.environ["NXD_JAX_REPLAY"] = "0"
    import measure
    import replay_designs

    step, mark = replay_designs.torch_step("xla")
    from torch_bridge.compiler.program import Program
    from torch_bridge.recorder import dispatch
    from torch_bridge.runtime import executor, session

    seen: list[list[Any]] = []
    run = Program.run

    def noting(self: Any, args: Any) -> Any:
        seen[:] = [[a if isinstance(a, np.ndarray) else a.copy() for a in args]]
        return run(self, args)

    for k, ids in enumerate(measure.batches(WARM)):
        if k == WARM - 1:
            Program.run = noting  # type: ignore[method-assign]
        before = len(session.current().recent)
        loss = step(ids)
        mark()
        loss.item()
    Program.run = run  # type: ignore[method-assign]
    if len(session.current().recent) - before != 1:
        raise RuntimeError("a step ran in more than one program")

    def discard() -> None:
        executor._roll_back(dispatch.STATE.session.current, RuntimeError("thrown away"))

    return step, mark, discard, Parts(session.current().recent[-1], seen[0])


def ways(step: Any, mark: Any, discard: Any, parts: Parts) -> dict[str, Callable[[np.ndarray], Any]]:
    """What is timed: each is given a batch, and returns when the loss of its step has been read and nothing runs."""

    def script(ids: np.ndarray) -> None:
        loss = step(ids)
        mark()
        loss.item()

    def record(ids: np.ndarray) -> None:
        step(ids)
        discard()

    def whole(ids: np.ndarray) -> None:
        float(parts.run_whole())

    def kept(ids: np.ndarray) -> None:
        float(parts.run_kept())

    def split(ids: np.ndarray) -> None:
        loss, grads = parts.run_first()
        parts.commit(grads)
        float(loss)

    def serial(ids: np.ndarray) -> None:
        record(ids)
        whole(ids)

    def beside_whole(ids: np.ndarray) -> None:
        loss = parts.run_kept()
        record(ids)
        float(loss)

    def beside_split(ids: np.ndarray) -> None:
        loss, grads = parts.run_first()
        record(ids)
        parts.commit(grads)
        float(loss)

    return {
        "the script as it is (recorded, then run)": script,
        "recording alone, thrown away": record,
        "program alone": whole,
        "program alone, donating nothing": kept,
        "program alone, split at the optimizer": split,
        "recording, then the program": serial,
        "recording beside the program, donating nothing": beside_whole,
        "recording beside forward and backward, then the update": beside_split,
    }


def settle(parts: Parts) -> None:
    """Wait until nothing runs."""
    for a in parts.args:
        if not isinstance(a, np.ndarray):
            a.block_until_ready()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120, help="how long")
    args = parser.parse_args()
    step, mark, discard, parts = prepare()
    import measure

    timed, data = ways(step, mark, discard, parts), measure.batches()
    found: dict[str, list[Time]] = {name: [] for name in timed}
    for way in timed.values():
        timing(way, data[0], parts)
    ends = time.monotonic() + args.seconds
    while time.monotonic() < ends:
        for name, way in timed.items():
            found[name].append(timing(way, data[len(found[name]) % len(data)], parts))
    print(table(found))
    print("\n| | arguments (MiB) | results | of them in place | temporary | in all |\n|---|---|---|---|---|---|")
    print("\n".join(parts.memory()))
    print(
        f"\n{parts.crossing} gradients go from one to the other; {len(found['program alone'])} turns; {rounds.stack('torch', 'transformers', 'jax', 'jaxlib')}"
    )


class Time(NamedTuple):
    """Seconds, CPU seconds of all threads, and the share of the cores that other processes had."""

    wall: float
    cpu: float
    others: float


def timing(way: Callable[[np.ndarray], Any], ids: np.ndarray, parts: Parts) -> Time:
    """How long one way takes, until nothing runs: the update too, which the next step would have in its way."""
    settle(parts)
    quiet.wait()
    watch = quiet.Watch([os.getpid()])
    started, cpu = time.perf_counter(), time.process_time()
    way(ids)
    settle(parts)
    return Time(time.perf_counter() - started, time.process_time() - cpu, watch.share())


def table(found: dict[str, list[Time]]) -> str:
    """Medians of the quietest times; ratios to "recording, then the program"."""
    quietest = {name: quiet.quietest(times, attrgetter("others")) for name, times in found.items()}
    base = statistics.median(t.wall for t in quietest["recording, then the program"])
    lines = ["| | wall (ms) | others' share of the cores | least | CPU time | wall to recording, then the program |", "|---" * 6 + "|"]
    for name, times in quietest.items():
        wall, cpu = statistics.median(t.wall for t in times), statistics.median(t.cpu for t in times)
        least, others = min(t.wall for t in found[name]), max(t.others for t in times)
        lines.append(f"| {name} | {1e3 * wall:.1f} | {others:.0%} | {1e3 * least:.1f} | {1e3 * cpu:.1f} | {wall / base:.3f}x |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Checks of lowerings that compile together: the programs of a file's tests that stand side by side become one jitted function.

A test function marked `@together` only calls the checks of this folder, on its parameters. Before the first such test of a file runs, it and the
tests after it are rehearsed: their bodies run, and the checks in them write down their programs. About 40 programs are compiled and run as one.
When a test then runs as usual, its checks find their results and compare them. A check whose result is not there or not as expected runs its program
alone, as in a test without the mark, and what that gives is what counts.

Programs of a batch share neither inputs nor results, only what XLA makes of equal constants: of 2,606 results in files compiled as users' programs are,
17 (all of `upsample`) differed from those of the program alone, by 2.4e-7 or less. Checks with `jit=False` are never in a batch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests import quick
from torch_bridge import _compat

SIZE = 40
"""Programs in a batch: tests are rehearsed until there are so many."""

Test = TypeVar("Test", bound=Callable[..., None])


@dataclass(frozen=True, eq=False)
class Program:
    """What a check runs: a function of arrays that JAX can trace, its inputs, and the arguments of the check that they were made from."""

    subject: Any
    call: Callable[[Any], Any]
    inputs: Any


@dataclass(frozen=True, eq=False)
class Ready:
    """What a program gave in a batch."""

    program: Program
    result: Any


_rehearsed: list[Program] | None = None
"""Where checks write down their programs; None except in a rehearsal."""

_ready: list[Ready] = []
"""The results of the test that runs, for its checks."""


def together(test: Test) -> Test:
    """Mark a test function whose checks may compile with those of the tests beside it.

    It takes parameters only, no fixtures, and does nothing but check; what it sets (a default dtype, say) would be gone when its programs are traced.
    """
    test.together = True  # type: ignore[attr-defined]
    return test


def rehearsing() -> bool:
    """Whether programs are written down only."""
    return _rehearsed is not None


def verify(subject: Any, call: Callable[[Any], Any], inputs: Any, compare: Callable[[Any], None]) -> None:
    """Hand what `call` makes of the inputs to `compare`, which raises if it is wrong.

    `call` compiles what it runs, with `jax.jit`. `subject` is what the program was made from: it says whether a result that is ready is this program's.
    """
    program = Program(subject, call, inputs)
    if _rehearsed is not None:
        _rehearsed.append(program)
        return
    if _found_right(program, compare):
        return
    with _compat.enable_x64():
        result = call(inputs)
    compare(result)


def _found_right(program: Program, compare: Callable[[Any], None]) -> bool:
    """Whether this program's result is ready and right."""
    found = next((ready for ready in _ready if _same(ready.program.subject, program.subject)), None)
    if found is None:
        return False
    _ready.remove(found)  # compared by identity
    try:
        compare(found.result)
    except Exception:
        return False
    return True


def _same(a: Any, b: Any) -> bool:
    """Whether two checks were asked about the same op and the same arguments, bit for bit."""
    (these, spec), (those, other) = tree_flatten(a), tree_flatten(b)
    return spec == other and all(map(_same_leaf, these, those))


def _same_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b or (type(a) is type(b) and repr(a) == repr(b))
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b))


def _bytes(x: torch.Tensor) -> bytes:
    return x.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Batches:
    """The tests of a file, in the order in which they run, and the results that are ready for them."""

    def __init__(self, items: Sequence[pytest.Item]) -> None:
        self.items = [item for item in items if isinstance(item, pytest.Function) and hasattr(item.function, "together")]
        self.place = {item.nodeid: i for i, item in enumerate(self.items)}
        self.results: dict[str, list[Ready]] = {}
        self.sizes: list[int] = []

    @contextlib.contextmanager
    def ready(self, item: pytest.Item) -> Iterator[None]:
        """In this block the checks of this test find their results, if it may be batched."""
        if item.nodeid in self.place and item.nodeid not in self.results:
            self._prepare(self.place[item.nodeid])
        _ready[:] = self.results.pop(item.nodeid, [])
        yield
        _ready.clear()

    def _prepare(self, start: int) -> None:
        """Rehearse tests from this one on until there is a batch, and run it."""
        written: list[tuple[str, Program]] = []
        for item in self.items[start:]:
            written += [(item.nodeid, program) for program in rehearse(item)]
            self.results[item.nodeid] = []
            if len(written) >= SIZE:
                break
        if len(written) > 1:
            self.sizes.append(len(written))
            for i, result in run_together([program for _, program in written]).items():
                name, program = written[i]
                self.results[name].append(Ready(program, result))


def rehearse(item: pytest.Function) -> list[Program]:
    """The programs of a test's checks, without running them; as far as it gets, if it raises."""
    global _rehearsed
    names = inspect.signature(item.function).parameters
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    assert set(names) <= set(parameters), (
        f"{item.nodeid} is marked `together`: it takes parameters only, got {sorted(set(names) - set(parameters))}"
    )
    _rehearsed = programs = []
    try:
        with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):
            torch.manual_seed(0)  # as the fixture `same_random_numbers` does
            item.obj(**{name: parameters[name] for name in names})
    finally:
        _rehearsed = None
    return programs


def run_together(programs: Sequence[Program]) -> dict[int, Any]:
    """The results of the programs by their places, all compiled as one. Left out: those that cannot be traced; all, if the rest does not compile or run."""

    def every(inputs: list[Any]) -> dict[int, Any]:
        results = {}
        for i, program in enumerate(programs):
            with contextlib.suppress(Exception):
                results[i] = program.call(inputs[i])
        return results

    try:
        with _compat.enable_x64():
            return jax.block_until_ready(jax.jit(every, compiler_options=_options())([program.inputs for program in programs]))
    except Exception:
        return {}


def _options() -> dict[str, Any] | None:
    """Where a file is compiled with most optimizations off (`QUICK`), XLA's older emitters too: they take a fifth of the time."""
    return {quick.EMITTERS: False} if jax.config.read("jax_disable_most_optimizations") and quick.has_older_emitters() else None

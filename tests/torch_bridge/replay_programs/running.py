"""Runs one program on one device and returns everything that it did, as plain data; and compares two of these."""

from __future__ import annotations

import ast
import builtins
import contextlib
import contextvars
import functools
import inspect
import io
import math
import os
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.torch_bridge.replay_programs.careless import Careless

STEPS = 8
CHANGE_AT = 5
"""Steps 0 to 2 are looked at and recorded, 3 and 4 are played before the change."""
FORMS = ("script", "function")
"""As a script, a program's names are globals of a module of its own; as a function, they are its local names, and cells of what is inside."""


class Net(nn.Module):
    """One layer, and nothing that reads state: what programs inherit from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Run:
    """What a program is given. device: where it runs; notes: what it did so far; cleanup: what is undone at its end."""

    def __init__(self, device: str, careless: bool = False):
        self.device, self.careless = device, careless
        self.notes: list[Any] = []
        self.cleanup = contextlib.ExitStack()
        self.played = 0
        self._placed: list[nn.Module] = []

    def note(self, *values: Any) -> None:
        """Remember values to be compared."""
        self.notes.append(frozen(values))

    def batch(self, k: int, *size: int) -> torch.Tensor:
        """Another tensor for every k, on the device."""
        return torch.randn(*(size or (4, 6)), generator=torch.Generator().manual_seed(k + 1)).to(self.device)

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, where it may be played."""
        model.to(self.device)
        if self.careless:
            model.forward = Careless(model)
        self._placed.append(model)
        return model

    def sync(self) -> None:
        """The end of a step."""
        if self.device == "xla":
            from torch_bridge.runtime import executor

            executor.sync()

    def module(self, name: str, **attributes: Any) -> types.ModuleType:
        """A module that programs can import by this name; it begins with `replay_`, and is gone afterwards."""
        assert name.startswith("replay_")
        made = types.ModuleType(name)
        vars(made).update(attributes)
        sys.modules[name] = made
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, made)
        return made

    def train(
        self,
        model: nn.Module,
        change: Callable[[], Any] | None = None,
        *,
        call: Callable[[Any, torch.Tensor, int], Any] | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        watch: Callable[[], Any] | None = None,
        steps: int = STEPS,
        at: int = CHANGE_AT,
        place: bool = True,
        backward: bool = True,
    ) -> nn.Module:
        """Train a model, call `change` before step `at`, and note every loss, error and `watch()`; at the end, all that the model holds."""
        if place:
            self.place(model)
        for k in range(steps):
            if k == at and change is not None:
                change()
            try:
                out = model(self.batch(k)) if call is None else call(model, self.batch(k), k)
                value = (loss or mean_square)(out)
                if backward:
                    model.zero_grad()
                    value.backward()
                    descend(model)
                self.sync()
                self.note(f"step {k}", value)
            except Exception as error:
                self.sync()
                self.note(f"step {k}", type(error).__name__, str(error))
            if watch is not None:
                self.note(f"after step {k}", watch())
        self.note("held", {name: (t, t.grad) for name, t in [*model.named_parameters(), *model.named_buffers()]})
        return model

    def finish(self) -> None:
        """Undo what the program did to the process, and count what was played."""
        for model in self._placed:
            self.played += getattr(model.__dict__.get("forward"), "played", 0)
        self.cleanup.close()


def mean_square(out: Any) -> torch.Tensor:
    """A loss of whatever a model returned: of all tensors in it."""
    found = torch.utils._pytree.tree_leaves(out)
    return sum(t.float().square().mean() for t in found if isinstance(t, torch.Tensor))


def descend(model: nn.Module) -> None:
    """Plain gradient descent."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


def frozen(value: Any) -> Any:
    """A copy of a value as plain data."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.detach().cpu().double().reshape(-1).tolist())
    if isinstance(value, Mapping):
        return {repr(k): frozen(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return ("set", sorted(map(repr, value)))
    if isinstance(value, np.ndarray):
        return ("array", value.tolist())
    if isinstance(value, (list, tuple)):
        return [frozen(x) for x in value]
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    return type(value).__name__


def difference(expected: Any, found: Any, where: str = "") -> str:
    """Where two outcomes differ first, in words; empty if they do not."""
    if type(expected) is not type(found):
        return f"{where}: {_short(found)}, expected {_short(expected)}"
    if isinstance(expected, dict):
        if list(expected) != list(found):
            return f"{where}: keys {list(found)}, expected {list(expected)}"
        return next(filter(None, (difference(expected[k], found[k], f"{where}[{k}]") for k in expected)), "")
    if isinstance(expected, (list, tuple)):
        label = expected[0] if expected and isinstance(expected[0], str) else ""
        for i, (e, f) in enumerate(zip(expected, found, strict=False)):
            if said := difference(e, f, f"{where}[{label if i and label else i}]"):
                return said
        return "" if len(expected) == len(found) else f"{where}: {len(found)} items, expected {len(expected)}"
    if isinstance(expected, float):
        same = math.isclose(expected, found, rel_tol=2e-4, abs_tol=1e-6) or (math.isnan(expected) and math.isnan(found))
        return "" if same else f"{where}: {found}, expected {expected}"
    return "" if expected == found else f"{where}: {_short(found)}, expected {_short(expected)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."


def outcome(program: Callable[[Run], None], device: str, form: str = "function", careless: bool = False) -> Run:
    """Run a program; what it did is in `notes` of the result."""
    return contextvars.Context().run(_outcome, program, device, form, careless)


def _outcome(program: Callable[[Run], None], device: str, form: str, careless: bool) -> Run:
    run = Run(device, careless)
    printed = io.StringIO()
    with restored(), warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            as_script(program)(run) if form == "script" else program(run)
        except Exception as error:
            run.note("ended by", type(error).__name__, str(error))
        finally:
            run.finish()
    run.note("printed", printed.getvalue())
    run.note("warned", [str(w.message) for w in caught if str(w.message).startswith("program:")])
    return run


def as_script(program: Callable[[Run], None]) -> Callable[[Run], None]:
    """The body of a program as the code of a module of its own."""

    def script(run: Run) -> None:
        name = f"replay_program_{program.__name__}"
        made = run.module(name)
        names = {k: v for k, v in program.__globals__.items() if not k.startswith("__")}
        (argument,) = inspect.signature(program).parameters
        vars(made).update(names, **{argument: run, "__builtins__": builtins, "__file__": program.__code__.co_filename})
        exec(_body(program), vars(made))

    return script


@functools.cache
def _tree(path: str) -> dict[str, ast.FunctionDef]:
    with open(path) as f:
        return {node.name: node for node in ast.parse(f.read()).body if isinstance(node, ast.FunctionDef)}


def _body(program: Callable[[Run], None]) -> types.CodeType:
    path = program.__code__.co_filename
    return compile(ast.Module(_tree(path)[program.__name__].body, []), path, "exec", dont_inherit=True)


PATCHED = (
    *(builtins, math, random, time, os, torch, torch.nn, F, torch.utils.checkpoint, torch.autograd, np),
    *(
        nn.Module,
        nn.Linear,
        nn.Sequential,
        nn.ReLU,
        nn.Tanh,
        nn.Dropout,
        nn.LayerNorm,
        nn.ModuleList,
        nn.Parameter,
        torch.autograd.Function,
        Net,
    ),
)
"""Modules and classes that programs change: what is in them is put back."""


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Put back what programs change in the process."""
    before = [(owner, dict(vars(owner))) for owner in PATCHED]
    environment, modules = dict(os.environ), set(sys.modules)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(deterministic)
        for owner, names in before:
            _put_back(owner, names)
        os.environ.clear()
        os.environ.update(environment)
        for name in set(sys.modules) - modules:
            if name.startswith("replay_"):
                del sys.modules[name]


def _put_back(owner: Any, names: Mapping[str, Any]) -> None:
    now = vars(owner)
    for name in [n for n in now if n not in names]:
        if isinstance(owner, type):
            delattr(owner, name)
    for name, value in names.items():
        if now.get(name, now) is not value:
            setattr(owner, name, value)

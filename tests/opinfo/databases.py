"""torch's databases as one list of entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

from tests.opinfo import modules, optimizers, refusals, runner
from tests.opinfo.model_ops import in_models
from tests.opinfo.table import Row

OP_CASES = (*runner.DTYPES, refusals.CASE)
"""The cases of an operator."""


@dataclass(frozen=True)
class Entry:
    """A database entry and the calls that make its rows, one per case."""

    database: str
    name: str
    cases: dict[str, Callable[[], Row]]


def entries(databases: Sequence[str], names: Sequence[str] = (), cases: Sequence[str] = OP_CASES) -> list[Entry]:
    """The entries of "op", "module" and "optim" that `names` names, with or without their variants (all if it is empty).

    cases: of operators.
    """
    found: list[Entry] = []
    for op in op_db:
        found.append(Entry("op", op.full_name, {c: _case_of_op(op, c) for c in cases if c != "bfloat16" or in_models(op)}))
    for module in module_db:
        name = f"nn.{module.module_cls.__name__}"
        found.append(Entry("module", name, {mode: partial(modules.run, module, mode) for mode in ("train", "eval")}))
    for optimizer in optim_db:
        name = f"optim.{optimizer.optim_cls.__name__}"
        found.append(Entry("optim", name, {c: partial(optimizers.run, optimizer, c) for c in optimizers.cases(optimizer)}))
    wanted = set(names)
    return [e for e in found if e.database in databases and (not wanted or e.name in wanted or e.name.rsplit(".", 1)[0] in wanted)]


def _case_of_op(op: Any, case: str) -> Callable[[], Row]:
    return partial(refusals.run, op) if case == refusals.CASE else partial(runner.run, op, case)

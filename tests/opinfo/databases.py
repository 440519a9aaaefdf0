"""torch's databases as one list of entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

from tests.opinfo import modules, optimizers, runner
from tests.opinfo.table import Row


@dataclass(frozen=True)
class Entry:
    """A database entry and the calls that make its rows, one per case."""

    database: str
    name: str
    runs: tuple[Callable[[], Row], ...]


def entries(databases: list[str], names: list[str], dtypes: list[str]) -> list[Entry]:
    """The entries of "op", "module" and "optim" that `names` names, with or without their variants (all if it is empty)."""
    found: list[Entry] = []
    for op in op_db:
        found.append(Entry("op", op.full_name, tuple(partial(runner.run, op, d) for d in dtypes)))
    for module in module_db:
        name = f"nn.{module.module_cls.__name__}"
        found.append(Entry("module", name, tuple(partial(modules.run, module, mode) for mode in ("train", "eval"))))
    for optimizer in optim_db:
        name = f"optim.{optimizer.optim_cls.__name__}"
        found.append(Entry("optim", name, tuple(partial(optimizers.run, optimizer, c) for c in optimizers.cases(optimizer))))
    wanted = set(names)
    return [e for e in found if e.database in databases and (not wanted or e.name in wanted or e.name.rsplit(".", 1)[0] in wanted)]

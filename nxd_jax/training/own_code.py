"""Code of users that a configuration names: where it is looked for, and what is imported before anything is looked up."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def find_beside(file: Path) -> None:
    """Have modules found in the working folder and beside a file, too; what Python finds without them comes first.

    An installed command has neither in `sys.path`, other than `python -m`.
    """
    for folder in (os.getcwd(), str(file.resolve().parent)):
        if folder not in sys.path and Path(folder).is_dir():
            sys.path.append(folder)


def load(modules: Sequence[str]) -> None:
    """Import modules by name: they call `registry.register`, `register_optimizer` and the like. Ends the command for one that is not there."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module of theirs imports what is not there
            raise SystemExit(
                f"nxdt-train --import: there is no module {name}: give it as package.module; it is looked for where Python looks, in {os.getcwd()} and "
                "beside the configuration"
            ) from None

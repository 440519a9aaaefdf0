"""Which Python the commands run scripts with: the one that `python` means where they are called, if it has torch and nxd_jax.

A command such as `nxd-run` is a file that names the Python of the environment it was installed in. Called from another environment (its full path, a link, a
path that lists both) it would run the script there, without the packages that the user sees. So it starts itself again with the `python` of the user's.
PYTHON_EXEC names another one, as for torchrun.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

_HAS = "import importlib.util as u, sys; sys.exit(4 * (not u.find_spec('torch')) + 2 * (not u.find_spec('nxd_jax')))"
_NO_PACKAGE = 2


def use(command: str, module: str) -> None:
    """Start this command again with the user's Python, if that is another one; else return. Only for a command that was called by its name (`nxd-run`, not
    `python -m nxd_jax.run`, which says which Python it wants). module: what to run with `-m`."""
    if os.path.basename(sys.argv[0]) not in (command, f"{command}.exe"):
        return
    found = chosen(command)
    if found is not None:
        os.execv(found, again(found, module, sys.argv[1:]))


def again(python: str, module: str, arguments: Sequence[str]) -> list[str]:
    """The command line with that Python."""
    return [python, "-m", module, *arguments]


def chosen(command: str) -> str | None:
    """The Python to use in place of this one, None for this one. Says so where the user's has torch, but not nxd_jax."""
    named = os.environ.get("PYTHON_EXEC")
    if named:
        found = shutil.which(named)
        if found is None:
            raise SystemExit(f"{command}: PYTHON_EXEC={named}: there is no such program; name a Python, or unset it")
        return None if _same(found) else found
    found = shutil.which("python") or shutil.which("python3")
    if found is None or _same(found):
        return None
    lacks = subprocess.run([found, "-c", _HAS], capture_output=True, check=False).returncode
    if lacks == _NO_PACKAGE:
        sys.stderr.write(
            f"{command}: runs with {sys.executable}: {found}, which `python` is here, has torch but not nxd_jax. Install nxd_jax there to use it\n"
        )
    return None if lacks else found


def _same(python: str) -> bool:
    """Whether a Python is of this environment: environments have links to one program, so folders are compared."""
    return os.path.realpath(os.path.dirname(python)) == os.path.realpath(os.path.dirname(sys.executable))

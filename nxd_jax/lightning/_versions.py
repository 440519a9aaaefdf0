"""Which releases of Lightning are let in, asked of the installed packages' metadata: before a line of Lightning's own code runs."""

from __future__ import annotations

import importlib.metadata
import re

DISTRIBUTIONS = ("pytorch-lightning", "lightning")
"""The packages that Lightning comes in. Either is enough."""
OLDEST = (2, 5)
"""The first release that has what the strategy, the module and the plugins build on."""
MALICIOUS = frozenset({(2, 6, 2), (2, 6, 3)})
"""Releases that steal credentials as soon as they are imported."""
ADVISORY = "GHSA-w37p-236h-pfx3"

_INSTALL = "pip install 'nxd-jax[lightning]'"


def installed() -> dict[str, str]:
    """The versions of the packages of Lightning that are installed, by name."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check() -> None:
    """Raise ImportError unless a release of Lightning is installed that works here. Imports nothing of it.

    ModuleNotFoundError (an ImportError) if there is none. A malicious release is refused also where the other package is a sound one: any import of
    it would run it.
    """
    found = installed()
    if not found:
        raise ModuleNotFoundError(
            "neuronx_distributed.lightning needs PyTorch Lightning, and neither of its packages "
            f"({' or '.join(DISTRIBUTIONS)}) is installed: {_INSTALL}"
        )
    for name, version in found.items():
        if _release(version) in MALICIOUS:
            raise ImportError(
                f"{name} {version} is installed, a malicious release (advisory {ADVISORY}): importing it runs code that steals credentials, so "
                f"neuronx_distributed.lightning does not. Remove it (pip uninstall {name}) and install a sound release ({_INSTALL}). If it was ever "
                "imported on this machine, treat the machine's credentials as stolen: "
                f"https://github.com/Lightning-AI/pytorch-lightning/security/advisories/{ADVISORY}"
            )
    for name, version in found.items():
        if _release(version) < OLDEST:
            raise ImportError(
                f"{name} {version} is installed; neuronx_distributed.lightning needs {'.'.join(map(str, OLDEST))} or later: "
                f"pip install --upgrade {name}, or {_INSTALL}"
            )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release, (2, 6, 2) for '2.6.2.post1': what a pre-release or a local build has in addition does not count."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(n) for n in numbers.group().split(".")) if numbers else ()

"""Code that may run without being followed: Python's own library, torch's, numpy's, JAX's and this project's, when code in C or a probe calls it."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
import types

import numpy
import torch

_STDLIB = (sysconfig.get_path("stdlib") + os.sep, "<frozen", "<__array_function__")
_SITE = os.sep + "site-packages" + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_ROOTS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(numpy.__file__) + os.sep,
    _HERE + "torch_bridge" + os.sep,
    _HERE + "nxd_jax" + os.sep,
)
_PACKAGES = ("jax", "jaxlib", "ml_dtypes", "opt_einsum")
_OF_TRANSFORMERS = frozenset(
    os.path.join(*path) for path in (("utils", "generic.py"), ("utils", "import_utils.py"), ("modeling_outputs.py",))
)
"""Files below `transformers`: its classes of outputs, and which packages it has found."""


@functools.cache
def _packages() -> tuple[str, ...]:
    """The folders of other packages, wherever they are installed."""
    specs = filter(None, map(importlib.util.find_spec, _PACKAGES))
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in specs if spec.origin)


@functools.cache
def _known(file: str) -> bool:
    if file.startswith(_ROOTS) or file.startswith(_packages()):
        return True
    module = sys.modules.get("transformers")
    root = os.path.dirname(getattr(module, "__file__", None) or "") + os.sep
    if module is not None and file.startswith(root):
        return file[len(root) :] in _OF_TRANSFORMERS
    return _SITE not in file and file.startswith(_STDLIB)


def is_library(code: types.CodeType) -> bool:
    """Whether a code object belongs to one of these."""
    return _known(code.co_filename)

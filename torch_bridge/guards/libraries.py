"""Code that may run without being followed: Python's own library, torch's, numpy's, JAX's and this project's, when code in C or a probe calls it."""

from __future__ import annotations

import functools
import os
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
_PACKAGES = tuple(f"{_SITE}{name}{os.sep}" for name in ("jax", "jaxlib", "ml_dtypes", "opt_einsum"))
_FILES = tuple(os.sep.join((_SITE + "transformers", *path)) for path in (("utils", "generic.py"), ("modeling_outputs.py",)))


@functools.cache
def _known(file: str) -> bool:
    if _SITE in file:
        return file.startswith(_ROOTS) or any(p in file for p in _PACKAGES) or file.endswith(_FILES)
    return file.startswith((*_ROOTS, *_STDLIB))


def is_library(code: types.CodeType) -> bool:
    """Whether a code object belongs to one of these."""
    return _known(code.co_filename)

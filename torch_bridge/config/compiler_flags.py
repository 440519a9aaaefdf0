"""`NEURON_CC_FLAGS`: the flags that neuronx-cc and its cache wrapper take, and which of them mean something here."""

from __future__ import annotations

import difflib
import functools
import os
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_bridge.config.variables import ACCEPT, HONOUR, Kind, one_of


@dataclass(frozen=True)
class Flag:
    """One flag. names: its spellings, the usual one first. kind: what values are allowed (None: any text). takes_value: False for a switch."""

    names: tuple[str, ...]
    rule: str
    meaning: str
    kind: Kind | None = None
    takes_value: bool = True


def _accepted(meaning: str, *names: str, takes_value: bool = True) -> list[Flag]:
    return [Flag((name,), ACCEPT, meaning, None, takes_value) for name in names]


FLAGS = (
    Flag(("--auto-cast",), HONOUR, "which float32 operations run in `--auto-cast-type`", one_of("none", "matmult", "all")),
    Flag(("--auto-cast-type",), HONOUR, "the type for `--auto-cast`", one_of("bf16", "fp16", "tf32", "fp8_e4m3")),
    Flag(("--cache_dir",), HONOUR, "a folder that keeps compiled programs; wins over NEURON_COMPILE_CACHE_URL"),
    Flag(("--no_cache",), HONOUR, "keep no compiled programs on disk", takes_value=False),
    Flag(("--lnc", "-lnc"), HONOUR, "physical cores per logical core; must be what NEURON_LOGICAL_NC_CONFIG says", one_of("1", "2")),
    Flag(("--model-type",), ACCEPT, "a hint for scheduling", one_of("generic", "transformer", "unet-inference", "cnn-training")),
    Flag(("--optlevel", "-O"), ACCEPT, "how hard to optimise", one_of("1", "2", "3")),
    Flag(("--target",), ACCEPT, "the chip, which NEURON_PLATFORM_TARGET_OVERRIDE chooses"),
    Flag(("--distribution-strategy",), ACCEPT, "a hint for scheduling"),
    *_accepted(
        "accumulation is always in float32",
        "--enable-mixed-precision-accumulation",
        "--disable-mixed-precision-accumulation",
        takes_value=False,
    ),
    *_accepted("int64 stays int64 here", "--native-int64", "--implicit-integer-downcast", takes_value=False),
    *_accepted(
        "code generation for the hardware",
        "--enable-saturate-infinity",
        "--enable-fast-context-switch",
        "--enable-fast-loading-neuron-binaries",
        takes_value=False,
    ),
    *_accepted(
        "code generation for the hardware",
        "--fast-math",
        "--tensorizer-options",
        "--hlo2tensorizer-options",
        "--internal-hlo2tensorizer-options",
        "--internal-backend-options",
        "--hbm-scratchpad-page-size",
        "--neuroncore-pipeline-cores",
        "--layer-unroll-factor",
        "--framework",
    ),
    *_accepted("how neuronx-cc itself runs and logs", "--jobs", "--verbose", "--log_level", "--logfile", "--workdir", "--dump"),
    *_accepted("how neuronx-cc itself runs and logs", "--retry_failed_compilation", "--llm-training", takes_value=False),
)
"""Flags with a rule of their own; those that start with `--internal-` are accepted too."""

_BY_NAME = {name: flag for flag in FLAGS for name in flag.names}


def current() -> dict[str, Any]:
    """The flags of `NEURON_CC_FLAGS` as it is now, by their usual names: parsed values, True for switches. Parses a text once."""
    return dict(parse(os.environ.get("NEURON_CC_FLAGS", "")))


@functools.lru_cache(maxsize=16)
def parse(text: str) -> dict[str, Any]:
    """`{"--auto-cast": "matmult", "--no_cache": True, ...}`; ValueError for a value that is not allowed, a warning for an unknown flag."""
    try:
        tokens = iter(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"NEURON_CC_FLAGS={text!r} cannot be split into flags: {error}") from None
    found: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value, flag in _pairs(tokens):
        if flag is None:
            if not name.startswith("--internal-"):
                unknown.append(name)
        elif not flag.takes_value:
            found[flag.names[0]] = True
        else:
            found[flag.names[0]] = _value(name, value, flag)
    if unknown:
        warnings.warn("NEURON_CC_FLAGS: " + "; ".join(map(_describe, unknown)) + ". They have no effect.", stacklevel=3)
    return found


def _pairs(tokens: Iterator[str]) -> Iterator[tuple[str, str | None, Flag | None]]:
    """Each flag with its value, whether `--flag=value`, `--flag value` or `-O2`."""
    for token in tokens:
        name, equals, value = token.partition("=")
        if token[:2] == "-O" and token[2:].lstrip("="):
            name, equals, value = "-O", "=", token[2:].lstrip("=")
        flag = _BY_NAME.get(name)
        if not token.startswith("-"):
            continue  # the value of an unknown or accepted flag
        if flag is not None and flag.takes_value and not equals:
            following = next(tokens, None)
            if following is not None and following.partition("=")[0] in _BY_NAME:
                raise ValueError(f"NEURON_CC_FLAGS: {name} needs a value, but {following} follows ({flag.meaning})")
            yield name, following, flag
        else:
            yield name, value if equals else None, flag


def _value(name: str, value: str | None, flag: Flag) -> Any:
    if not value:
        raise ValueError(f"NEURON_CC_FLAGS: {name} needs a value{f', {flag.kind.allowed}' if flag.kind else ''} ({flag.meaning})")
    if flag.kind is None:
        return value
    try:
        return flag.kind.parse(value)
    except (ValueError, KeyError):
        if flag.rule == ACCEPT:
            warnings.warn(f"NEURON_CC_FLAGS: {name}={value} is not {flag.kind.allowed}; it has no effect here", stacklevel=4)
            return value
        raise ValueError(f"NEURON_CC_FLAGS: {name}={value} must be {flag.kind.allowed} ({flag.meaning})") from None


def _describe(name: str) -> str:
    close = difflib.get_close_matches(name, _BY_NAME, n=1)
    return f"unknown flag {name}" + (f" (did you mean {close[0]}?)" if close else "")

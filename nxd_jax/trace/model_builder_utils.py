"""What tracing and compiling hand on to a model."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from torch_bridge.aot.model import Program


class ModelBuilderConstants:
    """`model_builder_utils.ModelBuilderConstants`: names and defaults."""

    LAYOUT_TRANSFORMER_KEY = "layout_transformer"
    DEFAULT_COMPILER_WORKDIR = "nxd_models"
    DEFAULT_WORLD_SIZE = 1
    MODEL_NAME_PREFIX = "model_"


@dataclasses.dataclass(frozen=True)
class ModelParamInfo:
    """A parameter of forward. is_positional: it has no default."""

    param_name: str
    is_positional: bool


@dataclasses.dataclass(frozen=True)
class ProvidedArgInfo:
    """An example input, and the parameter of forward that takes it."""

    param_name: str
    is_positional: bool
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True)
class TraceArtifacts:
    """`functions.trace`'s result. hlo: the StableHLO of all ranks' program, serialized by `jax.export` (the original's is a protobuf).

    metaneff: its facts as JSON values. program: what a model runs.
    """

    program: Program
    provided_args: tuple[ProvidedArgInfo, ...]
    model_params: tuple[ModelParamInfo, ...]

    @property
    def hlo(self) -> bytes:
        """StableHLO, serialized: `jax.export.deserialize`."""
        return self.program.forms.for_all_ranks

    @property
    def metaneff(self) -> dict[str, Any]:
        """Names, shapes and dtypes of what goes in and comes out."""
        from torch_bridge.aot import facts

        return facts.to_json(self.program.facts)

    @property
    def weight_name_to_idx(self) -> dict[str, int]:
        """Places of weights among the program's."""
        return {t.name: i for i, t in enumerate(self.program.facts.weights)}


@dataclasses.dataclass(frozen=True)
class CompilationArtifacts:
    """`functions.compile`'s result. neff_filepath: the serialized program in the working folder."""

    neff_filepath: str

    def get_neff_bytes(self) -> bytes:
        """What the file holds."""
        return Path(self.neff_filepath).read_bytes()


@dataclasses.dataclass(frozen=True)
class WLOArtifacts(CompilationArtifacts):
    """`functions.compile_wlo`'s result: there is no layout to choose here, XLA lays weights out when it compiles for a device."""

    wrapped_neff_hlo_filepath: str = ""


@dataclasses.dataclass(frozen=True)
class LayoutTransformerArtifacts:
    """`functions.compile_layout_transformer`'s result: the transformer that changes nothing."""

    hlo_filepath: str = ""


def generate_key(hlo: bytes, key: str | None = None) -> str:
    """The tag of a trace: `key`, or `model_` and 8 hexadecimal digits of the program's SHA-256."""
    return key or f"{ModelBuilderConstants.MODEL_NAME_PREFIX}{hashlib.sha256(hlo).hexdigest()[:8]}"

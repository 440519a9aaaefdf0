"""Abstract runs: what a training script needs on every core of a machine that is not at hand (NxD has no such module)."""

from nxd_jax.abstract.report import AbstractReport, PipelineReport, ProgramReport
from nxd_jax.abstract.run import AbstractRun, abstract_run
from nxd_jax.inspect.collectives import Collective
from torch_bridge.mesh.abstract_arrays import AbstractValueError

__all__ = ["AbstractReport", "AbstractRun", "AbstractValueError", "Collective", "PipelineReport", "ProgramReport", "abstract_run"]

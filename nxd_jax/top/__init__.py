"""`nxd-top`: what the emulated NeuronCores of the jobs on this machine do, live in a terminal. (NxD's guide advises `neuron-top`.)

`records` reads what the processes publish (`torch_bridge.telemetry.publisher`), `jobs` follows them as they start, end or crash, `view` draws, `command`
is the command line. Nothing here imports torch or JAX: it has to start while a job takes all cores.
"""

from nxd_jax.top.jobs import Job, Watch
from nxd_jax.top.records import Record

__all__ = ["Job", "Record", "Watch"]

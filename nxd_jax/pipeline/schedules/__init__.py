"""Pipeline schedules as data: which rank computes what in which order. They need no model, no JAX and no torch.

`make("zbv", ranks=4, microbatches=16)` gives one by name, `from_orders` and `from_csv` one of your own, `check` says what is wrong with one, and `run` when
each action runs.
"""

from nxd_jax.pipeline.schedules.actions import Action, Kind, parse
from nxd_jax.pipeline.schedules.kinds import KINDS, find, make
from nxd_jax.pipeline.schedules.schedule import Schedule, ScheduleError, from_csv, from_orders, ranks_of_stages
from nxd_jax.pipeline.schedules.simulate import EQUAL, Stuck, Task, Timeline, Times, run
from nxd_jax.pipeline.schedules.validate import check

__all__ = [
    "EQUAL",
    "KINDS",
    "Action",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Stuck",
    "Task",
    "Timeline",
    "Times",
    "check",
    "find",
    "from_csv",
    "from_orders",
    "make",
    "parse",
    "ranks_of_stages",
    "run",
]

"""Small programs whose forward reads or changes Python state: replayed modules must do what eager torch does.

A program is a function of a `Run`. It builds a tiny model, trains it for 8 steps with `run.train`, and changes something before the sixth step: the first call
of a module is looked at, the second and third are recorded, later ones may be played. `running.outcome` runs it in eager torch, or on `xla` with
`NXD_JAX_REPLAY=all`, and returns everything that it did: losses, gradients, parameters, notes, printed text and errors. Both must be equal.

`table.PROGRAMS` are programs that a careless player gets wrong (`careless.py` is such a player, and the tests check that it does). `table.PLAYED` are programs
that must really be played. `generated.py` makes more programs from a seed. `python -m tests.torch_bridge.replay_programs` prints what differs.
"""

from tests.torch_bridge.replay_programs import containers, effects, functions, objects, ordinary, torch_state, unusual  # noqa: F401  (fills the table)
from tests.torch_bridge.replay_programs.running import difference, outcome
from tests.torch_bridge.replay_programs.table import PLAYED, PROGRAMS, Program, cases

__all__ = ["PLAYED", "PROGRAMS", "Program", "cases", "difference", "outcome"]

"""Which modules are played from recordings (`torch_bridge.optimize`), and why the others are recorded op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nxd_jax.inspect import units
from nxd_jax.inspect.tables import Column, Table
from torch_bridge.replay import replay_policy
from torch_bridge.replay.player import states


@dataclass(frozen=True)
class PlayedModule:
    """A module that may be played: asked for (`torch_bridge.optimize`, `torch.compile`), one of `initialize_parallel_model`, or moved to xla as a whole.

    module: its class. calls: so far. played: how many of them were played. reason: why it is recorded op by op, "" if nothing is known to stand against playing
    it. lasting: the reason stays; otherwise later calls may be played.
    """

    module: str
    calls: int
    played: int
    reason: str
    lasting: bool

    @property
    def because(self) -> str:
        """`reason`, and whether it may pass."""
        return self.reason if self.lasting or not self.reason else f"{self.reason} (this may pass)"


_COLUMNS = (
    Column("module", "module"),
    Column("calls", "calls", number=True),
    Column("played", "played", number=True),
    Column("recorded op by op because", "because"),
)
_WITHOUT_REASON = (
    "The first calls of each kind (shapes, modes) are recorded and compared; of modules that nobody has asked to be played, a few more.\n"
    "Abstract runs are recorded too, and calls in inference mode, under a torch mode, under hooks on all modules or on saved tensors (an activation checkpoint "
    "around the module), under a profiler of Python or in a capture.\nNone of these has a reason here."
)
_MOVED = "No module is to be played: none was moved to xla, or those that were are gone."
_NONE = {
    False: "No module is to be played. NXD_JAX_REPLAY=0 leaves that to torch_bridge.optimize and torch.compile(..., backend='openxla').",
    True: "No module is to be played. NXD_JAX_REPLAY=1 is for models of initialize_parallel_model; auto, the default, and all are for every module that is "
    "moved to xla; torch_bridge.optimize(module) is for one.",
    replay_policy.AUTO: _MOVED,
    replay_policy.ALL: _MOVED,
}


def replay() -> Table[PlayedModule]:
    """Every module that is to be played from recordings and is still there: how often it was called and played, and why it is recorded op by op if it is.

    Raises ValueError if there is none and NXD_JAX_REPLAY is neither 0, 1, auto nor all.
    """
    return table(modules())


def modules() -> tuple[PlayedModule, ...]:
    """The rows of `replay`."""
    return tuple(PlayedModule(s.module, s.calls, s.played, s.reason, s.lasting) for s in states())


def table(found: Sequence[PlayedModule]) -> Table[PlayedModule]:
    """`replay` of rows that were kept."""
    return Table("Modules played", found, _COLUMNS, _note(found), 40)


def _note(found: Sequence[PlayedModule]) -> str:
    if not found:
        return _NONE[replay_policy.said()]
    said = f"{sum(m.played > 0 for m in found)} of {units.many(len(found), 'module')} played."
    return f"{said}\n{_WITHOUT_REASON}" if any(m.calls > m.played and not m.reason for m in found) else said


def summary(found: Sequence[PlayedModule]) -> str:
    """Some lines for a terminal: how many are played, and the reasons; "" if there is no module."""
    if not found:
        return ""
    reasons = dict.fromkeys(f"  {m.module} is recorded op by op: {m.because}" for m in found if m.reason)
    early = " (the first calls of each kind are recorded, and abstract runs)" if any(not m.played and not m.reason for m in found) else ""
    head = f"modules played: {sum(m.played > 0 for m in found)} of {len(found)}{early}"
    return "".join(f"{line}\n" for line in [head, *reasons])


def section(found: Sequence[PlayedModule]) -> str:
    """HTML for a report: the table, or a sentence if there is no module; "" if NXD_JAX_REPLAY is 0 too."""
    if found:
        return table(found).html()
    return f'<div class="said">{escape(_note(found))}</div>' if replay_policy.said() else ""

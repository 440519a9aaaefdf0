"""Whether a script has sharding annotations (`mesh.spmd`), for those who ask without needing JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh


class Mode:
    """Whether annotations are on. devices: of the job, in their order; mesh: what values without an annotation are replicated over; chosen: whether it is the
    script's own; stopping: annotations are being switched off; regions: the script has entered a region of manual sharding (`recorder.manual_regions`)."""

    devices: tuple[Any, ...] = ()
    mesh: Mesh | None = None
    chosen: bool = False
    stopping: bool = False
    regions: bool = False


MODE = Mode()


def active() -> bool:
    """Whether programs run over all devices, with annotations."""
    return MODE.mesh is not None


def devices() -> tuple[Any, ...]:
    """The devices of the job; empty without annotations."""
    return MODE.devices


def here() -> tuple[Any, ...]:
    """The devices of the job that this process hosts."""
    if not MODE.devices:
        return ()
    import jax

    return tuple(d for d in MODE.devices if d.process_index == jax.process_index())

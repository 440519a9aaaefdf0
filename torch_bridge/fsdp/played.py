"""How a unit is followed while a module is looked at to be played (`replay`): gathering always does the same, the module's forward is the script's."""

from __future__ import annotations

from typing import Any

from torch_bridge.fsdp.unit import Unit
from torch_bridge.guards import calls, probes


def _followed(observer: Any, unit: Unit, args: Any, kwargs: Any) -> Any:
    observer.conditions.question(unit.settled, (), True, "whether gradients are reduced in each backward pass (no_sync)")
    if not unit.settled():
        observer.refuse("gradients are kept for a later backward pass (no_sync)", lasting=False)
    for shared in unit.shared:
        observer.seen(shared.shard)
        for place in (place for piece in shared.pieces for place in piece.places):
            observer.writes(place.module, vars(place.module), place.name, f"{type(place.module).__name__}.{place.name}")
    module, given, named = args
    return unit(module, given, named, how=probes.call)


calls.add_rule(Unit, _followed)

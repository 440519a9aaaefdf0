"""What compiling and running came to in this process."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_jax.inspect import units
from nxd_jax.inspect.tables import Column, Table
from torch_bridge import metrics
from torch_bridge.runtime import session
from torch_bridge.telemetry import activity


@dataclass(frozen=True)
class Statistics:
    """Since the start of the process (or since `torch_xla.debug.metrics.clear_all`).

    steps: marks after which something had run. executions: of programs. compiled: programs made; reused: executions of one made before; compile_seconds: in
    all. disk_hits, disk_misses: programs found in the persistent cache on disk, and not. dispatch_seconds: that the host took to hand programs over.
    to_device_bytes, from_device_bytes: moved. kept: programs that are in memory. fallbacks: ops that ran on the host for want of a lowering, by name, and how
    often.
    """

    steps: int
    executions: int
    compiled: int
    reused: int
    compile_seconds: float
    disk_hits: int
    disk_misses: int
    dispatch_seconds: float
    to_device_bytes: int
    from_device_bytes: int
    kept: int
    fallbacks: dict[str, int]

    def table(self) -> Table[Line]:
        """One line for each."""
        made = self.compiled + self.reused
        lines = [
            Line("steps", str(self.steps)),
            Line("programs made", f"{self.compiled}, in {self.compile_seconds:.2f} s"),
            Line("executions of programs made before", f"{self.reused} of {made} ({units.share(self.reused, made)})"),
            Line("found in the cache on disk", f"{self.disk_hits} of {self.disk_hits + self.disk_misses}"),
            Line("programs in memory", str(self.kept)),
            Line("handing programs over", f"{units.seconds(self.dispatch_seconds)} for {self.executions} executions"),
            Line("moved to the device", units.size(self.to_device_bytes)),
            Line("moved from the device", units.size(self.from_device_bytes)),
            Line("ops that ran on the host", ", ".join(f"{name} ({n})" for name, n in self.fallbacks.items()) or "none"),
        ]
        return Table("Compilation and caches", lines, (Column("", "what"), Column("", "found")))

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    what: str
    found: str


def statistics() -> Statistics:
    """The numbers so far (`torch_xla.debug.metrics.metrics_report` has more)."""
    counters = dict(metrics.COUNTERS)
    return Statistics(
        steps=activity.ACTIVITY.steps,
        executions=activity.ACTIVITY.programs,
        compiled=counters.get("UncachedCompile", 0),
        reused=counters.get("CachedCompile", 0),
        compile_seconds=metrics.COMPILE_TIME.total,
        disk_hits=counters.get("PersistentCacheHit", 0),
        disk_misses=counters.get("PersistentCacheMiss", 0),
        dispatch_seconds=metrics.EXECUTE_TIME.total,
        to_device_bytes=int(metrics.OUTBOUND_DATA.total),
        from_device_bytes=int(metrics.INBOUND_DATA.total),
        kept=sum(len(programs) for trace in session.current().traces.values() for programs in trace.programs.values()),
        fallbacks={name: n for name, n in sorted(counters.items()) if name.startswith("aten::")},
    )

"""How much device memory is used, from JAX's own statistics; where JAX keeps none (CPU), from its live arrays and the machine's memory."""

from __future__ import annotations

import os


def usage() -> dict[str, int]:
    """bytes_used, peak_bytes_used and bytes_limit of the device, in bytes."""
    import jax

    stats = jax.devices()[0].memory_stats()
    if stats:
        used = int(stats["bytes_in_use"])
        limit = int(stats.get("bytes_limit") or stats.get("bytes_reservable_limit") or 0)
        return {"bytes_used": used, "peak_bytes_used": int(stats.get("peak_bytes_in_use", used)), "bytes_limit": limit}
    used = sum(a.nbytes for a in jax.live_arrays() if not a.is_deleted())
    return {"bytes_used": used, "peak_bytes_used": used, "bytes_limit": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}

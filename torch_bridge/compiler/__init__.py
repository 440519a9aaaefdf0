"""From a graph to an executable: evaluation through lowerings (`interpret`), `shard_map` around it, `jit`, and the caches on disk."""

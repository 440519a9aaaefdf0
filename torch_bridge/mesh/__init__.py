"""Who the ranks are and where arrays lie: the world and its axes, numbers that differ by rank, process groups, shardings, random state."""

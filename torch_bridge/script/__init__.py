"""A script's source: which expression a frame is at, and where a number that differs by rank goes from there (branches, indices, file names)."""

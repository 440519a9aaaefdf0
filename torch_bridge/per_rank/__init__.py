"""One process that runs the script once for several ranks: tensors, arrays, loaders, random numbers and branches that differ by rank."""

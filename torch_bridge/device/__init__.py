"""`"xla"` as a torch device: registration, factories, generators, serialization, autocast, and what starts JAX at the first tensor."""

"""Analyses and rewrites between a recorded segment and a compiled program: constants, scalars, varying axes, repeated layers.

They run in this order: `hoist_constants`, `automatic_dynamic`, `scalar_inputs`, `varying_axes`, `check_replicas`, `find_repeats` and `fold_repeats`.
`rewrite_roundings` change the traced JAX function.
"""

"""Guards: what the forward of a module reads of Python's state, seen while it runs, so that it can be told before a later call whether it would do the same.

`instrument` rewrites functions so that every read, write and call asks `probes`; `calls` follows calls; an `Observer` collects what was read as `Conditions`.
"""

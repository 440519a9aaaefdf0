"""Rules that a segment, a graph and what passes make of them must obey, checked after every pass while `SETTINGS.verify` (`NXD_JAX_VERIFY=1`; the tests).

`report`: the switch and the error. `segments`: recording, `hoist_constants`, `scalar_inputs`. `meaning`: what `hoist_constants` must leave alone.
`tapes`: replay. `graphs`: `GraphBuilder`. `axes`: `varying_axes`, `check_replicas`. `repeats`: `find_repeats`. `loops`: `fold_repeats`.
`compiler/verify_programs.py` looks at what a program takes and gives. A rule works out anew what must hold; it does not ask the pass that it checks.
"""

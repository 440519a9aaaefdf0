"""Parity with eager torch over torch's own databases of operators, modules and optimizers: `python -m tests.opinfo`."""

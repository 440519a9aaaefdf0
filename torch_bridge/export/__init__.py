"""Ways out of torch: fx graphs of a function, JAX functions, flax modules, HLO text."""

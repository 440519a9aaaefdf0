"""Which precision the environment asks for: stochastic rounding, downcasts, and the compiler's casts, applied to traced JAX functions."""

"""What the environment says: the variables that are read (`variables`), the compiler's flags, and what has to be set before JAX starts."""

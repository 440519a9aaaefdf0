"""`python -m nxd_jax.parallel_compile`."""

from nxd_jax.parallel_compile.command import main

main()

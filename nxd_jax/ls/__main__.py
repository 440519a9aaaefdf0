"""`python -m nxd_jax.ls`."""

import sys

from nxd_jax.ls.command import main

if __name__ == "__main__":
    sys.exit(main())

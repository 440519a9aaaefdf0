"""`python -m nxd_jax.top`."""

import sys

from nxd_jax.top.command import main

if __name__ == "__main__":
    sys.exit(main())

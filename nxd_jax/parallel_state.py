"""`neuronx_distributed.parallel_state`: the short path that the documents use for `neuronx_distributed.parallel_layers.parallel_state`."""

import sys

from nxd_jax.parallel_layers import parallel_state

sys.modules[__name__] = parallel_state

"""`torch_xla.version`. Scripts parse it to choose between old and new names; we stand for 2.9, the last torch_xla that Neuron training
used, and keep the older names too.
"""

__version__ = "2.9.0"
__xla_gitrev__ = ""
__torch_gitrev__ = ""

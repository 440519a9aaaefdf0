"""`nxd-ls`: the Neuron devices of the emulated machine and the processes that use them. (The Neuron SDK has `neuron-ls`.)

`rows` makes the devices out of the machine and of what processes publish for `nxd-top`, `view` writes them down, `command` is the command line. Nothing here
imports torch or JAX.
"""

from nxd_jax.ls.rows import Device, Process, devices

__all__ = ["Device", "Process", "devices"]

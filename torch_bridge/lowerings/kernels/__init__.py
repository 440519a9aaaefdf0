"""Attention kernels that lowerings and ops choose among: cuDNN's, Pallas flash attention, ring attention along a mesh axis."""

"""Kernels of torch's CPU library that compiled programs call through XLA's FFI, where XLA's own code for CPUs is slower, or much longer to compile.

A kernel is a Python function of CPU tensors, which lie in XLA's buffers: it reads its arguments, which it may not change, and fills its results. Programs
call it by name (`call`), so an executable that was kept on disk finds it again. It runs on the thread of XLA that calls it, as if the script had set no mode
(`isolated`), and torch uses as many threads as `torch.set_num_threads` says.

Only plain programs of one device use kernels (`using`): among ranks that are emulated side by side XLA's code shares the processors better, what is exported
(`torch_neuronx`, `to_jax`) must run without us, and other precisions are made of XLA's operations.
"""

from torch_bridge.lowerings.torch_kernels import convolution, grouped  # noqa: F401 - it registers its kernels
from torch_bridge.lowerings.torch_kernels.registry import available, call, call_lying, images_of, kernel, using, wanted

__all__ = ["available", "call", "call_lying", "images_of", "kernel", "using", "wanted"]

"""xla tensors and how their ops are recorded.

From the ground up: `varying`, `downloads` (what is in a storage), `tensor` (the class; its ops go where `dispatch_with` says), `uploads`, `rank_tensor` (CPU
tensors that differ by rank), `copies` and `sharded` (both directions), `fallback` (ops on the CPU), `dispatch` (how an op is recorded), `op_rules` (ops with a
rule of their own). Beside them: shape inference, checks of arguments, the autograd engine.
"""

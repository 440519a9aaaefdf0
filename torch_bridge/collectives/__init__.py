"""Communication between ranks: collectives as ops of the graph and as functions, tensors cut by rows, objects, attention over a sequence axis.

`backend` and `process_group` are backend "xla" of torch.distributed.
"""

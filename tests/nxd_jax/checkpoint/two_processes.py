"""Run by torchrun: load a checkpoint with tensor parallelism over two processes, and save it again."""

import sys

import neuronx_distributed as nxd
import torch.distributed as dist
import torch_xla.distributed.xla_backend  # noqa: F401  # registers backend "xla"

from tests.nxd_jax.checkpoint import job

source, target = sys.argv[1:]
dist.init_process_group("xla")
for tp, zero1 in ((1, True), (2, False)):
    made = job.build(tp, zero1=zero1, seed=3)
    nxd.load_checkpoint(source, None, *made)
    nxd.save_checkpoint(target, f"tp{tp}", *made, user_content={"tp": tp}, async_save=zero1)
    nxd.finalize_checkpoint()

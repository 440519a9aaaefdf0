"""Brings the recorder up: importing this gives xla tensors their behaviour (and imports JAX). Nothing imports it before the first xla tensor is made."""

import os
import warnings

from torch_bridge import _compat
from torch_bridge.config import environment, freed_memory, library_fusions

environment.prepare()  # before JAX starts
_values = environment.check()
if _values.get("NXD_JAX_KEEP_FREED_MEMORY", True):
    freed_memory.keep(one_heap=environment.keeps_programs(_values))
library_fusions.single_products_only()  # imports JAX's library, so after what must come before its threads

from torch_bridge.collectives import c10d_ops, collective_ops, value_checks
from torch_bridge.compiler import xla_cache
from torch_bridge.config import fork_guard
from torch_bridge.device import debug_modes, module_to, torchs_staging
from torch_bridge.generation import hooking
from torch_bridge.lowerings import torch_kernels
from torch_bridge.mesh import watch
from torch_bridge.passes import check_replicas
from torch_bridge.recorder import (
    autograd_engine,
    composite_outs,
    copies,
    ctc_lengths,
    dispatch,
    eager_mode,
    make_fx,
    op_rules,
    packed_sequences,
    quantizers,
    recurrent_layers,
    sampled_lists,
    tensor,
)
from torch_bridge.runtime import cold_shapes, eager_programs, executor, interrupts, steps
from torch_bridge.telemetry import activity

_dispatch = debug_modes.configure(_values, dispatch.dispatch)


def use_dispatch() -> None:
    """Have ops recorded, or run one by one in eager mode."""
    tensor.dispatch_with(autograd_engine.guarded(debug_modes.op_by_op(_dispatch) if eager_mode.enabled() else _dispatch))


use_dispatch()
eager_mode.WHEN_CHANGED.append(use_dispatch)
_compat.record_untraced([*vars(tensor.XLATensor).values(), executor.sync, module_to._apply])
steps.snapshot_with(copies.snapshot)
xla_cache.configure(_values)
torch_kernels.available()  # programs that were kept on disk may call them
make_fx.install()
interrupts.install()
cold_shapes.compute_with(eager_programs.run)
check_replicas.install()
value_checks.install()
hooking.install()
torchs_staging.install()
watch.DOING = activity.in_words
os.register_at_fork(after_in_child=fork_guard.mark_forked)
# DataLoader workers fork; they use CPU tensors only, and `fork_guard.check` stops those that do not, so JAX's warning about forks misleads.
warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)

__all__ = [
    "c10d_ops",
    "collective_ops",
    "composite_outs",
    "ctc_lengths",
    "dispatch",
    "op_rules",
    "packed_sequences",
    "quantizers",
    "recurrent_layers",
    "sampled_lists",
    "tensor",
    "use_dispatch",
]

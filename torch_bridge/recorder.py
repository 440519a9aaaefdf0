"""Brings the recorder up: importing this gives xla tensors their behaviour (and imports JAX). Nothing imports it before the first xla tensor is made."""

import os
import warnings

from torch_bridge import environment

environment.prepare()  # before JAX starts
_values = environment.check()

from torch_bridge import (
    backward,
    collective_ops,
    compile_cache,
    ctc_lengths,
    debugging,
    dispatch,
    eager,
    executor,
    interrupts,
    modules,
    process,
    replicas,
    specials,
    tensor,
    torch_compile,
    tracing,
)

_dispatch = debugging.configure(_values, dispatch.dispatch)


def use_dispatch() -> None:
    """Have ops recorded, or run one by one in eager mode."""
    tensor._dispatch = backward.guarded(debugging.op_by_op(_dispatch) if eager.enabled() else _dispatch)


use_dispatch()
torch_compile.record_untraced([*vars(tensor.XLATensor).values(), executor.sync, modules._apply])
compile_cache.configure(_values)
tracing.install()
interrupts.install()
replicas.install()
os.register_at_fork(after_in_child=process.mark_forked)
# DataLoader workers fork; they use CPU tensors only, and `process.check` stops those that do not, so JAX's warning about forks misleads.
warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)

__all__ = ["collective_ops", "ctc_lengths", "dispatch", "specials", "tensor", "use_dispatch"]

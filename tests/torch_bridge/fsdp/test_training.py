"""Training with shared out parameters equals training on one device, and plain data parallelism."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy

from tests.torch_bridge.fsdp.models import Block, Net, adam, alone, assert_close, nested, net, train, whole
from tests.torch_bridge.ranks.conftest import Hosted

KINDS: dict[str, Callable[[Net], nn.Module]] = {
    "flat": lambda m: FSDP(m, flatten_parameters=True, disable_reshard_on_root=False),
    "nested": lambda m: nested(m),
    "nested rows": lambda m: nested(m, shard_param_on_dim_0=True, disable_reshard_on_root=False),
    "nested flat": lambda m: nested(m, flatten_parameters=True),
    "kept": lambda m: nested(m, reshard_after_forward=False),
    "no barriers": lambda m: nested(m, optimization_barrier_in_forward=False, optimization_barrier_in_backward=False),
    "policy": lambda m: FSDP(
        m,
        auto_wrap_policy=lambda module, recurse, unwrapped_params: transformer_auto_wrap_policy(module, recurse, unwrapped_params, {Block}),
    ),
    "checkpoints inside": lambda m: nested(m, checkpoint_module),
    "checkpoints outside": lambda m: _checkpoints_outside(m),
    "checkpoints within": lambda m: FSDP(_checkpoints_within(m), disable_reshard_on_root=False),
    "torch's checkpoints": lambda m: FSDP(_checkpoints_within(m, False), flatten_parameters=True, disable_reshard_on_root=False),
    "small parts": lambda m: nested(m, _shard_size_multiple=1),
}


def _checkpoints_outside(m: Net) -> nn.Module:
    for k, block in enumerate(m.blocks):
        m.blocks[k] = checkpoint_module(FSDP(block))
    return FSDP(m)


def _checkpoints_within(m: Net, reentrant: bool = True) -> nn.Module:
    """As transformers' models do: the unit is the whole model, and its layers are computed again."""
    from torch.utils.checkpoint import checkpoint

    for block in m.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=reentrant)
    return m


RANKS = (4, 2, 8)
CASES = [(kind, RANKS[(k + j) % 3]) for k, kind in enumerate(KINDS) for j in range(3)]


@pytest.mark.thorough(keep=12)
@pytest.mark.core(keep=6)
@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_equals_one_device(kind: str, ranks: int, hosted: Hosted) -> None:
    expected = alone(net(), ranks)
    hosted(ranks)
    model = KINDS[kind](net())
    losses = train(model, adam(model))
    assert_close((losses, whole(model)), expected)

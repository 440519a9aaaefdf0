"""Scripts as users of torch_xla's FSDP write them: a convolutional network with batch norm, wrapped by a policy, trained, saved, joined and evaluated."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import checkpoint_module, consolidate_sharded_model_checkpoints
from torch_xla.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.recorder import sharded


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


def resnet() -> nn.Sequential:
    torch.manual_seed(42)
    stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(stem, Residual(6), Residual(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


def images(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each class is brighter than the one before."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    labels = torch.randint(0, 4, (8,), generator=generator)
    return torch.randn(8, 3, 6, 6, generator=generator) + labels[:, None, None, None], labels


POLICIES: dict[str, Any] = {
    "none": None,
    "size_based": functools.partial(size_based_auto_wrap_policy, min_num_params=300),
    "type_based": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Residual}),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.core
@pytest.mark.parametrize(
    ("policy", "flatten", "checkpoints"), [("type_based", True, True), ("size_based", False, False), ("none", False, False)]
)
def test_images(policy: str, flatten: bool, checkpoints: bool, hosted: Hosted, tmp_path: pathlib.Path) -> None:
    """It learns; the joined file loads into the plain network, which answers as the wrapped one does."""
    hosted(2)
    device, rank = torch_xla.device(), xm.get_ordinal()
    wrapper = (lambda m, *args, **kwargs: FSDP(checkpoint_module(m), *args, **kwargs)) if checkpoints else None
    model = FSDP(resnet(), auto_wrap_policy=POLICIES[policy], auto_wrapper_callable=wrapper, flatten_parameters=flatten)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses = []
    model.train()
    for step in range(6):
        data, target = (sharded.from_ranks(lambda r, k=k, step=step: images(step, r)[k], ("dp",)) for k in range(2))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        xm.mark_step()
        losses.append(xm.mesh_reduce("loss", loss.item(), lambda values: sum(values) / len(values)))
    assert losses[-1] < 0.8 * losses[0]
    ckpt = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata(), "optimizer": optimizer.state_dict()}
    xm.save(ckpt, f"{tmp_path}/final_ckpt_rank-{rank}-of-{xm.xrt_world_size()}.pth", master_only=False)
    xm.rendezvous("saved")
    joined, _ = consolidate_sharded_model_checkpoints(f"{tmp_path}/final_ckpt", "_rank-*-of-*.pth")
    plain = resnet()
    plain.load_state_dict(joined)
    plain.eval()
    model.eval()
    test = images(99, 0)[0]
    with torch.no_grad():
        torch.testing.assert_close(model(test.to(device)).cpu(), plain(test), rtol=1e-3, atol=1e-4)

"""What a forward reads between its layers is part of the traced model: a pipeline says so when a script sets it later."""

from __future__ import annotations

import pytest
import torch
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn

from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import Layer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.scale, self.steps = 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x.square().mean()


def test_changes_are_said_once(nxd: Nxd, caplog: pytest.LogCaptureFixture) -> None:
    nxd(2, pp=2)
    model = Model()
    pipeline = NxDPPModel(model, Layer, output_loss_value_spec=True, input_names=["x"], auto_partition=True)
    for step in range(3):
        model.steps = step  # forward does not read it
        pipeline.run_train(x=torch.ones(2, 4))
    assert not caplog.records
    model.layers[0].register_forward_hook(lambda module, args, out: 2 * out)  # layers are called
    for scale in (1.5, 2.0):
        model.scale = scale
        pipeline.run_train(x=torch.ones(2, 4))
    (record,) = caplog.records
    assert "Model.scale was 1.0 when the pipeline was cut, and is 1.5 now" in record.getMessage()
    model.register_forward_pre_hook(lambda module, args: None)
    for _ in range(2):
        pipeline.run_train(x=torch.ones(2, 4))
    assert "Model has other forward hooks than those that ran" in caplog.records[1].getMessage()
    assert len(caplog.records) == 2

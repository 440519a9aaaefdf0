"""`torch_xla.stablehlo`: programs of `torch.export` as StableHLO."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch_xla.stablehlo
from torch import nn
from torch_xla.stablehlo import StableHLOExportOptions, StableHLOGraphModule, exported_program_to_stablehlo


class Tagger(nn.Module):
    """It makes tensors on the CPU, and holds constants, as models that were written for it do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(8, 4), nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = self.words(ids) + self.places(torch.arange(ids.shape[1])) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        found = self.norm(found.mean(1))
        return {"hidden": found if scale is None else found * scale, "first": found.argmax(-1)}


def test_an_exported_program() -> None:
    model = Tagger().eval()
    ids = torch.tensor([[1, 5, 2], [0, 3, 7]])
    scale = torch.full((4,), 2.0)
    exported = torch.export.export(model, (ids,), {"scale": scale})
    program = exported_program_to_stablehlo(exported)
    found = program(ids, scale=scale)
    expected = model(ids, scale)
    torch.testing.assert_close(found["hidden"].cpu(), expected["hidden"].detach())
    assert found["first"].tolist() == expected["first"].tolist()
    text = program.get_stablehlo_text()
    assert "func.func public @main(%arg0: tensor<8x4xf32>" in text and "tensor<2x3xi64>" in text
    assert program.get_stablehlo_bytecode("forward").startswith(b"ML\xefR")
    assert next(iter(exported.state_dict.values())).device.type == "cpu"


def test_other_arguments_and_errors(tmp_path: pathlib.Path) -> None:
    exported = torch.export.export(nn.Linear(3, 1), (torch.ones(2, 3),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    wide = exported_program_to_stablehlo(exported, StableHLOExportOptions(override_tracing_arguments=(torch.ones(5, 3),)))
    assert "tensor<5x1xf32>" in wide.get_stablehlo_text()
    with pytest.raises(ValueError, match="has the method 'forward', got 'backward'"):
        wide.get_stablehlo_text("backward")
    exported.example_inputs = None
    with pytest.raises(ValueError, match="no example inputs: give StableHLOExportOptions"):
        exported_program_to_stablehlo(exported)
    for call in (
        lambda: wide.save(tmp_path),
        lambda: StableHLOGraphModule.load(tmp_path),
        lambda: torch_xla.stablehlo.save_as_stablehlo(exported, tmp_path),
        lambda: torch_xla.stablehlo.save_torch_model_as_stablehlo(nn.Linear(3, 1), (torch.ones(2, 3),), tmp_path),
    ):
        with pytest.raises(NotImplementedError, match=r"folders of torch_xla are neither written nor read.*torch\.jit\.save"):
            call()


def test_dims_that_vary_have_the_example_sizes() -> None:
    net = torch.nn.Linear(4, 2)
    program = torch.export.export(net, (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    with pytest.warns(UserWarning, match="has dims that vary .*override_tracing_arguments"):
        made = exported_program_to_stablehlo(program)
    assert "tensor<3x4xf32>" in made.get_stablehlo_text()
    torch.testing.assert_close(made(torch.ones(5, 4)).cpu(), net(torch.ones(5, 4)).detach())
    options = StableHLOExportOptions(override_tracing_arguments=(torch.ones(5, 4),))
    assert "tensor<5x4xf32>" in exported_program_to_stablehlo(program, options).get_stablehlo_text()

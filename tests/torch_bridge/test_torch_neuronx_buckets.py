"""`bucket_model_trace`, the classes of the Neuron runtime, and operators that the original has kernels for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_neuronx
from torch import nn
from torch_neuronx.xla_impl import ops

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")


def shortest(
    tensors: list[torch.Tensor], lengths: torch.Tensor, factor: float, names: list[str]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The smallest bucket that is long enough; others are refused by their shape."""
    bucket = (lengths < tensors[0].shape[1]).sum()
    padded = torch.zeros(tensors[0].shape[0], int(lengths[bucket]))
    padded[:, : tensors[0].shape[1]] = tensors[0] * factor * len(names)
    return [padded], bucket


class Length(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.w = nn.Parameter(torch.randn(3))
        self.register_buffer("calls", torch.zeros(1))
        self.length = length

    def forward(self, x: torch.Tensor) -> Any:
        assert x.shape[1] == self.length
        return x.sum(1, keepdim=True) * self.w, self.calls + 1


def test_buckets(tmp_path: Path) -> None:
    lengths = torch.tensor([2, 5])
    kwargs = [{"length": 2}, {"length": 5}]
    constants = (lengths, 0.5, ["a", "b"])
    config = torch_neuronx.BucketModelConfig(lambda: torch.jit.script(shortest), bucket_kernel_constant_args=constants, func_kwargs=kwargs)

    def make(length: int) -> Any:
        module = Length(length)
        return module, {module.calls: 1}

    traced = torch_neuronx.bucket_model_trace(make, [torch.ones(1, 2), torch.ones(1, 5)], config)
    assert config.bucket_degree == 2 and config.get_func_kwargs_for_bucket_rank(1) == {"length": 5}
    torch.jit.save(traced, tmp_path / "a.pt")
    for model in (copy.deepcopy(traced), traced, torch.jit.load(tmp_path / "a.pt")):
        for length in (1, 2, 3, 5):
            x = torch.randn(1, length)
            torch.testing.assert_close(model(x)[0], x.sum(1, keepdim=True) * Length(2).w.detach())
        assert model.programs.read("calls", 0).item() == 4.0  # one state for all
    assert config.get_func_kwargs_for_bucket_rank(0) is not kwargs[0]
    for call in (torch_neuronx.dynamic_batch, torch_neuronx.DataParallel):
        with pytest.raises(
            NotImplementedError, match=f"{call.__name__}.* is for models without buckets: let the bucket kernel pad the batch, too"
        ):
            call(traced)
    assert torch_neuronx.DataParallel(traced, set_dynamic_batching=False)(torch.ones(1, 2))[0].shape == (1, 3)
    shared = torch_neuronx.BucketModelConfig(print, func_kwargs={"a": 1})
    assert (
        shared.get_func_kwargs_for_bucket_rank(5) == {"a": 1}
        and torch_neuronx.BucketModelConfig(print).get_func_kwargs_for_bucket_rank(0) == {}
    )


def test_a_bucket_that_is_not_there() -> None:
    def fourth(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return tensors, torch.tensor(3)

    config = torch_neuronx.BucketModelConfig(lambda: torch.jit.script(fourth))
    traced = torch_neuronx.bucket_model_trace(lambda: nn.Linear(2, 2), [torch.ones(1, 2)], config)
    with pytest.raises(ValueError, match="the bucket kernel chose bucket 3, and there are buckets 0 to 0"):
        traced(torch.ones(1, 2))


def test_bucket_kernels_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bucket_kernel must be a function that returns a torch\.jit\.script function, got NoneType"):
        torch_neuronx.BucketModelConfig(None)
    plain = torch_neuronx.BucketModelConfig(lambda: lambda tensors: (tensors, 0))
    traced = torch_neuronx.bucket_model_trace(lambda: nn.Linear(2, 2), [torch.ones(1, 2)], plain)
    assert traced(torch.ones(1, 2)).shape == (1, 2)
    with pytest.raises(ValueError, match=r"the bucket kernel is function: to save the model it must be a torch\.jit\.script function"):
        torch.jit.save(traced, tmp_path / "a.pt")
    odd = torch_neuronx.BucketModelConfig(lambda: torch.jit.script(shortest), bucket_kernel_constant_args=({1: 2},))
    traced = torch_neuronx.bucket_model_trace(lambda: nn.Linear(2, 2), [torch.ones(1, 2)], odd)
    with pytest.raises(ValueError, match="bucket_kernel_constant_args may be tensors, numbers, texts and lists of these, got dict"):
        torch.jit.save(traced, tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="example_inputs must be a list with the inputs of each bucket"):
        torch_neuronx.bucket_model_trace(lambda: nn.Linear(2, 2), [], plain)


# -- the runtime's classes and operators ---------------------------------------------------------------


def test_classes_of_the_runtime() -> None:
    runtime = torch.classes.neuron.Runtime()
    runtime.initialize()
    runtime.set_default_neuron_cores(0, 1)
    runtime.unsafe_close()
    with pytest.raises(
        RuntimeError, match=r"torch\.classes\.neuron\.SPMDModel runs NEFF files on Neuron hardware: use neuronx_distributed\.ModelBuilder"
    ):
        torch.classes.neuron.SPMDModel()


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators(dtype: torch.dtype) -> None:
    x, w = torch.randn(3, 8).to(dtype), torch.rand(8).to(dtype)

    def all_of(x: torch.Tensor) -> Any:
        return (
            ops.RmsNorm.apply(x, w.to(x.device), 1e-6, 1),
            ops.Softmax.apply(x, -1),
            ops.Argmax.apply(x, dim=1),
            ops.TopK.apply(x, 2, dim=1),
        )

    norm, softmax, argmax, (values, indices) = torch_neuronx.trace(all_of, x)(x)
    wide = x.float()
    wanted = (wide / (wide.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()).to(dtype) * w
    torch.testing.assert_close(norm, wanted)
    torch.testing.assert_close(softmax, torch.softmax(x, -1))
    assert torch.equal(argmax, x.argmax(1)) and torch.equal(values, x.topk(2).values) and torch.equal(indices, x.topk(2).indices)
    across = ops.RmsNorm.apply(wide, torch.rand(3), 0.0, 0)
    assert across.shape == (3, 8)


class Scaled(nn.Module):
    def __init__(self, scale: float, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_buckets_of_other_values() -> None:
    """A buffer that no state dict holds is each bucket's own; weights are shared by name, and must be equal."""
    lengths = torch.tensor([2, 5])
    kwargs = [{"scale": 1.0}, {"scale": 3.0}]
    examples = [torch.ones(1, 2), torch.ones(1, 5)]
    config = torch_neuronx.BucketModelConfig(
        lambda: torch.jit.script(shortest), bucket_kernel_constant_args=(lengths, 1.0, ["a"]), func_kwargs=kwargs
    )
    traced = torch_neuronx.bucket_model_trace(lambda scale: Scaled(scale, persistent=False), examples, config)
    assert traced(torch.ones(1, 2)).tolist() == [[1.0, 1.0]] and traced(torch.ones(1, 5)).tolist() == [[3.0] * 5]
    with pytest.raises(
        ValueError, match="scale of bucket 1 has other values than in the buckets before, and buckets share weights by name: have the"
    ):
        torch_neuronx.bucket_model_trace(lambda scale: Scaled(scale, persistent=True), examples, config)

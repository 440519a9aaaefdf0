"""Quantized layers in an abstract run: the bytes that arithmetic says, on a machine that is not there."""

from __future__ import annotations

import neuronx_distributed
import torch

import nxd_jax
from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization.quantize import convert
from tests.nxd_jax.quantization.test_traced import MLP


class Parallel(MLP):
    def __init__(self) -> None:
        super().__init__(parallel=True)


def test_bytes_of_a_core() -> None:
    with nxd_jax.abstract_run(instance="trn1.32xlarge") as run:
        sizes = neuronx_distributed.neuronx_distributed_config(tensor_parallel_size=8)
        model = neuronx_distributed.initialize_parallel_model(sizes, Parallel).eval()
        convert(model, config.get_default_per_channel_custom_qconfig_dict(), inplace=True, quantize_weights=True)
        with torch.no_grad():
            out = model(torch.zeros(2, 8).to("xla"))
        report = run.report()
    weights, scales, bias = 2 * 8 * 16 // 8, 16 // 8 + 8, 8
    assert report.kinds["parameter"] == weights + 4 * (scales + bias) and out.shape == (2, 8)

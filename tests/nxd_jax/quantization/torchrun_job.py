"""Quantized layers on two tensor parallel ranks, in this process or in one of two: `torchrun torchrun_job.py FOLDER` keeps what each process has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nxd_jax.quantization import quantization_config as config
from nxd_jax.quantization.quantize import convert
from nxd_jax.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

SCHEMES: dict[str, Any] = {
    "int8 tensor": config.get_default_custom_qconfig_dict(),
    "float8 channel": {**config.get_default_per_channel_custom_qconfig_dict(), "quantized_dtype": torch.float8_e4m3fn},
}


def results() -> dict[str, torch.Tensor]:
    """By scheme: what a column and a row layer give, both quantized from the same weights."""
    found = {}
    for name, q_config in SCHEMES.items():
        torch.manual_seed(0)
        layers = ColumnParallelLinear(8, 16, gather_output=False), RowParallelLinear(16, 8, input_is_parallel=True)
        model = convert(torch.nn.Sequential(*layers).to("xla"), q_config, quantize_weights=True)
        found[name] = model(torch.linspace(-1, 1, 24).reshape(3, 8).to("xla")).detach().cpu()
    return found


if __name__ == "__main__":
    import torch_bridge.torch_xla.distributed.xla_backend  # noqa: F401
    from nxd_jax.parallel_layers import parallel_state

    dist.init_process_group("xla")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.save(results(), Path(sys.argv[1]) / f"{dist.get_rank()}.pt")

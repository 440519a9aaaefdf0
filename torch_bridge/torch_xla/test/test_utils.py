"""`torch_xla.test.test_utils`: helpers that example scripts print their progress with."""

from __future__ import annotations

import time
import unittest
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_bridge.torch_xla.core import xla_model as xm
from torch_bridge.torch_xla.debug import metrics as met

if TYPE_CHECKING:
    from torch.types import Device


def now(format: str = "%H:%M:%S") -> str:
    """`test_utils.now`: the time of day."""
    return time.strftime(format)


def print_training_update(
    device: Device, step: int, loss: object, rate: float, global_rate: float, epoch: int | None = None, summary_writer: Any = None
) -> None:
    """`test_utils.print_training_update`: one line on a training step; rates in samples per second."""
    value = loss.item() if hasattr(loss, "item") else loss
    where = f"{xm.xla_real_devices([device])[0] if str(device).startswith('xla') else device}"
    _say(
        f"| Training Device={where} Epoch={epoch} Step={step} Loss={value:.5f} Rate={rate:.2f} GlobalRate={global_rate:.2f} Time={now()}"
        if epoch is not None
        else f"| Training Device={where} Step={step} Loss={value:.5f} Rate={rate:.2f} GlobalRate={global_rate:.2f} Time={now()}"
    )
    if summary_writer is not None:
        write_to_summary(summary_writer, dict_to_write={"examples/sec": rate, "average_examples/sec": global_rate})


def print_test_update(device: Device, accuracy: float | None, epoch: int | None = None, step: int | None = None) -> None:
    """`test_utils.print_test_update`: one line on an evaluation."""
    parts = {"Epoch": epoch, "Step": step, "Accuracy": None if accuracy is None else f"{accuracy:.2f}"}
    _say(f"| Test Device={device} " + " ".join(f"{k}={v}" for k, v in parts.items() if v is not None) + f" Time={now()}")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def get_summary_writer(logdir: str | None) -> Any:
    """`test_utils.get_summary_writer`: a TensorBoard writer on rank 0 if `logdir` is given, else None."""
    if not logdir or not xm.is_master_ordinal(local=False):
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(logdir)


def write_to_summary(
    summary_writer: Any, global_step: int | None = None, dict_to_write: dict[str, Any] | None = None, write_xla_metrics: bool = False
) -> None:
    """`test_utils.write_to_summary`: scalars, and the bridge's counters if `write_xla_metrics`. Does nothing without a writer."""
    if summary_writer is None:
        return
    for name, value in (dict_to_write or {}).items():
        summary_writer.add_scalar(name, value, global_step)
    if write_xla_metrics:
        for name in met.counter_names():
            summary_writer.add_scalar(f"counters/{name}", met.counter_value(name), global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """`test_utils.close_summary_writer`."""
    if summary_writer is not None:
        summary_writer.close()


def mp_test(func: Callable[..., Any]) -> Callable[..., Any]:
    """`test_utils.mp_test`: a test that upstream runs in processes of its own; runs here in this one."""
    return func


def skipIfCUDA(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`test_utils.skipIfCUDA`: skip where JAX computes on a GPU."""
    import jax

    return unittest.skipIf(jax.default_backend() == "gpu", reason)

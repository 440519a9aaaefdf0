"""`neuronx_distributed_training.optim`: optimizers and schedules of learning rates by name."""

from typing import Any

from nxd_jax.training.optim.registry import get_optimizer, make_scheduler, register_optimizer, register_scheduler

__all__ = ["get_optimizer", "prepare_lr_scheduler", "register_optimizer", "register_scheduler"]


def prepare_lr_scheduler(optimizer: Any, scheduler_config: Any, train_dataloader: Any = None) -> dict[str, Any]:
    """`nemo.core.optim.prepare_lr_scheduler`: a schedule as Lightning takes it, one step of it for each of the optimizer's. train_dataloader: not needed."""
    return {"scheduler": make_scheduler(optimizer, dict(scheduler_config)), "interval": "step", "frequency": 1}

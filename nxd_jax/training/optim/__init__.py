"""`neuronx_distributed_training.optim`: optimizers and schedules of learning rates by name."""

from typing import Any

from nxd_jax.training.optim.registry import EACH_EPOCH, get_optimizer, make_scheduler, register_optimizer, register_scheduler

__all__ = ["get_optimizer", "prepare_lr_scheduler", "register_optimizer", "register_scheduler"]


def prepare_lr_scheduler(optimizer: Any, scheduler_config: Any, train_dataloader: Any = None) -> dict[str, Any]:
    """`nemo.core.optim.prepare_lr_scheduler`: a schedule as Lightning takes it, one step of it for each of the optimizer's, or (`registry.EACH_EPOCH`) at the
    end of each epoch. train_dataloader: not needed."""
    interval = "epoch" if scheduler_config.get("name") in EACH_EPOCH else "step"
    return {"scheduler": make_scheduler(optimizer, dict(scheduler_config)), "interval": interval, "frequency": 1}

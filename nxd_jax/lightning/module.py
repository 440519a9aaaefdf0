"""`neuronx_distributed.lightning.NeuronLTModule`: a LightningModule whose model is made by `initialize_parallel_model`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from nxd_jax.lightning._values import to_log
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.trainer import building, initialize_parallel_model, initialize_parallel_optimizer
from nxd_jax.utils import _device
from torch_bridge import nested
from torch_bridge.mesh import rank_numbers, world

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike

logger = logging.getLogger("nxd_jax")

_PREFIX = "model."
_NO_DECAY = ("bias", "norm", "LayerNorm")


class NeuronLTModule(LightningModule):
    """`neuronx_distributed.lightning.NeuronLTModule`: derive from it and write `training_step`.

    model_fn(*model_args, **model_kwargs): makes the model, at the beginning of `fit`, `validate`, ..., as `initialize_parallel_model` does; `self.model`. A
    subclass that overrides `setup` may leave it out. nxd_config: of `neuronx_distributed_config`. opt_cls, opt_args, opt_kwargs: the optimizer.
    scheduler_cls(optimizer, *scheduler_args, **scheduler_kwargs): called by the default `configure_optimizers`; None: no scheduler. grad_accum_steps,
    train_batch_size, logging_interval, log_rank0: kept as attributes for your `training_step`. manual_opt=False: Lightning's automatic optimization
    (`Trainer(accumulate_grad_batches=, gradient_clip_val=)` then work as they do elsewhere). NxD does not support that.

    Set up for you: `averaged_loss` (zeros, shape [1], float64, on the device), `should_print` (False), `print_pp_rank`, and `loss`, `lr`, `input_ids` and
    `global_norm` (None until you set them). Names of parameters and the state dict are the model's own, without "model.", which
    stays where another module of this one has the name.
    """

    model: Any

    runs_backward = False
    """Whether `training_step` itself runs backward passes and zeroes gradients before, so that of automatic optimization only the optimizer's step is left
    (`neuronx_distributed_training`)."""

    def __init__(
        self,
        nxd_config: dict[str, Any] | None = None,
        opt_cls: Any = None,
        scheduler_cls: Callable[..., Any] | None = None,
        model_args: tuple[Any, ...] = (),
        model_kwargs: Mapping[str, Any] | None = None,
        opt_args: tuple[Any, ...] = (),
        opt_kwargs: Mapping[str, Any] | None = None,
        scheduler_args: tuple[Any, ...] = (),
        scheduler_kwargs: Mapping[str, Any] | None = None,
        model_fn: Callable[..., Any] | None = None,
        grad_accum_steps: int = 1,
        train_batch_size: int = 16,
        logging_interval: int = 1,
        log_rank0: bool = False,
        manual_opt: bool = True,
    ):
        super().__init__()
        if nxd_config is not None:
            building.check_config(nxd_config)
        if isinstance(grad_accum_steps, bool) or not isinstance(grad_accum_steps, int) or grad_accum_steps < 1:
            raise ValueError(f"grad_accum_steps must be a positive number, got {grad_accum_steps!r}")
        self.nxd_config = nxd_config
        self.model = None
        self.model_fn = model_fn
        self.model_args = tuple(model_args)
        self.model_kwargs = dict(model_kwargs or {})
        self.opt_cls = opt_cls
        self.opt_args = tuple(opt_args)
        self.opt_kwargs = dict(opt_kwargs or {})
        self.scheduler_cls = scheduler_cls
        self.scheduler_args = tuple(scheduler_args)
        self.scheduler_kwargs = dict(scheduler_kwargs or {})
        self.grad_accum_steps = grad_accum_steps
        self.train_batch_size = train_batch_size
        self.logging_interval = logging_interval
        self.log_rank0 = log_rank0
        self.automatic_optimization = not manual_opt
        self.should_print = False
        self.loss: Any = None
        self.lr: Any = None
        self.input_ids: Any = None
        self.global_norm: Any = None
        self._made_for: Any = None

    # -- the model ------------------------------------------------------------------------------------

    def setup(self, stage: str | None = None, include_buffers: bool = False) -> None:
        """Make the model, once for a layout of ranks: a second `fit` or a `test` goes on with the model that is there.

        Raises TypeError without nxd_config or model_fn, and RuntimeError if ranks are laid out in another way than when the model was made.
        """
        layout = tuple(world.current().axes.items())
        if self.model is None:
            self.model = self._make(include_buffers)
            self._made_for = layout
        elif self._made_for is not None and self._made_for != layout:
            raise RuntimeError(
                f"this {type(self).__name__}'s model was made for ranks laid out as {dict(self._made_for)}, now they are laid out as {dict(layout)}: make a "
                f"new {type(self).__name__}, and pass ckpt_path= to take over what was trained"
            )
        self.averaged_loss = torch.zeros(1, dtype=torch.double).to(_device.get_device())
        self.print_pp_rank = 0 if self.log_rank0 else parallel_groups.size("pp") - 1

    def _make(self, include_buffers: bool) -> Any:
        for name in ("nxd_config", "model_fn"):
            if getattr(self, name) is None:
                raise TypeError(
                    f"{type(self).__name__} has no {name}: pass {name}= to NeuronLTModule.__init__ or override setup(stage) to set self.model"
                )
        assert self.model_fn is not None and self.nxd_config is not None
        return initialize_parallel_model(
            self.nxd_config, self.model_fn, *self.model_args, include_buffers=include_buffers, **self.model_kwargs
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.model(*args, **kwargs)

    # -- the optimizer --------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """An optimizer from `initialize_parallel_optimizer` on `get_param_groups_by_weight_decay()`, and a scheduler for each step if there is a class."""
        for name in ("opt_cls", "nxd_config"):
            if getattr(self, name) is None:
                raise TypeError(f"{type(self).__name__} has no {name}: pass it to NeuronLTModule.__init__ or override configure_optimizers")
        assert self.opt_cls is not None and self.nxd_config is not None
        groups = self.get_param_groups_by_weight_decay()
        optimizer = initialize_parallel_optimizer(self.nxd_config, self.opt_cls, groups, *self.opt_args, **self.opt_kwargs)
        optimizer.zero_grad()
        if self.scheduler_cls is None:
            return [optimizer]
        scheduler = self.scheduler_cls(optimizer, *self.scheduler_args, **self.scheduler_kwargs)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def get_param_groups_by_weight_decay(self) -> list[dict[str, Any]]:
        """Two groups: weights with a weight decay of 0.01; biases and norms without. Override it for others."""
        named = list(self.model.named_parameters())
        plain = [p for name, p in named if not any(part in name for part in _NO_DECAY)]
        others = [p for name, p in named if any(part in name for part in _NO_DECAY)]
        return [{"params": plain, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """`Trainer(gradient_clip_val=...)`, with automatic optimization: the optimizer from `initialize_parallel_optimizer` clips to it in its step, in place
        of `max_grad_norm`. Without an optimizer it does nothing. (NxD: never does anything.)
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """`LightningModule.clip_gradients`; without an optimizer it does nothing. (NxD: never does anything.)"""
        if optimizer is not None:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # -- logging --------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """`LightningModule.log`. Numbers stay on the host; tensors on the device are read only when somebody looks at them."""
        now = prog_bar or (logger is not False and not on_epoch and self._logs_in_this_step())
        super().log(
            name,
            to_log(value, sync_dist, now),
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            enable_graph,
            sync_dist,
            sync_dist_group,
            add_dataloader_idx,
            batch_size,
            metric_attribute,
            rank_zero_only,
        )

    def all_gather(self, data: Any, group: GroupLike = None, sync_grads: bool = False) -> Any:
        """`LightningModule.all_gather`: nested tensors and numbers of all ranks, or of those of a process group, side by side along dim 0."""
        numbers = [torch.zeros((), dtype=torch.double, device="xla") + n for n in nested.collect(data, rank_numbers.is_ranked)]
        return super().all_gather(nested.replace(data, rank_numbers.is_ranked, numbers), group, sync_grads)

    def _logs_in_this_step(self) -> bool:
        trainer = self._trainer
        return trainer is not None and trainer.training and bool(trainer._logger_connector.should_update_logs)

    # -- names as the model has them ------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The model's names (and those of other modules of this one)."""
        found = list(super().named_parameters(*args, **kwargs))
        yield from zip(_without_prefix([name for name, _ in found]), [parameter for _, parameter in found], strict=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's state with the model's names (and that of other modules of this one)."""
        found = super().state_dict(*args, **kwargs)
        renamed = dict(zip(_without_prefix(found), list(found.values()), strict=True))
        found.clear()
        found.update(renamed)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict()` gave, or a state dict with names that begin with "model."."""
        names = list(super().state_dict())
        own = dict(zip(_without_prefix(names), names, strict=True))
        return super().load_state_dict({own.get(name, name): value for name, value in state_dict.items()}, strict=strict, assign=assign)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: object, *args: Any, **kwargs: Any) -> Any:
        """Not possible: the model is made when a Trainer lays out the ranks."""
        raise MisconfigurationException(
            f"{cls.__name__}.load_from_checkpoint: the model is made once a Trainer has laid out the ranks. Make the module as for training and pass "
            f"ckpt_path={str(checkpoint_path)!r} to trainer.fit, validate, test or predict, or call neuronx_distributed.load_checkpoint(folder, tag, model=...)"
        )


def _without_prefix(names: Iterable[str]) -> list[str]:
    """Names without "model.", where that leaves a name that no other module has."""
    found = list(names)
    others = {name for name in found if not name.startswith(_PREFIX)}
    return [name if (plain := name.removeprefix(_PREFIX)) in others else plain for name in found]

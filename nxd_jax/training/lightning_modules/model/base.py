"""`neuronx_distributed_training.lightning_modules.model.base`: the module that a YAML file trains.

A step: gradients to zero, forward and backward of all micro-batches (`forward_backward_step`), then Lightning has the optimizer step. What is logged is of
the step that it is logged for. (The original logs the gradient norm of the step before.)
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn

from nxd_jax.lightning.module import NeuronLTModule
from nxd_jax.tensor_parallel import casting, grads, parallel_groups, regions
from nxd_jax.tensor_parallel.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.trainer import building, initialize_parallel_optimizer, neuronx_distributed_config
from nxd_jax.training import environment
from nxd_jax.training.batch_sizes import BatchSizes
from nxd_jax.training.config.loading import plain
from nxd_jax.training.lightning_modules.model import adapters, log_hook
from nxd_jax.training.lightning_modules.model.micro_batches import MicroBatches
from nxd_jax.training.lightning_modules.model.spikes import SpikeWatch
from nxd_jax.training.optim import prepare_lr_scheduler
from nxd_jax.training.optim.registry import get_optimizer, optimizer_options, options_of
from nxd_jax.training.seeding import seed_everything
from nxd_jax.training.utils.mfu import mfu
from nxd_jax.training.utils.throughput import Throughput
from nxd_jax.training.utils.utils import get_attribute_from_cfg

logger = logging.getLogger("nxd_jax")


@dataclass
class _Logged:
    """What is to be logged of the step under way."""

    loss: torch.Tensor
    metrics: dict[str, Any]
    lr: float
    global_step: float
    consumed_samples: float


class BaseModelModule(NeuronLTModule):
    """`BaseModelModule(cfg, trainer, no_lm_init=True)`: subclasses write `build_model` and `setup_optimizer_param_groups`, for pipelines `init_weights`.

    cfg: the whole configuration. no_lm_init: accepted without effect.

    Attributes: `config` (cfg), `trainer`, `nxd_config` (of `neuronx_distributed_config`; `build_model` completes its "activation_checkpoint_config" and
    "pipeline_config"), `num_microbatches`, `model`, `throughput`, `log_parameter_norm`, `log_gradient_norm`, `save_logits`,
    `validation_step_outputs` (of the validation under way: ((loss [1], metrics or None), rows) for each batch).

    Hooks that subclasses may override: `_validate_and_override_config`, `get_batch_length`, `process_global_batch`, `get_batch_iterator`,
    `model_fwd_calc_loss` and `forward_backward_step` (which return a loss, or a loss and a dict of metrics), `log_metrics`, `calculate_parameter_norm`,
    `reduce_loss_from_context_parallel_group`, `configure_optimizers`.

    Raises ValueError for batch sizes that do not fit the ranks, and what `neuronx_distributed_config` raises.
    """

    runs_backward = True
    trainer: Any

    def __init__(self, cfg: DictConfig, trainer: Any, no_lm_init: bool = True):
        super().__init__(manual_opt=False)
        self.config = cfg
        self.trainer = trainer
        self.save_hyperparameters({"cfg": plain(cfg)})
        self.num_microbatches = BatchSizes.of(cfg, trainer.world_size).num_microbatches
        self.log_parameter_norm = bool(cfg.exp_manager.get("log_parameter_norm", False))
        self.log_gradient_norm = bool(cfg.exp_manager.get("log_gradient_norm", False))
        self.save_logits = bool(cfg.model.get("save_logits", False))
        self.throughput = Throughput(10)
        self.init_global_step = 0
        self._spikes = SpikeWatch()
        self._logged: _Logged | None = None
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._options: list[dict[str, Any]] = []
        self._optimizer_param_groups: list[dict[str, Any]] = []
        self.validation_step_outputs: list[Any] = []
        self._validate_and_override_config()
        self._initialize_nxd_config()
        assert self.nxd_config is not None
        building.lay_out(self.nxd_config)
        seed_everything(cfg.get("seed"))

    # -- configuration --------------------------------------------------------------------------------

    def _validate_and_override_config(self) -> None:
        """For subclasses: refuse what does not go together, change what follows from something else."""

    def _size(self, name: str) -> int:
        return int(get_attribute_from_cfg(self.config, f"distributed_strategy.{name}", 1) or 1)

    def _initialize_nxd_config(self) -> None:
        """From `distributed_strategy`, `precision` and `trainer` to `nxd_config`."""
        strategy, pp = self.config.distributed_strategy, self._size("pipeline_model_parallel_size")
        zero1 = bool(strategy.get("zero1", True))
        clip = self.trainer.gradient_clip_val or None  # 0 is Lightning's "no clipping"
        self.nxd_config = neuronx_distributed_config(
            tensor_parallel_size=self._size("tensor_model_parallel_size"),
            pipeline_parallel_size=pp,
            context_parallel_size=self._size("context_parallel_size"),
            expert_parallel_size=self._size("expert_model_parallel_size"),
            optimizer_config={"zero_one_enabled": zero1, "grad_clipping": clip is not None, "max_grad_norm": clip},
            sequence_parallel=bool(strategy.get("sequence_parallel", False)),
            pipeline_config=self._pipeline_config(zero1) if pp > 1 else {},
            model_init_config={"meta_device_init": True, "param_init_fn": self.init_weights} if pp > 1 else None,
            mixed_precision_config=self._mixed_precision(zero1),
            lora_config=self._lora_config(),
        )

    def _pipeline_config(self, zero1: bool) -> dict[str, Any]:
        cuts = self.config.model.get("pipeline_cuts")
        return {
            "num_microbatches": self.num_microbatches,
            "auto_partition": not cuts,
            "pipeline_cuts": list(cuts) if cuts else None,
            "autowrap_modules": [regions],
            "use_zero1_optimizer": zero1,
            "use_optimizer_wrapper": True,
            "use_model_wrapper": True,
            "return_loss_on_cpu": False,
            "broadcast_and_average_loss": True,
            "virtual_pipeline_size": self._size("virtual_pipeline_model_parallel_size"),
        }

    def _mixed_precision(self, zero1: bool) -> dict[str, bool]:
        precision = environment.precision_of(self.config)
        manual = environment.precision_type(self.config) == "manual"
        adds = bool(self.config.precision.get("fp32_grad_acc", False)) if manual else precision.masters
        in_checkpoint = (self.config.exp_manager.get("checkpoint_callback_params") or {}).get("use_master_weights_in_ckpt", False)
        if not zero1 and (precision.masters or adds or in_checkpoint):
            logger.warning(
                "precision.type %s keeps float32 master weights in the ZeRO-1 optimizer, and distributed_strategy.zero1 is False: weights are updated in the "
                "precision that they have on the device. Set distributed_strategy.zero1=True, or precision.type=fp32",
                self.config.precision.get("type"),
            )
        return {
            "use_master_weights": zero1 and precision.masters,
            "use_fp32_grad_acc": zero1 and adds,
            "use_master_weights_in_ckpt": zero1 and bool(in_checkpoint),
        }

    def _lora_config(self) -> Any:
        """Of `model_alignment_strategy.peft`; None without. Raises ValueError for what adapters cannot be trained with."""
        if get_attribute_from_cfg(self.config, adapters.PEFT) is None:
            return None
        if bool(self.config.distributed_strategy.get("zero1", True)):
            raise ValueError(
                "distributed_strategy.zero1 must be False with LoRA (model_alignment_strategy.peft): adapters are small, and each rank holds their state"
            )
        return adapters.lora_config(self.config)

    # -- the model ------------------------------------------------------------------------------------

    def build_model(self) -> Any:
        """Return `neuronx_distributed.initialize_parallel_model(self.nxd_config, model_fn, ...)`."""
        raise NotImplementedError(
            f"{type(self).__name__} must override build_model(): return initialize_parallel_model(self.nxd_config, ...)"
        )

    def _make(self, include_buffers: bool) -> Any:
        return self.build_model()

    def setup(self, stage: str | None = None, include_buffers: bool = False) -> None:
        """Make the model, once."""
        super().setup(stage, include_buffers)
        self.init_global_step = self.trainer.global_step

    def init_weights(self, module: nn.Module, device: Any = None) -> None:
        """Fill a module's own parameters after a pipeline was cut on the meta device; overrides end with `super().init_weights(module, device)`.

        Raises NotImplementedError for a module with parameters that is neither a parallel layer nor torch's Linear.
        """
        if hasattr(module, "init_weight_cpu"):
            module.init_weight_cpu()  # type: ignore[operator]
            _zero_bias(module)
        elif isinstance(module, GQAQKVColumnParallelLinear):
            module.initialize_weight_biases()
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=float(getattr(getattr(self, "model_config", None), "initializer_range", 0.02)))
            _zero_bias(module)
        elif len(module._parameters):
            raise NotImplementedError(
                f"{type(module).__name__} has parameters that were made on the meta device, and nothing fills them: override init_weights(module, device) "
                f"in {type(self).__name__} for it, and call super().init_weights for others"
            )

    # -- a step ---------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        self.init_global_step = self.trainer.global_step
        self.throughput.set_seqs_per_iteration(
            int(self.config.data.micro_batch_size), parallel_groups.size("dp"), self.get_num_microbatches()
        )
        self.throughput.start()
        if self.init_global_step:
            self._warn_of_kept_options()

    def _warn_of_kept_options(self) -> None:
        """Say which options of the optimizer are a checkpoint's, where the configuration has others."""
        kept: dict[str, Any] = {}
        for said, now in zip(self._options, options_of(self._optimizer, self._options[0] if self._options else ()), strict=False):
            kept |= {name: value for name, value in now.items() if _plain(value) != _plain(said[name])}
        if kept:
            logger.warning(
                "the run goes on with its checkpoint's %s: what model.optim says now has no effect. For that, begin anew with these weights "
                "(exp_manager.resume_from_checkpoint, model.weight_init_only=True, another exp_manager.name)",
                ", ".join(f"{name}={value}" for name, value in kept.items()),
            )

    def on_validation_start(self) -> None:
        self.throughput.pause()

    def on_validation_end(self) -> None:
        self.throughput.go_on()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Loss and gradients of a global batch; Lightning steps the optimizer afterwards. Returns the mean loss over all ranks."""
        self._optimizer.zero_grad()
        with self._autocast():
            loss, metrics = _split(self.forward_backward_step(batch, is_training=True))
            metrics |= self.step_metrics()
        step = self.trainer.global_step
        consumed = self.trainer.datamodule.compute_consumed_samples(step + 1 - self.init_global_step)
        self._logged = _Logged(
            loss=loss,
            metrics=metrics,
            lr=float(self._optimizer.param_groups[0]["lr"]),
            global_step=float(step),
            consumed_samples=float(consumed),
        )
        # numbers of the host, in every step: names of checkpoints need them
        self.log("global_step", float(step), prog_bar=True, rank_zero_only=True)
        self.log("consumed_samples", float(consumed), prog_bar=True, rank_zero_only=True)
        return loss.reshape(())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the step."""
        now, self._logged = self._logged, None
        if now is None:
            return
        throughput = self.throughput.get_throughput()
        self._log_speed(throughput)
        full_log = self._logs_in_this_step()
        norms = self._norms() if full_log else {"grad_norm": None, "param_norm": None}
        if full_log:
            self._spikes.see(int(now.global_step), float(now.loss))
        every_step = {
            "global_step": now.global_step,
            "consumed_samples": now.consumed_samples,
            "throughput": throughput,
            "throughput_peak": self.throughput.throughput_peak,
        }
        numbers = {
            **every_step,
            "log_fn": functools.partial(self._log_once, every_step),
            "loss_mean": now.loss,
            "misc_metrics": now.metrics or None,
            "lr": now.lr,
            "trainer": self.trainer,
        }
        log_hook.call(self.log_metrics, numbers | norms, full_log)

    def _log_once(self, every_step: Mapping[str, float], name: str, value: Any, *args: Any, **options: Any) -> None:
        """`log` for `log_metrics`, but for numbers of `every_step`, which are logged already: a second entry would stay in front of those of later steps."""
        if name not in every_step or float(value) != every_step[name]:
            self.log(name, value, *args, **options)

    def _norms(self) -> dict[str, torch.Tensor | None]:
        """Those that `exp_manager` asks for, by their names in `log_metrics`."""
        return {
            "grad_norm": self._optimizer.grad_norm if self.log_gradient_norm else None,
            "param_norm": self.calculate_parameter_norm(self.parameters()) if self.log_parameter_norm else None,
        }

    def _log_speed(self, throughput: float) -> None:
        """Log what the host knows in every step."""
        self.log("throughput", throughput, prog_bar=True, rank_zero_only=True)
        self.log("throughput_peak", self.throughput.throughput_peak, prog_bar=True, rank_zero_only=True)
        tokens = throughput * self._tokens_per_sample()
        self.log("tokens_per_second", tokens, rank_zero_only=True)
        if (share := mfu(tokens, self.flops_per_token())) is not None:
            self.log("mfu", share, rank_zero_only=True)

    def step_numbers(self) -> dict[str, Any]:
        """What is known of a step before it is logged, by name: callbacks that save at its end ask for it. Empty between steps."""
        now = self._logged
        return {} if now is None else {"reduced_train_loss": now.loss, **now.metrics, "lr": now.lr}

    def step_metrics(self) -> dict[str, Any]:
        """More numbers of a step for the log, by name; called after its backward passes."""
        return {}

    def log_metrics(
        self,
        log_fn: Any,
        loss_mean: torch.Tensor,
        misc_metrics: Mapping[str, Any] | None,
        lr: float,
        global_step: float,
        consumed_samples: float,
        grad_norm: torch.Tensor | None,
        param_norm: torch.Tensor | None,
        throughput: float,
        throughput_peak: float,
        trainer: Any,
    ) -> None:
        """Log a step, with `log_fn(name, value, prog_bar=True, rank_zero_only=True)`; called every `trainer.log_every_n_steps` steps.

        loss_mean: [1], of all ranks. misc_metrics: what hooks returned besides losses, and `step_metrics`, by name; None without any. The norms are None unless
        `exp_manager` asks for them. An override may name any of the arguments, in any order, or take all by position; with an argument full_log it is called
        in every step (`log_hook.call`). What goes into names of checkpoints, and the throughput, is logged whatever an override does.

        Raises TypeError for arguments in the order of the original's first releases, which had no misc_metrics.
        """
        if misc_metrics is not None and not isinstance(misc_metrics, Mapping):
            raise TypeError(
                f"log_metrics: misc_metrics must be a dict or None, got {type(misc_metrics).__name__}: it stands between loss_mean and lr, and there is no "
                f"full_log. Call super().log_metrics({', '.join(log_hook.NEWEST)}), or by these names"
            )
        norms = {"parameter_norm": param_norm, "gradient_norm": grad_norm}
        numbers = {
            "reduced_train_loss": loss_mean,
            **(misc_metrics or {}),
            "lr": lr,
            **{name: value for name, value in norms.items() if value is not None},
            "global_step": global_step,
            "consumed_samples": consumed_samples,
            "throughput": throughput,
            "throughput_peak": throughput_peak,
        }
        for name, value in numbers.items():
            log_fn(name, float(value), prog_bar=True, rank_zero_only=True)

    def flops_per_token(self) -> float | None:
        """Operations of a step for each token (`mfu.flops_per_token`), for the metric `mfu`; None: not known."""
        return None

    def _tokens_per_sample(self) -> int:
        return int(get_attribute_from_cfg(self.config, "model.encoder_seq_length", 0) or 0)

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        if environment.precision_type(self.config) != "autocast":
            yield
            return
        with torch.autocast("xla", dtype=torch.bfloat16):
            yield

    # -- loss and gradients ---------------------------------------------------------------------------

    def get_num_microbatches(self) -> int:
        """Micro-batches of a step on each data-parallel rank."""
        return self.num_microbatches

    def get_batch_length(self, batch: Any) -> int:
        """Rows of a batch."""
        return int(self.trainer.datamodule.get_batch_length(batch))

    def process_global_batch(self, global_batch: Any, global_batch_size: int | None = None) -> Any:
        """The batch as `forward_backward_step` takes it: a dict of tensors with the rows of this data-parallel rank."""
        return global_batch

    def _check_length(self, length: int) -> None:
        """Raise ValueError for sequences of another length than `model.encoder_seq_length`."""
        expected = self.config.model.get("encoder_seq_length")
        if expected is not None and int(expected) != length:
            raise ValueError(
                f"the data has sequences of {length} tokens, and model.encoder_seq_length is {expected}: set it to {length}, or give data of that length"
            )

    def get_batch_iterator(self, batch: Mapping[str, Any]) -> MicroBatches:
        """The micro-batches of a batch, on the device: rows k * micro_batch_size and on.

        Raises ValueError for a batch with too few rows.
        """
        size, count = int(self.config.data.micro_batch_size), self.get_num_microbatches()
        for name, rows in batch.items():
            if len(rows) < size * count:
                raise ValueError(
                    f"a batch has {len(rows)} rows of {name}, and a step needs {size * count} on each data-parallel rank: {count} micro-batches of "
                    f"data.micro_batch_size={size}"
                )
        return MicroBatches.cut({name: rows[: size * count] for name, rows in batch.items()}, size, self.trainer.strategy.root_device)

    def model_fwd_calc_loss(self, batch: Mapping[str, Any]) -> Any:
        """The loss of a micro-batch, or (loss, metrics)."""
        output = self.model(**batch)
        return output[0] if isinstance(output, (tuple, list)) else output.loss

    def forward_backward_step(self, batch: Any, is_training: bool = False) -> Any:
        """Forward and, in training, backward of all micro-batches: (the mean loss over micro-batches and data-parallel ranks [1], metrics or None)."""
        batch = self.process_global_batch(batch)
        if parallel_groups.size("pp") > 1:
            return self._through_pipeline(batch, is_training), None
        loss, metrics = self._micro_batches(batch, is_training)
        return self._mean_over_ranks(loss), metrics and {name: self._mean_over_ranks(value) for name, value in metrics.items()}

    def _micro_batches(self, batch: Any, is_training: bool) -> tuple[torch.Tensor, dict[str, Any] | None]:
        running: Any = None  # no zeros to begin with: the first program would have them in it or not
        total: dict[str, Any] = {}
        parts = self.get_batch_iterator(batch)
        count = self.get_num_microbatches()
        for part in parts:
            with contextlib.nullcontext() if is_training else torch.no_grad():
                loss, metrics = _split(self.model_fwd_calc_loss(part))
            loss = loss.to(casting.wide_dtype()) / count
            if is_training:
                loss.backward()
            running = loss.detach() if running is None else running + loss.detach()
            for name, value in (metrics or {}).items():
                total[name] = total.get(name, 0) + value.detach().float().mean() / count
        return running.reshape(1), total or None

    def _through_pipeline(self, batch: Mapping[str, Any], is_training: bool) -> torch.Tensor:
        """The mean over micro-batches and ranks, on all stages (`broadcast_and_average_loss`)."""
        run = self.model.run_train if is_training else self.model.run_eval
        found = run(**batch)
        loss: torch.Tensor = found[0] if isinstance(found, (tuple, list)) else found
        return loss.detach().reshape(1).to(casting.wide_dtype())

    def _mean_over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Each data-parallel (and context-parallel) rank's loss to the mean of all."""
        self.reduce_loss_from_context_parallel_group(loss)
        if parallel_groups.size("dp") > 1:
            dist.all_reduce(loss, group=parallel_groups.group("dp"))
            loss = loss / parallel_groups.size("dp")
        return loss

    def reduce_loss_from_context_parallel_group(self, running_loss: torch.Tensor) -> None:
        """In place: each context-parallel rank's loss to the mean of all."""
        if parallel_groups.size("cp") > 1:
            dist.all_reduce(running_loss, group=parallel_groups.group("cp"))
            running_loss.div_(parallel_groups.size("cp"))

    def calculate_parameter_norm(self, parameters: Any, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all parameters of the whole model, shape [1]; what several ranks hold alike counts once. (The original counts each
        context-parallel copy.)"""
        return grads.parameter_norm(parameters, norm_type)

    # -- validation -----------------------------------------------------------------------------------

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The mean loss of a batch over all ranks."""
        with self._autocast(), torch.no_grad():
            loss, metrics = _split(self.forward_backward_step(batch, is_training=False))
        self.validation_step_outputs.append(((loss.detach(), metrics or None), self.get_batch_length(batch)))
        return loss

    def on_validation_epoch_start(self) -> None:
        self.validation_step_outputs = []

    def on_validation_epoch_end(self) -> None:
        """Log `val_loss`: the mean over this validation's batches. (The original's mean is over all validations so far.)"""
        self._log_mean("val_loss")

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.validation_step(batch, batch_idx)

    def on_test_epoch_start(self) -> None:
        self.validation_step_outputs = []

    def on_test_epoch_end(self) -> None:
        """Log `test_loss`."""
        self._log_mean("test_loss")

    def _log_mean(self, name: str) -> None:
        if not self.validation_step_outputs:
            return
        mean = torch.stack([loss.reshape(()) for (loss, _), _ in self.validation_step_outputs]).mean()
        self.validation_step_outputs = []
        self.log(name, float(mean), prog_bar=True, sync_dist=True, batch_size=1)

    # -- the optimizer --------------------------------------------------------------------------------

    def setup_optimizer_param_groups(self) -> None:
        """Set `self._optimizer_param_groups`. The default: one group, with the weight decay of `model.optim`."""
        self._optimizer_param_groups = [{"params": [p for p in self.model.parameters() if p.requires_grad]}]

    def _get_parameters(self) -> list[torch.Tensor]:
        """The trainable parameters, from the groups."""
        return [p for group in self._optimizer_param_groups for p in group["params"]]

    def configure_optimizers(self) -> Any:
        """The optimizer that `model.optim` names, in the original's wrapper, and the schedule of learning rates of `model.optim.sched`."""
        self.setup_optimizer_param_groups()
        optim = self.config.model.optim
        kind = get_optimizer(optim["name"])
        assert self.nxd_config is not None
        options = optimizer_options(optim)
        self._optimizer = initialize_parallel_optimizer(self.nxd_config, kind, self._optimizer_param_groups, **options)
        self._scheduler = None
        if optim.get("sched") is not None:
            self._scheduler = prepare_lr_scheduler(self._optimizer, {**plain(optim.sched), "max_steps": self._max_steps()})
        self._options = options_of(self._optimizer, options)
        return self._optimizer if self._scheduler is None else ([self._optimizer], [self._scheduler])

    def _max_steps(self) -> int:
        steps_asked = int(self.trainer.max_steps)
        if steps_asked < 1:
            raise MisconfigurationException(
                f"trainer.max_steps={steps_asked}: model.optim.sched needs the number of steps that training takes; set trainer.max_steps, or take sched out"
            )
        return steps_asked

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer clips in its step, to `trainer.gradient_clip_val`."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Done in `training_step`."""

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Done in `training_step`."""

    # -- names ----------------------------------------------------------------------------------------

    def is_data_parallel_rank_zero(self) -> Any:
        """Whether this rank is the first of its data-parallel group."""
        return parallel_groups.rank("dp") == 0

    @classmethod
    def list_available_models(cls) -> list[Any]:
        return []


def _split(found: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """What a hook returned: a loss, or a loss and metrics."""
    if isinstance(found, (tuple, list)):
        loss, metrics = (*found, None)[:2]
        return loss, dict(metrics or {})
    return found, {}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _zero_bias(module: nn.Module) -> None:
    bias = getattr(module, "bias", None)
    if isinstance(bias, torch.Tensor):
        with torch.no_grad():
            bias.zero_()

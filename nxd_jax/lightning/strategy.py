"""`neuronx_distributed.lightning.NeuronXLAStrategy`: Lightning's Trainer on the ranks of a NeuronX Distributed configuration."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from pytorch_lightning.plugins import Precision, XLAPrecision
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, Strategy, XLAStrategy
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_only

from nxd_jax.checkpoint import contents
from nxd_jax.lightning import averaging, finetuning, layout, predicting
from nxd_jax.lightning._values import to_log
from nxd_jax.lightning.accelerator import NeuronXLAAccelerator
from nxd_jax.lightning.checkpoint_io import NeuronCheckpointIO
from nxd_jax.lightning.environment import NeuronXLAEnvironment
from nxd_jax.lightning.feeding import Feeding
from nxd_jax.lightning.launcher import _NeuronXLALauncher
from nxd_jax.lightning.module import NeuronLTModule
from nxd_jax.lightning.precision_plugin import NeuronXLAPrecisionPlugin
from nxd_jax.lightning.stored import LiveOptimizer, StoredOptimizer, StoredWeights, load_full, load_plain
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.trainer import replicas
from nxd_jax.utils import _device
from torch_bridge.collectives import object_collectives
from torch_bridge.mesh import processes, world
from torch_bridge.torch_xla.core import functions as xf
from torch_bridge.torch_xla.core import xla_model as xm
from torch_bridge.torch_xla.distributed.parallel_loader import MpDeviceLoader

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

    from torch_bridge.mesh.groups import GroupLike

logger = logging.getLogger("nxd_jax")


class NeuronXLAStrategy(XLAStrategy):
    """`neuronx_distributed.lightning.NeuronXLAStrategy`: `Trainer(strategy=NeuronXLAStrategy(nxd_config=...))`.

    nxd_config: of `neuronx_distributed_config`; without it the *_parallel_size arguments count, and without those the configuration of the NeuronLTModule
    that is trained. checkpoint_io: in place of `NeuronCheckpointIO()`. Ranks that hold the same part of the model always
    begin with the same values, so sync_module_states, debug and save_load_xser are accepted without effect.

    The Trainer's `devices` and `num_nodes` say how many ranks there are (their product) in a process that no launcher started; under torchrun and nxd-run
    they must agree with what was started. `data_parallel_rank`, `tensor_parallel_rank`: this rank's place; in a process that hosts several ranks each rank's
    own number. `pipeline_parallel_rank`: the last stage of those that this process hosts, which is the one that has the loss. `data_parallel_size`,
    `tensor_parallel_size` and so on: how many there are.
    """

    strategy_name = "neuron_xla"

    def __init__(
        self,
        nxd_config: dict[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        context_parallel_size: int = 1,
        debug: bool = False,
        sync_module_states: bool = False,
        checkpoint_io: CheckpointIO | None = None,
        save_load_xser: bool = True,
        precision_plugin: Precision | None = None,
        **kwargs: Any,
    ):
        if kwargs:
            raise TypeError(
                f"NeuronXLAStrategy has no argument {', '.join(kwargs)}; it has nxd_config, tensor_parallel_size, pipeline_parallel_size, "
                "expert_parallel_size, context_parallel_size, debug, sync_module_states, checkpoint_io, save_load_xser and precision_plugin"
            )
        self._asked = layout.asked(
            nxd_config,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            expert_parallel_size=expert_parallel_size,
            context_parallel_size=context_parallel_size,
        )
        self._laid_out = False
        self.nxd_config = nxd_config
        self.save_load_xser = save_load_xser
        super(XLAStrategy, self).__init__(  # not XLAStrategy's own, which asks for a TPU's processes
            accelerator=NeuronXLAAccelerator(),
            cluster_environment=NeuronXLAEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            start_method="fork",
        )
        self.debug = debug
        self._launched = True
        self._sync_module_states = sync_module_states
        self._default_io = NeuronCheckpointIO(save_load_xser=save_load_xser)
        self._feeding = Feeding(self._trainer)
        self._delayed: finetuning.Delayed = []

    # -- ranks ----------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The xla device (the CPU in NXD_CPU_MODE)."""
        return _device.get_device()

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share layers out: as asked for until a Trainer has laid out the ranks, then as they are laid out."""
        return self._size("tensor_parallel_size", "tp")

    @property
    def pipeline_parallel_size(self) -> int:
        """Stages of the pipeline, as `tensor_parallel_size`."""
        return self._size("pipeline_parallel_size", "pp")

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that share experts out, as `tensor_parallel_size`."""
        return self._size("expert_parallel_size", "ep")

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share sequences out, as `tensor_parallel_size`."""
        return self._size("context_parallel_size", "cp")

    def _size(self, name: str, kind: str) -> int:
        if self._laid_out and parallel_groups.initialized():
            return parallel_groups.size(kind)
        return int((self._asked or {}).get(name, 1))

    @property
    def data_parallel_size(self) -> int:
        """Ranks that train on different batches."""
        return parallel_groups.size("dp")

    @property
    def data_parallel_rank(self) -> Any:
        return parallel_groups.rank("dp")

    @property
    def tensor_parallel_rank(self) -> Any:
        return parallel_groups.rank("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        places = parallel_groups.places("pp")
        return max(places[rank] for rank in world.current().hosted)

    @property
    def is_global_zero(self) -> bool:
        """Whether this process hosts rank 0."""
        return world.current().first_here

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of a tensor- or context-parallel group read the same batches."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def _configure_launcher(self) -> None:
        self._launcher = _NeuronXLALauncher(self)

    def set_world_ranks(self) -> None:
        rank_zero_only.rank = 0 if world.current().first_here else world.first()  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Lay out the ranks, then what Lightning does before hooks."""
        layout.prepare(self._asked, self.parallel_devices, self.num_nodes, self.lightning_module)
        self._laid_out = True
        self.set_world_ranks()
        rank_zero_info(layout.described())
        averaging.check(self._trainer(), self.lightning_module)
        self._delayed = finetuning.put_off(self._trainer(), self.lightning_module)
        Strategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Done by `setup_environment`."""

    # -- a Trainer's work -----------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """The module on the device, and its optimizers. Raises MisconfigurationException for automatic optimization of a pipeline."""
        finetuning.make_up(self._delayed)
        _without_signal_broadcasts(trainer)
        module = trainer.lightning_module
        automatic = module.automatic_optimization and not getattr(module, "runs_backward", False)
        if trainer.state.fn == TrainerFn.FITTING and automatic and self.pipeline_parallel_size > 1:
            raise MisconfigurationException(
                f"{type(module).__name__} has automatic optimization, which calls loss.backward(), but with pipeline_parallel_size="
                f"{self.pipeline_parallel_size} run_train does forward and backward: use manual optimization (manual_opt=True), and in training_step call "
                "self.model.run_train(**batch), then optimizer.step() and optimizer.zero_grad() of self.optimizers()"
            )
        Strategy.setup(self, trainer)

    def model_to_device(self) -> None:
        """Moves what `initialize_parallel_model` has not, and makes copies equal where processes drew their own random numbers."""
        assert self.model is not None
        self.model.to(self.root_device)
        replicas.make_equal(self.model)

    def process_dataloader(self, dataloader: object) -> Any:
        """Batches ahead of time, on the device that `batch_to_device` says; a position that checkpoints keep."""
        if isinstance(dataloader, MpDeviceLoader):
            return dataloader
        predicting.prepare(dataloader, self.data_parallel_rank)
        return self._feeding.loader(dataloader, self._batch_device)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device; with a pipeline, and for modules that cut it into micro-batches themselves, to the CPU."""
        return super().batch_to_device(batch, self._batch_device if device is None else device, dataloader_idx)

    @property
    def _batch_device(self) -> torch.device:
        on_host = self.pipeline_parallel_size > 1 or getattr(self.lightning_module, "runs_backward", False)
        return torch.device("cpu") if on_host else self.root_device

    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def on_train_start(self) -> None:
        """A training that is resumed goes on with its random states."""
        self._feeding.begin()

    def on_predict_start(self) -> None:
        """Say whose predictions `Trainer.predict` returns."""
        if world.process_count() == 1 and self.data_parallel_size > 1:
            logger.warning(
                "Trainer.predict: each of %d data-parallel ranks predicts its own rows, and what is returned is rank 0's, as in its process under torchrun. "
                "For all rows return self.all_gather(...) from predict_step",
                self.data_parallel_size,
            )

    def teardown(self) -> None:
        """Model and optimizers stay on the device; loaders stop reading ahead, saves in the background are waited for."""
        self._feeding.close()
        self.precision_plugin.teardown()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- between processes ----------------------------------------------------------------------------

    def barrier(self, name: str | None = None, *args: object, **kwargs: object) -> None:
        """Wait for all processes."""
        if world.process_count() > 1:
            processes.barrier(f"lightning {name or ''}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """A Python object of one rank's process for all. A process that hosts all ranks has it."""
        if world.process_count() == 1:
            return obj
        found = [obj]
        object_collectives.broadcast(found, [src] * len(world.current().hosted))
        return found[0]

    def reduce(self, output: object, group: GroupLike = None, reduce_op: object = "mean") -> torch.Tensor:
        """The sum, mean, minimum or maximum of a tensor (or number) over all ranks, or over the ranks of `group` (a process group or a list of lists of ranks).

        Returned where it was given: a tensor on the device is not waited for. Raises ValueError for other operations.
        """
        operation = str(getattr(reduce_op, "name", reduce_op)).rpartition(".")[2].lower()
        if operation not in _REDUCTIONS:
            raise ValueError(f"NeuronXLAStrategy.reduce: reduce_op must be one of {', '.join(_REDUCTIONS)}, got {reduce_op!r}")
        here = output.device if isinstance(output, torch.Tensor) else torch.device("cpu")
        value = to_log(output, together=True, now=False)
        if operation in ("mean", "avg") and not value.is_floating_point():
            value = value.to(torch.get_default_dtype())
        count = world.size() if group is None else _size_of(group)
        if value.device.type != "xla" and (world.process_count() == 1 or count == 1):  # a number of the host is the same for all ranks
            return value * count if operation == "sum" else value
        scale = 1.0 / count if operation in ("mean", "avg") else 1.0
        return xm.all_reduce(_REDUCTIONS[operation], value.detach().to(self.root_device), scale, group).to(here)

    def all_gather(self, tensor: torch.Tensor, group: GroupLike = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, or of the ranks of `group` (as in `reduce`), side by side along dim 0, where the tensor was; of numbers (no dims) a row.

        sync_grads: gradients pass through.
        """
        value = to_log(tensor if sync_grads else tensor.detach(), together=True, now=False).to(self.root_device)
        among = None if group is dist.group.WORLD else group
        return xf.all_gather(value if value.dim() else value.unsqueeze(0), 0, among).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes (or any) decided so. In a process that hosts several ranks, the first one's number made the decision."""
        if world.process_count() == 1:
            return bool(decision)
        found = [answer == b"1" for answer in processes.exchange("lightning decision", b"1" if decision else b"0")]
        return min(found) if all else max(found)

    # -- plugins --------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        """A `NeuronXLAPrecisionPlugin`; Lightning's own XLAPrecision is replaced by one that does the same for more than data-parallel ranks."""
        if self._precision_plugin is None:
            self._precision_plugin = NeuronXLAPrecisionPlugin()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: object) -> None:
        if plugin is not None and not isinstance(plugin, XLAPrecision):
            raise TypeError(
                f"NeuronXLAStrategy works with NeuronXLAPrecisionPlugin or XLAPrecision, got {type(plugin).__name__}: pass "
                "Trainer(plugins=[NeuronXLAPrecisionPlugin()]), and choose dtypes in the model"
            )
        self._precision_plugin = NeuronXLAPrecisionPlugin.in_place_of(plugin) if type(plugin) is XLAPrecision else plugin

    @property
    def checkpoint_io(self) -> Any:
        """`NeuronCheckpointIO` unless another was chosen."""
        return self._checkpoint_io if self._checkpoint_io is not None else self._default_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        if isinstance(io, _WrappingCheckpointIO):
            raise TypeError(
                f"NeuronXLAStrategy: {type(io).__name__} would write tensors of the device from another thread; for saves in the background pass "
                "Trainer(plugins=[NeuronCheckpointIO(async_save=True)])"
            )
        self._checkpoint_io = io

    # -- checkpoints ----------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's tensors themselves, which know how ranks share them out."""
        assert self.lightning_module is not None
        contents.mark_heads(self.lightning_module)
        return dict(contents.state_of(self._stateful()))

    def _stateful(self) -> Any:
        """The module whose state is the checkpoint's: with adapters, the model that says what of it is to be saved."""
        module = self.lightning_module
        inner = contents.unwrapped(getattr(module, "model", None)) if isinstance(module, NeuronLTModule) else None
        return inner if hasattr(inner, "checkpoint_state") else module

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> Any:
        """Stands for the optimizer until it is written; as a mapping, its state dict."""
        return LiveOptimizer(getattr(optimizer, "_optimizer", optimizer), self._stateful())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write what the Trainer collected. With a CheckpointIO that is not ours, by the first process, as plain tensors on the CPU."""
        io = self.checkpoint_io
        if isinstance(io, NeuronCheckpointIO):
            io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        found = {**checkpoint, "optimizer_states": [dict(state) for state in checkpoint.get("optimizer_states", ())]}
        found = object_collectives.each_ranks(found)[0] if self._is_whole() else _refuse_parts(io)
        if self.is_global_zero:
            io.save_checkpoint(found, filepath, storage_options=storage_options)
        self.barrier("save_checkpoint")

    def _is_whole(self) -> bool:
        """Whether every rank holds the whole model."""
        sizes = (parallel_groups.size("tp"), parallel_groups.size("pp"))
        return sizes == (1, 1) and not any(contents.is_zero1(o) for o in self.optimizers)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint."""
        if isinstance(self.checkpoint_io, NeuronCheckpointIO) or self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; weights and optimizer states when they are needed."""
        options = {} if weights_only is None else {"weights_only": weights_only}
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path, **options)
        module = self.lightning_module
        fitting = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        folder = found.pop("nxd_folder", None)
        if fitting:
            self._feeding.resume(folder, found)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill the module."""
        state = checkpoint["state_dict"]
        if isinstance(state, StoredWeights):
            state.load_into(self._stateful(), strict)
        elif any(getattr(t, "device", None) is not None and t.device.type == "xla" for t in state.values()):
            assert self.lightning_module is not None
            self.lightning_module.load_state_dict(state, strict=strict)
        else:  # from a file, where names may be those of a LightningModule's `model`
            target = self._stateful()
            own = target.state_dict().keys()
            load_full(target, {n if n in own else n.removeprefix("model."): t for n, t in state.items()}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill the optimizers. Raises ValueError if there are more or fewer than when they were saved."""
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint has the states of {len(states)} optimizer(s), but configure_optimizers returned {len(self.optimizers)}. To begin with its "
                "weights alone, load them by trainer.validate(module, ckpt_path=...) and call fit without ckpt_path"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if isinstance(state, StoredOptimizer):
                state.load_into(optimizer, self._stateful())
            else:
                load_plain(optimizer, state)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """After this, `Trainer(strategy="neuron_xla", accelerator=NeuronXLAAccelerator())`."""
        strategy_registry.register(cls.strategy_name, cls, description="NeuronX Distributed on emulated NeuronCores")


_REDUCTIONS = {"mean": xm.REDUCE_SUM, "avg": xm.REDUCE_SUM, "sum": xm.REDUCE_SUM, "min": xm.REDUCE_MIN, "max": xm.REDUCE_MAX}


def _size_of(group: Any) -> int:
    return int(group.size()) if isinstance(group, dist.ProcessGroup) else len(group[0])


def _refuse_parts(io: object) -> Any:
    raise NotImplementedError(
        f"{type(io).__name__} writes one file with whole tensors, but ranks hold parts of this model or its optimizer's state: leave checkpoint_io out "
        "(NeuronCheckpointIO)"
    )


def _without_signal_broadcasts(trainer: Any) -> None:
    """Newer Lightning broadcasts and reads a tensor before every batch, to learn whether rank 0 got SIGTERM: one program and one wait more per step.

    Its handler of SIGTERM broadcasts, too, in the middle of whatever is being recorded. torchrun signals all processes, and each ends at its next batch
    without it.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None
    connector._sigterm_notifier_fn = functools.partial(_note_sigterm, connector)


def _note_sigterm(connector: Any, number: int, frame: Any) -> None:
    """What Lightning's own handler does, but for its broadcast: the loop ends after this batch."""
    connector.received_sigterm = True


assert issubclass(NeuronXLAStrategy, DDPStrategy)  # what makes Lightning give every data-parallel rank its own samples

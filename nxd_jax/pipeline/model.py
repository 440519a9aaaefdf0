"""`neuronx_distributed.pipeline.model`: a model whose layers lie on several pipeline ranks, and the steps that run through them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from nxd_jax._wrapper import Adapted
from nxd_jax.parallel_layers import loss_functions, mappings
from nxd_jax.pipeline import (
    arguments,
    batches,
    loss_values,
    observers,
    partition,
    runtime,
    schedules,
    stages,
    step_log,
    weights,
)
from nxd_jax.pipeline.elsewhere import Elsewhere, needed, owned, unread_by
from nxd_jax.pipeline.exchange import Exchange, signature
from nxd_jax.pipeline.local_model import LocalModel
from nxd_jax.pipeline.manual_pipe_stage import PipelineStageModule
from nxd_jax.pipeline.schedules import Action, Schedule
from nxd_jax.pipeline.traced_stages import TracedStages, modes
from nxd_jax.tensor_parallel import casting, grads, parallel_groups
from nxd_jax.utils import _device, model_utils
from torch_bridge.collectives import functional
from torch_bridge.mesh import abstract_arrays, messages, places, world
from torch_bridge.recorder import placed
from torch_bridge.replay import player, replay_policy
from torch_bridge.runtime import executor

logger = logging.getLogger("nxd_jax")

_PARALLEL_LAYERS = ("ColumnParallelLinear", "RowParallelLinear", "ParallelEmbedding", "GQAQKVColumnParallelLinear", "CheckpointWrapper")
_ADAPTED_LAYERS = (
    "LoraLinear",
    "LoraEmbedding",
    "LoraConv2d",
    "LoraParallelLinear",
    "LoraGQAQKVParallelLinear",
    "LoraParallelEmbedding",
    "LoraParallelConv2d",
)
_KEPT_WHOLE = (*_PARALLEL_LAYERS, *_ADAPTED_LAYERS)
"""Classes of modules that are nodes of a traced model: what they do depends on ranks, or on whether adapters are merged."""
_COLLECTIVES = (mappings, loss_functions)
"""Modules whose functions are nodes of a traced model: what they do depends on ranks."""


class NxDPPModel(LocalModel):
    """`pipeline.NxDPPModel`: a model in a pipeline. `run_train` and `run_eval` take a batch and do a whole step, cut into micro-batches.

    The model is cut after layers (`pipeline_cuts`, `auto_partition`, `cut_pipeline_stage`, or a list of layers with `manual_pp_partition`). Weights, gradients
    and optimizer state of a stage lie on its cores only. A process that hosts all ranks has all stages: `local_*` are those of the whole model, and
    `run_train` returns the loss; NxD returns it on the last pipeline rank and None on others.

    Args:
        module: the whole model (also a `LoraModel`: the model in it, with its adapters), or a list of layers for the manual mode.
        transformer_layer_cls: class of the repeated layer: it is kept whole, and `auto_partition` counts it.
        num_microbatches: into how many equal parts a batch is cut along dim 0.
        virtual_pipeline_size: stages on each pipeline rank.
        output_loss_value_spec: which part of what the model returns is the loss: True, or nested tuples, lists and dicts of booleans with one True; None: it
            has none (in manual mode: what `manual_pp_loss_fn` gives).
        return_mb_loss: `run_train` returns the list of micro-batches' losses in place of their mean.
        broadcast_and_average_loss: the loss is averaged over context- and data-parallel ranks.
        use_zero1_optimizer, use_optimizer_wrapper: the optimizer averages gradients over data-parallel ranks; otherwise `run_train` does.
        use_model_wrapper: `initialize_parallel_model` moves the model to its device.
        pipeline_cuts: names of the layers after which a stage ends.
        auto_partition: cut so that stages have as many layers of `transformer_layer_cls` as any other, or one more for the last ones.
        input_names: the parameters of the model's forward that `run_train` is given, by keyword. Others have their defaults.
        leaf_module_cls, autowrap_functions, autowrap_modules, autowrap_obj_methods, tracer_cls: how the model is traced (`trace.trace_model`). transformers'
            models are traced by running them without values, if `tracer_cls` is None, and so are those that symbolic tracing refuses (`capture`).
        param_init_fn: fills the parameters of modules on "meta" (`model_utils.materialize_model`).
        return_loss_on_cpu: the loss comes as a CPU tensor.
        schedule: in which order stages compute: a name (`schedules.KINDS`), a `Schedule`, lists of actions by rank, or torch's CSV. Default: "1f1b", and
            "interleaved" for several stages on a rank. (NxD has these two.)
        manual_pp_partition: `module` is a list of layers, each of which takes what the one before returns.
        manual_pp_stage_partition_fn, manual_pp_loss_fn: in manual mode, the stage of each layer, and the loss of (outputs, labels).

    NxD's other arguments choose how it sends and compiles; they are accepted and change nothing here.

    Raises RuntimeError before `initialize_model_parallel`, and for pipeline_cuts with auto_partition; ValueError for numbers that do not fit; TypeError for
    arguments of other types; AssertionError for return_mb_loss with broadcast_and_average_loss, and for layers that are no list in manual mode. Warns of
    options that are for the other mode.
    """

    def __init__(
        self,
        module: Any,
        transformer_layer_cls: type[nn.Module] | None = None,
        num_microbatches: int = 1,
        virtual_pipeline_size: int = 1,
        output_loss_value_spec: Any = None,
        return_mb_loss: bool = False,
        broadcast_and_average_loss: bool = False,
        use_zero1_optimizer: bool = False,
        use_model_wrapper: bool = False,
        use_optimizer_wrapper: bool = False,
        pipeline_cuts: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        leaf_module_cls: Sequence[str] | None = None,
        autowrap_functions: Sequence[Callable[..., Any]] | None = None,
        autowrap_modules: Sequence[Any] | None = None,
        autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None,
        tracer_cls: str | type[fx.Tracer] | None = None,
        param_init_fn: Callable[..., Any] | None = None,
        trace_file_path: str | None = None,
        return_loss_on_cpu: bool = True,
        deallocate_pipeline_outputs: bool = False,
        auto_partition: bool = False,
        fuse_microbatches: bool = False,
        manual_pp_partition: bool = False,
        manual_pp_stage_partition_fn: Callable[..., Any] | None = None,
        manual_pp_loss_fn: Callable[..., Any] | None = None,
        schedule: Any = None,
        _delay_tracing: bool = False,
        _turn_off_odd_even_scheduler: bool = False,
        _all_reduce_send_recv: bool = False,
        _fused_send_recv: bool = False,
        _fused_fwd_bwd: bool = False,
        _mark_step_before_pp_runtime: bool = True,
        _mark_step_after_pp_runtime: bool = True,
        _deallocate_send_tensors: bool = True,
        _use_gloo_for_metadata_comm: bool = False,
        _debug_mode: bool = False,
        _debug_pp_size: int = 8,
        _debug_pp_rank: int = 0,
    ):
        super().__init__()
        if not _debug_mode and not parallel_groups.initialized():
            raise RuntimeError(
                "model parallel groups are not initialized: call neuronx_distributed.parallel_layers.parallel_state.initialize_model_parallel("
                "pipeline_model_parallel_size=...) before NxDPPModel"
            )
        if return_mb_loss and broadcast_and_average_loss:
            raise AssertionError(
                "return_mb_loss=True gives a list of losses, broadcast_and_average_loss=True their mean: choose one of them"
            )
        arguments.check_numbers(num_microbatches=num_microbatches, virtual_pipeline_size=virtual_pipeline_size)
        arguments.check_names(input_names=input_names, pipeline_cuts=pipeline_cuts, leaf_module_cls=leaf_module_cls)
        self.manual_pp_partition = manual_pp_partition
        if manual_pp_partition:
            arguments.check_layers(module, virtual_pipeline_size)
        else:
            arguments.check_model(module, transformer_layer_cls)
        arguments.warn_of_unused(
            manual_pp_partition,
            auto_partition=auto_partition,
            pipeline_cuts=pipeline_cuts,
            output_loss_value_spec=output_loss_value_spec,
            manual_pp_stage_partition_fn=manual_pp_stage_partition_fn,
            manual_pp_loss_fn=manual_pp_loss_fn,
        )
        self.pipeline_parallel_size = _debug_pp_size if _debug_mode else parallel_groups.size("pp")
        self.pipeline_parallel_rank = _debug_pp_rank if _debug_mode else parallel_groups.rank("pp")
        self.virtual_pipeline_size = virtual_pipeline_size
        self.num_microbatches = num_microbatches
        self.transformer_layer_cls = transformer_layer_cls
        self.output_loss_value_spec = output_loss_value_spec
        self.return_mb_loss = return_mb_loss
        self.broadcast_and_average_loss = broadcast_and_average_loss
        self.use_zero1_optimizer = use_zero1_optimizer
        self.use_optimizer_wrapper = use_optimizer_wrapper
        self.use_model_wrapper = use_model_wrapper
        self.input_names = None if input_names is None else list(input_names)
        self.param_init_fn = param_init_fn
        self.return_loss_on_cpu = return_loss_on_cpu
        if fuse_microbatches and return_loss_on_cpu:
            logger.warning("fuse_microbatches=True: the loss stays on the device (return_loss_on_cpu=False)")
            self.return_loss_on_cpu = False
        self.schedule = _schedule(schedule, self.pipeline_parallel_size, num_microbatches, virtual_pipeline_size)
        self.partitioned = False
        self.model_moved_to_device = False
        self._debug = _debug_mode
        self._tracer: TracedStages | None = None
        self._fixed: stages.Stages | None = None
        self._order: list[Action] = runtime.in_order(self.schedule)
        self._copies: weights.Copies = {}
        self._elsewhere = Elsewhere()
        several = self.pipeline_parallel_size > 1 and not _debug_mode and not world.is_local()
        self._exchange = Exchange() if several else None
        self._lent = itertools.count()
        self._manual_loss = manual_pp_loss_fn
        self._tracing = {
            "autowrap_functions": autowrap_functions,
            "autowrap_modules": [*(autowrap_modules or ()), *_COLLECTIVES],
            "autowrap_obj_methods": autowrap_obj_methods,
            "tracer_cls": tracer_cls,
        }
        layer = [] if transformer_layer_cls is None else [transformer_layer_cls.__name__]
        self._leaves = [*(leaf_module_cls or ()), *layer, *_KEPT_WHOLE]
        if manual_pp_partition:
            self._manual(module, manual_pp_stage_partition_fn)
            return
        self.original_torch_module: nn.Module = module
        names = list(pipeline_cuts or ())
        if auto_partition:
            if names:
                raise RuntimeError("auto_partition=True chooses the cuts itself: leave out pipeline_cuts, or set auto_partition=False")
            names = self._even_cuts()
        if names or auto_partition:
            if self.input_names is None:
                option = "auto_partition=True" if auto_partition else "pipeline_cuts"
                raise ValueError(f"{option} needs input_names, the names of the inputs that run_train is given")
            self.trace(input_names=self.input_names)
            for name in names:
                self.cut_pipeline_stage(name)
            self.partition()

    # -- tracing and cutting --------------------------------------------------------------------------

    def _root(self) -> nn.Module:
        """What is traced: the model itself, inside a `LoraModel`."""
        found = self.original_torch_module
        return found.get_base_model() if isinstance(found, Adapted) else found

    def _even_cuts(self) -> list[str]:
        cls = self.transformer_layer_cls
        assert cls is not None
        layers = self.get_model_layers(self._root(), cls)
        count = self.pipeline_parallel_size * self.virtual_pipeline_size
        if not layers and count > 1:
            raise ValueError(f"auto_partition=True: the model has no modules of type {cls.__name__}, which transformer_layer_cls names")
        return partition.create_partitions(count, layers) if count > 1 else []

    def get_model_layers(
        self, module: nn.Module, target_module_type: type[nn.Module], current_path: Sequence[str] | None = None
    ) -> list[str]:
        """The dotted names of the layers of a class in a module, in order; what is inside of one does not count. current_path: names to put before them."""
        found = [name for name, layer in module.named_modules() if name and isinstance(layer, target_module_type)]
        return [".".join((*(current_path or ()), name)) for name in found if not any(name.startswith(f"{other}.") for other in found)]

    def trace(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        input_names: Sequence[str] | None = None,
        leaf_modules: Sequence[str] | None = None,
        autowrap_functions: Sequence[Callable[..., Any]] | None = None,
        autowrap_modules: Sequence[Any] | None = None,
        autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None,
        tracer_cls: str | type[fx.Tracer] | None = None,
    ) -> None:
        """Trace the model into `traced_model`; a second time only warns.

        A model that is traced by running it (`capture`) has no `traced_model` before its first batch, if that takes more than token ids and no example is
        given.
        """
        if self.manual_pp_partition:
            raise RuntimeError(
                "manual_pp_partition=True makes stages of the list of layers, and traces nothing: leave out trace(), and cut by manual_pp_stage_partition_fn"
            )
        if self._tracer is not None:
            logger.warning("trace() was called before; the model stays as it was traced then")
            return
        arguments.check_names(input_names=input_names, leaf_modules=leaf_modules)
        self._leaves += [leaf for leaf in leaf_modules or () if leaf not in self._leaves]
        for name, value in (
            ("autowrap_functions", autowrap_functions),
            ("autowrap_modules", autowrap_modules),
            ("autowrap_obj_methods", autowrap_obj_methods),
            ("tracer_cls", tracer_cls),
        ):
            if autowrap_modules is not None and value is autowrap_modules:
                value = [*autowrap_modules, *_COLLECTIVES]
            self._tracing[name] = value if value is not None else self._tracing[name]
        if input_names is None and not args and not kwargs:
            input_names = self.input_names
        assert self.transformer_layer_cls is not None
        tracer = TracedStages(self._root(), self.transformer_layer_cls, self._leaves, self._tracing)
        tracer.trace(args, kwargs, input_names)
        self._tracer, self.input_names = tracer, tracer.input_names

    @property
    def traced_model(self) -> fx.GraphModule | None:
        """The model as a graph of its layers; None before it has been traced."""
        return None if self._tracer is None else self._tracer.traced

    def cut_pipeline_stage(self, layer_name: str) -> None:
        """Let a stage end with this layer. AssertionError before `trace`, after `partition` and for a second cut there; RuntimeError for an unknown name."""
        if self.partitioned:
            raise AssertionError("the model is partitioned already: cut it before partition()")
        if self._tracer is None:
            raise AssertionError("cut_pipeline_stage needs a traced model: call trace() first")
        self._tracer.cut(layer_name)

    def partition(self) -> None:
        """Make stages of the cut model, and move their weights to their cores unless `use_model_wrapper` leaves that to `initialize_parallel_model`.

        Raises ValueError if there are not as many stages as the ranks take.
        """
        if self.partitioned:
            logger.warning("partition() was called before; the stages stay as they are")
            return
        if self._tracer is None:
            raise AssertionError("partition needs a traced model: call trace() first")
        wanted = self.pipeline_parallel_size * self.virtual_pipeline_size
        cuts = len(self._tracer.cuts)
        if 1 + cuts != wanted:
            raise ValueError(
                f"{cuts} cuts make {1 + cuts} stages, but pipeline_parallel_size={self.pipeline_parallel_size} and "
                f"virtual_pipeline_size={self.virtual_pipeline_size} take {wanted}: give {wanted - 1} cuts"
            )
        self._partitioned(self._tracer.first())

    def _manual(self, layers: list[nn.Module], partition_fn: Any) -> None:
        count = self.pipeline_parallel_size
        modules = [PipelineStageModule(layers, count, k, partition_fn) for k in range(count)]
        self.original_torch_module = nn.ModuleDict({"layers": nn.ModuleDict({str(k): layer for k, layer in enumerate(layers)})})
        self.input_names = ["inputs", "labels"]
        weights.tie_marked(layers)
        found = stages.in_a_row(modules, [stages.FromBatch("inputs")])
        if self._manual_loss is not None:
            found.output = (found.output, stages.FromBatch("labels"))
        self._fixed = found
        self._partitioned(found)

    def _partitioned(self, found: stages.Stages | None) -> None:
        self.partitioned = True
        if found is not None:
            weights.check(found)
        if not self._debug and not self.use_model_wrapper:
            self.maybe_materialize_local_module()
            self.move_model_to_device()

    def _known(self) -> stages.Stages | None:
        """The stages as they were traced first; None if that needs a batch."""
        self._check_partitioned()
        return self._fixed if self._tracer is None else self._tracer.first()

    def _stages(self, micro_batch: Mapping[str, Any]) -> stages.Stages:
        """The stages for inputs like these."""
        if self._tracer is None:
            assert self._fixed is not None
            return self._fixed
        with self._elsewhere.present():
            return self._tracer.of(micro_batch, self._place, alone=all(self._here))

    @property
    def _here(self) -> list[bool]:
        """By stage, whether this process has a part of it."""
        return [home is None or messages.hosted(home) for home in self.homes]

    def _place(self, found: stages.Stages, moving: bool = False) -> None:
        """Lay the weights of stages out, while the model has all of them, if the model is on the device or on its way there."""
        if isinstance(self.original_torch_module, Adapted):
            self.original_torch_module.also_held_by(stage.module for stage in found)
        if moving or self.model_moved_to_device:
            names = {id(p): name for name, p in self.original_torch_module.named_parameters()}
            weights.place(found, self.homes, self._copies, names)
            if replay_policy.of_parallel_models():
                for stage, here in zip(found, self._here, strict=True):
                    if here:
                        player.play_unasked(stage.module, 0)

    def _place_anew(self, found: stages.Stages) -> None:
        """Lay out weights of which modules have been given others. Raises RuntimeError in one of several processes, if that changes what they share."""
        if not all(self._here):
            raise RuntimeError(
                "a weight that several stages of the pipeline use has been replaced, tied or untied since they were cut, and other processes have the old one: "
                "do that before NxDPPModel, or run all ranks in one process (nxd-run)"
            )
        self._place(found, moving=True)

    @property
    def local_stage_modules(self) -> list[nn.Module]:
        """The stages of this process's pipeline ranks. Raises RuntimeError for a model that is traced when the first batch is there."""
        found = self._known()
        if found is None:
            raise RuntimeError("the model has no stages before its first batch: call run_train, or trace() with an example of its inputs")
        return [stage.module for stage, here in zip(found, self._here, strict=True) if here]

    @property
    def homes(self) -> list[places.Place | None]:
        """By stage, the place of its cores; None without several of them."""
        if self._debug or world.size() == 1 or self.pipeline_parallel_size == 1:
            return [None] * len(self.schedule.placement)
        return [places.along("pp", rank) for rank in self.schedule.placement]

    def _check_partitioned(self) -> None:
        if not self.partitioned:
            raise RuntimeError(
                "the model has no stages yet: set auto_partition=True or pipeline_cuts, or call trace(), cut_pipeline_stage() for every cut, and partition()"
            )

    # -- the device -----------------------------------------------------------------------------------

    def maybe_materialize_local_module(self) -> None:
        """Give parameters on "meta" their values, by `param_init_fn`, and move them. Raises ValueError if there is no such function."""
        if abstract_arrays.active() or not any(p.is_meta for p in self.original_torch_module.parameters()):
            return
        if self.param_init_fn is None:
            raise ValueError("the model's parameters are on 'meta': give NxDPPModel a param_init_fn(module, device) that fills them")
        model_utils.materialize_model(self.original_torch_module, _device.get_device(), self.param_init_fn)

    def move_model_to_device(self) -> None:
        """Move the model to the device, each weight to the cores of the stage that uses it."""
        if self.model_moved_to_device:
            return
        self._check_partitioned()
        found = self._known()
        self._leave_out(found)
        model_utils.move_model_to_device(self.original_torch_module, _device.get_device())
        if found is not None:
            with self._elsewhere.present():
                self._place(found, moving=True)
                borrowed = needed(found, self._here) - owned(found, self._here)
            self._elsewhere.take_out(self.original_torch_module, found, borrowed.__contains__)
        self.model_moved_to_device = True  # last: what was interrupted is done again

    def _leave_out(self, found: stages.Stages | None) -> None:
        """In one of several processes, take parameters out that none of its stages reads. Those that no stage reads at all stay with the first."""
        if self._exchange is None:
            return
        if found is None:
            raise RuntimeError(
                f"stages of {type(self.original_torch_module).__name__} are known only when the first batch is there, and one of several processes must know "
                "before which weights are its own: call trace(kwargs={...}) with an example of the model's inputs, cut_pipeline_stage() and partition()"
            )
        others = needed(found, [not here for here in self._here]) - needed(found, self._here)
        unread = set() if self._here[0] else unread_by(found, self.original_torch_module)
        self._elsewhere.take_out(self.original_torch_module, found, (others | unread).__contains__)

    # -- steps ----------------------------------------------------------------------------------------

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """A training step: forward and backward of all micro-batches; gradients are added to those that are there.

        kwargs: the whole batch: the inputs that `input_names` says, CPU or xla tensors of one size along dim 0. Returns the mean loss of the micro-batches (a
        list of them with `return_mb_loss`), None for a model without a loss.

        Raises RuntimeError for other names, for a batch that does not divide and before `partition`; ValueError for inputs that are no tensors.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("run_train computes gradients, and they are switched off here (torch.no_grad, inference_mode): use run_eval")
        step = self._step(kwargs)
        if step.loss is None:
            said = (
                "manual_pp_loss_fn makes it"
                if self.manual_pp_partition
                else "output_loss_value_spec says which part of the model's output it is"
            )
            raise RuntimeError(f"run_train needs a loss: {said}")
        step_log.keep()
        if self._loss_is_known:
            step.may_be_direct(self._order)
        with self._whole_step():
            with observers.step(self):
                step.train(self._order)
            weights.add_up(step.replicas, self.homes, self._exchange)
            if not self.use_zero1_optimizer and not self.use_optimizer_wrapper:
                self._reduce()
            executor.sync()
            return self._result(step)

    def _whole_step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._exchange is None else self._exchange.whole_step()

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """The forward passes alone, with the model in evaluation mode; returns the loss as `run_train` does, or what the model returns if it has no loss.

        Raises AssertionError for a model without a loss with several micro-batches.
        """
        if self._loss() is None and self.num_microbatches != 1:
            raise AssertionError(
                "run_eval of a model without a loss gives its outputs, for num_microbatches=1 alone; set output_loss_value_spec"
            )
        with self._evaluating():
            step = self._step(kwargs)
            with self._whole_step():
                step.evaluate()
                return self._result(step) if step.loss is not None else step.outputs.get(0)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model in evaluation mode, and each module in its own again however the block ends."""
        model = self.original_torch_module
        before = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            yield
        finally:
            model.train(before[0][1])
            for module, training in before:
                module.training = training

    def _step(self, kwargs: Mapping[str, Any]) -> runtime.Step:
        self._check_partitioned()
        if not self.model_moved_to_device:
            self.maybe_materialize_local_module()
            self.move_model_to_device()
        batch = batches.cut(kwargs, self.input_names or [], self._read(kwargs), self.num_microbatches)
        executor.sync()
        found = self._stages(batch[0])
        if weights.are_others(found, self._here, self._elsewhere):
            self._place_anew(found)
        assert found.replicas is not None
        weights.put_back(found, self.homes)
        if self._exchange is not None:
            self._exchange.begin(signature(batch[0], f"{modes(self.original_torch_module)} {torch.is_autocast_enabled('xla')}"))
        weights.refresh(found.replicas, self.homes, self._exchange)
        return runtime.Step(found, self.homes, found.replicas, batch, self._loss(), _ambient_autocast(), self._exchange)

    def _read(self, given: Mapping[str, Any]) -> list[str]:
        """The inputs that stages look at; all that are given, where these decide what the stages are."""
        if self._tracer is not None and self._tracer.by_running:
            return [name for name in self.input_names or () if given.get(name) is not None]
        found = self._stages({})
        here = self._here
        of_output = [x.name for x in runtime._sources(found.output) if isinstance(x, stages.FromBatch) and here[-1]]
        return [*dict.fromkeys([*(name for stage in found if here[stage.index] for name in stage.inputs), *of_output])]

    def _loss(self) -> Callable[[Any], torch.Tensor] | None:
        if self.manual_pp_partition:
            if self._manual_loss is None:
                return None
            loss_fn = self._manual_loss
            return lambda found: loss_fn(*found)
        if self.output_loss_value_spec is None:
            return None
        return lambda found: loss_values.find(found, self.output_loss_value_spec)

    @property
    def _loss_is_known(self) -> bool:
        """Whether no code of the script's makes the loss of what the stages give."""
        return not self.manual_pp_partition or getattr(self._manual_loss, "__module__", "") == "torch.nn.functional"

    def _reduce(self) -> None:
        if parallel_groups.size("dp") > 1:
            grads.average_over_data_parallel_ranks(self.original_torch_module.parameters())

    def _result(self, step: runtime.Step) -> Any:
        losses = [step.outputs[mb] for mb in range(self.num_microbatches)] if self._here[-1] else None
        if losses is None and not self.broadcast_and_average_loss:
            return None
        if self.return_mb_loss:
            return losses
        with torch.no_grad():
            loss = torch.stack(losses).mean() if losses is not None else None
            if self._exchange is not None and self.broadcast_and_average_loss:
                loss = self._broadcast(loss)
            assert loss is not None
            if self.broadcast_and_average_loss:
                for kind in ("cp", "dp"):
                    if parallel_groups.size(kind) > 1:
                        loss = functional.all_reduce("sum", loss, 1.0 / parallel_groups.size(kind), parallel_groups.group(kind))
        return loss.cpu() if self.return_loss_on_cpu and not abstract_arrays.active() else loss

    def _broadcast(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The loss of the last stage (None in processes that have no part of it) on all ranks; float32 on the device, whatever XLA_DOWNCAST_BF16 says."""
        wide = casting.wide_dtype()
        zero = torch.zeros((), device="xla", dtype=wide)
        parts = {home: loss.to(wide) if home == self.homes[-1] and loss is not None else zero for home in places.hosted("pp")}
        found: torch.Tensor = functional.all_reduce("sum", placed.joined(parts, "pp"), groups=parallel_groups.group("pp"))
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a pipeline model has no forward of its own: call run_train(**batch) or run_eval(**batch)")

    def train(self, mode: bool = True) -> NxDPPModel:
        """Put the model into training mode, or into evaluation mode. (NxD raises RuntimeError.)"""
        self.training = mode
        module = self.__dict__.get("_modules", {}).get("original_torch_module")
        if module is not None:
            module.train(mode)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NxDPPModel:
        """A copy of the model in a pipeline of its own, cut after the same layers; what stages it has on other ranks than its own weights is made anew.

        Raises NotImplementedError in one of several processes.
        """
        if self._exchange is not None:
            raise NotImplementedError(
                "copy.deepcopy of a pipeline model in one of several processes: for an average of weights keep copies of its state, "
                "{name: t.clone() for name, t in model.local_state_dict().items()}, or start the script with nxd-run, which hosts all ranks in one process"
            )
        new = memo[id(self)] = object.__new__(type(self))
        tables = {name: copy.copy(value) for name, value in self.__dict__.items() if isinstance(value, (dict, list)) and name != "_copies"}
        new.__dict__.update({**self.__dict__, **tables, "_copies": {}, "_elsewhere": Elsewhere(), "_lent": itertools.count()})
        new._modules = {name: copy.deepcopy(module, memo) for name, module in self._modules.items()}
        new._tracer = None if self._tracer is None else self._tracer.of_copy(new._root())
        new._fixed = copy.deepcopy(self._fixed, memo)
        found = new._known() if self.model_moved_to_device else None
        if found is not None:
            new._place(found, moving=True)
        return new

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "original_torch_module":
                raise
            return getattr(self.original_torch_module, name)


def _schedule(given: Any, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule that is meant. Raises ScheduleError for one that cannot be run with these numbers."""
    if given is None:
        given = "interleaved" if chunks > 1 else "1f1b"
    placement = None
    if isinstance(given, str) and not given.endswith(".csv") and "\n" not in given:
        found = schedules.make(given, ranks, microbatches, chunks if chunks > 1 else None)
    elif isinstance(given, Schedule):
        found = given
    elif isinstance(given, (str, Path, list, tuple)):
        found = schedules.from_csv(given) if isinstance(given, (str, Path)) else schedules.from_orders(given)
    else:
        raise TypeError(
            f"schedule takes a name ({', '.join(schedules.KINDS)}), a Schedule, a list of actions for each rank, or torch's CSV, got {type(given).__name__}"
        )
    if len(found.placement) != ranks * chunks:
        virtual, rest = divmod(len(found.placement), ranks)
        todo = f"give each of the {ranks} ranks as many stages" if rest else f"set virtual_pipeline_size={virtual}"
        raise schedules.ScheduleError(
            f"the pipeline schedule {found.name} has {len(found.placement)} stages, and pipeline_parallel_size={ranks} with virtual_pipeline_size={chunks} "
            f"makes {ranks * chunks}: {todo}"
        )
    schedules.check(found, microbatches, placement)
    return found


def _ambient_autocast() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The autocast that a step is called in, for each forward pass of a stage by itself."""
    if not torch.is_autocast_enabled("xla"):
        return contextlib.nullcontext
    dtype = torch.get_autocast_dtype("xla")
    return lambda: torch.autocast("xla", dtype=dtype)

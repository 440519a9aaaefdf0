"""`neuronx_distributed.trace.model_builder`: the older builder, which makes its modules itself, a program for each key and bucket.

The functions of `trace.functions` have names here, too, with a DeprecationWarning.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nxd_jax.tensor_parallel import kv_groups
from nxd_jax.trace import cuts, functions
from nxd_jax.trace.parallel_context import NxDParallelState
from nxd_jax.trace.spmd import NxDModel, NxDModelExecutor
from nxd_jax.utils import model_utils
from torch_bridge.aot import traced_module
from torch_bridge.aot.model import Program

_FUNCTIONS = ("trace", "compile", "compile_wlo", "compile_layout_transformer", "shard_checkpoint")


class BaseModelInstance:
    """`model_builder.BaseModelInstance`: how the builder makes a module. input_output_aliases: {parameter or buffer: index of the result that updates it}.

    Subclasses override `load_module` and `get`, as the original's examples do.
    """

    def __init__(self, module_cls: Callable[..., torch.nn.Module], input_output_aliases: Mapping[torch.Tensor, int]):
        self.module_cls = module_cls
        self.module: Any = None
        self.input_output_aliases: Any = [input_output_aliases]

    def load_module(self) -> None:
        """Make the module; called with parallel state set up."""
        self.module = self.module_cls()

    def get(self, bucket_rank: int, **kwargs: Any) -> tuple[torch.nn.Module, Mapping[torch.Tensor, int]]:
        """The module and its states, for a bucket."""
        return self.module, self.input_output_aliases[0] if isinstance(self.input_output_aliases, list) else self.input_output_aliases


class ModelBuilder:
    """`neuronx_distributed.trace.ModelBuilder`: `add(key, instance, example_inputs)` for each kind of call, then `trace()`.

    router: accepted (calls are routed by shapes). tp_degree, pp_degree, ep_degree: parallel sizes; world_size: default their product. checkpoint_loader: gives
    the full state dict. local_ranks_size, start_rank_id: this process hosts all ranks. compiler_workdir: older programs in it go. init_custom_process_group_fn:
    called with parallel state set up. num_cores_per_group: neighbouring ranks that share a K/V head (`parallel_state.initialize_kv_group`),
    if it is more than 1. logical_nc_config, master_proc_env_vars, debug, weights_to_skip_layout_optimization,
    compiler_flag_hook: accepted.

    Raises ValueError for a world_size without local_ranks_size.
    """

    def __init__(
        self,
        router: Any,
        tp_degree: int,
        checkpoint_loader: Callable[[], dict[str, torch.Tensor]] | None,
        start_rank_id: int = 0,
        pp_degree: int = 1,
        ep_degree: int = 1,
        local_ranks_size: int | None = None,
        world_size: int | None = None,
        compiler_workdir: str | Path | None = None,
        master_proc_env_vars: Mapping[str, str] | None = None,
        debug: bool = False,
        num_cores_per_group: int = 1,
        init_custom_process_group_fn: Callable[[], None] | None = None,
        logical_nc_config: int = 1,
        weights_to_skip_layout_optimization: set[str] | None = None,
        compiler_flag_hook: Callable[..., Any] | None = None,
    ):
        if world_size is not None and local_ranks_size is None:
            raise ValueError(f"world_size={world_size} needs local_ranks_size, the ranks of this process")
        self.router = router
        self.tp_degree = tp_degree
        self.pp_degree = pp_degree
        self.ep_degree = ep_degree
        self.checkpoint_loader = checkpoint_loader
        self.world_size = world_size or tp_degree * pp_degree * ep_degree
        self.local_ranks_size = local_ranks_size or self.world_size
        self.start_rank_id = start_rank_id
        self.compiler_workdir = Path(compiler_workdir) if compiler_workdir is not None else Path(tempfile.gettempdir()) / "nxd_model"
        self.init_custom_process_group_fn = init_custom_process_group_fn
        self.num_cores_per_group = num_cores_per_group
        self.debug = debug
        self.model_collection: dict[str, tuple[BaseModelInstance, list[Any], Any]] = {}
        if self.compiler_workdir.is_dir() and any(self.compiler_workdir.rglob("graph.stablehlo")):
            shutil.rmtree(self.compiler_workdir)

    def add(
        self,
        key: str,
        model_instance: BaseModelInstance,
        example_inputs: Sequence[tuple[torch.Tensor, ...]],
        compiler_args: str | None = None,
        bucket_config: Any = None,
        priority_model_idx: int | None = None,
    ) -> ModelBuilder:
        """Add a kind of call: how its module is made, and the example inputs of each bucket. compiler_args, priority_model_idx: accepted.

        bucket_config: accepted with a DeprecationWarning, its `func_kwargs` go to `model_instance.get`. Raises ValueError for a key that is there.
        """
        if bucket_config is not None:
            warnings.warn("bucket_config is not needed: each entry of example_inputs is a bucket", DeprecationWarning, stacklevel=2)
        if key in self.model_collection:
            raise ValueError(f"key {key!r} is there already: give each kind of call its own")
        if not isinstance(example_inputs, (list, tuple)) or not example_inputs:
            raise ValueError("example_inputs must be a list with a tuple of tensors for each bucket")
        self.model_collection[key] = (model_instance, list(example_inputs), bucket_config)
        return self

    def trace(self, initialize_model_weights: bool = True, dry_run: bool = False, disable_fail_fast: bool = False) -> NxDModelExecutor:
        """Trace all keys and buckets. initialize_model_weights: the checkpoint's weights go into the model, which can be called at once and is saved with them.

        dry_run: the programs are traced and written, and the model has no weights. Raises ValueError without keys, or for two buckets of the same shapes.
        """
        if not self.model_collection:
            raise ValueError("nothing was added: call add(key, model_instance, example_inputs) before trace()")
        programs: dict[str, Program] = {}
        weights: list[dict[str, torch.Tensor]] | None = None
        with self._parallel_state():
            for key, (instance, examples, bucket_config) in self.model_collection.items():
                instance.load_module()
                for bucket, example in enumerate(examples):
                    kwargs = {} if bucket_config is None else bucket_config.get_func_kwargs_for_bucket_rank(bucket)
                    module, aliases = instance.get(bucket, **kwargs)
                    tag = key if len(examples) == 1 else f"{key}_{bucket}"
                    programs[tag], _ = traced_module.trace_program(module, example, aliases, cuts.describe_in(module))
                    functions.compile(programs[tag].forms.for_all_ranks, None, self.compiler_workdir, None, tag)
            if initialize_model_weights and not dry_run:
                weights = self._weights(None)
        model = NxDModel(programs, weights)
        if weights is not None:
            model.initialize_with_saved_weights(torch.tensor([self.start_rank_id], dtype=torch.int32))
        return NxDModelExecutor(model)

    def shard_checkpoint(self, serialize_path: str | None = None) -> list[dict[str, torch.Tensor]]:
        """The checkpoint cut for each rank of this process, in the dtypes of the model. serialize_path: a folder for the ranks' files."""
        with self._parallel_state():
            return self._weights(serialize_path)

    def _weights(self, serialize_path: str | None) -> list[dict[str, torch.Tensor]]:
        if self.checkpoint_loader is None:
            raise ValueError("the builder has no checkpoint_loader: give one, or trace(initialize_model_weights=False)")
        instance = next(iter(self.model_collection.values()))[0]
        with model_utils.init_on_device(torch.device("meta")):
            instance.load_module()
        module, _ = instance.get(0)
        last = self.start_rank_id + self.local_ranks_size - 1
        return functions.shard_checkpoint(self.checkpoint_loader(), module, self.start_rank_id, last, serialize_path=serialize_path)

    def _parallel_state(self) -> _State:
        return _State(self)


class _State:
    """Parallel state of a builder's sizes, with its own groups."""

    def __init__(self, builder: ModelBuilder):
        self._builder = builder
        self._state = NxDParallelState(
            world_size=builder.world_size,
            tensor_model_parallel_size=builder.tp_degree,
            pipeline_model_parallel_size=builder.pp_degree,
            expert_model_parallel_size=builder.ep_degree,
        )

    def __enter__(self) -> None:
        self._state.__enter__()
        try:
            if self._builder.num_cores_per_group > 1:
                kv_groups.initialize(self._builder.num_cores_per_group, sequential=True)
            if self._builder.init_custom_process_group_fn is not None:
                self._builder.init_custom_process_group_fn()
        except BaseException:
            self._state.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *exc: object) -> None:
        self._state.__exit__(*exc)


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        warnings.warn(f"trace.model_builder.{name} is trace.functions.{name}", DeprecationWarning, stacklevel=2)
        return getattr(functions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""`torch_neuronx`'s functions for inference: modules traced ahead of time, alone or in buckets, and what is done with them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from torch_bridge.mesh import world


def trace(
    func: torch.nn.Module | Callable[..., Any],
    example_inputs: object,
    *_: object,
    input_output_aliases: Mapping[torch.Tensor, int] | None = None,
    compiler_workdir: str | Path | None = None,
    compiler_args: str | Sequence[str] | None = None,
    partitioner_config: object = None,
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> Any:
    """`torch_neuronx.trace`: a module (or function) compiled for inputs of these shapes and dtypes; called with CPU tensors it gives CPU tensors.

    example_inputs: a tensor, or a tuple of tensors and nests of them. input_output_aliases: parameters and buffers that a result of forward updates, and which
    one: they are kept from call to call, and that result is not returned. Buffers that forward assigns anew or updates in place are kept, too. The result is
    saved with `torch.jit.save` and loaded with `torch.jit.load`. Other arguments are accepted.

    In a world of several ranks, such as a job's or that of `NEURON_RT_NUM_CORES=2`, the model is one core's all the same. Raises RuntimeError if the module
    cannot be traced (it reads values), or if it needs the other ranks (`neuronx_distributed.trace.parallel_model_trace`), ValueError for inputs or results
    that are not tensors.
    """
    from torch_bridge.aot import traced_module

    module = traced_module.as_module(func)
    program, inputs = _traced_for_one_rank("trace", module, traced_module.as_tuple(example_inputs), input_output_aliases)
    weights = traced_module.kept([_weights(module)])
    return traced_module.TracedModule({traced_module.tag_of(0): program}, inputs, weights, tied=traced_module.tied_names(module))


class BucketModelConfig:
    """`torch_neuronx.BucketModelConfig`: how `bucket_model_trace` chooses among buckets.

    bucket_kernel: a function that returns a TorchScript function from (list of tensors, *bucket_kernel_constant_args) to (tensors as the bucket takes them,
    its number as a tensor). shared_state_buffer: example states, accepted (states belong to the module here). func_kwargs: a dict for each bucket, or one for
    all: what the function that makes the module is called with.
    """

    def __init__(
        self,
        bucket_kernel: Callable[[], Any],
        *,
        bucket_kernel_constant_args: Sequence[Any] = (),
        shared_state_buffer: Sequence[torch.Tensor] | None = None,
        func_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ):
        if not callable(bucket_kernel):
            raise ValueError(
                f"bucket_kernel must be a function that returns a torch.jit.script function, got {type(bucket_kernel).__name__}"
            )
        self.bucket_kernel = bucket_kernel
        self.bucket_kernel_constant_args = tuple(bucket_kernel_constant_args)
        self.shared_state_buffer = shared_state_buffer
        self.func_kwargs = func_kwargs
        self.example_inputs: list[Any] = []

    def store_example_inputs(self, example_inputs: Sequence[Any]) -> None:
        """Keep the example inputs of all buckets."""
        if not isinstance(example_inputs, (list, tuple)) or not example_inputs:
            raise ValueError("example_inputs must be a list with the inputs of each bucket")
        self.example_inputs = list(example_inputs)

    @property
    def bucket_degree(self) -> int:
        """How many buckets there are."""
        return len(self.example_inputs)

    def get_func_kwargs_for_bucket_rank(self, bucket_rank: int) -> dict[str, Any]:
        """What the module of a bucket is made with."""
        if self.func_kwargs is None:
            return {}
        own = self.func_kwargs if isinstance(self.func_kwargs, Mapping) else self.func_kwargs[bucket_rank]
        return dict(own)


class PartitionerConfig:
    """`torch_neuronx.PartitionerConfig`: which operators the original leaves on the CPU. Accepted: every operator is part of the program here."""

    def __init__(self, *, trace_kwargs: dict[str, Any] | None = None, model_support_percentage_threshold: float = 0.5, **kwargs: object):
        self.trace_kwargs = trace_kwargs
        self.model_support_percentage_threshold = model_support_percentage_threshold
        self.options = kwargs


def bucket_model_trace(
    func: Callable[..., Any],
    example_inputs: Sequence[Any],
    bucket_config: BucketModelConfig,
    compiler_workdir: str | Path | None = None,
    compiler_args: object = None,
    partitioner_config: object = None,
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> Any:
    """`torch_neuronx.bucket_model_trace`: one model with a program for each bucket, chosen by `bucket_config`'s kernel; weights and states are shared by name.

    func: makes (module, {state: index of the result that updates it}). example_inputs: those of each bucket. Others and errors as in `trace`; ValueError if the
    modules of two buckets have a weight with other values.
    """
    from torch_bridge.aot import traced_module

    bucket_config.store_example_inputs(example_inputs)
    programs = {}
    weights: dict[str, torch.Tensor] = {}
    for bucket, example in enumerate(bucket_config.example_inputs):
        module, aliases = made(func, bucket_config.get_func_kwargs_for_bucket_rank(bucket))
        programs[traced_module.tag_of(bucket)], inputs = _traced_for_one_rank(
            "bucket_model_trace", module, traced_module.as_tuple(example), aliases
        )
        weights = traced_module.with_more(weights, _weights(module), module, bucket)
    buckets = traced_module.Buckets(bucket_config.bucket_kernel(), bucket_config.bucket_kernel_constant_args)
    return traced_module.TracedModule(programs, inputs, traced_module.kept([weights]), buckets, tied=traced_module.tied_names(module))


def made(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[torch.nn.Module, Mapping[torch.Tensor, int]]:
    """What a function that makes a model returns: the module, in evaluation mode as it is, and its states."""
    found = func(**kwargs)
    if isinstance(found, torch.nn.Module):
        return found, {}
    module, aliases = found
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"the function must return (module, states), got {type(module).__name__} first")
    return module, aliases or {}


def analyze(func: object, example_inputs: object, compiler_workdir: object = None) -> dict[str, Any]:
    """`torch_neuronx.analyze`: which operators of a module are supported, as a report.

    Every operator runs here, so `support_percentage` is 100 and `unsupported_operators` empty; the report names the operators and how often each is used.
    """
    from torch_bridge.aot import forwards, traced_module

    graph = forwards.capture_unchecked(traced_module.as_module(func), *traced_module.as_tuple(example_inputs))
    counts: dict[str, int] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            name = str(node.target)
            counts[name] = counts.get(name, 0) + 1
    operators = [{"operator": name, "instances": n, "supported": True} for name, n in sorted(counts.items())]
    return {
        "support_percentage": 100.0,
        "supported_operators": operators,
        "unsupported_operators": [],
    }


def dynamic_batch(neuron_script: Any) -> Any:
    """`torch_neuronx.dynamic_batch`: let the first dim of all inputs and results have any size; rows run in batches of the traced size. Returns the model."""
    _require_no_buckets(_traced(neuron_script, "dynamic_batch"), "dynamic_batch")
    neuron_script.dynamic_batch = True
    return neuron_script


def async_load(trace: object) -> None:
    """`torch_neuronx.async_load`: put a traced model, or those in a module (`parallel_model_trace`), on its device now instead of with the first call."""
    for model in _all_traced(trace, "async_load"):
        model.load()


def lazy_load(trace: object, enable_lazy_load: bool = True) -> None:
    """`torch_neuronx.lazy_load`: put a traced model, or those in a module, on its device with the first call (as it is by default), or now (False)."""
    if not enable_lazy_load:
        for model in _all_traced(trace, "lazy_load"):
            model.load()


def move_trace_to_device(trace: object, device_id: int) -> None:
    """`torch_neuronx.move_trace_to_device`: the NeuronCore that a traced model runs on. Accepted: it runs on JAX's first device."""
    _all_traced(trace, "move_trace_to_device")
    if device_id < 0:
        raise ValueError(f"device_id must not be negative, got {device_id}")


def replace_weights(neuron_model: object, weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
    """`torch_neuronx.replace_weights`: other weights for a traced model, from a module or a state dict. States stay as they are.

    Raises ValueError for names that it does not have, for shapes that do not fit, and for tied weights that differ.
    """
    from torch_bridge.aot import traced_module

    model = _traced(neuron_model, "replace_weights")
    given = traced_module.by_first_names(_weights(weights) if isinstance(weights, torch.nn.Module) else weights, model.tied)
    unknown = [name for name in given if name not in model.programs.weights and name not in model.programs.states]
    if unknown:
        raise ValueError(f"the traced model has no weight {', '.join(unknown[:8])}")
    model.replace_weights([given for _ in model.weights])


class DataParallel(torch.nn.Module):
    """`torch_neuronx.DataParallel`: a traced model for larger batches; its cores are one device here, so their parts run one after the other.

    With dynamic batching (dim 0 only) a batch may have any size. Without, each of the cores that `device_ids` names gets an equal part of the inputs along
    `dim`, of the traced size; without `device_ids` there are as many cores as such parts. Results are joined along `dim`. num_workers: accepted.
    A model that keeps states takes one part.
    """

    def __init__(
        self,
        model: object,
        device_ids: Sequence[int] | None = None,
        dim: int = 0,
        set_dynamic_batching: bool = True,
        num_workers: int | None = None,
    ):
        super().__init__()
        self.model = copy.copy(_traced(model, "DataParallel"))
        dynamic = set_dynamic_batching and dim == 0
        if dynamic:
            _require_no_buckets(self.model, "DataParallel(set_dynamic_batching=True)")
        self.model.dynamic_batch = dynamic
        self.device_ids = None if device_ids is None else list(device_ids)
        self.dim = dim
        self.num_workers = num_workers

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the model. Raises ValueError, without dynamic batching, for inputs that are no whole number of the traced ones, NotImplementedError for several
        parts of a model that keeps states."""
        args = self.model.positional(args, kwargs)
        count = self._count(args)
        if count > 1:
            self._check_states()
        if self.model.dynamic_batch or count == 1:
            return self.model(*args)
        leaves, structure = _pytree.tree_flatten(args)
        parts = [self._parts(x, count) for x in leaves]
        found = [self.model(*_pytree.tree_unflatten(part, structure)) for part in zip(*parts, strict=True)]
        return _pytree.tree_map(lambda *results: self._joined(list(results)), *found)

    def disable_dynamic_batching(self) -> None:
        """Each core gets a part of the traced size from now on."""
        self.model.dynamic_batch = False

    def _check_states(self) -> None:
        states = self.model.programs.states
        if states:
            raise NotImplementedError(
                f"torch_neuronx.DataParallel with several parts: the model keeps {', '.join(list(states)[:8])} from call to call, on the original's cores one "
                "for each. Trace the model for the whole batch, or call a copy of it (copy.deepcopy) for each part"
            )

    def _count(self, args: object) -> int:
        if self.device_ids is not None:
            return max(len(self.device_ids), 1)
        given = [x for x in _pytree.tree_leaves(args) if isinstance(x, torch.Tensor) and x.dim() > self.dim]
        traced = self.model.traced_sizes(self.dim)
        return given[0].shape[self.dim] // traced[0] or 1 if given and traced and traced[0] else 1

    def _parts(self, x: Any, count: int) -> Sequence[Any]:
        if not isinstance(x, torch.Tensor) or x.dim() <= self.dim:
            return [x] * count
        if x.shape[self.dim] % count:
            raise ValueError(
                f"DataParallel without dynamic batching gives each of {count} cores an equal part along dim {self.dim}, of the size that was traced; got an "
                f"input of shape {list(x.shape)}"
            )
        return x.split(x.shape[self.dim] // count, self.dim)

    def _joined(self, results: list[Any]) -> Any:
        if not isinstance(results[0], torch.Tensor):
            return results[0]
        return torch.cat(results, self.dim) if results[0].dim() > self.dim else torch.stack(results)


def _all_traced(model: object, name: str) -> list[Any]:
    """A traced model, or those that a module has."""
    from torch_bridge.aot.traced_module import TracedModule

    found = [m for m in model.modules() if isinstance(m, TracedModule)] if isinstance(model, torch.nn.Module) else []
    return found or [_traced(model, name)]


def _traced(model: object, name: str) -> Any:
    from torch_bridge.aot.traced_module import TracedModule

    if not isinstance(model, TracedModule):
        raise ValueError(
            f"torch_neuronx.{name} takes a model that torch_neuronx.trace returned or torch.jit.load read, got {type(model).__name__}"
        )
    return model


def _require_no_buckets(model: Any, name: str) -> None:
    if model.buckets is not None:
        raise NotImplementedError(f"torch_neuronx.{name} is for models without buckets: let the bucket kernel pad the batch, too")


def _traced_for_one_rank(
    name: str, module: torch.nn.Module, example: tuple[Any, ...], aliases: Mapping[torch.Tensor, int] | None
) -> tuple[Any, Any]:
    """`trace_program` in a world of one rank. Raises RuntimeError if the forward is another one in the world there is."""
    from torch_bridge.aot import traced_module

    if world.size() == 1:
        world.provision(64)  # a script may go on with neuronx_distributed and more ranks
        return traced_module.trace_program(module, example, aliases)
    _require_no_ranks(name, module, example)
    with world.taken_for(world.World(1)):
        return traced_module.trace_program(module, example, aliases)


def _require_no_ranks(name: str, module: torch.nn.Module, example: tuple[Any, ...]) -> None:
    """Raise RuntimeError if a forward needs the ranks of the world: it communicates, it computes with its rank, or it reads what ranks have parts of."""
    from torch_bridge.recorder import sharded

    own = [*module.parameters(), *module.buffers()]
    if any(t.device.type == "xla" for t in (*own, *_pytree.tree_leaves(example)) if isinstance(t, torch.Tensor)):
        reason = "the module or its inputs are on xla, where each rank has its own: move them to the CPU first"
    elif any(sharded.of_each(t.detach()) is not None for t in own):
        reason = "each rank has weights of its own: use neuronx_distributed.trace.parallel_model_trace or ModelBuilder"
    elif _is_cut(own) or _asks_for_ranks(module, example):
        reason = (
            "its forward communicates among them or depends on the rank: use neuronx_distributed.trace.parallel_model_trace or ModelBuilder"
        )
    else:
        return
    raise RuntimeError(f"torch_neuronx.{name} traces for one rank, the world has {world.size()}, and {reason}")


def _is_cut(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether model-parallel ranks have parts of some tensor."""
    return any(n > 1 for axis, n in world.current().axes.items() if axis != "dp") and any(
        getattr(t, "tensor_model_parallel", False) for t in tensors
    )


def _asks_for_ranks(module: torch.nn.Module, example: tuple[Any, ...]) -> bool:
    """Whether the forward has collectives here, or is another one where the world is one rank."""
    from torch_bridge.aot import forwards
    from torch_bridge.lowerings import is_collective

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trace itself says it
        here = forwards.capture_unchecked(module, *example).graph
        if any(n.op == "call_function" and is_collective(n.target) for n in here.nodes):
            return True
        with world.taken_for(world.World(1)):
            return str(here) != str(forwards.capture_unchecked(module, *example).graph)


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: t.detach().cpu() for name, t in named if t.device.type != "meta"}

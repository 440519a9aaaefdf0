"""`neuronx_distributed.utils.model_utils`: making models without memory for them, and moving them with their ties and parallel attributes."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.types import Device

from nxd_jax.tensor_parallel import partition, sharded_weights
from nxd_jax.tensor_parallel.parallel_groups import get_local_world_size as get_local_world_size
from torch_bridge.mesh import abstract_arrays, processes, sharding, world

_ATTRIBUTES = (
    *partition.UNMARKED,
    "expert_model_parallel",
    "expert_distribution",
    "is_prefill",
    "qkv_partition",
    "sequence_parallel_enabled",
    "shared",
)
"""Attributes of parameters that say how ranks share them."""

_PAYLOAD = ("_storage", "_layout", "_is_param")
"""What an xla tensor consists of: no attributes of a parameter."""

# -- ties and attributes -----------------------------------------------------------------------------


def is_hf_pretrained_model(model: object) -> bool:
    """`model_utils.is_hf_pretrained_model`: whether a model is one of transformers' (which then has been imported)."""
    found = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return found is not None and isinstance(model, found)


def is_hf_transformers_available() -> bool:
    """Whether transformers is installed."""
    return importable("transformers")


def is_hf_accelerate_available() -> bool:
    """Whether accelerate is installed. `init_on_device` does without it."""
    return importable("accelerate")


def is_nxdt_pretrained_model(model: object) -> bool:
    """`model_utils.is_nxdt_pretrained_model`: whether a model is a `MegatronModule` of NeuronX Distributed Training."""
    found = getattr(sys.modules.get("neuronx_distributed_training.models.megatron.module"), "MegatronModule", None)
    return found is not None and isinstance(model, found)


def is_nxdt_available() -> bool:
    """Whether NeuronX Distributed Training is installed."""
    return importable("neuronx_distributed_training")


def importable(name: str) -> bool:
    """Whether a top-level module can be imported; it is not imported."""
    from importlib.util import find_spec

    return name in sys.modules or find_spec(name) is not None


def analyze_shared_parameters(module: nn.Module) -> list[list[str]]:
    """`model_utils.analyze_shared_parameters`: for each parameter that the model holds under several names, those names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [found for found in names.values() if len(found) > 1]


def retie_shared_weights(module: nn.Module, shared_weight_names: list[list[str]]) -> None:
    """`model_utils.retie_shared_weights`: make the parameters of each list of names the first one's."""
    for first, *others in shared_weight_names:
        parameter = module.get_parameter(first)
        for name in others:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, parameter)


@contextlib.contextmanager
def preserve_shared_weights(model: nn.Module, ignore_hf: bool = False) -> Iterator[None]:
    """`model_utils.preserve_shared_weights`: after the block, parameters that were one before it are one again (the first name's).

    Models of transformers then tie their weights themselves as well (`tie_weights`), unless `ignore_hf`.
    """
    shared = analyze_shared_parameters(model)
    try:
        yield
    finally:
        retie_shared_weights(model, shared)
        if is_hf_pretrained_model(model) and not ignore_hf:
            model.tie_weights()  # type: ignore[operator]


@contextlib.contextmanager
def preserve_parallel_attributes(model: nn.Module) -> Iterator[None]:
    """`model_utils.preserve_parallel_attributes`: after the block, parameters that were replaced in it have the attributes of the old ones.

    Tensor, expert and sequence parallel attributes and `shared`; also `rank_ordering` and `qkv_partition`, which NxD loses.
    """
    before = {name: _attributes(p) for name, p in model.named_parameters(remove_duplicate=False)}
    try:
        yield
    finally:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            for key, value in before.get(name, {}).items():
                if not hasattr(parameter, key):
                    setattr(parameter, key, value)


def _attributes(parameter: nn.Parameter) -> dict[str, Any]:
    return {key: getattr(parameter, key) for key in _ATTRIBUTES if hasattr(parameter, key)}


# -- moving ------------------------------------------------------------------------------------------


def move_model_to_device(model: nn.Module, device: Any) -> None:
    """`model_utils.move_model_to_device`: `model.to(device)`, keeping ties between weights and the attributes of parallel parameters."""
    with preserve_parallel_attributes(model), preserve_shared_weights(model):
        model.to(device)


def reinit_model(model: nn.Module, device: Any, param_init_fn: Callable[..., Any]) -> None:
    """`model_utils.reinit_model`: give every module empty parameters on a device (for those on "meta", say) and let `param_init_fn(module, device)` fill them.

    `param_init_fn(module)`, as earlier releases called it, works too. Attributes and ties are kept; of tied parameters the first one's values count.
    Weights that several ranks of this process share out are on xla once their layer's `init_weight_cpu()` has been called. Integer parameters that are not on
    "meta" keep their values. Warns, naming them, of parameters on the CPU that the function leaves without values: they become NaN.
    """
    with preserve_parallel_attributes(model), preserve_shared_weights(model):
        _fill(model, torch.device(device), param_init_fn)


def materialize_model(model: nn.Module, device: Any, param_init_fn: Callable[..., Any]) -> None:
    """Give a model made by `init_on_device("meta")` its values on a device, module by module. (NxD: the whole model on the CPU first.)

    `param_init_fn(module, cpu)` fills a module's own parameters on the CPU, as `reinit_model` has it; they go to the device at once, so that the host
    holds about one full parameter at a time. The numbers are those of `reinit_model` and a move. Warns as it does.

    Raises RuntimeError for buffers that are still on "meta", naming all of them.
    """
    left: list[str] = []

    def move(path: str, module: nn.Module) -> None:
        empty = [f"{path}.{name}".lstrip(".") for name, b in module._buffers.items() if b is not None and b.is_meta]
        left.extend(empty)
        if not empty:
            _move_own(module, device)

    with preserve_parallel_attributes(model), preserve_shared_weights(model):
        _fill(model, torch.device("cpu"), param_init_fn, move)
    if left:
        raise RuntimeError(
            f"buffers without values: {', '.join(left)}. They were made on 'meta' because of include_buffers=True. Set them in param_init_fn "
            "(module.name = tensor), or use include_buffers=False, which makes buffers where model_fn makes them"
        )


def _move_own(module: nn.Module, device: Device) -> None:
    """`module.to(device)` without its children."""
    with _without_children(module):
        nn.Module.to(module, device)


@contextlib.contextmanager
def _without_children(module: nn.Module) -> Iterator[None]:
    children, module._modules = module._modules, {}
    try:
        yield
    finally:
        module._modules = children


def _fill(
    model: nn.Module,
    device: torch.device,
    param_init_fn: Callable[..., Any],
    done: Callable[[str, nn.Module], None] = lambda path, module: None,
) -> None:
    """Empty parameters and `param_init_fn` for one module after the other, then `done(path, module)`. A parameter that several hold stays one."""
    first: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    unfilled: list[str] = []
    two = _takes_two(param_init_fn)
    for path, module in model.named_modules():
        with torch.no_grad():
            old = _emptied(module, device)
            param_init_fn(module, device) if two else param_init_fn(module)
            for name, before in old.items():
                after = module._parameters[name]
                if id(before) in first:
                    module._parameters[name] = first[id(before)][1]
                elif after is not None:
                    first[id(before)] = before, after
                    if _is_unfilled(after):
                        after.fill_(math.nan)
                        unfilled.append(f"{path}.{name}".lstrip("."))
        done(path, module)
    if unfilled:
        warnings.warn(
            f"param_init_fn left parameters without values, which are NaN now: {', '.join(unfilled)}. It is called with every module: let it fill "
            "those of these too (init_weight_cpu() of parallel layers, reset_parameters() of most others)",
            stacklevel=4,
        )


def _emptied(module: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
    """Replace a module's own parameters by empty ones on a device; returns those that it had."""
    old = {name: p for name, p in module._parameters.items() if p is not None and (p.is_meta or p.is_floating_point() or p.is_complex())}
    for name, parameter in old.items():
        empty = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        empty.__dict__.update({key: value for key, value in parameter.__dict__.items() if not key.startswith("_")})
        module._parameters[name] = empty
        if _can_be_marked(empty):
            for end in _ends(empty):
                end.fill_(math.nan)
    return old


def _can_be_marked(parameter: torch.Tensor) -> bool:
    return parameter.device.type == "cpu" and parameter.is_floating_point() and parameter.numel() > 0 and parameter.is_contiguous()


def _ends(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last element."""
    flat = parameter.detach().view(-1)
    return flat[:1], flat[-1:]


def _is_unfilled(parameter: torch.Tensor) -> bool:
    """Whether a parameter still has the NaNs at its ends that `_emptied` wrote. (Writing to all of it would cost memory that nobody may touch.)"""
    return _can_be_marked(parameter) and all(bool(end.isnan()) for end in _ends(parameter))


def _takes_two(fn: Callable[..., Any]) -> bool:
    """Whether a function can be called with two arguments."""
    try:
        inspect.signature(fn).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def get_model_sequential(
    model: Any, device: Device, sequential_move_factor: int = 11, param_init_fn: Callable[..., Any] | None = None
) -> Any:
    """`model_utils.get_model_sequential`: give a model its values if `param_init_fn` is given (`materialize_model`), move it to a device, return it.

    Of the processes on a host, `sequential_move_factor` do so at a time, which bounds the host's memory. A pipeline model moves its own stage.
    """
    if sequential_move_factor < 1:
        raise ValueError(f"sequential_move_factor={sequential_move_factor} must be positive")
    if world.process_count() > 1:
        sharding.mesh()  # processes find each other here, which they could not while some wait for their turn
    here = len(world.current().hosted)
    place = world.first() % world.local_size() // here
    for turn in range(math.ceil(world.local_size() / here / sequential_move_factor)):
        if place // sequential_move_factor == turn:
            _materialize_and_move(model, device, param_init_fn)
        processes.barrier("get_model_sequential")
    return model


def _materialize_and_move(model: Any, device: Device, param_init_fn: Callable[..., Any] | None) -> None:
    if hasattr(type(model), "maybe_materialize_local_module"):
        model.maybe_materialize_local_module()
        model.move_model_to_device()
        return
    if param_init_fn is not None and not abstract_arrays.active():
        materialize_model(model, device, param_init_fn)
        return
    move_model_to_device(model, device)


# -- making ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def init_on_device(device: Any, include_buffers: bool = False, force_custom_init_on_device: bool = False) -> Iterator[None]:
    """`model_utils.init_on_device`: within the block, parameters that modules register are on a device, "meta" as a rule: models without memory.

    On "meta" parallel layers and torch's modules make no weights at all, and draw no random numbers; others make one at a time before it is registered.
    Integer parameters stay as they are: they are constants, which no initialisation would bring back.
    include_buffers: buffers as well, and whatever else is made without saying where (but not `torch.tensor`). Attributes and `requires_grad` stay, and
    a parameter registered twice stays one. force_custom_init_on_device: NxD uses accelerate's function otherwise; here there is one for both.
    """
    target = torch.device(device)
    register, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def parameter_there(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or param.device.type == target.type or not (param.is_floating_point() or param.is_complex()):
            register(module, name, param)
            return
        if id(param) not in moved:
            moved[id(param)] = param, _moved(param, target)
        register(module, name, moved[id(param)][1])

    def buffer_there(module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        register_buffer(module, name, tensor if tensor is None else tensor.to(target), persistent)

    with contextlib.ExitStack() as block:
        block.callback(setattr, nn.Module, "register_parameter", register)
        block.callback(setattr, nn.Module, "register_buffer", register_buffer)
        nn.Module.register_parameter = parameter_there  # type: ignore[method-assign, assignment]
        if include_buffers:
            nn.Module.register_buffer = buffer_there  # type: ignore[method-assign, assignment]
            block.enter_context(target)
        if target.type == "meta":
            block.enter_context(sharded_weights.shapes_only())
            block.enter_context(_NoMemoryForParameters())
        yield


class _NoMemoryForParameters(TorchFunctionMode):
    """`torch.empty` gives torch's own modules tensors on "meta": what they make with it becomes a parameter, never a buffer. Numbers stay numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is None:
            caller = sys._getframe(1)
            own = caller.f_code.co_name == "__init__" and caller.f_globals.get("__name__", "").startswith("torch.nn.modules.")
            if func is torch.empty and own:
                kwargs = {**kwargs, "device": "meta"}
            elif func is inspect.unwrap(torch.tensor) and args and not isinstance(args[0], torch.Tensor):
                kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    new = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
    new.__dict__.update({k: v for k, v in parameter.__dict__.items() if k not in _PAYLOAD})
    return new


# -- structures and the platform ---------------------------------------------------------------------


def recursive_filter(item: object, predicate: Callable[[torch.Tensor], bool]) -> Any:
    """`model_utils.recursive_filter`: nested dicts, lists, tuples and sets without the tensors for which `predicate` is false.

    Other values stay. A tensor by itself gives None if it goes.
    """
    if isinstance(item, dict):
        return {k: recursive_filter(v, predicate) for k, v in item.items() if _stays(v, predicate)}
    if isinstance(item, (list, tuple, set)):
        return type(item)([recursive_filter(v, predicate) for v in item if _stays(v, predicate)])
    return item if _stays(item, predicate) else None


def _stays(x: object, predicate: Callable[[torch.Tensor], bool]) -> bool:
    return not isinstance(x, torch.Tensor) or bool(predicate(x))


class LogicalNCConfig(IntEnum):
    """`model_utils.LogicalNCConfig`: physical cores in a logical one."""

    LNC_1 = 1
    LNC_2 = 2


def get_platform_lnc() -> LogicalNCConfig:
    """`model_utils.get_platform_lnc`: two physical cores in a logical one on trn2, else one."""
    from torch_bridge.torch_neuronx.utils import get_platform_target

    return LogicalNCConfig.LNC_2 if get_platform_target() == "trn2" else LogicalNCConfig.LNC_1


def check_delay_tracing(nxd_config: Any) -> bool:
    """`model_utils.check_delay_tracing`: whether pipeline tracing waits for the first batch: never, as in NxD."""
    return False


def get_delay_tracing(arg: Any) -> bool:
    """`model_utils.get_delay_tracing`: never, as in NxD."""
    return False

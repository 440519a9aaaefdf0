"""`XlaFullyShardedDataParallel`: the module that scripts wrap their modules in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_bridge.fsdp import (
    grad_norm,
    live,
    metadata,
    naming,
    optimizer_states,
    options,
    scaled_steps,
    sharding,
    state,
    torchs_norm,
    torchs_states,
    wrapping,
)
from torch_bridge.fsdp.inner import XlaFlattenParamsWrapper
from torch_bridge.fsdp.shards import Shared
from torch_bridge.fsdp.unit import Unit
from torch_bridge.mesh import spmd_mode, world
from torch_bridge.passes import check_replicas
from torch_bridge.replay import player, replay_policy
from torch_bridge.runtime import backend, executor

if TYPE_CHECKING:
    from torch_bridge.mesh.groups import GroupLike

_KNOWN = (
    "auto_wrap_policy", "auto_wrapper_callable", "buffer_dtype", "compute_dtype", "disable_reshard_on_root", "execute_sharding_on_init", "flatten_parameters",
    "fp32_reduce_scatter", "mark_step_on_finalization", "optimization_barrier_in_backward", "optimization_barrier_in_forward", "param_init_fn",
    "reshard_after_forward", "shard_param_on_dim_0", "sharding_groups", "sharding_rank", "sharding_world_size",
)  # fmt: skip


class XlaFullyShardedDataParallel(nn.Module):
    """`torch_xla.distributed.fsdp.XlaFullyShardedDataParallel`: a module whose parameters are shared out among data-parallel ranks (ZeRO-3).

    A rank keeps 1/n of each parameter, of its gradient (the mean over ranks) and, as the optimizer sees only these shards, of the optimizer's state.
    Parameters are gathered when the wrapper is called, and again in its backward pass. Make the optimizer after wrapping, and call `optimizer.step()`, not
    `xm.optimizer_step`. Wrappers nest: the outer one takes the parameters that are left.

    module: with parameters in float32, anywhere; the wrapper moves its shards and buffers to xla.
    reshard_after_forward: let go of gathered parameters between forward and backward (default True). The outermost wrapper does not, unless
    disable_reshard_on_root=False.
    flatten_parameters: all parameters as one vector (those without gradients as another), one gather instead of many; the optimizer sees that vector, so
    options by parameter are no longer possible. Default False: each parameter is a vector of its own, padded to a multiple of 128 entries for each rank;
    shard_param_on_dim_0=True cuts it by rows instead.
    compute_dtype, buffer_dtype: float32 (default), bfloat16 or float16: of gathered parameters and of inputs that are floats, and of buffers (default:
    compute_dtype). Gradients are added up over ranks in compute_dtype, in float32 with fp32_reduce_scatter=True; shards and their gradients are float32.
    sharding_groups: lists of ranks that share parameters out, default one group of all; with sharding_rank (the rank's place in its group) and
    sharding_world_size (the size of a group). Gradients are averaged over a group only.
    auto_wrap_policy: wrap modules inside first (`torch_xla.distributed.fsdp.wrap`), with the same options, by auto_wrapper_callable(module, **options)
    (default: this class).
    param_init_fn: gives parameters on the meta device values; default: `reset_parameters()` of each module.
    optimization_barrier_in_forward, optimization_barrier_in_backward: gather once the module's inputs, or the gradients of its results, are there (default
    True); without, XLA may gather earlier, and keep what the forward pass gathered.
    mark_step_on_finalization: end the step after each backward pass (default False; such a module is not played).
    execute_sharding_on_init: cut at once, so that whole parameters are freed (default True).

    While the module is not running, its parameters' places hold tensors on the meta device: they have shapes and dtypes, and no values.

    In a world of one the module runs as it is, moved to xla, with its own names in `state_dict()`; options about sharding have no effect.

    Raises RuntimeError after `xr.use_spmd()` and for a module that is wrapped already or has no forward, TypeError for parameters of other dtypes and unknown
    options, ValueError for options that do not fit together and for parameters that are tied to those of another wrapper, NotImplementedError for torch_xla's
    `_debug_dummy_...`, and, in a world of one, for dtypes other than float32.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        mark_step_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: Any = None,
        sharding_rank: Any = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = True,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        _shard_size_multiple: int = 128,
        **others: Any,
    ):
        super().__init__()
        _refuse_annotations(type(self).__name__)
        given = {k: v for k, v in locals().items() if k not in ("self", "module", "others", "__class__")}
        name = type(self).__name__
        options.check_unknown(name, others, _KNOWN)
        self.compute_dtype = options.dtype("compute_dtype", compute_dtype, torch.float32)
        self.buffer_dtype = options.dtype("buffer_dtype", buffer_dtype, self.compute_dtype)
        self.flatten_parameters = flatten_parameters
        self.reshard_after_forward = reshard_after_forward
        self.sharding_groups = sharding_groups
        self._register_load_state_dict_pre_hook(self._before_load)
        self._unit: Unit | None = None
        self._held_back: Any = None
        self._is_root = True
        if world.size() == 1:
            self._wrap_alone(module, param_init_fn)
            return
        sharding.check_wrappable(module, XlaFullyShardedDataParallel)
        backend.ensure()
        from torch_bridge.fsdp import played  # noqa: F401

        torchs_norm.install()
        scaled_steps.install()
        torchs_states.install()
        among = options.sharding(sharding_groups, sharding_rank, sharding_world_size)
        if auto_wrap_policy is not None:
            inner = auto_wrapper_callable or XlaFullyShardedDataParallel
            inside = {k: v for k, v in given.items() if k not in ("auto_wrap_policy", "auto_wrapper_callable")}
            wrapping.recursive_wrap(module, auto_wrap_policy, inner, only_wrap_children=True, **inside, **others)
        sharding.materialize(module, param_init_fn)
        player.restore_unasked(module)
        rows = shard_param_on_dim_0 and not flatten_parameters
        shared = sharding.share_out(module, among, 1 if shard_param_on_dim_0 else _shard_size_multiple, rows, flatten_parameters)
        self._among = among
        self.rank, self.world_size = _rank(among), among.size
        self._buffer_dtypes = sharding.convert_buffers(module, self.buffer_dtype, XlaFullyShardedDataParallel)
        self._fsdp_wrapped_module = module
        for s in shared:
            self._register(s)
        for m in self.modules():
            if isinstance(m, XlaFullyShardedDataParallel) and m is not self:
                m._become_inner()
        self._unit = Unit(
            shared=shared,
            dtype=self.compute_dtype,
            wide_reduce=fp32_reduce_scatter,
            before=1.0,
            after=float(among.size),
            in_forward=optimization_barrier_in_forward,
            in_backward=optimization_barrier_in_backward,
            reshards=reshard_after_forward and not disable_reshard_on_root,
            marks=mark_step_on_finalization,
        )
        if execute_sharding_on_init:
            executor.sync()
        self._play()

    def _wrap_alone(self, module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
        for option, value in (("compute_dtype", self.compute_dtype), ("buffer_dtype", self.buffer_dtype)):
            if value != torch.float32:
                raise NotImplementedError(
                    f"{type(self).__name__}({option}={value}) is not there yet in a world of one: convert the module (module.to(torch.bfloat16)), or use "
                    "torch.autocast('xla')"
                )
        if init is not None:
            sharding.materialize(module, init)
        on_meta = any(p.is_meta for p in module.parameters())
        self._fsdp_wrapped_module = module if on_meta else module.to("xla")
        self.rank, self.world_size = 0, 1

    def _register(self, s: Shared) -> None:
        name = naming.registered(s.original)
        shard: Any = s.shard
        shard._is_sharded, shard._orig_size, shard._orig_name, shard._name = True, s.layout.size, s.original, name
        shard._sharded_among = s.layout.among
        live.add(s.shard, s.layout.among)
        self.register_parameter(name, s.shard)
        check_replicas.own(self, name, s.shard)

    def _become_inner(self) -> None:
        """There is a wrapper around this one now."""
        self._is_root = False
        if self._unit is not None:
            self._unit.reshards, self._unit.marks = self.reshard_after_forward, False
        player.restore_unasked(self)

    def _play(self) -> None:
        switch = replay_policy.said()
        if switch in (replay_policy.AUTO, replay_policy.ALL) and self._unit is not None and not self._unit.marks:
            player.play_unasked(self, 0 if switch == replay_policy.ALL else player.WARM_UP)

    # -- running --------------------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The wrapped module's, with its parameters gathered."""
        if self._unit is None:
            return self._fsdp_wrapped_module(*args, **kwargs)
        if self._held_back is not None and all(unit.settled() for unit in self._units()):
            self.forward, self._held_back = self._held_back, None  # type: ignore[method-assign]
        return self._unit(self._fsdp_wrapped_module, args, kwargs)

    def _wrappers(self) -> list[XlaFullyShardedDataParallel]:
        return [m for m in self.modules() if isinstance(m, XlaFullyShardedDataParallel)]

    def _units(self) -> list[Unit]:
        return [m._unit for m in self._wrappers() if m._unit is not None]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients of backward passes in this block, whole and of this rank alone; the next backward pass outside of it reduces them with its own.

        Takes the memory of whole gradients. Without it, gradients are added up as shards. Raises RuntimeError inside of another wrapper.
        """
        self._check_root("no_sync()")
        before = [(unit, unit.synchronizes) for unit in self._units()]
        if before and isinstance(vars(self).get("forward"), player.Player):
            self._held_back = vars(self).pop("forward")
        for unit, _ in before:
            unit.synchronizes = False
        try:
            yield
        finally:
            for unit, synchronizes in before:
                unit.synchronizes = synchronizes

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, groups: GroupLike = None) -> torch.Tensor:
        """Scale all gradients down, in place, to a total norm of `max_norm`. Returns the norm before, a number on xla.

        The norm is that of whole gradients: of shards over all ranks, or the ranks of `groups`; a parameter that is not sharded (added after wrapping) counts
        once. norm_type: p, or inf. Raises RuntimeError inside of another wrapper.
        """
        if self._unit is None:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        self._check_root("clip_grad_norm_()")
        return grad_norm.clip(list(self.parameters()), max_norm, norm_type, groups)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide gradients by `pre` before, and by `post` after they are added up over ranks (default: 1 and the number of ranks); recursive: of wrappers
        inside, too."""
        for m in self._wrappers() if recursive else [self]:
            if m._unit is not None:
                m._unit.before, m._unit.after = float(pre), float(post)

    @property
    def xla_device(self) -> torch.device:
        """Where shards are."""
        return torch.device("xla:0")

    def _check_root(self, what: str) -> None:
        if not self._is_root:
            raise RuntimeError(f"{what} is for the outermost wrapper, and this one is inside of another: call it on the whole model")

    # -- what is inside -------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module by another name, as in torch_xla; `model.module.module` is the module itself."""
        return XlaFlattenParamsWrapper(self._fsdp_wrapped_module)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("_fsdp_wrapped_module", "module"):
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """For a wrapped `nn.Sequential`."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """Parameters (shards) that have gradients."""
        return [p for p in self.parameters() if p.grad is not None]

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name in the module without wrappers, shard) of each parameter; of a flat one the name of its place."""
        return [
            (naming.plain(naming.joined(path, s.original)), s.shard)
            for path, m in self.named_modules()
            if isinstance(m, XlaFullyShardedDataParallel) and m._unit is not None
            for s in m._unit.shared
        ]

    def extra_repr(self) -> str:
        return (
            f"world_size={self.world_size}, rank={self.rank}, compute_dtype={self.compute_dtype}, buffer_dtype={self.buffer_dtype}, "
            f"flatten_parameters={self.flatten_parameters}, reshard_after_forward={self.reshard_after_forward}, sharding_groups={self.sharding_groups}"
        )

    # -- state ----------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Each rank's shards, under `_fsdp_shard...` names, and buffers. In a world of one: the module's, under its own names.

        Save it for each rank, with `get_shard_metadata()`: `xm.save(..., master_only=False)`.
        """
        if self._unit is None:
            return self._fsdp_wrapped_module.state_dict(*args, **kwargs)
        return super().state_dict(*args, **kwargs)

    def _before_load(self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        if self._unit is None:
            state.below(state_dict, prefix)
        else:
            inside = any(unit.shared for unit in self._units())
            state.check(state_dict, prefix, self._unit.shared, inside, bool(local_metadata.get("assign_to_params_buffers")))

    def get_shard_metadata(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """What `consolidate_sharded_state_dicts` needs to know of the shards, to be saved beside `state_dict()`: names and whole shapes, how many ranks share
        parameters out, and this rank's place among them.

        optimizer: whose state is saved, too, as `optimizer.state_dict()`: the metadata then names its parameters, so that other numbers of ranks can load it
        (`cut_optimizer_state`). Raises ValueError if it has others than this module's.
        """
        info = {} if optimizer is None else {"optim_info": optimizer_states.names_in(optimizer, self._entries())}
        if self._unit is None:
            return {"shard_info": {}, "flatten_info": {}, "buffer_info": {}, "world_size": 1, "rank": 0, **info}
        units = [
            (path, m._unit.shared, m._buffer_dtypes)
            for path, m in self.named_modules()
            if isinstance(m, XlaFullyShardedDataParallel) and m._unit is not None
        ]
        return {**metadata.of(units), "world_size": self.world_size, "rank": self.rank, **info}

    def _entries(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by their names in the state dict."""
        return list((self if self._unit is not None else self._fsdp_wrapped_module).named_parameters())

    def cut_optimizer_state(self, whole: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What `optimizer.load_state_dict` takes, from the optimizer's state of whole parameters (`consolidate_sharded_optimizer_states`, or "optimizer" in the
        file of `consolidate_sharded_model_checkpoints`), whatever the number of ranks and the options that it was saved with.

        Raises ValueError for parameters that it does not know, or has in other groups."""
        shards = {
            id(s.shard): (s, [naming.plain(naming.joined(path, piece.path)) for piece in s.pieces])
            for path, m in self.named_modules()
            if isinstance(m, XlaFullyShardedDataParallel) and m._unit is not None
            for s in m._unit.shared
        }
        plain = {id(p): naming.plain(name) for name, p in self._entries()}
        return optimizer_states.cut(whole, optimizer, shards, plain)


def _refuse_annotations(name: str) -> None:
    if spmd_mode.active():
        raise RuntimeError(
            f"{name} shares parameters out among ranks, and this script called xr.use_spmd(), after which there are none: use SpmdFullyShardedDataParallel "
            "(torch_xla.experimental.spmd_fully_sharded_data_parallel), or leave use_spmd() out"
        )


def _rank(among: Any) -> Any:
    """This rank's place in its group; each rank's own if the process hosts several."""
    return world.current().table(among.index)

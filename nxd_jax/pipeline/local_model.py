"""What a process has of a pipeline's model: parameters, buffers and modules of its stages, and their state, under the whole model's names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from nxd_jax._wrapper import Adapted, Pipeline
from nxd_jax.pipeline import lending, stage_names, weights
from nxd_jax.tensor_parallel import stage_states

if TYPE_CHECKING:
    import torch

    from nxd_jax.pipeline.elsewhere import Elsewhere
    from nxd_jax.pipeline.exchange import Exchange
    from nxd_jax.pipeline.stages import Stages
    from torch_bridge.mesh.places import Place


class LocalModel(Pipeline, nn.Module):
    """`NxDPPModel`'s `local_*` functions and what goes with them.

    original_torch_module: the whole model, without the weights that only stages of other processes have (`_elsewhere`).
    """

    original_torch_module: nn.Module
    partitioned: bool
    model_moved_to_device: bool
    pipeline_parallel_size: int
    _elsewhere: Elsewhere
    _exchange: Exchange | None
    _lent: itertools.count[int]

    @property
    def homes(self) -> Sequence[Place | None]:
        """By stage, the place of its cores."""
        raise NotImplementedError

    def _known(self) -> Stages | None:
        """The stages as they were traced first; None if that needs a batch."""
        raise NotImplementedError

    def local_parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages; so for the other `local_` functions, with names as in the whole model."""
        return self.original_torch_module.parameters(recurse)

    def local_named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.original_torch_module.named_parameters(*args, **kwargs)

    def local_buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return self.original_torch_module.buffers(recurse)

    def local_named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.original_torch_module.named_buffers(*args, **kwargs)

    def local_modules(self) -> Iterator[nn.Module]:
        return self.original_torch_module.modules()

    def local_named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self.original_torch_module.named_modules(*args, **kwargs)

    def local_children(self) -> Iterator[nn.Module]:
        return self.original_torch_module.children()

    def local_named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.original_torch_module.named_children()

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state of this process's stages, under the names of the whole model.

        `parallel_layers.save` writes into each pipeline rank's file what its stages read.
        """
        state: dict[str, Any] = self.original_torch_module.state_dict(*args, **kwargs)
        named_otherwise = bool(args or kwargs) or isinstance(self.original_torch_module, Adapted)
        if named_otherwise or not self.partitioned or self._known() is None:
            return state
        marked: dict[str, Any] = stage_states.mark(state, self._state_by_rank)
        return marked

    def _state_by_rank(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        own = dict(self.original_torch_module.named_parameters())
        first, *others = self.names_by_rank()
        used = set(first).union(*others)
        first += [name for name in state if name not in used]
        return stage_states.parts({**state, **self.lent(lambda name: own[name])}, [first, *others])

    def names_by_rank(self) -> list[list[str]]:
        """For each pipeline rank of NxD the names of the parameters and buffers that it has: stage s is with rank s modulo their number.

        Raises RuntimeError for a model that is traced when the first batch is there.
        """
        found = self._known()
        if found is None:
            raise RuntimeError(
                f"the stages of {type(self.original_torch_module).__name__} are known when the first batch is there: call run_train or run_eval before, or "
                "trace() with an example of its inputs"
            )
        with self._elsewhere.present():
            return stage_names.by_rank(self.original_torch_module, found, self.pipeline_parallel_size)

    def names_in_order(self) -> list[str]:
        """The names of the whole model's parameters and buffers, also of those that lie with other processes, module by module."""
        with self._elsewhere.present():
            return stage_names.in_order(self.original_torch_module)

    def lent(self, of: Callable[[str], Any]) -> dict[str, Any]:
        """What belongs to weights that stages of this process read and that lie with other processes, by every name of these weights in the model.

        of: what belongs to a weight that lies here, by its first name: nested data with computed xla tensors at its stage. All processes call it.
        """
        found = self._known()
        if self._exchange is None or found is None or found.replicas is None:
            return {}
        self._exchange.begin(f"lent {next(self._lent)}")
        by_name = lending.lend(found.replicas, self.homes, self._exchange, of)
        with self._elsewhere.present():
            names = dict(self.original_torch_module.named_parameters(remove_duplicate=False))
        return {name: value for first, value in by_name.items() for name, p in names.items() if p is names[first]}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of the model, as `named_parameters`, `buffers` and `named_buffers`: with the names that they have there."""
        return self.original_torch_module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.original_torch_module.named_parameters(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return self.original_torch_module.buffers(recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.original_torch_module.named_buffers(*args, **kwargs)

    def translate_origin_state_dict_to_local_state_dict(self, origin_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a state of the whole model that this process's stages have. (Names are the same here.)"""
        own = self.local_state_dict()
        return {name: value for name, value in origin_state_dict.items() if name in own}

    def translate_local_state_dict_to_origin_state_dict(self, local_state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """A state of this process's stages under the whole model's names, after a prefix. ValueError for a name that its stages do not have."""
        own, found = self.local_state_dict(), {name.removeprefix(prefix): value for name, value in local_state_dict.items()}
        unknown = [name for name in found if name not in own]
        if unknown:
            raise ValueError(f"the stages of this process have no {', '.join(unknown)}: give what local_state_dict() returned")
        return {f"{prefix}{name}": value for name, value in found.items()}

    def _nxd_whole(self) -> nn.Module:
        return self.original_torch_module

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("a pipeline model has the state of its stages: call local_state_dict()")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> Any:  # type: ignore[override]
        """Load what `local_state_dict` gave, what its rank's file has, or the state of the whole model."""
        given = self._elsewhere.of_here(state_dict)
        if self._exchange is not None:
            given = self._with_other_names(given)
        loaded = self.original_torch_module.load_state_dict(given, strict=strict, **kwargs)
        found = self._known() if self.model_moved_to_device else None
        if found is not None:
            weights.put_back(found, self.homes)
        return loaded

    def _with_other_names(self, given: dict[str, Any]) -> dict[str, Any]:
        """A state with the other names of its tied weights, which stages of other processes read: the file of a rank has those that its own stages read."""
        names = dict(self.original_torch_module.named_parameters(remove_duplicate=False))
        known = {id(names[name]): value for name, value in given.items() if name in names}
        return {name: known[id(p)] for name, p in names.items() if id(p) in known} | given

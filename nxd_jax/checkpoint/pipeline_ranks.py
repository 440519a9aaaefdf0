"""Which pipeline rank has which tensor: here, by where it lies, and in files of NxD, which has one for each rank with the names of its stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from nxd_jax import _wrapper
from nxd_jax.checkpoint import joining
from nxd_jax.tensor_parallel import parallel_groups
from torch_bridge.mesh import places, world
from torch_bridge.recorder import placed
from torch_bridge.recorder.tensor import XLATensor

AXIS = "pp"


def rank_of(t: torch.Tensor) -> int | None:
    """The pipeline rank on whose cores a tensor lies; None for one that lies on all, or on the CPU."""
    home = placed.place_of(t) if isinstance(t, XLATensor) else None
    narrow = None if home is None or home.mesh is None else places.ranks(home.mesh)
    return None if narrow is None else narrow.at.get(AXIS)


def said(name: str, ranks: Collection[int] | int | None) -> str:
    """A name for a message, with the pipeline ranks that have the tensor, if that is known."""
    known = [ranks] if isinstance(ranks, int) else sorted(ranks or ())
    if not known:
        return name
    return f"{name} (pipeline rank{'s' * (len(known) > 1)} {', '.join(map(str, known))})"


def names_of(model: Any, state: Mapping[str, Any], complete: bool = True) -> list[list[str]] | None:
    """For each pipeline rank of NxD the names of a state that it has, in its order; None for a model that is in no pipeline.

    state: with what other processes lent (`Pipeline.lent`), unless it need not be `complete` for ranks here. Raises RuntimeError if the stages are not known
    yet, ValueError for a pipeline's state dict, which does not say what is with which rank, NotImplementedError for a state that is not complete.
    """
    pipeline = _wrapper.pipeline_of(model)
    if pipeline is None:
        if isinstance(model, Mapping) and any(rank_of(t) is not None for t in model.values() if isinstance(t, torch.Tensor)):
            raise ValueError(
                "a state dict does not say which tensors each pipeline rank's file of NxD has: give the model itself, or use NXD_JAX_CHECKPOINT_FORMAT=nxd"
            )
        return None
    by_id: dict[int, list[str]] = {}
    for name, value in state.items():
        by_id.setdefault(id(value), []).append(name)
    whole = _wrapper.inner(pipeline)
    tensors = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers(remove_duplicate=False))
    by_rank = pipeline.names_by_rank()
    if complete:
        _check_here(by_rank, tensors.keys() | state.keys())
    return [[found for name in names for found in ([name] if name in state else by_id.get(id(tensors.get(name)), ()))] for names in by_rank]


def order_of(model: Any) -> list[str]:
    """The names of a pipeline's whole model in order, also of what lies with other processes; none without a pipeline."""
    pipeline = _wrapper.pipeline_of(model)
    names = [] if pipeline is None else pipeline.names_in_order()
    return [own for name in names for own in ([name, *joining.separate_names(name)] if name.endswith("_qkv") else [name])]


def lent_to(model: Any, of: Callable[[str], Any]) -> dict[str, Any]:
    """What belongs to weights of a pipeline that ranks here read and that lie with other processes, by every name of these; nothing without a pipeline.

    of: what belongs to a weight that lies here, by its name. All processes call it.
    """
    pipeline = _wrapper.pipeline_of(model)
    return {} if pipeline is None else pipeline.lent(of)


def names_if_known(model: Any, state: Mapping[str, Any]) -> list[list[str]] | None:
    """`names_of` a model in a pipeline whose stages are known; else None."""
    try:
        return None if _wrapper.pipeline_of(model) is None else names_of(model, state, complete=False)
    except RuntimeError:
        return None


def _check_here(by_rank: Sequence[Sequence[str]], tensors: Collection[str]) -> None:
    """Raise NotImplementedError if a rank that this process hosts reads what is not here."""
    places_of = parallel_groups.places(AXIS)
    for rank in sorted({places_of[r] for r in world.current().hosted}):
        for name in by_rank[rank]:
            if name not in tensors:
                raise NotImplementedError(
                    f"{said(name, rank)} lies with another process, and this one would write it into NxD's file of that rank: start the script with nxd-run, "
                    "which hosts all ranks in one process, or use NXD_JAX_CHECKPOINT_FORMAT=nxd"
                )


def unused(state: Iterable[str], by_rank: Sequence[Sequence[str]]) -> list[str]:
    """Names that no pipeline rank has."""
    known = {name for names in by_rank for name in names}
    return [name for name in state if name not in known]


def numbered(group: Sequence[str], local: Sequence[str], whole: Sequence[str]) -> list[str]:
    """Of an optimizer's group the parameters that a pipeline rank has, in the order in which its own optimizer numbers them.

    group: all names, in order. local: what the rank has, in its order. whole: the model's in order. A group in the order of the model is one in the rank's
    order there; any other order stays as it is.
    """
    places_of = {name: k for k, name in enumerate(whole)}
    there = set(local)
    in_order = all(name in places_of for name in group) and list(group) == sorted(group, key=places_of.__getitem__)
    chosen = set(group)
    return [n for n in dict.fromkeys(local) if n in chosen] if in_order else [n for n in group if n in there]

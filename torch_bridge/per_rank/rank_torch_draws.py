"""torch's functions that draw, after a seed that differs by rank: each rank gets what it would draw alone.

They run once for each hosted rank, in its state of the generator (`rank_random`), and give a CPU tensor that differs by rank. Samplers and loaders of torch
draw for all ranks: which rows a batch has is the first rank's to say.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torch_bridge import source
from torch_bridge.mesh import generators, rank_numbers
from torch_bridge.per_rank import rank_functions
from torch_bridge.recorder import rank_random, rank_tensor

_FUNCTIONS = (
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial", "poisson", "binomial",
    "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu",
)  # fmt: skip
_METHODS = ("bernoulli", "multinomial")
_WRITING = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")


@functools.cache
def install() -> None:
    """Once there is a number that differs by rank."""
    for owner, names, wrapped in (
        (torch, _FUNCTIONS, _drawing), (torch.Tensor, _METHODS, _drawing), (torch.Tensor, _WRITING, _filling),
    ):  # fmt: skip
        for name in names:
            rank_functions.replace(owner, name, wrapped(getattr(owner, name)))
    torch.utils.data.dataset.randperm = torch.randperm  # it imported torch's own: `random_split`
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu"):
        setattr(torch._VF, name, getattr(torch, name))
    for name, function in _STATES.items():
        setattr(torch, name, function)
        setattr(torch.random, name, function)


def _get_rng_state() -> torch.Tensor:
    """`torch.get_rng_state`: all ranks' states one after another after a seed that differs by rank."""
    return rank_random.get_state(torch.default_generator)


def _set_rng_state(new_state: torch.Tensor) -> None:
    """`torch.set_rng_state`: also what `torch.get_rng_state` gave after a seed that differs by rank."""
    rank_random.set_state(torch.default_generator, new_state)


def _seed() -> int:
    rank_random.forget(torch.default_generator)
    return _original_seed()


_original_seed = torch.seed
_STATES = {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state, "seed": _seed}


def _ranked_generator(args: Any, kwargs: Any) -> Any:
    """The generator that a call draws from, if ranks draw differently from it on the CPU."""
    generator = kwargs.get("generator")
    if generator is None:
        generator = next((a for a in args if isinstance(a, torch._C.Generator)), torch.default_generator)
    if rank_random.of(generator) is None:
        return None
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    device = kwargs.get("device")
    where = torch.device(device).type if device is not None else tensors[0].device.type if tensors else torch.get_default_device().type
    return generator if where == "cpu" else None


def _drawing(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor of random numbers."""

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        generator = _ranked_generator(args, kwargs) if _streams_exist(args, kwargs) else None
        if generator is None:
            return original(*args, **kwargs)
        return _drawn(original, generator, args, kwargs)

    return draw


def _streams_exist(args: Any, kwargs: Any) -> bool:
    """Quickly: whether any generator of the call was seeded by rank."""
    return (
        rank_random.of(None) is not None
        or getattr(kwargs.get("generator"), "_streams", None) is not None
        or any(type(a) in _generators() for a in args)
    )


@functools.cache
def _generators() -> set[type]:
    return {generators.CPUGenerator, generators.XLAGenerator}


def _drawn(original: Callable[..., Any], generator: torch.Generator | None, args: Any, kwargs: Any) -> Any:
    name = getattr(original, "__name__", "")
    leaves = tree_leaves((args, kwargs))
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
        raise rank_numbers.PlainNumberNeeded(
            f"torch.{name} of a CPU tensor that needs gradients, at {source.user_line()}, after a seed that differs by rank: each rank would get another "
            "result, and gradients of such results are worked out on xla only. Move the tensor to xla first (x.to('xla'))."
        )
    return rank_functions.compute(original, args, kwargs, [generator])


def _filling(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that fills a tensor with random numbers."""

    @functools.wraps(original)
    def fill(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not _streams_exist(args, kwargs):
            return original(self, *args, **kwargs)
        generator = _ranked_generator((self, *args), kwargs)
        if generator is None:
            return original(self, *args, **kwargs)
        return _filled(original, generator, self, args, kwargs)

    return fill


def _filled(original: Callable[..., Any], generator: torch.Generator | None, t: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """A CPU tensor filled with each rank's own numbers: it becomes one that differs by rank, or remembers what the other ranks have."""
    if isinstance(t, rank_tensor.RankTensor):
        return original(t, *args, **kwargs)
    loader = _data_frame()
    parts = rank_random.on_each(
        lambda place: original(t.detach().clone(), *rank_tensor.own(args, place), **rank_tensor.own(kwargs, place)), [generator]
    )
    if loader is not None:
        _note_loader(loader)
        with torch.no_grad():
            return t.copy_(parts[0])
    return rank_tensor.become(t, parts)


def _data_frame() -> FrameType | None:
    """The frame of torch's sampler or loader that draws, if one does: its numbers choose the data of the script's one loader."""
    frame: FrameType | None = sys._getframe(3)
    return frame if frame is not None and "/torch/utils/data/" in frame.f_code.co_filename else None


def _note_loader(frame: FrameType) -> None:
    if not frame.f_code.co_filename.endswith("sampler.py"):
        return
    rank_random.say(
        "shuffles data after torch.manual_seed with a seed that differs by rank. This process reads one batch for all ranks, so all get rank 0's order. Give "
        "the loader the rank (DistributedSampler(rank=...)), or start one process per rank with torchrun."
    )

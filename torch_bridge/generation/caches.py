"""transformers' static caches on xla: which are known, zeros that are there before the first token, and a cache that grows in their place at the end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from torch_bridge.ir import dtypes
from torch_bridge.mesh import abstract_arrays, fills
from torch_bridge.recorder.tensor import XLATensor

LEAST = 64
"""Tokens of the shortest cache."""
DOUBLED = 512
"""Tokens up to which lengths are powers of two, and from which on they are multiples of this."""


def length(tokens: int) -> int:
    """The length of a cache for so many tokens: one of a few, so that programs fit more than one call."""
    if tokens > DOUBLED:
        return -(-tokens // DOUBLED) * DOUBLED
    found = LEAST
    while found < tokens:
        found *= 2
    return found


def is_static(cache: object) -> bool:
    """Whether it is a StaticCache without offloading, whose layers are known."""
    from transformers import cache_utils

    return type(cache) is cache_utils.StaticCache and not cache.offloading and not _odd(cache)


def odd_layers(config: Any) -> str:
    """The class of a layer that is not known in the static cache of a model, "" if all are."""
    return _odd(_example(config))


def slides(config: Any) -> bool:
    """Whether layers of a model's static cache keep only a window."""
    return any(_example(config).is_sliding)


def places(cache: Any) -> int | None:
    """How many tokens a static cache holds; None for one that keeps only a window."""
    return min((layer.max_cache_len for layer in cache.layers if not layer.is_sliding), default=None)


def grows_by_tensors(cache: Any) -> bool:
    """Whether all that a token changes in a cache is in tensors, which keep their shapes."""
    from transformers import cache_utils

    return is_static(cache) and all(type(layer) is cache_utils.StaticLayer and layer.is_initialized for layer in cache.layers)


def _example(config: Any) -> Any:
    from transformers import cache_utils

    return cache_utils.StaticCache(config=config.get_text_config(decoder=True), max_cache_len=1)


def _odd(cache: Any) -> str:
    from transformers import cache_utils

    known = (cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer)
    return next((type(layer).__name__ for layer in cache.layers if type(layer) not in known), "")


@contextlib.contextmanager
def zeros_first(cache: Any) -> Iterator[None]:
    """A block in which layers of a static cache that are made get their zeros as arrays.

    As part of the program they would be there in the first call of a prompt's length and, as inputs, in later ones: two programs.
    """
    new = [layer for layer in cache.layers if not layer.is_initialized]
    for layer in new:
        layer.lazy_initialization = functools.partial(_initialize, layer)
    try:
        yield
    finally:
        for layer in new:
            layer.__dict__.pop("lazy_initialization", None)


def _initialize(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    type(layer).lazy_initialization(layer, keys, values)
    for t in (layer.keys, layer.values):
        if isinstance(t, XLATensor) and t._storage.constant and not abstract_arrays.active():
            base = t._storage.layout
            t._storage.settle(fills.full(base.size, t._storage.fill, dtypes.to_jax(base.dtype)))


def grown(cache: Any, config: Any) -> Any:
    """A DynamicCache with what a static cache without sliding windows holds, as eager torch would return it."""
    from transformers import cache_utils

    found = cache_utils.DynamicCache(config=config.get_text_config(decoder=True))
    for k, layer in enumerate(cache.layers):
        if layer.is_initialized:
            n = int(layer.get_seq_length())
            found.update(layer.keys[:, :, :n], layer.values[:, :, :n], k)
    return found

"""`generate()` of a model on xla: ids, masks, scores and beams are eager CPU tensors, which grow; the model gets inputs of few shapes and a static cache."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

from torch_bridge.generation import caches, callables, forwards, requests
from torch_bridge.generation.uninterrupted import Uninterrupted, of_transformers
from torch_bridge.mesh import stacked_arrays
from torch_bridge.passes import fold_repeats
from torch_bridge.recorder.rank_tensor import RankTensor
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import executor

logger = logging.getLogger("torch_bridge")

_said: set[str] = set()
"""Reasons that have been told, each once."""


def generate(original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`original(model, *args, **kwargs)`, transformers' `GenerationMixin.generate`; with fixed shapes if the model is on xla and that is known to be right.

    What is chosen is what eager CPU torch chooses for the model's logits: greedily, by sampling (with torch's CPU generator) or by beams. It comes back on the
    device of the prompt. What runs as it is, with tensors that grow, says why, once for each reason.

    Raises NotImplementedError for prompts that differ by rank and may end at different tokens, ValueError for logits of a part of the vocabulary, IndexError
    at a token that a static cache of the script's has no place for.
    """
    if not _on_xla(model):
        return original(model, *args, **kwargs)
    try:
        request = requests.Request(original, model, args, kwargs)
        reason = request.reason()
    except Exception:  # transformers says what is wrong with the arguments
        return original(model, *args, **kwargs)
    if reason is not None:
        _say(model, reason)
        return original(model, *args, **kwargs)
    with _plain_mode(request):
        given = _on_cpu(request)
        _refuse_other_ends(request, given)
        executor.sync()  # what waits from before is no part of the prompt's program,
        _unstack(model)
        with fold_repeats.apart(), forwards.of_few_shapes(model, Uninterrupted(request)):
            out = original(model, **given)
    prompt = request.prompt
    device = torch.device("xla") if prompt is None else prompt.device
    found = _returned(out, device, None if request.cache is not None else model.config)
    executor.sync()  # and what waits now, such as the last reordering of beams, none of the next one's
    return found


@contextlib.contextmanager
def _plain_mode(request: requests.Request) -> Iterator[None]:
    """A block without torch's inference mode, in which nothing is played, if nobody can tell: no code or tensors of the script's are used in it but the prompt,
    of which there are copies."""
    leaves = torch.is_inference_mode_enabled() and of_transformers(request) and request.cache is None
    if leaves and not any(t.is_inference() for t in (*request.model.parameters(), *request.model.buffers())):
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def _on_xla(model: Any) -> bool:
    parameter = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    return parameter is not None and parameter.device.type == "xla"


def _unstack(model: torch.nn.Module) -> None:
    """Give weights arrays of their own that lie as rows of stacked ones (`stacked_arrays`): each token would copy them."""
    for t in (*model.parameters(), *model.buffers()):
        if isinstance(t, XLATensor) and isinstance(t._storage.held, stacked_arrays.Row):
            t._storage.held = t._storage.array


def _on_cpu(request: requests.Request) -> dict[str, Any]:
    """The arguments with which transformers keeps what grows on the CPU."""
    given = {**request.arguments, **request.kwargs}
    for name in ("inputs", *requests.PROMPTS):
        if isinstance(given.get(name), torch.Tensor):
            own = given[name].cpu()
            given[name] = own.clone() if own is given[name] and own.is_inference() else own
    if request.prompt is None and request.config.bos_token_id is not None:
        given["inputs"] = torch.full((1, 1), int(request.config.bos_token_id))
    for name in ("logits_processor", "stopping_criteria"):
        given[name] = callables.on_their_device(given.get(name))
    given["prefix_allowed_tokens_fn"] = callables.allowed_tokens(given.get("prefix_allowed_tokens_fn"))
    if request.cache is None:
        _with_static_cache(given, request.config.max_cache_len or caches.length(request.tokens()))
        request.model.__dict__.pop("_previous_max_cache_length", None)  # else the longest cache so far, for good
    return given


def _refuse_other_ends(request: requests.Request, given: dict[str, Any]) -> None:
    """One process has one loop for its ranks: prompts that differ by rank must not end at different tokens."""
    config = request.config
    ends = {
        "an end token": config.eos_token_id is not None,
        "stop strings": config.stop_strings is not None,
        "stopping criteria": bool(given.get("stopping_criteria")),
        "beams": (config.num_beams or 1) > 1,
    }
    found = [name for name, there in ends.items() if there]
    if found and any(isinstance(x, RankTensor) for x in given.values()):
        raise NotImplementedError(
            f"generate() got a prompt that differs by rank, and {' and '.join(found)}: each rank would stop at another token, and this process goes through "
            "the text once for all its ranks. Set model.generation_config.eos_token_id = None, give max_new_tokens and cut the texts afterwards, or run a "
            "process for each rank (torchrun)"
        )


def _with_static_cache(given: dict[str, Any], tokens: int) -> None:
    chosen = {"cache_implementation": "static", "max_cache_len": tokens}
    if given.get("generation_config") is None:
        given.update(chosen)
    else:  # transformers warns of one beside arguments
        given["generation_config"] = copy.deepcopy(given["generation_config"])
        for name, value in chosen.items():
            setattr(given["generation_config"], name, value)


def _returned(out: Any, device: torch.device, config: Any) -> Any:
    """What was returned, on the device of the prompt. config: of the model whose cache is to be one that grows, None if the script gave the cache."""
    if isinstance(out, torch.Tensor):
        return _handed(out, device)
    found = {}
    for name, x in out.items():
        if name in requests.CACHES:
            found[name] = x if config is None else caches.grown(x, config)
        else:
            found[name] = _pytree.tree_map_only(torch.Tensor, functools.partial(_handed, device=device), x)
    return type(out)(**found)


def _handed(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device, one of inference mode if that is on."""
    there = t.to(device)
    return there.clone() if torch.is_inference_mode_enabled() and not there.is_inference() else there


def _say(model: Any, reason: requests.Reason) -> None:
    name = type(model).__name__
    if f"{name} {reason.why}" not in _said:
        _said.add(f"{name} {reason.why}")
        logger.warning(
            "%s.generate() on xla: tensors grow with each token, and each length is compiled, because %s. %s",
            name,
            reason.why,
            reason.instead,
        )

"""A model's forward while `generate()` runs: the prompt is recorded op by op, and what is done for each further token is played (`steps`), or, where nothing
else runs in between, done by a call of its program."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch_bridge.generation import caches, host_inputs, requests, steps
from torch_bridge.generation.callables import moved_to
from torch_bridge.generation.host_inputs import HostInputs
from torch_bridge.generation.uninterrupted import Uninterrupted, has_hooks
from torch_bridge.mesh import world
from torch_bridge.replay.player import Player

_LOCK = threading.Lock()


@contextlib.contextmanager
def of_few_shapes(model: Any, uninterrupted: Uninterrupted) -> Iterator[None]:
    """A block in which the model's forward is ours; after the last such block, of all threads, it is what it was."""
    with _LOCK:
        before = model.__dict__.get("forward")
        own = before if isinstance(before, _Forward) else _Forward(model, uninterrupted)
        model.__dict__["forward"] = own
        own.blocks += 1
        if own.keeps_inputs and host_inputs.METHOD not in model.__dict__:
            model.__dict__[host_inputs.METHOD] = HostInputs(model)
    try:
        yield
    finally:
        with _LOCK:
            own.blocks -= 1
            if not own.blocks and model.__dict__.get("forward") is own:
                own.put_back()


class _Forward:
    """A forward that plays what it does for single tokens on static caches.

    blocks: `of_few_shapes` that have not ended. keeps_inputs: what it is called with comes on the CPU; hooks of the model would see it there.
    """

    def __init__(self, model: Any, uninterrupted: Uninterrupted):
        self._model = model
        self._uninterrupted = uninterrupted
        self.blocks = 0
        self.keeps_inputs = not has_hooks(model)
        self._before = model.forward
        self._found = found = model.__dict__.get("forward")
        self.__wrapped__: Callable[..., Any] = found.plain if isinstance(found, Player) else self._before
        self._asked = isinstance(found, Player) and found.asked
        functools.update_wrapper(self, self.__wrapped__)
        self._result: type | None = None
        self._filled: tuple[Any, int] = (None, 0)
        self._direct: tuple[Any, steps.Direct | None] = (None, None)

    def put_back(self) -> None:
        """What was there before."""
        if self._found is None:
            del self._model.__dict__["forward"]
        else:
            self._model.__dict__["forward"] = self._found
        if isinstance(self._model.__dict__.get(host_inputs.METHOD), HostInputs):
            del self._model.__dict__[host_inputs.METHOD]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = next((name for name in requests.CACHES if caches.is_static(kwargs.get(name))), None)
        if name is None or args:
            return self._before(*moved_to(args, "xla"), **moved_to(kwargs, "xla"))
        cache = kwargs[name]
        self._refuse_more(cache, kwargs)
        returned = self._token(name, cache, kwargs)
        if returned is not None and self._result is not None:
            return self._result(**returned, **{name: cache})
        with caches.zeros_first(cache):
            out = self.__wrapped__(**moved_to(kwargs, "xla"))
        self._refuse_a_part(out)
        self._result = type(out)
        return out

    def _token(self, name: str, cache: Any, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """What the model returns for one more token, without the cache; None, and nothing is done, if it is more, or not played."""
        if self._result is None or kwargs["input_ids"] is None or kwargs["input_ids"].shape[1] != 1:
            return None
        of, direct = self._direct
        if direct is not None and of is cache and self._uninterrupted and self.blocks == 1:
            returned = direct.token({k: x for k, x in kwargs.items() if k != name})
            if returned is not None:
                return returned
        if not caches.grows_by_tensors(cache):
            return None
        played = steps.play(self._model, self.__wrapped__, self._asked, name, kwargs)
        if played is None:
            return None
        self._direct = cache, played.direct
        return played.returned

    def _refuse_more(self, cache: Any, kwargs: dict[str, Any]) -> None:
        """Eager torch says that an index is out of range; on xla nothing would be written."""
        last, filled = self._filled
        new = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None).shape[1]
        filled = new + (filled if cache is last else int(cache.get_seq_length()))
        self._filled = cache, filled
        places = caches.places(cache)
        if places is not None and filled > places:
            raise IndexError(
                f"generate() is at token {filled} and was given a StaticCache of {places} places: make it with max_cache_len={filled} or more, or leave it out"
            )

    def _refuse_a_part(self, out: Any) -> None:
        """Each rank would choose among its own part of the vocabulary."""
        words, logits = self._model.config.get_text_config(decoder=True).vocab_size, out.logits.shape[-1]
        if world.size() > 1 and logits < words:
            raise ValueError(
                f"generate() got logits of {logits} tokens on each rank, and the vocabulary has {words}: let the head gather them "
                "(ColumnParallelLinear(..., gather_output=True))"
            )

"""Modules whose forward and backward are recorded and played again (`torch_bridge.optimize`).

Recording op by op costs Python time in every step. A module that does the same on the same kind of input is looked at once and recorded twice in the ordinary
way; if all agree (`tape.Tape`), later calls append what was recorded, forward and backward, without running the module. The graph is the one that would have
been recorded, so numbers, programs and pictures do not change. What could make a module do something else is looked at before each call (`fingerprints`,
`ambient`); where recordings differ, or something cannot be repeated, the module goes on op by op, and a warning says why, once.
"""

from __future__ import annotations

import copy
import logging
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge import ambient, dispatch, eager, executor, torch_compile
from torch_bridge.fingerprints import Fingerprint, Unknown
from torch_bridge.module_calls import Call, Held
from torch_bridge.recordings import ANSWERS, Kind
from torch_bridge.tape import NotNow
from torch_bridge.tensor import XLATensor, user_attributes

logger = logging.getLogger("torch_bridge")

KINDS = 16
"""Kinds of calls (shapes, modes, states) of one module that are kept; a module with more is recorded op by op."""
OTHERS = 16
"""Calls with other answers than those that were recorded before a module is recorded op by op for good, if not more were played."""
OF_METHODS = frozenset(
    {"__annotations__", "__code__", "__defaults__", "__globals__", "__kwdefaults__", "__name__", "__qualname__", "__self__"}
)
"""What a player has of the forward that it stands for. Not `__func__`: who wraps that in a method of its own (accelerate) means to wrap what is called."""
PATIENCE = 3
"""Recordings that may fail for a passing reason (a first call fills a cache) before a module is recorded op by op for good."""


def optimize(module: torch.nn.Module) -> torch.nn.Module:
    """Play the module's forward and backward from recordings, where that is sound; returns the module.

    Every call of `module(...)` on xla tensors counts, in training and evaluation. Its parameters, buffers, arguments and attributes may change: a call of
    another kind is recorded anew, up to 16 kinds. A forward that branches on small integers (`if mask.all():`) is played where these can be told on the
    host, each outcome from recordings of its own. Activation checkpoints inside are part of what is played. Hooks on the module itself are called as always;
    while there are hooks inside (but known ones: `known_hooks`), torch modes, functorch, saved-tensor hooks (an activation checkpoint around it), eager or
    inference mode, it is recorded op by op. `restore(module)` undoes it.

    Compared before each call: arguments; the modules inside; attributes, globals, closures, mutable defaults and class attributes that the code of the forward
    and of the functions it names reads, three or four levels deep into lists, dicts and objects. Not seen: what lies deeper, what other objects' methods read,
    files, the clock, hooks that are registered otherwise than by torch's methods. What the forward does beyond tensors and the module (printing, appending to
    a list elsewhere) happens only while it is recorded, and so do calls of hooks that it puts on tensors inside. A shallow `copy.copy` of the module plays
    the original; `copy.deepcopy` and pickle give one that is optimized for itself.

    Gradients of one weight from several calls, or from a call and from elsewhere, are summed per call first, and under autocast each call casts its weights
    for itself: the last bits may differ there. Raises TypeError for something that is no module. In a backward pass, RuntimeError where the memory of a
    parameter was swapped since the forward pass, and where a backward pass that was not recorded, or gradients of gradients, need the forward pass again and
    the module or its tensors have been changed since.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"torch_bridge.optimize takes a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(module.__dict__.get("forward"), Player):
        module.forward = Player(module)
    return module


def restore(module: torch.nn.Module) -> torch.nn.Module:
    """Record the module op by op again; returns it."""
    found = module.__dict__.get("forward")
    if isinstance(found, Player):
        found.put_back(module)
    return module


class Player:
    """Takes the place of a module's `forward`. off: why it records op by op, if it does; played: calls that were played; waiting: those of them
    whose backward pass may still come; compiled: `torch.compile` asked for it, so in eager mode too."""

    def __init__(self, module: torch.nn.Module):
        self._module = weakref.ref(module)
        self._before = module.__dict__.get("forward")
        self._kinds: dict[Any, list[Kind]] = {}
        self._held: Held | None = None
        self._patience = PATIENCE
        self._others = 0
        self._reasons: Counter[str] = Counter()
        self.fingerprint = Fingerprint(module)
        self.__doc__ = self.plain.__doc__
        self.off = ""
        self.played = 0
        self.compiled = False
        self.waiting: weakref.WeakSet[Any] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self._module()))
        if module is None:
            return self
        new = Player(module)
        new._before = copy.deepcopy(self._before, memo)
        new.compiled = self.compiled
        return new

    def __reduce__(self) -> Any:
        module = self._module()
        if module is None:
            raise TypeError("the forward of a module under torch_bridge.optimize cannot be pickled after the module is gone")
        return Player, (module,), {"_before": self._before, "compiled": self.compiled}

    @property
    def name(self) -> str:
        """The class of the module."""
        return type(self._module()).__name__

    def put_back(self, module: torch.nn.Module) -> None:
        """Undo `optimize`."""
        if self._before is None:
            del module.__dict__["forward"]
        else:
            module.forward = self._before

    @property
    def plain(self) -> Callable[..., Any]:
        """The module's own forward, op by op."""
        if self._before is not None:
            return self._before
        module = self._module()
        if module is None:
            raise ReferenceError(
                "the module of this forward is gone: torch_bridge.optimize does not keep it alive. Hold the module, not module.forward alone"
            )
        return types.MethodType(type(module).forward, module)

    __wrapped__ = plain
    """What `inspect.signature(module.forward)` is about: transformers' Trainer and `generate` choose their arguments by it."""

    def __getattr__(self, name: str) -> Any:
        """What scripts ask of a forward method beside calling it: `module.forward.__code__.co_varnames`."""
        if name in OF_METHODS:
            return getattr(self.plain, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def stop(self, reason: str) -> None:
        """From now on op by op."""
        if not self.off:
            self.off = reason
            self._kinds.clear()
            logger.warning("torch_bridge.optimize: %s is recorded op by op from now on: %s", self.name, reason)

    def _put_off(self, reason: str) -> None:
        """This call op by op. The reason may pass; if it stays for some calls, say so, once."""
        self._reasons[reason] += 1
        if self._reasons[reason] == PATIENCE:
            logger.warning("torch_bridge.optimize: %s is recorded op by op while there is: %s", self.name, reason)

    def trouble(self, error: Exception, where: str = "") -> None:
        """Something could not be recorded: stop, unless it may be otherwise the next times."""
        if not getattr(error, "lasting", True):
            self._patience -= 1
        if getattr(error, "lasting", True) or not self._patience:
            self.stop(f"{where}{error}")

    def check_state(self, before: Any, what: str = "its forward changes ") -> None:
        """Raises NotNow if the module is not in this state (a first call may fill caches)."""
        if self.fingerprint.now()[0] != before:
            raise NotNow(f"{what}{self.fingerprint.changed(before)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if eager.enabled():
            return self._in_eager_mode(args, kwargs)
        found = None if self.off else self._call(args, kwargs)
        return self.plain(*args, **kwargs) if found is None else found[0].run(found[1])

    def _in_eager_mode(self, args: Any, kwargs: Any) -> Any:
        """Op by op, each at once; as a step of its own if `torch.compile` asked for it."""
        if not self.compiled:
            return self.plain(*args, **kwargs)
        with eager.mode(False):
            out = self(*args, **kwargs)
            executor.sync()
        return out

    def _holding(self) -> Held:
        """What the module holds now."""
        state, tensors = self.fingerprint.now()
        if self._held is None or self._held.tensors is not tensors:
            self._held = Held(tensors, state)
        return self._held

    def _call(self, args: Any, kwargs: Any) -> tuple[Call, Kind] | None:
        """The call and its kind, if it may be recorded or played."""
        segment = dispatch.STATE.current
        if segment.capture or segment.watch is not None or ambient.observed():
            return None
        call = Call(self, args, kwargs)
        if not call.tensors or not all(map(_ordinary, call.tensors)):
            return None
        try:
            call.holding(self._holding())
            key = call.key()
        except Unknown as error:
            if error.lasting:
                self.stop(str(error))
            else:
                self._put_off(str(error))
            return None
        kinds = self._kinds.setdefault(key, [])
        for kind in kinds:
            if kind.fits(call.given):
                return call, kind
        if sum(map(len, self._kinds.values())) >= KINDS:
            self.stop(f"its arguments or its state have been of {KINDS} kinds so far")
            return None
        if len(kinds) >= ANSWERS:
            self._others += 1
            if self._others >= max(OTHERS, self.played):
                self.stop("the values that it asks for (.item(), print, a branch) differ from call to call")
            return None
        kinds.append(Kind())
        return call, kinds[-1]


def _ordinary(t: torch.Tensor) -> bool:
    """Whether it is an xla tensor without attributes of the script's, which a detached one would not have."""
    return isinstance(t, XLATensor) and (len(t.__dict__) <= 2 or not user_attributes(t))


torch_compile.record_untraced([Player.__call__])

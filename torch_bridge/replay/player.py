"""Modules whose forward and backward are recorded and played again (`torch_bridge.optimize`).

Recording op by op costs Python time in every step. A module that does the same on the same kind of input is looked at once and recorded twice in the ordinary
way; if all agree (`tape.Tape`), later calls append what was recorded, forward and backward, without running the module. The graph is the one that would have
been recorded, so numbers, programs and pictures do not change. What could make a module do something else is noted in a first, instrumented run, and asked
again before each call (`guards`, `torch_state`); where recordings differ, or something cannot be repeated, the module goes on op by op, and a warning says why,
once.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_bridge import _compat
from torch_bridge.guards import allowed_hooks, calls, inference_mode
from torch_bridge.ir.segment import Segment
from torch_bridge.recorder import dispatch, eager_mode
from torch_bridge.recorder.tensor import XLATensor, make, user_attributes
from torch_bridge.replay import direct, torch_state
from torch_bridge.replay.module_calls import Call, Held
from torch_bridge.replay.recordings import ANSWERS, Kind, Unknown
from torch_bridge.runtime import executor

logger = logging.getLogger("torch_bridge")

KINDS = 16
"""Kinds of calls (shapes, modes, states) of one module that are kept; a module with more is recorded op by op."""
OTHERS = 16
"""Calls with other answers than those that were recorded before a module is recorded op by op for good, if not more were played."""
OF_METHODS = frozenset(
    {"__annotations__", "__code__", "__defaults__", "__globals__", "__kwdefaults__", "__name__", "__qualname__", "__self__"}
)
"""What a player has of the forward that it stands for. `__func__` only if neither the script nor NXD_JAX_REPLAY=all asked for it to be played: who wraps
that in a method of its own (accelerate) leaves the player out."""
WARM_UP = 8
"""Calls of a kind that come before a module is looked at that nobody has asked to be played: looking takes a second, and many scripts run a few steps."""
WARM_UP_ADDING = 256
"""The same where gradients add up over calls (accumulation, recurrent cells): they are added in another order when a module is played, which is another
program to compile."""
SEEN = 64
"""Kinds of calls that are counted until then. Where there are more (a sequence that grows), further ones are recorded op by op."""
_NESTED = "gradients of gradients are asked for, which need the forward pass op by op"
PATIENCE = 3
"""Recordings that may fail for a passing reason (a first call fills a cache) before a module is recorded op by op for good."""


def optimize(module: torch.nn.Module) -> torch.nn.Module:
    """Play the module's forward and backward from recordings, where that is sound; returns the module.

    Every call of `module(...)` on xla tensors counts, in training and evaluation. Its parameters, buffers, arguments and attributes may change: a call of
    another kind is recorded anew, up to 16 kinds. A forward that branches on small integers (`if mask.all():`) is played where these can be told on the
    host, each outcome from recordings of its own. Activation checkpoints inside are part of what is played, and so are forward hooks. While there are torch
    modes, functorch, saved-tensor hooks (an activation checkpoint around it), a profiler or eager mode, it is recorded op by op.
    In inference mode it is played where its code does not ask for that mode. `restore(module)` undoes it.

    The first call of a kind runs as instrumented code (`guards`): everything that it reads of Python's state is noted, and asked again before each later
    call. If something cannot be followed, or is changed for good (printing, appending to a list elsewhere), the module is recorded op by op, and `states`
    and a warning say why. The 4th, 8th, 16th, ... call that might be played is recorded and compared.

    Gradients of one weight from several calls, or from a call and from elsewhere, are summed per call first, and under autocast each call casts its weights
    for itself: the last bits may differ there. Raises TypeError for something that is no module. In a backward pass, RuntimeError where the memory of a
    parameter was swapped since the forward pass, and where a backward pass that was not recorded, or gradients of gradients, need the forward pass again and
    the module or its tensors have been changed since.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"torch_bridge.optimize takes a torch.nn.Module, got {type(module).__name__}")
    found = module.__dict__.get("forward")
    if isinstance(found, Player):
        found.asked, found.warm_up = True, 0
    else:
        module.forward = Player(module)
    _follow()
    return module


def play_unasked(module: torch.nn.Module, warm_up: int) -> None:
    """`optimize`, but nobody has asked for it: what stands against playing is a matter of information, not a warning. A module that has a player keeps it.

    warm_up: calls of a kind that are recorded op by op first.
    """
    if not isinstance(module.__dict__.get("forward"), Player):
        module.forward = Player(module, asked=False, warm_up=warm_up)
        _follow()


def restore_unasked(module: torch.nn.Module) -> None:
    """Undo `play_unasked`. A module that a script has asked to be played stays so."""
    found = module.__dict__.get("forward")
    if isinstance(found, Player) and not found.asked:
        found.put_back(module)


class State(NamedTuple):
    """How an optimized module is doing. module: its class; calls: how often it was called; played: how many of these calls were played; reason: why it is
    recorded op by op, "" if nothing stands against playing it; lasting: it will be so for good."""

    module: str
    calls: int
    played: int
    reason: str
    lasting: bool


def states() -> list[State]:
    """Of every module under `optimize` that is still there, in the order in which they were optimized."""
    there = [p for p in _PLAYERS if p.module is not None and p.module.__dict__.get("forward") is p]
    return [player.state() for player in sorted(there, key=lambda p: p.number)]


_PLAYERS: weakref.WeakSet[Player] = weakref.WeakSet()


def _follow() -> None:
    """Give a shallow copy (`copy.copy`) of an optimized module a player of its own, and `torch.jit.script`, which reads a forward's source, none."""
    if torch.nn.Module.__setstate__ is not _set_state:
        torch.nn.Module.__setstate__ = _set_state  # type: ignore[method-assign]
        torch.nn.Module.__prepare_scriptable__ = restore  # type: ignore[attr-defined]


_original_set_state = torch.nn.Module.__setstate__


@functools.wraps(_original_set_state)
def _set_state(self: torch.nn.Module, state: Any) -> None:
    _original_set_state(self, state)
    found = self.__dict__.get("forward")
    if isinstance(found, Player) and found.module is not self:
        found.put_back(self)
        self.forward = Player(self, found.asked, found.warm_up)


def restore(module: torch.nn.Module) -> torch.nn.Module:
    """Record the module op by op again; returns it."""
    found = module.__dict__.get("forward")
    if isinstance(found, Player):
        found.put_back(module)
    return module


_NUMBERS = itertools.count()


class Player:
    """Takes the place of a module's `forward`. off: why it records op by op, if it does; played: calls that were played; played_backward: backward passes that
    were; waiting: those calls whose backward pass may still come; compiled: `torch.compile` asked for it, so in eager mode too; calls: how often it was called;
    waits: why the last calls were recorded op by op, if that may pass; number: of the players, in order; asked: the script wants it played; warm_up: calls of a
    kind that are recorded op by op first."""

    def __init__(self, module: torch.nn.Module, asked: bool = True, warm_up: int = 0):
        self._module = weakref.ref(module)
        self._before = module.__dict__.get("forward")
        self._kinds: dict[Any, list[Kind]] = {}
        self._sliced: dict[Any, Kind] = {}
        self._patience = PATIENCE
        self._others = 0
        self._reasons: Counter[str] = Counter()
        self._hooked: tuple[tuple[str, Any], ...] = ()
        self.__doc__ = self.plain.__doc__
        self.off = ""
        self.waits = ""
        self.calls = 0
        self.number = next(_NUMBERS)
        _PLAYERS.add(self)
        self.played = 0
        self.played_backward = 0
        self.compiled = False
        self.asked = asked
        self.warm_up = warm_up
        self._seen: Counter[Any] = Counter()
        self._recording_in: weakref.ref[Any] | None = None
        self._differentiable_in: weakref.ref[Any] | None = None
        self._gradient: tuple[weakref.ref[torch.Tensor], int] | None = None
        self.waiting: weakref.WeakSet[Any] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self._module()))
        if module is None:
            return self
        new = Player(module, self.asked, self.warm_up)
        new._before = copy.deepcopy(self._before, memo)
        new.compiled = self.compiled
        return new

    def __reduce__(self) -> Any:
        module = self._module()
        if module is None:
            raise TypeError("the forward of a module under torch_bridge.optimize cannot be pickled after the module is gone")
        if not self.asked:  # a file of the module is one of the script's own classes
            return (getattr, (module, "forward")) if self._before is None else (copy.copy, (self._before,))
        return Player, (module,), {"_before": self._before, "compiled": self.compiled}

    def state(self) -> State:
        """How it is doing."""
        return State(self.name, self.calls, self.played, self.off or self.waits, bool(self.off))

    @property
    def module(self) -> torch.nn.Module | None:
        """Whose forward it stands for."""
        return self._module()

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
        if name in OF_METHODS or (name == "__func__" and self.__dict__.get("warm_up")):
            return getattr(self.plain, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def reads(self) -> list[XLATensor]:
        """Tensors beside their arguments that calls which may be played read."""
        known = (kind.held for kinds in self._kinds.values() for kind in kinds if kind.held is not None)
        return list({id(t): t for held in known for t in held.tensors}.values())

    def asks(self) -> bool:
        """Whether there are calls that may be played only where values of what they are given are those that the forward got when it asked for them."""
        return any(forward.tape.asked for kinds in self._kinds.values() for kind in kinds for forward in kind.forwards)

    def stop(self, reason: str) -> None:
        """From now on op by op."""
        if not self.off:
            self.off = reason
            self._kinds.clear()
            self._sliced.clear()
            self._say("torch_bridge.optimize: %s is recorded op by op from now on: %s", self.name, reason)

    def _put_off(self, reason: str) -> None:
        """This call op by op. The reason may pass; if it stays for some calls, say so, once."""
        self.waits = reason
        self._reasons[reason] += 1
        if self._reasons[reason] == PATIENCE:
            self._say("torch_bridge.optimize: %s is recorded op by op while there is: %s", self.name, reason)

    def _say(self, *message: str) -> None:
        """A warning to who asked for it."""
        logger.log(logging.WARNING if self.asked else logging.INFO, *message)

    def trouble(self, error: Exception, where: str = "") -> None:
        """Something could not be recorded: stop, unless it may be otherwise the next times."""
        hooks = self._hooks_inside()
        if hooks:  # they may go
            self._hooked = hooks
            self._put_off(f"a hook on {hooks[0][0]}")
            return
        self.waits = str(error)
        if not getattr(error, "lasting", True):
            self._patience -= 1
        if getattr(error, "lasting", True) or not self._patience:
            self.stop(f"{where}{error}")

    def forget(self, kind: Kind) -> None:
        """Nothing is known of such calls."""
        for kinds in self._kinds.values():
            kinds[:] = [k for k in kinds if k is not kind]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if eager_mode.enabled():
            return self._in_eager_mode(args, kwargs)
        self.calls += 1
        if torch.is_inference_mode_enabled() and not self.off:
            return self._in_inference_mode(args, kwargs)
        found = None if self.off else self._call(args, kwargs)
        return self.plain(*args, **kwargs) if found is None else found[0].run(found[1])

    def _in_inference_mode(self, args: Any, kwargs: Any) -> Any:
        """On ordinary tensors with the memory of those of inference mode, which is left for as long; what it makes is of that mode."""
        flat, how = _pytree.tree_flatten((args, kwargs))
        given: dict[int, Any] = {id(x): x for x in flat if isinstance(x, torch.Tensor)}
        if not all(map(_plain_one, given.values())):
            return self.plain(*args, **kwargs)
        with inference_mode.left():
            own = {k: make(x._layout, x._storage) if x.is_inference() else x for k, x in given.items()}
            found = self._call(*_pytree.tree_unflatten([own.get(id(x), x) for x in flat], how))
            out = None if found is None or not found[1].forwards else found[0].run(found[1])
        if found is None:
            return self.plain(*args, **kwargs)
        if not found[1].forwards:  # looked at in the mode, as its code may ask for that
            of_call = [_in_mode(x, own.get(id(x)), used) for x, used in zip(flat, found[0].leaves, strict=True)]
            call = Call(self, *_pytree.tree_unflatten(of_call, how))
            call.holding(self._holding())
            return call.run(found[1])
        back: dict[int, Any] = {id(own[k]): x for k, x in given.items()} | {id(t): t for t in found[0].held}
        kept = {id(t._storage) for t in back.values() if not t.is_inference()}

        def of_mode(t: XLATensor) -> Any:
            if id(t) in back:
                return back[id(t)]
            return t if id(t._storage) in kept else make(t._layout, t._storage)

        return _pytree.tree_map_only(XLATensor, of_mode, out)

    def at_once(self, args: tuple[Any, ...], new: Sequence[torch.Tensor]) -> tuple[Any, direct.Direct | None]:
        """Call it and run what that recorded: the result, and what makes further calls like it with others in the places of the `new` arguments, if there is
        such a thing."""
        if eager_mode.enabled():
            return self(*args), None
        self.calls += 1
        found = None if self.off else self._call(args, {})
        if found is not None:
            return direct.at_once(*found, new)
        out = self.plain(*args)
        executor.sync()
        return out, None

    def _in_eager_mode(self, args: Any, kwargs: Any) -> Any:
        """Op by op, each at once; as a step of its own if `torch.compile` asked for it."""
        if not self.compiled:
            return self.plain(*args, **kwargs)
        with eager_mode.mode(False):
            out = self(*args, **kwargs)
            executor.sync()
        return out

    def _hooks_inside(self) -> tuple[tuple[str, Any], ...]:
        """Hooks of modules inside and of parameters: where they are, and which they are."""
        root = self._module()
        found: list[tuple[str, Any]] = []
        for name, module in () if root is None else root.named_modules():
            for hooks in (getattr(module, kind) for kind in _HOOKS) if name else ():
                if not allowed_hooks.all_known(hooks):
                    found += [(name, id(hook)) for hook in hooks.values()]
            for key, t in module._parameters.items():
                if t is not None and t._backward_hooks:
                    found += [(f"the gradient of {name}.{key}".replace(" .", " "), id(hook)) for hook in t._backward_hooks.values()]
        return tuple(found)

    def _holding(self) -> Held:
        """Tensors that the module holds now, each once. Raises Unknown where some are not on xla."""
        root = self._module()
        assert root is not None
        found: dict[int, Any] = {}
        for name, module in root.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise Unknown(f"a ScriptModule inside, {name}")
            for t in (*module._parameters.values(), *module._buffers.values()):
                if isinstance(t, XLATensor):
                    found[id(t)] = t
                    if t.is_inference():
                        raise Unknown("a weight or a buffer that was made in inference mode", lasting=False)
        return Held(list(found.values()))

    def _call(self, args: Any, kwargs: Any) -> tuple[Call, Kind] | None:
        """The call and its kind, if it may be recorded or played."""
        segment = dispatch.STATE.session.current
        if segment.capture or segment.watch is not None:
            return None
        if torch_state.observed():
            self.waits = "somebody follows single operations (a torch mode, functorch, a profiler, an activation checkpoint around it), or inference mode is on"
            return None
        call = Call(self, args, kwargs)
        if not call.tensors or not all(map(_ordinary, call.tensors)):
            return None
        try:
            key = call.key()
            sliced = call.sliced()
            common = call.key(anywhere=True) if sliced else key
            if self.warm_up and not self._is_warm(common, segment):
                return None
            if sliced and self._read_elsewhere(call, common, sliced):
                call = call.on_copies(sliced)
                key, sliced = call.key(), []
            kinds = self._kinds.setdefault(key, [])
            alike = 0
            for kind in kinds:
                if kind.conditions is not None and kind.conditions.hold():
                    call.holding(kind.holding())
                    if call.lies() == kind.lies:
                        alike += 1
                        if kind.fits(call.given):
                            self.waits = _NESTED if kind.nested else ""
                            return None if kind.nested else (call, kind)
            if self._hooked and self._hooked == self._hooks_inside():
                raise Unknown(f"a hook on {self._hooked[0][0]}", lasting=False)
            self._hooked = ()
            call.holding(self._holding())
        except Unknown as error:
            if error.lasting:
                self.stop(str(error))
            else:
                self._put_off(str(error))
            return None
        if sum(map(len, self._kinds.values())) >= KINDS:
            self.stop(f"its arguments or its state have been of {KINDS} kinds so far")
            return None
        if alike >= ANSWERS:
            self._others += 1
            if self._others >= max(OTHERS, self.played):
                self.stop("the values that it asks for (.item(), print, a branch) differ from call to call")
            return None
        again = next((kind for kind in kinds if kind.conditions is None and kind.unread), None)
        if again is None:
            kinds.append(again := Kind())
        if sliced:
            self._sliced[common] = again
        if self.warm_up:
            self._recording_in = weakref.ref(segment)
        return call, again

    def _read_elsewhere(self, call: Call, common: Any, sliced: Sequence[int]) -> bool:
        """Whether a call on slices was recorded on others, which start elsewhere (`data[i : i + 32]`), and only read them: then it is made on copies of these,
        so that all are of one kind."""
        known = [*self._kinds.get(common, ()), *([self._sliced[common]] if common in self._sliced else ())]
        return any(kind.conditions is not None and kind.conditions.hold() and call.only_reads(kind, sliced) for kind in known)

    def _is_warm(self, key: Any, segment: Segment) -> bool:
        """Whether so many calls of this kind have come that it pays to look at them. Counts this one.

        A segment has either calls that are recorded op by op or played ones. With both (several calls a step, whose gradients add up) it would be a program of
        its own, which no other step runs.
        """
        count = self._seen[key]
        if count < self.warm_up and self._adds_up(segment):
            self.warm_up = max(self.warm_up, WARM_UP_ADDING)
        if count >= self.warm_up and not self._records_in(segment):
            return True
        self._recording_in = weakref.ref(segment)
        if count or len(self._seen) < SEEN:
            self._seen[key] = count + 1
        return False

    def _adds_up(self, segment: Segment) -> bool:
        """Whether gradients add up over calls: a segment has several (a recurrent cell, both inputs of a comparison), or since the last one a gradient came in
        the same segment, or the one that there was then was written to."""
        root = self._module()
        parameter = None if root is None else next((p for p in root.parameters() if p.requires_grad), None)
        if parameter is not None and torch.is_grad_enabled():
            before, self._differentiable_in = self._differentiable_in, weakref.ref(segment)
            if before is not None and before() is segment:
                return True
        found = None if parameter is None else parameter.grad
        noted, self._gradient = self._gradient, None if found is None else (weakref.ref(found), found._version)
        if found is None:
            return False
        same = noted is not None and noted[0]() is found
        return self._records_in(segment) if noted is None or not same else noted[1] != found._version

    def _records_in(self, segment: Segment) -> bool:
        """Whether calls were recorded op by op into a segment."""
        return self._recording_in is not None and self._recording_in() is segment


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _in_mode(given: Any, own: Any, used: Any) -> Any:
    """An argument as it was given in inference mode; where a copy was `used` in the place of its ordinary tensor (`own`), that."""
    if used is own or not isinstance(used, XLATensor):
        return given
    return make(used._layout, used._storage) if given.is_inference() else used


def _plain_one(t: torch.Tensor) -> bool:
    """Whether it is an xla tensor without attributes of the script's, which a detached one would not have."""
    return isinstance(t, XLATensor) and (len(t.__dict__) <= 2 or not user_attributes(t))


def _ordinary(t: torch.Tensor) -> bool:
    """The same, and with versions, which tensors of inference mode do not have."""
    return _plain_one(t) and not t.is_inference()


def _inside(observer: Any, f: Player, args: Any, kwargs: Any) -> Any:
    """A player inside of a module that is looked at: what counts is its module's own forward."""
    return calls.call(observer, f.plain, args, kwargs)


calls.add_rule(Player, _inside)
_compat.record_untraced([Player.__call__])

"""One call of a module under `torch_bridge.optimize`: looked at, recorded, or played, as one node of autograd; and its backward pass.

The first call of a kind runs on the script's own tensors and is only looked at, so that whatever cannot be repeated is right at least then. The next ones run
on detached arguments inside one autograd node, so that the backward pass is a stretch of ops too. Later ones are played.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from torch_bridge.guards import calls
from torch_bridge.guards.observer import Observer
from torch_bridge.ir import view_entries
from torch_bridge.ir.layout import in_order, is_dense
from torch_bridge.ir.segment import Storage
from torch_bridge.mesh import random_state
from torch_bridge.recorder import autograd_engine as backward_passes
from torch_bridge.recorder import dispatch
from torch_bridge.recorder.tensor import XLATensor, copy_storage, make
from torch_bridge.replay import accumulate_grad, nested_grad, output_trees, recordings, returned_views, torch_state
from torch_bridge.replay.recompute import Again
from torch_bridge.replay.recordings import Forward, Kind, Source
from torch_bridge.replay.replayed_calls import Played
from torch_bridge.replay.side_effects import Before
from torch_bridge.replay.tape import NotNow, NotRepeatable, Recording, Unread
from torch_bridge.runtime import interrupts


class _Block(threading.local):
    """of: what stands for the innermost `with_its_own_backward` of this thread, None outside of them."""

    of: object = None


_BLOCK = _Block()


@contextlib.contextmanager
def with_its_own_backward() -> Iterator[None]:
    """A block whose calls have a backward pass for themselves: no pass goes through calls in it and others. The caller sees to that."""
    outer, _BLOCK.of = _BLOCK.of, object()
    try:
        yield
    finally:
        _BLOCK.of = outer


class Held:
    """What a module holds. tensors: each once; given: their storages, each once; first: a tensor on each; places: where storages are among them, by id; ids: of
    the tensors; parameters: those that need gradients; storages: of the tensors.
    """

    def __init__(self, tensors: Sequence[XLATensor]):
        self.tensors = tensors
        self.storages = [t._storage for t in tensors]
        self.given: list[Storage] = []
        self.first: list[XLATensor] = []
        self.places: dict[int, int] = {}
        for t in tensors:
            if id(t._storage) not in self.places:
                self.places[id(t._storage)] = len(self.given)
                self.given.append(t._storage)
                self.first.append(t)
        self.ids = set(map(id, tensors))
        self.parameters = [t for t in tensors if t.requires_grad]


class Call:
    """One call. tensors: the arguments that are tensors, each once; places: which of them each tensor argument is; given: storages of what the module holds and
    of arguments, each once; first: a tensor on each; every: the tensors of both; numbers: which of the storages each argument is on.
    """

    def __init__(self, player: Any, args: Any, kwargs: Any):
        self.player = player
        self.arguments = (args, kwargs)
        self.leaves, self.spec = _pytree.tree_flatten(self.arguments)
        self.tensors: list[XLATensor] = []
        self.places: list[int] = []
        index: dict[int, int] = {}
        for x in self.leaves:
            if isinstance(x, torch.Tensor):
                if id(x) not in index:
                    index[id(x)] = len(self.tensors)
                    self.tensors.append(x)  # type: ignore[arg-type]
                self.places.append(index[id(x)])
        self.ambient = torch_state.now()
        self.draws = (random_state.DEFAULT.seed, random_state.DEFAULT.offset)

    def holding(self, held: Held) -> None:
        """Take note of what the module holds."""
        self.held = list(held.tensors)
        self.given, self.first = list(held.given), list(held.first)
        places: dict[int, int] = {}
        self.numbers: list[int] = []
        for t in self.tensors:
            storage = t._storage
            number = held.places.get(id(storage))
            if number is None:
                number = places.setdefault(id(storage), len(self.given))
                if number == len(self.given):
                    self.given.append(storage)
                    self.first.append(t)
            self.numbers.append(number)
        self.every = [*self.tensors, *held.tensors]
        self.held_arguments = held.ids.intersection(map(id, self.tensors))
        self.parameters = held.parameters
        if self.held_arguments:
            self.parameters = [t for t in held.parameters if id(t) not in self.held_arguments]

    def hold_more(self, t: XLATensor) -> bool:
        """Take note of another tensor that the forward reads, while it runs; whether its storage is new."""
        if id(t) in self._ids_of_every():
            return False
        self.held.append(t)
        self.every.append(t)
        if t.requires_grad:
            self.parameters = [*self.parameters, t]
        if any(s is t._storage for s in self.given):
            return False
        self.given.append(t._storage)
        self.first.append(t)
        return True

    def ordered(self) -> dict[int, int]:
        """Number what is given as a call is numbered whose held tensors are known from the start: new numbers by old ones."""
        before = self.given
        self.holding(Held(self.held))
        places = {id(s): k for k, s in enumerate(self.given)}
        return {k: places[id(s)] for k, s in enumerate(before)}

    def _ids_of_every(self) -> set[int]:
        return set(map(id, self.every))

    def key(self, anywhere: bool = False) -> Any:
        """What calls of one kind have in common, beside what their forward reads (`guards`). anywhere: without where arguments start in their storages."""
        plain = tuple(x if isinstance(x, torch.Tensor) else recordings.described(x) for x in self.leaves if not isinstance(x, torch.Tensor))
        layouts = [t._layout.anchor if anywhere else t._layout for t in self.tensors]
        facts = tuple(
            (lies, t.requires_grad, _linked(t._storage), getattr(t, "_is_param", False))
            for lies, t in zip(layouts, self.tensors, strict=True)
        )
        return self.spec, plain, tuple(self.places), self.ambient, facts

    def sliced(self) -> list[int]:
        """Which arguments are slices that start elsewhere in other steps; none if copies of them would not lie as they do, or have gradients of their own."""
        found = [k for k, t in enumerate(self.tensors) if t._layout.offset and view_entries.moves(t._storage.layout, t._layout)]
        return found if all(not self.tensors[k].requires_grad and in_order(self.tensors[k]._layout) for k in found) else []

    def only_reads(self, kind: Kind, places: Sequence[int]) -> bool:
        """Whether calls of a kind, which was recorded on arguments that may start elsewhere, do the same on copies of some of them, as far as anybody sees."""
        self.holding(kind.holding())
        if not kind.forwards or self.lies() != kind.lies:
            return False
        forward = kind.forwards[0]
        if forward.tape.asked or output_trees.gives_back(forward.rest) or kind.asks_place:
            return False
        gaps = any(not is_dense(of.size, of.stride) for of in (self.tensors[k]._layout for k in places))
        if gaps and (kind.asks_strides or forward.tape.changes):
            return False  # copies have no gaps: `contiguous()` would not copy them, and what it gives is written
        written = forward.tape.written()
        return all(id(self.tensors[k]) not in self.held_arguments and self.numbers[k] not in written for k in places)

    def on_copies(self, places: Sequence[int]) -> Call:
        """The same call with copies of some arguments."""
        args, kwargs = self.on([t.detach().clone() if k in places else t for k, t in enumerate(self.tensors)])
        return Call(self.player, args, kwargs)

    def lies(self) -> Any:
        """How what is given lies in memory: which tensors share it, the layouts of their storages, and of the tensors that the module holds."""
        return tuple(self.numbers), [s.layout for s in self.given], [t._layout for t in self.held]

    def run(self, kind: Kind) -> Any:
        """The module's result."""
        self.kind = kind
        if not kind.forwards:
            return self._look()
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (*self.tensors, *self.parameters))
        forward = kind.forward(differentiable)
        if forward is not None and kind.check_is_due():
            forward = None
        doing: Played | Recorded
        if forward is not None:
            doing = Played(self, forward)
        else:
            doing = Recorded(self, differentiable)
            if differentiable:
                doing.start()
        outs = _apply(doing, *self.tensors, *self.reached(doing.unreached)) if differentiable else doing.forward()
        return output_trees.put_together(returned_views.spread(outs, doing.views), self.every, doing.rest, doing.how)

    def reached(self, unreached: Collection[int]) -> Sequence[XLATensor | None]:
        """The parameters, None in the places of those that no result depends on (unreached: which of what the module holds). Autograd's graph does not lead to
        these, as DistributedDataParallel sees, which looks in the graph for parameters without a gradient."""
        if not unreached:
            return self.parameters
        left_out = {id(self.held[k]) for k in unreached}
        return [None if id(p) in left_out else p for p in self.parameters]

    def known(self, tensors: Sequence[Any]) -> dict[int, int]:
        """Places in `every`, by id, of tensors in the places of the arguments, and of those that the module holds."""
        return {id(t): k for k, t in enumerate([*tensors, *self.held])}

    def await_backward(self, doing: Played | Recorded) -> None:
        """Take note of other calls whose backward pass may come in the same pass: autograd adds up their gradients of parameters, in its own order."""
        if self.ambient.grad:
            waiting = self.player.waiting
            doing.of = _BLOCK.of
            for other in list(waiting):
                if other.of is doing.of:
                    other.alone = doing.alone = False
            waiting.add(doing)

    def note_nested(self) -> None:
        """In a backward pass: if gradients of gradients are asked for, later calls of this kind are not worth playing."""
        if torch.is_grad_enabled() and not self.player.asked:
            self.kind.nested = True

    def _look(self) -> Any:
        """Run it op by op on what the script gave, and see whether that can be repeated."""
        watched = Watched(self, self.arguments, self.tensors, ahead=self.kind.unread)
        observer = Observer(calls.call, self.arguments, watched.reads, self.player.module)
        observer.lookup(type(self.player.module), "forward")
        try:
            out = calls.run(self.player.plain, *self.arguments, observer)
        except BaseException:
            self.player.forget(self.kind)
            observer.release()
            raise
        finally:
            watched.stop()
        watched.look_learned(out, observer)
        return out

    def detached(self) -> list[Any]:
        """The tensor arguments as leaves, but for those that the module holds."""
        return [t if id(t) in self.held_arguments else t.detach().requires_grad_(t.requires_grad) for t in self.tensors]

    def on(self, tensors: Sequence[Any]) -> Any:
        """(args, kwargs) with these in the places of the tensor arguments."""
        places = iter(self.places)
        return _pytree.tree_unflatten([tensors[next(places)] if isinstance(x, torch.Tensor) else x for x in self.leaves], self.spec)


def _linked(storage: Storage) -> bool:
    """Whether writes to it reach others in a way that only an op knows (`rank_ops`): a recording must see that."""
    return storage.facts is not None and bool(storage.facts.links)


def _version(t: torch.Tensor) -> int:
    """How often a tensor was written; those of inference mode do not tell."""
    return 0 if t.is_inference() else t._version


class Watched:
    """A forward pass under a recording. arguments: what it gets, with these tensors in the places of the call's."""

    def __init__(self, call: Call, arguments: Any, tensors: Sequence[Any], ahead: bool = True):
        self._call = call
        self._tensors = tensors
        self._order: dict[int, int] = {}
        self._before = Before(arguments, call.held)
        self._versions = list(map(_version, call.every))
        self.recording = Recording(call.given, ahead)

    def stop(self) -> None:
        """End watching."""
        self.recording.stop()

    def reads(self, t: XLATensor) -> bool:
        """The forward reads a tensor from somewhere. False if it has made it itself (and put it into a named tuple, say); else it is taken note of, if it is
        neither an argument nor held by the module."""
        if self.recording.is_own(t._storage):
            return False
        versions = len(self._call.every)
        if self._call.hold_more(t):
            self.recording.include(t._storage)
        if len(self._call.every) > versions:
            self._versions.append(_version(t))
        return True

    def look_learned(self, out: Any, observer: Observer) -> None:
        """Take note of a first call, if what its forward reads is known."""
        call, kind = self._call, self._call.kind
        opened = output_trees.taken_apart(out, call.known(self._tensors)).opened
        theirs = any(not observer.is_own(x) and not isinstance(x, torch.Tensor) for x in opened.values())
        observer.release()
        try:
            if observer.reason:
                raise NotRepeatable(observer.reason) if observer.lasting else NotNow(observer.reason)
            if theirs:
                raise NotRepeatable("it returns an object that was there before")
            if any(t.is_inference() for t in call.held):
                raise NotNow("it reads a tensor that was made in inference mode")
            self._order = call.ordered()
            kind.conditions, kind.held, kind.lies = observer.conditions, Held(list(call.held)), call.lies()
            kind.recomputes, kind.functions = observer.recomputes, observer.functions
            kind.asks_place, kind.asks_strides = observer.asks_place, observer.asks_strides
            if not kind.conditions.hold():
                raise NotNow(f"its forward changes {kind.conditions.changed()}")
        except NotRepeatable as error:
            call.player.trouble(error)
            call.player.forget(kind)
            return
        self.learn(out)
        if not kind.forwards and kind.unread:
            kind.conditions = None  # the next call is looked at again, ahead
        elif not kind.forwards:
            call.player.forget(kind)

    def learn(self, out: Any) -> tuple[returned_views.Arranged, list[Any], Any, Forward | None]:
        """(the tensors in what was returned, each once; all of it, flat, with their places; its nesting; the recording, if it may be played)."""
        outs, rest, how, _ = output_trees.taken_apart(out, self._call.known(self._tensors))
        made = returned_views.arranged(outs)
        try:
            if nested_grad.reentrant(outs):
                nested_grad.check_leaves(self._call.held)
            return made, rest, how, self._forward(made, rest, how)
        except Unread:
            self._call.kind.unread = True
            return made, rest, how, None
        except NotRepeatable as error:
            if error.lasting or len(self._call.kind.forwards) < recordings.TIMES:  # a check may come at a bad time
                self._call.player.trouble(error)
            return made, rest, how, None

    def _forward(self, returned: returned_views.Arranged, rest: list[Any], how: Any) -> Forward | None:
        call = self._call
        self._before.check()
        call.kind.check_state()
        outs = returned.given
        needs = tuple(t.requires_grad for t in outs)
        if any(needs) and not (call.ambient.grad and any(t.requires_grad for t in (*call.tensors, *call.parameters))):
            raise NotRepeatable("it returns tensors with gradients though nothing that it was given has any")
        if any(t.requires_grad and t.is_leaf for t in outs):
            raise NotRepeatable("it returns a tensor that it has set requires_grad of, and that gets a gradient of its own")
        self.made = self.recording.made()
        new = recordings.forward_of(self.recording, returned, rest, how, needs)
        if any(k != place for k, place in self._order.items()):
            new = dataclasses.replace(new, tape=new.tape.renumbered(self._order))
        new.bumped = [k for k, (t, version) in enumerate(zip(call.every, self._versions, strict=True)) if _version(t) != version]
        return new if recordings.agree(call.player.stop, call.kind.forwards, new) else None


class _Run(torch.autograd.Function):
    """The module as one node of autograd. Inputs: tensor arguments, then parameters (`Call.reached`)."""

    @staticmethod
    def forward(ctx: Any, doing: Played | Recorded, *inputs: XLATensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.doing = doing
        outs = doing.forward()
        ctx.mark_non_differentiable(*[o for o, needs in zip(outs, doing.needs, strict=True) if not needs])
        ctx.save_for_backward(*doing.keep())
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        doing = ctx.doing
        if doing.over:
            raise RuntimeError(_TWICE)
        found = doing.backward(ctx.saved_tensors, [_on_device(g) for g in grads], ctx.needs_input_grad[1:])
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            doing.release()
        return (None, *found)


def _on_device(grad: Any) -> Any:
    """The gradient of a result: one that the script gave may be elsewhere. A number is moved, as in torch."""
    if grad is None or isinstance(grad, XLATensor):
        return grad
    if grad.dim():
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but backward() was given a gradient on {grad.device} for a tensor on xla:0: move it "
            "with .to('xla')"
        )
    return grad.to("xla")


_apply = super(torch.autograd.Function, _Run).apply
"""Without what torch does first for functorch, which is not active here (`torch_state.observed`)."""


_TWICE = (
    "Trying to backward through the graph a second time (a module under torch_bridge.optimize has already freed what it kept): "
    "call the first backward() or autograd.grad() with retain_graph=True"
)


class Recorded:
    """A call that runs op by op, and is watched. rest, how: what the module returned, flat, with the places of tensors; views: these, made of the
    results of the call's node, where they are not the same; needs: which of those have gradients; unreached: places of what the module holds that needs
    gradients, and that no result depends on.
    """

    def __init__(self, call: Call, differentiable: bool):
        self.call = call
        self.rest: list[Any] = []
        self.how: Any = None
        self.views: tuple[returned_views.View, ...] | None = None
        self.needs: tuple[bool, ...] = ()
        self.unreached: frozenset[int] = frozenset()
        self.over = False
        self._ran: list[XLATensor] | None = None
        # In a first recording's backward pass there may be calls that were looked at, whose gradients autograd adds up.
        self.alone = _BLOCK.of is not None or len(call.kind.forwards) >= recordings.TIMES
        self.of: object = None
        self._differentiable = differentiable
        self._known: dict[int, Source] = {}

    def start(self) -> None:
        """Run it before there is a node for it: only then it is known to which parameters the node leads."""
        with torch.no_grad():
            self._ran = self.forward()
        if any(self.needs):
            self.unreached = nested_grad.unreached(self._outs, self.call.held)
            if self._learned is not None:
                self.call.kind.leads_to(self.unreached)

    def forward(self) -> list[XLATensor]:
        """Run it; the tensors that it returns. What `start` has run is not run again."""
        if self._ran is not None:
            ran, self._ran = self._ran, None
            return ran
        call = self.call
        call.await_backward(self)
        self._again = Again(call, call.kind.forwards[0]) if self._differentiable else None
        self._own = call.detached() if self._differentiable else call.tensors
        arguments = call.on(self._own)
        watched = Watched(call, arguments, self._own)
        try:
            with torch.set_grad_enabled(call.ambient.grad):
                out = call.player.plain(*arguments[0], **arguments[1])
        finally:
            watched.stop()
        (self._outs, self.views), self.rest, self.how, self._learned = watched.learn(out)
        self.needs = tuple(t.requires_grad for t in self._outs)
        if self._again is None:
            return self._outs
        self._again.note_versions()
        self._segment = dispatch.STATE.session.current
        self._made = watched.made if self._learned is not None else []
        self._recording = watched.recording
        given: list[Any] = [t.detach() for t in self._outs]
        self._known = sources_by_id(call, given)
        return given

    def keep(self) -> list[XLATensor]:
        """What the backward pass needs if it has to compute the forward pass again; for itself, autograd keeps what it needs."""
        assert self._again is not None
        return self._again.keep()

    def release(self) -> None:
        """Let go of everything: there will be no other backward pass."""
        self.over = True
        self.call.player.waiting.discard(self)
        del self.call, self._outs, self._own, self._made, self._again, self._recording, self._learned, self._known

    def backward(self, saved: Any, grads: Any, needed: Any) -> list[Any]:
        """Gradients of arguments and parameters."""
        call = self.call
        call.note_nested()
        if torch.is_grad_enabled():
            assert self._again is not None
            if self._learned is None:
                raise RuntimeError(
                    f"gradients of gradients through a {call.player.name} that torch_bridge.optimize was just recording, and that cannot be repeated: "
                    "call torch_bridge.restore(module) before"
                )
            return self._again.gradients([*call.tensors, *call.parameters], grads, needed, saved)
        recording = None
        later = dispatch.STATE.session.current is not self._segment
        if self._learned is not None and not call.player.off and not self.call.kind.unknown_backward():
            sources, related = recordings.sources_of(call.given, self._made, self._recording.constants, grads)
            drawn = (*call.draws, len(self._learned.tape.draws))
            recording = Recording(
                [storage for storage, _ in sources], after=None if later else self._recording, related=related, drawn=drawn
            )
        try:
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            theirs = [*call.tensors, *call.parameters]
            found = nested_grad.gradients(self._outs, [*self._own, *call.parameters], grads, needed, keep, theirs=theirs)
        finally:
            if recording is not None:
                recording.stop()
        if recording is not None:
            self._learn(recording, [what for _, what in sources], found, recordings.pattern(grads, needed, self._known_source, later))
        parted = _apart(found, grads)
        if self.alone and accumulate_grad.possible():  # as what is played does it
            first = len(call.tensors)
            parted[first:] = accumulate_grad.hand_over(call.parameters, parted[first:])
        return parted

    def _known_source(self, storage: Storage) -> Source | None:
        return self._known.get(id(storage))

    def _learn(self, recording: Recording, sources: Sequence[Source], found: Sequence[Any], pattern: Any) -> None:
        player = self.call.player
        try:
            learned = recordings.backward_of(recording, sources, found)
            recordings.learn_backward(player.stop, self.call.kind, learned, self._made, pattern)
        except NotRepeatable as error:
            player.trouble(error, "in its backward pass, ")


def sources_by_id(call: Call, outs: Sequence[XLATensor]) -> dict[int, Source]:
    """What given storages and results are, by id (they outlive the backward pass that asks)."""
    found: dict[int, Source] = {id(o._storage): ("out", k) for k, o in enumerate(outs)}
    found.update({id(storage): ("given", k) for k, storage in enumerate(call.given)})
    return found


def _apart(found: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Gradients that share no memory with each other or with what came in: autograd takes them for its own, as nobody else holds them."""
    taken = {id(g._storage) for g in grads if g is not None}
    parted: list[Any] = []
    for g in found:
        if g is not None:
            g = make(g._layout, copy_storage(g._storage)) if id(g._storage) in taken else g.detach()
            taken.add(id(g._storage))
        parted.append(g)
    return parted


def inside(node: Any) -> Sequence[torch.Tensor] | None:
    """What a call gave, with its graph inside, if that is what a node of autograd's graph stands for; nothing for one that is played, None for other nodes."""
    if type(node) is not _NODE:
        return None
    doing = node.doing
    return doing._outs if type(doing) is Recorded and not doing.over else ()


def backward_without_engine(loss: Any, grad: object) -> bool:
    """The backward pass of a loss that a played module returned, if autograd's engine is not needed for it; False, with nothing done, if it is.

    The engine would look at a node for each parameter, which takes longer than to play the whole pass.
    """
    node: Any = loss.grad_fn
    if type(node) is not _NODE:
        return False
    doing = node.doing
    if type(doing) is not Played or doing.over or loss._backward_hooks or loss.retains_grad or not accumulate_grad.unwatched():
        return False
    if type(grad) is not XLATensor or (grad._layout.size, grad._layout.dtype) != (loss._layout.size, loss._layout.dtype):
        return False  # the engine converts it, or says what is wrong
    grads = [None] * len(doing.needs)
    grads[loss.output_nr] = grad
    with interrupts.deferred():
        if not doing.backward_into_leaves(grads, node.needs_input_grad[1:]):
            return False
        doing.release()
        node.maybe_clear_saved_tensors()
    return True


_NODE: Any = _Run._backward_cls
backward_passes.WITHOUT_ENGINE = backward_without_engine

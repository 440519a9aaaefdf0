"""What stages in different processes send one another: values to later stages, gradients back, and weights that several stages use.

The two sides of a message agree on what is in it (structure, shapes, dtypes, labels) once, through the processes' store; then only blocks of arrays travel,
from device to device (`torch_bridge.mesh.messages`). What is agreed holds for one signature: the shapes of the batch and the mode, which the first process
tells the others at the start of a step.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torch_bridge.mesh import messages, processes, world
from torch_bridge.mesh.places import Place
from torch_bridge.recorder import placed

_models = itertools.count()


class Sent(NamedTuple):
    """Stands for a tensor in a message. size: the shape that a rank sees."""

    array: messages.Described
    dtype: torch.dtype
    size: tuple[int, ...]
    requires_grad: bool


class Content(NamedTuple):
    """What is in a message: its leaves, with `Sent` in the place of tensors, and their structure."""

    leaves: list[Any]
    spec: pytree.TreeSpec


def signature(batch: Mapping[str, Any], mode: str) -> str:
    """What the contents of messages depend on: shapes and dtypes of a micro-batch, and the mode in which the step runs."""

    def said(x: Any) -> str:
        return f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__

    return f"{mode} {[(name, [said(x) for x in pytree.tree_leaves(value)]) for name, value in sorted(batch.items())]}"


def _frozen(content: Content) -> Content:
    """A message whose tensors take no gradients."""
    return Content([leaf._replace(requires_grad=False) if isinstance(leaf, Sent) else leaf for leaf in content.leaves], content.spec)


class Exchange:
    """The messages of one model's steps. Processes make their models, and call `begin`, in the same order."""

    def __init__(self) -> None:
        self._model = next(_models)
        self._step = 0
        self._signature = ""
        self._agreed: dict[tuple[str, str], Content] = {}
        self._kept: dict[str, messages.Kept] = {}
        self._left = ""

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """A step after its `begin`. There is no other one in this process if an exception ends it: processes with other stages wait in it."""
        try:
            yield
        except BaseException as error:
            self._left = f"{type(error).__name__} in step {self._step}"
            raise

    def begin(self, found: str) -> None:
        """Start a step. found: the signature of this process's batch; the first process's counts. RuntimeError after a step that an exception has ended."""
        if self._left:
            raise RuntimeError(
                f"an exception ended a step of the pipeline in this process ({self._left}), and processes with other stages wait in it for what this one did "
                "not send. Do not catch it: let it end the process, so that torchrun ends the others, and start again from a checkpoint; check data before "
                "run_train. In one process (nxd-run) a script may catch it and go on"
            )
        self._step += 1
        self._signature = processes.of_first(f"pipeline/{self._model}/step", found.encode()).decode()

    def told(self, name: str, said: bytes, source: Place, target: Place) -> bytes:
        """A few bytes that may be others in each step: what the first process of `source` says, in the processes of both places."""
        first, *_ = speakers = messages.processes_of(source)
        listeners = sorted({*speakers, *messages.processes_of(target)} - {first})
        here, key, store = world.process_index(), f"pipeline/{self._model}/{self._step}/{name}", processes.store()
        if here == first:
            store.set(key, said)
        if here not in listeners:
            return said
        found = processes.told(key)
        if store.add(f"{key}/read", 1) == len(listeners):
            store.delete_key(key)
            store.delete_key(f"{key}/read")
        return found

    def send(self, name: str, index: int, value: Any, source: Place, target: Place) -> None:
        """Send a value from one place to another. name, index: of the message, as the other side has them; tensors in it must have been computed.

        Raises NotImplementedError for tensors on the CPU, RuntimeError for a value that is another than in earlier steps and micro-batches of this signature.
        """
        leaves, spec = pytree.tree_flatten(value)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[k] = self._send(self._key(name, index, k), leaf, source, target, name)
        self._agree(name, Content(leaves, spec), source)

    def _send(self, key: str, t: torch.Tensor, source: Place, target: Place, name: str) -> Sent:
        if t.device.type != "xla":
            raise NotImplementedError(
                f"a stage of the pipeline hands on a tensor on the CPU ({name}), and stages in other processes get what lies on xla alone: let the "
                "layer return it on the device of its inputs, or make it where it is used"
            )
        array = placed.array_at(t, source)
        kept = messages.send(key, array, source, target)
        if kept:
            self._kept[key] = kept
        return Sent(messages.describe(array), t.dtype, tuple(t.shape), t.requires_grad)

    def _agree(self, name: str, content: Content, source: Place) -> None:
        known = self._agreed.get((self._signature, name))
        if known is None:
            self._agreed[self._signature, name] = content
            if messages.processes_of(source)[0] == world.process_index():
                processes.store().set(self._header(name), pickle.dumps(pytree.tree_unflatten(content.leaves, content.spec)))
        elif known != content:
            if _frozen(known) == _frozen(content):
                raise RuntimeError(
                    f"the pipeline's message {name} took gradients in earlier steps and does not now, or the other way round: weights were frozen or unfrozen "
                    "(requires_grad_) between steps, and stages in several processes agree once on what they send back. Do it before the first step, or start "
                    "the script with nxd-run, which hosts all ranks in one process"
                )
            raise RuntimeError(
                f"the pipeline's message {name} has {content.leaves} now, and had {known.leaves} before, with inputs of the same shapes: "
                "stages in several processes must hand on the same shapes for the same shapes of a batch. Pad what differs, or start the script with nxd-run, "
                "which hosts all ranks in one process"
            )

    def receive(self, name: str, index: int, source: Place, target: Place) -> Any:
        """The value that is sent under this name, at its target; a tensor that takes gradients says so. Its numbers may still be on their way."""
        content = self._agreed.get((self._signature, name))
        if content is None:
            found = pytree.tree_flatten(pickle.loads(processes.told(self._header(name))), is_leaf=lambda x: isinstance(x, Sent))
            content = self._agreed[self._signature, name] = Content(*found)
        leaves = list(content.leaves)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Sent):
                key = self._key(name, index, k)
                array = messages.receive(key, leaf.array, source, target, self._kept.pop(key, {}))
                leaves[k] = placed.from_array(array, leaf.dtype, leaf.size).requires_grad_(leaf.requires_grad)
        return pytree.tree_unflatten(leaves, content.spec)

    def _key(self, name: str, index: int, leaf: int) -> str:
        return f"{self._model} {self._step} {name} {index} {leaf}"

    def _header(self, name: str) -> str:
        return f"pipeline/{self._model}/{self._signature}/{name}"

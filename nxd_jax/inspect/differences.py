"""What differs between two graphs, causes before consequences: why a step compiled again."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nxd_jax.inspect.nodes import Node
from nxd_jax.inspect.tables import Column, Table
from torch_bridge.compiler.history import Read

MOST_ALIGNED = 20_000
"""Ops up to which two graphs are aligned op by op; of longer ones the first difference is found."""


MOST_CAUSES = 2
"""Differences of ops and arguments that are told, the first ones: what comes later follows from them as a rule."""


@dataclass(frozen=True)
class Difference:
    """One cause.

    kind: "shape", "dtype", "mode" (train or eval), "constant" (a Python number or flag), "data" (a size that was read from a tensor, or that an op on the host
    decided), "ops" (other ops are recorded), "results", "sharding", "memory", "numbers", "precision" or "ranks". what: which input, argument or module. before,
    after: what it was and is. module, line: where. advice: what to do about it, or ''.
    """

    kind: str
    what: str
    before: str
    after: str
    module: str = ""
    line: str = ""
    advice: str = ""

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        inside = f" [{self.module}]" if self.module else ""
        return f"{self.what} was {self.before}, now {self.after}{where}{inside}"


COLUMNS = (
    Column("kind", "kind"),
    Column("what", "what"),
    Column("before", "before"),
    Column("after", "after"),
    Column("line", "line"),
    Column("module", "module"),
    Column("advice", "advice"),
)


def table(found: Sequence[Difference]) -> Table[Difference]:
    """Differences as a table."""
    return Table("Differences", found, COLUMNS, "" if found else "the graphs are the same", 40)


def differences(
    before: Sequence[Node],
    after: Sequence[Node],
    reads: Sequence[Read] = (),
    origins: dict[str, str] | None = None,
    modes: tuple[Mapping[str, bool], Mapping[str, bool]] | None = None,
) -> list[Difference]:
    """Why `after` is another program than `before`: modes of modules and inputs, or if they are the same the first ops and arguments that differ.

    reads: numbers that Python read from tensors before `after`; origins: for its inputs, by name, the op that made them on the host.
    modes: whether modules were in training mode, before and after, by path; default what the nodes say.
    """
    runs = list(_aligned(*([n for n in nodes if n.op != "input"] for nodes in (before, after))))
    found_modes = modes or (_of_nodes(before), _of_nodes(after))
    switched = list(_modes(after, *found_modes))
    inputs = list(_inputs(before, after, [(a[0], b[0]) for tag, a, b in runs if tag == "same"], origins or {}))
    if switched or inputs:
        return [*switched, *inputs[:4]]
    accumulated = [d for d in (_gradients(before, after), _stepping(before, after)) if d is not None]
    if accumulated:
        return accumulated
    found = (_arguments(a[0], b[0], reads) if tag == "same" else _replaced(a, b, before, after, reads) for tag, a, b in runs)
    return list(itertools.islice((d for d in found if d is not None), MOST_CAUSES))


# -- modes and inputs ----------------------------------------------------------------------------------


def _modes(after: Sequence[Node], old: Mapping[str, bool], new: Mapping[str, bool]) -> Iterator[Difference]:
    switched = [m for m, training in new.items() if old.get(m, training) != training]
    if not switched:
        return
    words = {True: "train()", False: "eval()"}
    first = next((n.where for n in after if n.module in switched and n.where), "")
    several = f" and {len(switched) - 1} modules with it" if len(switched) > 1 else ""
    training = new[switched[0]]
    advice = "one program for each mode is right: it is compiled once"
    yield Difference("mode", f"the mode of {switched[0]}{several}", words[not training], words[training], switched[0], first, advice)


def _of_nodes(nodes: Sequence[Node]) -> dict[str, bool]:
    return {n.module: n.training for n in nodes if n.phase == "forward"}


def _inputs(
    before: Sequence[Node], after: Sequence[Node], pairs: Sequence[tuple[Node, Node]], origins: dict[str, str]
) -> Iterator[Difference]:
    """Inputs that stand at the same place of the same op and have another dtype or shape."""
    old, new = ({n.name: n for n in nodes if n.op == "input" and n.dtype} for nodes in (before, after))
    seen: set[str] = set()
    for x, y in pairs:
        for i, j in zip(x.inputs, y.inputs, strict=False):
            a, b = old.get(i), new.get(j)
            if a is None or b is None or j in seen or (a.dtype, a.shape) == (b.dtype, b.shape):
                continue
            seen.add(j)
            yield _input(a, b, y, origins.get(j, ""))


def _input(a: Node, b: Node, reader: Node, origin: str) -> Difference:
    what = b.module or f"an input of {reader.module or 'the step'} ({reader.op})"
    if a.dtype != b.dtype:
        advice = "keep inputs in one dtype, or convert them on the host"
        return Difference("dtype", what, _kind(a), _kind(b), reader.module, reader.where, advice)
    made = f", made on the host by {origin}," if origin else ""
    return Difference(
        "data" if origin else "shape", what + made, _kind(a), _kind(b), reader.module, reader.where, _about_shape(a, b, origin)
    )


def _about_shape(a: Node, b: Node, origin: str) -> str:
    if origin:
        return "its size depends on values: pad to a fixed size, or use a mask (torch.where) in place of selecting elements"
    dims = [i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=False)) if x != y]
    if len(a.shape) == len(b.shape) and dims == [0]:
        return "another batch size (a last, smaller batch?): drop_last=True, or pad it"
    return "pad to one of a few sizes"


def _kind(node: Node) -> str:
    return f"{node.dtype}[{', '.join(map(str, node.shape))}]"


# -- gradient accumulation -----------------------------------------------------------------------------

_ACCUMULATION = "gradient accumulation: one program for the first micro-batch, those that add to its gradients, and the one that steps; each is compiled once"
_STEP = "torch_bridge.optimizer_step"
_VIEWS = ("aten.select.int", "aten.reshape", "aten.view", "getitem")
"""Through which a gradient that lies with others in one array is read."""


def _gradients(before: Sequence[Node], after: Sequence[Node]) -> Difference | None:
    """Backward passes of which one adds to gradients that were there."""
    old, new = (_added(nodes) for nodes in (before, after))
    if bool(old) == bool(new) or not all(any(n.phase == "backward" for n in nodes) for nodes in (before, after)):
        return None
    words = {False: "new", True: "added to those of earlier backward passes"}
    line = (new or old)[0].where
    return Difference("ops", "each gradient", words[bool(old)], words[bool(new)], line=line, advice=_ACCUMULATION)


def _added(nodes: Sequence[Node]) -> list[Node]:
    """The additions of a backward pass that read what the program starts from."""
    by_name = {n.name: n for n in nodes}

    def is_input(name: str) -> bool:
        node = by_name.get(name)
        while node is not None and node.op in _VIEWS and node.inputs:
            node = by_name.get(node.inputs[0])
        return node is not None and node.op == "input"

    return [n for n in nodes if n.phase == "backward" and n.op == "aten.add.Tensor" and any(map(is_input, n.inputs))]


def _stepping(before: Sequence[Node], after: Sequence[Node]) -> Difference | None:
    """An optimizer's step, recorded as one op, in one of two programs that both go backward; the other one ends there."""
    old, new = ([n for n in nodes if n.op == _STEP] for nodes in (before, after))
    if bool(old) == bool(new) or _after_backward(after if old else before) != []:
        return None
    words = {False: "not taken", True: "taken"}
    return Difference("ops", "the optimizer's step", words[bool(old)], words[bool(new)], line=(new or old)[0].where, advice=_ACCUMULATION)


def _after_backward(nodes: Sequence[Node]) -> list[Node] | None:
    """The ops after those of the backward pass; None without one."""
    last = max((i for i, n in enumerate(nodes) if n.phase == "backward"), default=None)
    return None if last is None else _computing([n for n in nodes[last + 1 :] if n.op not in ("input", *_VIEWS)])


# -- ops -----------------------------------------------------------------------------------------------


def _aligned(old: list[Node], new: list[Node]) -> Iterator[tuple[str, list[Node], list[Node]]]:
    """("same", [a], [b]) for ops that stand for each other, ("other", ops, ops) for runs that do not."""
    a, b = ([(n.op, n.module, n.where, n.phase) for n in nodes] for nodes in (old, new))
    if max(len(a), len(b)) > MOST_ALIGNED:
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        yield from (("same", [old[i]], [new[i]]) for i in range(at))
        if at < max(len(a), len(b)):
            yield "other", old[at : at + 1], new[at : at + 1]
        return
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from (("same", [old[x]], [new[y]]) for x, y in zip(range(i, j), range(k, m), strict=True))
        else:
            yield "other", old[i:j], new[k:m]


def _arguments(a: Node, b: Node, reads: Sequence[Read]) -> Difference | None:
    """What Python gave an op that stands at the same place."""
    if a.arguments == b.arguments:
        return None
    old, new = (_named(n.arguments) for n in (a, b))
    name = next((k for k in new if old.get(k) != new[k]), next(iter(old), ""))
    before, after = old.get(name, "(not given)"), new.get(name, "(not given)")
    what = f"argument {name} of {b.op}" if name else f"an argument of {b.op}"
    read = _read(after, reads)
    if read is not None:
        return Difference("data", what, before, after, b.module, b.where, _about_read(read))
    advice = "a Python value that is part of the program: keep it fixed, or pass it as a tensor"
    return Difference("constant", what, before, after, b.module, b.where, advice)


def _read(text: str, reads: Sequence[Read]) -> Read | None:
    """The number in an argument's text that Python read from a tensor."""
    return next((r for r in reversed(reads) if re.search(rf"(?<![\w.]){re.escape(str(r.value))}(?![\w.])", text)), None)


def _about_read(read: Read) -> str:
    return f"{read.value} was read from a tensor at {read.line}: a size that depends on values; pad to a fixed size or use a mask"


def _named(arguments: str) -> dict[str, str]:
    """'dim=0, size=[2, 3]' as {'dim': '0', 'size': '[2, 3]'}."""
    parts = re.split(r", (?=\w+=)", arguments)
    return {name if eq else "": value if eq else name for name, eq, value in (p.partition("=") for p in parts)}


def _replaced(a: list[Node], b: list[Node], old: Sequence[Node], new: Sequence[Node], reads: Sequence[Read]) -> Difference | None:
    if not _computing(a) and not _computing(b):
        return None
    where = next(iter(_computing(b) or _computing(a)))
    had, has = (any(n.phase == "backward" for n in nodes) for nodes in (old, new))
    if had != has:
        words = {True: "with a backward pass", False: "without one"}
        return Difference("ops", "the step", words[had], words[has], where.module, where.where)
    read = next((r for n in b if (r := _read(n.arguments, reads)) is not None), None)
    if read is not None:
        return Difference("data", "what is recorded", _listed(a), _listed(b), where.module, where.where, _about_read(read))
    if any("_to_copy" in n.op for n in (*a, *b)):
        advice = "conversions (.to, autocast) that are recorded once and not another time"
        return Difference("dtype", "what is recorded", _listed(a), _listed(b), where.module, where.where, advice)
    advice = "a Python branch, an option or a number of calls changed: each way is compiled once"
    if not (_computing(a) and _computing(b)):
        words = {False: "not recorded", True: "recorded"}
        return Difference(
            "ops", _listed(_computing(a) or b), words[bool(_computing(a))], words[bool(_computing(b))], where.module, where.where, advice
        )
    return Difference("ops", "what is recorded", _listed(a), _listed(b), where.module, where.where, advice)


def _computing(nodes: list[Node]) -> list[Node]:
    return [n for n in nodes if n.op not in ("getitem", "number", "output")]


def _listed(nodes: list[Node]) -> str:
    names = [f"{n.op} to {n.dtype}" if "_to_copy" in n.op else n.op for n in _computing(nodes)]
    if not names:
        return "no op"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more ops" if len(names) > 4 else "")

"""Where in a script a plain number or a truth goes that Python took from a number that differs by rank: `float(rank)`, `rank in (1, 2)`.

The source of the function is followed by names: what is assigned from it, what a branch on it assigns, attributes of that name in the same file, the functions
of the script that are called with it, and those that called this one if it is returned. It errs on the side of quiet: what goes into a library's function
(a progress bar, a logger), a string, or `int(rank)` is not followed.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch

from torch_bridge import source
from torch_bridge.script import rank_syntax
from torch_bridge.script.rank_syntax import Function

_DEPTH = 4
"""Functions called from the first one that are followed."""
_FOLD = {
    "float", "bool", "abs", "round", "sum", "max", "min", "sorted", "any", "all", "len", "range", "list", "tuple", "set", "pow", "divmod", "complex",
}  # fmt: skip
"""Functions of Python's that make numbers of numbers."""
_KEEPING = {"append", "extend", "insert", "add", "update", "setdefault", "appendleft"}
_READS = {"item", "tolist", "size", "dim", "numel", "cpu_count", "data_ptr", "stride", "element_size"}
_NO_WORK = (
    "save", "load", "device", "distributed", "cuda", "set_", "get_", "no_grad", "is_", "compile", "backends", "multiprocessing", "utils", "jit", "profiler",
)  # fmt: skip
"""What the names of functions in torch start with that work with no tensors."""
_COLLECTIVES = {
    "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "collective_broadcast", "reduce_gradients", "optimizer_step",
}  # fmt: skip
"""Functions between ranks that write tensors of the caller's. Not `gather` and `scatter`, which a script calls with a list on one rank alone."""
_GATHERINGS = {"mesh_reduce", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
"""Functions between ranks that take Python objects. `xm.rendezvous`, which takes bytes, looks at them itself (`rank_payloads`)."""
_BETWEEN_RANKS = ("torch.distributed.distributed_c10d", "torch_bridge.torch_xla.core.")
"""Modules that have both."""


class Flow:
    """Follows values through functions. lines: (file, line) that use one; mixed: (file, line) where one surely meets a tensor."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.mixed: list[tuple[str, int]] = []
        self._done: set[tuple[Any, ...]] = set()

    def follow(self, frame: FrameType, decided: ast.AST, is_branch: bool) -> None:
        """From the frame that asked, outwards as long as functions return it."""
        at: FrameType | None = frame
        for _ in range(2 * _DEPTH):
            assert at is not None
            scope = rank_syntax.Names(at.f_locals, at.f_globals)
            function = rank_syntax.function_of(decided)
            returned = _Function(self, at.f_code.co_filename, function, scope, 0).run(
                [decided] if not is_branch else [], [decided] if is_branch else []
            )
            if not returned:
                return
            at = _caller(at, function)
            node = None if at is None else rank_syntax.asking(at)
            if node is None:
                return
            decided, is_branch = node, False

    def enter(self, called: Any, call: ast.Call, caller: _Function) -> bool:
        """A function of the script is called with such a value; whether it returns it."""
        code = called.__code__
        found = rank_syntax.tree(code.co_filename)
        node = (
            next(
                (n for n in ast.walk(found) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and rank_syntax.starts(n, code)), None
            )
            if found is not None
            else None
        )
        if node is None or caller.depth >= _DEPTH:
            return False
        names, tensors = set(), set()
        given = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        bound = given[1:] if given and given[0] in ("self", "cls") else given
        for name, value in (*zip(bound, call.args, strict=False), *((k.arg, k.value) for k in call.keywords if k.arg)):
            if caller.tainted(value):
                names.add(name)
            elif caller.tensor(value):
                tensors.add(name)
        key = (code.co_filename, code, frozenset(names), frozenset(tensors))
        if key in self._done:
            return False
        self._done.add(key)
        scope = rank_syntax.Names({}, called.__globals__)
        return _Function(self, code.co_filename, node, scope, caller.depth + 1, names, tensors).run([], [])


def _caller(frame: FrameType, function: Function) -> FrameType | None:
    """The frame of the code outside torch and this package that called a function."""
    at: FrameType | None = frame
    name = getattr(function, "name", "<module>")
    while at is not None and at.f_code.co_name != name and at.f_code.co_filename == frame.f_code.co_filename:
        at = at.f_back  # out of comprehensions
    at = None if at is None else at.f_back
    while at is not None and not source.is_outside(at.f_code):
        at = at.f_back
    return at


class _Function:
    """The statements of one function. names, attributes: those that hold a followed value; tensors: names of tensors."""

    def __init__(
        self, flow: Flow, file: str, node: Function, scope: rank_syntax.Names, depth: int, names: Iterable[str] = (), tensors: Iterable[str] = ()
    ):  # fmt: skip
        self.flow, self.file, self.node, self.scope, self.depth = flow, file, node, scope, depth
        self.names, self.tensors = set(names), set(tensors)
        self.attributes: set[str] = set()
        self.returned = False
        self._hot: set[ast.AST] = set()
        self._branches: set[ast.AST] = set()

    def run(self, hot: Sequence[ast.AST], branches: Sequence[ast.AST]) -> bool:
        """Follow what these expressions and branches decide; whether the function returns it."""
        self._hot, self._branches = set(hot), set(branches)
        self._hold(node for node in hot if self._is_place_in_array(node))
        self._hold(held for node in hot if (held := _put_in_order(node)) is not None)
        nodes = list(ast.walk(self.node))
        size = -1
        while size != (size := len(self.names) + len(self.attributes) + len(self.tensors) + len(self._branches) + self.returned):
            for node in nodes:
                self._statement(node)
        if self.attributes:
            self._whole_file()
        self._note(nodes)
        return self.returned

    # -- what holds it ---------------------------------------------------------------------------------

    def _statement(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if self.tainted(node.value):
                self._hold(targets)
            elif self.tensor(node.value):
                self.tensors.update(t.id for t in targets if isinstance(t, ast.Name))
        elif isinstance(node, (ast.For, ast.comprehension)) and self.tainted(node.iter):
            self._hold([node.target])
        elif isinstance(node, ast.Return) and node.value is not None and self.tainted(node.value):
            self.returned = True
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _KEEPING
            and any(map(self.tainted, node.args))
        ):
            self._hold([node.func.value])
        elif node in self._branches or (isinstance(node, (ast.If, ast.While)) and self.tainted(node.test)):
            assert isinstance(node, (ast.If, ast.While, ast.Match))
            self._branches.add(node)
            self._branch(node)

    def _is_place_in_array(self, node: ast.AST) -> bool:
        """Whether a number was asked for to write it to an array of NumPy's: `losses[k] = loss.item()`."""
        return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(self.scope.value(node.value), np.ndarray)

    def _hold(self, targets: Iterable[ast.AST]) -> None:
        for target in targets:
            if isinstance(target, ast.Name):
                self.names.add(target.id)
            elif isinstance(target, ast.Attribute):
                self.attributes.add(target.attr)
            elif isinstance(target, (ast.Subscript, ast.Starred)):
                self._hold([target.value])
            elif isinstance(target, (ast.Tuple, ast.List)):
                self._hold(target.elts)

    def _branch(self, node: ast.If | ast.While | ast.Match) -> None:
        """What either way of a branch assigns or returns."""
        for part in rank_syntax.inside(rank_syntax.decided(node)):
            if isinstance(part, (ast.Assign, ast.AnnAssign)) and part.value is not None and self._number(part.value):
                self._hold(part.targets if isinstance(part, ast.Assign) else [part.target])
            elif isinstance(part, ast.AugAssign):
                self._hold([part.target])
            elif isinstance(part, ast.Call):
                self._keep(part)
            elif isinstance(part, ast.Return) and part.value is not None and self._number(part.value):
                self.returned = True
            elif isinstance(part, (ast.Break, ast.Continue)):
                self._loop(part)

    def _loop(self, leaves: ast.AST) -> None:
        """A loop that a branch leaves: what it assigns. One whose turn it ends: what is assigned after it, or kept: `parts.append(batch.to("xla"))`."""
        loop = _loop_of(leaves)
        if loop is None:
            return
        body = list(loop.body)
        turns = isinstance(leaves, ast.Continue)
        if isinstance(leaves, ast.Continue):
            body = [x for x in body if x.lineno > leaves.lineno or any(y is leaves for y in ast.walk(x))]
        for part in rank_syntax.inside(body):
            if isinstance(part, ast.AugAssign) or (isinstance(part, ast.Assign) and self._number(part.value)):
                self._hold([part.target] if isinstance(part, ast.AugAssign) else part.targets)
            elif turns and isinstance(part, ast.Call):
                self._keep(part)

    def _keep(self, call: ast.Call) -> None:
        """What a call puts something into: `parts.append(x)`."""
        if isinstance(call.func, ast.Attribute) and call.func.attr in _KEEPING:
            self._hold([call.func.value] if isinstance(self.scope.value(call.func.value), (list, dict, set, type(None))) else [])

    def _number(self, node: ast.AST) -> bool:
        """Whether a value may be a number or a tensor: not a string, a function, or what a library's function makes."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, (bool, int, float, complex))
        if isinstance(node, (ast.JoinedStr, ast.Lambda)):
            return False
        if isinstance(node, (ast.Name, ast.Attribute)):
            value = self.scope.value(node)
            return value is None or isinstance(
                value, (bool, int, float, complex, list, tuple, dict, set, np.ndarray, np.generic, torch.Tensor)
            )
        if isinstance(node, ast.Call):
            return self.tensor(node) or self._folds(node) or self._of_script(node) is not None
        if isinstance(node, ast.IfExp):
            return self._number(node.body) or self._number(node.orelse)
        if isinstance(node, (ast.BinOp, ast.BoolOp)):
            return all(self._number(x) for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr))
        return True

    # -- expressions -----------------------------------------------------------------------------------

    def tainted(self, node: ast.AST) -> bool:
        """Whether an expression's value comes from a followed one."""
        if node in self._hot:
            return not isinstance(node, ast.IfExp) or self._number(node)
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Attribute):
            return node.attr in self.attributes or self.tainted(node.value)
        if isinstance(node, (ast.Lambda, ast.JoinedStr, ast.Constant)):
            return False
        if isinstance(node, ast.Call):
            given = [*node.args, *(k.value for k in node.keywords)]
            if not any(map(self.tainted, given)):
                return isinstance(node.func, ast.Attribute) and self.tainted(node.func.value)
            called = self._of_script(node)
            return self.flow.enter(called, node, self) if called is not None else self._folds(node) or self.tensor(node)
        return any(self.tainted(child) for child in ast.iter_child_nodes(node))

    def _folds(self, node: ast.Call) -> bool:
        """Whether a call makes a number of numbers."""
        if isinstance(node.func, ast.Name) and node.func.id in _FOLD:
            return True
        module = getattr(self.scope.value(node.func), "__module__", None) or rank_syntax.root_module(self.scope, node.func)
        return isinstance(module, str) and module.split(".")[0] in ("math", "numpy", "operator", "torch", "statistics", "cmath", "array")

    def _of_script(self, node: ast.Call) -> Any:
        """The function of the script that a call runs, if it is one."""
        called = self.scope.value(node.func)
        if isinstance(called, torch.nn.Module):
            called = type(called).forward
        elif isinstance(called, type):
            called = called.__init__  # type: ignore[misc]
        called = inspect.unwrap(getattr(called, "__func__", called)) if callable(called) else None
        return called if isinstance(called, types.FunctionType) and rank_syntax.is_script(called.__code__) else None

    def tensor(self, node: ast.AST) -> bool:
        """Whether an expression's value is a tensor, as far as that can be seen."""
        if isinstance(node, ast.Name):
            return node.id in self.tensors or isinstance(self.scope.value(node), torch.Tensor)
        if isinstance(node, ast.Attribute):
            return isinstance(self.scope.value(node), torch.Tensor) or (
                node.attr in ("T", "data", "grad", "mT") and self.tensor(node.value)
            )
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr not in _READS and self.tensor(node.func.value):
                return True
            return isinstance(self.scope.value(node.func), torch.nn.Module) or self._torch(node.func)
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Compare)):
            return any(self.tensor(x) for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr))
        return False

    def _torch(self, node: ast.AST) -> bool:
        """Whether this names a function of torch's that works with tensors."""
        if not isinstance(node, ast.Attribute):
            return False
        owner = self.scope.value(node.value)
        return (
            isinstance(owner, types.ModuleType)
            and owner.__name__.split(".")[0] == "torch"
            and not f"{owner.__name__}.{node.attr}".removeprefix("torch.").startswith(_NO_WORK)
        )

    # -- lines -----------------------------------------------------------------------------------------

    def _note(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            if isinstance(node, (ast.If, ast.While, ast.Match)) and node in self._branches:
                self._yields(node)
                for part in rank_syntax.decided(node):
                    self._add(part)
                    self._mixed_inside(part)
                self._skipped(node)
            elif isinstance(node, ast.expr) and not isinstance(node, (ast.Name, ast.Constant)) and self._uses(node):
                if not self._harmless(node):
                    self._add(node)
                self._meets(node)
            elif isinstance(node, (ast.AugAssign,)) and self.tainted(node.value) and self.tensor(node.target):
                self._mix(node)

    def _skipped(self, node: ast.If | ast.While | ast.Match) -> None:
        """What follows a branch that leaves the function or its turn of a loop: `if k % n != rank: continue`."""
        inside = list(rank_syntax.inside(rank_syntax.decided(node)))
        if any(isinstance(x, ast.Return) for x in inside):
            for later in rank_syntax.after(node):
                self._add(later)
        if not isinstance(node, ast.While) and any(
            isinstance(x, (ast.Break, ast.Continue)) and _loop_of(x) is _loop_of(node) for x in inside
        ):
            at: ast.AST = node
            while at is not _loop_of(node):
                for later in rank_syntax.after(at):
                    self._add(later)
                    self._mixed_inside(later)
                at = next(rank_syntax.parents(at))

    def _harmless(self, node: ast.expr) -> bool:
        """Whether no tensor takes part: a library's function that takes no tensors (`print`, a logger), a comparison with a number that was read."""
        if isinstance(node, ast.Call):
            called = self.scope.value(node.func)
            known = isinstance(called, torch.nn.Module) or self._folds(node) or self.tensor(node) or self._of_script(node) is not None
            return called is not None and not known
        read = [
            x for x in ast.iter_child_nodes(node) if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr in _READS
        ]
        return isinstance(node, ast.Compare) and bool(read)

    def _uses(self, node: ast.AST) -> bool:
        return any(self.tainted(child) for child in ast.iter_child_nodes(node)) or node in self._hot

    def _meets(self, node: ast.expr) -> None:
        """One node with a followed value and a tensor among its operands, or a call that gives the value to other ranks."""
        if isinstance(node, (ast.BinOp, ast.Compare)):
            parts = [x for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr)]
            if any(map(self.tainted, parts)) and any(map(self.tensor, parts)):
                self._mix(node)
        elif isinstance(node, ast.Call):
            given = [*node.args, *(k.value for k in node.keywords)]
            method = isinstance(node.func, ast.Attribute) and self.tensor(node.func.value)
            if any(map(self.tainted, given)) and (method or self._torch(node.func) or self._between_ranks(node.func, _GATHERINGS)):
                self._mix(node)

    def _mixed_inside(self, statement: ast.AST) -> None:
        """Work with CPU tensors inside a branch that changes one, or makes one for later; collectives, which the first rank may not have called."""
        for part in rank_syntax.inside([statement]):
            if (
                isinstance(part, ast.Assign)
                and (self.tensor(part.value) or (_holds_state(part.value) and not _is_default(part)))
                and any(isinstance(t, ast.Name) for t in part.targets)
            ):
                if any(self._lives_on(t.id, part) for t in part.targets if isinstance(t, ast.Name)):
                    self._mix(part)
            elif (
                (isinstance(part, ast.AugAssign) and self.tensor(part.target))
                or (
                    isinstance(part, ast.Call)
                    and isinstance(part.func, ast.Attribute)
                    and part.func.attr.endswith("_")
                    and self.tensor(part.func.value)
                )
                or (isinstance(part, ast.Return) and part.value is not None and self.tensor(part.value))
                or (isinstance(part, ast.Call) and self._between_ranks(part.func, _COLLECTIVES))
            ):
                self._mix(part)

    def _yields(self, node: ast.If | ast.While | ast.Match) -> None:
        """What a generator gives or leaves out by a branch: a dataset that picks each rank's samples. Context managers yield once, whatever the rank."""
        if any("contextmanager" in ast.unparse(d) for d in getattr(self.node, "decorator_list", ())):
            return
        ways = [_given(way) for way in rank_syntax.ways(node)]
        if len(set(map(bool, ways))) > 1:
            self._mix(next(filter(None, ways))[0])
        elif not any(ways) and any(isinstance(x, (ast.Break, ast.Continue)) for x in rank_syntax.inside(rank_syntax.decided(node))):
            loop = _loop_of(node)
            if loop is not None and (later := _given(loop.body)):
                self._mix(later[0])

    def _between_ranks(self, node: ast.expr, names: set[str]) -> bool:
        """Whether this names one of these functions between ranks."""
        called = self.scope.value(node)
        module = getattr(called, "__module__", None)
        return isinstance(module, str) and module.startswith(_BETWEEN_RANKS) and getattr(called, "__name__", "") in names

    def _lives_on(self, name: str, statement: ast.AST) -> bool:
        """Whether a name is read outside the branch that assigns it."""
        branch = next((x for x in rank_syntax.parents(statement) if x in self._branches), None)
        if branch is None:
            return False  # after one that is left: `_loop` has what it assigns
        inside = set(ast.walk(branch))
        return any(
            isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) and n not in inside for n in ast.walk(self.node)
        )

    def _mix(self, node: Any) -> None:
        self.flow.mixed.append((self.file, node.lineno))

    def _add(self, node: Any) -> None:
        self.flow.lines.update((self.file, line) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))

    def _whole_file(self) -> None:
        """Attributes of such a name in other functions of the file."""
        found = rank_syntax.tree(self.file)
        for node in ast.walk(found) if found is not None else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in self.attributes:
                statement = next((x for x in rank_syntax.parents(node) if isinstance(x, ast.stmt)), None)
                if statement is not None and not hasattr(statement, "body"):
                    self._add(statement)


def _put_in_order(node: ast.AST) -> ast.expr | None:
    """The list that a call puts in order, or puts something into in order: `losses.sort()`, `heapq.heappush(losses, loss)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr == "sort":
        return node.func.value
    return node.args[0] if node.func.attr in _ORDERING and node.args else None


_ORDERING = {"heapify", "heappush", "heappop", "heappushpop", "heapreplace", "insort", "insort_left", "insort_right"}


def _holds_state(node: ast.expr) -> bool:
    """Whether this is a model's weights of now: `copy.deepcopy(model.state_dict())`, `{k: v.clone() for k, v in model.state_dict().items()}`."""
    return any(isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr == "state_dict" for x in ast.walk(node))


def _is_default(node: ast.Assign) -> bool:
    """Whether this gives a name the value that it has where nobody gave one: `if state is None: state = model.state_dict()`. All ranks may have come there."""
    around = next(rank_syntax.parents(node), None)
    test = around.test if isinstance(around, ast.If) else None
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and len(test.ops) == 1
        and isinstance(test.ops[0], ast.Is)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
        and any(isinstance(t, ast.Name) and t.id == test.left.id for t in node.targets)
    )


def _loop_of(node: ast.AST) -> ast.For | ast.AsyncFor | ast.While | None:
    """The loop around a statement, in whose body it is."""
    return next((x for x in rank_syntax.parents(node) if isinstance(x, (ast.For, ast.AsyncFor, ast.While))), None)


def _given(statements: Iterable[ast.stmt]) -> list[ast.Yield]:
    """Where a generator yields a value, texts left out."""
    return [
        x
        for x in rank_syntax.inside(statements)
        if isinstance(x, ast.Yield) and x.value is not None and not isinstance(x.value, (ast.Constant, ast.JoinedStr))
    ]

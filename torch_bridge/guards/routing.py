"""Statements and expressions rewritten so that reads, writes, calls and operators go through probes (`Router`), and those for which that is not done."""

from __future__ import annotations

import ast
from typing import Any

PROBES_NAME = "__probes__"
"""The free variable of rewritten code that has the probes."""


class CannotInstrument(Exception):
    """Why a function cannot be rewritten."""


_UNROUTED: dict[type[ast.AST], str] = {
    ast.Global: "assigns a global variable",
    ast.Nonlocal: "assigns a variable of an enclosing function",
    ast.ClassDef: "defines a class",
    ast.AsyncFunctionDef: "is asynchronous",
    ast.AsyncFor: "is asynchronous",
    ast.AsyncWith: "is asynchronous",
    ast.Await: "is asynchronous",
    ast.Match: "has a match statement",
}
for _name, _what in (("TryStar", "has an except* clause"), ("TypeAlias", "defines a type"), ("TemplateStr", "has a template string")):
    if hasattr(ast, _name):
        _UNROUTED[getattr(ast, _name)] = _what


def refuse_unrouted(node: ast.AST, where: str) -> None:
    for inner in ast.walk(node):
        what = _UNROUTED.get(type(inner))
        if what is not None:
            raise CannotInstrument(f"{where} {what}")
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and _sees_variables(inner.func.id, inner):
            raise CannotInstrument(f"{where} calls {inner.func.id}")
        if inner is not node and isinstance(inner, ast.FunctionDef) and inner.decorator_list:
            raise CannotInstrument(f"{where} defines a decorated function")
        if getattr(inner, "type_params", None):
            raise CannotInstrument(f"{where} has type parameters")


_OF_THE_FRAME = frozenset(
    [
        "globals",
        "locals",
        "vars",
        "dir",
        "eval",
        "exec",
        "__import__",
        "breakpoint",
        "warn",
        "warn_explicit",
        "_getframe",
        "currentframe",
        "stack",
        "extract_stack",
    ]
)
"""Functions that look at the frame they are called from."""
_TRIVIAL = (ast.Constant, ast.Lambda, ast.JoinedStr)


def _is_torch_stack(f: ast.expr) -> bool:
    """Whether it calls a `stack` that is not `inspect.stack`."""
    return isinstance(f, ast.Attribute) and f.attr == "stack" and not (isinstance(f.value, ast.Name) and f.value.id == "inspect")


def _sees_variables(name: str, call: ast.Call) -> bool:
    """Whether a builtin would see the variable that rewritten code has more."""
    return name in ("locals", "eval", "exec") or (name in ("vars", "dir") and not call.args)


class Router(ast.NodeTransformer):
    """Rewrites one function."""

    def __init__(self, package: str, class_name: str):
        self._package = package
        self._class = class_name

    def function(self, node: Any) -> Any:
        """The node of the function, rewritten in place."""
        node.args = bare(node.args)
        if isinstance(node, ast.Lambda):
            node.body = self.visit(node.body)
            return node
        node.body = self._body(node)
        node.decorator_list = []
        node.returns = None
        return node

    def _body(self, node: Any) -> list[ast.stmt]:
        """Statements; the dict of `**kwargs` is the function's own."""
        body = [new for s in node.body for new in self._statements(s)]
        if node.args.kwarg is not None:
            name = ast.copy_location(ast.Name(node.args.kwarg.arg, ast.Load()), node.body[0])
            body.insert(0, ast.copy_location(ast.Expr(self._probe("fresh", name, at=node.body[0])), node.body[0]))
        return body

    def _statements(self, s: ast.stmt) -> list[ast.stmt]:
        found = self.visit(s)
        return found if isinstance(found, list) else [found]

    def _probe(self, name: str, *args: ast.expr, at: ast.AST, keywords: Any = ()) -> ast.Call:
        made = ast.Call(ast.Attribute(ast.Name(PROBES_NAME, ast.Load()), name, ast.Load()), list(args), list(keywords))
        for part in (made, made.func, made.func.value):  # type: ignore[attr-defined]
            ast.copy_location(part, at)
        return made

    def _constant(self, value: Any, at: ast.AST) -> ast.Constant:
        return ast.copy_location(ast.Constant(value), at)

    def _private(self, name: str) -> str:
        if self._class.strip("_") and name.startswith("__") and not name.endswith("__"):
            return f"_{self._class.lstrip('_')}{name}"
        return name

    def _use(self, node: ast.expr, probe: str = "operand") -> ast.expr:
        new = self.visit(node)
        return new if isinstance(node, _TRIVIAL) else self._probe(probe, new, at=node)

    # expressions

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return self._probe("attribute", self.visit(node.value), self._constant(self._private(node.attr), node), at=node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        return self._probe("item", self.visit(node.value), self._index(node.slice), at=node)

    def _index(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Slice):
            parts = [self._constant(None, node) if p is None else self.visit(p) for p in (node.lower, node.upper, node.step)]
            return self._probe("make_slice", *parts, at=node)
        if isinstance(node, ast.Tuple) and any(isinstance(e, ast.Slice) for e in node.elts):
            return ast.copy_location(ast.Tuple([self._index(e) for e in node.elts], ast.Load()), node)
        return self.visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and not node.keywords:
            return node
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in _OF_THE_FRAME and not _is_torch_stack(node.func):  # called from here, as they look at who calls them
            refusal = self._probe("refuse", self._constant(f"it calls {name}", node), at=node)
            return ast.copy_location(ast.BoolOp(ast.Or(), [refusal, self.generic_visit_call(node)]), node)
        args = [self.visit(a) for a in node.args]
        keywords = [
            ast.copy_location(ast.keyword(k.arg, self._use(k.value, "merged") if k.arg is None else self.visit(k.value)), k)
            for k in node.keywords
        ]
        return self._probe("call", self.visit(node.func), *args, keywords=keywords, at=node)

    def generic_visit_call(self, node: ast.Call) -> ast.Call:
        """The call as it is; what it is made of is routed."""
        node.args = [self.visit(a) for a in node.args]
        for k in node.keywords:
            k.value = self.visit(k.value)
        return node

    def visit_Starred(self, node: ast.Starred) -> Any:
        if isinstance(node.ctx, ast.Load):
            node.value = self._use(node.value, "iterate")
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        node.left, node.right = self._use(node.left), self._use(node.right)
        return self._probe("joined", node, at=node) if isinstance(node.op, (ast.Add, ast.Mult)) else node

    def _test(self, node: ast.expr) -> ast.expr:
        """A condition: each operand of `and` and `or` is asked once whether it is true."""
        if isinstance(node, ast.BoolOp):
            node.values = [self._test(v) for v in node.values]
            return node
        return self._use(node, "truth")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        node.operand = self._test(node.operand) if isinstance(node.op, ast.Not) else self._use(node.operand)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        *first, last = node.values
        node.values = [*(self._use(v, "condition") for v in first), self.visit(last)]  # nobody asks whether the last one is true
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        node.test, node.body, node.orelse = self._test(node.test), self.visit(node.body), self.visit(node.orelse)
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        ops = [None, *node.ops, None]
        values: list[ast.expr] = []
        for k, value in enumerate([node.left, *node.comparators]):
            beside = [op for op in (ops[k], ops[k + 1]) if op is not None]
            if all(isinstance(op, (ast.Is, ast.IsNot)) for op in beside):
                constant = any(isinstance(v, ast.Constant) for v in (node.left, *node.comparators))
                values.append(self.visit(value) if constant else self._use(value, "identified"))
            elif isinstance(ops[k], (ast.In, ast.NotIn)) and len(beside) == 1:
                values.append(self._use(value, "container"))
            else:
                values.append(self._use(value, "compared"))
        node.left, node.comparators = values[0], values[1:]
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Any:
        node.value = self._use(node.value, "formatted" if node.conversion == -1 else "printed")
        if node.format_spec is not None:
            node.format_spec = self.visit(node.format_spec)
        return node

    def visit_List(self, node: ast.List) -> Any:
        if not isinstance(node.ctx, ast.Load):
            return node
        return self._own(node)

    def visit_Dict(self, node: ast.Dict) -> Any:
        node.values = [self._use(v, "merged") if k is None else self.visit(v) for k, v in zip(node.keys, node.values, strict=True)]
        node.keys = [None if k is None else self._use(k, "hashed") for k in node.keys]
        return self._probe("fresh", node, at=node)

    def visit_Set(self, node: ast.Set) -> Any:
        node.elts = [self.visit(e) if isinstance(e, ast.Starred) else self._use(e, "hashed") for e in node.elts]
        return self._probe("fresh", node, at=node)

    def _own(self, node: ast.AST) -> Any:
        return self._probe("fresh", self.generic_visit(node), at=node)  # type: ignore[arg-type]

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _own

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        node.target = self._target(node.target)
        node.iter = self._use(node.iter, "iterate")
        node.ifs = [self._test(i) for i in node.ifs]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        node.args.defaults = [self.visit(d) for d in node.args.defaults]
        node.args.kw_defaults = [None if d is None else self.visit(d) for d in node.args.kw_defaults]
        node.body = self.visit(node.body)
        return node

    def visit_YieldFrom(self, node: ast.YieldFrom) -> Any:
        node.value = self._use(node.value, "iterate")
        return node

    # statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.args.defaults = [self.visit(d) for d in node.args.defaults]
        node.args.kw_defaults = [None if d is None else self.visit(d) for d in node.args.kw_defaults]
        node.body = self._body(node)
        return node

    def visit_If(self, node: ast.If) -> Any:
        node.test = self._test(node.test)
        return self._blocks(node)

    def visit_While(self, node: ast.While) -> Any:
        node.test = self._test(node.test)
        return self._blocks(node)

    def visit_Assert(self, node: ast.Assert) -> Any:
        node.test = self._test(node.test)
        node.msg = None if node.msg is None else self.visit(node.msg)
        return node

    def visit_For(self, node: ast.For) -> Any:
        node.target = self._target(node.target)
        node.iter = self._use(node.iter, "iterate")
        return self._blocks(node)

    def visit_With(self, node: ast.With) -> Any:
        for item in node.items:
            item.context_expr = self._use(item.context_expr, "context")
            if item.optional_vars is not None:
                item.optional_vars = self._target(item.optional_vars)
        return self._blocks(node)

    def visit_Try(self, node: ast.Try) -> Any:
        for handler in node.handlers:
            handler.type = None if handler.type is None else self.visit(handler.type)
            handler.body = [new for s in handler.body for new in self._statements(s)]
        node.finalbody = [new for s in node.finalbody for new in self._statements(s)]
        return self._blocks(node)

    def _blocks(self, node: Any) -> Any:
        node.body = [new for s in node.body for new in self._statements(s)]
        node.orelse = [new for s in getattr(node, "orelse", []) for new in self._statements(s)]
        return node

    def _target(self, node: ast.AST) -> Any:
        """A target of names, also in tuples."""
        for inner in ast.walk(node):
            if isinstance(inner, (ast.Attribute, ast.Subscript)):
                raise CannotInstrument("assigns an attribute or an item among several targets")
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        if len(node.targets) == 1 and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            return self._store(node.targets[0], self.visit(node.value), node)
        unpacks = any(isinstance(t, (ast.Tuple, ast.List)) for t in node.targets)
        if any(isinstance(t, (ast.Attribute, ast.Subscript)) for target in node.targets for t in ast.walk(target)):
            return self._unpacked(node)
        node.value = self._use(node.value, "iterate") if unpacks else self.visit(node.value)
        return node

    def _unpacked(self, node: ast.Assign) -> Any:
        """`a.x, b = value` and `a.x = b.y = value`: names first, then one by one."""
        if len(node.targets) == 1 and isinstance(node.targets[0], (ast.Tuple, ast.List)):
            parts = node.targets[0].elts
            if any(not isinstance(p, (ast.Attribute, ast.Subscript, ast.Name)) for p in parts):
                raise CannotInstrument("assigns an attribute or an item among nested targets")
            names = [f"__part_{k}__" for k in range(len(parts))]
            target = ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())
            first: ast.stmt = ast.Assign([target], self._use(node.value, "iterate"))
        else:
            parts = node.targets
            if any(not isinstance(p, (ast.Attribute, ast.Subscript, ast.Name)) for p in parts):
                raise CannotInstrument("assigns an attribute or an item among several targets")
            names = ["__part_0__"] * len(parts)
            first = ast.Assign([ast.Name(names[0], ast.Store())], self.visit(node.value))
        found: list[ast.stmt] = [first]
        for name, part in zip(names, parts, strict=True):
            value = ast.copy_location(ast.Name(name, ast.Load()), part)
            if isinstance(part, ast.Name):
                found.append(ast.Assign([part], value))
            else:
                found.append(self._store(part, value, node))
        return [ast.fix_missing_locations(ast.copy_location(s, node)) for s in found]

    def _store(self, target: Any, value: ast.expr, at: ast.AST) -> ast.stmt:
        if isinstance(target, ast.Attribute):
            call = self._probe("set_attribute", value, self.visit(target.value), self._constant(self._private(target.attr), at), at=at)
        else:
            call = self._probe("set_item", value, self.visit(target.value), self._index(target.slice), at=at)
        return ast.copy_location(ast.Expr(call), at)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        op = self._constant(_INPLACE[type(node.op)], node)
        value = self.visit(node.value)
        target = node.target
        if isinstance(target, ast.Name):
            name = ast.copy_location(ast.Name(target.id, ast.Load()), target)
            return ast.copy_location(ast.Assign([target], self._probe("update", name, op, value, at=node)), node)
        if isinstance(target, ast.Attribute):
            key: ast.expr = self._constant(self._private(target.attr), node)
            before = self._probe("attribute_before", self.visit(target.value), key, at=node)
            call = self._probe("update_attribute", self._spread(before), op, value, at=node)
        else:
            before = self._probe("item_before", self.visit(target.value), self._index(target.slice), at=node)
            call = self._probe("update_item", self._spread(before), op, value, at=node)
        return ast.copy_location(ast.Expr(call), node)

    def _spread(self, node: ast.expr) -> ast.expr:
        return ast.copy_location(ast.Starred(node, ast.Load()), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            if isinstance(node.target, ast.Attribute):  # the object is asked for, no more
                return ast.copy_location(ast.Expr(self.visit(node.target.value)), node)
            if isinstance(node.target, ast.Subscript):
                raise CannotInstrument("annotates an item without a value")
            return node  # it makes the name a local one
        return self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Delete(self, node: ast.Delete) -> Any:
        found: list[ast.stmt] = []
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                name = self._constant(self._private(target.attr), node)
                call = self._probe("delete_attribute", self.visit(target.value), name, at=node)
                found.append(ast.copy_location(ast.Expr(call), node))
            elif isinstance(target, ast.Subscript):
                call = self._probe("delete_item", self.visit(target.value), self._index(target.slice), at=node)
                found.append(ast.copy_location(ast.Expr(call), node))
            else:
                found.append(ast.copy_location(ast.Delete([self._target(target)]), node))
        return found

    def visit_Import(self, node: ast.Import) -> Any:
        names = [self._constant(a.name, node) for a in node.names]
        return [node, ast.copy_location(ast.Expr(self._probe("imported", *names, at=node)), node)]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        base = self._package.rsplit(".", node.level - 1)[0] if node.level else ""
        full = ".".join(p for p in (base, node.module or "") if p)
        names = [self._constant(a.name, node) for a in node.names]
        return [node, ast.copy_location(ast.Expr(self._probe("imported_from", self._constant(full, node), *names, at=node)), node)]


_INPLACE = {
    ast.Add: "iadd",
    ast.Sub: "isub",
    ast.Mult: "imul",
    ast.Div: "itruediv",
    ast.FloorDiv: "ifloordiv",
    ast.Mod: "imod",
    ast.Pow: "ipow",
    ast.MatMult: "imatmul",
    ast.LShift: "ilshift",
    ast.RShift: "irshift",
    ast.BitOr: "ior",
    ast.BitXor: "ixor",
    ast.BitAnd: "iand",
}


def bare(args: ast.arguments) -> ast.arguments:
    """Arguments without defaults and annotations: those are the function object's."""

    def plain(a: ast.arg | None) -> ast.arg | None:
        return None if a is None else ast.copy_location(ast.arg(a.arg), a)

    return ast.arguments(
        posonlyargs=[plain(a) for a in args.posonlyargs],  # type: ignore[misc]
        args=[plain(a) for a in args.args],  # type: ignore[misc]
        vararg=plain(args.vararg),
        kwonlyargs=[plain(a) for a in args.kwonlyargs],  # type: ignore[misc]
        kw_defaults=[None] * len(args.kwonlyargs),
        kwarg=plain(args.kwarg),
        defaults=[],
    )

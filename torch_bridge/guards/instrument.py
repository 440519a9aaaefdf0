"""A Python function with its reads, writes and calls routed through probes: the same statements, rewritten on the abstract syntax tree.

`instrumented(function)` gives a function that computes what the original computes. Where the original reads an attribute, an item or an element of something,
calls, writes, or uses an operator, the new one asks `PROBES`, which do the same and tell the thread's `Observer`. Names, comparisons of identity, control flow
and exceptions stay native. A function whose source is not to be found, or is not what it was compiled from, or has statements that are not routed (`nonlocal`,
`match`, `async`), raises `CannotInstrument`.
"""

from __future__ import annotations

import ast
import bisect
import copy
import dis
import functools
import linecache
import types
from operator import attrgetter
from typing import Any

PROBES_NAME = "__probes__"
_FLAGS = 0x1FE0000
"""Bits of `co_flags` that come from `from __future__ import`."""


class CannotInstrument(Exception):
    """Why a function cannot be rewritten."""


class Code:
    """The rewritten code of a function. names: globals that the original names, also in functions that it defines."""

    __slots__ = ("code", "names")

    def __init__(self, code: types.CodeType, names: tuple[str, ...]):
        self.code = code
        self.names = names


_CODES: dict[types.CodeType, Code | str] = {}
ROUTED: set[types.CodeType] = set()
"""All rewritten code objects, with those of the functions and comprehensions inside."""


def code_of(function: types.FunctionType) -> Code:
    """The rewritten code of a function, made once. Raises CannotInstrument."""
    found = _CODES.get(function.__code__)
    if found is None:
        try:
            found = _rewritten(function)
        except CannotInstrument as error:
            found = str(error)
        _CODES[function.__code__] = found
    if isinstance(found, str):
        raise CannotInstrument(found)
    return found


def instrumented(function: types.FunctionType, probes: types.CellType) -> types.FunctionType:
    """The function with its code rewritten: the same globals, cells, defaults and attributes. probes: a cell with the probes. Raises CannotInstrument."""
    code = code_of(function).code
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[PROBES_NAME] = probes
    new = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, tuple(cells[name] for name in code.co_freevars)
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__qualname__ = function.__qualname__
    new.__dict__.update(function.__dict__)
    return new


def _rewritten(function: types.FunctionType) -> Code:
    code = function.__code__
    where = f"{code.co_qualname}"
    node, plain = _node_of(code, function.__globals__)
    _refuse_unsupported(node, where)
    new = copy.deepcopy(node) if isinstance(node, ast.Lambda) else node
    package = function.__globals__.get("__package__") or ""
    made = _Router(package, _class_name(code)).function(new)
    found = _named_alike(_compiled(made, code), code.co_qualname)
    _add_routed(found)
    return Code(found, tuple(dict.fromkeys(_global_names(plain))))


def _named_alike(made: types.CodeType, name: str) -> types.CodeType:
    """The code with the qualified name of the original (error messages show it), also of the functions inside."""
    inner = tuple(
        _named_alike(c, name + c.co_qualname.removeprefix(made.co_qualname)) if isinstance(c, types.CodeType) else c for c in made.co_consts
    )
    return made.replace(co_qualname=name, co_consts=inner)


def _add_routed(code: types.CodeType) -> None:
    ROUTED.add(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_routed(constant)


def _global_names(code: types.CodeType) -> list[str]:
    """Names that the code, or code inside of it, loads as globals or builtins."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return names


def _class_name(code: types.CodeType) -> str:
    """The class whose body the function stands in, for private names."""
    parts = code.co_qualname.split(".")
    return parts[-2] if len(parts) > 1 and parts[-2] != "<locals>" else ""


# -- finding the source -------------------------------------------------------------------------------


def _candidates(code: types.CodeType, lines: list[str]) -> list[Any]:
    """Functions of that name that begin in the same line."""
    if code.co_name == "<lambda>":
        return _lambdas("".join(lines)).get(code.co_firstlineno, [])
    first, last = code.co_firstlineno, _last_line(code)
    indented = lines[first - 1][:1].isspace()
    for end in range(last, min(last + _TAIL, len(lines)) + 1):  # a closing bracket has no instruction
        try:
            tree = ast.parse(("if 1:\n" if indented else "") + "".join(lines[first - 1 : end]))
        except SyntaxError:
            continue
        ast.increment_lineno(tree, first - 1 - indented)
        return [node for node in (tree.body[0].body if indented else tree.body) if getattr(node, "name", "") == code.co_name]  # type: ignore[attr-defined]
    return []


_TAIL = 60


def _last_line(code: types.CodeType) -> int:
    inner = [_last_line(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return max([code.co_firstlineno, *inner, *(line for *_, line in code.co_lines() if line is not None)])


@functools.lru_cache(maxsize=64)
def _lambdas(text: str) -> dict[int, list[ast.AST]]:
    found: dict[int, list[ast.AST]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return found


def _node_of(code: types.CodeType, space: dict[str, Any]) -> tuple[Any, types.CodeType]:
    """The function's node in its source, and what that compiles to: the very code."""
    frozen = code.co_filename.startswith("<frozen")  # a part of Python's library that is compiled into the interpreter
    lines = linecache.getlines(space.get("__file__") or "" if frozen else code.co_filename, space)
    if not lines:
        raise CannotInstrument(f"the source of {code.co_qualname} is not known")
    try:
        candidates = _candidates(code, lines)
    except (SyntaxError, IndexError):
        candidates = []
    for node in candidates:
        for imports in ((), _imported(code, space)):
            try:
                plain = _compiled(node, code, imports)
            except (SyntaxError, CannotInstrument):
                continue
            if _same(plain, code):
                return node, plain
    raise CannotInstrument(f"the source of {code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) is not what it was compiled from")


def _same(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two code objects do the same. (A method of an imported module is called by other instructions where the import is in sight.)"""
    shape = attrgetter("co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount", "co_posonlyargcount")
    if shape(a) != shape(b):
        return False
    x, y = _instructions(a), _instructions(b)
    return len(x) == len(y) and all(m[0] == n[0] and _same_constant(m[1], n[1]) for m, n in zip(x, y, strict=True))


def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    """Its instructions with what they are about; jumps by the number of the instruction that they go to."""
    found = [i for i in dis.get_instructions(code) if i.opname not in _LEFT_OUT]
    at: dict[int, int] = {}
    for k, i in enumerate(found):
        at[i.offset] = k
    offsets = sorted(at)
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [
        (_CALLED_ALIKE.get(i.opname, i.opname), bisect.bisect_left(offsets, i.argval) if i.opcode in jumps else i.argval) for i in found
    ]


_LEFT_OUT = ("EXTENDED_ARG", "PUSH_NULL", "CACHE", "NOP")
_CALLED_ALIKE = {"LOAD_METHOD": "LOAD_ATTR"}


def _same_constant(a: object, b: object) -> bool:
    if isinstance(a, types.CodeType) and isinstance(b, types.CodeType):
        return _same(a, b)
    return type(a) is type(b) and repr(a) == repr(b)


def _imported(code: types.CodeType, space: dict[str, Any]) -> tuple[str, ...]:
    """Globals that the code names and that seem to have been imported: where the compiler saw that, it makes other instructions for calls."""
    found = ((name, space.get(name)) for name in code.co_names)
    home = space.get("__name__")
    return tuple(name for name, x in found if isinstance(x, types.ModuleType) or getattr(x, "__module__", home) != home)


def _compiled(node: ast.FunctionDef | ast.AsyncFunctionDef, of: types.CodeType, imports: tuple[str, ...] = ()) -> types.CodeType:
    """The code of a function's node, compiled with the free variables that the original has. imports: globals that the module imports."""
    free = [PROBES_NAME, *of.co_freevars]
    inner = node
    if not isinstance(node, ast.Lambda):
        inner = copy.copy(node)
        inner.decorator_list = []
        inner.returns = None
    inner = copy.copy(inner)
    inner.args = _bare(node.args)
    body: list[ast.stmt] = [inner, ast.Pass()] if not isinstance(inner, ast.Lambda) else [ast.Expr(inner)]
    if not isinstance(inner, ast.Lambda) and inner.name not in free:
        body.insert(0, ast.Global([inner.name]))  # else a function that calls itself would find it in a cell
    factory = ast.FunctionDef(
        name="__factory__",
        args=ast.arguments(posonlyargs=[], args=[ast.arg(name) for name in free], kwonlyargs=[], kw_defaults=[], defaults=[]),
        body=body,
        decorator_list=[],
    )
    if "type_params" in ast.FunctionDef._fields:
        factory.type_params = []  # type: ignore[attr-defined]
    if _class_name(of):
        outer: ast.stmt = ast.ClassDef(name=_class_name(of), bases=[], keywords=[], body=[factory], decorator_list=[])
        if "type_params" in ast.ClassDef._fields:
            outer.type_params = []  # type: ignore[attr-defined]
    else:
        outer = factory
    above: list[ast.stmt] = [ast.Import([ast.alias("_", name)]) for name in imports]
    module = ast.fix_missing_locations(ast.Module([*above, outer], type_ignores=[]))
    made = compile(module, of.co_filename, "exec", flags=of.co_flags & _FLAGS, dont_inherit=True)
    return _find(made, of)


def _find(made: types.CodeType, of: types.CodeType) -> types.CodeType:
    for constant in made.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_name == "__factory__":
                return next(c for c in constant.co_consts if isinstance(c, types.CodeType) and c.co_name == of.co_name)
            try:
                return _find(constant, of)
            except StopIteration:
                continue
    raise StopIteration


def _bare(args: ast.arguments) -> ast.arguments:
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


# -- rewriting ----------------------------------------------------------------------------------------

_UNSUPPORTED: dict[type[ast.AST], str] = {
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
        _UNSUPPORTED[getattr(ast, _name)] = _what


def _refuse_unsupported(node: ast.AST, where: str) -> None:
    for inner in ast.walk(node):
        what = _UNSUPPORTED.get(type(inner))
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


class _Router(ast.NodeTransformer):
    """Rewrites one function."""

    def __init__(self, package: str, class_name: str):
        self._package = package
        self._class = class_name

    def function(self, node: Any) -> Any:
        """The node of the function, rewritten in place."""
        node.args = _bare(node.args)
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
        node.value = self._use(node.value, "formatted")
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

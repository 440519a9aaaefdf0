"""Programs from a seed: forward reads a number at the end of a random chain of objects, and the script changes the number or one link of the chain.

A chain is made of links, each an object that leads to the next: an attribute, an item, a method, a cell, a module and so on. The text of a program can be
printed: `python -m tests.torch_bridge.replay_programs.generated SEED`.
"""

from __future__ import annotations

import builtins
import dataclasses
import linecache
import random
import sys
from collections.abc import Callable, Sequence

from tests.torch_bridge.replay_programs.running import Net, Run

SEEDS = range(400)


@dataclasses.dataclass(frozen=True)
class Link:
    """make: lines that make the object {h} that leads to {v}; read: the next one from {o}; replace: lines that make {h} lead to {v} instead, if it can;
    weak: whether {v} must be an instance that can be referred to weakly; can: whether {h} is one."""

    make: str
    read: str
    replace: str = ""
    weak: bool = False
    can: bool = False


def _of_class(body: str, read: str, replace: str) -> Link:
    """An instance of a class of its own."""
    lines = "\n".join("    " + line for line in body.splitlines())
    return Link(f"class {{h}}_kind:\n{lines}\n{{h}} = {{h}}_kind()\n", read, replace, can=True)


LINKS: dict[str, Link] = {
    "attribute of a namespace": Link("{h} = types.SimpleNamespace(a={v})\n", "{o}.a", "{h}.a = {v}\n"),
    "getattr of a namespace": Link("{h} = types.SimpleNamespace(a={v})\n", 'getattr({o}, "a")', "{h}.a = {v}\n"),
    "vars of a namespace": Link("{h} = types.SimpleNamespace(a={v})\n", 'vars({o})["a"]', "{h}.a = {v}\n"),
    "attrgetter": Link("{h} = types.SimpleNamespace(a={v})\n", 'operator.attrgetter("a")({o})', "{h}.a = {v}\n"),
    "attribute of an instance": Link("class {h}_kind:\n    pass\n{h} = {h}_kind()\n{h}.a = {v}\n", "{o}.a", "{h}.a = {v}\n", can=True),
    "dict of an instance": Link(
        "class {h}_kind:\n    pass\n{h} = {h}_kind()\n{h}.a = {v}\n", "{o}.a", '{h}.__dict__ = {{"a": {v}}}\n', can=True
    ),
    "attribute of a class": Link("class {h}:\n    a = {v}\n", "{o}.a", "{h}.a = {v}\n"),
    "class attribute by an instance": _of_class("a = [{v}]", "{o}.a[0]", "{h}_kind.a = [{v}]\n"),
    "class attribute hidden": _of_class("a = [{v}]", "{o}.a[0]", "{h}.a = [{v}]\n"),
    "attribute of a base": Link("class {h}_base:\n    a = {v}\nclass {h}({h}_base):\n    pass\n", "{o}.a", "{h}_base.a = {v}\n"),
    "attribute of a metaclass": Link(
        "class {h}_meta(type):\n    a = [{v}]\nclass {h}(metaclass={h}_meta):\n    pass\n", "{o}.a[0]", "{h}_meta.a = [{v}]\n"
    ),
    "nested class": Link("class {h}:\n    class inner:\n        a = {v}\n", "{o}.inner.a", "{h}.inner.a = {v}\n"),
    "slots": Link('class {h}_kind:\n    __slots__ = ("a",)\n{h} = {h}_kind()\n{h}.a = {v}\n', "{o}.a", "{h}.a = {v}\n"),
    "property": _of_class("_a = [{v}]\n@property\ndef a(self):\n    return self._a[0]", "{o}.a", "{h}._a = [{v}]\n"),
    "property replaced": _of_class("b = [{v}]\na = property(lambda self: self.b[0])", "{o}.a", "{h}_kind.a = property(lambda self: {v})\n"),
    "descriptor": Link(
        "class {h}_get:\n    def __get__(self, owner, kind=None):\n        return self.v\n{h}_d = {h}_get()\n{h}_d.v = {v}\n"
        "class {h}_kind:\n    a = {h}_d\n{h} = {h}_kind()\n",
        "{o}.a",
        "{h}_d.v = {v}\n",
        can=True,
    ),
    "getattr hook": _of_class(
        'def __getattr__(self, name):\n    if name == "a":\n        return {h}_held[0]\n    raise AttributeError(name)',
        "{o}.a",
        "{h}_held[0] = {v}\n",
    ),
    "getattribute hook": _of_class(
        'def __getattribute__(self, name):\n    return {h}_held[0] if name == "a" else object.__getattribute__(self, name)',
        "{o}.a",
        "{h}_held[0] = {v}\n",
    ),
    "method": _of_class("held = [{v}]\ndef get(self):\n    return self.held[0]", "{o}.get()", "{h}.held = [{v}]\n"),
    "method replaced": _of_class("held = [{v}]\ndef get(self):\n    return self.held[0]", "{o}.get()", "{h}_kind.get = lambda self: {v}\n"),
    "method of an instance replaced": _of_class(
        "held = [{v}]\ndef get(self):\n    return self.held[0]", "{o}.get()", "{h}.get = lambda: {v}\n"
    ),
    "class method": _of_class("held = [{v}]\n@classmethod\ndef get(cls):\n    return cls.held[0]", "{o}.get()", "{h}_kind.held = [{v}]\n"),
    "static method": _of_class("@staticmethod\ndef get():\n    return {h}_held[0]", "{o}.get()", "{h}_held[0] = {v}\n"),
    "method by super": Link(
        "class {h}_base:\n    held = [{v}]\n    def get(self):\n        return self.held[0]\n"
        "class {h}_kind({h}_base):\n    def get(self):\n        return super().get()\n{h} = {h}_kind()\n",
        "{o}.get()",
        "{h}_base.get = lambda self: {v}\n",
        can=True,
    ),
    "call": _of_class("held = [{v}]\ndef __call__(self):\n    return self.held[0]", "{o}()", "{h}.held = [{v}]\n"),
    "own items": _of_class("held = [{v}]\ndef __getitem__(self, k):\n    return self.held[0]", "{o}[5]", "{h}.held = [{v}]\n"),
    "own iteration": _of_class("held = [{v}]\ndef __iter__(self):\n    yield self.held[0]", "next(iter({o}))", "{h}.held = [{v}]\n"),
    "own addition": _of_class("held = [{v}]\ndef __add__(self, other):\n    return self.held[0]", "({o} + 1)", "{h}.held = [{v}]\n"),
    "own negation": _of_class(
        "held = [{v}]\ndef __neg__(self):\n    return self.held[0]", "(-{o})", "{h}_kind.__neg__ = lambda self: {v}\n"
    ),
    "class swapped": Link(
        "class {h}_kind:\n    a = [{v}]\nclass {h}_other({h}_kind):\n    pass\n{h} = {h}_kind()\n",
        "{o}.a[0]",
        "{h}_other.a = [{v}]\n{h}.__class__ = {h}_other\n",
        can=True,
    ),
    "bases swapped": Link(
        "class {h}_base:\n    a = [{v}]\nclass {h}_other:\n    pass\nclass {h}_kind({h}_base):\n    pass\n{h} = {h}_kind()\n",
        "{o}.a[0]",
        "{h}_other.a = [{v}]\n{h}_kind.__bases__ = ({h}_other,)\n",
        can=True,
    ),
    "item of a dict": Link('{h} = {{"a": {v}}}\n', '{o}["a"]', '{h}["a"] = {v}\n'),
    "get of a dict": Link('{h} = {{"a": {v}}}\n', '{o}.get("a")', "{h}.update(a={v})\n"),
    "values of a dict": Link('{h} = {{"a": {v}}}\n', "next(iter({o}.values()))", '{h}["a"] = {v}\n'),
    "view of a dict": Link('{h}_d = {{"a": {v}}}\n{h} = {h}_d.values()\n', "list({o})[0]", '{h}_d["a"] = {v}\n'),
    "item of a list": Link("{h} = [None, {v}]\n", "{o}[1]", "{h}[1] = {v}\n"),
    "last of a list": Link("{h} = [None, {v}]\n", "{o}[-1]", "{h}.append({v})\n"),
    "list unpacked": Link("{h} = [{v}, None]\n", "(lambda first, *rest: first)(*{o})", "{h}.insert(0, {v})\n"),
    "list searched": Link("{h} = [{v}]\n", "next(x for x in reversed({o}))", "{h}.append({v})\n"),
    "item of a tuple": Link("{h} = (None, ({v},))\n", "{o}[1][0]"),
    "dict in a list": Link('{h} = [{{"a": [{v}]}}]\n', '{o}[0]["a"][0]', '{h}[0]["a"] = [{v}]\n'),
    "deque": Link("{h} = collections.deque([{v}], maxlen=2)\n", "{o}[-1]", "{h}.append({v})\n", can=True),
    "default dict": Link("{h} = collections.defaultdict(list, a={v})\n", '{o}["a"]', '{h}["a"] = {v}\n', can=True),
    "ordered dict": Link("{h} = collections.OrderedDict(a={v})\n", '{o}["a"]', '{h}["a"] = {v}\n', can=True),
    "chain of maps": Link(
        "{h}_over = {{}}\n{h} = collections.ChainMap({h}_over, dict(a={v}))\n", '{o}["a"]', '{h}_over["a"] = {v}\n', can=True
    ),
    "user dict": Link("{h} = collections.UserDict(a={v})\n", '{o}["a"]', '{h}["a"] = {v}\n', can=True),
    "mapping proxy": Link("{h}_d = dict(a={v})\n{h} = types.MappingProxyType({h}_d)\n", '{o}["a"]', '{h}_d["a"] = {v}\n'),
    "missing key": Link(
        "{h}_held = [{v}]\nclass {h}_kind(dict):\n    def __missing__(self, key):\n        return {h}_held[0]\n{h} = {h}_kind()\n",
        '{o}["a"]',
        "{h}_held[0] = {v}\n",
        can=True,
    ),
    "array of objects": Link("{h} = np.empty(2, object)\n{h}[1] = {v}\n", "{o}[1]", "{h}[1] = {v}\n", can=True),
    "closure": Link(
        "def {h}_make(v):\n    return lambda: v\n{h} = {h}_make({v})\n", "{o}()", "{h}.__closure__[0].cell_contents = {v}\n", can=True
    ),
    "closure with nonlocal": Link(
        "def {h}_make(v):\n    def get():\n        return v\n    def put(new):\n        nonlocal v\n        v = new\n    return get, put\n"
        "{h}, {h}_put = {h}_make({v})\n",
        "{o}()",
        "{h}_put({v})\n",
        can=True,
    ),
    "default argument": Link("def {h}(v={v}):\n    return v\n", "{o}()", "{h}.__defaults__ = ({v},)\n", can=True),
    "keyword default": Link("def {h}(*, v={v}):\n    return v\n", "{o}()", '{h}.__kwdefaults__["v"] = {v}\n', can=True),
    "function attribute": Link("def {h}():\n    return {h}.held\n{h}.held = {v}\n", "{o}()", "{h}.held = {v}\n", can=True),
    "code swapped": Link(
        "{h}_held = [{v}, None]\ndef {h}():\n    return {h}_held[0]\ndef {h}_other():\n    return {h}_held[1]\n",
        "{o}()",
        "{h}_held[1] = {v}\n{h}.__code__ = {h}_other.__code__\n",
        can=True,
    ),
    "partial": Link("{h} = functools.partial(lambda v: v, v={v})\n", "{o}()", '{h}.keywords["v"] = {v}\n', can=True),
    "wrapped function": Link(
        "{h}_held = [{v}]\ndef {h}_wrap(f):\n    @functools.wraps(f)\n    def inner():\n        return f()[0]\n    return inner\n"
        "@{h}_wrap\ndef {h}():\n    return {h}_held\n",
        "{o}()",
        "{h}_held[0] = {v}\n",
        can=True,
    ),
    "bound method": Link(
        "class {h}_kind:\n    held = [{v}]\n    def get(self):\n        return self.held[0]\n{h}_i = {h}_kind()\n{h} = {h}_i.get\n",
        "{o}()",
        "{h}_i.held = [{v}]\n",
    ),
    "generator": Link(
        "{h}_held = [{v}]\ndef {h}_numbers():\n    while True:\n        yield {h}_held[0]\n{h} = {h}_numbers()\n",
        "next({o})",
        "{h}_held[0] = {v}\n",
    ),
    "module": Link('{h} = run.module("replay_{h}", a={v})\n', "{o}.a", "{h}.a = {v}\n", can=True),
    "global of another module": Link(
        '{h}_m = run.module("replay_{h}", a={v})\nexec("def get():\\n    return a", vars({h}_m))\n{h} = {h}_m.get\n',
        "{o}()",
        "{h}_m.a = {v}\n",
        can=True,
    ),
    "imported inside": Link(
        'run.module("replay_{h}", a={v})\ndef {h}():\n    import replay_{h}\n    return replay_{h}.a\n',
        "{o}()",
        'sys.modules["replay_{h}"].a = {v}\n',
        can=True,
    ),
    "module of a package": Link(
        '{h} = run.module("replay_{h}")\nrun.module("replay_{h}.sub", a={v})\n', "{o}.sub.a", "{h}.sub.a = {v}\n", can=True
    ),
    "eval": Link('{h}_names = dict(v={v})\ndef {h}():\n    return eval("v", {h}_names)\n', "{o}()", '{h}_names["v"] = {v}\n', can=True),
    "weak reference": Link("{h} = weakref.ref({v})\n", "{o}()", weak=True),
    "weak values": Link("{h} = weakref.WeakValueDictionary(a={v})\n", '{o}["a"]', '{h}["a"] = {v}\n', weak=True, can=True),
    "context variable": Link('{h} = contextvars.ContextVar("{h}")\n{h}.set({v})\n', "{o}.get()", "{h}.set({v})\n"),
    "default of a context variable": Link('{h} = contextvars.ContextVar("{h}", default={v})\n', "{o}.get()", "{h}.set({v})\n"),
    "thread local": Link("{h} = threading.local()\n{h}.a = {v}\n", "{o}.a", "{h}.a = {v}\n", can=True),
    "dataclass": Link("@dataclasses.dataclass\nclass {h}_kind:\n    a: object\n{h} = {h}_kind({v})\n", "{o}.a", "{h}.a = {v}\n", can=True),
    "named tuple": Link('{h} = collections.namedtuple("{h}", "a b")({v}, 0)\n', "{o}.a"),
    "enum member": Link("class {h}(enum.Enum):\n    A = 1\n{h}.A.held = {v}\n", "{o}.A.held", "{h}.A.held = {v}\n"),
    "torch module": Link("{h} = nn.Identity()\n{h}.held = [{v}]\n", "{o}.held[0]", "{h}.held = [{v}]\n", can=True),
    "float with attributes": Link("class {h}_kind(float):\n    pass\n{h} = {h}_kind(1.0)\n{h}.a = {v}\n", "{o}.a", "{h}.a = {v}\n"),
    "str with attributes": Link("class {h}_kind(str):\n    pass\n{h} = {h}_kind('x')\n{h}.a = {v}\n", "{o}.a", "{h}.a = {v}\n"),
    "lock beside it": Link(
        "{h} = types.SimpleNamespace(lock=threading.RLock(), a={v})\ndef {h}_get(o):\n    with o.lock:\n        return o.a\n",
        "{h}_get({o})",
        "{h}.a = {v}\n",
    ),
}
"""{h}_held is a list that holds {v}, where a link names it. What a class holds is in a list: a function would become a method."""

ENDS: dict[str, tuple[str, str, str]] = {
    "number in a list": ("{h} = [{n}]\n", "{o}[0]", "{h}[0] = {n}\n"),
    "number in a dict": ('{h} = {{"n": {n}}}\n', '{o}["n"]', '{h}["n"] = {n}\n'),
    "attribute": ("{h} = types.SimpleNamespace(n={n})\n", "{o}.n", "{h}.n = {n}\n"),
    "instance": ("class {h}_kind:\n    pass\n{h} = {h}_kind()\n{h}.n = {n}\n", "{o}.n", "{h}.n = {n}\n"),
    "class": ("class {h}:\n    n = {n}\n", "{o}.n", "{h}.n = {n}\n"),
    "numpy array": ("{h} = np.array([0.0, {n}])\n", "float({o}[1])", "{h}[1] = {n}\n"),
    "numpy array of two dimensions": ("{h} = np.full((3, 4), {n})\n", "float({o}.mean())", "{h}[:] = {n}\n"),
    "array": ('{h} = array.array("d", [{n}])\n', "{o}[0]", "{h}[0] = {n}\n"),
    "byte array": ("{h} = bytearray([int({n})])\n", "{o}[0]", "{h}[0] = int({n})\n"),
    "ctypes": ("{h} = ctypes.c_double({n})\n", "{o}.value", "{h}.value = {n}\n"),
    "cpu tensor": ("{h} = torch.tensor([{n}])\n", "{o}.item()", "{h}.fill_({n})\n"),
    "environment": (
        'os.environ["REPLAY_{h}"] = str({n})\n{h} = "REPLAY_{h}"\n',
        "float(os.environ[{o}])",
        'os.environ["REPLAY_{h}"] = str({n})\n',
    ),
    "length": ("{h} = [0] * int({n})\n", "len({o})", "{h}[:] = [0] * int({n})\n"),
    "length of a set": ("{h} = set(range(int({n})))\n", "len({o})", "{h}.update(range(int({n})))\n"),
    "text": ('{h} = ["x" * int({n})]\n', "len({o}[0])", '{h}[0] = "x" * int({n})\n'),
    "sum": ("{h} = [{n}, 0.0]\n", "sum({o})", "{h}[0] = {n}\n"),
    "decimal": ("{h} = [decimal.Decimal({n})]\n", "float({o}[0])", "{h}[0] = decimal.Decimal({n})\n"),
}
"""How the number is held: lines that make {h} with {n} in it, how it is read, lines that change it."""

SITES: dict[str, str] = {
    "in forward": "class Model(Net):\n    def forward(self, x):\n        return self.layer(x) * {read}\n",
    "in a branch": "class Model(Net):\n    def forward(self, x):\n        y = self.layer(x)\n        return y * 3 if {read} > 2 else y\n",
    "in a loop": (
        "class Model(Net):\n    def forward(self, x):\n        y = self.layer(x)\n        for _ in range(int({read})):\n            y = y * 1.5\n"
        "        return y\n"
    ),
    "in a helper": "def read_it():\n    return {read}\nclass Model(Net):\n    def forward(self, x):\n        return self.layer(x) * read_it()\n",
    "in a method": (
        "class Model(Net):\n    def read_it(self):\n        return {read}\n    def forward(self, x):\n        return self.layer(x) * self.read_it()\n"
    ),
    "in a comprehension": ("class Model(Net):\n    def forward(self, x):\n        return self.layer(x) * sum({read} for _ in range(1))\n"),
    "in a lambda": "scale = lambda y: y * {read}\nclass Model(Net):\n    def forward(self, x):\n        return scale(self.layer(x))\n",
    "in a submodule": (
        "class Inner(Net):\n    def forward(self, x):\n        return self.layer(x) * {read}\n"
        "class Model(Net):\n    def __init__(self):\n        super().__init__()\n        self.inner = Inner()\n"
        "    def forward(self, x):\n        return self.inner(self.layer(x))\n"
    ),
    "in a property of the model": (
        "class Model(Net):\n    @property\n    def scale(self):\n        return {read}\n"
        "    def forward(self, x):\n        return self.layer(x) * self.scale\n"
    ),
    "in a base class": (
        "class Base(Net):\n    def forward(self, x):\n        return self.layer(x) * {read}\n"
        "class Model(Base):\n    def forward(self, x):\n        return super().forward(x) + 1\n"
    ),
    "in a decorator": (
        "def scaled(f):\n    @functools.wraps(f)\n    def inner(*args):\n        return f(*args) * {read}\n    return inner\n"
        "class Model(Net):\n    @scaled\n    def forward(self, x):\n        return self.layer(x)\n"
    ),
    "in a try": (
        "class Model(Net):\n    def forward(self, x):\n        try:\n            scale = {read}\n        finally:\n            y = self.layer(x)\n"
        "        return y * scale\n"
    ),
    "in a backward pass": (
        "class Scaled(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, y):\n        return y * 2\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return g * {read}\n"
        "class Model(Net):\n    def forward(self, x):\n        return Scaled.apply(self.layer(x))\n"
    ),
    "in a checkpoint": (
        "class Model(Net):\n    def inner(self, x):\n        return (self.layer(x) * {read}).tanh()\n"
        "    def forward(self, x):\n        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)\n"
    ),
    "held by the model": (
        "class Model(Net):\n    def __init__(self):\n        super().__init__()\n        self.__dict__['root'] = {root}\n"
        "    def forward(self, x):\n        return self.layer(x) * {read_from_self}\n"
    ),
    "held in a list of the model": (
        "class Model(Net):\n    def __init__(self):\n        super().__init__()\n        self.held = [{{'root': {root}}}]\n"
        "    def forward(self, x):\n        return self.layer(x) * {read_from_list}\n"
    ),
    "in a default": ("class Model(Net):\n    def forward(self, x, root={root}):\n        return self.layer(x) * {read_from_default}\n"),
}
"""Where forward reads it."""

COUNTED = """class Model(Net):
    def forward(self, x):
        {write}
        return self.layer(x) * (3.0 if {read} > 5.5 else 1.0)
run.train(Model(), watch=lambda: {read})
"""
"""Where forward changes it."""

IMPORTS = """import array, collections, contextvars, ctypes, dataclasses, decimal, enum, functools, operator, os, sys, threading, types, weakref
import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a seed stands for. place: which link is changed, -1 for the number; counted: forward itself changes the number; function: the names are local."""

    end: str
    links: tuple[str, ...]
    place: int
    site: str
    counted: bool
    function: bool

    def __str__(self) -> str:
        if self.counted:
            return f"{self.end} behind: {', '.join(self.links)}; counted in forward"
        changed = self.links[self.place] if self.place >= 0 else "the number"
        return f"{self.end} behind: {', '.join(self.links)}; read {self.site}; changed: {changed}"


def plan(seed: int) -> Plan:
    """What a program is made of."""
    rng = random.Random(seed)
    end = rng.choice(list(ENDS))
    links: list[str] = []
    able = end in ("instance", "class")  # whether what the next link leads to can be referred to weakly
    for _ in range(rng.randint(1, 6)):
        links.append(rng.choice([name for name, link in LINKS.items() if able or not link.weak]))
        able = LINKS[links[-1]].can
    place = rng.choice([-1, *(i for i, name in enumerate(links) if LINKS[name].replace)])
    return Plan(end, tuple(links), place, rng.choice(list(SITES)), rng.random() < 0.15, rng.random() < 0.5)


def source(seed: int) -> str:
    """The text of a program."""
    made = plan(seed)
    text = _chain("a", made.end, made.links, 1.0) + (_counted(made) if made.counted else _changed(made))
    if made.function:
        text = f"def main():\n{_indented(text)}main()\n"
    return f"# {made}\n{IMPORTS}{text}"


def _changed(made: Plan) -> str:
    """Lines that read the number in forward, and change it from outside."""
    text = ""
    if made.place >= 0:
        text = _chain("b", made.end, made.links[: made.place], 3.0)
        change = LINKS[made.links[made.place]].replace.format(h=f"a{made.place + 1}", v=f"b{made.place}")
    else:
        change = ENDS[made.end][2].format(h="a0", n=3.0)
    root = f"a{len(made.links)}"
    starts = dict(read=root, read_from_self="self.root", read_from_list="self.held[0]['root']", read_from_default="root")
    text += SITES[made.site].format(root=root, **{name: _read(start, made) for name, start in starts.items()})
    return f"{text}def change():\n{_indented(change)}run.train(Model(), change)\n"


def _counted(made: Plan) -> str:
    """Lines that change the number in forward."""
    read = _read(f"a{len(made.links)}", made)
    return COUNTED.format(read=read, write=ENDS[made.end][2].format(h="a0", n=f"({read} + 1)").strip())


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _chain(prefix: str, end: str, links: Sequence[str], number: float) -> str:
    """Lines that make a chain: `prefix0` holds the number, `prefix1` leads to it, and so on."""
    text = ENDS[end][0].format(h=f"{prefix}0", n=number)
    for i, name in enumerate(links):
        names = dict(h=f"{prefix}{i + 1}", v=f"{prefix}{i}")
        made = LINKS[name].make
        if "{h}_held[0]" in made and "{h}_held = [" not in made:
            made = "{h}_held = [{v}]\n" + made
        text += made.format(**names)
    return text


def _read(start: str, made: Plan) -> str:
    """The expression that reads the number from the start of a chain."""
    found = start
    for i in reversed(range(len(made.links))):
        found = LINKS[made.links[i]].read.format(o=found, h=f"a{i + 1}")
    return ENDS[made.end][1].format(o=found)


def generated(seed: int) -> Callable[[Run], None]:
    """The program of a seed."""

    def body(run: Run) -> None:
        name = f"replay_generated_{seed}"
        text = source(seed)
        path = f"<{name}>"
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
        made = run.module(name)
        vars(made).update(run=run, Net=Net, __builtins__=builtins)
        exec(compile(text, path, "exec", dont_inherit=True), vars(made))

    return body


if __name__ == "__main__":
    sys.stdout.write(source(int(sys.argv[1])))

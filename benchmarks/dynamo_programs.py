"""Small programs whose state changes before the eleventh of sixteen calls: does torch._dynamo notice, and do recordings (docs/explanation/replay_designs.md)?

    python benchmarks/dynamo_programs.py

Each is run in eager torch, which is right by definition; under dynamo with a backend that runs its graphs as they are, with fullgraph=True and without; and on
xla with `torch_bridge.optimize`. Compared are results, gradients, what it printed, what it left in `log`, and which errors it raised in which call.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import linecache
import logging
import sys
import textwrap
import types
import warnings
from typing import Any

import rounds
import torch

from torch_bridge import optimize
from torch_bridge.device import torch_compile

CALLS, CHANGED = 16, 10

HEAD = """
import contextvars, ctypes, functools, os, random, sys, time, types, weakref
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
log = []
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
def change(): pass
def given(k): return torch.tensor([0.5, 1.0, -1.5])
"""

PROGRAMS = {
    "attribute of a global class": """
        class Config: scale = 1.0
        class M(Base):
            def forward(self, x): return x * self.w * Config.scale
        def change(): Config.scale = 2.0
    """,
    "static method of a global class, replaced": """
        class Ops:
            @staticmethod
            def act(x): return x * 2
        class M(Base):
            def forward(self, x): return Ops.act(x * self.w)
        def change(): Ops.act = staticmethod(lambda x: x * 3)
    """,
    "method patched on the module's class": """
        class M(Base):
            def act(self, x): return x * 2
            def forward(self, x): return self.act(x * self.w)
        def change(): M.act = lambda self, x: x * 3
    """,
    "method patched on the base class, called by super()": """
        class B(Base):
            def act(self, x): return x * 2
        class M(B):
            def act(self, x): return super().act(x) + 1
            def forward(self, x): return self.act(x * self.w)
        def change(): B.act = lambda self, x: x * 3
    """,
    "F.relu patched": """
        class M(Base):
            def forward(self, x): return F.relu(x * self.w)
        original = F.relu
        def change(): F.relu = lambda x: torch.clamp(x, min=0) * 2
        def undo(): F.relu = original
    """,
    "os.environ": """
        os.environ["REPLAY_DESIGNS"] = "1"
        class M(Base):
            def forward(self, x): return x * self.w * float(os.environ["REPLAY_DESIGNS"])
        def change(): os.environ["REPLAY_DESIGNS"] = "2"
    """,
    "ContextVar": """
        scale = contextvars.ContextVar("scale", default=1.0)
        class M(Base):
            def forward(self, x): return x * self.w * scale.get()
        def change(): scale.set(2.0)
    """,
    "attribute behind a weakref": """
        class Owner: scale = 1.0
        owner = Owner()
        class M(Base):
            def __init__(self):
                super().__init__()
                self.owner = weakref.ref(owner)
            def forward(self, x): return x * self.w * self.owner().scale
        def change(): owner.scale = 2.0
    """,
    "weakref that dies": """
        class Owner: pass
        owner = Owner()
        class M(Base):
            def __init__(self):
                super().__init__()
                self.owner = weakref.ref(owner)
            def forward(self, x): return x * self.w * (1.0 if self.owner() is not None else 2.0)
        def change():
            global owner
            owner = None
    """,
    "print": """
        class M(Base):
            def forward(self, x):
                print("called")
                return x * self.w
    """,
    "global counter": """
        calls = 0
        class M(Base):
            def forward(self, x):
                global calls
                calls += 1
                return x * self.w * calls
    """,
    "list outside, appended to": """
        class M(Base):
            def forward(self, x):
                log.append("called")
                return x * self.w
    """,
    "meter of another object, updated": """
        class Meter:
            n = 0
            def update(self):
                self.n += 1
                log.append(self.n)
        meter = Meter()
        class M(Base):
            def forward(self, x):
                meter.update()
                return x * self.w
    """,
    "tensor handed to another object": """
        class Losses:
            def __init__(self): self.found = []
            def add(self, x): self.found.append(x)
        losses = Losses()
        class M(Base):
            def forward(self, x):
                losses.add((x * self.w).sum())
                return x * self.w
        def change(): pass
        def after(): log.append([float(x) for x in losses.found])
    """,
    "numpy array, changed in place": """
        scales = np.array([1.0])
        class M(Base):
            def forward(self, x): return x * self.w * float(scales[0])
        def change(): scales[0] = 2.0
    """,
    "ctypes value": """
        scale = ctypes.c_double(1.0)
        class M(Base):
            def forward(self, x): return x * self.w * scale.value
        def change(): scale.value = 2.0
    """,
    "backward of an autograd.Function reads a global": """
        scale = 1.0
        class Fn(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x * 2
            @staticmethod
            def backward(ctx, g): return g * 2 * scale
        class M(Base):
            def forward(self, x): return Fn.apply(x * self.w)
        def change():
            global scale
            scale = 2.0
    """,
    "functools.lru_cache, cleared": """
        base = 1.0
        @functools.lru_cache
        def scale(): return base
        class M(Base):
            def forward(self, x): return x * self.w * scale()
        def change():
            global base
            base = 2.0
            scale.cache_clear()
    """,
    "module in a plain list, its attribute": """
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = 1.0
            def forward(self, x): return x * self.scale
        class M(Base):
            def __init__(self):
                super().__init__()
                self.parts = [[Part()]]
            def forward(self, x): return self.parts[0][0](x * self.w)
        def change(): model.parts[0][0].scale = 2.0
    """,
    "hook added to an inner module": """
        class M(Base):
            def __init__(self):
                super().__init__()
                self.inner = nn.Identity()
            def forward(self, x): return self.inner(x * self.w)
        def change(): model.inner.register_forward_hook(lambda m, i, o: o * 2)
    """,
    "attribute five deep": """
        N = types.SimpleNamespace
        args = N(a=N(b=N(c=N(d=N(alpha=1.0)))))
        class M(Base):
            def forward(self, x): return x * self.w * args.a.b.c.d.alpha
        def change(): args.a.b.c.d.alpha = 2.0
    """,
    "closure variable": """
        def make():
            scale = 1.0
            class M(Base):
                def forward(self, x): return x * self.w * scale
            def change():
                nonlocal scale
                scale = 2.0
            return M, change
        M, change = make()
    """,
    "x.grad_fn observed": """
        class M(Base):
            def forward(self, x): return x * self.w * (1.0 if x.grad_fn is None else 2.0)
        def given(k):
            x = torch.tensor([0.5, 1.0, -1.5], requires_grad=True)
            return x if k < 10 else x * 1
    """,
    "result's grad_fn observed inside": """
        class M(Base):
            def forward(self, x):
                y = x * self.w
                log.append(y.grad_fn is None)
                return y * (1.0 if y.grad_fn is None else 2.0)
    """,
    "order of a dict": """
        steps = {"double": lambda x: x * 2, "add": lambda x: x + 1}
        class M(Base):
            def forward(self, x):
                x = x * self.w
                for step in steps.values(): x = step(x)
                return x
        def change(): steps["double"] = steps.pop("double")
    """,
    "time.time()": """
        started = time.time()
        class M(Base):
            def forward(self, x): return x * self.w * (time.time() - started)
        def judge(outs): return [o if isinstance(o, str) else len(set(map(str, outs))) for o in outs]
        def change(): time.sleep(0.01)
    """,
    "random.random()": """
        random.seed(0)
        class M(Base):
            def forward(self, x): return x * self.w * random.random()
    """,
    "raises after ten calls": """
        class M(Base):
            n = 0
            def forward(self, x):
                self.n += 1
                if self.n > 10: raise ValueError("too many")
                return x * self.w
    """,
    "keywords of a partial": """
        def scaled(x, k): return x * k
        call = functools.partial(scaled, k=1.0)
        class M(Base):
            def forward(self, x): return call(x * self.w)
        def change(): call.keywords["k"] = 2.0
    """,
    "attribute of a function": """
        def scaled(x): return x * scaled.k
        scaled.k = 1.0
        class M(Base):
            def forward(self, x): return scaled(x * self.w)
        def change(): scaled.k = 2.0
    """,
    "globals() in forward": """
        scale = 1.0
        class M(Base):
            def forward(self, x): return x * self.w * globals()["scale"]
        def change(): globals()["scale"] = 2.0
    """,
    "import in forward": """
        sys.modules["replay_designs_settings"] = types.SimpleNamespace(scale=1.0)
        class M(Base):
            def forward(self, x):
                import replay_designs_settings
                return x * self.w * replay_designs_settings.scale
        def change(): sys.modules["replay_designs_settings"].scale = 2.0
    """,
    "__call__ of a helper object": """
        class Scale:
            k = 1.0
            def __call__(self, x): return x * self.k
        helper = Scale()
        class M(Base):
            def forward(self, x): return helper(x * self.w)
        def change(): helper.k = 2.0
    """,
    "__getattr__ that computes": """
        store = [1.0]
        class Config:
            def __getattr__(self, name): return store[0]
        config = Config()
        class M(Base):
            def forward(self, x): return x * self.w * config.scale
        def change(): store[0] = 2.0
    """,
    "generator that is advanced": """
        def numbers():
            k = 1.0
            while True:
                yield k
                k += 1
        source = numbers()
        class M(Base):
            def forward(self, x): return x * self.w * next(source)
    """,
    "file that is read": """
        import tempfile
        path = tempfile.mkstemp()[1]
        with open(path, "w") as f: f.write("1.0")
        class M(Base):
            def forward(self, x):
                with open(path) as f: return x * self.w * float(f.read())
        def change():
            with open(path, "w") as f: f.write("2.0")
        def undo(): os.unlink(path)
    """,
}


def namespace(name: str) -> dict[str, Any]:
    """A program's globals, made anew."""
    file = f"<{name}>"
    text = HEAD + textwrap.dedent(PROGRAMS[name])
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = sys.modules["program"] = types.ModuleType("program")
    exec(compile(text, file, "exec"), module.__dict__)
    return module.__dict__


def run(name: str, way: str) -> tuple[list[Any], int]:
    """What a program shows under `eager`, `fullgraph`, `dynamo` or `played`; and the graphs that dynamo made (played: calls that were played)."""
    torch._dynamo.reset()
    program = namespace(name)
    program["model"] = model = program["M"]()
    graphs: list[Any] = []
    call: Any = model
    if way == "played":
        optimize(model.to("xla"))
    elif way != "eager":

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        call = (torch_compile._original or torch.compile)(model, backend=backend, fullgraph=way == "fullgraph")
    shown = io.StringIO()
    outs = []
    with contextlib.redirect_stdout(shown):
        for k in range(CALLS):
            if k == CHANGED:
                program["change"]()
            outs.append(_call(program, call, model, k, "xla" if way == "played" else "cpu"))
        program.get("after", lambda: None)()
    program.get("undo", lambda: None)()
    result = [program["judge"](outs) if "judge" in program else outs, program["log"], shown.getvalue()]
    return result, model.forward.played if way == "played" else len(graphs)


def _call(program: dict[str, Any], call: Any, model: Any, k: int, device: str) -> Any:
    """Result and gradient of one call, or the name of its error."""
    model.zero_grad()
    with torch.device(device):
        x = program["given"](k)
    try:
        out = call(x)
        out.sum().backward()
    except Exception as error:
        return type(error).__name__
    return out.tolist(), model.w.grad.tolist()


def verdict(name: str, way: str, right: list[Any]) -> str:
    """One word on a program, and how often something was traced or played."""
    try:
        found, count = run(name, way)
    except Exception as error:
        return f"stops ({type(error).__name__})"
    if found == right:
        return f"equal ({count})"
    extra = [out for out in found[0] if isinstance(out, str) and out not in right[0]]
    return f"stops ({extra[0]})" if extra else f"**differs** ({count})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="some of the programs")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    ways = ("fullgraph", "dynamo", "played")
    print("| program | dynamo, fullgraph=True | dynamo | `torch_bridge.optimize` |\n|---|---|---|---|")
    counts = {way: collections.Counter[str]() for way in ways}
    for name in args.names or PROGRAMS:
        right, _ = run(name, "eager")
        words = {way: verdict(name, way, right) for way in ways}
        for way, word in words.items():
            counts[way][word.split(" ")[0]] += 1
        print(f"| {name} | " + " | ".join(words.values()) + " |", flush=True)
    sums = [", ".join(f"{n} {word.strip('*')}" for word, n in counts[way].most_common()) for way in ways]
    print(f"| **{len(args.names or PROGRAMS)} programs** | " + " | ".join(sums) + " |")
    print(f"\nin brackets: graphs that dynamo made, calls that were played; {rounds.stack('torch', 'jax')}")


if __name__ == "__main__":
    main()

"""Programs for the oracle (`oracle`): what scripts do with a rank's number, written by hand and generated from a seeded grammar.

Left out: `int(rank)`, which is how a script says that rank 0's number is meant, and numbers made of text (`int(str(rank))`).
"""

from __future__ import annotations

import random
import textwrap

_HEAD = """
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm


def program(r):
"""


def program(body: str) -> str:
    """A program file with this body; `x` is a tensor on xla, `c` one on the CPU, `r` the rank."""
    start = "x = torch.arange(1.0, 9.0, device='xla').reshape(2, 4)\nc = torch.arange(1.0, 9.0).reshape(2, 4)\n"
    return _HEAD + textwrap.indent(start + textwrap.dedent(body).strip() + "\n", "    ")


BY_HAND = {
    "rows_copied": "b = torch.zeros(2, 4)\nfor i in range(2):\n    b[i] = c[(r + i) % 2] * r\nreturn b, b.to('xla') * 2",
    "rows_added": "c[r % 2] += r\nc[:, r:r + 1] *= 2\nreturn c, c.to('xla') * 2",
    "rows_by_list": "order = torch.randperm(2).tolist() * 4\nreturn torch.stack([c[i + r // 4] for i in order[:2]]), c[(torch.arange(4) + r).tolist()[0] % 2]",
    "data_assigned": "p = torch.nn.Parameter(torch.zeros(4))\np.data = c[r % 2].clone()\np.data.add_(c[1] * r)\nreturn p.detach() * 2",
    "trained_cpu": "m = torch.nn.Linear(4, 2)\no = torch.optim.AdamW(m.parameters(), 0.1)\n"
    "for _ in range(2):\n    o.zero_grad()\n    m(c[r % 2 : r % 2 + 1] * r).square().mean().backward()\n    o.step()\nreturn m.weight.detach()",
    "arithmetic": "return x * r + (r + 1) % 3, c - r // 2",
    "maximum": "return x * max(r, 1), c * max(1, r, 2)",
    "minimum": "return x * min(r, 1), c + min([r, 2])",
    "float_of": "return x * float(r)",
    "float_of_cpu": "return c * float(r)",
    "bool_of": "return x * bool(r)",
    "sqrt": "return x * math.sqrt(r), x + math.exp(r / 4)",
    "pow_of": "return x * math.pow(r + 1, 2)",
    "and_of": "return x * (r and 5)",
    "or_of": "return x * (r or 7)",
    "ternary": "return x * (2. if r else 1.)",
    "ternary_kept": "scale = 2. if r == 1 else 1.\ny = x + 1\nreturn y * scale",
    "ternary_cpu": "scale = 2. if r == 1 else 1.\nreturn c * scale",
    "branch": "if r == 0:\n    scale = 2.0\nelse:\n    scale = 3.0\nreturn x * scale",
    "branch_cpu": "if r == 0:\n    scale = 2.0\nelse:\n    scale = 3.0\nreturn c * scale",
    "branch_work_cpu": "y = c\nif r == 1:\n    y = c * 2\nreturn y",
    "contained": "return x * (r in (1, 2))",
    "contained_kept": "inner = r in [1, 2]\nreturn x + inner",
    "np_multiply": "return x * np.multiply(r, 2.0)",
    "np_array": "return torch.from_numpy(np.arange(2.0) + r)",
    "np_tensor": "return torch.tensor(np.arange(4.0) * r).to('xla')",
    "np_sqrt": "return x + np.sqrt(r + 1)",
    "np_of_list": "return torch.from_numpy(np.array((x * r).tolist())), torch.tensor(np.full((2,), r / 2)), torch.tensor(np.array([r, 1.0]))",
    "tolist": "return x * (x * r).sum(1).tolist()[0]",
    "tolist_cpu": "return c * (c * r).sum(1).tolist()[0]",
    "item_compared": "return x * ((x * r).sum().item() > 40)",
    "item_branch": "if (x * r).sum().item() > 40:\n    y = x * 2\nelse:\n    y = x * 3\nreturn y",
    "item_number": "return x * (x * r).sum().item()",
    "numpy_of": "return torch.from_numpy((c * r).numpy() * 2)",
    "isinstance_int": "return isinstance(r, int), isinstance(r / 2, float), isinstance(r == 1, bool)",
    "torch_seed_cpu": "torch.manual_seed(100 + r)\nreturn torch.randn(2), torch.rand(3), torch.randint(0, 99, (4,))",
    "torch_seed_cpu_to_xla": "torch.manual_seed(100 + r)\nreturn torch.randn(2).to('xla') * 2",
    "torch_seed_methods": "torch.manual_seed(100 + r)\nreturn torch.zeros(3).normal_(), F.dropout(torch.ones(8), 0.5), torch.randperm(6)",
    "torch_seed_module": "torch.manual_seed(100 + r)\nreturn torch.nn.Linear(2, 2).weight.detach().clone()",
    "torch_seed_state": "torch.manual_seed(r)\ns = torch.get_rng_state()\na = torch.randn(2)\ntorch.set_rng_state(s)\nreturn a - torch.randn(2), torch.rand(1)",
    "torch_seed_twice": "torch.manual_seed(100 + r)\na = torch.randn(2)\ntorch.manual_seed(5)\nreturn a, torch.randn(2)",
    "torch_seed_device": "torch.manual_seed(100 + r)\nreturn torch.randn(4, device='xla')",
    "generator": "g = torch.Generator().manual_seed(7 + r)\nreturn torch.randn(2, generator=g), torch.rand(2, generator=g)",
    "python_seed": "random.seed(3 + r)\nreturn x * random.random(), x + random.randint(0, 99), c * random.gauss(0, 1)",
    "python_choice": "random.seed(3 + r)\nreturn x * random.choice([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])",
    "python_shuffle": "random.seed(3 + r)\norder = list(range(8))\nrandom.shuffle(order)\nreturn torch.tensor(order)",
    "python_random_object": "g = random.Random(3 + r)\nreturn x * g.random()",
    "numpy_seed": "np.random.seed(3 + r)\nreturn torch.from_numpy(np.random.randn(2)), x * np.random.rand()",
    "numpy_generator": "g = np.random.default_rng(3 + r)\nreturn torch.tensor(g.standard_normal(3)), x * g.random()",
    "slices": "return x[:, r:r + 1], x[0, r], c.narrow(1, r, 1)",
    "slices_cpu": "return c[:, r:r + 1]",
    "indexed_cpu": "return c[0, r]",
    "list_index": "return x * [1.0, 2.0, 3.0, 4.0][r]",
    "range_of": "return x * sum(range(r, 8, 4))",
    "function": "def scale(n):\n    return 2.0 if n else 1.0\nreturn x * scale(r)",
    "argument": "def work(t, scale):\n    return t * scale\nreturn work(x, float(r))",
    "attribute": "class Config:\n    pass\nconfig = Config()\nconfig.scale = float(r)\nreturn x * config.scale",
    "container": "options = {}\noptions['scale'] = bool(r)\nreturn x * options['scale']",
    "appended": "found = []\nif r == 1:\n    found.append(1)\nreturn x * len(found)",
    "comprehension": "return x * sum([k for k in range(4) if k < r])",
    "any_of": "return x * any(k == r for k in (1, 2))",
    "loop": "total = 0\nfor k in range(4):\n    if k > r:\n        total += k\nreturn x + total",
    "sorted_of": "return x * sorted([r, 1, 2])[0]",
    "dictionary": "return x * {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}[r]",
    "module_scale": "layer = torch.nn.Linear(4, 4, bias=False).to('xla')\nlayer.weight.data.fill_(0.5)\nreturn layer(x) * max(r, 2)",
    "printing": "if r == 0:\n    print(end='')\nreturn x * r",
    "reduced": "y = x * r\nreturn xm.all_reduce('sum', y), y",
    "reduced_seeded": "torch.manual_seed(5 + r)\nreturn xm.all_reduce('sum', torch.randn(2).to('xla'))",
    "gathered": "return xm.all_gather(x[0] * max(r, 1))",
    "backward": "w = (c * 1).to('xla').requires_grad_()\n(w * max(1, r) * r).sum().backward()\nreturn w.grad",
    "math_floor": "return x * math.floor(r / 2), x * math.log2(r + 1), x * math.hypot(r, 1)",
    "round_of": "return x * round(r / 3, 1)",
    "abs_of": "return x * abs(r - 2)",
    "compared": "return x * (r > 1), c * (r == 2)",
    "where": "return torch.where(x > r * 2, x, -x), torch.where(c > r * 2, c, -c)",
    "chained": "return x * (0 < r < 3)",
    "not_of": "return x * (not r)",
    "full": "return torch.full((2,), r, device='xla'), torch.full((2,), float(r)), torch.tensor([r, 1])",
    "from_data": "return torch.tensor(r), torch.tensor([[1.0, r]], device='xla'), torch.as_tensor(r)",
}
"""Bodies by name."""


def by_hand() -> dict[str, str]:
    return {name: program(body) for name, body in BY_HAND.items()}


def generated(count: int, seed: int = 0) -> dict[str, str]:
    """Programs of the grammar; the same for the same seeds."""
    return {f"program_{k}": program("\n".join(_Writer(random.Random(k)).body())) for k in range(seed, seed + count)}


class _Writer:
    """Writes one program: some statements that make numbers and tensors out of the rank, then a tensor of them all."""

    def __init__(self, draw: random.Random):
        self.draw = draw
        self.numbers = ["r", "r", "r + 1"]
        self.plain = ["0.5", "1", "2", "3"]
        self.tensors = ["x", "c"]
        self.lines: list[str] = []
        self.count = 0

    def body(self) -> list[str]:
        if self.draw.random() < 0.3:
            self.lines.append(self._seeding())
        for _ in range(self.draw.randint(2, 5)):
            self.draw.choice([self._number, self._number, self._tensor, self._tensor, self._branch, self._random])()
        chosen = self.tensors[2:][-3:] or [self._product("x")]
        self.lines.append(f"return [{', '.join(chosen)}, {self._product('x')}]")
        return self.lines

    def _name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def _any(self) -> str:
        return self.draw.choice(self.numbers + self.numbers + self.plain)

    def _ranked(self) -> str:
        return self.draw.choice(self.numbers)

    def _product(self, t: str) -> str:
        return f"{t} {self.draw.choice('*+-')} ({self._ranked()})"

    def _seeding(self) -> str:
        seed = self.draw.choice(["100 + r", "r", "7 * r + 3", "5"])
        return self.draw.choice([f"torch.manual_seed({seed})", f"np.random.seed({seed})", f"random.seed({seed})"])

    def _number(self) -> None:
        name = self._name("n")
        a, b, k = self._ranked(), self._any(), self.draw.randint(1, 4)
        forms = [
            f"{a} + {b}", f"({a}) * ({b})", f"({a}) - ({b})", f"({a}) // {k}", f"({a}) % {k}", f"({a}) / {k}", f"({a}) ** 2", f"-({a})", f"abs({a})",
            f"max({a}, {b})", f"min({a}, {b})", f"max([{a}, {b}])", f"float({a})", f"bool({a})", f"round(({a}) / 3, 1)",
            f"math.sqrt(abs({a}))", f"math.floor(({a}) / 2)", f"math.exp(({a}) / 9)", f"math.sin({a})", f"math.hypot({a}, 1)",
            f"({a}) and {k}", f"({a}) or {k}", f"not ({a})", f"{k}. if ({a}) > 1 else 1.", f"({a}) if ({a}) > {k} else {b}", f"({a}) in (1, 2)",
            f"({a}) == {k}", f"({a}) > {k}", f"0 < ({a}) < 3", f"np.multiply({a}, 2.0)", f"np.maximum({a}, {k})", f"np.float64({a})", f"np.sqrt(abs({a}))",
            f"sum([{a}, {b}])", f"divmod(r, {k})[0]", f"[1.0, 2.0, 3.0, 4.0][r % {k}]", f"(x * ({a})).sum().item()", f"(c * ({a})).sum().item()",
            f"(x[0] * ({a})).tolist()[{k - 1}]", f"(c[0] * ({a})).tolist()[{k - 1}]", f"float((x * ({a})).mean())", f"(x * ({a})).sum().item() > 20",
            f"len(range(r % 4, {k + 2}))", "{0: 1.0, 1: 2.0, 2: 0.5, 3: 3.0}[r]", f"any(({a}) == k for k in (1, {k}))",
        ]  # fmt: skip
        self.lines.append(f"{name} = {self.draw.choice(forms)}")
        self.numbers.append(name)

    def _tensor(self) -> None:
        name = self._name("t")
        t, a, k = self.draw.choice(self.tensors), self._ranked(), self.draw.randint(0, 3)
        device = self.draw.choice(["'cpu'", "'xla'"])
        forms = [
            f"{t} * ({a})", f"{t} + ({a})", f"({a}) - {t}", f"{t} / (abs({a}) + 1)", f"torch.where({t} > ({a}), {t}, -{t})", f"torch.clamp({t}, max={k + 3})",
            f"{t}.masked_fill({t} < ({a}), 0.0)", f"torch.full((2, 4), float({a}), device={device})", f"torch.ones(2, 4, device={device}) * ({a})",
            f"torch.tensor([[1.0, 2.0, ({a}), {k}.0]], device={device})", f"{t}.narrow(1, r % 4, 1)", f"{t}[:, r % 4:r % 4 + 1]", f"{t}[:, r % 4][:, None]",
            f"{t}.roll(r, 1)", f"torch.arange(4.0, device={device}) + ({a})", f"{t}.sum(1, keepdim=True) * ({a})", f"torch.add({t}, {t}, alpha=({a}))",
            f"torch.maximum({t}, torch.zeros_like({t}) + ({a}))", f"{t}.clone().mul_({a})", f"{t}.cpu() * ({a})", f"{t}.to('xla') - ({a})",
            f"torch.softmax({t} * ({a}), -1)", f"{t}.split(1, 1)[r % {t}.shape[1]]", f"torch.from_numpy(np.ones((2, 4)) * ({a}))",
            f"torch.tensor(np.arange(4.0) + ({a}))[None]", f"torch.tensor(np.array([1.0, 2.0, ({a}), 3.0]))[None]",
            f"torch.tensor(np.asarray({t}.tolist())) * 2",
            f"torch.from_numpy({t}.cpu().numpy() + {k})",
            f"torch.pow({t}, 2) + ({a})",
        ]  # fmt: skip
        self.lines.append(f"{name} = {self.draw.choice(forms)}")
        self.tensors.append(name)

    def _random(self) -> None:
        name = self._name("t")
        forms = [
            "torch.randn(2, 4)", "torch.rand(2, 4)", "torch.randint(0, 50, (2, 4))", "torch.zeros(2, 4).uniform_()", "F.dropout(torch.ones(2, 4), 0.5)",
            "torch.from_numpy(np.random.rand(2, 4))", "x * random.random()", "c + random.randint(0, 9)", "x * np.random.rand()",
            "torch.bernoulli(torch.full((2, 4), 0.5))", "torch.randperm(4)[None]", "x * random.choice([1.0, 2.0, 3.0])",
            "torch.randn(2, 4, generator=torch.Generator().manual_seed(7 + r))", "torch.nn.init.normal_(torch.empty(2, 4))",
        ]  # fmt: skip
        self.lines.append(f"{name} = {self.draw.choice(forms)}")
        self.tensors.append(name)

    def _branch(self) -> None:
        name, k = self._name("n"), self.draw.randint(0, 3)
        test = self.draw.choice([f"r == {k}", f"r < {k}", "r", "not r", f"({self._ranked()}) > {k}"])
        kind = self.draw.randrange(4)
        if kind == 0:
            self.lines += [f"if {test}:", f"    {name} = {self._any()}", "else:", f"    {name} = {self._any()}"]
        elif kind == 1:
            self.lines += [f"{name} = 1.5", f"if {test}:", f"    {name} = {name} * 2"]
        elif kind == 2:
            self.lines += [f"def f{name}(v):", f"    if {test}:", "        return v * 2.0", "    return v", f"{name} = f{name}(1.5)"]
        else:
            t = self.draw.choice(self.tensors)
            tensor = self._name("t")
            self.lines += [f"{tensor} = {t}", f"if {test}:", f"    {tensor} = {t} * 2", f"{name} = 1.5"]
            self.tensors.append(tensor)
        self.numbers.append(name)

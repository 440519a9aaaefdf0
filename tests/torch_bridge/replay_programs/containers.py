"""Programs whose forward reads containers and numbers, or branches on them."""

from __future__ import annotations

import array
import collections
import ctypes
import decimal
import fractions
import heapq
import itertools
import json
import pickle
import queue
import re
import string
import struct
import types

import numpy as np
import torch
from torch import nn

from tests.torch_bridge.replay_programs.running import Net, Run
from tests.torch_bridge.replay_programs.table import program


@program("containers")
def dict_item(run: Run) -> None:
    CONF = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * CONF["scale"]

    run.train(Model(), lambda: CONF.update(scale=3.0))


@program("containers")
def dicts_five_deep(run: Run) -> None:
    CONF = {"a": {"b": {"c": {"d": {"scale": 1.0}}}}}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * CONF["a"]["b"]["c"]["d"]["scale"]

    run.train(Model(), lambda: CONF["a"]["b"]["c"]["d"].update(scale=3.0))


@program("containers")
def lists_seven_deep(run: Run) -> None:
    CONF = [[[[[[[1.0]]]]]]]

    class Model(Net):
        def forward(self, x):
            found = CONF
            while isinstance(found, list):
                found = found[0]
            return self.layer(x) * found

    run.train(Model(), lambda: CONF[0][0][0][0][0][0].__setitem__(0, 3.0))


@program("containers")
def tuple_of_lists(run: Run) -> None:
    CONF = ((5, [1.0]), "name")

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * CONF[0][1][0]

    run.train(Model(), lambda: CONF[0][1].__setitem__(0, 3.0))


@program("containers")
def long_list_in_the_middle(run: Run) -> None:
    scales = [1.0] * 5000

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales[2500]

    run.train(Model(), lambda: scales.__setitem__(2500, 3.0))


@program("containers")
def long_list_summed(run: Run) -> None:
    numbers = [0.001] * 3000

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * sum(numbers)

    run.train(Model(), lambda: numbers.__setitem__(1234, 5.0))


@program("containers")
def dict_keyed_by_objects(run: Run) -> None:
    class Key:
        pass

    key = Key()
    CONF = {key: 1.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * CONF[key]

    run.train(Model(), lambda: CONF.update({key: 3.0}))


@program("containers")
def dict_keyed_by_modules(run: Run) -> None:
    scales = {}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales[self.layer]

    model = Model()
    scales[model.layer] = 1.0
    run.train(model, lambda: scales.update({model.layer: 3.0}))


@program("containers")
def keys_made_of_text_and_state(run: Run) -> None:
    CONF, state = {"scale_a": 1.0, "scale_b": 3.0}, types.SimpleNamespace(which="a")

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * CONF[f"scale_{state.which}"]

    run.train(Model(), lambda: setattr(state, "which", "b"))


@program("containers")
def set_membership(run: Run) -> None:
    features = set()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if "wide" in features else 1.0)

    run.train(Model(), lambda: features.add("wide"))


@program("containers")
def set_length(run: Run) -> None:
    seen = {1}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * len(seen)

    run.train(Model(), lambda: seen.update({2, 3}))


@program("containers")
def frozen_set_replaced(run: Run) -> None:
    state = {"on": frozenset({1})}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * len(state["on"])

    run.train(Model(), lambda: state.update(on=frozenset({1, 2, 3})))


@program("containers")
def deque(run: Run) -> None:
    recent = collections.deque([1.0], maxlen=3)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * recent[-1]

    run.train(Model(), lambda: recent.append(3.0))


@program("containers")
def deque_that_grows(run: Run) -> None:
    recent = collections.deque(maxlen=3)

    class Model(Net):
        def forward(self, x):
            recent.append(1)
            return self.layer(x)

    run.train(Model(), watch=lambda: len(recent), at=1, change=lambda: recent.clear())
    run.note(list(recent))
    recent.clear()
    run.train(Model(), watch=lambda: len(recent), change=lambda: recent.clear())


@program("containers")
def default_dict(run: Run) -> None:
    values = [1.0]
    scales = collections.defaultdict(lambda: values[0])

    class Model(Net):
        def forward(self, x):
            scale = scales["a"]
            del scales["a"]
            return self.layer(x) * scale

    run.train(Model(), lambda: values.__setitem__(0, 3.0))


@program("containers")
def default_dict_remembers_reads(run: Run) -> None:
    counts = collections.defaultdict(int)

    class Model(Net):
        def forward(self, x):
            counts["forward"] += 1
            return self.layer(x)

    run.train(Model(), watch=lambda: dict(counts))


@program("containers")
def counter_object(run: Run) -> None:
    counts = collections.Counter(a=1)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * counts["a"]

    run.train(Model(), lambda: counts.update(a=2))


@program("containers")
def counter_object_counts(run: Run) -> None:
    counts = collections.Counter()

    class Model(Net):
        def forward(self, x):
            counts.update(["forward"])
            return self.layer(x)

    run.train(Model(), watch=lambda: counts["forward"])


@program("containers")
def ordered_dict_order(run: Run) -> None:
    factors = collections.OrderedDict(a=1.0, b=3.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * next(iter(factors.values()))

    run.train(Model(), lambda: factors.move_to_end("a"))


@program("containers")
def order_of_a_dict(run: Run) -> None:
    stages = {"scale": lambda y: y * 3.0, "shift": lambda y: y + 1.0}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            for stage in stages.values():
                y = stage(y)
            return y

    run.train(Model(), lambda: stages.update(scale=stages.pop("scale")))


@program("containers")
def chain_map(run: Run) -> None:
    base, over = {"scale": 1.0}, {}
    config = collections.ChainMap(over, base)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * config["scale"]

    run.train(Model(), lambda: over.update(scale=3.0))


@program("containers")
def user_dict(run: Run) -> None:
    config = collections.UserDict(scale=1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * config["scale"]

    run.train(Model(), lambda: config.update(scale=3.0))


@program("containers")
def mapping_proxy(run: Run) -> None:
    values = {"scale": 1.0}
    config = types.MappingProxyType(values)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * config["scale"]

    run.train(Model(), lambda: values.update(scale=3.0))


@program("containers")
def view_of_a_dict(run: Run) -> None:
    CONF = {"a": 1.0}
    values = CONF.values()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * sum(values)

    run.train(Model(), lambda: CONF.update(b=2.0))


@program("containers")
def keys_of_a_dict(run: Run) -> None:
    CONF = {"a": 1.0}
    keys = CONF.keys()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if "b" in keys else 1.0)

    run.train(Model(), lambda: CONF.update(b=2.0))


@program("containers")
def queue_that_fills(run: Run) -> None:
    waiting = queue.Queue()

    class Model(Net):
        def forward(self, x):
            waiting.put(1)
            return self.layer(x)

    run.train(Model(), watch=waiting.qsize)


@program("containers")
def heap(run: Run) -> None:
    scales = [1.0, 5.0]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * heapq.nsmallest(1, scales)[0]

    run.train(Model(), lambda: heapq.heapreplace(scales, 3.0))


@program("containers")
def list_cleared_and_refilled(run: Run) -> None:
    scales = [1.0]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales[0]

    run.train(Model(), lambda: (scales.clear(), scales.append(3.0)))


@program("containers")
def slice_of_a_list(run: Run) -> None:
    scales, ends = [1.0, 2.0, 0.5, 4.0], [2]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * sum(scales[: ends[0]])

    run.train(Model(), lambda: ends.__setitem__(0, 4))


@program("containers")
def sorted_by_a_key(run: Run) -> None:
    weights, scales = {"a": 0, "b": 1}, {"a": 1.0, "b": 3.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales[sorted(scales, key=lambda name: weights[name])[0]]

    run.train(Model(), lambda: weights.update(a=2))


@program("containers")
def max_by_a_key(run: Run) -> None:
    weights, scales = {"a": 1, "b": 0}, {"a": 1.0, "b": 3.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales[max(scales, key=weights.get)]

    run.train(Model(), lambda: weights.update(b=2))


@program("containers")
def comprehension_over_a_growing_list(run: Run) -> None:
    factors = [1.0]

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return sum([y * f for f in factors])

    run.train(Model(), lambda: factors.append(2.0))


@program("containers")
def zip_of_lists(run: Run) -> None:
    a, b = [1.0, 2.0], [1.0]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * sum(p * q for p, q in zip(a, b, strict=False))

    run.train(Model(), lambda: b.append(3.0))


@program("containers")
def list_written_in_forward(run: Run) -> None:
    history = []

    class Model(Net):
        def forward(self, x):
            history.append(len(history))
            return self.layer(x)

    run.train(Model(), watch=lambda: list(history))


@program("containers")
def list_popped_in_forward(run: Run) -> None:
    todo = [1.0] * 5 + [3.0] * 5

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * todo.pop(0)

    run.train(Model(), watch=lambda: len(todo))


@program("containers")
def submodules_in_a_plain_list(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.stages = [self.layer]

        def forward(self, x):
            for stage in self.stages:
                x = stage(x)
            return x

    model = Model()
    run.train(model, lambda: model.stages.append(model.first))


@program("containers")
def module_outside_in_a_list(run: Run) -> None:
    outside = nn.Linear(6, 6).to(run.device)
    stages = [outside]

    class Model(Net):
        def forward(self, x):
            return stages[0](self.layer(x))

    run.train(Model(), lambda: stages.__setitem__(0, nn.Identity()))


@program("containers")
def module_outside_in_a_dict_in_a_list(run: Run) -> None:
    outside = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(run.device)
    holder = [{"head": outside}]

    class Model(Net):
        def forward(self, x):
            return holder[0]["head"](self.layer(x))

    run.train(Model(), lambda: outside.__setitem__(1, nn.ReLU()))


@program("containers")
def attribute_of_a_module_outside(run: Run) -> None:
    class Head(Net):
        gain = 1.0

        def forward(self, x):
            return self.layer(x) * self.gain

    holder = {"head": Head().to(run.device)}

    class Model(Net):
        def forward(self, x):
            return holder["head"](self.layer(x))

    run.train(Model(), lambda: setattr(holder["head"], "gain", 3.0))


@program("containers")
def tensor_in_a_list_replaced(run: Run) -> None:
    scales = [torch.tensor(1.0).to(run.device)]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales[0]

    run.train(Model(), lambda: scales.__setitem__(0, torch.tensor(3.0).to(run.device)))


@program("containers", careless="it plays the tensor itself, whatever is in it")
def tensor_in_a_list_filled(run: Run) -> None:
    scales = [torch.tensor(1.0).to(run.device)]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales[0]

    run.train(Model(), lambda: scales[0].fill_(3.0))


@program("containers")
def tensor_five_deep_replaced(run: Run) -> None:
    state = types.SimpleNamespace(a={"b": [types.SimpleNamespace(c=(torch.tensor(1.0).to(run.device),))]})

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * state.a["b"][0].c[0]

    run.train(Model(), lambda: setattr(state.a["b"][0], "c", (torch.tensor(3.0).to(run.device),)))


@program("arrays")
def numpy_array_item(run: Run) -> None:
    scales = np.ones(4)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float(scales[2])

    run.train(Model(), lambda: scales.__setitem__(2, 3.0))


@program("arrays")
def large_numpy_array(run: Run) -> None:
    scales = np.ones(100_000, np.float32)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float(scales.sum() - 99_999)

    run.train(Model(), lambda: scales.__setitem__(54_321, 3.0))


@program("arrays")
def numpy_array_behind_a_view(run: Run) -> None:
    base = np.ones(8)
    view = base[2:4]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float(view[0])

    run.train(Model(), lambda: base.__setitem__(2, 3.0))


@program("arrays")
def numpy_array_of_objects(run: Run) -> None:
    holder = np.array([types.SimpleNamespace(scale=1.0), None], dtype=object)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * holder[0].scale

    run.train(Model(), lambda: setattr(holder[0], "scale", 3.0))


@program("arrays", careless="it makes the tensor again, of the same array")
def numpy_array_becomes_a_tensor(run: Run) -> None:
    scales = np.ones(6, np.float32)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * torch.tensor(scales).to(run.device)

    run.train(Model(), lambda: scales.fill(3.0))


@program("arrays", careless="it copies the same tensor again")
def numpy_memory_in_a_tensor(run: Run) -> None:
    scales = np.ones(6, np.float32)
    shared = torch.from_numpy(scales)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * shared.to(run.device, copy=True)

    run.train(Model(), lambda: scales.fill(3.0))


@program("arrays")
def cpu_tensor_read_by_item(run: Run) -> None:
    scale = torch.tensor(1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scale.item()

    run.train(Model(), lambda: scale.fill_(3.0))


@program("arrays")
def cpu_tensor_of_the_model(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.scales = [torch.ones(2)]

        def forward(self, x):
            return self.layer(x) * float(self.scales[0][1])

    model = Model()
    run.train(model, lambda: model.scales[0].__setitem__(1, 3.0))


@program("arrays")
def python_array(run: Run) -> None:
    scales = array.array("d", [1.0, 2.0])

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales[0]

    run.train(Model(), lambda: scales.__setitem__(0, 3.0))


@program("arrays")
def byte_array(run: Run) -> None:
    scales = bytearray([1, 2])

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales[0]

    run.train(Model(), lambda: scales.__setitem__(0, 3))


@program("arrays")
def memory_view(run: Run) -> None:
    memory = bytearray([1, 2])
    view = memoryview(memory)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * view[0]

    run.train(Model(), lambda: memory.__setitem__(0, 3))


@program("arrays")
def number_of_ctypes(run: Run) -> None:
    scale = ctypes.c_double(1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scale.value

    run.train(Model(), lambda: setattr(scale, "value", 3.0))


@program("arrays")
def structure_of_ctypes(run: Run) -> None:
    class Config(ctypes.Structure):
        _fields_ = [("scale", ctypes.c_float)]

    config = Config(1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * config.scale

    run.train(Model(), lambda: setattr(config, "scale", 3.0))


@program("arrays")
def packed_bytes(run: Run) -> None:
    memory = bytearray(struct.pack("d", 1.0))

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * struct.unpack("d", memory)[0]

    run.train(Model(), lambda: struct.pack_into("d", memory, 0, 3.0))


@program("arrays")
def json_text(run: Run) -> None:
    texts = ['{"scale": 1.0}']

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * json.loads(texts[0])["scale"]

    run.train(Model(), lambda: texts.__setitem__(0, '{"scale": 3.0}'))


@program("arrays")
def pickled_state(run: Run) -> None:
    texts = [pickle.dumps({"scale": 1.0})]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * pickle.loads(texts[0])["scale"]

    run.train(Model(), lambda: texts.__setitem__(0, pickle.dumps({"scale": 3.0})))


@program("arrays")
def regular_expression(run: Run) -> None:
    patterns = [re.compile("a")]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if patterns[0].match("beta") else 1.0)

    run.train(Model(), lambda: patterns.__setitem__(0, re.compile("b")))


@program("numbers")
def minus_zero(run: Run) -> None:
    state = {"zero": 0.0}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return torch.where(y > 0, 1.0 / torch.full_like(y, state["zero"]), y).clamp(-2, 2) + y

    run.train(Model(), lambda: state.update(zero=-0.0))


@program("numbers")
def not_a_number(run: Run) -> None:
    import math

    state = {"limit": float("nan")}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if math.isnan(state["limit"]) else state["limit"])

    run.train(Model(), lambda: state.update(limit=3.0))


@program("numbers")
def infinite_limit(run: Run) -> None:
    state = {"limit": float("inf")}

    class Model(Net):
        def forward(self, x):
            return self.layer(x).clamp(max=state["limit"])

    run.train(Model(), lambda: state.update(limit=0.1))


@program("numbers")
def bool_and_int(run: Run) -> None:
    state = {"on": 1}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if state["on"] is True else 1.0)

    run.train(Model(), lambda: state.update(on=True))


@program("numbers")
def int_and_float(run: Run) -> None:
    state = {"divisor": 2}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if isinstance(state["divisor"], float) else 1.0)

    run.train(Model(), lambda: state.update(divisor=2.0))


@program("numbers")
def int_and_a_subclass(run: Run) -> None:
    class Number(int):
        pass

    state = {"n": 2}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if type(state["n"]) is Number else 1.0)

    run.train(Model(), lambda: state.update(n=Number(2)))


@program("numbers")
def large_int(run: Run) -> None:
    state = {"n": 2**70}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (state["n"] >> 70)

    run.train(Model(), lambda: state.update(n=3 * 2**70))


@program("numbers")
def small_difference_of_floats(run: Run) -> None:
    state = {"p": 0.1 + 0.2}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if state["p"] == 0.3 else 1.0)

    run.train(Model(), lambda: state.update(p=0.3))


@program("numbers")
def complex_number(run: Run) -> None:
    state = {"z": 1.0 + 2.0j}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * state["z"].imag

    run.train(Model(), lambda: state.update(z=1.0 + 3.0j))


@program("numbers")
def decimal_and_fraction(run: Run) -> None:
    state = {"d": decimal.Decimal("1.0"), "f": fractions.Fraction(1, 2)}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float(state["d"]) * float(state["f"])

    run.train(Model(), lambda: state.update(d=decimal.Decimal("3.0")))


@program("numbers")
def precision_of_decimals(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float(decimal.Decimal(2) / decimal.Decimal(3))

    before = decimal.getcontext().prec
    run.cleanup.callback(lambda: setattr(decimal.getcontext(), "prec", before))
    run.train(Model(), lambda: setattr(decimal.getcontext(), "prec", 1))


@program("numbers")
def dtype_in_state(run: Run) -> None:
    state = {"dtype": torch.float32}

    class Model(Net):
        def forward(self, x):
            return self.layer(x).to(state["dtype"])

    run.train(Model(), lambda: state.update(dtype=torch.bfloat16), watch=lambda: str(state["dtype"]))


@program("numbers")
def shape_in_state(run: Run) -> None:
    state = {"shape": (4, 6)}

    class Model(Net):
        def forward(self, x):
            return self.layer(x).reshape(state["shape"])

    outs = []
    run.train(Model(), lambda: state.update(shape=(2, 12)), call=lambda m, x, k: outs.append(m(x)) or outs[-1])
    run.note([tuple(out.shape) for out in outs])


@program("numbers")
def dimension_in_state(run: Run) -> None:
    state = {"dim": 0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x).softmax(state["dim"])

    run.train(Model(), lambda: state.update(dim=1))


@program("operators")
def addition_of_a_helper(run: Run) -> None:
    class Bias:
        value = 1.0

        def __radd__(self, y):
            return y + self.value

    bias = Bias()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) + bias

    run.train(Model(), lambda: setattr(bias, "value", 3.0))


@program("operators")
def multiplication_of_a_helper(run: Run) -> None:
    class Gain:
        value = 1.0

        def __mul__(self, y):
            return y * self.value

    gain = Gain()

    class Model(Net):
        def forward(self, x):
            return gain * self.layer(x)

    run.train(Model(), lambda: setattr(gain, "value", 3.0))


@program("operators")
def equality_of_a_helper(run: Run) -> None:
    answers = [False]

    class Kind:
        def __eq__(self, other):
            return answers[0]

        __hash__ = object.__hash__

    kind = Kind()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if kind == "wide" else 1.0)

    run.train(Model(), lambda: answers.__setitem__(0, True))


@program("operators")
def truth_of_a_helper(run: Run) -> None:
    class Switch:
        on = False

        def __bool__(self):
            return self.on

    switch = Switch()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if switch else 1.0)

    run.train(Model(), lambda: setattr(switch, "on", True))


@program("operators")
def length_of_a_helper(run: Run) -> None:
    class Stack:
        depth = 1

        def __len__(self):
            return self.depth

    stack = Stack()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * len(stack)

    run.train(Model(), lambda: setattr(stack, "depth", 3))


@program("operators")
def membership_in_a_helper(run: Run) -> None:
    class Features:
        names = ()

        def __contains__(self, name):
            return name in self.names

    features = Features()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if "wide" in features else 1.0)

    run.train(Model(), lambda: setattr(features, "names", ("wide",)))


@program("operators")
def iteration_of_a_helper(run: Run) -> None:
    class Factors:
        values = (1.0,)

        def __iter__(self):
            return iter(self.values)

    factors = Factors()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * sum(factors)

    run.train(Model(), lambda: setattr(factors, "values", (1.0, 2.0)))


@program("operators")
def iteration_by_items(run: Run) -> None:
    class Factors:
        values = [1.0]

        def __getitem__(self, k):
            return self.values[k]

    factors = Factors()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * sum(factors)

    run.train(Model(), lambda: factors.values.append(2.0))


@program("operators")
def format_of_a_helper(run: Run) -> None:
    CONF = {"a": 1.0, "b": 3.0}

    class Name:
        text = "a"

        def __format__(self, spec):
            return self.text

    name = Name()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * CONF[f"{name}"]

    run.train(Model(), lambda: setattr(name, "text", "b"))


@program("operators")
def index_of_a_helper(run: Run) -> None:
    class Place:
        value = 0

        def __index__(self):
            return self.value

    place = Place()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * [1.0, 3.0][place]

    run.train(Model(), lambda: setattr(place, "value", 1))


@program("operators")
def hash_of_a_helper(run: Run) -> None:
    hashes = []

    class Key:
        def __hash__(self):
            hashes.append(1)
            return 5

        def __eq__(self, other):
            return True

    key, CONF = Key(), {}
    CONF[key] = 2.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * CONF[key]

    run.train(Model(), watch=lambda: len(hashes))


@program("operators")
def float_of_a_helper(run: Run) -> None:
    class Scale:
        value = 1.0

        def __float__(self):
            return self.value

    scale = Scale()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * float(scale)

    run.train(Model(), lambda: setattr(scale, "value", 3.0))


@program("operators")
def str_and_repr_of_a_helper(run: Run) -> None:
    class Name:
        text = "a"

        def __repr__(self):
            return self.text

    name, CONF = Name(), {"a": 1.0, "b": 3.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * CONF[str(name)]

    run.train(Model(), lambda: setattr(name, "text", "b"))


@program("operators")
def in_place_operator_of_a_helper(run: Run) -> None:
    class Meter:
        total = 0

        def __iadd__(self, n):
            self.total += n
            return self

    holder = types.SimpleNamespace(meter=Meter())

    class Model(Net):
        def forward(self, x):
            holder.meter += len(x)
            return self.layer(x)

    run.train(Model(), watch=lambda: holder.meter.total)


@program("operators")
def item_written_through_a_helper(run: Run) -> None:
    written = []

    class Sink:
        def __setitem__(self, key, value):
            written.append(key)

    sink = Sink()

    class Model(Net):
        def forward(self, x):
            sink["loss"] = 1.0
            return self.layer(x)

    run.train(Model(), watch=lambda: len(written))


@program("operators", careless="it calls torch.add again, of the same helper")
def torch_function_of_a_helper(run: Run) -> None:
    class Scaled:
        by = 1.0

        @classmethod
        def __torch_function__(cls, func, kinds, args=(), kwargs=None):
            return args[1] * cls.by

    scaled = Scaled()

    class Model(Net):
        def forward(self, x):
            return torch.add(scaled, self.layer(x))

    run.train(Model(), lambda: setattr(Scaled, "by", 3.0))


@program("control flow")
def match_statement(run: Run) -> None:
    state = {"kind": "small", "args": [1, 2]}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            match state:
                case {"kind": "small"}:
                    return y
                case {"args": [first, *rest]}:
                    return y * (first + len(rest) + 1)

    run.train(Model(), lambda: state.update(kind="large"))


@program("control flow")
def match_on_a_class(run: Run) -> None:
    class Small:
        pass

    class Large:
        __match_args__ = ("scale",)
        scale = 3.0

    state = types.SimpleNamespace(kind=Small())

    class Model(Net):
        def forward(self, x):
            match state.kind:
                case Large(scale):
                    return self.layer(x) * scale
                case _:
                    return self.layer(x)

    run.train(Model(), lambda: setattr(state, "kind", Large()))


@program("control flow")
def walrus(run: Run) -> None:
    CONF = {}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            if (scale := CONF.get("scale")) is not None:
                y = y * scale
            return y

    run.train(Model(), lambda: CONF.update(scale=3.0))


@program("control flow")
def errors_decide(run: Run) -> None:
    CONF = {}

    class Model(Net):
        def forward(self, x):
            try:
                scale = CONF["scale"]
            except KeyError:
                scale = 1.0
            else:
                scale = scale * 2
            finally:
                y = self.layer(x)
            return y * scale

    run.train(Model(), lambda: CONF.update(scale=3.0))


@program("control flow")
def assertion_about_state(run: Run) -> None:
    state = {"ready": True}

    class Model(Net):
        def forward(self, x):
            assert state["ready"], "not ready"
            return self.layer(x)

    run.train(Model(), lambda: state.update(ready=False))


@program("control flow")
def deletion_in_forward(run: Run) -> None:
    todo = {k: k for k in range(6)}

    class Model(Net):
        def forward(self, x):
            if todo:
                del todo[len(todo) - 1]
                return self.layer(x)
            return self.layer(x) * 3.0

    run.train(Model(), watch=lambda: len(todo))


@program("control flow")
def chained_comparison(run: Run) -> None:
    state = types.SimpleNamespace(low=0, n=5, high=10)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if state.low < state.n < state.high else 3.0)

    run.train(Model(), lambda: setattr(state, "high", 4))


@program("control flow")
def short_circuit(run: Run) -> None:
    state, calls = {"a": True}, []

    def counted():
        calls.append(1)
        return True

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if state["a"] or counted() else 3.0)

    run.train(Model(), lambda: state.update(a=False), watch=lambda: len(calls))


@program("control flow")
def while_on_state(run: Run) -> None:
    state = {"times": 1}

    class Model(Net):
        def forward(self, x):
            k = 0
            while k < state["times"]:
                x = self.layer(x)
                k += 1
            return x

    run.train(Model(), lambda: state.update(times=3))


@program("control flow")
def for_else(run: Run) -> None:
    flags = [False, False]

    class Model(Net):
        def forward(self, x):
            for flag in flags:
                if flag:
                    break
            else:
                return self.layer(x)
            return self.layer(x) * 3.0

    run.train(Model(), lambda: flags.__setitem__(1, True))


@program("control flow")
def identity_of_objects(run: Run) -> None:
    one, other = object(), object()
    state = {"current": one}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if state["current"] is one else 3.0)

    run.train(Model(), lambda: state.update(current=other))


@program("control flow")
def identity_by_id(run: Run) -> None:
    one, other = object(), object()
    state, known = {"current": one}, id(one)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if id(state["current"]) == known else 3.0)

    run.train(Model(), lambda: state.update(current=other))


@program("control flow")
def ternary_on_none(run: Run) -> None:
    class Model(Net):
        mask = None

        def forward(self, x):
            y = self.layer(x)
            return y if self.mask is None else y * self.mask

    run.train(Model(), lambda: setattr(Model, "mask", 3.0))


@program("control flow")
def template_text(run: Run) -> None:
    names = {"which": "a"}
    template, CONF = string.Template("scale_$which"), {"scale_a": 1.0, "scale_b": 3.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * CONF[template.substitute(names)]

    run.train(Model(), lambda: names.update(which="b"))


@program("control flow")
def percent_format(run: Run) -> None:
    state, CONF = {"n": 1}, {"block-1": 1.0, "block-2": 3.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * CONF["block-%(n)d" % state]

    run.train(Model(), lambda: state.update(n=2))


@program("control flow")
def accumulate(run: Run) -> None:
    factors = [1.0, 1.0]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * list(itertools.accumulate(factors))[-1]

    run.train(Model(), lambda: factors.append(1.5))


@program("containers", played=True)
def named_results_of_an_op(run: Run) -> None:
    """What torch returns by name, made in the forward."""

    class Model(Net):
        def forward(self, x):
            best = self.layer(x).topk(2, dim=-1)
            return best.values * torch.argsort(best.indices).float()

    run.train(Model())


@program("containers", played=True)
def tensors_in_a_named_tuple(run: Run) -> None:
    Parts = collections.namedtuple("Parts", "left right")

    class Model(Net):
        def forward(self, x):
            parts = Parts(*self.layer(x).chunk(2, dim=-1))
            return parts.left * parts[1]

    run.train(Model())


@program("containers")
def named_results_from_before(run: Run) -> None:
    """They hold a tensor that the forward has not made; then there are others."""
    kept = {"best": torch.arange(4.0).to(run.device).topk(2)}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * kept["best"].values.sum()

    run.train(Model(), lambda: kept.update(best=(torch.arange(4.0) * 3).to(run.device).topk(2)))

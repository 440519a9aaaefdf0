"""Programs whose forward reads state through names, functions and what functions carry: globals, cells, defaults, partials, caches, modules, imports."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
import itertools
import operator
import types
import weakref

import torch
from torch import nn

from tests.torch_bridge.replay_programs.running import Net, Run
from tests.torch_bridge.replay_programs.table import program


@program("globals", form="script")
def global_number(run: Run) -> None:
    SCALE = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * SCALE

    def change():
        global SCALE
        SCALE = 3.0

    run.train(Model(), change)


@program("globals", form="script")
def global_counter(run: Run) -> None:
    COUNT = 0

    class Model(Net):
        def forward(self, x):
            global COUNT
            COUNT += 1
            return self.layer(x)

    run.train(Model(), watch=lambda: COUNT)


@program("globals", form="script")
def global_counter_that_decides(run: Run) -> None:
    COUNT = 0

    class Model(Net):
        def forward(self, x):
            global COUNT
            COUNT += 1
            return self.layer(x) * (3.0 if COUNT > 5 else 1.0)

    run.train(Model(), watch=lambda: COUNT)


@program("globals", form="script")
def globals_in_forward(run: Run) -> None:
    SCALE = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * globals()["SCALE"]

    run.train(Model(), lambda: globals_of(Model).update(SCALE=3.0))


def globals_of(kind: type) -> dict:
    return kind.forward.__globals__


@program("globals", form="script")
def globals_written_in_forward(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            globals()["SEEN"] = globals().get("SEEN", 0) + 1
            return self.layer(x)

    run.train(Model(), watch=lambda: SEEN)


@program("globals", form="script")
def global_appears_and_hides_a_builtin(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * max(1.0, 0.5)

    run.train(Model(), lambda: globals_of(Model).update(max=lambda *numbers: 3.0))


@program("globals", form="script")
def global_deleted(run: Run) -> None:
    SCALE = 2.0

    class Model(Net):
        def forward(self, x):
            try:
                return self.layer(x) * SCALE
            except NameError:
                return self.layer(x) * 3.0

    def change():
        global SCALE
        del SCALE

    run.train(Model(), change)


@program("globals")
def eval_in_forward(run: Run) -> None:
    names = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * eval("scale * 2", names)

    run.train(Model(), lambda: names.update(scale=3.0))


@program("globals")
def eval_of_changing_text(run: Run) -> None:
    texts = ["1.0 + 0.5"]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * eval(texts[0])

    run.train(Model(), lambda: texts.__setitem__(0, "1.0 + 2.5"))


@program("globals")
def exec_in_forward(run: Run) -> None:
    texts = ["scale = 1.0"]

    class Model(Net):
        def forward(self, x):
            names = {}
            exec(texts[0], names)
            return self.layer(x) * names["scale"]

    run.train(Model(), lambda: texts.__setitem__(0, "scale = 3.0"))


@program("globals")
def vars_in_forward(run: Run) -> None:
    config = types.SimpleNamespace(scale=1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * vars(config)["scale"]

    run.train(Model(), lambda: setattr(config, "scale", 3.0))


@program("globals")
def getattr_with_a_changing_name(run: Run) -> None:
    config = types.SimpleNamespace(one=1.0, three=3.0)
    names = ["one"]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * getattr(config, names[0])

    run.train(Model(), lambda: names.__setitem__(0, "three"))


@program("globals")
def getattr_of_a_deep_chain(run: Run) -> None:
    config = types.SimpleNamespace(a=types.SimpleNamespace(b=types.SimpleNamespace(scale=1.0)))

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * functools.reduce(getattr, "a.b.scale".split("."), config)

    run.train(Model(), lambda: setattr(config.a.b, "scale", 3.0))


@program("globals")
def attrgetter(run: Run) -> None:
    config = types.SimpleNamespace(a=types.SimpleNamespace(scale=1.0))
    read = operator.attrgetter("a.scale")

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * read(config)

    run.train(Model(), lambda: setattr(config.a, "scale", 3.0))


@program("globals")
def builtin_patched(run: Run) -> None:
    import builtins

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * max(1.0, 0.5)

    before = builtins.max
    run.train(Model(), lambda: setattr(builtins, "max", lambda *a, **k: 3.0 if a == (1.0, 0.5) else before(*a, **k)))


@program("globals")
def builtin_added(run: Run) -> None:
    import builtins

    builtins.replay_scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * replay_scale

    run.train(Model(), lambda: setattr(builtins, "replay_scale", 3.0))


@program("modules")
def attribute_of_a_module(run: Run) -> None:
    settings = run.module("replay_settings", scale=1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * settings.scale

    run.train(Model(), lambda: setattr(settings, "scale", 3.0))


@program("modules")
def function_called_through_its_module(run: Run) -> None:
    helpers = run.module("replay_helpers", scale=1.0)
    exec("def get():\n    return scale", vars(helpers))

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helpers.get()

    run.train(Model(), lambda: setattr(helpers, "scale", 3.0))


@program("modules")
def function_replaced_in_its_module(run: Run) -> None:
    helpers = run.module("replay_helpers", get=lambda: 1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helpers.get()

    run.train(Model(), lambda: setattr(helpers, "get", lambda: 3.0))


@program("modules")
def function_of_another_module_reads_its_global(run: Run) -> None:
    helpers = run.module("replay_helpers", CONF={"a": {"b": 1.0}})
    exec("def get():\n    return CONF['a']['b']", vars(helpers))
    get = helpers.get

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * get()

    run.train(Model(), lambda: helpers.CONF["a"].update(b=3.0))


@program("modules")
def package_with_a_submodule(run: Run) -> None:
    package = run.module("replay_package")
    run.module("replay_package.sub", X=1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * package.sub.X

    run.train(Model(), lambda: setattr(package.sub, "X", 3.0))


@program("modules")
def package_three_deep(run: Run) -> None:
    package = run.module("replay_package")
    run.module("replay_package.a")
    run.module("replay_package.a.b", config=types.SimpleNamespace(scale=1.0))

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * package.a.b.config.scale

    run.train(Model(), lambda: setattr(package.a.b.config, "scale", 3.0))


@program("modules")
def import_in_forward(run: Run) -> None:
    settings = run.module("replay_settings", scale=1.0)

    class Model(Net):
        def forward(self, x):
            import replay_settings

            return self.layer(x) * replay_settings.scale

    run.train(Model(), lambda: setattr(settings, "scale", 3.0))


@program("modules")
def import_from_in_forward(run: Run) -> None:
    settings = run.module("replay_settings", scale=1.0)

    class Model(Net):
        def forward(self, x):
            from replay_settings import scale

            return self.layer(x) * scale

    run.train(Model(), lambda: setattr(settings, "scale", 3.0))


@program("modules")
def import_of_a_submodule_in_forward(run: Run) -> None:
    run.module("replay_package")
    sub = run.module("replay_package.sub", scale=1.0)

    class Model(Net):
        def forward(self, x):
            import replay_package.sub as s

            return self.layer(x) * s.scale

    run.train(Model(), lambda: setattr(sub, "scale", 3.0))


@program("modules")
def import_module_in_forward(run: Run) -> None:
    settings = run.module("replay_settings", scale=1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * importlib.import_module("replay_settings").scale

    run.train(Model(), lambda: setattr(settings, "scale", 3.0))


@program("modules")
def module_in_sys_modules_replaced(run: Run) -> None:
    run.module("replay_settings", scale=1.0)

    class Model(Net):
        def forward(self, x):
            import replay_settings

            return self.layer(x) * replay_settings.scale

    run.train(Model(), lambda: run.module("replay_settings", scale=3.0))


@program("modules")
def import_that_fails_at_first(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            try:
                import replay_extra
            except ImportError:
                return y
            return y * replay_extra.scale

    run.train(Model(), lambda: run.module("replay_extra", scale=3.0))


@program("modules")
def sys_modules_read(run: Run) -> None:
    import sys

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if "replay_extra" in sys.modules else 1.0)

    run.train(Model(), lambda: run.module("replay_extra"))


@program("modules")
def getattr_of_a_module(run: Run) -> None:
    values = {"scale": 1.0}
    settings = run.module("replay_settings")
    settings.__getattr__ = lambda name: values[name]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * settings.scale

    run.train(Model(), lambda: values.update(scale=3.0))


@program("modules")
def class_of_a_module_with_a_property(run: Run) -> None:
    settings = run.module("replay_settings", _scale=1.0)

    class Lazy(types.ModuleType):
        @property
        def scale(self):
            return self._scale

    settings.__class__ = Lazy

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * settings.scale

    run.train(Model(), lambda: setattr(settings, "_scale", 3.0))


@program("torch patched")
def relu_patched(run: Run) -> None:
    import torch.nn.functional as F

    class Model(Net):
        def forward(self, x):
            return F.relu(self.layer(x))

    run.train(Model(), lambda: setattr(F, "relu", lambda x, inplace=False: x * 3.0))


@program("torch patched")
def relu_of_a_module_patched(run: Run) -> None:
    import torch.nn.functional as F

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(self.layer(x))

    run.train(Model(), lambda: setattr(F, "relu", lambda x, inplace=False: x * 3.0))


@program("torch patched")
def torch_function_patched(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return torch.tanh(self.layer(x))

    run.train(Model(), lambda: setattr(torch, "tanh", lambda x: x * 3.0))


@program("torch patched")
def linear_forward_patched(run: Run) -> None:
    before = nn.Linear.forward

    class Model(Net):
        def forward(self, x):
            return self.layer(x)

    run.train(Model(), lambda: setattr(nn.Linear, "forward", lambda self, x: before(self, x) * 3.0))


@program("torch patched")
def module_call_patched(run: Run) -> None:
    before = nn.Module.__call__

    class Model(Net):
        def forward(self, x):
            return self.layer(x)

    def call(self, *args, **kwargs):
        out = before(self, *args, **kwargs)
        return out * 3.0 if isinstance(self, nn.Linear) else out

    run.train(Model(), lambda: setattr(nn.Module, "__call__", call))


@program("torch patched")
def math_patched(run: Run) -> None:
    import math

    class Model(Net):
        def forward(self, x):
            return self.layer(x) / math.sqrt(4.0)

    run.train(Model(), lambda: setattr(math, "sqrt", lambda x: 0.5))


@program("torch patched")
def constant_of_math_patched(run: Run) -> None:
    import math

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * math.pi

    run.train(Model(), lambda: setattr(math, "pi", 3.0))


@program("functions")
def function_attribute(run: Run) -> None:
    def get():
        return get.scale

    get.scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * get()

    run.train(Model(), lambda: setattr(get, "scale", 3.0))


@program("functions")
def function_attribute_counts(run: Run) -> None:
    def step():
        step.calls = getattr(step, "calls", 0) + 1

    class Model(Net):
        def forward(self, x):
            step()
            return self.layer(x)

    run.train(Model(), watch=lambda: step.calls)


@program("functions")
def attribute_of_forward_itself(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Model.forward.scale

    Model.forward.scale = 1.0
    run.train(Model(), lambda: setattr(Model.forward, "scale", 3.0))


@program("functions")
def partial_of_a_function(run: Run) -> None:
    CONF = {"scale": 1.0}

    def scaled(name, y):
        return y * CONF[name]

    by_scale = functools.partial(scaled, "scale")

    class Model(Net):
        def forward(self, x):
            return by_scale(self.layer(x))

    run.train(Model(), lambda: CONF.update(scale=3.0))


@program("functions")
def keywords_of_a_partial_changed(run: Run) -> None:
    def scaled(y, scale):
        return y * scale

    by_scale = functools.partial(scaled, scale=1.0)

    class Model(Net):
        def forward(self, x):
            return by_scale(self.layer(x))

    run.train(Model(), lambda: by_scale.keywords.update(scale=3.0))


@program("functions")
def state_of_a_partial_set(run: Run) -> None:
    scaled = functools.partial(lambda scale, y: y * scale, 1.0)

    class Model(Net):
        def forward(self, x):
            return scaled(self.layer(x))

    run.train(Model(), lambda: scaled.__setstate__((lambda scale, y: y * scale, (3.0,), {}, None)))


@program("functions")
def partial_method(run: Run) -> None:
    class Model(Net):
        gains = {"a": 1.0}

        def scaled(self, y, name):
            return y * self.gains[name]

        by_a = functools.partialmethod(scaled, name="a")

        def forward(self, x):
            return self.by_a(self.layer(x))

    run.train(Model(), lambda: Model.gains.update(a=3.0))


@program("functions")
def cached_function_cleared(run: Run) -> None:
    values = {"scale": 1.0}

    @functools.lru_cache
    def get(name):
        return values[name]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * get("scale")

    def change():
        values.update(scale=3.0)
        get.cache_clear()

    run.train(Model(), change)


@program("functions")
def cached_function_not_cleared(run: Run) -> None:
    values = {"scale": 1.0}

    @functools.cache
    def get(name):
        return values[name]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * get("scale")

    run.train(Model(), lambda: values.update(scale=3.0), watch=lambda: get.cache_info().hits)


@program("functions")
def cached_property_forgotten(run: Run) -> None:
    values = {"scale": 1.0}

    class Model(Net):
        @functools.cached_property
        def scale(self):
            return values["scale"]

        def forward(self, x):
            return self.layer(x) * self.scale

    model = Model()

    def change():
        values.update(scale=3.0)
        del model.__dict__["scale"]

    run.train(model, change)


@program("functions")
def single_dispatch(run: Run) -> None:
    @functools.singledispatch
    def scale(of):
        return 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scale(5)

    run.train(Model(), lambda: scale.register(int, lambda of: 3.0))


@program("functions")
def reduce_over_a_changing_list(run: Run) -> None:
    factors = [1.0, 0.5]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * functools.reduce(operator.mul, factors)

    run.train(Model(), lambda: factors.append(6.0))


@program("functions")
def decorator_reads_state(run: Run) -> None:
    CONF = {"scale": 1.0}

    def scaled(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs) * CONF["scale"]

        return wrapper

    class Model(Net):
        @scaled
        def forward(self, x):
            return self.layer(x)

    run.train(Model(), lambda: CONF.update(scale=3.0))


@program("functions")
def decorator_counts(run: Run) -> None:
    calls = []

    def counted(function):
        def wrapper(self, x):
            calls.append(len(calls))
            return function(self, x)

        return wrapper

    class Model(Net):
        @counted
        def forward(self, x):
            return self.layer(x)

    run.train(Model(), watch=lambda: len(calls))


@program("functions")
def decorator_object(run: Run) -> None:
    class Scaled:
        def __init__(self, function):
            self.function, self.scale = function, 1.0

        def __call__(self, y):
            return self.function(y) * self.scale

    @Scaled
    def activation(y):
        return torch.tanh(y)

    class Model(Net):
        def forward(self, x):
            return activation(self.layer(x))

    run.train(Model(), lambda: setattr(activation, "scale", 3.0))


@program("functions")
def defaults_swapped(run: Run) -> None:
    def scaled(y, scale=1.0):
        return y * scale

    class Model(Net):
        def forward(self, x):
            return scaled(self.layer(x))

    run.train(Model(), lambda: setattr(scaled, "__defaults__", (3.0,)))


@program("functions")
def keyword_defaults_changed(run: Run) -> None:
    def scaled(y, *, scale=1.0):
        return y * scale

    class Model(Net):
        def forward(self, x):
            return scaled(self.layer(x))

    run.train(Model(), lambda: scaled.__kwdefaults__.update(scale=3.0))


@program("functions")
def mutable_default_changed_from_outside(run: Run) -> None:
    class Model(Net):
        def forward(self, x, scales=[1.0]):
            return self.layer(x) * scales[0]

    run.train(Model(), lambda: Model.forward.__defaults__[0].__setitem__(0, 3.0))


@program("functions")
def mutable_default_that_counts(run: Run) -> None:
    def count(seen=[]):
        seen.append(None)
        return len(seen)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if count() > 5 else 1.0)

    run.train(Model(), watch=lambda: len(count.__defaults__[0]))


@program("functions")
def code_swapped(run: Run) -> None:
    def one():
        return 1.0

    def three():
        return 3.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * one()

    run.train(Model(), lambda: setattr(one, "__code__", three.__code__))


@program("functions")
def code_of_forward_swapped(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * 1.0

        def other(self, x):
            return self.layer(x) * 3.0

    run.train(Model(), lambda: setattr(Model.forward, "__code__", Model.other.__code__))


@program("functions")
def function_in_a_dict_replaced(run: Run) -> None:
    ACTIVATIONS = {"act": torch.tanh}

    class Model(Net):
        def forward(self, x):
            return ACTIVATIONS["act"](self.layer(x))

    run.train(Model(), lambda: ACTIVATIONS.update(act=torch.sin))


@program("functions")
def lambda_in_a_list_reads_state(run: Run) -> None:
    state = types.SimpleNamespace(scale=1.0)
    stages = [lambda y: y * 2, lambda y: y * state.scale]

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            for stage in stages:
                y = stage(y)
            return y

    run.train(Model(), lambda: setattr(state, "scale", 3.0))


@program("functions")
def recursion_by_a_changing_depth(run: Run) -> None:
    state = {"depth": 1}

    def grown(y, depth):
        return y if depth == 0 else grown(y * 1.5, depth - 1)

    class Model(Net):
        def forward(self, x):
            return grown(self.layer(x), state["depth"])

    run.train(Model(), lambda: state.update(depth=3))


@program("functions")
def star_arguments_from_state(run: Run) -> None:
    arguments, keywords = [1.0], {"shift": 0.5}

    def moved(y, scale, shift):
        return y * scale + shift

    class Model(Net):
        def forward(self, x):
            return moved(self.layer(x), *arguments, **keywords)

    run.train(Model(), lambda: (arguments.__setitem__(0, 3.0), keywords.update(shift=1.5)))


@program("functions")
def frame_of_the_caller(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            frame = inspect.currentframe()
            while frame is not None and "scale_of_the_step" not in frame.f_locals:
                frame = frame.f_back
            return self.layer(x) * frame.f_locals["scale_of_the_step"]

    def call(model, x, k):
        scale_of_the_step = 1.0 if k < 5 else 3.0
        return model(x)

    run.train(Model(), call=call)


@program("closures")
def cell_rebound(run: Run) -> None:
    def make():
        scale = 1.0

        def get():
            return scale

        def put(value):
            nonlocal scale
            scale = value

        return get, put

    get, put = make()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * get()

    run.train(Model(), lambda: put(3.0))


@program("closures")
def cell_contents_set(run: Run) -> None:
    def make(scale):
        return lambda: scale

    get = make(1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * get()

    run.train(Model(), lambda: setattr(get.__closure__[0], "cell_contents", 3.0))


@program("closures")
def counter_in_a_cell(run: Run) -> None:
    def make():
        n = 0

        def count():
            nonlocal n
            n += 1
            return n

        return count

    count = make()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if count() > 5 else 1.0)

    run.train(Model(), watch=lambda: count.__closure__[0].cell_contents)


@program("closures")
def closures_four_deep(run: Run) -> None:
    def make(state):
        return lambda: (lambda: lambda: (lambda: state["scale"])())()

    state = {"scale": 1.0}
    get = make(state)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * get()()

    run.train(Model(), lambda: state.update(scale=3.0))


@program("closures", form="function")
def nonlocal_in_forward(run: Run) -> None:
    calls = 0

    class Model(Net):
        def forward(self, x):
            nonlocal calls
            calls += 1
            return self.layer(x)

    run.train(Model(), watch=lambda: calls)


@program("closures", form="function")
def local_name_changed(run: Run) -> None:
    scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scale

    def change():
        nonlocal scale
        scale = 3.0

    run.train(Model(), change)


@program("generators")
def iterator_advances(run: Run) -> None:
    scales = itertools.cycle([1.0, 1.0, 1.0, 2.0])

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * next(scales)

    run.train(Model())


@program("generators")
def generator_advances(run: Run) -> None:
    def numbers():
        n = 0
        while True:
            yield 1.0 if n < 5 else 3.0
            n += 1

    scales = numbers()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * next(scales)

    run.train(Model())


@program("generators")
def generator_reads_state(run: Run) -> None:
    state = {"scale": 1.0}

    def numbers():
        while True:
            yield state["scale"]

    scales = numbers()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * next(scales)

    run.train(Model(), lambda: state.update(scale=3.0))


@program("generators")
def generator_is_sent_values(run: Run) -> None:
    received = []

    def sink():
        while True:
            received.append((yield))

    to = sink()
    next(to)

    class Model(Net):
        def forward(self, x):
            to.send(5)
            return self.layer(x)

    run.train(Model(), watch=lambda: len(received))


@program("generators")
def generator_made_in_forward(run: Run) -> None:
    factors = [1.0, 2.0]

    class Model(Net):
        def factors(self):
            yield from factors

        def forward(self, x):
            y = self.layer(x)
            for factor in self.factors():
                y = y * factor
            return y

    run.train(Model(), lambda: factors.append(1.5))


@program("generators")
def count_object(run: Run) -> None:
    numbers = itertools.count()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if next(numbers) >= 5 else 1.0)

    run.train(Model())


@program("generators")
def coroutine_is_driven(run: Run) -> None:
    state = {"scale": 1.0}

    async def scale():
        return state["scale"]

    def finish(coroutine):
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * finish(scale())

    run.train(Model(), lambda: state.update(scale=3.0))


@program("generators")
def map_and_filter(run: Run) -> None:
    factors, limit = [1.0, 2.0, 5.0], [3.0]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * sum(filter(lambda f: f < limit[0], map(float, factors)))

    run.train(Model(), lambda: limit.__setitem__(0, 10.0))


@program("references")
def weak_reference_dies(run: Run) -> None:
    class Thing:
        pass

    things = [Thing()]
    reference = weakref.ref(things[0])

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if reference() is not None else 3.0)

    run.train(Model(), lambda: things.clear())


@program("references")
def weak_reference_to_a_tensor_that_dies(run: Run) -> None:
    held = [torch.ones(6, device=run.device)]
    reference = weakref.ref(held[0])

    class Model(Net):
        def forward(self, x):
            found = reference()
            return self.layer(x) * 3.0 if found is None else self.layer(x) + found

    run.train(Model(), lambda: held.clear())


@program("references")
def weak_reference_to_a_tensor_that_is_read_elsewhere(run: Run) -> None:
    held = [torch.ones(6, device=run.device)]
    reference = weakref.ref(held[0])

    class Model(Net):
        def forward(self, x):
            first = held[0] if held else None
            found = reference()
            return self.layer(x) * 3.0 if found is None or found is not first else self.layer(x) + found

    run.train(Model(), lambda: held.clear())


@program("references")
def weak_reference_to_state(run: Run) -> None:
    class Config:
        scale = 1.0

    config = Config()
    reference = weakref.ref(config)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * reference().scale

    run.train(Model(), lambda: setattr(config, "scale", 3.0))


@program("references")
def weak_proxy(run: Run) -> None:
    class Config:
        pass

    config = Config()
    config.scale = 1.0
    proxy = weakref.proxy(config)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * proxy.scale

    run.train(Model(), lambda: setattr(config, "scale", 3.0))


@program("references")
def weak_set_shrinks(run: Run) -> None:
    class Thing:
        pass

    things = [Thing(), Thing()]
    alive = weakref.WeakSet(things)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * len(alive)

    run.train(Model(), lambda: things.pop())


@program("references")
def weak_value_dictionary(run: Run) -> None:
    class Thing:
        pass

    things = [Thing(), Thing()]
    alive = weakref.WeakValueDictionary(dict(enumerate(things)))

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if 1 in alive else 3.0)

    run.train(Model(), lambda: things.pop())


@program("references")
def context_variable(run: Run) -> None:
    scale = contextvars.ContextVar("scale", default=1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scale.get()

    run.train(Model(), lambda: scale.set(3.0))


@program("references")
def context_variable_set_in_forward(run: Run) -> None:
    calls = contextvars.ContextVar("calls", default=0)

    class Model(Net):
        def forward(self, x):
            calls.set(calls.get() + 1)
            return self.layer(x)

    run.train(Model(), watch=lambda: calls.get())


@program("references")
def number_of_references(run: Run) -> None:
    import sys

    thing, others = object(), []
    before = sys.getrefcount(thing)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if sys.getrefcount(thing) < before + 100 else 3.0)

    run.train(Model(), lambda: others.extend([thing] * 1000))


@program("context managers")
def context_manager_around_the_call(run: Run) -> None:
    state = types.SimpleNamespace(scale=1.0)

    @contextlib.contextmanager
    def scaled(by):
        before, state.scale = state.scale, by
        yield
        state.scale = before

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * state.scale

    def call(model, x, k):
        if k < 5:
            return model(x)
        with scaled(3.0):
            return model(x)

    run.train(Model(), call=call)


@program("context managers")
def context_manager_inside(run: Run) -> None:
    entered = []

    class Timer:
        def __enter__(self):
            entered.append("in")

        def __exit__(self, *error):
            entered.append("out")

    class Model(Net):
        def forward(self, x):
            with Timer():
                return self.layer(x)

    run.train(Model(), watch=lambda: len(entered))


@program("context managers")
def context_manager_that_swallows(run: Run) -> None:
    errors = {"on": False}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            with contextlib.suppress(ValueError):
                if errors["on"]:
                    raise ValueError
                y = y * 3.0
            return y

    run.train(Model(), lambda: errors.update(on=True))


@program("context managers")
def exit_stack_of_changing_contexts(run: Run) -> None:
    contexts = [contextlib.nullcontext]

    class Model(Net):
        def forward(self, x):
            with contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                y = self.layer(x)
            return y + x

    run.train(Model(), lambda: contexts.append(torch.no_grad), loss=lambda out: out.square().mean() + 0 * out.sum(), call=with_a_parameter)


def with_a_parameter(model, x, k):
    return model(x) + 0.1 * model.layer.bias

"""Programs about what is rarely thought of: tracers, finalizers, modes, lazy results, copies, and parts of Python that read state without a name for it."""

from __future__ import annotations

import abc
import collections.abc
import copy
import gc
import itertools
import operator
import sys
import types
import warnings

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torch_bridge.replay_programs.running import Net, Run
from tests.torch_bridge.replay_programs.table import program


@program("the interpreter")
def profiler_of_the_script(run: Run) -> None:
    calls = []

    def helper(y):
        return y * 2

    class Model(Net):
        def forward(self, x):
            return helper(self.layer(x))

    def profile(frame, event, argument):
        if event == "call" and frame.f_code is helper.__code__:
            calls.append(1)

    before = sys.getprofile()
    run.cleanup.callback(sys.setprofile, before)
    sys.setprofile(profile)
    run.train(Model(), watch=lambda: len(calls))


@program("the interpreter")
def tracer_of_the_script(run: Run) -> None:
    lines = []

    def helper(y):
        return y * 2

    class Model(Net):
        def forward(self, x):
            return helper(self.layer(x))

    def trace(frame, event, argument):
        if frame.f_code is helper.__code__:
            lines.append(event)
            return trace
        return None

    before = sys.gettrace()
    run.cleanup.callback(sys.settrace, before)
    sys.settrace(trace)
    run.train(Model(), watch=lambda: len(lines))


@program("the interpreter")
def error_that_is_being_handled(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if sys.exc_info()[0] is None else 3.0)

    def call(model, x, k):
        if k < 5:
            return model(x)
        try:
            raise ValueError
        except ValueError:
            return model(x)

    run.train(Model(), call=call)


@program("the interpreter")
def finalizer_of_an_object_made_inside(run: Run) -> None:
    ended = []

    class Guard:
        def __del__(self):
            ended.append(1)

    class Model(Net):
        def forward(self, x):
            guard = Guard()
            y = self.layer(x)
            del guard
            return y

    run.train(Model(), watch=lambda: len(ended))


@program("the interpreter")
def garbage_collector_switched_off(run: Run) -> None:
    run.cleanup.callback(gc.enable)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if gc.isenabled() else 3.0)

    run.train(Model(), gc.disable)


@program("the interpreter")
def warning_becomes_an_error(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            try:
                warnings.warn("program: odd", RuntimeWarning, stacklevel=1)
            except RuntimeWarning:
                return self.layer(x) * 3.0
            return self.layer(x)

    run.train(Model(), lambda: warnings.simplefilter("error", RuntimeWarning))


@program("the interpreter")
def names_that_dir_finds(run: Run) -> None:
    config = types.SimpleNamespace(a=1)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * len([name for name in dir(config) if not name.startswith("_")])

    run.train(Model(), lambda: setattr(config, "b", 2))


@program("the interpreter")
def locals_of_forward(run: Run) -> None:
    CONF = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            scale = CONF["scale"]
            return self.layer(x) * locals()["scale"]

    run.train(Model(), lambda: CONF.update(scale=3.0))


@program("the interpreter")
def subclasses_of_a_class(run: Run) -> None:
    class Base:
        pass

    kinds = [type("One", (Base,), {})]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * len(Base.__subclasses__())

    run.train(Model(), lambda: kinds.append(type("Two", (Base,), {})))


@program("the interpreter")
def registered_with_an_abstract_class(run: Run) -> None:
    class Wide(abc.ABC):
        pass

    class Plain:
        pass

    plain = Plain()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if isinstance(plain, Wide) else 1.0)

    run.train(Model(), lambda: Wide.register(Plain))


@program("the interpreter")
def callable_or_not(run: Run) -> None:
    class Helper:
        pass

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if callable(helper) else 1.0)

    run.train(Model(), lambda: setattr(Helper, "__call__", lambda self: None))


@program("the interpreter")
def annotations_of_a_class(run: Run) -> None:
    class Config:
        scale: float

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * len(Config.__annotations__)

    run.train(Model(), lambda: Config.__annotations__.update(shift=float))


@program("the interpreter")
def docstring_of_a_function(run: Run) -> None:
    def helper():
        """x"""

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * len(helper.__doc__)

    run.train(Model(), lambda: setattr(helper, "__doc__", "xxx"))


@program("the interpreter")
def method_caller(run: Run) -> None:
    class Helper:
        scale = 1.0

        def get(self):
            return self.scale

    helper, read = Helper(), operator.methodcaller("get")

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * read(helper)

    run.train(Model(), lambda: setattr(helper, "scale", 3.0))


@program("the interpreter")
def mixin_of_collections_abc(run: Run) -> None:
    class Scales(collections.abc.Sequence):
        values = [1.0]

        def __len__(self):
            return len(self.values)

        def __getitem__(self, k):
            return self.values[k]

    scales = Scales()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if 5.0 in scales else 1.0)

    run.train(Model(), lambda: Scales.values.append(5.0))


@program("the interpreter")
def class_getitem(run: Run) -> None:
    values = [1.0]

    class Config:
        def __class_getitem__(cls, name):
            return values[0]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config["scale"]

    run.train(Model(), lambda: values.__setitem__(0, 3.0))


@program("the interpreter")
def new_returns_a_shared_object(run: Run) -> None:
    class Shared:
        made = None

        def __new__(cls):
            if cls.made is None:
                cls.made = super().__new__(cls)
                cls.made.scale = 1.0
            return cls.made

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Shared().scale

    run.train(Model(), lambda: setattr(Shared(), "scale", 3.0))


@program("the interpreter")
def borg(run: Run) -> None:
    class Borg:
        state = {"scale": 1.0}

        def __init__(self):
            self.__dict__ = self.state

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Borg().scale

    run.train(Model(), lambda: setattr(Borg(), "scale", 3.0))


@program("lazy results")
def generator_as_the_result(run: Run) -> None:
    state = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return (y * state["scale"] for _ in range(1))

    run.train(Model(), lambda: state.update(scale=3.0), call=lambda m, x, k: next(m(x)))


@program("lazy results")
def closure_as_the_result(run: Run) -> None:
    state = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return lambda: y * state["scale"]

    run.train(Model(), lambda: state.update(scale=3.0), call=lambda m, x, k: m(x)())


@program("lazy results")
def number_of_the_call_in_the_result(run: Run) -> None:
    numbers = itertools.count()

    class Model(Net):
        def forward(self, x):
            return self.layer(x), next(numbers)

    found = []
    run.train(Model(), call=lambda m, x, k: (lambda out: found.append(out[1]) or out[0])(m(x)))
    run.note(found)


@program("lazy results")
def text_in_the_result(run: Run) -> None:
    state = types.SimpleNamespace(name="a")

    class Model(Net):
        def forward(self, x):
            return {"y": self.layer(x), "name": f"head-{state.name}"}

    found = []
    run.train(Model(), lambda: setattr(state, "name", "b"), call=lambda m, x, k: (lambda out: found.append(out["name"]) or out["y"])(m(x)))
    run.note(found)


@program("lazy results")
def object_with_methods_as_the_result(run: Run) -> None:
    class Output:
        scale = 1.0

        def __init__(self, y):
            self.y = y

        def loss(self):
            return self.y.square().mean() * self.scale

    class Model(Net):
        def forward(self, x):
            return Output(self.layer(x))

    run.train(Model(), lambda: setattr(Output, "scale", 3.0), call=lambda m, x, k: m(x).loss(), loss=lambda out: out)


@program("modes", careless="it calls the functions under the mode")
def function_mode_around(run: Run) -> None:
    class Tripled(TorchFunctionMode):
        def __torch_function__(self, func, kinds, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 3.0 if func is torch.tanh else out

    class Model(Net):
        def forward(self, x):
            return torch.tanh(self.layer(x))

    def call(model, x, k):
        if k < 5:
            return model(x)
        with Tripled():
            return model(x)

    run.train(Model(), call=call)


@program("modes", careless="it calls the functions under the mode")
def dispatch_mode_around_counts(run: Run) -> None:
    class Seen(TorchDispatchMode):
        found = False

        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            self.found = True
            return func(*args, **(kwargs or {}))

    seen = []

    class Model(Net):
        def forward(self, x):
            return self.layer(x)

    def call(model, x, k):
        if k < 5:
            return model(x)
        with Seen() as mode:
            out = model(x)
        seen.append(mode.found)
        return out

    run.train(Model(), call=call)
    run.note(seen)


@program("modes")
def function_mode_inside_by_state(run: Run) -> None:
    class Scaled(TorchFunctionMode):
        by = 1.0

        def __torch_function__(self, func, kinds, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * Scaled.by if func is torch.tanh else out

    class Model(Net):
        def forward(self, x):
            with Scaled():
                return torch.tanh(self.layer(x))

    run.train(Model(), lambda: setattr(Scaled, "by", 3.0))


@program("modes")
def seed_of_the_process_decides(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if torch.initial_seed() == 0 else 3.0)

    run.train(Model(), lambda: torch.manual_seed(7))


@program("modules looked at")
def number_of_modules(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * len(list(self.modules()))

    model = Model()
    run.train(model, lambda: model.add_module("unused", nn.Identity()))


@program("modules looked at")
def penalty_of_all_parameters(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) + 0.1 * sum(p.square().sum() for p in self.parameters())

    model = Model()
    run.train(model, lambda: model.register_parameter("more", nn.Parameter(torch.ones(3).to(run.device))))


@program("modules looked at")
def shallow_copy_with_another_setting(run: Run) -> None:
    class Model(Net):
        scale = 1.0

        def forward(self, x):
            return self.layer(x) * self.scale

    model = Model()
    copies = []

    def call(model, x, k):
        if k < 5:
            return model(x)
        if not copies:
            copies.append(copy.copy(model))
            copies[0].scale = 3.0
        return copies[0](x)

    run.train(model, call=call)


@program("modules looked at")
def forward_called_directly(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer.forward(x) * Config.scale

    run.train(Model(), lambda: setattr(Config, "scale", 3.0), call=lambda m, x, k: m.forward(x))


@program("modules looked at")
def module_shared_by_two_models(run: Run) -> None:
    class Shared(Net):
        gain = 1.0

        def forward(self, x):
            return self.layer(x) * self.gain

    class Model(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared = shared

        def forward(self, x):
            return self.shared(x)

    shared = Shared()
    first, second = run.place(Model(shared)), run.place(Model(shared))
    run.train(first, lambda: setattr(shared, "gain", 3.0), place=False, call=lambda m, x, k: [first(x), second(x * 2)])


@program("modules looked at")
def extra_attribute_set_to_the_same_value(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.history = {}

        def forward(self, x):
            self.history[len(self.history)] = True
            return self.layer(x)

    model = Model()
    run.train(model, watch=lambda: len(model.history))


@program("modules looked at")
def gradients_of_a_parameter_outside(run: Run) -> None:
    outside = nn.Parameter(torch.ones(6).to(run.device))
    state = {"on": True}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y * outside if state["on"] else y

    run.train(Model(), lambda: state.update(on=False), watch=lambda: outside.grad)


@program("modules looked at", careless="its key has what arguments print as")
def numpy_array_as_an_argument(run: Run) -> None:
    scales = np.ones(2)

    class Model(Net):
        def forward(self, x, scales):
            return self.layer(x) * float(scales[1])

    run.train(Model(), lambda: scales.__setitem__(1, 3.0), call=lambda m, x, k: m(x, scales))


@program("modules looked at")
def error_after_a_buffer_was_updated(run: Run) -> None:
    state = {"fail": False}

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1.0)
            y = self.layer(x)
            if state["fail"]:
                raise RuntimeError("told to")
            return y

    model = Model()
    run.train(model, lambda: state.update(fail=True), watch=lambda: model.calls)


@program("modules looked at")
def values_as_a_list(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y * (3.0 if x[0].tolist()[0] > 10.0 else 1.0)

    run.train(Model(), call=lambda m, x, k: m(x if k < 5 else x + 20.0))


@program("modules looked at", careless="it selects again, by the new values")
def selection_of_as_many_as_there_are(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y[x > 0]

    run.train(Model())


@program("modules looked at")
def length_of_a_selection_decides(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * len(x[x > 10.0])

    run.train(Model(), call=lambda m, x, k: m(x + (11.0 if k < 5 else 5.0) * (x > 0)))

"""Programs whose forward reads attributes: of classes, of objects that classes hold, of objects deep inside objects, through each of Python's hooks."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import inspect
import types
import typing

import torch

from tests.torch_bridge.replay_programs.running import Net, Run
from tests.torch_bridge.replay_programs.table import program


@program("attributes of classes")
def class_attribute(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.train(Model(), lambda: setattr(Config, "scale", 3.0))


@program("attributes of classes")
def inherited_class_attribute(run: Run) -> None:
    class Base:
        scale = 1.0

    class Config(Base):
        pass

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.train(Model(), lambda: setattr(Base, "scale", 3.0))


@program("attributes of classes")
def class_attribute_shadowed_in_a_subclass(run: Run) -> None:
    class Base:
        scale = 1.0

    class Config(Base):
        pass

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.train(Model(), lambda: setattr(Config, "scale", 3.0))


@program("attributes of classes")
def static_method_reads_its_class(run: Run) -> None:
    class Config:
        scale = 1.0

        @staticmethod
        def get():
            return Config.scale

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.get()

    run.train(Model(), lambda: setattr(Config, "scale", 3.0))


@program("attributes of classes")
def class_method_reads_its_class(run: Run) -> None:
    class Config:
        scale = 1.0

        @classmethod
        def get(cls):
            return cls.scale

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.get()

    run.train(Model(), lambda: setattr(Config, "scale", 3.0))


@program("attributes of classes")
def static_method_replaced(run: Run) -> None:
    class Config:
        @staticmethod
        def get():
            return 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.get()

    run.train(Model(), lambda: setattr(Config, "get", staticmethod(lambda: 3.0)))


@program("attributes of classes")
def class_attribute_of_the_model(run: Run) -> None:
    class Model(Net):
        scale = 1.0

        def forward(self, x):
            return self.layer(x) * self.scale

    run.train(Model(), lambda: setattr(Model, "scale", 3.0))


@program("attributes of classes")
def class_attribute_hidden_by_the_instance(run: Run) -> None:
    class Model(Net):
        scale = 1.0

        def forward(self, x):
            return self.layer(x) * self.scale

    model = Model()
    run.train(model, lambda: setattr(model, "scale", 3.0))


@program("attributes of classes")
def object_held_as_a_class_attribute(run: Run) -> None:
    class Settings:
        def __init__(self):
            self.scale = 1.0

    class Model(Net):
        settings = Settings()

        def forward(self, x):
            return self.layer(x) * self.settings.scale

    run.train(Model(), lambda: setattr(Model.settings, "scale", 3.0))


@program("attributes of classes")
def list_held_as_a_class_attribute(run: Run) -> None:
    class Registry:
        scales = [1.0]

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Registry.scales[-1]

    run.train(Model(), lambda: Registry.scales.append(3.0))


@program("attributes of classes")
def singleton(run: Run) -> None:
    class Settings:
        instance = None

        def __init__(self):
            self.scale = 1.0

        @classmethod
        def get(cls):
            if cls.instance is None:
                cls.instance = cls()
            return cls.instance

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Settings.get().scale

    run.train(Model(), lambda: setattr(Settings.get(), "scale", 3.0))


@program("attributes of classes")
def nested_class(run: Run) -> None:
    class Config:
        class Model:
            class Head:
                scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.Model.Head.scale

    run.train(Model(), lambda: setattr(Config.Model.Head, "scale", 3.0))


@program("attributes of classes")
def class_counts_its_instances(run: Run) -> None:
    class Thing:
        made = 0

        def __init__(self):
            type(self).made += 1

    class Model(Net):
        def forward(self, x):
            Thing()
            return self.layer(x)

    run.train(Model(), watch=lambda: Thing.made)


@program("attributes of classes")
def super_method_of_a_helper(run: Run) -> None:
    class Base:
        scale = 1.0

        def get(self):
            return Base.scale

    class Helper(Base):
        def get(self):
            return super().get() * 2

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.get()

    run.train(Model(), lambda: setattr(Base, "scale", 3.0))


@program("attributes of classes")
def super_forward_reads_state(run: Run) -> None:
    class Config:
        scale = 1.0

    class Base(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    class Model(Base):
        def forward(self, x):
            return super().forward(x) + 1

    run.train(Model(), lambda: setattr(Config, "scale", 3.0))


@program("attributes of classes")
def super_forward_replaced(run: Run) -> None:
    class Base(Net):
        def forward(self, x):
            return self.layer(x)

    class Model(Base):
        def forward(self, x):
            return super().forward(x) + 1

    run.train(Model(), lambda: setattr(Base, "forward", lambda self, x: self.layer(x) * 3.0))


@program("methods")
def method_of_a_helper(run: Run) -> None:
    class Helper:
        def __init__(self):
            self.scale = 1.0

        def get(self):
            return self.scale

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.get()

    run.train(Model(), lambda: setattr(helper, "scale", 3.0))


@program("methods")
def call_of_a_helper(run: Run) -> None:
    class Helper:
        def __init__(self):
            self.scale = 1.0

        def __call__(self, y):
            return y * self.scale

    class Model(Net):
        def __init__(self, helper):
            super().__init__()
            self.helper = helper

        def forward(self, x):
            return self.helper(self.layer(x))

    helper = Helper()
    run.train(Model(helper), lambda: setattr(helper, "scale", 3.0))


@program("methods")
def helper_calls_its_helper(run: Run) -> None:
    class Inner:
        scale = 1.0

        def get(self):
            return self.scale

    class Outer:
        def __init__(self):
            self.inner = Inner()

        def get(self):
            return self.inner.get()

    outer = Outer()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * outer.get()

    run.train(Model(), lambda: setattr(outer.inner, "scale", 3.0))


@program("methods")
def bound_method_held(run: Run) -> None:
    class Helper:
        scale = 1.0

        def get(self):
            return self.scale

    helper = Helper()
    get = helper.get

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * get()

    run.train(Model(), lambda: setattr(helper, "scale", 3.0))


@program("methods")
def method_patched_on_its_class(run: Run) -> None:
    class Helper:
        def get(self):
            return 1.0

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.get()

    run.train(Model(), lambda: setattr(Helper, "get", lambda self: 3.0))


@program("methods")
def method_patched_on_its_instance(run: Run) -> None:
    class Helper:
        def get(self):
            return 1.0

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.get()

    run.train(Model(), lambda: setattr(helper, "get", lambda: 3.0))


@program("methods")
def own_method_patched_on_the_class(run: Run) -> None:
    class Model(Net):
        def scale(self):
            return 1.0

        def forward(self, x):
            return self.layer(x) * self.scale()

    run.train(Model(), lambda: setattr(Model, "scale", lambda self: 3.0))


@program("methods")
def own_method_patched_on_the_instance(run: Run) -> None:
    class Model(Net):
        def scale(self):
            return 1.0

        def forward(self, x):
            return self.layer(x) * self.scale()

    model = Model()
    run.train(model, lambda: setattr(model, "scale", types.MethodType(lambda self: 3.0, model)))


@program("methods")
def method_of_a_submodule_patched(run: Run) -> None:
    class Inner(Net):
        def gain(self):
            return 1.0

        def forward(self, x):
            return self.layer(x) * self.gain()

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(self.layer(x))

    run.train(Model(), lambda: setattr(Inner, "gain", lambda self: 3.0))


@program("attributes deep down")
def attributes_five_deep(run: Run) -> None:
    ARGS = types.SimpleNamespace(
        a=types.SimpleNamespace(b=types.SimpleNamespace(c=types.SimpleNamespace(d=types.SimpleNamespace(scale=1.0))))
    )

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * ARGS.a.b.c.d.scale

    run.train(Model(), lambda: setattr(ARGS.a.b.c.d, "scale", 3.0))


@program("attributes deep down")
def attributes_five_deep_one_replaced(run: Run) -> None:
    N = types.SimpleNamespace
    ARGS = N(a=N(b=N(c=N(d=N(scale=1.0)))))

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * ARGS.a.b.c.d.scale

    run.train(Model(), lambda: setattr(ARGS.a, "b", N(c=N(d=N(scale=3.0)))))


@program("attributes deep down")
def hydra_style(run: Run) -> None:
    class Config:
        def __init__(self, content):
            self._content = content

        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            value = self._content[name]
            return Config(value) if isinstance(value, dict) else value

    content = {"model": {"head": {"alpha": 1.0}}}
    ARGS = Config(content)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * ARGS.model.head.alpha

    run.train(Model(), lambda: content["model"]["head"].update(alpha=3.0))


@program("attributes deep down")
def own_attributes_deep_down(run: Run) -> None:
    N = types.SimpleNamespace

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.config = N(a=N(b=N(c=N(d=N(e=N(scale=1.0))))))

        def forward(self, x):
            return self.layer(x) * self.config.a.b.c.d.e.scale

    model = Model()
    run.train(model, lambda: setattr(model.config.a.b.c.d.e, "scale", 3.0))


@program("attributes deep down")
def linked_list_of_twenty(run: Run) -> None:
    class Node:
        def __init__(self, after):
            self.after = after
            self.scale = 1.0

    last = head = Node(None)
    for _ in range(20):
        head = Node(head)

    class Model(Net):
        def forward(self, x):
            node = head
            while node.after is not None:
                node = node.after
            return self.layer(x) * node.scale

    run.train(Model(), lambda: setattr(last, "scale", 3.0))


@program("attributes deep down")
def cycle_of_objects(run: Run) -> None:
    parent, child = types.SimpleNamespace(scale=1.0), types.SimpleNamespace()
    parent.child, child.parent = child, parent

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * parent.child.parent.child.parent.scale

    run.train(Model(), lambda: setattr(parent, "scale", 3.0))


@program("attributes deep down")
def attributes_mixed_with_items(run: Run) -> None:
    ARGS = types.SimpleNamespace(models=[{"heads": (types.SimpleNamespace(scales={"a": [1.0]}),)}])

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * ARGS.models[0]["heads"][0].scales["a"][0]

    run.train(Model(), lambda: ARGS.models[0]["heads"][0].scales["a"].__setitem__(0, 3.0))


@program("properties")
def property_of_a_helper(run: Run) -> None:
    class Helper:
        _scale = 1.0

        @property
        def scale(self):
            return self._scale

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.scale

    run.train(Model(), lambda: setattr(helper, "_scale", 3.0))


@program("properties")
def property_of_the_model_reads_a_global(run: Run) -> None:
    CONF = {"scale": 1.0}

    class Model(Net):
        @property
        def scale(self):
            return CONF["scale"]

        def forward(self, x):
            return self.layer(x) * self.scale

    run.train(Model(), lambda: CONF.update(scale=3.0))


@program("properties")
def property_replaced(run: Run) -> None:
    class Helper:
        scale = property(lambda self: 1.0)

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.scale

    run.train(Model(), lambda: setattr(Helper, "scale", property(lambda self: 3.0)))


@program("properties")
def property_that_counts(run: Run) -> None:
    class Helper:
        reads = 0

        @property
        def scale(self):
            self.reads += 1
            return 2.0

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.scale

    run.train(Model(), watch=lambda: helper.reads)


@program("properties")
def descriptor(run: Run) -> None:
    class Scale:
        value = 1.0

        def __get__(self, owner, kind=None):
            return self.value

    scale = Scale()

    class Helper:
        pass

    Helper.scale = scale
    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.scale

    run.train(Model(), lambda: setattr(scale, "value", 3.0))


@program("properties")
def data_descriptor_in_the_model(run: Run) -> None:
    values = {}

    class Stored:
        def __get__(self, owner, kind=None):
            return values.get("scale", 1.0)

        def __set__(self, owner, value):
            values["scale"] = value

    class Model(Net):
        scale = Stored()

        def forward(self, x):
            return self.layer(x) * self.scale

    model = Model()
    run.train(model, lambda: setattr(model, "scale", 3.0))


@program("properties")
def getattr_hook(run: Run) -> None:
    values = {"scale": 1.0}

    class Helper:
        def __getattr__(self, name):
            return values[name]

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.scale

    run.train(Model(), lambda: values.update(scale=3.0))


@program("properties")
def getattribute_hook(run: Run) -> None:
    values = [1.0]

    class Helper:
        scale = 7.0

        def __getattribute__(self, name):
            return values[0] if name == "scale" else super().__getattribute__(name)

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.scale

    run.train(Model(), lambda: values.__setitem__(0, 3.0))


@program("properties")
def getattr_hook_of_the_model(run: Run) -> None:
    values = {"gain": 1.0}

    class Model(Net):
        def __getattr__(self, name):
            return values[name] if name in values else super().__getattr__(name)

        def forward(self, x):
            return self.layer(x) * self.gain

    run.train(Model(), lambda: values.update(gain=3.0))


@program("properties")
def setattr_hook(run: Run) -> None:
    written = []

    class Helper:
        def __setattr__(self, name, value):
            written.append((name, value))
            super().__setattr__(name, value)

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            helper.last = 5
            return self.layer(x)

    run.train(Model(), watch=lambda: len(written))


@program("properties")
def delattr_hook(run: Run) -> None:
    deleted = []

    class Helper:
        def __delattr__(self, name):
            deleted.append(name)

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            del helper.anything
            return self.layer(x)

    run.train(Model(), watch=lambda: len(deleted))


@program("kinds of objects")
def slots(run: Run) -> None:
    class Config:
        __slots__ = ("scale",)

    config = Config()
    config.scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * config.scale

    run.train(Model(), lambda: setattr(config, "scale", 3.0))


@program("kinds of objects")
def slots_below_a_list(run: Run) -> None:
    class Config:
        __slots__ = ("inner",)

    outer, inner = Config(), Config()
    outer.inner, inner.inner = [inner], 1.0

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.config = outer

        def forward(self, x):
            return self.layer(x) * self.config.inner[0].inner

    run.train(Model(), lambda: setattr(inner, "inner", 3.0))


@program("kinds of objects")
def dataclass(run: Run) -> None:
    @dataclasses.dataclass
    class Config:
        scale: float = 1.0

    config = Config()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * config.scale

    run.train(Model(), lambda: setattr(config, "scale", 3.0))


@program("kinds of objects")
def frozen_dataclass_replaced(run: Run) -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Config:
        scale: float = 1.0
        name: str = "a"

    holder = {"config": Config()}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * holder["config"].scale

    run.train(Model(), lambda: holder.update(config=dataclasses.replace(holder["config"], scale=3.0)))


@program("kinds of objects")
def dataclass_with_a_factory(run: Run) -> None:
    scales = [1.0]

    @dataclasses.dataclass
    class Config:
        scale: float = dataclasses.field(default_factory=lambda: scales[0])

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config().scale

    run.train(Model(), lambda: scales.__setitem__(0, 3.0))


@program("kinds of objects")
def named_tuple_replaced(run: Run) -> None:
    class Config(typing.NamedTuple):
        scale: float
        shift: float

    holder = types.SimpleNamespace(config=Config(1.0, 0.5))

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * holder.config.scale + holder.config.shift

    run.train(Model(), lambda: setattr(holder, "config", holder.config._replace(scale=3.0)))


@program("kinds of objects")
def named_tuple_unpacked(run: Run) -> None:
    Config = collections.namedtuple("Config", "scale shift")
    holder = [Config(1.0, 0.5)]

    class Model(Net):
        def forward(self, x):
            scale, shift = holder[0]
            return self.layer(x) * scale + shift

    run.train(Model(), lambda: holder.__setitem__(0, Config(3.0, 0.5)))


@program("kinds of objects")
def enum_member(run: Run) -> None:
    class Kind(enum.Enum):
        SMALL = 1.0
        LARGE = 3.0

    class Model(Net):
        kind = Kind.SMALL

        def forward(self, x):
            return self.layer(x) * self.kind.value

    model = Model()
    run.train(model, lambda: setattr(model, "kind", Kind.LARGE))


@program("kinds of objects")
def attribute_of_an_enum_member(run: Run) -> None:
    class Kind(enum.Enum):
        SMALL = "small"
        LARGE = "large"

    Kind.SMALL.gain = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Kind.SMALL.gain

    run.train(Model(), lambda: setattr(Kind.SMALL, "gain", 3.0))


@program("kinds of objects")
def flag_enum(run: Run) -> None:
    class Features(enum.Flag):
        PLAIN = 1
        DOUBLED = 2

    state = types.SimpleNamespace(features=Features.PLAIN)

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y * 2 if Features.DOUBLED in state.features else y

    run.train(Model(), lambda: setattr(state, "features", Features.PLAIN | Features.DOUBLED))


@program("kinds of objects")
def metaclass_attribute(run: Run) -> None:
    class Meta(type):
        scale = 1.0

    class Config(metaclass=Meta):
        pass

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.train(Model(), lambda: setattr(Meta, "scale", 3.0))


@program("kinds of objects")
def metaclass_property(run: Run) -> None:
    values = {"scale": 1.0}

    class Meta(type):
        @property
        def scale(cls):
            return values["scale"]

    class Config(metaclass=Meta):
        pass

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.train(Model(), lambda: values.update(scale=3.0))


@program("kinds of objects")
def metaclass_getattr(run: Run) -> None:
    values = {"scale": 1.0}

    class Meta(type):
        def __getattr__(cls, name):
            return values[name]

    class Config(metaclass=Meta):
        pass

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.train(Model(), lambda: values.update(scale=3.0))


@program("kinds of objects")
def subclass_of_float_with_attributes(run: Run) -> None:
    class Number(float):
        pass

    number = Number(2.0)
    number.scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * number.scale

    run.train(Model(), lambda: setattr(number, "scale", 3.0))


@program("kinds of objects")
def subclass_of_int_that_multiplies(run: Run) -> None:
    values = [1.0]

    class Number(int):
        def __mul__(self, other):
            return values[0] * other

    number = Number(1)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (number * 1.0)

    run.train(Model(), lambda: values.__setitem__(0, 3.0))


@program("kinds of objects")
def subclass_of_str(run: Run) -> None:
    class Name(str):
        scale = 1.0

    name = Name("head")

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * name.scale

    run.train(Model(), lambda: setattr(name, "scale", 3.0))


@program("kinds of objects")
def subclass_of_dict_with_missing(run: Run) -> None:
    values = [1.0]

    class Config(dict):
        def __missing__(self, key):
            return values[0]

    config = Config()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * config["scale"]

    run.train(Model(), lambda: values.__setitem__(0, 3.0))


@program("kinds of objects")
def subclass_of_list_with_own_items(run: Run) -> None:
    values = [1.0]

    class Scales(list):
        def __getitem__(self, index):
            return values[0]

    scales = Scales([5.0])

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * scales[0]

    run.train(Model(), lambda: values.__setitem__(0, 3.0))


@program("kinds of objects")
def subclass_of_tuple_with_attributes(run: Run) -> None:
    class Pair(tuple):
        pass

    pair = Pair((1, 2))
    pair.scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * pair.scale

    run.train(Model(), lambda: setattr(pair, "scale", 3.0))


@program("classes changed")
def class_of_a_helper_swapped(run: Run) -> None:
    class One:
        def get(self):
            return 1.0

    class Three:
        def get(self):
            return 3.0

    helper = One()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.get()

    run.train(Model(), lambda: setattr(helper, "__class__", Three))


@program("classes changed")
def class_of_the_model_swapped(run: Run) -> None:
    class One(Net):
        def scale(self):
            return 1.0

        def forward(self, x):
            return self.layer(x) * self.scale()

    class Three(One):
        def scale(self):
            return 3.0

    model = One()
    run.train(model, lambda: setattr(model, "__class__", Three))


@program("classes changed")
def class_of_a_submodule_swapped(run: Run) -> None:
    class Three(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 3.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x)

    model = Model()
    run.train(model, lambda: setattr(model.layer, "__class__", Three))


@program("classes changed")
def dict_of_a_helper_swapped(run: Run) -> None:
    helper = types.SimpleNamespace(scale=1.0)

    class Holder:
        pass

    holder = Holder()
    holder.__dict__ = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * holder.scale * helper.scale

    run.train(Model(), lambda: setattr(holder, "__dict__", {"scale": 3.0}))


@program("classes changed")
def bases_of_a_helper_changed(run: Run) -> None:
    class One:
        scale = 1.0

    class Three:
        scale = 3.0

    class Helper(One):
        pass

    helper = Helper()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * helper.scale

    run.train(Model(), lambda: setattr(Helper, "__bases__", (Three,)))


@program("classes changed")
def bases_of_the_model_changed(run: Run) -> None:
    class One(Net):
        def scale(self):
            return 1.0

    class Three(Net):
        def scale(self):
            return 3.0

    class Model(One):
        def forward(self, x):
            return self.layer(x) * self.scale()

    run.train(Model(), lambda: setattr(Model, "__bases__", (Three,)))


@program("classes changed")
def attribute_deleted(run: Run) -> None:
    class Base:
        scale = 3.0

    class Config(Base):
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.train(Model(), lambda: delattr(Config, "scale"))


@program("classes changed")
def attribute_deleted_and_an_error(run: Run) -> None:
    config = types.SimpleNamespace(scale=1.0)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * config.scale

    run.train(Model(), lambda: delattr(config, "scale"))


@program("classes changed")
def attribute_that_hasattr_finds_later(run: Run) -> None:
    config = types.SimpleNamespace()

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y * config.scale if hasattr(config, "scale") else y

    run.train(Model(), lambda: setattr(config, "scale", 3.0))


@program("classes changed")
def attribute_that_getattr_finds_later(run: Run) -> None:
    config = types.SimpleNamespace()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * getattr(config, "scale", 1.0)

    run.train(Model(), lambda: setattr(config, "scale", 3.0))


@program("classes changed")
def class_global_replaced(run: Run) -> None:
    class Config:
        scale = 1.0

    class Other:
        scale = 3.0

    holder = types.SimpleNamespace(kind=Config)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * holder.kind.scale

    run.train(Model(), lambda: setattr(holder, "kind", Other))


@program("classes changed")
def isinstance_changes_its_answer(run: Run) -> None:
    class Meta(type):
        def __instancecheck__(cls, other):
            return answers[0]

    answers = [False]

    class Kind(metaclass=Meta):
        pass

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y * 3 if isinstance(5, Kind) else y

    run.train(Model(), lambda: answers.__setitem__(0, True))


@program("classes changed")
def class_made_inside(run: Run) -> None:
    scales = [1.0]

    class Model(Net):
        def forward(self, x):
            class Config:
                scale = scales[0]

            return self.layer(x) * Config.scale

    run.train(Model(), lambda: scales.__setitem__(0, 3.0))


@program("objects copied")
def copied_object_changes(run: Run) -> None:
    class Config:
        def __init__(self):
            self.scale = 1.0

    config = Config()

    class Model(Net):
        def forward(self, x):
            mine = copy.copy(config)
            mine.offset = 2.0
            return self.layer(x) * mine.scale + mine.offset

    run.train(Model(), lambda: setattr(config, "scale", 3.0))


@program("objects copied")
def list_in_a_copied_object_changes(run: Run) -> None:
    class Config:
        def __init__(self):
            self.scales = [1.0]

    config = Config()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * copy.copy(config).scales[0]

    run.train(Model(), lambda: config.scales.__setitem__(0, 3.0))


@program("objects copied")
def copied_object_shares_its_list(run: Run) -> None:
    """What the copy holds is what the object holds: a write into it is seen."""

    class Config:
        def __init__(self):
            self.scales = [1.0]

    config = Config()

    class Model(Net):
        def forward(self, x):
            mine = copy.copy(config)
            mine.scales[0] *= 1.5
            return self.layer(x) * config.scales[0]

    run.train(Model())


@program("objects copied")
def object_that_counts_its_copies(run: Run) -> None:
    class Config:
        copies = 0

        def __copy__(self):
            type(self).copies += 1
            return self

    config = Config()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * copy.copy(config).copies

    run.train(Model())


@program("objects copied")
def object_that_counts_its_states(run: Run) -> None:
    class Config:
        def __init__(self):
            self.scale = 0

        def __getstate__(self):
            self.scale += 1
            return {"scale": self.scale}

    config = Config()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * copy.copy(config).scale

    run.train(Model())


@program("objects copied")
def reduction_with_a_function_that_changes(run: Run) -> None:
    state = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            return functools.reduce(lambda a, b: a * b * state["scale"], [self.layer(x), x, x])

    run.train(Model(), lambda: state.update(scale=3.0))


@program("objects copied")
def list_that_a_signature_has_as_a_default(run: Run) -> None:
    scales = [1.0]

    def scaled(x, scales=scales):
        raise NotImplementedError

    signature = inspect.signature(scaled)

    class Model(Net):
        def forward(self, x):
            bound = signature.bind(x)
            bound.apply_defaults()
            return self.layer(x) * bound.arguments["scales"][0]

    run.train(Model(), lambda: scales.__setitem__(0, 3.0))

"""Programs about torch's own state: modules, parameters, buffers and hooks that change, flags, autograd, and what a forward can ask of its tensors."""

from __future__ import annotations

import copy
import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.torch_bridge.replay_programs.running import Net, Run, descend
from tests.torch_bridge.replay_programs.table import program


@program("modules changed")
def submodule_replaced(run: Run) -> None:
    model = Net()
    run.train(model, lambda: setattr(model, "layer", nn.Linear(6, 6).to(run.device)))


@program("modules changed")
def submodule_replaced_by_an_identity(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x):
            return self.act(self.layer(x))

    model = Model()
    run.train(model, lambda: setattr(model, "act", nn.Identity()))


@program("modules changed")
def submodule_added(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList([nn.Tanh()])

        def forward(self, x):
            x = self.layer(x)
            for stage in self.stages:
                x = stage(x)
            return x

    model = Model()
    run.train(model, lambda: model.stages.append(nn.Linear(6, 6).to(run.device)))


@program("modules changed")
def submodule_removed(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    run.train(model, lambda: model.__delitem__(1))


@program("modules changed")
def submodules_in_another_order(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Linear(6, 6)})

        def forward(self, x):
            x = self.layer(x)
            for stage in self.stages.values():
                x = stage(x)
            return x

    model = Model()
    run.train(model, lambda: model.stages.update({"a": model.stages.pop("a")}))


@program("modules changed")
def setting_of_a_submodule(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.1))
    run.train(model, lambda: setattr(model[1], "negative_slope", 0.9))


@program("modules changed")
def epsilon_of_a_norm(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    run.train(model, lambda: setattr(model[1], "eps", 3.0))


@program("modules changed")
def forward_replaced_on_the_class(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x)

    run.train(Model(), lambda: setattr(Model, "forward", lambda self, x: self.layer(x) * 3.0))


@program("modules changed", careless="the new forward takes its place")
def forward_replaced_on_the_instance(run: Run) -> None:
    model = Net()
    run.train(model, lambda: setattr(model, "forward", lambda x: model.layer(x) * 3.0))


@program("modules changed")
def forward_of_a_submodule_replaced(run: Run) -> None:
    model = Net()

    class Tripled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 3.0

    run.train(model, lambda: setattr(model.layer, "forward", types.MethodType(Tripled.forward, as_kind(model.layer, Tripled))))


def as_kind(module: nn.Module, kind: type) -> nn.Module:
    module.__class__ = kind
    return module


@program("modules changed")
def forward_of_a_submodule_wrapped(run: Run) -> None:
    model = Net()
    before = model.layer.forward
    run.train(model, lambda: setattr(model.layer, "forward", lambda x: before(x) * 3.0))


@program("modules changed")
def modules_dict_written(run: Run) -> None:
    model = Net()
    run.train(model, lambda: model._modules.update(layer=nn.Linear(6, 6).to(run.device)))


@program("modules changed", careless="its key is whether the module is training")
def evaluation_mode(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y if self.training else y * 3.0

    model = Model()
    run.train(model, model.eval)


@program("modules changed")
def evaluation_mode_of_a_submodule(run: Run) -> None:
    class Inner(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if self.training else 3.0)

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(self.layer(x))

    model = Model()
    run.train(model, model.inner.eval)


@program("modules changed")
def norm_in_evaluation_mode(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    run.train(model, model[1].eval)


@program("modules changed", careless="its key is whether the module is training")
def training_toggled_every_step(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if self.training else 3.0)

    run.train(Model(), call=lambda m, x, k: m.train(k % 3 != 2)(x))


@program("parameters changed")
def parameter_replaced(run: Run) -> None:
    model = Net()
    run.train(model, lambda: setattr(model.layer, "weight", nn.Parameter(torch.eye(6).to(run.device))))


@program("parameters changed", careless="it plays on the same parameter")
def parameter_filled(run: Run) -> None:
    model = Net()

    def change():
        with torch.no_grad():
            model.layer.weight.copy_(torch.eye(6).to(run.device))

    run.train(model, change)


@program("parameters changed", careless="it plays on the same parameter")
def data_of_a_parameter_replaced(run: Run) -> None:
    model = Net()
    run.train(model, lambda: setattr(model.layer.weight, "data", torch.eye(6).to(run.device)))


@program("parameters changed", careless="it plays on the same parameter")
def state_loaded(run: Run) -> None:
    model = Net()
    other = nn.Linear(6, 6)
    run.train(model, lambda: model.layer.load_state_dict(other.state_dict()))


@program("parameters changed")
def state_loaded_by_assignment(run: Run) -> None:
    model = Net()
    other = nn.Linear(6, 6).to(run.device)
    run.train(model, lambda: model.layer.load_state_dict(other.state_dict(), assign=True))


@program("parameters changed", careless="autograd sees the flag when it plays")
def parameter_frozen(run: Run) -> None:
    model = Net()
    run.train(model, lambda: model.layer.weight.requires_grad_(False))


@program("parameters changed")
def frozen_parameter_decides(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if self.layer.bias.requires_grad else 3.0)

    model = Model()
    run.train(model, lambda: model.layer.bias.requires_grad_(False))


@program("parameters changed")
def bias_removed(run: Run) -> None:
    model = Net()
    with torch.no_grad():
        model.layer.bias.fill_(1.0)
    run.train(model, lambda: setattr(model.layer, "bias", None))


@program("parameters changed")
def weights_tied(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 6)

        def forward(self, x):
            return self.head(self.layer(x))

    model = Model()
    run.train(model, lambda: setattr(model.head, "weight", model.layer.weight))


@program("parameters changed", careless="it reads the gradient again")
def gradient_read_in_forward(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y if self.layer.weight.grad is None else y + 0.1 * self.layer.weight.grad.sum()

    run.train(Model())


@program("parameters changed")
def gradient_decides(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if self.layer.weight.grad is None else 3.0)

    def call(model, x, k):
        if k < 5:
            model.zero_grad()
        return model(x)

    run.train(Model(), call=call)


@program("parameters changed")
def version_decides(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            if self.version != self.layer.weight._version:
                self.version, self.changes = self.layer.weight._version, self.changes + 1
            return self.layer(x)

    model = Model()
    model.version, model.changes = -1, 0
    run.train(model, watch=lambda: model.changes)


@program("parameters changed")
def parameter_seen_by_its_address(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if self.layer.weight is self.known else 3.0)

    model = run.place(Model())
    model.__dict__["known"] = model.layer.weight
    run.train(model, lambda: setattr(model.layer, "weight", nn.Parameter(model.layer.weight.detach().clone())), place=False)


@program("buffers")
def buffer_rebound_in_forward(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            y = self.layer(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y + self.mean

    run.train(Model())


@program("buffers")
def buffer_replaced(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("gain", torch.ones(6))

        def forward(self, x):
            return self.layer(x) * self.gain

    model = Model()
    run.train(model, lambda: setattr(model, "gain", torch.full((6,), 3.0).to(run.device)))


@program("buffers", careless="it plays the in-place op on the same buffer")
def buffer_updated_in_place(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(6))

        def forward(self, x):
            y = self.layer(x)
            self.total.add_(y.detach().mean(0))
            return y + self.total

    run.train(Model())


@program("buffers")
def buffer_that_counts_on_the_cpu(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.steps = [torch.zeros((), dtype=torch.long)]

        def forward(self, x):
            self.steps[0] += 1
            return self.layer(x) * (1.0 if self.steps[0] < 6 else 3.0)

    model = Model()
    run.train(model, watch=lambda: model.steps[0])


@program("buffers")
def flag_in_a_buffer(run: Run) -> None:
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("ready", torch.tensor(False))

        def forward(self, x):
            y = self.layer(x)
            return y * 3.0 if self.ready else y

    model = Model()
    run.train(model, lambda: model.ready.fill_(True))


@program("buffers")
def buffer_in_another_module_rebound(run: Run) -> None:
    other = Net()
    other.register_buffer("gain", torch.ones(()))
    other.to(run.device)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * other.gain

    run.train(Model(), lambda: setattr(other, "gain", torch.tensor(3.0).to(run.device)))


@program("buffers", careless="it plays the in-place op on the new input")
def input_changed_in_place(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            x.mul_(0.5)
            return self.layer(x)

    def call(model, x, k):
        out = model(x)
        run.note(x)
        return out

    run.train(Model(), call=call)


@program("buffers")
def input_changed_in_place_by_state(run: Run) -> None:
    state = {"by": 0.5}

    class Model(Net):
        def forward(self, x):
            x.mul_(state["by"])
            return self.layer(x)

    def call(model, x, k):
        out = model(x)
        run.note(x)
        return out

    run.train(Model(), lambda: state.update(by=3.0), call=call)


@program("hooks", careless="its hooks are called around forward")
def forward_hook_on_the_model(run: Run) -> None:
    model = Net()
    run.train(model, lambda: model.register_forward_hook(lambda m, args, out: out * 3.0))


@program("hooks")
def forward_hook_inside(run: Run) -> None:
    model = Net()
    run.train(model, lambda: model.layer.register_forward_hook(lambda m, args, out: out * 3.0))


@program("hooks")
def forward_hook_inside_removed(run: Run) -> None:
    model = Net()
    handle = model.layer.register_forward_hook(lambda m, args, out: out * 3.0)
    run.train(model, handle.remove)


@program("hooks")
def forward_hook_inside_reads_state(run: Run) -> None:
    state = {"scale": 1.0}
    model = Net()
    model.layer.register_forward_hook(lambda m, args, out: out * state["scale"])
    run.train(model, lambda: state.update(scale=3.0))


@program("hooks")
def forward_hook_inside_counts(run: Run) -> None:
    calls = []
    model = Net()
    model.layer.register_forward_hook(lambda m, args, out: calls.append(1))
    run.train(model, watch=lambda: len(calls))


@program("hooks")
def forward_hook_inside_keeps_the_output(run: Run) -> None:
    kept = {}
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model[0].register_forward_hook(lambda m, args, out: kept.update(out=out))
    run.train(model, call=lambda m, x, k: [m(x), kept["out"]])


@program("hooks")
def forward_pre_hook_inside(run: Run) -> None:
    model = Net()
    run.train(model, lambda: model.layer.register_forward_pre_hook(lambda m, args: (args[0] * 3.0,)))


@program("hooks")
def full_backward_hook_inside(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    run.train(model, lambda: model[1].register_full_backward_hook(lambda m, into, out: tuple(g * 3.0 for g in into)))


@program("hooks")
def hook_on_all_modules(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def change():
        handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: out * 3.0 if isinstance(m, nn.Tanh) else out)
        run.cleanup.callback(handle.remove)

    run.train(model, change)


@program("hooks", careless="autograd calls hooks of parameters")
def hook_on_a_parameter(run: Run) -> None:
    model = Net()
    run.train(model, lambda: model.layer.weight.register_hook(lambda g: g * 3.0))


@program("hooks", careless="autograd calls hooks of parameters")
def hook_after_a_gradient_is_accumulated(run: Run) -> None:
    model, calls = Net(), []
    run.train(model, lambda: model.layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1)), watch=lambda: len(calls))


@program("hooks", careless="the hook is registered again when it plays, with the same function")
def hook_put_on_a_tensor_inside(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            y.register_hook(lambda g: g * 3.0)
            return y

    run.train(Model())


@program("hooks", careless="the hook is registered again when it plays, with the same function")
def hook_on_a_tensor_inside_reads_state(run: Run) -> None:
    state = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            y.register_hook(lambda g: g * state["scale"])
            return y

    run.train(Model(), lambda: state.update(scale=3.0))


@program("hooks", careless="the hook is registered again when it plays, with the same function")
def hook_on_a_tensor_inside_keeps_gradients(run: Run) -> None:
    kept = []

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            y.register_hook(kept.append)
            return y.tanh()

    run.train(Model(), watch=lambda: [len(kept), kept[-1]])


@program("flags")
def no_grad_inside(run: Run) -> None:
    state = {"frozen": False}

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 6)

        def forward(self, x):
            with torch.set_grad_enabled(not state["frozen"]):
                y = self.layer(x)
            return self.head(y)

    run.train(Model(), lambda: state.update(frozen=True))


@program("flags", careless="its key is whether gradients are enabled")
def gradients_enabled_decides(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if torch.is_grad_enabled() else 3.0)

    def call(model, x, k):
        with torch.no_grad():
            run.note(model(x))
        return model(x)

    run.train(Model(), call=call)


@program("flags")
def default_dtype(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if torch.get_default_dtype() == torch.float32 else 3.0)

    run.train(Model(), lambda: torch.set_default_dtype(torch.float64), call=lambda m, x, k: m(x.float()))


@program("flags")
def deterministic_algorithms(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if torch.are_deterministic_algorithms_enabled() else 1.0)

    run.train(Model(), lambda: torch.use_deterministic_algorithms(True))


@program("flags")
def precision_of_matrix_products(run: Run) -> None:
    before = torch.get_float32_matmul_precision()
    run.cleanup.callback(torch.set_float32_matmul_precision, before)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if torch.get_float32_matmul_precision() != before else 1.0)

    run.train(Model(), lambda: torch.set_float32_matmul_precision("high"))


@program("flags")
def number_of_threads_of_torch(run: Run) -> None:
    before = torch.get_num_threads()
    run.cleanup.callback(torch.set_num_threads, before)

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if torch.get_num_threads() == before else 3.0)

    run.train(Model(), lambda: torch.set_num_threads(before + 1))


@program("flags")
def autocast_decides(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            scale = 3.0 if torch.is_autocast_enabled(run.device) else 1.0
            with torch.autocast(run.device, enabled=False):
                return self.layer(x) * scale

    def call(model, x, k):
        with torch.autocast(run.device, torch.bfloat16, enabled=k >= 5):
            return model(x)

    run.train(Model(), call=call)


@program("flags")
def anomaly_mode(run: Run) -> None:
    run.cleanup.callback(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled())

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if torch.is_anomaly_enabled() else 1.0)

    run.train(Model(), lambda: torch.autograd.set_detect_anomaly(True))


@program("flags", careless="autograd packs tensors when it plays")
def saved_tensor_hooks_around(run: Run) -> None:
    packed = []

    def pack(t):
        packed.append(1)
        return t

    class Model(Net):
        def forward(self, x):
            return self.layer(x).tanh()

    def call(model, x, k):
        if k < 5:
            return model(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return model(x)

    run.train(Model(), call=call, watch=lambda: bool(packed))


@program("asked of tensors")
def grad_fn_of_the_input(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if x.grad_fn is None else 3.0)

    run.train(Model(), call=lambda m, x, k: m(x if k < 5 else x.requires_grad_() * 1.0))


@program("asked of tensors", careless="the answer never changes")
def grad_fn_of_the_input_from_the_start(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if x.grad_fn is None else 3.0)

    run.train(Model(), call=lambda m, x, k: m(x.requires_grad_() * 1.0))


@program("asked of tensors", careless="the answer never changes")
def leaf_asked_inside(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y * (1.0 if x.is_leaf else 2.0) * (1.0 if y.is_leaf else 3.0)

    run.train(Model(), call=lambda m, x, k: m(x.requires_grad_() * 1.0))


@program("asked of tensors", careless="the answer never changes")
def grad_fn_name_inside(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = (x * 2).tanh()
            return self.layer(x) * (1.0 if y.grad_fn is None else 3.0)

    run.train(Model(), call=lambda m, x, k: m(x.requires_grad_() * 1.0))


@program("asked of tensors")
def requires_grad_of_the_input(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if x.requires_grad else 1.0)

    run.train(Model(), call=lambda m, x, k: m(x.requires_grad_(k >= 5)))


@program("asked of tensors")
def version_of_the_input(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if x._version == 0 else 3.0)

    def call(model, x, k):
        x = x.clone()
        return model(x.mul_(1.0) if k >= 5 else x)

    run.train(Model(), call=call)


@program("asked of tensors")
def input_is_the_same_tensor(run: Run) -> None:
    kept = {}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            if kept.get("x") is x:
                y = y * 3.0
            kept["x"] = x
            return y

    fixed = {}

    def call(model, x, k):
        return model(x if k < 5 else fixed.setdefault("x", x))

    run.train(Model(), call=call)


@program("asked of tensors")
def class_of_the_input(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (3.0 if isinstance(x, nn.Parameter) else 1.0)

    run.train(Model(), call=lambda m, x, k: m(x if k < 5 else nn.Parameter(x)))


@program("asked of tensors")
def attribute_on_the_input_decides(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * getattr(x, "gain", 1.0)

    def call(model, x, k):
        if k >= 5:
            x.gain = 3.0
        return model(x)

    run.train(Model(), call=call)


@program("asked of tensors")
def strides_of_the_input(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * (1.0 if x.is_contiguous() else 3.0)

    run.train(Model(), call=lambda m, x, k: m(x if k < 5 else x.t().contiguous().t()))


@program("asked of tensors", careless="its key has the shapes")
def shape_of_the_input(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            return self.layer(x) * x.shape[0]

    run.train(Model(), call=lambda m, x, k: m(x if k % 3 != 2 else x[:2]))


@program("asked of tensors")
def value_of_the_input_decides(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y * 3.0 if x.sum() > 0 else y

    run.train(Model(), call=lambda m, x, k: m(x - 5.0 if k < 5 else x + 5.0))


@program("asked of tensors")
def value_inside_decides(run: Run) -> None:
    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            if y.abs().max().item() > 3.0:
                y = y * 0.1
            return y

    run.train(Model(), call=lambda m, x, k: m(x if k < 5 else x * 20.0))


@program("asked of tensors")
def number_among_the_arguments(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x, gain):
            return self.layer(x) * gain * Config.scale

    run.train(Model(), lambda: setattr(Config, "scale", 3.0), call=lambda m, x, k: m(x, gain=1.0 + k % 2))


@program("asked of tensors")
def object_among_the_arguments(run: Run) -> None:
    class Options:
        pass

    options = Options()
    options.inner = types.SimpleNamespace(scale=1.0)

    class Model(Net):
        def forward(self, x, options):
            return self.layer(x) * options.inner.scale

    run.train(Model(), lambda: setattr(options.inner, "scale", 3.0), call=lambda m, x, k: m(x, options))


@program("asked of tensors")
def function_among_the_arguments(run: Run) -> None:
    state = {"scale": 1.0}

    class Model(Net):
        def forward(self, x, act):
            return act(self.layer(x))

    def act(y):
        return y * state["scale"]

    run.train(Model(), lambda: state.update(scale=3.0), call=lambda m, x, k: m(x, act))


@program("asked of tensors", careless="its key has the structure of the arguments")
def dict_among_the_arguments(run: Run) -> None:
    class Model(Net):
        def forward(self, batch):
            y = self.layer(batch["x"])
            return y if batch["extra"] is None else y + batch["extra"]

    run.train(Model(), call=lambda m, x, k: m({"x": x, "extra": None if k < 5 else x * 2, "name": "a"}))


@program("autograd")
def backward_of_a_function_reads_a_class(run: Run) -> None:
    class Config:
        scale = 1.0

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2 * Config.scale

    class Model(Net):
        def forward(self, x):
            return Scaled.apply(self.layer(x))

    run.train(Model(), lambda: setattr(Config, "scale", 3.0))


@program("autograd", form="script")
def backward_of_a_function_reads_a_global(run: Run) -> None:
    SCALE = 1.0

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2 * SCALE

    class Model(Net):
        def forward(self, x):
            return Scaled.apply(self.layer(x))

    def change():
        global SCALE
        SCALE = 3.0

    run.train(Model(), change)


@program("autograd")
def backward_of_a_function_reads_a_deep_attribute(run: Run) -> None:
    ARGS = types.SimpleNamespace(a={"b": [types.SimpleNamespace(scale=1.0)]})

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.args = ARGS
            return y * 2

        @staticmethod
        def backward(ctx, g):
            return g * ctx.args.a["b"][0].scale

    class Model(Net):
        def forward(self, x):
            return Scaled.apply(self.layer(x))

    run.train(Model(), lambda: setattr(ARGS.a["b"][0], "scale", 3.0))


@program("autograd")
def backward_of_a_function_counts(run: Run) -> None:
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y * 2

        @staticmethod
        def backward(ctx, g):
            calls.append(1)
            return g * 2

    class Model(Net):
        def forward(self, x):
            return Counted.apply(self.layer(x))

    run.train(Model(), watch=lambda: len(calls))


@program("autograd")
def backward_of_a_function_prints(run: Run) -> None:
    class Loud(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y * 2

        @staticmethod
        def backward(ctx, g):
            print("backward")
            return g * 2

    class Model(Net):
        def forward(self, x):
            return Loud.apply(self.layer(x))

    run.train(Model())


@program("autograd")
def backward_of_a_function_replaced(run: Run) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    class Model(Net):
        def forward(self, x):
            return Scaled.apply(self.layer(x))

    run.train(Model(), lambda: setattr(Scaled, "backward", staticmethod(lambda ctx, g: g * 6)))


@program("autograd")
def forward_of_a_function_reads_state(run: Run) -> None:
    state = {"scale": 1.0}

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.scale = state["scale"]
            return y * ctx.scale

        @staticmethod
        def backward(ctx, g):
            return g * ctx.scale

    class Model(Net):
        def forward(self, x):
            return Scaled.apply(self.layer(x))

    run.train(Model(), lambda: state.update(scale=3.0))


@program("autograd")
def state_changes_between_forward_and_backward(run: Run) -> None:
    state = {"scale": 1.0}

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y * 2

        @staticmethod
        def backward(ctx, g):
            return g * state["scale"]

    class Model(Net):
        def forward(self, x):
            return Scaled.apply(self.layer(x))

    def call(model, x, k):
        state["scale"] = 1.0
        out = model(x)
        if k >= 5:
            state["scale"] = 3.0
        return out

    run.train(Model(), call=call)


@program("autograd")
def checkpoint_reads_state(run: Run) -> None:
    state = types.SimpleNamespace(a={"scale": 1.0})

    class Model(Net):
        def inner(self, x):
            return (self.layer(x) * state.a["scale"]).tanh()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    run.train(Model(), lambda: state.a.update(scale=3.0))


@program("autograd")
def checkpoint_counts_its_recomputations(run: Run) -> None:
    calls = []

    class Model(Net):
        def inner(self, x):
            calls.append(1)
            return self.layer(x).tanh()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    run.train(Model(), watch=lambda: len(calls))


@program("autograd")
def detached_by_state(run: Run) -> None:
    state = {"detach": False}

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 6)

        def forward(self, x):
            y = self.layer(x)
            return self.head(y.detach() if state["detach"] else y)

    run.train(Model(), lambda: state.update(detach=True))


@program("autograd")
def gradient_accumulation(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    model = run.place(Model())
    for k in range(12):
        if k == 9:
            Config.scale = 3.0
        loss = model(run.batch(k)).square().mean()
        loss.backward()
        run.note(loss)
        if k % 2:
            run.note(model.layer.weight.grad)
            descend(model)
            model.zero_grad()
            run.sync()


@program("autograd")
def backward_twice(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    model = run.place(Model())
    for k in range(8):
        if k == 5:
            Config.scale = 3.0
        model.zero_grad()
        loss = model(run.batch(k)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        run.note(loss, model.layer.weight.grad)
        descend(model)
        run.sync()


@program("autograd")
def calls_without_gradients(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    def call(model, x, k):
        with torch.no_grad():
            return model(x)

    run.train(Model(), lambda: setattr(Config, "scale", 3.0), call=call, backward=False)


@program("autograd")
def gradient_inside_forward(run: Run) -> None:
    state = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)
            return self.layer(x) + g * state["scale"]

    run.train(Model(), lambda: state.update(scale=3.0))


@program("autograd", careless="it sets requires_grad again")
def returns_a_leaf_that_it_makes(run: Run) -> None:
    """Its gradient is there after the backward pass."""
    last = []

    class Model(Net):
        def forward(self, x):
            x = x * 2.0
            x.requires_grad = True
            return x, self.layer(x)

    def call(model, x, k):
        last[:] = model(x)
        return last[1]

    run.train(Model(), call=call, watch=lambda: [(t.is_leaf, t.requires_grad, t.grad if t.is_leaf else None) for t in last])


@program("autograd", careless="it sets requires_grad again")
def sets_requires_grad_of_its_argument(run: Run) -> None:
    last = []

    class Model(Net):
        def forward(self, x):
            x.requires_grad = True
            return self.layer(x)

    def call(model, x, k):
        last[:] = [x]
        return model(x)

    run.train(Model(), call=call, watch=lambda: [(t.is_leaf, t.requires_grad, t.grad) for t in last])


@program("composition")
def nested_models_that_are_both_placed(run: Run) -> None:
    class Config:
        scale = 1.0

    class Inner(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    class Outer(Net):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(self.layer(x)) + 1

    inner = run.place(Inner())
    run.train(Outer(inner), lambda: setattr(Config, "scale", 3.0))


@program("composition")
def one_model_called_by_another(run: Run) -> None:
    state = {"scale": 1.0}

    class Teacher(Net):
        def forward(self, x):
            return self.layer(x) * state["scale"]

    teacher = run.place(Teacher())

    class Student(Net):
        def forward(self, x):
            with torch.no_grad():
                target = teacher(x)
            return self.layer(x) - target

    run.train(Student(), lambda: state.update(scale=3.0))


@program("composition")
def same_model_twice_in_a_step(run: Run) -> None:
    state = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * state["scale"]

    def call(model, x, k):
        first = model(x)
        if k >= 5:
            state["scale"] = 3.0
        second = model(x * 2)
        state["scale"] = 1.0
        return [first, second]

    run.train(Model(), call=call)


@program("composition")
def several_outputs(run: Run) -> None:
    state = types.SimpleNamespace(n=2)

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return tuple(y * (i + 1) for i in range(state.n))

    run.train(Model(), lambda: setattr(state, "n", 4))


@program("composition")
def same_tensor_twice_in_the_result(run: Run) -> None:
    state = {"same": True}

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return y, (y if state["same"] else y * 3)

    same = []
    run.train(Model(), lambda: state.update(same=False), call=lambda m, x, k: (lambda out: same.append(out[0] is out[1]) or out)(m(x)))
    run.note(same)


@program("composition")
def input_returned(run: Run) -> None:
    state = {"skip": False}

    class Model(Net):
        def forward(self, x):
            return x if state["skip"] else self.layer(x)

    same = []

    def call(model, x, k):
        out = model(x)
        same.append(out is x)
        return out + model.layer.bias

    run.train(Model(), lambda: state.update(skip=True), call=call)
    run.note(same)


@program("composition")
def none_in_the_result(run: Run) -> None:
    state = {"aux": None}

    class Model(Net):
        def forward(self, x):
            return self.layer(x), state["aux"]

    outs = []
    run.train(Model(), lambda: state.update(aux=5), call=lambda m, x, k: outs.append(m(x)) or outs[-1][0])
    run.note([out[1] for out in outs])


@program("composition")
def functional_call(run: Run) -> None:
    state = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * state["scale"]

    def call(model, x, k):
        changed = {name: p * 0.5 for name, p in model.named_parameters()}
        return torch.func.functional_call(model, changed, (x,))

    run.train(Model(), lambda: state.update(scale=3.0), call=call)


@program("composition")
def functional_call_inside(run: Run) -> None:
    state = {"scale": 0.5}
    inner = nn.Linear(6, 6).to(run.device)

    class Model(Net):
        def forward(self, x):
            changed = {"weight": self.layer.weight * state["scale"], "bias": self.layer.bias}
            return torch.func.functional_call(inner, changed, (x,))

    run.train(Model(), lambda: state.update(scale=3.0))


@program("composition")
def gradients_by_torch_func(run: Run) -> None:
    state = {"scale": 1.0}

    class Model(Net):
        def forward(self, x):
            g = torch.func.grad(lambda t: (self.layer(t) * state["scale"]).square().sum())(x)
            return self.layer(x) + g

    run.train(Model(), lambda: state.update(scale=3.0))


@program("composition")
def parametrization_reads_state(run: Run) -> None:
    state = {"scale": 1.0}

    class Scaled(nn.Module):
        def forward(self, w):
            return w * state["scale"]

    model = Net()
    parametrize.register_parametrization(model.layer, "weight", Scaled())
    run.train(model, lambda: state.update(scale=3.0))


@program("composition")
def parametrization_added(run: Run) -> None:
    class Scaled(nn.Module):
        def forward(self, w):
            return w * 3.0

    model = Net()
    run.train(model, lambda: parametrize.register_parametrization(model.layer, "weight", Scaled()))


@program("composition")
def weight_norm_removed(run: Run) -> None:
    model = Net()
    parametrizations.weight_norm(model.layer)

    def change():
        parametrize.remove_parametrizations(model.layer, "weight")
        with torch.no_grad():
            model.layer.weight.mul_(3.0)

    run.train(model, change)


@program("composition")
def copy_of_a_model(run: Run) -> None:
    class Model(Net):
        scale = 1.0

        def forward(self, x):
            return self.layer(x) * self.scale

    model = run.train(Model())
    other = copy.deepcopy(model)
    other.scale = 3.0
    run.train(other, lambda: setattr(other, "scale", 5.0), place=False)
    run.train(model, lambda: setattr(Model, "scale", 2.0), place=False)


@program("composition")
def changed_there_and_back(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    def call(model, x, k):
        Config.scale = {5: 3.0, 6: 3.0, 7: 1.0, 8: 3.0}.get(k, 1.0)
        return model(x)

    run.train(Model(), call=call, steps=10)


@program("composition")
def changed_every_step(run: Run) -> None:
    class Schedule:
        value = 1.0

        def step(self):
            self.value *= 0.9

    schedule = Schedule()

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * schedule.value

    run.train(Model(), watch=schedule.step)


@program("composition")
def changed_before_every_other_step(run: Run) -> None:
    flags = types.SimpleNamespace(inner=[False])

    class Model(Net):
        def forward(self, x):
            y = self.layer(x)
            return F.relu(y) if flags.inner[0] else y

    def call(model, x, k):
        flags.inner[0] = bool(k % 2)
        return model(x)

    run.train(Model(), call=call, steps=10)


@program("composition")
def changed_long_after(run: Run) -> None:
    class Config:
        scale = 1.0

    class Model(Net):
        def forward(self, x):
            return self.layer(x) * Config.scale

    run.train(Model(), lambda: setattr(Config, "scale", 3.0), steps=42, at=39)

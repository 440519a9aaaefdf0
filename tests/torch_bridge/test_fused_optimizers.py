"""A plain `torch.optim` optimizer on xla parameters: one recorded op, torch's numbers, and nothing else that a script could see."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bridge
from tests import quick
from torch_bridge import metrics
from torch_bridge.optimizers import fused_step
from torch_bridge.recorder import dispatch
from torch_bridge.runtime import executor

torch_bridge.register()

STEPS = 4
Make = Callable[[Any], optim.Optimizer]


@pytest.fixture(autouse=True, scope="module")
def compile_fast() -> Iterator[None]:
    """Both runs are compiled alike, and only their equality counts."""
    with quick.compiling():
        yield


def parameters(dtype: torch.dtype = torch.float32, device: str = "xla") -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, dtype=dtype).to(device)) for size in ((3, 2), (4,), (1,))]


def set_grads(params: list[Any], k: int) -> None:
    """Gradients of step k: the second parameter has none in step 1, the last none before step 2."""
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * k + i)).to(p.dtype)
        p.grad = None if (i, k) in ((1, 1), (2, 0), (2, 1)) else g.to(p.device)


def nodes_of(run: Callable[[], Any]) -> list[str]:
    """Names of the ops that are recorded meanwhile."""
    start = len(dispatch.STATE.session.current.nodes)
    run()
    return [str(node[0].op) for node in dispatch.STATE.session.current.nodes[start:]]


def only_one_op(run: Callable[[], Any]) -> bool:
    """Whether a step records the fused op and no arithmetic."""
    found = nodes_of(run)
    assert found
    return all(name.startswith("torch_bridge.optimizer_step") or "full" in name for name in found)


def train(make: Make, dtype: torch.dtype = torch.float32, device: str = "xla") -> tuple[list[Any], dict[str, Any]]:
    """Parameters after each step, and the state at the end."""
    params = parameters(dtype, device)
    optimizer = make(params)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    found = []
    for k in range(STEPS):
        set_grads(params, k)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        executor.sync()
        found.append([p.detach().cpu().clone() for p in params])
    return found, optimizer.state_dict()


CASES: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
    "sgd-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, maximize=True),
    "sgd-nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "adamw-groups": lambda p: optim.AdamW([{"params": p[:1], "weight_decay": 0.0}, {"params": p[1:], "lr": 0.2, "name": "rest"}], lr=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1, weight_decay=0.1),
}


@pytest.mark.core(keep=3)
@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_op_by_op_recording(make: Make, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit with the same compiler options, layout of the state and all; on the CPU up to rounding."""
    found, state = train(make, dtype)
    monkeypatch.setenv("NXD_JAX_FUSED_OPTIMIZERS", "0")
    expected, state_op_by_op = train(make, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    _same_state(state, state_op_by_op)


def _same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for k, held in a["state"].items():
        assert list(held) == list(b["state"][k])
        for name, t in held.items():
            other = b["state"][k][name]
            assert (type(t), t.dtype, t.device, t.shape) == (type(other), other.dtype, other.device, other.shape), name
            assert torch.equal(t.cpu(), other.cpu()), name


@pytest.mark.core(keep=1)
@pytest.mark.filterwarnings("ignore:XLA_USE_BF16 is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["sgd-nesterov", "adamw", "adagrad", "adafactor"])
def test_numbers_where_every_result_is_rounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA_USE_BF16: what lies between two operations of torch is rounded too."""
    monkeypatch.setenv("XLA_USE_BF16", "1")
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0")
    found, _ = train(CASES[name])
    monkeypatch.setenv("NXD_JAX_FUSED_OPTIMIZERS", "0")
    expected, _ = train(CASES[name])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_numbers_of_the_cpu() -> None:
    for make in (CASES["adamw-groups"], CASES["sgd-nesterov"]):
        torch.testing.assert_close(train(make)[0], train(make, device="cpu")[0])


# -- it is the script's own optimizer -------------------------------------------------------------------


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11
def test_everything_around_the_step_is_torchs() -> None:
    """The class, hooks with their arguments, the profiler's hook, closures, a scheduler that counts steps."""
    params = parameters()
    optimizer = optim.AdamW(params, lr=0.1)
    assert type(optimizer) is optim.AdamW and type(optimizer).__mro__[1] is optim.Adam
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(f"before {len(kwargs)}"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(f"after {o.state[params[0]]['step'].item():.0f}"))
    optimizer._optimizer_step_code = lambda: calls.append("profiler")  # type: ignore[method-assign]
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> float:
        assert torch.is_grad_enabled()
        set_grads(params, 2)
        return 7.0

    assert only_one_op(lambda: calls.append(str(optimizer.step(closure=closure))))
    schedule.step()  # it would warn that optimizer.step() was overridden or not called
    assert calls == ["before 1", "profiler", "after 1", "7.0"] and optimizer.param_groups[0]["lr"] == 0.05
    assert type(optimizer.state[params[0]]["step"]) is torch.Tensor and optimizer.state[params[0]]["step"].is_cpu
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.name for event in profile.events()}


def test_a_learning_rate_and_momentum_that_change_do_not_recompile() -> None:
    params = parameters()
    optimizer = optim.AdamW(params, lr=0.1)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
    metrics.clear_counters()
    for _ in range(STEPS):
        set_grads(params, 2)
        executor.sync()
        optimizer.step()
        schedule.step()
        executor.sync()
    assert metrics.COUNTERS.get("UncachedCompile", 0) <= 2  # one for the gradients' copies, one for the step


def test_state_that_changes() -> None:
    """load_state_dict, deleted and replaced state, a new group, a changed one, frozen parameters: as with CPU parameters."""

    def run(device: str) -> list[Any]:
        params = parameters(device=device)
        optimizer = optim.Adam(params[:2], lr=0.1)
        for k, change in enumerate((None, "load", "delete", "replace", "add", "amsgrad", "betas", "in place")):
            set_grads(params, 2)
            if change == "load":
                kept = copy.deepcopy(optimizer.state_dict())
                kept["state"][0]["step"] += 5
                optimizer.load_state_dict(kept)
            elif change == "delete":
                del optimizer.state[params[0]]
            elif change == "replace":
                optimizer.state[params[1]]["exp_avg"] = torch.ones(4).to(device)
            elif change == "add":
                optimizer.add_param_group({"params": params[2:], "weight_decay": 0.1})
            elif change == "amsgrad":
                optimizer.state.clear()
                optimizer.param_groups[0]["amsgrad"] = True
            elif change == "betas":
                optimizer.param_groups[0]["betas"] = (0.5, 0.6)
                optimizer.param_groups[0]["params"].pop()
            elif change == "in place":
                optimizer.state[params[0]]["step"].fill_(40)
                params[0].grad = None
            optimizer.step()
            assert k < 7 or optimizer.state[params[2]]["step"] == 3
        return [[p.detach().cpu() for p in params], [[v.cpu() for v in s.values()] for s in optimizer.state.values()]]

    torch.testing.assert_close(run("xla"), run("cpu"))


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
def test_saving() -> None:
    """Pickle, deepcopy and torch.save see a torch optimizer."""
    params = parameters()
    optimizer = optim.AdamW(params, lr=0.1)
    set_grads(params, 2)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    twin = copy.deepcopy(optimizer)
    assert type(twin) is optim.AdamW
    set_grads(twin.param_groups[0]["params"], 2)
    assert only_one_op(twin.step)
    twin.step()
    assert twin.state_dict()["state"][0]["step"] == 3 and optimizer.state_dict()["state"][0]["step"] == 1


def test_versions_move() -> None:
    """A weight that a backward pass still needs must not change unnoticed."""
    (p,) = parameters()[:1]
    optimizer = optim.SGD([p], lr=0.1, momentum=0.9)
    loss = (p * p).sum()
    set_grads([p], 2)
    optimizer.step()
    version = optimizer.state[p]["momentum_buffer"]._version
    optimizer.step()
    assert optimizer.state[p]["momentum_buffer"]._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- what is left to torch ------------------------------------------------------------------------------


class _OwnStep(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _OwnState(optim.AdamW):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **kwargs or {})


LEFT: dict[str, Make] = {
    "subclass-step": lambda p: _OwnStep(p, lr=0.1),
    "subclass-state": lambda p: _OwnState(p, lr=0.1),
    "foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "no-foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=False),
    "fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "differentiable": lambda p: optim.SGD(p, lr=0.1, differentiable=False, foreach=False),
    "tensor-lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.1)),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT.keys())
def test_left_to_torch(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    set_grads(params, 2)
    assert not only_one_op(optimizer.step)


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
def test_switch_and_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = optim.AdamW(params, lr=0.1)
    set_grads(params, 2)
    optimizer.step()  # torch 2.11 would make its count of steps on xla
    with torch.device("xla"):  # a mode of torch's that follows nothing
        assert only_one_op(optimizer.step)
    with _Counter() as counter:
        optimizer.step()
    assert any("addcdiv_" in op for op in counter.ops)
    with torch.autocast("xla", dtype=torch.bfloat16):
        assert not only_one_op(optimizer.step)
    monkeypatch.setenv("NXD_JAX_FUSED_OPTIMIZERS", "0")
    assert not only_one_op(optimizer.step)
    monkeypatch.setenv("NXD_JAX_FUSED_OPTIMIZERS", "off")
    assert not only_one_op(optimizer.step)
    monkeypatch.setenv("NXD_JAX_FUSED_OPTIMIZERS", "1")
    assert only_one_op(optimizer.step)
    counter_on_xla = optimizer.state[params[0]]["step"] = optimizer.state[params[0]]["step"].to("xla")
    optimizer.step()  # torch asks for its value
    assert counter_on_xla.item() == 8


@pytest.mark.parametrize(
    "what", ["overlapping parameters", "a gradient that is a state", "one counter for two", "a state of another dtype"]
)
def test_memory_that_is_shared(what: str) -> None:
    """One after the other, as torch does it."""

    def run(device: str) -> list[torch.Tensor]:
        base = torch.arange(6.0).to(device)
        params = [nn.Parameter(base[:4]), nn.Parameter(base[2:] if what == "overlapping parameters" else base[4:].clone())]
        optimizer = optim.SGD(params, lr=0.1, momentum=0.9) if what == "a gradient that is a state" else optim.Adam(params, lr=0.1)
        for k in range(3):
            for p in params:
                p.grad = torch.ones_like(p) * (k + 1)
            if k and what == "a gradient that is a state":
                params[0].grad = optimizer.state[params[0]]["momentum_buffer"]
            if k and what == "one counter for two":
                optimizer.state[params[1]]["step"] = optimizer.state[params[0]]["step"]
            optimizer.step()
        return [base.cpu(), *[p.detach().cpu() for p in params]]

    if what == "a state of another dtype":
        params = parameters()[:1]
        optimizer = optim.Adam(params)
        set_grads(params, 2)
        optimizer.step()
        optimizer.state[params[0]]["exp_avg"] = torch.zeros(3, 2, dtype=torch.bfloat16, device="xla")
        with pytest.raises(RuntimeError, match="dtype"):
            optimizer.step()
    else:
        torch.testing.assert_close(run("xla"), run("cpu"))


def test_parameters_on_two_devices() -> None:
    """torch's own step, which takes them one by one."""
    params = [nn.Parameter(torch.ones(2, device="xla")), nn.Parameter(torch.ones(2))]
    optimizer = optim.AdamW(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(params[0].detach().cpu(), params[1].detach())


def test_a_gradient_scaler() -> None:
    """`torch.amp.GradScaler` on the CPU's inf check: steps are skipped and counted as ever."""
    params = parameters()[:1]
    optimizer = optim.AdamW(params, lr=0.1)
    scaler = torch.amp.GradScaler("xla", init_scale=4.0)  # type: ignore[attr-defined]
    for value in (1.0, float("inf"), 2.0):
        params[0].grad = torch.full((3, 2), value, device="xla")
        scaler.scale(torch.ones((), device="xla"))
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[params[0]]["step"] == 2


def test_adafactor_on_parts_in_torchs_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_bridge.optimizers import param_partition

    (p,) = parameters()[:1]
    param_partition.mark(p, param_partition.Divided((6, 2), (param_partition.Cut(0, "0,1", 1.0),)))
    optimizer = optim.Adafactor([p])
    set_grads([p], 2)
    monkeypatch.setenv("NXD_JAX_FUSED_OPTIMIZERS", "0")
    assert "second moments of whole matrices" in str(fused_step.why_whole(optim.Adafactor))
    with pytest.raises(NotImplementedError, match=r"part \(of shape \[3, 2\]\).*NXD_JAX_FUSED_OPTIMIZERS=0"):
        optimizer.step()
    monkeypatch.delenv("NXD_JAX_FUSED_OPTIMIZERS")
    assert fused_step.why_whole(optim.Adafactor) is None and fused_step.why_whole(_OwnStep) is None


_EARLY = """
import torch
p = torch.nn.Parameter(torch.ones(2))
early = torch.optim.AdamW([p], lr=0.1)  # torch puts its hooks around the class's step, before xla is there
hooked = torch.optim.AdamW.step
import torch_bridge
torch_bridge.register()
torch_bridge.register()
assert torch.optim.AdamW.step is not hooked and torch.optim.AdamW.step.hooked
p.grad = torch.ones(2)
early.step()
import sys
assert "jax" not in sys.modules and early.state[p]["step"] == 1
q = torch.nn.Parameter(torch.ones(2, device="xla"))
calls = []
late = torch.optim.AdamW([q], lr=0.1)
late.register_step_pre_hook(lambda *_: calls.append(1))
q.grad = torch.ones(2, device="xla")
late.step()
from torch_bridge.recorder import dispatch
assert "optimizer_step" in str(dispatch.STATE.session.current.nodes) and calls == [1]
torch.testing.assert_close(q.detach().cpu(), p.detach())
compiled = torch.compile(early.step, backend="eager")  # wraps methods of torch's optimizer classes
compiled()
assert early.state[p]["step"] == 2
late.step()
assert "optimizer_step" in str(dispatch.STATE.session.current.nodes)
torch.testing.assert_close(q.detach().cpu(), p.detach())
"""


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
def test_optimizers_made_before_the_device() -> None:
    import os

    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", _EARLY], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""torch's optimizers whose step is one recorded op, with torch's numbers: SGD, Adam, AdamW, Adagrad and Adafactor; and which optimizers may see parts only.

`fused(torch.optim.AdamW)` is a subclass that keeps torch's state (`step` stays on the CPU, so a program has no input for each) and hands a group's
update to `optimizer_ops`. Options that say how torch should do it (foreach, fused, capturable, differentiable) and learning rates that are tensors leave
the step to torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import optim

from torch_bridge import divided

_CHOICES = ("foreach", "fused", "capturable", "differentiable")
Group = dict[str, Any]


def _optimizer_ops() -> Any:
    import torch_bridge.recorder  # noqa: F401  # brings JAX up
    from torch_bridge import optimizer_ops

    return optimizer_ops


class Update(NamedTuple):
    """One recorded op. options: a text, or (for Adafactor) flags that are still to be joined with what parameters are parts of."""

    rule: str
    params: list[torch.Tensor]
    states: list[list[torch.Tensor]]
    numbers: list[float]
    flags: set[str]

    def record(self) -> None:
        optimizer_ops = _optimizer_ops()
        grads = [p.grad for p in self.params if p.grad is not None]
        options = divided.text(self.flags, self.params) if self.rule == "adafactor" else ",".join(sorted(self.flags))
        optimizer_ops.update(self.rule, self.params, grads, self.states, self.numbers, options)


def fused(optimizer_class: Any) -> Any:
    """The class with a step that is recorded as one op, if it steps as one of torch's that have it; else the class itself."""
    plan = _plan_of(optimizer_class)
    if plan is None or _is_fused(optimizer_class):
        return optimizer_class
    found = _VARIANTS.get(optimizer_class)
    if found is None:
        members = {"_plan": staticmethod(plan), "__module__": optimizer_class.__module__, "__doc__": optimizer_class.__doc__}
        found = _VARIANTS[optimizer_class] = type(optimizer_class.__name__, (_Fused, optimizer_class), members)
    return found


class _Fused:
    """Placed before an optimizer class: steps with one recorded op for each group where that is possible."""

    param_groups: list[Group]
    _plan: Callable[[Any, Group], Iterator[Update]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns what `closure`, which computes the loss anew, returns."""
        if not all(_plain(group) for group in self.param_groups) or getattr(self, "grad_scale", None) is not None:
            return self._torch_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for update in self._plan(self, group):
                update.record()
        return loss

    def _torch_step(self, closure: Callable[[], Any] | None) -> Any:
        """torch's own; its wrapper for step hooks is already around ours."""
        own = super().step  # type: ignore[misc]
        return own.__wrapped__(self, closure) if getattr(own, "hooked", False) else own(closure)


_VARIANTS: dict[type, type] = {}


def _is_fused(optimizer_class: Any) -> bool:
    return inspect.isclass(optimizer_class) and issubclass(optimizer_class, _Fused)


def _plain(group: Group) -> bool:
    """Whether a group's step is what the rules compute."""
    numbers = [group["lr"], *group.get("betas", ())]
    if any(group.get(name) for name in _CHOICES) or group.get("foreach") is False or any(isinstance(x, torch.Tensor) for x in numbers):
        return False
    grads = [p.grad for p in group["params"] if p.grad is not None]
    return all(g.device.type == "xla" and not g.is_sparse and g.is_floating_point() for g in grads)


# -- what each records ------------------------------------------------------------------------------


def by_step(params: list[torch.Tensor], steps: list[torch.Tensor]) -> Iterator[tuple[float, list[int]]]:
    """Count a step for each parameter; then how many there were, and the places of the parameters that had so many."""
    found: dict[float, list[int]] = {}
    for k, step in enumerate(steps):
        step += 1
        found.setdefault(step.item(), []).append(k)
    yield from found.items()


def _flags(group: Group, **more: Any) -> set[str]:
    given = {"decay": group["weight_decay"] != 0, "maximize": group.get("maximize", False), **more}
    return {name for name, on in given.items() if on}


def _sgd(optimizer: Any, group: Group) -> Iterator[Update]:
    params: list[torch.Tensor] = []
    optimizer._init_group(group, params, [], [])
    if not params:
        return
    numbers = [group["weight_decay"], group["momentum"], 1 - group["dampening"], -group["lr"]]
    flags = _flags(group, nesterov=group["nesterov"])
    if group["momentum"] == 0:
        yield Update("sgd", params, [], numbers, flags)
        return
    new = [p for p in params if optimizer.state[p].get("momentum_buffer") is None]
    for p in new:  # zeros, of which nothing is kept: then the first step is the same program as all others
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    started = {id(p) for p in new}
    for chosen, weight in ((new, 1.0), ([p for p in params if id(p) not in started], numbers[2])):
        if chosen:
            buffers = [optimizer.state[p]["momentum_buffer"] for p in chosen]
            yield Update("sgd", chosen, [buffers], [*numbers[:2], weight, numbers[3]], flags)


def _adam(optimizer: Any, group: Group) -> Iterator[Update]:
    params: list[torch.Tensor] = []
    steps: list[torch.Tensor] = []
    means: list[torch.Tensor] = []
    squares: list[torch.Tensor] = []
    peaks: list[torch.Tensor] = []
    optimizer._init_group(group, params, [], means, squares, peaks, steps)
    decoupled = group.get("decoupled_weight_decay", False)
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    states = [means, squares, peaks] if group["amsgrad"] else [means, squares]
    for step, places in by_step(params, steps):
        numbers = [
            1 - lr * decay if decoupled else decay,
            1 - beta1,
            beta2,
            1 - beta2,
            (1 - beta2**step) ** 0.5,
            group["eps"],
            -lr / (1 - beta1**step),
        ]
        yield Update("adam", *_picked(places, params, states), numbers, _flags(group, decoupled=decoupled))


def _adagrad(optimizer: Any, group: Group) -> Iterator[Update]:
    params: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    steps: list[torch.Tensor] = []
    optimizer._init_group(group, params, [], sums, steps)
    for step, places in by_step(params, steps):
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
        yield Update("adagrad", *_picked(places, params, [sums]), [group["weight_decay"], group["eps"], -rate], _flags(group))


def _adafactor(optimizer: Any, group: Group) -> Iterator[Update]:
    params: list[torch.Tensor] = []
    rows: list[Any] = []
    columns: list[Any] = []
    variances: list[Any] = []
    steps: list[torch.Tensor] = []
    optimizer._init_group(group, params, [], rows, columns, variances, steps)
    if not params:
        return
    lr, (eps1, eps2) = group["lr"], group["eps"]
    eps1 = torch.finfo(params[0].dtype).eps if eps1 is None else eps1
    for step, places in by_step(params, steps):
        numbers = [1 - lr * group["weight_decay"], step ** group["beta2_decay"], min(lr, 1 / step**0.5), eps1, eps2, group["d"]]
        for states in ([rows, columns], [variances]):
            _lie_as_parameters(params, states)
            chosen = [k for k in places if states[0][k] is not None]
            if chosen:
                yield Update("adafactor", *_picked(chosen, params, states), numbers, _flags(group))


def _lie_as_parameters(params: list[Any], states: list[list[Any]]) -> None:
    """New state differs among the ranks among which its parameter does, which torch's way of making it (from the gradient) does not say."""
    from torch_bridge import sharding, specials

    for state in states if sharding.active() else []:
        for p, t in zip(params, state, strict=True):
            if t is not None and t._storage.constant:
                specials.lie_as(t, p)


def _picked(places: list[int], params: list[Any], states: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
    return [params[k] for k in places], [[s[k] for k in places] for s in states]


_PLANS: dict[Any, Callable[[Any, Group], Iterator[Update]]] = {
    optim.SGD: _sgd,
    optim.Adam: _adam,
    optim.AdamW: _adam,
    optim.Adagrad: _adagrad,
    optim.Adafactor: _adafactor,
}


def _plan_of(optimizer_class: Any) -> Callable[[Any, Group], Iterator[Update]] | None:
    """How to record a class's step: that of the class of torch whose step and state it has."""
    if not inspect.isclass(optimizer_class):
        return None
    if _is_fused(optimizer_class):
        return getattr(optimizer_class, "_plan")  # noqa: B009  # the checker sees no attribute of a class made at run time
    for base in optimizer_class.__mro__:
        if base in _PLANS:
            same = all(inspect.unwrap(getattr(optimizer_class, n)) is inspect.unwrap(getattr(base, n)) for n in ("step", "_init_group"))
            return _PLANS[base] if same else None
    return None


# -- optimizers that look at whole tensors ------------------------------------------------------------

_WHOLE = {
    optim.LBFGS: "takes inner products over the whole model, and evaluates the loss several times a step",
    optim.Muon: "orthogonalises whole matrices",
    optim.SparseAdam: "takes sparse gradients, which are not cut by rows",
}
_WHOLE_BY_NAME = {
    **dict.fromkeys(("Lamb", "LAMB", "FusedLAMB", "Lars", "LARS"), "scales each update by a norm of the whole parameter"),
    **dict.fromkeys(("NovoGrad", "Novograd"), "scales each update by a norm of the whole gradient"),
    **dict.fromkeys(("Adafactor", "CAME"), "factors second moments of whole matrices"),
    **dict.fromkeys(("Shampoo", "DistributedShampoo", "SOAP"), "preconditions whole matrices"),
    **dict.fromkeys(("Muon", "SingleDeviceMuon"), "orthogonalises whole matrices"),
}


def why_whole(optimizer_class: Any) -> str | None:
    """Why an optimizer gives other numbers on parts of parameters than on whole ones; None for those that work element by element, that put parts
    together (torch's Adafactor), and that are not known."""
    if not inspect.isclass(optimizer_class) or _plan_of(optimizer_class) is not None:
        return None
    known = next((_WHOLE[c] for c in optimizer_class.__mro__ if c in _WHOLE), None)
    return known or next((_WHOLE_BY_NAME[c.__name__] for c in optimizer_class.__mro__ if c.__name__ in _WHOLE_BY_NAME), None)

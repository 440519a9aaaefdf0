"""torch's optimizers on xla parameters: a step of SGD, Adam, AdamW, Adagrad or Adafactor is one recorded op; and which optimizers may see parts only.

`install` puts a step in the place of theirs, in the classes themselves: `type(optimizer)`, hooks, schedulers and `state_dict()` are as ever, and CPU parameters
take torch's own step. So do options that say how torch should do it (`foreach`, `fused`, `capturable`, `differentiable`), numbers that are tensors or differ by
rank, autocast around the step, torch's modes, subclasses with a step of their own, and every step with NXD_JAX_FUSED_OPTIMIZERS=0.
What is recorded is in `step_plans.py`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import optim
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from torch_bridge.runtime import backend

if TYPE_CHECKING:
    from torch_bridge.ir.segment import Foretell

_CLASSES = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adafactor)


def install() -> None:
    """Put it in place, once; brings no recorder up."""
    for cls in _CLASSES:
        own = vars(cls).get("step")  # AdamW's is Adam's, unless an optimizer was made before
        if own is None:
            continue
        hooked = getattr(own, "hooked", False)  # torch puts its hooks around a class's step when it first makes an optimizer
        step: Any = _one_op(cls, own.__wrapped__ if hooked else own)
        if hooked:
            step = optim.Optimizer.profile_hook_step(step)
            step.hooked = True
        cls.step = step  # type: ignore[method-assign]


def enabled() -> bool:
    """Whether NXD_JAX_FUSED_OPTIMIZERS lets steps be recorded as one op; ValueError for a value that it cannot have."""
    text = os.environ.get(_SWITCH)
    if text is None:
        return True
    from torch_bridge.config.variables import VARIABLES

    return VARIABLES[_SWITCH].parse(text) is not False


_SWITCH = "NXD_JAX_FUSED_OPTIMIZERS"


def _one_op(cls: type, own: Callable[..., Any]) -> Callable[..., Any]:
    """A step for a class: one recorded op for each group where that is the same as `own`, else that."""

    @functools.wraps(own)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if not _on_xla(self):
            return own(self, closure)
        if not _may(self, cls, step):
            _check_parts(self)
            return own(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if not _record(self, cls):
                _check_parts(self)
                own(self)
        return loss

    return step


def _on_xla(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its first parameter is; parameters on several devices are told apart later."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    return first is not None and first.device.type == "xla"


def _may(optimizer: Any, cls: Any, step: Any) -> bool:
    """Whether a step of torch's own class would be the same for anybody who looks."""
    kind = type(optimizer)
    return (
        (kind.step is step or getattr(kind.step, "__wrapped__", None) is step)
        and inspect.unwrap(kind._init_group) is inspect.unwrap(cls._init_group)  # torch.compile wraps them
        and getattr(optimizer, "grad_scale", None) is None
        and getattr(optimizer, "found_inf", None) is None
        and not torch.is_autocast_enabled("xla")
        and not torch.compiler.is_compiling()
        and not _observed()
        and enabled()
    )


def _observed() -> bool:
    """Whether somebody follows single operations. `torch.set_default_device` does not."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or (torch._C._len_torch_function_stack() and any(type(m) is not DeviceContext for m in _get_current_function_mode_stack()))
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _record(optimizer: torch.optim.Optimizer, cls: type) -> bool:
    """Record it; False, with nothing changed, if it is not what the rules compute."""
    backend.ensure()
    from torch_bridge.optimizers import step_plans

    if issubclass(cls, optim.Adafactor) and step_plans.rounds() and not _parts(optimizer):
        return False
    plan = next(step_plans.PLANS[c] for c in cls.__mro__ if c in step_plans.PLANS)
    gathered = step_plans.gather(plan, optimizer)
    for number, given in enumerate(gathered or ()):
        for update in plan.updates(given):
            update.record(plan.foretell(given, number))
    return gathered is not None


def _parts(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Its parameters of which ranks hold parts, as far as somebody said so."""
    from torch_bridge.optimizers import param_partition

    return [p for group in optimizer.param_groups for p in group["params"] if param_partition.of(p).cuts]


def _check_parts(optimizer: torch.optim.Optimizer) -> None:
    """Raise for torch's own step of an optimizer that looks at whole tensors, where ranks hold parts."""
    if isinstance(optimizer, optim.Adafactor) and (parts := _parts(optimizer)):
        raise NotImplementedError(
            f"Adafactor factors second moments of whole matrices, and a rank holds a part (of shape {list(parts[0].shape)}) of one. It puts parts together "
            "where its step is recorded as one op: without foreach, tensors among its options, autocast around step() and NXD_JAX_FUSED_OPTIMIZERS=0"
        )


class Update(NamedTuple):
    """One recorded op. flags: for Adafactor, they are still to be joined with what parameters are parts of. grads: those of params, if they are at hand."""

    rule: str
    params: list[Any]
    states: list[list[Any]]
    numbers: list[float]
    flags: set[str]
    grads: list[Any] | None = None

    def record(self, foretell: Foretell | None = None) -> None:
        """Record it: parameters and states are updated in place, in one op for each place that they lie at.

        foretell: says which numbers it will have in the next step.
        """
        backend.ensure()
        from torch_bridge.optimizers import param_partition, step_ops
        from torch_bridge.recorder import placed

        apart = placed.groups([self.params])
        for of in apart or ():
            grads = None if self.grads is None else [self.grads[k] for k in of]
            Update(
                self.rule, [self.params[k] for k in of], [[s[k] for k in of] for s in self.states], self.numbers, self.flags, grads
            ).record()
        if apart is not None:
            return

        grads = [p.grad for p in self.params] if self.grads is None else self.grads
        options = param_partition.text(self.flags, self.params) if self.rule == "adafactor" else ",".join(sorted(self.flags))
        step_ops.update(self.rule, self.params, grads, self.states, self.numbers, options, foretell)


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


def _puts_together(optimizer_class: type) -> bool:
    """Whether a class steps as torch's Adafactor, as one op."""
    cls: Any = optim.Adafactor
    if not issubclass(optimizer_class, cls) or not enabled():
        return False
    return all(inspect.unwrap(getattr(optimizer_class, n)) is inspect.unwrap(getattr(cls, n)) for n in ("step", "_init_group"))


def why_whole(optimizer_class: Any) -> str | None:
    """Why an optimizer gives other numbers on parts of parameters than on whole ones; None for those that work element by element, that put parts
    together (torch's Adafactor), and that are not known."""
    if not inspect.isclass(optimizer_class) or _puts_together(optimizer_class):
        return None
    known = next((_WHOLE[c] for c in optimizer_class.__mro__ if c in _WHOLE), None)
    return known or next((_WHOLE_BY_NAME[c.__name__] for c in optimizer_class.__mro__ if c.__name__ in _WHOLE_BY_NAME), None)

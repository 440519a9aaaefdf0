"""A torch optimizer and its scheduler as an `optax.GradientTransformation` (`to_optax`)."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from torch import optim
from torch.optim.lr_scheduler import LRScheduler

from torch_bridge.export import optax_rules, optax_schedules, optax_states
from torch_bridge.export.optax_names import Layout, Leaves, Parameter, parameters
from torch_bridge.export.optax_schedules import Clock, Groups
from torch_bridge.export.optax_states import GroupState, State
from torch_bridge.lowerings.precision import widen


def to_optax(
    optimizer: optim.Optimizer,
    scheduler: optim.lr_scheduler.LRScheduler | None = None,
    *,
    model: torch.nn.Module | None = None,
    steps: int | None = None,
    every: int = 1,
) -> TorchTransformation:
    """An optax transformation that steps as a torch optimizer and its scheduler do, and goes on where they stand.

    optimizer: torch's AdamW, Adam, SGD, Adagrad, RMSprop or Adafactor, with any options and param groups; TypeError for others.
    scheduler: any of torch's (and of transformers', and your own) that depends on the number of steps alone; what it sets of momentum or betas counts too.
    model: the torch module whose parameters are trained, so that a leaf is found by its name. Needed with several groups, frozen parameters or a state, unless
    the optimizer was made with names (`AdamW(model.named_parameters())`).
    steps: how many optimizer steps are to come. Needed for a scheduler without a pattern that could be followed for ever (LambdaLR, all of transformers').
    Beyond them learning rates are NaN under `jax.jit`, and an error outside.
    every: optimizer steps from one `scheduler.step()` to the next; 1 unless the scheduler counts epochs.

    Params are what `to_jax(model).params` or `nnx.state(to_nnx(model), nnx.Param)` give, or any pytree with such paths. `init(params)` reads moments and step
    counts of the torch optimizer, of tensors on xla too; `optimizer.load_state_dict(tx.state_dict(state))` and
    `scheduler.load_state_dict(tx.scheduler_state_dict(state))` are the way back.

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        ...  # any number of torch's steps
        f = torch_bridge.to_jax(model)
        tx = torch_bridge.to_optax(optimizer, scheduler, model=model)
        params, state = f.params, tx.init(f.params)
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)

    Parameters that need no gradient, and those that the optimizer does not have, stay as they are. A parameter that the loss does not use has no gradient in
    torch, which leaves it alone; in JAX it has one of zeros, with which weight decay and momentum go on: freeze it. Hooks of the optimizer do not come along.
    """
    return _Training(optimizer, scheduler, model, steps, every).transformation()


class TorchTransformation(optax.GradientTransformationExtraArgs):
    """What `to_optax` gives: an optax transformation, and the way back to torch."""

    def state_dict(self, state: Any) -> dict[str, Any]:
        """The state as torch's `optimizer.state_dict()`, with the numbers that the scheduler has set by then. Also of an `nnx.Optimizer`'s `opt_state`."""
        return self.init.__self__.state_dict(optax_states.plain(state))

    def scheduler_state_dict(self, state: Any) -> dict[str, Any]:
        """The scheduler's `state_dict()` after as many steps; ValueError if there is none."""
        return self.init.__self__.scheduler_state_dict(optax_states.plain(state))


class _Training:
    """A torch optimizer, its numbers as functions of the step, and where its parameters are found in a pytree."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, model: Any, steps: int | None, every: int):
        _check_arguments(optimizer, model, steps, every)
        self.optimizer, self.scheduler, self.every = optimizer, scheduler, every
        self.kind = optax_rules.kind_of(optimizer)
        self.parameters = parameters(optimizer, model)
        self.layout = Layout(self.parameters, model)
        self.clock = self._clock()
        self.flags = [self.kind.flags(group) for group in optimizer.param_groups]
        self.numbers = self._numbers(None if steps is None else -(-steps // every))
        _check_parameters(optimizer, self.parameters, self.layout)
        _warn_about_unused(self.parameters, optimizer)

    def transformation(self) -> TorchTransformation:
        return TorchTransformation(self.init, self.update)

    # -- numbers ------------------------------------------------------------------------------------

    def _clock(self) -> Clock | None:
        if self.scheduler is None:
            return None
        optax_schedules.check(self.scheduler, self.optimizer)
        return Clock(self.scheduler)

    def _numbers(self, epochs: int | None) -> dict[Any, Any]:
        return self._read(self.optimizer.param_groups) if self.clock is None else optax_schedules.tabulate(self.clock, self._read, epochs)

    def _read(self, groups: Groups) -> dict[Any, float]:
        """All groups' numbers, by group and name."""
        tensors = [group["params"] for group in self.optimizer.param_groups]
        found: dict[Any, float] = {}
        for k, group in enumerate(groups):
            if self.kind.flags(group) != self.flags[k]:
                raise NotImplementedError(
                    f"the scheduler turns an option of param_groups[{k}] on or off: {sorted(self.kind.flags(group) ^ self.flags[k])}"
                )
            own = self.kind.numbers(self.optimizer, {**group, "params": tensors[k]})
            found |= {(k, name): value for name, value in own.items()}
        return found

    def _chain(self, k: int, count: Any, dtype: Any) -> optax.GradientTransformationExtraArgs:
        """The step of a group's parameters of this dtype, after `count` steps of the optimizer."""
        own = {name: value for (group, name), value in self.numbers.items() if group == k}
        numbers = {name: value(count // self.every) if callable(value) else value for name, value in own.items()}
        return optax_rules.chain(self.kind, numbers, self.flags[k], dtype)

    # -- optax's interface ----------------------------------------------------------------------------

    def init(self, params: Any) -> State:
        """The torch optimizer's state as it is now, for these params."""
        self.layout.check(params)
        count = 0 if self.scheduler is None else optax_schedules.epoch_of(self.scheduler) * self.every
        groups = [self._group_state(k, leaves, count) for k, leaves in enumerate(self.layout.split(params))]
        return State(jnp.asarray(count, jnp.int32), tuple(groups))

    def _group_state(self, k: int, leaves: Leaves, count: int) -> GroupState:
        held = {p.name: self.optimizer.state.get(p.tensor, {}) for p in self.parameters[k] if p.name is not None}
        steps = [optax_states.steps_of(held.get(name, {})) for name in sorted(leaves)]
        now = jnp.asarray(count, jnp.int32)
        first = {dtype: self._chain(k, now, dtype).init(own) for dtype, own in _by_dtype(leaves).items()}
        return GroupState(jnp.asarray(steps, jnp.int32), optax_states.filled(first, self.kind, held))

    def update(self, updates: Any, state: State, params: Any = None, **_: Any) -> tuple[Any, State]:
        """A step: what is to be added to the params, and the next state."""
        if params is None:
            raise ValueError("the update of a torch optimizer needs the params: tx.update(grads, state, params)")
        out: Leaves = {}
        groups = []
        for k, (grads, values) in enumerate(zip(self.layout.split(updates), self.layout.split(params), strict=True)):
            _check_leaves(grads, values, state.groups[k])
            own, group = self._group_update(k, state.count, grads, state.groups[k], values)
            out |= own
            groups.append(group)
        return self.layout.join(updates, out), State(state.count + 1, tuple(groups))

    def _group_update(self, k: int, count: Any, grads: Leaves, state: GroupState, params: Leaves) -> tuple[Leaves, GroupState]:
        """Computed in float32 where dtypes are narrower; the state keeps its dtypes, and updates are rounded when they are applied."""
        steps = state.steps + 1
        counts = {name: steps[i] for i, name in enumerate(sorted(grads))}
        out: Leaves = {}
        chains = {}
        for dtype, own in _by_dtype(params).items():
            wide = jax.tree.map(widen, ({name: grads[name] for name in own}, state.chains[dtype], own))
            updates, new = self._chain(k, count, dtype).update(*wide, steps=counts)
            chains[dtype] = jax.tree.map(lambda x, old: x.astype(old.dtype), new, state.chains[dtype])
            out |= updates
        return out, GroupState(steps, chains)

    # -- back to torch --------------------------------------------------------------------------------

    def state_dict(self, state: State) -> dict[str, Any]:
        if not self.layout.named:
            raise ValueError(
                "parameters have no names, so that their state cannot be told apart: pass the torch model to to_optax as `model`"
            )
        found = self.optimizer.state_dict()
        found["state"] = {**found["state"], **self._held(state)}
        clock = self._clock_at(state)
        if clock is not None:
            groups = zip(found["param_groups"], clock.param_groups, strict=True)
            found["param_groups"] = [{**group, **now} for group, now in groups]
        return found

    def _held(self, state: State) -> dict[int, dict[str, Any]]:
        """What torch keeps for each parameter that has made a step, or had when `to_optax` was called."""
        found = {}
        for own, group in zip(self.parameters, state.groups, strict=True):
            steps = dict(zip(sorted(str(p.name) for p in own), group.steps.tolist(), strict=True))
            for p in own:
                held = optax_states.held(p, str(p.name), self.kind, steps[str(p.name)], group.chains)
                if held or _steps(self.optimizer, p):
                    found[p.key] = held
        return found

    def scheduler_state_dict(self, state: State) -> dict[str, Any]:
        clock = self._clock_at(state)
        if clock is None:
            raise ValueError("there is no scheduler: to_optax was given none")
        return clock.scheduler.state_dict()

    def _clock_at(self, state: State) -> Clock | None:
        """The scheduler after as many steps as the state has seen."""
        if self.clock is None:
            return None
        clock = self.clock.copy()
        epochs = int(state.count) // self.every
        if epochs < clock.epoch:
            raise ValueError(f"the state has seen {epochs} steps of the scheduler, which had made {clock.epoch} when to_optax was called")
        while clock.epoch < epochs and clock.step():
            pass
        return clock


def _by_dtype(leaves: Leaves) -> dict[str, Leaves]:
    found: dict[str, Leaves] = {}
    for name, leaf in leaves.items():
        found.setdefault(str(leaf.dtype), {})[name] = leaf
    return found


def _check_leaves(grads: Leaves, params: Leaves, state: GroupState) -> None:
    """The state is looked up by position, so that all three must be of the same parameters."""
    if grads.keys() != params.keys() or len(params) != len(state.steps):
        raise ValueError(
            f"updates have the parameters {sorted(grads)}, params {sorted(params)}, and the state was made for {len(state.steps)}: these must be the "
            "same, in each of the optimizer's groups"
        )


def _check_arguments(optimizer: torch.optim.Optimizer, model: object, steps: Any, every: Any) -> None:
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(f"to_optax takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be the torch.nn.Module that is trained, got {type(model).__name__}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be a number of optimizer steps to come, at least 1, got {steps}")
    if every < 1:
        raise ValueError(f"every must be the number of optimizer steps from one scheduler.step() to the next, at least 1, got {every}")


def _check_parameters(optimizer: optim.Optimizer, groups: list[list[Parameter]], layout: Layout) -> None:
    trained = [p for group in groups for p in group]
    for p in trained:
        if p.tensor.is_complex():
            raise TypeError(f"to_optax knows real parameters, and {p.name or 'one'} of shape {list(p.tensor.shape)} is {p.tensor.dtype}")
    if layout.named:
        return
    states = any(_steps(optimizer, p) for p in trained)
    if states or len(groups) > 1:
        why = "the optimizer has made steps, and its state" if states else "it has several param_groups, and parameters"
        raise ValueError(f"{why} cannot be told apart without names: pass the torch model to to_optax as `model`")


def _warn_about_unused(groups: list[list[Parameter]], optimizer: optim.Optimizer) -> None:
    """Of parameters that torch leaves alone for want of a gradient, and JAX would let decay."""
    fresh = [[p for p in own if not _steps(optimizer, p)] for own in groups]
    stepped = sum(map(len, fresh)) < sum(map(len, groups))
    graded = any(p.tensor.grad is not None for own in groups for p in own)
    for own, group in zip(fresh, optimizer.param_groups, strict=True):
        unused = [p.name or "a parameter" for p in own if p.tensor.grad is None]
        if (stepped or graded) and unused and float(group["weight_decay"]):
            warnings.warn(
                f"{', '.join(unused[:3])}{' and others' if len(unused) > 3 else ''} had no gradient so far: torch leaves such parameters alone, in JAX their "
                "gradients are zeros and weight decay goes on. If the loss does not use them, call requires_grad_(False) before to_optax",
                stacklevel=4,
            )


def _steps(optimizer: optim.Optimizer, p: Parameter) -> int:
    return optax_states.steps_of(optimizer.state.get(p.tensor, {}))

"""Which leaf of a pytree is which parameter of a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import torch
from torch import optim

Leaves = dict[str, Any]
"""Arrays by the names of their parameters."""


class Parameter(NamedTuple):
    """A parameter that the optimizer trains. name: None if nobody gave one; key: its number in `optimizer.state_dict()`."""

    name: str | None
    tensor: torch.Tensor
    key: int


def parameters(optimizer: optim.Optimizer, model: torch.nn.Module | None) -> list[list[Parameter]]:
    """What is trained in each group, without frozen parameters; ValueError for one that the model does not have."""
    names = _names(optimizer, model)
    found, key = [], 0
    for number, group in enumerate(optimizer.param_groups):
        own = []
        for p in group["params"]:
            if p.requires_grad:
                own.append(Parameter(_name(p, names, number), p, key))
            key += 1
        found.append(own)
    return found


def _names(optimizer: optim.Optimizer, model: torch.nn.Module | None) -> dict[int, str] | None:
    """Names by `id`: the model's, else those that the optimizer was given (`torch.optim.AdamW(model.named_parameters())`), else None."""
    if model is not None:
        return {id(p): name for name, p in model.named_parameters()}
    groups = optimizer.param_groups
    if all("param_names" in group for group in groups):
        return {id(p): name for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)}
    return None


def _name(p: torch.Tensor, names: dict[int, str] | None, group: int) -> str | None:
    if names is None:
        return None
    if id(p) not in names:
        raise ValueError(
            f"the optimizer trains a parameter of shape {list(p.shape)} (in param_groups[{group}]) that `model` does not have: pass the module "
            "whose parameters it was made with. One that holds several modules does, such as torch.nn.ModuleDict"
        )
    return names[id(p)]


class Layout:
    """Splits pytrees of parameters (or gradients) into the optimizer's groups, and joins them again.

    Leaves are known by their path, joined with dots: `{"0.weight": w}`, `{"0": {"weight": w}}` and an `nnx.State` name the same parameter.
    """

    def __init__(self, groups: Sequence[Sequence[Parameter]], model: torch.nn.Module | None):
        trained = [p for group in groups for p in group]
        self.named = all(p.name is not None for p in trained)
        self._shapes = {p.name: tuple(p.tensor.shape) for p in trained if p.name is not None}
        self._unnamed = sorted(tuple(p.tensor.shape) for p in trained)
        self._groups = {p.name: k for k, group in enumerate(groups) for p in group if p.name is not None}
        self._frozen = set() if model is None else {name for name, _ in model.named_parameters()} - set(self._groups)
        self._closed = model is not None
        self._count = len(groups)

    def split(self, tree: Any) -> list[Leaves]:
        """The leaves of each group; frozen ones are left out."""
        found: list[Leaves] = [{} for _ in range(self._count)]
        for name, leaf in self._leaves(tree):
            group = self._group(name)
            if group is not None:
                found[group][name] = leaf
        return found

    def join(self, tree: Any, leaves: Leaves) -> Any:
        """A pytree like `tree` of these leaves, zeros for frozen ones."""
        own = [leaves[name] if name in leaves else jax.numpy.zeros_like(leaf) for name, leaf in self._leaves(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), own)

    def check(self, tree: Any) -> None:
        """ValueError unless the pytree has all that the optimizer trains, and nothing that nobody knows."""
        given = self._leaves(tree)
        if not self.named:
            self._check_unnamed([tuple(leaf.shape) for _, leaf in given])
            return
        shapes = {name: tuple(leaf.shape) for name, leaf in given}
        missing = sorted(set(self._groups) - set(shapes))
        unknown = sorted(set(shapes) - set(self._groups) - self._frozen) if self._closed else []
        if missing or unknown:
            raise ValueError(
                f"these params are not those of the optimizer: missing {missing or 'none'}, unknown {unknown or 'none'}. Leaves are named as the torch "
                "model's parameters: start from to_jax(model).params or nnx.state(to_nnx(model), nnx.Param), and pass that model as `model`"
            )
        other = [f"{name} is {list(shapes[name])}, in torch {list(shape)}" for name, shape in self._shapes.items() if shape != shapes[name]]
        if other:
            raise ValueError(f"params have other shapes than those of the optimizer: {'; '.join(other)}")

    def _check_unnamed(self, shapes: list[tuple[int, ...]]) -> None:
        if sorted(shapes) != self._unnamed:
            raise ValueError(
                f"the optimizer trains {len(self._unnamed)} parameters, and these params have {len(shapes)} leaves, or other shapes: pass the torch model "
                "as `model`, so that each leaf is found by its name"
            )

    def _group(self, name: str) -> int | None:
        return self._groups.get(name) if self.named else 0

    def _leaves(self, tree: Any) -> list[tuple[str, Any]]:
        return [(self._name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]

    def _name(self, path: Sequence[Any]) -> str:
        name = _joined(path)
        inside = path[:-1] if path and getattr(path[-1], "name", None) == "value" else path  # what an nnx.Variable holds
        return name if name in self._groups or name in self._frozen else _joined(inside)


def _joined(path: Iterable[Any]) -> str:
    return ".".join(str(next(getattr(key, a) for a in ("key", "name", "idx") if hasattr(key, a))) for key in path)

"""Which modules inside of a model become units of their own: policies, and the walk that asks them.

A policy is called as `policy(module, recurse, unwrapped_params)`: with recurse=True it says whether to look at the module's children, with False whether to
wrap the module, of whose parameters `unwrapped_params` are not in wrapped children.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

Policy = Callable[..., bool]


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """`fsdp.wrap.always_wrap_policy`: every module."""
    return True


def lambda_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, lambda_fn: Callable[[nn.Module], bool]) -> bool:
    """`fsdp.wrap.lambda_auto_wrap_policy`: modules of which `lambda_fn(module)` is true."""
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """`fsdp.wrap.transformer_auto_wrap_policy`: modules of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """`fsdp.wrap.size_based_auto_wrap_policy`: modules with at least `min_num_params` numbers (default 10^8) that are not in wrapped children.

    force_leaf_modules: classes whose children stay as they are (default `nn.MultiheadAttention`); exclude_wrap_modules: classes that are not wrapped themselves
    (default `nn.ModuleList`, `nn.ModuleDict`). The defaults are this function's attributes `FORCE_LEAF_MODULES` and `EXCLUDE_WRAP_MODULES`.
    """
    own: Any = size_based_auto_wrap_policy
    if recurse:
        kept = own.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        kept = own.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return unwrapped_params >= min_num_params and not isinstance(module, tuple(kept))


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Policy,
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """`fsdp.wrap.recursive_wrap`: wrap modules from the leaves up, as the policy says. Returns (the module or its wrapper, how many numbers were wrapped).

    wrapper_cls: `wrapper_cls(module, **kwargs)`; a module's own `_wrap_overrides`, a dict, replaces some of kwargs. ignored_modules, ignored_params: left
    alone, and not counted. only_wrap_children: not the module itself. A module that occurs twice is wrapped once.

    Raises ValueError where a module inside is wrapped already.
    """
    _check_unwrapped(module, wrapper_cls, ignored_modules)
    walk = _Walk(auto_wrap_policy, wrapper_cls, {id(m) for m in ignored_modules}, {id(p) for p in ignored_params}, kwargs)
    return walk.visit(module, only_wrap_children)


class _Walk:
    def __init__(
        self, policy: Policy, wrapper: Callable[..., nn.Module], modules: set[int], params: set[int], options: dict[str, Any]
    ) -> None:
        self._policy, self._wrapper, self._options = policy, wrapper, options
        self._ignored_modules, self._ignored_params = modules, params
        self._done: dict[int, tuple[nn.Module, nn.Module]] = {}

    def visit(self, module: nn.Module, only_children: bool = False) -> tuple[nn.Module, int]:
        count = sum(p.numel() for p in module.parameters() if id(p) not in self._ignored_params)
        if not self._policy(module, True, count):
            return module, 0
        wrapped = 0
        for name, child in list(module._modules.items()):
            if child is not None and id(child) not in self._ignored_modules:
                found, inside = self._done[id(child)][1] if id(child) in self._done else None, 0
                if found is None:
                    found, inside = self.visit(child)
                    self._done[id(child)] = child, found
                setattr(module, name, found)
                wrapped += inside
        if only_children or not self._policy(module, False, count - wrapped):
            return module, wrapped
        return self._wrapper(module, **{**self._options, **getattr(module, "_wrap_overrides", {})}), count


def _check_unwrapped(module: nn.Module, wrapper: Any, ignored: Collection[nn.Module]) -> None:
    if not isinstance(wrapper, type):
        return
    there = [
        name or "the module itself" for name, m in module.named_modules() if isinstance(m, wrapper) and all(m is not i for i in ignored)
    ]
    if there:
        raise ValueError(
            f"auto_wrap_policy wraps modules by itself, and these are wrapped in {wrapper.__name__} already: {', '.join(there)}. Give it the module without "
            "wrappers, or leave out auto_wrap_policy"
        )

"""What the recorder needs to know about an aten overload, read from its schema once."""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge import lowerings
from torch_bridge.ir.bounded import Bounded
from torch_bridge.recorder import script_kernels

NOT_SCALAR, LIFTED, STATIC = 0, 1, 2
"""Argument kinds: not a Scalar; a Scalar whose number is an input of the program; a Scalar that shapes the program."""

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# Mutating ops whose functional form has another name than the schema rule gives.
_FUNCTIONAL_NAMES = {
    "aten::normal_": "normal_functional",
    "aten::_index_put_impl_": "index_put",
    "aten::rrelu_with_noise_": "rrelu_with_noise_functional",
    "aten::rrelu_with_noise": "rrelu_with_noise_functional",
    "aten::_native_batch_norm_legit": "_native_batch_norm_legit_functional",
    "aten::_batch_norm_with_update": "_batch_norm_with_update_functional",
}


_FACTORY_ARGS = frozenset({"dtype", "layout", "device", "pin_memory"})


class Info:
    """One overload: its functional form, what it mutates and aliases, and which arguments are Scalars.

    mutated: positions (or names) of written tensor arguments. functional: the overload recorded instead, None if there is none.
    fresh_returns: results that are new tensors. scalar: kind of each Scalar argument by name; scalar_at: by position.
    writes_lists: whether it writes to lists of tensors, whose versions torch's dispatcher leaves to the kernel to count.
    kernel: the dispatch keys of the script's kernel that runs it, if there is one.
    """

    def __init__(self, op: torch._ops.OpOverload):
        self.op = op
        schema = op._schema
        self.args = schema.arguments
        self.names = [a.name for a in schema.arguments]
        self.mutated = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.writes_lists = _counts_by_kernel(op) and any(str(self.args[i].type) == "List[Tensor]" for i in self.mutated)
        self.alias_returns = [self._source_of(r) for r in schema.returns]
        aliased = [i for i, a in enumerate(self.args) if a.alias_info is not None]
        self.is_view = not self.mutated and bool(aliased) and bool(self.alias_returns)
        self.view_of = aliased[0] if self.is_view else None
        self.composite = op.has_kernel_for_dispatch_key(_COMPOSITE)
        self.functional = self._find_functional() if self.mutated else op
        found = None if self.functional is None else lowerings.lookup(self.functional)
        lifted = LIFTED if found is not None and found.lift else STATIC
        self.scalar = {a.name: lifted for a in schema.arguments if _is_scalar(a) or _is_lifted_float(found, a)}
        self.scalar_at = [self.scalar.get(a.name, NOT_SCALAR) for a in schema.arguments]
        self.takes_dtype_of_out = self._is_factory_out()
        self.n_returns = len(schema.returns)
        self.kernel = script_kernels.find(op)
        self.lists = self._lists() if found is not None and found.entrywise else ()
        self.cache: Bounded[tuple[Any, ...], Any] = Bounded(lambda call: call.again)

    def _source_of(self, ret: torch._C.Argument) -> int | None:
        """The argument a result aliases."""
        if ret.alias_info is None:
            return None
        for i, a in enumerate(self.args):
            if a.alias_info is not None and a.alias_info.before_set & ret.alias_info.before_set:
                return i
        return None

    def _lists(self) -> tuple[str, ...]:
        """Of an op that treats each entry of its lists by itself, and writes nothing besides (as `found_inf`), the names of these lists."""
        if any(str(self.args[i].type) != "List[Tensor]" for i in self.mutated):
            return ()
        low = None if self.functional is None else lowerings.lookup(self.functional)
        constants = None if low is None or low.stacks is None else low.stacks.constants
        kinds = ("List[Tensor]", "List[number]", "List[Scalar]")
        return tuple(a.name for k, a in enumerate(self.args) if str(a.type) in kinds or k == constants)

    def _is_factory_out(self) -> bool:
        """True for `torch.eye(3, out=t)` and the like: the functional op must be told the dtype."""
        if self.functional is None or not any(a.is_out for a in self.args):
            return False
        return "dtype" in {a.name for a in self.functional._schema.arguments} - set(self.names)

    def _find_functional(self) -> torch._ops.OpOverload | None:
        op = self.op
        name = op._schema.name
        base = name.partition("::")[2]
        out_args = {a.name for a in self.args if a.is_out}
        if name in _FUNCTIONAL_NAMES:
            candidates = [_FUNCTIONAL_NAMES[name]]
        elif out_args:
            candidates = [base, f"{base}_functional"]
        elif base.startswith("__i"):  # __ior__ and friends
            candidates = ["__" + base[3:]]
        else:
            candidates = [base.removesuffix("_"), base]
        if op.namespace not in ("aten", "torch_bridge"):
            return None
        wanted = [_type(a) for a in self.args if a.name not in out_args]
        for candidate in candidates:
            packet = getattr(getattr(torch.ops, op.namespace), candidate, None)
            if packet is None:
                continue
            for overload in packet.overloads():
                other = getattr(packet, overload)
                schema = other._schema
                if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
                    continue
                takes = {a.name for a in self.args}
                if [_type(a) for a in schema.arguments if a.name in takes or a.name not in _FACTORY_ARGS] == wanted:
                    return other
        return None


def _counts_by_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether torch's own kernel counts the versions of lists that it writes to. Its fused optimizers do not; our ops count where they are called."""
    return op.namespace == "aten" and not op._schema.name.startswith("aten::_fused_")


_NUMBER_TYPES = {"number", "Scalar", "Optional[number]", "Optional[Scalar]", "List[number]", "List[Scalar]", "Tensor", "Optional[Tensor]"}


def _is_scalar(arg: torch._C.Argument) -> bool:
    """True where a Python number means a value to compute with (for a Tensor argument, torch's "wrapped number")."""
    return str(arg.type) in _NUMBER_TYPES


def _is_lifted_float(found: lowerings.Lowering | None, arg: torch._C.Argument) -> bool:
    """The fused optimizers take plain floats that a scheduler may change every step (`lr`, and with it betas or momentum)."""
    return found is not None and arg.name in found.floats


def _type(arg: torch._C.Argument) -> str:
    return str(arg.type)


_INFO: dict[int, Info] = {}


def info(op: torch._ops.OpOverload) -> Info:
    """The `Info` of an overload (overloads live for ever, so their ids are stable)."""
    found = _INFO.get(id(op))
    if found is None:
        found = _INFO[id(op)] = Info(op)
    return found

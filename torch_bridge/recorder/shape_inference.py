"""Shapes and dtypes of an op's results, from torch's own meta kernels. Runs once per signature; the recorder caches the answer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import torch_bridge.recorder.dtype_checks
import torch_bridge.recorder.number_checks
import torch_bridge.recorder.random_checks  # noqa: F401  # all three fill the table of checks
from torch_bridge import _compat, lowerings
from torch_bridge.ir import dtypes
from torch_bridge.ir.layout import meta_of
from torch_bridge.precision import precision_mode
from torch_bridge.recorder import argument_checks, schema
from torch_bridge.recorder.tensor import XLATensor

DROPPED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"})
"""Arguments that say where and how a result is stored, not what it is: lowerings do not take them."""


class NeedsHost(Exception):
    """The result's shape depends on values (or torch has no meta kernel): the op must run on the CPU."""


def to_meta(x: object) -> Any:
    """xla tensors and device arguments as meta ones."""
    if isinstance(x, XLATensor):
        return meta_of(x._layout)
    if isinstance(x, torch.Tensor):
        return x if x.device.type == "meta" else torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, torch.device):
        return torch.device("meta")
    return x


def infer(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `op` on meta tensors; bad arguments raise torch's own errors."""
    margs, mkwargs = tree_map(to_meta, (args, kwargs))
    if _is_factory(op):
        mkwargs["device"] = torch.device("meta")  # else torch makes the result on the CPU
    if "generator" in mkwargs:
        mkwargs["generator"] = None
    argument_checks.check(op, margs, mkwargs)
    if op in _BROKEN:
        raise NeedsHost(f"torch's meta kernel of {op} fails on valid arguments")
    if _is_in_place_pointwise(op):
        operands = [t.shape for t in (*margs, *mkwargs.values()) if isinstance(t, torch.Tensor)]
        _check_room(margs[0], torch.broadcast_shapes(*operands))
    op = _RULES.get(op) or _in_place(op) or op
    try:
        with torch.no_grad():
            return op(*margs, **mkwargs)
    except NotImplementedError as error:
        raise NeedsHost(str(error)) from None
    except AssertionError as error:  # meta kernels that are written in Python; the others and the CPU's raise
        raise RuntimeError(str(error)) from None
    except RuntimeError as error:
        text = str(error).lower()
        if type(error).__name__ in _DYNAMIC or ("meta" in text and "not implemented" in text) or "a meta tensor" in text:
            raise NeedsHost(str(error)) from None
        raise


@functools.cache
def _in_place(op: torch._ops.OpOverload) -> Any:
    """What an in-place op on one tensor does by our own inference of its functional form; None without one."""
    found = schema.info(op)
    rule = _RULES.get(found.functional) if _writes_first(found) else None
    if rule is None or str(found.args[0].type) != "Tensor":
        return None

    def infer(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = rule(self, *args, **kwargs)
        _check_room(self, made.shape)
        return made

    return infer


@functools.cache
def _is_in_place_pointwise(op: torch._ops.OpOverload) -> bool:
    """torch tags some overloads of an op and not others, and no `floor_divide`."""
    found = schema.info(op)
    if not _writes_first(found):
        return False
    tags = (*op.tags, *(found.functional.tags if found.functional is not None else ()))
    return torch.Tag.pointwise in tags or op is torch.ops.aten.floor_divide_.Tensor


def _writes_first(found: schema.Info) -> bool:
    """Whether an op is an in-place one on its first argument."""
    return found.mutated == [0] and not any(a.is_out for a in found.args)


def _check_room(target: torch.Tensor, size: torch.Size) -> None:
    """Meta kernels of torch resize a tensor that is smaller than what is computed element by element; its CPU kernels refuse it."""
    if size != target.shape:
        raise RuntimeError(f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(size)}")


@functools.cache
def _is_factory(op: torch._ops.OpOverload) -> bool:
    """Whether the op makes a tensor from numbers alone."""
    arguments = op._schema.arguments
    return any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """torch's meta kernel takes bfloat16 alone (CUDA's limit). Its CPU kernel takes other floats, too, if rows are multiples of 16 bytes; ours also float64."""
    argument_checks.one_dtype("_grouped_mm", a, b)
    if not a.dtype.is_floating_point:
        raise RuntimeError(f"_grouped_mm: expected matrices of floats, got {a.dtype}: convert them with .to()")
    if out_dtype not in (None, a.dtype):
        raise RuntimeError(f"_grouped_mm: out_dtype={out_dtype} must be the matrices' dtype, {a.dtype}: convert the result with .to()")
    return torch.ops.aten._grouped_mm.default(_as_bfloat16(a), _as_bfloat16(b), offs, bias).to(a.dtype)


def _as_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Of the same sizes, and rows as many bytes apart."""
    width = x.element_size() // torch.bfloat16.itemsize
    return torch.empty_strided(x.size(), [s if s == 1 else s * width for s in x.stride()], dtype=torch.bfloat16, device="meta")


def _multilabel_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int) -> Any:
    """torch's meta kernel makes the loss of one row 1-d; the CPU kernel makes it 0-d."""
    loss, is_target = torch.ops.aten.multilabel_margin_loss_forward.default(x, target, reduction)
    return (loss if x.dim() > 1 else loss.new_empty(())), is_target


def _index(self: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """torch's meta kernel knows masks of bool only. The CPU's takes uint8, too: masks of torch's first releases."""
    return torch.ops.aten.index.Tensor(self, [i.bool() if i is not None and i.dtype == torch.uint8 else i for i in indices])


def _where(condition: torch.Tensor, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The same for conditions."""
    return torch.ops.aten.where.self(condition.bool() if condition.dtype == torch.uint8 else condition, self, other)


def _nll_loss(op: Any) -> Any:
    """torch's meta kernels know targets of int64 only. Its CPU kernels take uint8, too."""

    def infer(*args: Any) -> Any:
        return op(*(x.long() if isinstance(x, torch.Tensor) and x.dtype == torch.uint8 else x for x in args))

    return infer


def _in_own_dtype(op: Any) -> Any:
    """torch's meta kernels of some losses promote the input with its target. Its CPU kernels write in the input's dtype."""

    def infer(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = op(self, *args, **kwargs)
        return made.to(self.dtype)

    return infer


def _distance_loss_backward(grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    """torch's meta kernels divide by the number of elements, which may be 0."""
    return torch.mul(self - target, grad_output)


def _foreach_addcdiv(
    self: list[torch.Tensor], tensor1: list[torch.Tensor], tensor2: list[torch.Tensor], value: float = 1
) -> list[torch.Tensor]:
    """torch refuses integers, which `AveragedModel(use_buffers=True)` gives to devices with foreach kernels (how many batches a batch norm saw).

    A true quotient is added, as its averages of one buffer after the other do.
    """
    return [
        x if not (x.is_floating_point() or x.is_complex()) else torch.ops.aten.addcdiv.default(x, a, b, value=value)
        for x, a, b in zip(self, tensor1, tensor2, strict=True)
    ]


def _arange(start: float, end: float, step: float = 1, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    """torch's meta kernel refuses a step between 0 and 1 of narrow integers. Its CPU kernel repeats the first number: the length is that of the floats."""
    narrow = dtype is not None and dtype != torch.int64 and not dtype.is_floating_point and not dtype.is_complex
    made: torch.Tensor = torch.ops.aten.arange.start_step(start, end, step, dtype=torch.float64 if narrow else dtype, **kwargs)
    return made.to(dtype) if narrow else made


def _index_add(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, alpha: complex = 1) -> torch.Tensor:
    """torch's meta kernel refuses a fraction beside integers. Its CPU kernel leaves out what is behind the point."""
    return torch.empty_like(self, memory_format=torch.contiguous_format)


def _normal(mean: torch.Tensor, std: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """torch's meta kernel promotes the two. Its CPU kernel draws in the mean's dtype."""
    return torch.empty(torch.broadcast_shapes(mean.shape, std.shape), dtype=mean.dtype, device="meta")


def _shift(op: Any, of_bits: Any) -> Any:
    """torch's meta kernels of `<<` and `>>` refuse a bool beside an integer. Its CPU kernels promote them (`bits << torch.arange(8)` packs a mask)."""

    def infer(self: torch.Tensor, other: Any) -> torch.Tensor:
        promoted = torch.result_type(self, other)
        beside_bool = torch.bool in (self.dtype, getattr(other, "dtype", torch.int64)) and promoted != torch.bool
        return of_bits(self, other) if beside_bool and not promoted.is_floating_point else op(self, other)

    return infer


def _ldexp(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """torch's meta kernel makes integers float32 first. Its CPU kernel multiplies by a power of two, in what the two are promoted to, or shifts exponents."""
    integers = not (other.is_floating_point() or other.is_complex()) and other.dtype != torch.bool
    if self.is_floating_point() and integers and _compat.ldexp_keeps_dtype():
        return torch.mul(self, other)
    return torch.mul(self, torch.pow(2.0, other))


def _nansum(self: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """torch's meta kernel takes an empty list of dims for none of them. Its CPU kernel takes it for all, as sum() does."""
    return torch.ops.aten.sum.dim_IntList(self, dim or None, keepdim, dtype=dtype)


def _pow_scalar(self: torch.Tensor, exponent: complex) -> torch.Tensor:
    """torch's meta kernel takes a bool for an integer. Its CPU kernel does not: `mask ** True` is a mask."""
    if self.dtype == torch.bool and isinstance(exponent, bool):
        return torch.empty_like(self)
    return torch.ops.aten.pow.Tensor_Scalar(self, exponent)


def _masked_fill(self: torch.Tensor, mask: torch.Tensor, value: complex) -> torch.Tensor:
    """torch's meta kernel refuses every complex number for a tensor of reals. Its CPU kernel takes those that are real, and all of them as a truth."""
    fits = not isinstance(value, complex) or self.dtype.is_complex
    return torch.ops.aten.masked_fill.Scalar(self, mask, value if fits else bool(value) if self.dtype == torch.bool else value.real)


_BROKEN = {torch.ops.aten._thnn_fused_lstm_cell.default}
"""Ops whose meta kernel fails on arguments it should take (LSTM cells without biases)."""


def _native_multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """torch's has weights also where none are asked for."""
    op = torch.ops.aten._native_multi_head_attention.default
    asked = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    out, weights = op(*args, **kwargs)
    return out, weights if asked.get("need_weights", True) else None


_RULES: dict[Any, Any] = {
    torch.ops.aten.__lshift__.Tensor: _shift(torch.ops.aten.__lshift__.Tensor, torch.ops.aten.bitwise_left_shift.Tensor),
    torch.ops.aten.__lshift__.Scalar: _shift(torch.ops.aten.__lshift__.Scalar, torch.ops.aten.bitwise_left_shift.Tensor_Scalar),
    torch.ops.aten.__rshift__.Tensor: _shift(torch.ops.aten.__rshift__.Tensor, torch.ops.aten.bitwise_right_shift.Tensor),
    torch.ops.aten.__rshift__.Scalar: _shift(torch.ops.aten.__rshift__.Scalar, torch.ops.aten.bitwise_right_shift.Tensor_Scalar),
    torch.ops.aten._foreach_addcdiv.Scalar: _foreach_addcdiv,
    torch.ops.aten._foreach_addcdiv_.Scalar: _foreach_addcdiv,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten._native_multi_head_attention.default: _native_multi_head_attention,
    torch.ops.aten.huber_loss.default: _in_own_dtype(torch.ops.aten.huber_loss.default),
    torch.ops.aten.huber_loss_backward.default: _distance_loss_backward,
    torch.ops.aten.arange.start_step: _arange,
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten.index_add.default: _index_add,
    torch.ops.aten.ldexp.Tensor: _ldexp,
    torch.ops.aten.masked_fill.Scalar: _masked_fill,
    torch.ops.aten.mse_loss_backward.default: _distance_loss_backward,
    torch.ops.aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    torch.ops.aten.nansum.default: _nansum,
    torch.ops.aten.nll_loss_backward.default: _nll_loss(torch.ops.aten.nll_loss_backward.default),
    torch.ops.aten.nll_loss_forward.default: _nll_loss(torch.ops.aten.nll_loss_forward.default),
    torch.ops.aten.normal.Tensor_Tensor: _normal,
    torch.ops.aten.pow.Tensor_Scalar: _pow_scalar,
    torch.ops.aten.smooth_l1_loss_backward.default: _distance_loss_backward,
    torch.ops.aten.soft_margin_loss.default: _in_own_dtype(torch.ops.aten.soft_margin_loss.default),
    torch.ops.aten.where.self: _where,
}
"""Our own inference where torch's meta kernel is narrower than its CPU kernel, or says something else."""

_DYNAMIC = {"DynamicOutputShapeException", "DataDependentOutputException", "UnsupportedOperatorException"}


def infer_from_lowering(found: lowerings.Lowering, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For the few ops that torch has no meta kernel for: the shapes that the lowering gives."""
    leaves, spec = tree_flatten((args, {k: v for k, v in kwargs.items() if k not in DROPPED}))
    arrays = [jax.ShapeDtypeStruct(tuple(x.shape), dtypes.to_jax(x.dtype)) for x in leaves if isinstance(x, torch.Tensor)]

    def run(*values: Any) -> Any:
        supply = iter(values)
        filled = [next(supply) if isinstance(x, torch.Tensor) else x for x in leaves]
        fargs, fkwargs = tree_unflatten(filled, spec)
        key = {"key": jax.random.key(0)} if found.rng else {}
        mode = {"mode": precision_mode.PLAIN} if found.mode else {}  # shapes are the same in all
        return found.fn(*fargs, **fkwargs, **key, **mode)

    with _compat.enable_x64():
        out = jax.eval_shape(run, *arrays)
    return tree_map(lambda a: None if a is None else torch.empty(a.shape, dtype=dtypes.to_torch(a.dtype), device="meta"), out)

"""Arguments that torch's CPU kernels refuse and its meta kernels let through: without these checks a wrong call would give a number.

Each check sees the arguments of the functional overload as meta tensors, once per signature, and raises what torch raises. What only the
values show (an index out of range, say) is not looked at: that would stop the graph (`index_checks` does, where it is asked for).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor

_CHECKS: dict[Any, list[Callable[..., None]]] = {}


def checks(*ops: torch._ops.OpOverload) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a check of one or more overloads; it takes their arguments."""

    def register(fn: Callable[..., None]) -> Callable[..., None]:
        for op in ops:
            _CHECKS.setdefault(op, []).append(fn)
        return fn

    return register


def check(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise if torch's CPU kernel of `op` would refuse the arguments."""
    for found in _CHECKS.get(op, ()):
        found(*args, **kwargs)


def one_dtype(name: str, *operands: Tensor | None) -> None:
    """RuntimeError, as in torch, unless all operands that are there have the same dtype."""
    found = [t.dtype for t in operands if t is not None]
    if len(set(found)) > 1:
        raise RuntimeError(
            f"{name}: expected all operands to have the same dtype, but got {', '.join(map(str, found))}: convert with .to(), or run the forward pass "
            "in torch.autocast('xla'), which converts float32 and 16-bit operands (never float64 or integers)"
        )


def fits_into(made: torch.dtype, held: torch.dtype) -> None:
    """RuntimeError, as in torch, for results of a kind that the tensor they are written to has no room for."""
    if not torch.can_cast(made, held):
        lost = (
            "the imaginary part"
            if made.is_complex
            else "what is behind the point"
            if made.is_floating_point
            else "all but whether it is zero"
        )
        raise RuntimeError(f"result type {made} can't be cast to the desired output type {held}: it would lose {lost}")


# -- dtypes and shapes ----------------------------------------------------------------------------


@checks(aten.complex.default)
def _complex(real: Tensor, imag: Tensor) -> None:
    allowed = (torch.float16, torch.float32, torch.float64)
    if real.dtype not in allowed or imag.dtype not in allowed:
        raise RuntimeError(f"torch.complex: expected both inputs to be Half, Float or Double tensors but got {real.dtype} and {imag.dtype}")
    if real.dtype != imag.dtype:
        raise RuntimeError(f"torch.complex: expected real and imag of one dtype, got {real.dtype} and {imag.dtype}: convert one with .to()")


@checks(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(self: Tensor, indices: Sequence[Tensor | None]) -> None:
    index_tensors(self, indices)


def index_tensors(self: Tensor, indices: Sequence[Tensor | None]) -> None:
    """IndexError, as in torch, for index tensors that are neither positions nor masks, that do not broadcast together, or that point into nothing, and for
    masks of other sizes than the dims that they stand for.
    """
    if len(indices) > self.dim():
        raise IndexError(f"too many indices for tensor of dimension {self.dim()} (got {len(indices)})")
    positions: list[tuple[int, Tensor]] = []
    dim = 0
    for at, index in enumerate(indices):
        if index is None:
            dim += 1
            continue
        if index.dtype not in (torch.int64, torch.int32, torch.bool, torch.uint8):
            raise IndexError(
                f"tensors used as indices must be long, int, byte or bool tensors, got {index.dtype}: convert it with .long(), or .bool() if it is a mask"
            )
        is_mask = index.dtype in (torch.bool, torch.uint8)
        if is_mask and index.shape != self.shape[dim : dim + index.dim()]:
            raise IndexError(
                f"The shape of the mask {list(index.shape)} at index {at} does not match the shape of the indexed tensor {list(self.shape)} at index {dim}"
            )
        if not is_mask:
            positions.append((dim, index))
        dim += index.dim() if is_mask else 1
    if dim > self.dim():
        raise IndexError(f"too many indices for tensor of dimension {self.dim()} (got {dim})")
    _positions(self, positions)


def _positions(self: Tensor, positions: Sequence[tuple[int, Tensor]]) -> None:
    shapes = [list(index.shape) for _, index in positions]
    try:
        chosen = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        told = ", ".join(map(str, shapes))
        raise IndexError(f"shape mismatch: indexing tensors could not be broadcast together with shapes {told}") from None
    for dim, _ in positions:
        if self.shape[dim] == 0 and 0 not in chosen:
            raise IndexError(f"index is out of bounds for dimension {dim} with size 0")


def written_values(self: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> None:
    """RuntimeError, as in torch, for values that do not fit to the positions that they are written to. How many a mask has, only its values show."""
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if masks:
        if sum(i is not None for i in indices) == 1:
            _masked_values(self, list(indices), masks[0], values)
        return
    into = aten.index.Tensor(self, indices).shape if any(i is not None for i in indices) else self.shape
    if len(values.shape) > len(into) or any(v not in (1, n) for v, n in zip(reversed(values.shape), reversed(into), strict=False)):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape {list(into)}"
        )


def _masked_values(self: Tensor, indices: Sequence[Tensor | None], mask: Tensor, values: Tensor) -> None:
    """Of all dims but that of a mask's positions."""
    at = next(d for d, index in enumerate(indices) if index is not None)
    into = [*self.shape[:at], -1, *self.shape[at + mask.dim() :]]
    most = mask.numel()
    pairs = list(zip(reversed(values.shape), reversed(into), strict=False))
    if values.dim() > len(into) or any(v not in (1, n) and not (n == -1 and v <= most) for v, n in pairs):
        told = ", ".join("number of True" if n == -1 else str(n) for n in into)
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape [{told}]"
        )


@checks(aten.max_pool2d_with_indices.default)
def _max_pool2d(self: Tensor, *rest: object, **kwargs: object) -> None:
    if self.dim() not in (3, 4):
        raise RuntimeError(f"max_pool2d: non-empty 3D or 4D (batch mode) tensor expected for input, got one of {self.dim()} dimensions")


@checks(aten.clamp.default, aten.clamp.Tensor, aten.clamp_.default, aten.clamp_.Tensor)
def _clamp(self: Tensor, min: complex | Tensor | None = None, max: complex | Tensor | None = None) -> None:
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")


@checks(aten.put.default)
def _put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> None:
    one_dtype("put_", self, source)
    if index.dtype != torch.int64:
        raise RuntimeError(f"put_(): Expected a long tensor for index, but got {index.dtype}: convert it with .long()")
    if index.numel() != source.numel():
        raise IndexError(
            "put_(): Expected source and index to have the same number of elements, but got "
            f"source.numel() = {source.numel()}, index.numel() = {index.numel()}"
        )


@checks(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def _index_fill(self: Tensor, dim: int, index: Tensor, value: complex | Tensor) -> None:
    _of_positions("index_fill_", index, IndexError)
    if isinstance(value, complex) and not self.dtype.is_complex:
        raise RuntimeError(f"index_fill_(): Converting complex Scalar to non-complex type is not supported: {value} into {self.dtype}")


@checks(aten.index_select.default)
def _index_select(self: Tensor, dim: int, index: Tensor) -> None:
    if index.dim() > 1:
        raise IndexError(
            f"index_select(): Index is supposed to be a vector, got {index.dim()} dims: index with self[index] along dim 0, or flatten it"
        )
    _of_positions("index_select", index)
    if self.dim() == 0 and index.numel() != 1:
        raise RuntimeError(f"index_select(): Index to scalar can have only 1 value, got {index.numel()}: use self.expand({index.numel()})")


def _of_positions(name: str, index: Tensor, error: type[Exception] = RuntimeError) -> None:
    """An error, as in torch, unless an index along a dim holds int32 or int64."""
    if index.dtype not in (torch.int32, torch.int64):
        raise error(f"{name}(): Expected dtype int32 or int64 for index, but got {index.dtype}: convert it with .long()")


@checks(aten.pow.Tensor_Scalar, aten._foreach_pow.Scalar)
def _power(self: Tensor | Sequence[Tensor], exponent: complex) -> None:
    bases = [self] if isinstance(self, Tensor) else self
    if isinstance(exponent, int) and exponent < 0 and not all(t.dtype.is_floating_point or t.dtype.is_complex for t in bases):
        raise RuntimeError("Integers to negative integer powers are not allowed. Use a float exponent, or convert the base with .float()")


@checks(aten.masked_scatter.default)
def _masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}: use mask.bool()")
    if self.dtype != source.dtype:
        raise RuntimeError(f"masked_scatter_: expected self and source to have same dtypes but got {self.dtype} and {source.dtype}")


@checks(aten.masked_scatter_.default)
def _masked_scatter_in_place(self: Tensor, mask: Tensor, source: Tensor) -> None:
    """torch's meta kernel lets larger masks through."""
    mask.expand_as(self)


@checks(aten.bucketize.Tensor, aten.bucketize.Scalar)
def _bucketize(self: Tensor | complex, boundaries: Tensor, **kwargs: object) -> None:
    if boundaries.dim() != 1:
        raise RuntimeError(f"bucketize: boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")


@checks(aten.embedding.default)
def _embedding(weight: Tensor, indices: Tensor, *rest: object, **kwargs: object) -> None:
    if weight.dim() != 2:
        raise RuntimeError(f"embedding: 'weight' must be 2-D, got {weight.dim()}-D")
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"embedding: Expected 'indices' to be Long or Int, but got {indices.dtype}: convert it with .long()")


@checks(aten.leaky_relu_backward.default)
def _leaky_relu_backward(grad_output: Tensor, self: Tensor, negative_slope: float, self_is_result: bool) -> None:
    _written_over("leaky_relu", "slope", negative_slope, self_is_result)


@checks(aten.rrelu_with_noise_backward.default)
def _rrelu_backward(
    grad_output: Tensor, self: Tensor, noise: Tensor, lower: float, upper: float, training: bool, self_is_result: bool
) -> None:
    _written_over("rrelu", "slope", (lower + upper) / 2, self_is_result)


@checks(aten.elu_backward.default)
def _elu_backward(grad_output: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, self_or_result: Tensor) -> None:
    _written_over("elu", "alpha", alpha, is_result)


def _written_over(name: str, what: str, number: float, self_is_result: bool) -> None:
    """RuntimeError, as in torch, where the result does not tell which side of zero the input was on."""
    if self_is_result and number < 0:
        raise RuntimeError(
            f"the gradient of an in-place {name} with a negative {what}, {number}, is not supported: its input is written over, and its result does not tell "
            "what it was. Use the function that is not in place"
        )


@checks(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def _adaptive_avg_pool(self: Tensor, output_size: Sequence[int]) -> None:
    if 0 in self.shape[-len(output_size) :]:
        raise RuntimeError(
            f"adaptive_avg_pool: Expected input to have non-zero size for non-batch dimensions, but input has sizes {list(self.shape)}"
        )


@checks(aten.linalg_lstsq.default)
def _lstsq(self: Tensor, b: Tensor, *rest: object, **kwargs: object) -> None:
    if self.dim() < 2:
        raise RuntimeError(f"torch.linalg.lstsq: input must have at least 2 dimensions, got {self.dim()}")
    if b.dim() < 1:
        raise RuntimeError("torch.linalg.lstsq: other must have at least 1 dimension, got 0")


@checks(aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> None:
    for i, t in enumerate(tensors):
        if t.dim() == 0:
            raise RuntimeError(f"cat: zero-dimensional tensor (at position {i}) cannot be concatenated; use torch.stack")


@checks(aten.narrow_copy.default)
def _narrow_copy(self: Tensor, dim: int, start: int, length: int) -> None:
    if dim >= self.dim():
        raise RuntimeError(f"narrow_copy: dim {dim} is out of range for a tensor of {self.dim()} dimensions")


@checks(aten.index_add.default)
def _index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, **kwargs: object) -> None:
    one_dtype("index_add", self, source)
    _of_positions("index_add", index)
    own, given = list(self.shape), list(source.shape)
    if len(own) == len(given) and -len(own) <= dim < len(own):
        own[dim] = index.numel()
    if own != given:
        raise RuntimeError(
            "index_add_(): source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {list(self.shape)} source.shape = {list(source.shape)}"
        )


@checks(aten.index_reduce.default)
def _index_reduce(self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, **kwargs: object) -> None:
    _of_positions("index_reduce_", index)
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise RuntimeError(f"index_reduce(): Expected reduce to be one of prod, mean, amax or amin but got {reduce}: index_add sums")
    if source.dim() and -source.dim() <= dim < source.dim() and index.numel() != source.shape[dim]:
        raise RuntimeError(
            f"index_reduce_(): Number of indices ({index.numel()}) should be equal to source.size(dim) ({source.shape[dim]})"
        )


@checks(aten.as_strided_scatter.default)
def _as_strided_scatter(self: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> None:
    reach = (storage_offset or 0) + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and reach > self.numel():
        raise RuntimeError(
            f"as_strided_scatter: sizes {list(size)}, strides {list(stride)}, storage offset {storage_offset or 0} need {reach} elements, "
            f"out of bounds for a tensor of {self.numel()}"
        )


# -- dims, and what is reduced --------------------------------------------------------------------


@checks(
    aten._softmax.default,
    aten._log_softmax.default,
    aten._safe_softmax.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
)
def _dim(self: Tensor, dim: int = -1, *rest: object, **kwargs: object) -> None:
    most = max(self.dim(), 1)
    if not -most <= dim < most:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {dim})")


@checks(aten.sort.stable)
def _stable_sort(self: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> None:
    _dim(self, dim)


@checks(aten.logsumexp.default)
def _logsumexp(self: Tensor, dim: Sequence[int], keepdim: bool = False) -> None:
    if not len(dim) and self.dim() and not keepdim:
        raise RuntimeError("logsumexp: an empty list of dims is not supported: name all of them")


@checks(aten.histc.default)
def _histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> None:
    if not (math.isfinite(min) and math.isfinite(max)):
        raise RuntimeError(f"torch.histc: range of [{min}, {max}] is not finite")


@checks(aten.segment_reduce.default)
def _segment_reduce(data: Tensor, reduce: str, lengths: Tensor | None = None, offsets: Tensor | None = None, **kwargs: object) -> None:
    for name, given in (("lengths", lengths), ("offsets", offsets)):
        if given is not None and given.dtype not in (torch.int32, torch.int64):
            raise NotImplementedError(f"segment_reduce(): not implemented for {name} of {given.dtype}: convert them with .long()")
    if reduce not in ("sum", "mean", "max", "min", "prod"):
        raise RuntimeError(f"reduce argument must be either sum, prod, mean, max or min, got {reduce}")


@checks(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def _searchsorted(sorted_sequence: Tensor, self: Tensor | complex, *, sorter: Tensor | None = None, **kwargs: object) -> None:
    if sorter is not None and sorter.dtype != torch.int64:
        raise RuntimeError(f"torch.searchsorted(): sorter must be a tensor of long dtype but got dtype {sorter.dtype}")


# -- reductions over nothing ----------------------------------------------------------------------


@checks(aten.amax.default, aten.amin.default)
def _extremum(self: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> None:
    _none_empty("amax/amin", self, list(dim))


@checks(aten.max.default, aten.min.default)
def _extremum_of_all(self: Tensor) -> None:
    if not self.numel():
        raise RuntimeError(
            "max()/min(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with the 'dim' argument."
        )


@checks(aten.argmax.default, aten.argmin.default)
def _position(self: Tensor, dim: int | None = None, keepdim: bool = False) -> None:
    if dim is None and not self.numel():
        raise IndexError("argmax()/argmin(): Expected reduction dim to be specified for input.numel() == 0.")
    _none_empty("argmax()/argmin()", self, [] if dim is None else [dim])


@checks(aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim)
def _with_position(self: Tensor, dim: int, keepdim: bool = False) -> None:
    _none_empty("max()/min()/median()", self, [dim])


@checks(aten.mode.default)
def _mode(self: Tensor, dim: int = -1, keepdim: bool = False) -> None:
    _none_empty("mode()", self, [dim])


@checks(aten.kthvalue.default)
def _kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> None:
    _none_empty("kthvalue()", self, [dim])


@checks(aten.aminmax.default)
def _aminmax(self: Tensor, *, dim: int | None = None, keepdim: bool = False) -> None:
    _none_empty("aminmax", self, [] if dim is None else [dim])


def _none_empty(name: str, x: Tensor, dims: list[int]) -> None:
    for d in dims:
        if x.dim() and -x.dim() <= d < x.dim() and x.shape[d] == 0:
            raise IndexError(f"{name}: Expected reduction dim {d} to have non-zero size.")


# -- convolutions ---------------------------------------------------------------------------------


@checks(aten.convolution.default, aten.convolution_overrideable.default, aten._convolution.default)
def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool = False,
    output_padding: Sequence[int] = (),
    groups: int = 1,
    *rest: object,
) -> None:
    one_dtype("convolution", input, weight, bias)
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if input.dim() > 1 and input.shape[1] != channels:
        raise RuntimeError(
            f"Given {'transposed=1' if transposed else f'groups={groups}'}, weight of size {list(weight.shape)}, "
            f"expected input{list(input.shape)} to have {channels} channels, but got {input.shape[1]} channels instead"
        )
    if weight.shape[0] < 1:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least 1 at dimension 0, but got weight of size {list(weight.shape)} instead"
        )
    made = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and list(bias.shape) != [made]:
        raise RuntimeError(
            f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with {made} elements, "
            f"but got bias of size {list(bias.shape)} instead"
        )
    if min(output_padding, default=0) < 0:
        raise RuntimeError(f"negative output_padding is not supported, got {list(output_padding)}")
    if transposed and any(more >= max(step, wide) for more, step, wide in zip(output_padding, stride, dilation, strict=False)):
        raise RuntimeError(
            f"output padding must be smaller than either stride or dilation, but got output_padding {list(output_padding)}, "
            f"stride {list(stride)}, dilation {list(dilation)}"
        )
    if min(padding, default=0) < 0:
        raise RuntimeError(f"negative padding is not supported, got {list(padding)}")
    if min(stride, default=1) <= 0:
        raise RuntimeError(f"non-positive stride is not supported, got {list(stride)}")
    if min(dilation, default=1) <= 0:
        raise RuntimeError(f"dilation should be greater than zero, got {list(dilation)}")


def _padding(dims: int) -> None:
    """The CPU kernels of reflection and replication take `dims` dims to pad, behind channels and perhaps a batch."""

    def check(self: Tensor, padding: Sequence[int]) -> None:
        if self.dim() not in (dims + 1, dims + 2):
            raise RuntimeError(
                f"Expected {dims + 1}D or {dims + 2}D (batch mode) tensor with possibly 0 batch size and other non-zero dimensions for input, "
                f"but got: {list(self.shape)}"
            )

    checks(*(getattr(aten, f"{kind}_pad{dims}d").default for kind in ("reflection", "replication")))(check)


for _dims in (1, 2, 3):
    _padding(_dims)


# -- images ---------------------------------------------------------------------------------------


@checks(
    *(getattr(aten, f"{kind}{dims}d").default for dims in (1, 2, 3) for kind in ("upsample_nearest", "_upsample_nearest_exact")),
    *(aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default, aten.upsample_trilinear3d.default),
    *(aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default),
)
def _resized(self: Tensor, output_size: Sequence[int], *rest: object, **kwargs: object) -> None:
    if min(*self.shape[2:], *output_size) <= 0:
        raise RuntimeError(
            f"Input and output sizes should be greater than 0, but got input {list(self.shape[2:])} and output {list(output_size)}"
        )


@checks(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def _grid_sampler(input: Tensor, grid: Tensor, *rest: object) -> None:
    one_dtype("grid_sampler", input, grid)
    empty = [d for d in range(2, input.dim()) if input.shape[d] == 0]
    if empty:
        raise RuntimeError(
            f"grid_sampler(): expected input to have non-empty spatial dimensions, but input has sizes {list(input.shape)} "
            f"with dimension {empty[0]} being empty"
        )


@checks(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def _fractional_max_pool(self: Tensor, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Tensor) -> None:
    of_batch = self.dim() == len(kernel_size) + 2
    if of_batch and random_samples.shape[0] < self.shape[0]:
        raise RuntimeError(
            f"Expect _random_samples.size(0) no less then input batch size, got {list(random_samples.shape)} for an input of {list(self.shape)}"
        )


@checks(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: object, target_lengths: object, blank: int = 0, *rest: object, **kwargs: object
) -> None:
    if log_probs.numel() == 0:
        raise RuntimeError(f"log_probs tensor must not be empty, got {list(log_probs.shape)}")
    if not log_probs.dtype.is_floating_point:
        raise NotImplementedError(f'"ctc_loss" not implemented for {log_probs.dtype}: it takes logarithms of probabilities')
    if not 0 <= blank < log_probs.shape[-1]:
        raise RuntimeError(f"blank must be in label range: got {blank} of {log_probs.shape[-1]} labels")


# -- distributions --------------------------------------------------------------------------------


@checks(aten.uniform.default)
def _uniform(self: Tensor, low: float = 0.0, high: float = 1.0, **named: float) -> None:
    low, high = named.get("from", low), named.get("to", high)
    if not self.dtype.is_floating_point and not self.dtype.is_complex:
        raise NotImplementedError(f"uniform_ is not implemented for {self.dtype}: for integers use random_ or randint")
    most = torch.finfo(self.dtype).max
    for name, bound in (("from", low), ("to", high)):
        if not -most <= bound <= most:
            raise RuntimeError(f"uniform_: {name}={bound} is out of bounds for {self.dtype}, which ends at {most:.6g}")
    if low > high:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")
    if high - low > most:
        raise RuntimeError(f"uniform_ expects to - from <= {most:.6g}, the greatest {self.dtype}, but found from={low} and to={high}")


@checks(aten.multinomial.default)
def _multinomial(self: Tensor, num_samples: int, replacement: bool = False, **kwargs: object) -> None:
    if not self.dtype.is_floating_point:
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {self.dtype}")
    if num_samples <= 0:
        raise RuntimeError(f"cannot sample n_sample <= 0 samples, got {num_samples}")
    if self.dim() not in (1, 2):
        raise RuntimeError(f"prob_dist must be 1 or 2 dim, got {self.dim()}")
    if not replacement and num_samples > self.shape[-1]:
        raise RuntimeError(f"cannot sample n_sample > prob_dist.size(-1) samples without replacement: {num_samples} of {self.shape[-1]}")
    if self.shape[-1] > 1 << 24:
        raise RuntimeError(f"number of categories cannot exceed 2^24, got {self.shape[-1]}")


# -- dtypes of out= -------------------------------------------------------------------------------


def _exact(name: str, wanted: torch.dtype, out: Tensor) -> None:
    if out.dtype != wanted:
        raise RuntimeError(f"{name}: expected out tensor to have dtype {wanted}, but got {out.dtype} instead")


@checks(aten.sort.values, aten.sort.values_stable, aten.kthvalue.values, aten.mode.values)
def _values_and_indices(self: Tensor, *rest: object, values: Tensor, indices: Tensor, **kwargs: object) -> None:
    _exact("values", self.dtype, values)
    _exact("indices", torch.int64, indices)


@checks(aten.take.out, aten.index_select.out)
def _of_own_dtype(self: Tensor, *rest: object, out: Tensor) -> None:
    _exact("out", self.dtype, out)


@checks(aten.amax.out, aten.amin.out)
def _extremum_out(self: Tensor, *rest: object, out: Tensor, **kwargs: object) -> None:
    _exact("amax() and amin()", self.dtype, out)


@checks(aten.any.out, aten.any.all_out, aten.any.dims_out, aten.all.out, aten.all.all_out, aten.all.dims_out)
def _truth_out(self: Tensor, *rest: object, out: Tensor, **kwargs: object) -> None:
    if out.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"any() and all() only support a bool tensor for the result, got: {out.dtype}")


@checks(aten.aminmax.out)
def _aminmax_out(self: Tensor, *, min: Tensor, max: Tensor, **kwargs: object) -> None:
    _exact("aminmax", self.dtype, min)
    _exact("aminmax", self.dtype, max)


@checks(aten.complex.out)
def _complex_out(real: Tensor, imag: Tensor, *, out: Tensor) -> None:
    _complex(real, imag)
    _exact("torch.complex", real.dtype.to_complex(), out)


@checks(aten.multinomial.out)
def _multinomial_out(self: Tensor, *rest: object, out: Tensor, **kwargs: object) -> None:
    _exact("multinomial", torch.int64, out)

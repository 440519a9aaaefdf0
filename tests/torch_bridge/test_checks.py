"""What torch's CPU kernels refuse and its meta kernels let through is refused, when it is recorded and with the same kind of exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_bridge
from tests.torch_bridge.devices import same

torch_bridge.register()

Call = Callable[[str], object]


def _zeros(*size: int, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.zeros(size, dtype=dtype, device=device)


x, two, long, half = _zeros(3), _zeros(2, 3), _zeros(3, dtype=torch.int64), _zeros(3, dtype=torch.bfloat16)
double = _zeros(3, dtype=torch.float64)

_WITH_POSITION = ("max", "min", "argmax", "argmin", "median", "nanmedian", "mode")
CASES: dict[str, tuple[Call, str]] = {
    "complex of integers": (lambda d: torch.complex(x(d), long(d)), "Half, Float or Double"),
    "complex of two dtypes": (lambda d: torch.complex(x(d), double(d)), "convert one with .to()"),
    "complex into float": (lambda d: torch.complex(x(d), x(d), out=x(d)), "torch.complex64, but got torch.float32"),
    "mask of integers": (lambda d: x(d).masked_scatter(long(d), x(d)), "use mask.bool()"),
    "masked_scatter of another dtype": (lambda d: x(d).masked_scatter(x(d) > 0, double(d)), "same dtypes"),
    "index of floats": (lambda d: two(d)[x(d)], "convert it with .long()"),
    "index of int8": (lambda d: two(d)[long(d).char()], "convert it with .long()"),
    "index_put at floats": (lambda d: two(d).index_put_((x(d)[:2],), two(d)), "convert it with .long()"),
    "integers to a negative power": (lambda d: long(d) ** -1, "Integers to negative integer powers are not allowed"),
    "bools to a negative power": (lambda d: long(d).bool().pow(-2), "convert the base with .float()"),
    "lists of integers to a negative power": (lambda d: torch._foreach_pow([long(d), long(d)], -1), "Use a float exponent"),
    **{
        f"{name} of integers": (lambda d, fn=fn: fn(long(d)), "not implemented for torch.int64")
        for name, fn in (
            ("softmax", lambda t: t.softmax(0)),
            ("log_softmax", lambda t: t.log_softmax(0)),
            ("gelu", torch.nn.functional.gelu),
            ("silu", torch.nn.functional.silu),
            ("softplus", torch.nn.functional.softplus),
            ("logsigmoid", torch.nn.functional.logsigmoid),
            ("hardswish", torch.nn.functional.hardswish),
            ("lerp", lambda t: torch.lerp(t, t, 0.5)),
            ("hypot", lambda t: torch.hypot(t, t)),
            ("logcumsumexp", lambda t: torch.logcumsumexp(t, 0)),
            ("mse_loss", lambda t: torch.nn.functional.mse_loss(t, t)),
            ("huber_loss", lambda t: torch.nn.functional.huber_loss(t, t)),
            ("smooth_l1_loss", lambda t: torch.nn.functional.smooth_l1_loss(t, t)),
            ("nll_loss", lambda t: torch.nn.functional.nll_loss(t[None], t[:1])),
            ("layer_norm", lambda t: torch.nn.functional.layer_norm(t, (3,))),
        )
    },  # type: ignore[misc]
    **{
        f"{name} of complex numbers": (lambda d, fn=fn: fn(x(d).to(torch.complex64)), "not implemented for torch.complex64")
        for name, fn in (
            ("softmax", lambda t: t.softmax(0)),
            ("less", lambda t: t < 1),
            ("max", lambda t: t.max()),
            ("maximum", lambda t: torch.maximum(t, t)),
            ("argmin", lambda t: t.argmin()),
            ("clamp", lambda t: t.clamp(0)),
            ("relu", torch.relu),
            ("sign", torch.sign),
            ("cummax", lambda t: t.cummax(0)),
            ("topk", lambda t: t.topk(1)),
            ("floor", torch.floor),
        )
    },  # type: ignore[misc]
    **{
        f"{name} of floats": (lambda d, fn=fn: fn(x(d)), "it takes integers: convert it with .long()")
        for name, fn in (
            ("and", lambda t: t & t),
            ("and with a number", lambda t: t.long() & 0.5),
            ("or with a mask", lambda t: (t > 0) | t),
            ("xor in place", lambda t: t.__ixor__(3)),
            ("bitwise_not", torch.bitwise_not),
            ("gcd", lambda t: torch.gcd(t, t)),
            ("lcm", lambda t: torch.lcm(t.long(), t)),
        )
    },  # type: ignore[misc]
    **{
        f"{name} of bools": (lambda d, fn=fn: fn(x(d) > 0), "not implemented for torch.bool: convert it with .int()")
        for name, fn in (
            ("gcd", lambda t: torch.gcd(t, t)),
            ("remainder", lambda t: torch.remainder(t, t)),
            ("fmod", lambda t: torch.fmod(t, t)),
            ("pow", lambda t: torch.pow(t, t)),
        )
    },  # type: ignore[misc]
    **{
        f"{name} with a complex number": (lambda d, fn=fn: fn(x(d)), "not implemented for torch.complex64: complex numbers have no order")
        for name, fn in (
            ("less", lambda t: t < 1j),
            ("clamp", lambda t: t.clamp(max=1j)),
            ("clamp to a tensor", lambda t: torch.clamp(t, max=t.to(torch.complex64))),
            ("remainder", lambda t: torch.remainder(t, t.to(torch.complex64))),
            ("fmod", lambda t: torch.fmod(t, 2j)),
            ("copysign", lambda t: torch.copysign(t, t.to(torch.complex64))),
            ("xlogy", lambda t: torch.xlogy(t, 1j)),
            ("division that rounds", lambda t: torch.div(t, t.to(torch.complex64), rounding_mode="trunc")),
        )
    },  # type: ignore[misc]
    "addcdiv of integers and bools": (
        lambda d: torch.addcdiv(long(d), long(d), long(d) > 0),
        "Integer division with addcdiv is no longer supported",
    ),
    "heaviside of two dtypes": (lambda d: torch.heaviside(x(d), long(d)), "tensors with different dtypes (torch.float32 and torch.int64)"),
    "filling bytes with a number that is none": (lambda d: long(d).char().masked_fill_(x(d) > 0, 300), "torch.int8 without overflow"),
    "filling integers with infinity": (lambda d: long(d).masked_fill(x(d) > 0, -torch.inf), "torch.int64 without overflow"),
    "filling with a complex number": (lambda d: x(d).masked_fill(x(d) > 0, 1 + 2j), "cannot be converted to torch.float32"),
    "filling bytes with a complex number that is none": (
        lambda d: long(d).char().masked_fill_(x(d) > 0, 300 + 0j),
        "torch.int8 without overflow",
    ),
    "nansum of complex numbers": (lambda d: torch.nansum(x(d).to(torch.complex64)), "nansum on CPU does not support complex inputs"),
    "relu of bools": (lambda d: torch.relu(long(d) > 0), "Boolean inputs not supported"),
    "a number minus bools": (lambda d: 1 - (long(d) > 0), "with a bool tensor is not supported"),
    "bools minus bools": (lambda d: (long(d) > 0) - (long(d) > 1), "with two bool tensors is not supported"),
    "floats minus True": (lambda d: x(d) - True, "convert it with .int()"),
    "a mask of another size": (lambda d: two(d)[long(d) > 0], "The shape of the mask [3] at index 0 does not match"),
    "writing through a mask of another size": (
        lambda d: two(d).__setitem__((slice(None), x(d)[:2] > 0), 1),
        "indexed tensor [2, 3] at index 1",
    ),
    "writing what does not fit": (
        lambda d: two(d).__setitem__(([0, 1], slice(None)), torch.zeros(2, 2, device=d)),
        "value tensor of shape [2, 2] cannot be broadcast to indexing result of shape [2, 3]",
    ),
    "accumulating what does not fit": (
        lambda d: x(d).index_put_((torch.tensor([0, 1], device=d),), x(d), accumulate=True),
        "value tensor of shape [3] cannot be broadcast",
    ),
    "indices of other sizes": (
        lambda d: two(d)[[0, 1], [0, 1, 2]],
        "shape mismatch: indexing tensors could not be broadcast together with shapes [2], [3]",
    ),
    "indices into nothing": (lambda d: _zeros(2, 0)(d)[:, [0, 1]], "index is out of bounds for dimension 1 with size 0"),
    "too many indices": (lambda d: torch.ops.aten.index(x(d), [None, long(d)]), "too many indices for tensor of dimension 1 (got 2)"),
    "too many dims of masks": (lambda d: two(d)[two(d) > 0, long(d)[:1]], "too many indices for tensor of dimension 2"),
    "writing rows that do not fit through a mask": (
        lambda d: two(d).__setitem__(x(d)[:2] == 0, torch.ones(2, 2, device=d)),
        "value tensor of shape [2, 2] cannot be broadcast",
    ),
    "writing more than a mask has": (
        lambda d: x(d).__setitem__(x(d) == 0, torch.ones(4, device=d)),
        "value tensor of shape [4] cannot be broadcast to indexing result of shape [",
    ),
    "writing a matrix through a mask of all dims": (
        lambda d: two(d).__setitem__(two(d) == 0, torch.ones(6, 1, device=d)),
        "value tensor of shape [6, 1] cannot be broadcast to indexing result of shape [",
    ),
    "put of other sizes": (lambda d: x(d).put(long(d)[:2], x(d)), "source.numel() = 3, index.numel() = 2"),
    "put at int32": (lambda d: x(d).put(long(d).int(), x(d)), "Expected a long tensor for index"),
    "index_copy at floats": (lambda d: x(d).index_copy(0, x(d), x(d)), "Expected a long tensor for index"),
    "index_copy of other sizes": (
        lambda d: x(d).index_copy(0, long(d)[:2], x(d)),
        "Number of indices (2) should be equal to source.size(dim) (3)",
    ),
    "index_fill of a complex number": (
        lambda d: x(d).index_fill(0, long(d), 1j),
        "Converting complex Scalar to non-complex type is not supported",
    ),
    "the greatest of complex numbers at indices": (
        lambda d: x(d).cfloat().scatter_reduce(0, long(d), x(d).cfloat(), "amax"),
        "not implemented for",
    ),
    "batch norm of another dtype": (
        lambda d: torch.nn.functional.batch_norm(torch.zeros(2, 3, device=d).double(), x(d), x(d), x(d), x(d)),
        "batch_norm: expected all operands to have the same dtype, but got torch.float64, torch.float32",
    ),
    "rows of an embedding at floats": (lambda d: torch.nn.functional.embedding(x(d), two(d)), "Expected 'indices' to be Long or Int"),
    "attention among dtypes": (
        lambda d: torch.nn.functional.scaled_dot_product_attention(two(d), two(d).double(), two(d)),
        "key.dtype: torch.float64",
    ),
    "attention to fewer values than keys": (
        lambda d: torch.nn.functional.scaled_dot_product_attention(two(d), two(d), _zeros(3, 3)(d)),
        "Expected as many keys as values, but got key of shape [2, 3] and value of shape [3, 3]",
    ),
    "attention to keys of another size": (
        lambda d: torch.nn.functional.scaled_dot_product_attention(two(d), _zeros(2, 4)(d), two(d)),
        "Expected queries and keys of one size, but got query of shape [2, 3] and key of shape [2, 4]",
    ),
    "attention of vectors": (lambda d: torch.nn.functional.scaled_dot_product_attention(x(d), x(d), x(d)), "at least 2 dimensional"),
    **{
        f"gradient of an in-place {name} with a negative number": (
            lambda d, fn=fn: fn(x(d).requires_grad_() * 1).sum().backward(),
            f"the gradient of an in-place {name} with a negative",
        )
        for name, fn in (
            ("leaky_relu", lambda t: torch.nn.functional.leaky_relu_(t, -0.5)),
            ("elu", lambda t: torch.nn.functional.elu_(t, -0.5)),
            ("rrelu", lambda t: torch.nn.functional.rrelu_(t, -0.5, -0.5)),
        )
    },  # type: ignore[misc]
    **{
        f"{name} of what is larger": (
            lambda d, name=name: getattr(_zeros(3, 1)(d), name)(_zeros(3, 4)(d)),
            "output with shape [3, 1] doesn't match the broadcast shape [3, 4]",
        )
        for name in ("add_", "atan2_", "pow_", "fmod_", "eq_", "hypot_", "copysign_", "floor_divide_", "clamp_min_")
    },  # type: ignore[misc]
    **{
        f"{kind}_pad{dims}d of {dims + 3} dims": (
            lambda d, kind=kind, dims=dims: getattr(torch.ops.aten, f"{kind}_pad{dims}d")(_zeros(*[3] * (dims + 3))(d), [1] * 2 * dims),
            f"Expected {dims + 1}D or {dims + 2}D (batch mode) tensor",
        )
        for kind in ("reflection", "replication")
        for dims in (1, 2, 3)
    },  # type: ignore[misc]
    **{
        f"{mode} images of no pixels": (
            lambda d, mode=mode: torch.nn.functional.interpolate(_zeros(1, 1, 2, 3)(d), (0, 2), mode=mode),
            "Input and output sizes should be greater than 0",
        )
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    },  # type: ignore[misc]
    **{
        f"{mode} images of integers": (
            lambda d, mode=mode: torch.nn.functional.interpolate(_zeros(1, 1, 2, 3, dtype=torch.int32)(d), (4, 4), mode=mode),
            "not implemented for",
        )
        for mode in ("bilinear", "bicubic")
    },  # type: ignore[misc]
    "averages of integers": (lambda d: torch.nn.functional.adaptive_avg_pool2d(long(d).view(1, 1, 3), 2), "not implemented for"),
    **{
        f"{name} of bools": (lambda d, fn=fn: fn(two(d)[None] > 0), "not implemented for")
        for name, fn in (
            ("max_pool1d", lambda t: torch.nn.functional.max_pool1d(t, 2)),
            ("max_pool2d", lambda t: torch.nn.functional.max_pool2d(t, 2)),
            ("adaptive_max_pool2d", lambda t: torch.nn.functional.adaptive_max_pool2d(t, 2)),
        )
    },  # type: ignore[misc]
    "max_pool2d of complex numbers": (lambda d: torch.nn.functional.max_pool2d(two(d)[None].cfloat(), 2), "not implemented for"),
    "pooling by the samples of another batch": (
        lambda d: torch.nn.functional.fractional_max_pool3d(
            _zeros(2, 1, 4, 4, 4)(d), 2, output_size=(1, 1, 1), _random_samples=_zeros(1, 1, 3)(d)
        ),
        "Expect _random_samples.size(0) no less then input batch size",
    ),
    "bags weighed in another dtype": (
        lambda d: torch.nn.functional.embedding_bag(long(d)[None], two(d), mode="sum", per_sample_weights=double(d)[None]),
        "same",
    ),
    "attention that drops more than all": (
        lambda d: torch.nn.functional.scaled_dot_product_attention(*[_zeros(1, 1, 2, 4)(d)] * 3, dropout_p=1.5),
        "dropout probability has to be between 0 and 1, but got 1.5",
    ),
    "native_dropout of more than all": (
        lambda d: torch.native_dropout(x(d), 1.5, True),
        "dropout probability has to be between 0 and 1, but got 1.5",
    ),
    "a histogram without an end": (lambda d: torch.histc(x(d), 3, 0, torch.inf), "range of [0, inf] is not finite"),
    "samples of nothing": (
        lambda d: torch.nn.functional.grid_sample(_zeros(1, 1, 2, 0)(d), _zeros(1, 1, 1, 2)(d), align_corners=False),
        "expected input to have non-empty spatial dimensions, but input has sizes [1, 1, 2, 0]",
    ),
    "samples at positions of another dtype": (
        lambda d: torch.nn.functional.grid_sample(_zeros(1, 1, 2, 2)(d), _zeros(1, 1, 1, 2)(d).double(), align_corners=False),
        "grid_sampler: expected all operands to have the same dtype, but got torch.float32, torch.float64",
    ),
    "ctc_loss of nothing": (
        lambda d: torch.nn.functional.ctc_loss(_zeros(0, 0, 4)(d), long(d)[:0], long("cpu")[:0], long("cpu")[:0]),
        "log_probs tensor must not be empty",
    ),
    "nll_loss with weights of other classes": (
        lambda d: torch.nn.functional.nll_loss(two(d), long(d)[:2], weight=x(d)[:2]),
        "weight tensor should be defined either for all 3 classes or no classes",
    ),
    "a module on meta": (lambda d: torch.nn.Linear(2, 2, device="meta").to(d), "Please use torch.nn.Module.to_empty() instead"),
    "averages over nothing": (
        lambda d: torch.nn.functional.adaptive_avg_pool2d(torch.zeros(1, 2, 3, 0, device=d), 2),
        "Expected input to have non-zero size for non-batch dimensions, but input has sizes [1, 2, 3, 0]",
    ),
    **{
        f"{name} along a dim that is not there": (
            lambda d, fn=fn: fn(two(d)),
            "Dimension out of range (expected to be in range of [-2, 1], but got 2)",
        )
        for name, fn in (
            ("softmax", lambda t: t.softmax(2)),
            ("log_softmax", lambda t: t.log_softmax(2)),
            ("sort", lambda t: t.sort(2)),
            ("a stable sort", lambda t: t.sort(dim=2, stable=True)),
            ("cummax", lambda t: t.cummax(2)),
        )
    },  # type: ignore[misc]
    "logsumexp of no dims": (lambda d: two(d).logsumexp(()), "an empty list of dims is not supported: name all of them"),
    "segments by an unknown reduction": (lambda d: torch.segment_reduce(x(d), "foo", lengths=long(d)), "got foo"),
    "floats filled with a complex number": (lambda d: torch.full((2,), 1 + 1j, dtype=torch.float32, device=d), "without overflow"),
    "fill_ of floats with a complex number": (lambda d: x(d).fill_(1j), "without overflow"),
    "argmax of bools": (lambda d: torch.argmax(x(d) > 0), "support bool input"),
    "linspace of bools": (lambda d: torch.linspace(0, 1, 3, dtype=torch.bool, device=d), "for torch.bool"),
    "signbit of complex numbers": (lambda d: torch.signbit(x(d).cfloat()), "complex numbers have no order"),
    "logaddexp of integers": (lambda d: torch.logaddexp(long(d), long(d)), "not implemented for torch.int64: convert it with .float()"),
    "binary cross-entropy of integers": (
        lambda d: torch.nn.functional.binary_cross_entropy(long(d), long(d)),
        "not implemented for torch.int64: convert it with .float()",
    ),
    "prelu of integers": (lambda d: torch.nn.functional.prelu(long(d), long(d)[:1]), "not implemented for torch.int64"),
    "relu6 of complex numbers": (lambda d: torch.nn.functional.relu6(x(d).to(torch.complex64)), "complex numbers have no order"),
    "atan2 of complex numbers": (lambda d: torch.atan2(*[x(d).to(torch.complex64)] * 2), "complex numbers have no order"),
    **{
        f"{name} of complex numbers, which are no real ones": (
            lambda d, fn=fn: fn(x(d).cfloat()),
            "not implemented for torch.complex64: it takes real numbers",
        )
        for name, fn in (
            ("erf", torch.erf),
            ("erfinv", torch.erfinv),
            ("lgamma", torch.lgamma),
            ("digamma", torch.digamma),
            ("polygamma", lambda t: torch.polygamma(1, t)),
            ("i0", torch.i0),
            ("i1e", torch.special.i1e),
            ("entr", torch.special.entr),
            ("zeta", lambda t: torch.special.zeta(t, 2.0)),
            ("bessel_j1", torch.special.bessel_j1),
            ("chebyshev_polynomial_t", lambda t: torch.special.chebyshev_polynomial_t(t, 2)),
            ("frac", torch.frac),
            ("logit", torch.logit),
            ("rounding to decimals", lambda t: torch.round(t, decimals=1)),
        )
    },  # type: ignore[misc]
    **{
        f"{name}, which takes fractions": (lambda d, fn=fn: fn(long(d)), "not implemented for torch.int64: convert it with .float()")
        for name, fn in (
            ("glu", lambda t: torch.nn.functional.glu(t[:2])),
            ("igamma", lambda t: torch.igamma(t, t)),
            ("multi_margin_loss", lambda t: torch.nn.functional.multi_margin_loss(t[None], t[:1])),
            ("cholesky", lambda t: torch.cholesky(t.expand(3, 3))),
            ("geqrf", lambda t: torch.geqrf(t.expand(3, 3))),
            ("lu", lambda t: torch.linalg.lu(t.expand(3, 3))),
            ("eigh", lambda t: torch.linalg.eigh(t.expand(3, 3))),
            ("householder_product", lambda t: torch.linalg.householder_product(t.expand(3, 3), t)),
            ("solve_triangular", lambda t: torch.linalg.solve_triangular(t.expand(3, 3), t[:, None], upper=True)),
            ("segment_reduce", lambda t: torch.segment_reduce(t, "sum", lengths=t)),
            ("grid_sample", lambda t: torch.nn.functional.grid_sample(t.view(1, 1, 1, 3), t[:2].view(1, 1, 1, 2), align_corners=False)),
        )
    },  # type: ignore[misc]
    "interpolation of complex numbers": (
        lambda d: torch.nn.functional.interpolate(_zeros(1, 1, 3)(d).cfloat(), 5, mode="linear"),
        "not implemented for torch.complex64",
    ),
    **{
        f"{name} into bools": (lambda d, name=name: getattr(torch, name)(x(d) > 0, 0, dtype=torch.bool), "not implemented for")
        for name in ("cumsum", "cumprod")
    },  # type: ignore[misc]
    "shifts of floats": (lambda d: torch.bitwise_left_shift(x(d), 1), "not implemented for torch.float32: it takes integers"),
    "shifts by floats": (lambda d: torch.bitwise_right_shift(long(d), x(d)), "not implemented for torch.float32: it takes integers"),
    "shifts of bools": (lambda d: torch.bitwise_left_shift(x(d) > 0, x(d) > 0), "not implemented for torch.bool: convert it with .int()"),
    "masked_select by integers": (lambda d: (x(d) + 1).masked_select(long(d)), "expected BoolTensor for mask"),
    "index_select at floats": (lambda d: x(d).index_select(0, x(d)), "index_select(): Expected dtype int32 or int64 for index"),
    "index_select at bools": (lambda d: x(d).index_select(0, x(d) > 0), "convert it with .long()"),
    "index_select of a number, many times": (lambda d: x(d)[0].index_select(0, long(d)), "Index to scalar can have only 1 value, got 3"),
    "index_add at floats": (lambda d: x(d).index_add(0, x(d), x(d)), "index_add(): Expected dtype int32 or int64 for index"),
    "index_fill at floats": (lambda d: x(d).index_fill(0, x(d), 1), "index_fill_(): Expected dtype int32 or int64 for index"),
    "index_reduce at floats": (
        lambda d: x(d).index_reduce(0, x(d), x(d), "prod"),
        "index_reduce_(): Expected dtype int32 or int64 for index",
    ),
    "index_reduce that sums": (lambda d: x(d).index_reduce(0, long(d), x(d), "sum"), "one of prod, mean, amax or amin but got sum"),
    "index_reduce of other rows": (
        lambda d: x(d).index_reduce(0, long(d), x(d)[:1], "prod"),
        "Number of indices (3) should be equal to source.size(dim) (1)",
    ),
    "searchsorted in the order of floats": (lambda d: torch.searchsorted(x(d), x(d), sorter=x(d)), "sorter must be a tensor of long dtype"),
    "segments of lengths in floats": (lambda d: torch.segment_reduce(x(d), "sum", lengths=x(d)), "for lengths of torch.float32"),
    "convolution with another bias": (
        lambda d: torch.nn.functional.conv1d(two(d)[None], _zeros(4, 2, 1)(d), x(d)),
        "expected bias to be 1-dimensional with 4 elements, but got bias of size [3] instead",
    ),
    "transposed convolution with another bias": (
        lambda d: torch.nn.functional.conv_transpose1d(two(d)[None], _zeros(2, 4, 1)(d), x(d)),
        "expected bias to be 1-dimensional with 4 elements, but got bias of size [3] instead",
    ),
    "convolution to no channels": (
        lambda d: torch.nn.functional.conv1d(two(d)[None], _zeros(0, 2, 1)(d)),
        "to be at least 1 at dimension 0",
    ),
    "transposed convolution from no channels": (
        lambda d: torch.nn.functional.conv_transpose1d(two(d)[None, :0], _zeros(0, 2, 1)(d)),
        "to be at least 1 at dimension 0",
    ),
    "max_pool2d of a matrix": (lambda d: torch.nn.functional.max_pool2d(two(d), 2), "3D or 4D (batch mode) tensor expected for input"),
    "clamp without bounds": (lambda d: x(d).clamp(), "At least one of 'min' or 'max' must not be None"),
    "clamp_ without bounds": (lambda d: x(d).clamp_(), "At least one of 'min' or 'max' must not be None"),
    "normal with a complex deviation": (lambda d: torch.normal(x(d), x(d).cfloat()), "standard deviation to be non-complex"),
    "normal around 0 with a complex deviation": (lambda d: torch.normal(0.0, x(d).cfloat()), "standard deviation to be non-complex"),
    "normal around integers": (lambda d: torch.normal(long(d), x(d).abs()), "not implemented for"),
    "arange of bools": (lambda d: torch.arange(2, dtype=torch.bool, device=d), "not implemented for"),
    "cumsum_ of bools": (lambda d: (x(d) > 0).cumsum_(0), "not implemented for torch.bool"),
    "cumprod into bools": (lambda d: torch.cumprod(x(d), 0, out=x(d) > 0), "not implemented for torch.bool"),
    "amax into double": (lambda d: torch.amax(x(d), 0, out=double(d)), "dtype torch.float32, but got torch.float64"),
    "any into floats": (lambda d: torch.any(x(d), 0, out=x(d)), "only support a bool tensor for the result, got: torch.float32"),
    "all into integers": (lambda d: torch.all(x(d), 0, out=long(d)), "only support a bool tensor for the result, got: torch.int64"),
    "transposed convolution with too much output padding": (
        lambda d: torch.nn.functional.conv_transpose1d(two(d)[None], _zeros(2, 4, 1)(d), stride=2, output_padding=2),
        "output padding must be smaller than either stride or dilation",
    ),
    "transposed convolution with negative output padding": (
        lambda d: torch.nn.functional.conv_transpose1d(two(d)[None], _zeros(2, 4, 1)(d), output_padding=-1),
        "negative output_padding is not supported",
    ),
    "smooth_l1_loss with a negative beta": (
        lambda d: torch.nn.functional.smooth_l1_loss(x(d), x(d), beta=-1),
        "does not support negative values for beta",
    ),
    "ctc_loss with a blank that is no label": (
        lambda d: torch.nn.functional.ctc_loss(_zeros(4, 1, 3)(d), long(d)[None] + 1, long("cpu")[:1] + 4, long("cpu")[:1] + 2, blank=5),
        "blank must be in label range",
    ),
    "index_select at a matrix": (lambda d: x(d).index_select(0, long(d)[None]), "supposed to be a vector"),
    "convolution of other channels": (
        lambda d: torch.nn.functional.conv1d(two(d)[None], torch.zeros(4, 3, 1, device=d)),
        "expected input[1, 2, 3] to have 3 channels, but got 2 channels instead",
    ),
    "transposed convolution of other channels": (
        lambda d: torch.nn.functional.conv_transpose1d(two(d)[None], torch.zeros(4, 3, 1, device=d)),
        "Given transposed=1, weight of size [4, 3, 1]",
    ),
    "attention with a mask of integers": (
        lambda d: torch.nn.functional.scaled_dot_product_attention(two(d)[None], two(d)[None], two(d)[None], long(d)[:2]),
        "use attn_mask.bool()",
    ),
    "bucketize in a matrix": (lambda d: torch.bucketize(x(d), two(d)), "must be 1 dimension, but got dim(2)"),
    "embedding of a vector": (lambda d: torch.nn.functional.embedding(long(d), x(d)), "'weight' must be 2-D, got 1-D"),
    "lstsq of a vector": (lambda d: torch.linalg.lstsq(x(d), x(d), driver="gels"), "at least 2 dimensions, got 1"),
    "cat of a number": (lambda d: torch.cat([x(d)[0], x(d)]), "position 0"),
    "narrow_copy of a missing dim": (lambda d: torch.narrow_copy(x(d), 1, 0, 1), "dim 1 is out of range"),
    "index_add of another shape": (lambda d: two(d).index_add(0, torch.tensor([0, 1], device=d), x(d)), "source.shape = [3]"),
    "index_add of rows to a number": (
        lambda d: x(d)[0].index_add(0, torch.tensor([0], device=d), x(d)[:1]),
        "self.shape = [] source.shape = [1]",
    ),
    "as_strided_scatter beyond the end": (lambda d: torch.as_strided_scatter(x(d), x(d), (3,), (2,)), "need 5 elements"),
    "amax over nothing": (lambda d: torch.amax(two(d)[:, :0], 1), "non-zero size"),
    **{
        f"{name} over nothing": (lambda d, name=name: getattr(two(d)[:, :0], name)(1), "dim 1 to have non-zero size")
        for name in _WITH_POSITION
    },  # type: ignore[misc]
    "kthvalue over nothing": (lambda d: two(d)[:, :0].kthvalue(1, 1), "dim 1 to have non-zero size"),
    **{
        f"{name} of nothing": (lambda d, name=name: getattr(x(d)[:0], name)(), "reduction dim to be specified")
        for name in ("max", "min", "argmax", "argmin")
    },  # type: ignore[misc]
    "aminmax over nothing": (lambda d: torch.aminmax(two(d)[:, :0], dim=1), "non-zero size"),
    "aminmax into double": (lambda d: torch.aminmax(x(d), dim=0, out=(double(d), double(d))), "dtype torch.float32"),
    "convolution without dilation": (
        lambda d: torch.nn.functional.conv1d(two(d)[None], two(d)[None], dilation=-1),
        "dilation should be greater than zero, got [-1]",
    ),
    "convolution with negative padding": (lambda d: torch.nn.functional.conv1d(two(d)[None], two(d)[None], padding=-1), "negative padding"),
    "convolution without stride": (lambda d: torch.nn.functional.conv1d(two(d)[None], two(d)[None], stride=0), "non-positive stride"),
    "uniform_ of an empty range": (lambda d: x(d).uniform_(3, -1), "from=3.0 > to=-1.0"),
    "multinomial of integers": (lambda d: torch.multinomial(long(d), 2), "floating-point dtypes"),
    "multinomial of nothing": (lambda d: torch.multinomial(x(d) + 1, 0), "n_sample <= 0"),
    "multinomial of a cube": (lambda d: torch.multinomial(two(d)[None], 1), "1 or 2 dim, got 3"),
    "multinomial of too many": (lambda d: torch.multinomial(x(d) + 1, 4), "without replacement: 4 of 3"),
    "multinomial into floats": (lambda d: torch.multinomial(x(d) + 1, 2, out=x(d)), "torch.int64, but got torch.float32"),
    "sort into double": (
        lambda d: torch.sort(x(d), 0, out=(double(d), long(d))),
        "values: expected out tensor to have dtype torch.float32",
    ),
    "mode into floats": (lambda d: torch.mode(x(d), 0, out=(x(d), x(d))), "indices: expected out tensor to have dtype torch.int64"),
    "take into double": (lambda d: torch.take(x(d), long(d), out=double(d)), "expected out tensor to have dtype torch.float32"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_as_on_the_cpu(name: str) -> None:
    call, text = CASES[name]
    with pytest.raises((RuntimeError, IndexError, TypeError)) as on_cpu:
        call("cpu")
    with pytest.raises(on_cpu.type) as found:
        call("xla")
    assert text in str(found.value)


def test_index_add_takes_what_the_cpu_takes() -> None:
    at = torch.tensor([2, 0])
    for own, source in ((torch.zeros(3), torch.ones(2)), (torch.zeros(3, 4), torch.ones(2, 4))):
        assert torch.equal(own.to("xla").index_add(0, at.to("xla"), source.to("xla")).cpu(), own.index_add(0, at, source))
    number = torch.zeros(()).to("xla").index_add(0, at[1:].to("xla"), torch.tensor(1.0).to("xla"))
    assert number.item() == 1


def test_index_add_of_integers_leaves_out_what_is_behind_the_point() -> None:
    own, at, source = torch.tensor([1, 2, 3]), torch.tensor([2, 0]), torch.tensor([5, 7])
    for alpha in (1.5, 2.0, -0.5, 2.9):
        expected = own.index_add(0, at, source, alpha=alpha)
        assert torch.equal(own.to("xla").index_add(0, at.to("xla"), source.to("xla"), alpha=alpha).cpu(), expected)
        assert torch.equal(own.to("xla").index_add_(0, at.to("xla"), source.to("xla"), alpha=alpha).cpu(), expected)


@pytest.mark.parametrize("held", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["sum", "prod", "cumsum", "cumprod"])
def test_sums_compute_in_the_dtype_of_out(name: str, held: torch.dtype) -> None:
    for given in (torch.tensor([0.6, 0.7, 2.5]), torch.tensor([True, False, True]), torch.tensor([200, 100, 3])):
        if held == torch.bool and name.startswith("cum"):
            continue
        expected, found = torch.empty(0, dtype=held), torch.empty(0, dtype=held, device="xla")
        getattr(torch, name)(given, 0, out=expected)
        getattr(torch, name)(given.to("xla"), 0, out=found)
        torch.testing.assert_close(found.cpu(), expected)


def test_arange_of_narrow_integers_takes_fractions() -> None:
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(torch.arange(0, 1, 0.3, dtype=dtype, device="xla").cpu(), torch.arange(0, 1, 0.3, dtype=dtype))


def test_convolutions_of_no_channels() -> None:
    expected = torch.nn.functional.conv1d(torch.zeros(2, 0, 3), torch.zeros(4, 0, 2), torch.ones(4))
    found = torch.nn.functional.conv1d(*(t.to("xla") for t in (torch.zeros(2, 0, 3), torch.zeros(4, 0, 2), torch.ones(4))))
    assert found.cpu().shape == expected.shape


def test_integers_beside_floats_are_taken() -> None:
    """Labels and targets, and what the CPU promotes."""

    def run(device: str) -> Any:
        t, labels = torch.arange(6.0, device=device).reshape(2, 3), torch.tensor([2, 0], device=device)
        f = torch.nn.functional
        image = t[None].log_softmax(1)
        return (
            f.cross_entropy(t, labels),
            f.nll_loss(image.transpose(1, 2), torch.tensor([[0, 2]], device=device)),
            f.mse_loss(t, t.long() + 1),
            f.huber_loss(t, t.long() + 1),
            f.smooth_l1_loss(t.long() + 1, t),
            torch.hypot(t, t.long()),
            torch.maximum(t, t.long()),
            t.clamp(min=labels[0]),
            t > labels[:1],
            t - labels[:1],
            t.to(torch.complex64).var(),
        )

    same(run)


def test_integers_are_counted_as_accelerators_do() -> None:
    """`transformers` counts tokens by expert so wherever a device is not the CPU, whose kernel refuses them."""
    experts = torch.tensor([0, 2, 2, 3, 2])
    counted = torch.histc(experts.int().to("xla"), bins=4, min=0, max=3)
    assert counted.tolist() == torch.histc(experts.float(), bins=4, min=0, max=3).tolist() and counted.dtype == torch.int32
    small = torch.tensor([0, 2, 2, 3], device="xla")  # made on the device: what waits may be computed on the host
    assert torch.histc(small, 4, 0, 3).cpu().tolist() == [1, 0, 2, 1]


def test_shifts_of_masks_by_numbers() -> None:
    def run(device: str) -> Any:
        mask = torch.tensor([True, False], device=device)
        return torch.bitwise_left_shift(mask, 2), mask << 1, torch.bitwise_left_shift(mask, torch.tensor(2, device=device))

    same(run)


def test_transposed_convolutions_take_output_padding_below_the_dilation() -> None:
    def run(device: str) -> Any:
        x, weight, bias = (
            torch.arange(8.0, device=device).view(1, 4, 2),
            torch.ones(4, 3, 2, device=device),
            torch.arange(6.0, device=device),
        )
        return torch.nn.functional.conv_transpose1d(x, weight, bias, output_padding=1, dilation=2, groups=2)

    same(run)


@pytest.mark.parametrize("op", [torch.var, torch.std, torch.var_mean, torch.std_mean])
def test_spread_of_integers_is_refused(op: Callable[[torch.Tensor], object]) -> None:
    """With other words than the CPU's RuntimeError, for which scripts look as well."""
    with pytest.raises(RuntimeError):
        op(long("cpu"))
    with pytest.raises(RuntimeError, match=r"not implemented for torch.int64: convert it with .float\(\)"):
        op(long("xla"))


SPARSE: dict[str, Call] = {
    "moving one": lambda d: torch.eye(3).to_sparse().to(d),
    "making one": lambda d: torch.eye(3, device=d).to_sparse(),
    "a gradient": lambda d: torch.nn.Embedding(5, 3, sparse=True, device=d)(torch.tensor([1], device=d)).sum().backward(),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.filterwarnings("ignore:.*has no JAX lowering")
def test_sparse_tensors_say_what_to_do(name: str) -> None:
    with pytest.raises(NotImplementedError, match="has no sparse tensors, got torch.sparse_coo of shape") as found:
        SPARSE[name]("xla")
    assert ".to_dense()" in str(found.value) and "sparse=False" in str(found.value) and "test_checks.py" in str(found.value)


def test_a_moved_view_keeps_the_order_of_its_dims() -> None:
    view = torch.arange(24.0).view(4, 6).t()[::2]
    moved = view.to("xla")
    assert moved.stride() == view.clone().stride()
    assert torch.equal(moved.cpu(), view)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.filterwarnings("ignore:.*has no JAX lowering")
def test_an_encoder_in_evaluation_keeps_padded_batches() -> None:
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    x, padding = torch.randn(2, 4, 8), torch.tensor([[False, False, False, True], [False, False, True, True]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        found = encoder.to("xla")(x.to("xla"), src_key_padding_mask=padding.to("xla"))
    torch.testing.assert_close(found.cpu()[~padding], expected[~padding])


def test_logcumsumexp_of_complex_numbers_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"use x\.exp\(\)\.cumsum\(dim\)\.log\(\) instead"):
        torch.logcumsumexp(torch.ones(2, dtype=torch.complex64, device="xla"), 0)

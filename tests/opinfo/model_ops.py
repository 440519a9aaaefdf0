"""The operators that models run in bfloat16."""

from __future__ import annotations

from typing import Any


def in_models(op: Any) -> bool:
    """Whether models use the entry, so that it runs in bfloat16 too."""
    return op.name.startswith(_FAMILIES) or op.name in _OPS


_FAMILIES = ("nn.functional.", "linalg.vector_norm", "masked.softmax", "masked.log_softmax", "norm", "std", "var", "native_", "logical_")

_OPS = frozenset({
    "matmul", "mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "einsum", "inner", "outer", "tensordot",
    "softmax", "log_softmax", "logsumexp", "torch.ops.aten._safe_softmax.default",
    "abs", "add", "addcdiv", "addcmul", "sub", "mul", "div", "true_divide", "rsub", "neg", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt",
    "pow", "square", "reciprocal", "clamp", "maximum", "minimum", "sin", "cos", "tanh", "sigmoid", "erf", "floor", "ceil", "round", "trunc", "sign",
    "lerp", "where", "eq", "ne", "lt", "le", "gt", "ge", "masked_fill", "tril", "triu",
    "sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "prod", "cumsum", "cumprod", "all", "any",
    "cat", "stack", "split", "chunk", "gather", "scatter", "scatter_add", "index_add", "index_put", "index_select", "__getitem__",
    "expand", "reshape", "view", "permute", "transpose", "repeat", "repeat_interleave", "roll", "flip",
    "zeros_like", "ones_like", "full_like", "to", "bfloat16", "float",
})  # fmt: skip

"""What the arithmetic of `transformer_work` needs besides a model's sizes, and what all of its formulas are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.estimate.work import Phase


@dataclass(frozen=True)
class Layout:
    """How a step is cut. tokens: of a micro-batch. dp: data-parallel ranks, those of expert parallelism among them. sp: ranks that share the norms and
    residuals. e: bytes of an activation. chunks: stages of a pipeline rank. ep: ranks that hold different experts. capacity_factor: of experts.
    """

    seq: int
    tokens: int
    microbatches: int
    tp: int
    pp: int
    dp: int
    sp: int
    e: int
    dtype: str
    flash: bool
    layer_recompute: bool
    attention_recompute: bool
    reduce_size: int
    gradient_size: int
    state_bytes: float
    zero1: bool
    chunks: int = 1
    ep: int = 1
    capacity_factor: float | None = None


class Products(NamedTuple):
    """Matrix products with weights, of a core. met: parameters that each row meets. held: parameters that there are. outputs, inputs: columns of all of the
    products' results and operands. met_again, held_again: of the products that the backward pass computes again.
    """

    met: float
    held: float
    outputs: float
    inputs: float
    met_again: float
    held_again: float


def phase_of(name: str, lay: Layout, rows: float, p: Products) -> Phase:
    """Products of so many rows, forward and backward. Their results leave the accumulators in one pass of the vector engines."""
    operands = (3 + lay.layer_recompute) * (p.inputs + p.outputs) * rows * lay.e
    reads = (2 * p.held + p.held_again) * lay.e
    gradients = p.held * (lay.e + 2 * lay.gradient_size)  # written by the product, then added to what is there
    evicted = rows * (p.outputs * (1 + lay.layer_recompute) + p.inputs) + p.held
    return Phase(name, 2 * rows * (3 * p.met + p.met_again), evicted, operands + reads + gradients, lay.dtype)


def repeated(p: Phase, n: int) -> Phase:
    """A phase n times."""
    return Phase(p.name, n * p.flops, n * p.elements, n * p.bytes, p.dtype)


def collective(kind: str, axes: tuple[str, ...], ranks: int, count: float, each: float, size: int) -> list[Collective]:
    """`count` collectives of `each` values of `size` bytes; none if there is nothing to send, or nobody to send it to."""
    if ranks < 2 or not count:
        return []
    dtype = {2: "bfloat16", 4: "float32", 8: "int64"}[size]
    return [Collective(kind=kind, axes=axes, ranks=ranks, count=round(count), bytes=round(count * each * size), dtype=dtype)]

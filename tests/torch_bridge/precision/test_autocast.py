"""`torch.autocast("xla")`: every op of torch_xla's lists, forward and backward, and what torch promises about regions."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_bridge import metrics
from torch_bridge.device import autocast, autocast_regions
from torch_bridge.runtime import executor

aten = torch.ops.aten
HALF = torch.bfloat16
Case = tuple[Callable[..., Any], list[Any]]


def case(op: Any, *inputs: Any, **kwargs: Any) -> Case:
    return (lambda *a: op(*a, **kwargs)), list(inputs)


def f(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) + 0.1


def square(n: int = 3) -> torch.Tensor:
    """Symmetric and positive definite."""
    x = torch.rand(n, n)
    return x @ x.mT + n * torch.eye(n)


IDS = torch.tensor([0, 2, 1, 2])
LOWER: dict[str, Callable[[], Case]] = {
    "conv1d": lambda: case(F.conv1d, f(1, 2, 5), f(3, 2, 3), f(3)),
    "conv1d.padding": lambda: case(F.conv1d, f(1, 2, 5), f(3, 2, 3), padding="same"),
    "conv2d": lambda: case(F.conv2d, f(1, 2, 5, 5), f(3, 2, 3, 3), f(3)),
    "conv2d.padding": lambda: case(F.conv2d, f(1, 2, 5, 5), f(3, 2, 3, 3), padding="same"),
    "conv3d": lambda: case(F.conv3d, f(1, 1, 3, 3, 3), f(2, 1, 2, 2, 2)),
    "conv3d.padding": lambda: case(F.conv3d, f(1, 1, 3, 3, 3), f(2, 1, 3, 3, 3), padding="same"),
    "conv_tbc": lambda: case(torch.conv_tbc, f(5, 1, 2), f(3, 2, 4), f(4)),
    "conv_transpose1d": lambda: case(F.conv_transpose1d, f(1, 2, 5), f(2, 3, 3)),
    "conv_transpose2d.input": lambda: case(F.conv_transpose2d, f(1, 2, 3, 3), f(2, 3, 2, 2)),
    "conv_transpose3d.input": lambda: case(F.conv_transpose3d, f(1, 2, 2, 2, 2), f(2, 1, 2, 2, 2)),
    "mm": lambda: case(torch.mm, f(2, 3), f(3, 4)),
    "bmm": lambda: case(torch.bmm, f(2, 2, 3), f(2, 3, 4)),
    "matmul": lambda: case(torch.matmul, f(2, 3), f(3)),
    "linear": lambda: case(F.linear, f(2, 3), f(4, 3), f(4)),
    "einsum": lambda: case(lambda a, b: torch.einsum("ij,jk->ik", a, b), f(2, 3), f(3, 4)),
    "addmm": lambda: case(torch.addmm, f(2, 4), f(2, 3), f(3, 4)),
    "addbmm": lambda: case(torch.addbmm, f(2, 4), f(5, 2, 3), f(5, 3, 4)),
    "baddbmm": lambda: case(torch.baddbmm, f(5, 2, 4), f(5, 2, 3), f(5, 3, 4)),
    "prelu": lambda: case(F.prelu, torch.randn(2, 3), f(3)),
    "relu": lambda: case(torch.relu, torch.randn(2, 3)),
    "max_pool2d": lambda: case(F.max_pool2d, torch.randn(1, 1, 4, 4), 2),
}
FLOAT32: dict[str, Callable[[], Case]] = {
    "batch_norm": lambda: case(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), f(4, 3), f(3), f(3)),
    "_softmax": lambda: case(lambda x: aten._softmax(x, 1, False), f(2, 3)),
    "softmax.int": lambda: case(lambda x: torch.softmax(x, 1), f(2, 3)),
    "log_softmax.int": lambda: case(lambda x: torch.log_softmax(x, 1), f(2, 3)),
    "prod": lambda: case(torch.prod, f(4)),
    "prod.dim_int": lambda: case(lambda x: torch.prod(x, 1), f(2, 3)),
    "cdist": lambda: case(torch.cdist, f(2, 3), f(4, 3)),
    "trace": lambda: case(torch.trace, f(3, 3)),
    "binary_cross_entropy": lambda: case(F.binary_cross_entropy, torch.rand(4), torch.ones(4)),
    "binary_cross_entropy_with_logits": lambda: case(F.binary_cross_entropy_with_logits, f(4), torch.ones(4)),
    "mse_loss": lambda: case(F.mse_loss, f(4), f(4)),
    "l1_loss": lambda: case(F.l1_loss, f(4), -f(4)),
    "smooth_l1_loss": lambda: case(F.smooth_l1_loss, f(4), -f(4)),
    "nll_loss": lambda: case(F.nll_loss, f(4, 3), IDS),
    "nll_loss2d": lambda: case(F.nll_loss, f(4, 3, 1, 1), IDS.reshape(4, 1, 1)),
    "cross_entropy_loss": lambda: case(F.cross_entropy, f(4, 3), IDS),
    "kl_div": lambda: case(F.kl_div, f(4), f(4), reduction="sum"),
    "ctc_loss.IntList": lambda: case(lambda x: torch.ctc_loss(x, torch.tensor([[1, 2]], device=x.device), [4], [2]), f(4, 1, 3)),
    "ctc_loss.Tensor": lambda: case(torch.ctc_loss, f(4, 1, 3), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])),
    "cosine_embedding_loss": lambda: case(F.cosine_embedding_loss, f(2, 3), f(2, 3), torch.tensor([1, -1])),
    "hinge_embedding_loss": lambda: case(F.hinge_embedding_loss, f(2), torch.tensor([1, -1])),
    "margin_ranking_loss": lambda: case(F.margin_ranking_loss, f(2), f(2), torch.tensor([1, -1])),
    "multi_margin_loss": lambda: case(F.multi_margin_loss, f(4, 3), IDS),
    "multilabel_margin_loss": lambda: case(F.multilabel_margin_loss, f(2, 3), torch.tensor([[0, 2, -1], [1, -1, 0]])),
    "multilabel_margin_loss_forward": lambda: case(
        lambda x, y: aten.multilabel_margin_loss_forward(x, y, 1)[0], f(2, 3), torch.tensor([[0, 2, -1], [1, -1, 0]])
    ),
    "soft_margin_loss": lambda: case(F.soft_margin_loss, f(2), torch.tensor([1, -1])),
    "triplet_margin_loss": lambda: case(F.triplet_margin_loss, f(2, 3), f(2, 3), f(2, 3)),
    "reflection_pad1d": lambda: case(aten.reflection_pad1d, f(1, 2, 4), [1, 1]),
    "reflection_pad2d": lambda: case(aten.reflection_pad2d, f(1, 4, 4), [1, 1, 1, 1]),
    "replication_pad1d": lambda: case(aten.replication_pad1d, f(1, 2, 4), [1, 1]),
    "replication_pad2d": lambda: case(aten.replication_pad2d, f(1, 4, 4), [1, 1, 1, 1]),
    "replication_pad3d": lambda: case(aten.replication_pad3d, f(1, 2, 2, 2), [1] * 6),
    "cholesky": lambda: case(torch.cholesky, square()),
    "cholesky_inverse": lambda: case(torch.cholesky_inverse, square()),
    "cholesky_solve": lambda: case(torch.cholesky_solve, f(3, 2), square()),
    "inverse": lambda: case(torch.inverse, square()),
    "linalg_inv_ex": lambda: case(lambda x: torch.linalg.inv_ex(x)[0], square()),
    "linalg_svd": lambda: case(lambda x: torch.linalg.svd(x)[1], f(3, 3)),
    "qr": lambda: case(lambda x: torch.qr(x)[1], square()),
    "svd": lambda: case(lambda x: torch.svd(x)[1], f(3, 3)),
    "triangular_solve": lambda: case(lambda b, a: torch.triangular_solve(b, a)[0], f(3, 2), square()),
}
NAMED = {"softmax.Dimname", "log_softmax.Dimname", "prod.dim_Dimname", "index_copy.dimname"}
"""Named tensors do not exist on xla; their kernels are there for completeness."""


def test_a_case_for_every_op() -> None:
    assert set(LOWER) == set(autocast.LOWER)
    assert set(FLOAT32) == set(autocast.FLOAT32) - NAMED


def run(
    op: Callable[..., Any], inputs: list[Any], given: torch.dtype, computed: torch.dtype | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Result and gradients of xla inputs in dtype `given`: under autocast, or outside with casts to `computed` written by hand."""
    made = [x.to("xla", given if x.is_floating_point() else x.dtype) if isinstance(x, torch.Tensor) else x for x in inputs]
    leaves = [x.requires_grad_() for x in made if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if computed is None:
        with torch.autocast("xla", dtype=HALF):
            out = op(*made)
    else:
        out = op(*[x.to(computed) if any(x is y for y in leaves) else x for x in made])
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    return out.detach(), [g for g in grads if g is not None]


@pytest.mark.core(keep=4)
@pytest.mark.thorough(keep=14)
@pytest.mark.filterwarnings("ignore:.*(is deprecated in favor of|was deprecated)")
@pytest.mark.parametrize("name", [*LOWER, *FLOAT32])
@pytest.mark.parametrize("given", [torch.float32, HALF], ids=["from-float32", "from-bfloat16"])
def test_op_computes_in_its_dtype_forward_and_backward(name: str, given: torch.dtype) -> None:
    """Dtypes are as listed, and values those of casts written by hand, to the bit."""
    target = HALF if name in LOWER else torch.float32
    op, inputs = (LOWER | FLOAT32)[name]()
    out, grads = run(op, inputs, given)
    expected, expected_grads = run(op, inputs, given, target)
    assert out.dtype == expected.dtype == target
    torch.testing.assert_close(out.cpu(), expected.cpu(), rtol=0, atol=0)
    assert grads
    for got, want in zip(grads, expected_grads, strict=True):
        assert got.dtype == want.dtype == given
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtypes", "widest"), [((HALF, torch.float32), torch.float32), ((HALF, HALF), HALF), ((torch.float16, HALF), torch.float32)]
)
def test_promoting_ops_take_the_widest_dtype(dtypes: tuple[torch.dtype, torch.dtype], widest: torch.dtype) -> None:
    a, b = (f(2, 2).to("xla", d).requires_grad_() for d in dtypes)
    index = torch.tensor([0, 1], device="xla")
    with torch.autocast("xla", dtype=HALF):
        results = torch.cat([a, b]), torch.stack([a, b]), torch.index_copy(a, 0, index, b)
    for out in results:
        assert out.dtype == widest
        assert [g.dtype for g in torch.autograd.grad(out.sum(), (a, b), allow_unused=True) if g is not None][-1] == dtypes[1]


def test_other_ops_run_in_their_input_type() -> None:
    x, y = f(4, 4).to("xla"), f(4, 4).to("xla", HALF)
    q = f(1, 1, 4, 4).to("xla")
    norm = nn.LayerNorm(4).to("xla")
    with torch.autocast("xla", dtype=HALF):
        assert [t.dtype for t in (x + x, x * y, y + y, x.exp(), y.sum(), F.gelu(y), norm(x), F.max_pool1d(x, 2))] == [
            torch.float32, torch.float32, HALF, torch.float32, HALF, HALF, torch.float32, torch.float32,
        ]  # fmt: skip
        assert F.scaled_dot_product_attention(q, q, q).dtype == torch.float32


def test_attention_on_several_dtypes() -> None:
    """As in Llama, whose rotary embedding gives float32 queries and keys beside half-precision values."""
    given = [f(1, 2, 4, 8) for _ in range(3)]
    q, k, v = (t.clone().requires_grad_() for t in given)
    F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
    a, b, c = (t.to("xla", d).requires_grad_() for t, d in zip(given, (torch.float32, torch.float32, HALF), strict=True))
    with torch.autocast("xla", dtype=HALF):
        out = F.scaled_dot_product_attention(a, b, c, is_causal=True)
    assert out.dtype == HALF
    out.float().square().sum().backward()
    for mine, torchs in ((a, q), (b, k), (c, v)):
        assert mine.grad is not None and mine.grad.dtype == mine.dtype
        torch.testing.assert_close(mine.grad.cpu().float(), torchs.grad, rtol=0.05, atol=0.05)


def test_float64_and_integers_stay_and_cpu_tensors_are_not_touched() -> None:
    x = f(3, 3)
    with torch.autocast("xla", dtype=HALF):
        assert (x.double().to("xla") @ x.double().to("xla")).dtype == torch.float64
        assert (x @ x).dtype == torch.float32
        assert (x.to("xla").long() @ x.to("xla").long()).dtype == torch.int64


PAIRS: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, ...], tuple[int, ...]]] = {
    "mm": (torch.mm, (2, 2), (2, 2)),
    "bmm": (torch.bmm, (1, 2, 2), (1, 2, 2)),
    "matrix-vector": (torch.matmul, (2, 2), (2,)),
    "dot": (torch.matmul, (2,), (2,)),
    "linear": (F.linear, (2, 2), (2, 2)),
    "linear-bias": (lambda a, b: F.linear(a, a, b), (2, 2), (2,)),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (2, 2), (2, 2)),
    "addmm": (lambda a, b: torch.addmm(a, b, b), (2, 2), (2, 2)),
    "baddbmm": (lambda a, b: torch.baddbmm(a, b, b), (1, 2, 2), (1, 2, 2)),
    "addmv": (lambda a, b: torch.addmv(a[0], b, b[0]), (2, 2), (2, 2)),
    "conv1d": (F.conv1d, (1, 1, 4), (1, 1, 2)),
    "conv1d-bias": (lambda a, b: F.conv1d(a, a[:, :, :2], b), (1, 1, 4), (1,)),
    "binary_cross_entropy": (F.binary_cross_entropy, (2,), (2,)),
}
MIXED = (torch.float32, HALF, torch.float64, torch.int64)


@pytest.mark.parametrize("autocasts", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", PAIRS)
def test_operands_of_two_dtypes_are_cast_or_refused_as_in_torch(name: str, autocasts: bool) -> None:
    """Without autocast a product of two dtypes is an error; with it float32 and bfloat16 agree, and float64 and integers still do not."""
    op, first, second = PAIRS[name]

    def outcome(device: str, a: torch.dtype, b: torch.dtype) -> Any:
        try:
            with torch.autocast(device, dtype=HALF, enabled=autocasts):
                return op(torch.ones(first, dtype=a, device=device), torch.ones(second, dtype=b, device=device)).dtype
        except RuntimeError as error:
            return type(error)

    for a in MIXED:
        for b in MIXED:
            if a != torch.int64 or b != torch.int64:
                assert outcome("xla", a, b) == outcome("cpu", a, b), (a, b)


def test_what_a_refusal_says() -> None:
    x = torch.ones(2, 2, device="xla")
    with pytest.raises(
        RuntimeError, match=r"mm: expected all operands to have the same dtype, but got torch.float32, torch.bfloat16: convert with .to"
    ):
        x @ x.bfloat16()
    with torch.autocast("xla", dtype=HALF), pytest.raises(RuntimeError, match=r"torch.bfloat16, torch.float64.*never float64 or integers"):
        torch.mm(x.bfloat16(), x.double())


def test_regions_nest_and_end() -> None:
    x = f(3, 3).to("xla")
    assert not torch.is_autocast_enabled("xla")
    with torch.autocast("xla", dtype=torch.float16):
        assert torch.is_autocast_enabled("xla")
        assert torch.get_autocast_dtype("xla") == torch.float16
        assert (x @ x).dtype == torch.float16
        with torch.autocast("xla", enabled=False):
            assert not torch.is_autocast_enabled("xla")
            assert (x @ x).dtype == torch.float32
        with torch.autocast("xla", dtype=HALF):
            assert (x @ x).dtype == HALF
        assert (x @ x).dtype == torch.float16
    assert (x @ x).dtype == torch.float32


def test_without_a_dtype_it_is_bfloat16_in_every_thread() -> None:
    """torch's own is float16 in a thread that nobody told otherwise."""
    found: list[Any] = []

    def look() -> None:
        x = torch.ones(2, 2, device="xla")
        with torch.autocast("xla"):
            found.append((x @ x).dtype)
        found.append(torch.get_autocast_dtype("xla"))
        torch.set_autocast_dtype("xla", torch.float16)
        found.append(torch.get_autocast_dtype("xla"))

    for _ in range(2):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [HALF, HALF, torch.float16] * 2
    assert torch.get_autocast_dtype("xla") == HALF and torch.get_autocast_dtype("cpu") == HALF


def test_the_older_names_mean_the_same() -> None:
    assert not torch.is_autocast_xla_enabled()
    with torch.autocast("xla"):
        assert torch.is_autocast_xla_enabled() and torch.get_autocast_xla_dtype() == HALF
        torch.set_autocast_xla_enabled(False)
        torch.set_autocast_xla_dtype(torch.float16)
        assert not torch.is_autocast_enabled("xla") and torch.get_autocast_dtype("xla") == torch.float16
    assert torch.get_autocast_xla_dtype() == HALF


def test_torch_xla_amp_autocast_casts() -> None:
    from torch_xla.amp import autocast as facade

    x = f(3, 3).to("xla")
    with facade(torch.device("xla")):
        assert (x @ x).dtype == HALF


def _shared(device: str, cached: bool = True) -> torch.Tensor:
    """The gradient of a weight that a region uses many times, by which one can tell whether its cast was shared."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.rand(4, 4).to(device))
    xs = [torch.rand(4, 4).to(device) for _ in range(8)]
    with torch.autocast(device, dtype=HALF, cache_enabled=cached):
        total = sum((x @ w).float().sum() for x in xs)
    total.backward()  # type: ignore[union-attr]
    assert w.grad is not None
    return w.grad.cpu()


def test_a_weight_is_cast_once_in_a_region_as_in_torch() -> None:
    torch.testing.assert_close(_shared("xla"), _shared("cpu"), rtol=0, atol=0)
    torch.testing.assert_close(_shared("xla", cached=False), _shared("cpu", cached=False), rtol=0, atol=0)
    assert not torch.equal(_shared("xla"), _shared("xla", cached=False))


def test_the_cache_ends_with_the_region_and_sees_new_values() -> None:
    w = nn.Parameter(torch.ones(2, 2).to("xla"))
    x = torch.ones(2, 2).to("xla")
    with torch.autocast("xla", dtype=HALF):
        assert (x @ w).sum().item() == 8
        assert len(autocast._cache) == 1
        with torch.autocast("xla", enabled=False):
            pass
        assert autocast._cache
        w.data.mul_(2)
        assert (x @ w).sum().item() == 16
        with torch.no_grad():
            assert not (x @ w).requires_grad
        assert (x @ w).requires_grad
    assert not autocast._cache


class Product(torch.autograd.Function):
    """A product that notes the dtypes it sees."""

    seen: list[Any] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="xla")
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @torch.amp.custom_bwd(device_type="xla")
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        Product.seen.append((g.dtype, torch.is_autocast_enabled("xla"), (g @ b.T).dtype))
        return g @ b.T, a.T @ g


class Float32Product(Product):
    """The same, always in float32."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="xla", cast_inputs=torch.float32)
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b


def test_custom_functions() -> None:
    Product.seen.clear()
    a, b = (f(3, 3).to("xla").requires_grad_() for _ in range(2))
    with torch.autocast("xla", dtype=HALF):
        out, exact = Product.apply(a, b), Float32Product.apply(a.to(HALF), b)
        assert (out.dtype, exact.dtype) == (HALF, torch.float32)
    out.sum().backward()
    exact.sum().backward()
    assert Product.seen == [(HALF, True, HALF), (torch.float32, False, torch.float32)]
    assert a.grad is not None
    assert a.grad.dtype == torch.float32


def test_kernels_are_only_entered_while_autocast_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    def noted(x: Any, dtype: torch.dtype) -> Any:
        entered.append(dtype)
        return x

    monkeypatch.setattr(autocast, "_cast", noted)
    x = f(2, 2).to("xla")
    for _ in range(2):
        x @ x
    assert not entered
    with torch.autocast("xla", dtype=HALF):
        x @ x
    assert entered


def _train(steps: int, autocasts: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(16, 8).to("xla"), torch.randint(0, 4, (16,)).to("xla")
    losses = []
    for _ in range(steps):
        with torch.autocast("xla", dtype=HALF, enabled=autocasts):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        executor.sync()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return [v.item() for v in losses]


def test_training_with_autocast_learns_like_float32_and_compiles_no_more() -> None:
    def compiled() -> int:
        return metrics.COUNTERS.get("UncachedCompile", 0)

    start = compiled()
    full = _train(30, False)
    plain = compiled() - start
    mixed = _train(30, True)
    assert compiled() - start - plain <= plain
    assert mixed[-1] < 0.25 * mixed[0]
    assert mixed != full
    torch.testing.assert_close(mixed, full, rtol=0.05, atol=0.05)


def test_regions_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Original torch_xla 2.7 leaves xla tensors alone in them (measured); scripts of torch 1.13's days have them, so it is said."""
    monkeypatch.setattr(autocast_regions, "_noted", False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *given, **named: True)
    layer, x = torch.nn.Linear(4, 4).to("xla"), torch.randn(2, 4).to("xla")
    with pytest.warns(
        UserWarning,
        match=r"casts what the parallel layers .* torch.autocast\('xla', dtype=torch.bfloat16\) casts those of torch_xla's lists",
    ):
        region = torch.autocast("cuda", dtype=torch.bfloat16)
        with region:
            assert layer(x).dtype == torch.float32 and torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("xla")
            low = x.bfloat16()
            assert {low.sum().dtype, torch.softmax(low, -1).dtype, torch.nn.functional.layer_norm(low, (4,)).dtype} == {torch.bfloat16}
            with torch.autocast("xla"):
                assert layer(x).dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast("cuda", enabled=False):
            assert layer(x).dtype == torch.float32

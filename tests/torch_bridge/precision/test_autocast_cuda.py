"""`torch.autocast("cuda")` on xla tensors, as Neuron's guide writes it: CUDA's op lists, and how it meets `torch.autocast("xla")`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_xla.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils import _pytree as pytree

import torch_bridge
from tests.torch_bridge.replaying import player
from torch_bridge import ambient, autocast_cuda, autocast_regions, executor

HALF = torch.bfloat16
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    LISTS = AutocastTestLists("cpu")


@pytest.fixture(autouse=True)
def as_neuron_s_guide_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)


def on(device: str) -> torch.autocast:
    return torch.autocast(device, dtype=HALF)


def test_the_lists_are_torch_s() -> None:
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    lists = autocast_cuda
    ours = [*lists.LOWER, *lists.FLOAT32, *lists.FLOAT32_RESULT, *lists.WITH_DTYPE, *lists.PROMOTE, *lists.BANNED, *lists.ELSEWHERE]
    assert len(ours) == len(set(ours))
    assert set(ours) == registered


def _cases() -> Iterator[Any]:
    """(name, function, arguments, keyword arguments, dtype of the result) of torch's own tests, which are for float16."""
    for module, cases, dtype in (
        (torch, LISTS.torch_fp16, torch.float16),
        (torch, LISTS.torch_fp32, torch.float32),
        (torch, LISTS.torch_need_autocast_promote, torch.float32),
        (torch, LISTS.torch_expect_builtin_promote, None),
        (torch._C._nn, LISTS.nn_fp16, torch.float16),
        (torch._C._nn, LISTS.nn_fp32, torch.float32),
        (torch.linalg, LISTS.linalg_fp16, torch.float16),
    ):
        for case in cases:
            name, args, *rest = case
            if name.startswith("cudnn_") or name == "equal":
                continue
            function = getattr(module, name.removeprefix("linalg_") if module is torch.linalg else name, None)
            if name == "einsum":
                args = ("bk,bq->kq", *rest[0])
                rest = []
            if function is not None:
                yield pytest.param(function, args, dict(rest[0]) if rest and isinstance(rest[0], dict) else {}, dtype, name, id=name)


@pytest.mark.thorough(keep=12)
@pytest.mark.filterwarnings("ignore:.*(is deprecated|was deprecated|will be removed)")
@pytest.mark.parametrize(("function", "args", "kwargs", "dtype", "name"), list(_cases()))
def test_op_gives_torch_s_dtype(function: Any, args: Any, kwargs: Any, dtype: Any, name: str) -> None:
    def to(device: str, x: Any) -> Any:
        return x.to(device) if isinstance(x, torch.Tensor) else x

    with torch.autocast("cuda"):
        out = function(*pytree.tree_map(lambda x: to("xla", x), args), **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    wide = pytree.tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, args)
    expected = function(*wide, **kwargs)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert out.dtype == (dtype or (torch.bool if expected.dtype == torch.bool else torch.float32))
    torch.testing.assert_close(out.cpu(), expected.to(out.dtype), rtol=2e-2, atol=6e-2)


def test_a_dtype_that_is_asked_for_and_float64_stay() -> None:
    x = torch.rand(3, 3, device="xla")
    with on("cuda"):
        assert x.to(HALF).sum().dtype == x.to(HALF).norm(dim=0).dtype == torch.softmax(x.to(HALF), 0).dtype == torch.float32
        assert x.sum(dtype=HALF).dtype == torch.softmax(x, 0, HALF).dtype == HALF
        assert x.double().sum().dtype == x.double().norm().dtype == (x.double() @ x.double()).dtype == torch.float64
        assert x.long().sum().dtype == torch.int64


def test_binary_cross_entropy_is_refused_as_in_torch() -> None:
    x = torch.rand(3, device="xla")
    with on("cuda"), pytest.raises(RuntimeError, match=r"unsafe under torch.autocast\('cuda'\).*binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(x, x)
    F.binary_cross_entropy(x, x)


def test_parts_of_an_op_that_is_on_the_other_list_only() -> None:
    """`torch.linalg.multi_dot` is on CUDA's list, `max_pool2d` and `relu` on xla's; what such ops are made of is looked up as ever."""
    x, y = torch.rand(1, 1, 4, 4, device="xla"), torch.rand(4, 4, device="xla")
    with on("cuda"):
        assert (torch.relu(x).dtype, F.max_pool2d(x, 2).dtype, F.layer_norm(x.to(HALF), (4,)).dtype) == (torch.float32,) * 3
    with on("xla"):
        assert (torch.relu(x).dtype, F.max_pool2d(x, 2).dtype, F.layer_norm(x.to(HALF), (4,)).dtype) == (HALF,) * 3
        assert torch.linalg.multi_dot((y, y, y)).dtype == HALF


def product() -> torch.dtype:
    x = torch.ones(2, 2, device="xla")
    return (x @ x).dtype


def exponential() -> torch.dtype:
    """float32 with CUDA's lists, as given with xla's."""
    return torch.ones(2, device="xla", dtype=HALF).exp().dtype


def test_regions_nest_and_end() -> None:
    assert autocast_regions.current() is None
    with on("cuda"):
        assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled("xla") and torch.is_autocast_xla_enabled()
        assert torch.get_autocast_dtype("cuda") == torch.get_autocast_dtype("xla") == HALF
        assert (product(), exponential()) == (HALF, torch.float32)
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("xla")
            assert (product(), exponential(), torch.get_autocast_dtype("xla")) == (torch.float32, HALF, HALF)
            with on("xla"):
                assert (product(), exponential()) == (HALF, HALF)
        with torch.autocast("cuda", dtype=torch.float16):
            assert product() == torch.float16
        with torch.autocast("xla", enabled=False):
            assert (product(), exponential()) == (torch.float32, HALF)
        with torch.autocast("xla", dtype=torch.float16):
            assert (product(), exponential()) == (torch.float16, torch.float32)
        assert (product(), exponential()) == (HALF, torch.float32)
    assert autocast_regions.current() is None and torch.get_autocast_dtype("xla") == HALF and product() == torch.float32
    with on("xla"):
        with on("cuda"):
            assert exponential() == torch.float32
        assert (product(), exponential()) == (HALF, HALF)
        with torch.autocast("cuda", enabled=False):
            assert product() == torch.float32


def test_cpu_tensors_are_not_touched() -> None:
    x = torch.ones(2, 2)
    with on("cuda"):
        assert (x @ x).dtype == x.sum().dtype == torch.float32
        assert torch.ones(2, dtype=HALF).exp().dtype == HALF


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp")
def test_torch_cuda_amp_and_decorators() -> None:
    with torch.cuda.amp.autocast(dtype=HALF):
        assert (product(), exponential()) == (HALF, torch.float32)
    assert on("cuda")(product)() == HALF
    assert torch.cuda.amp.autocast()(product)() == torch.float16
    assert product() == torch.float32


class OnTheHost(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torch_compiles_regions_as_ever() -> None:
    """TorchScript reads autocast's source; torch.export and torch.compile follow it."""
    x = torch.ones(2, 2)
    assert torch.jit.script(OnTheHost())(x).dtype == HALF
    assert torch.export.export(OnTheHost(), (x,)).module()(x).dtype == HALF

    @torch.compile(backend="openxla")
    def compiled(x: torch.Tensor) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return x @ x, x.sum(), torch.get_autocast_dtype("xla")

    product, total, dtype = compiled(x.to("xla"))
    assert (product.dtype, total.dtype, dtype) == (HALF, torch.float32, HALF)


def test_torch_func_under_autocast() -> None:
    x = torch.rand(3, 3)
    with on("cuda"):
        grad = torch.func.grad(lambda v: (v @ v).exp().sum())(x.to("xla"))
    expected = torch.func.grad(lambda v: (v @ v).exp().sum())(x)
    assert grad.dtype == torch.float32
    torch.testing.assert_close(grad.cpu(), expected, rtol=0.05, atol=0.05)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 2)).to("xla")


def _gradients(run: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    with on("cuda"):
        out = run(x)
    out.float().square().sum().backward()
    return [out.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "checkpoint",
    [
        lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=True),
        lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False),
        torch_xla.utils.checkpoint.checkpoint,
    ],
    ids=["reentrant", "torch", "torch_xla"],
)
def test_checkpoints_recompute_with_the_same_lists(checkpoint: Any) -> None:
    """Outside of the region, to the bit."""
    x = torch.randn(3, 4).to("xla").requires_grad_()
    plain, saved = _model(), _model()
    seen: list[Any] = []
    saved[1].register_forward_hook(lambda module, args, out: seen.append((autocast_regions.current(), args[0].dtype, out.dtype)))
    expected = _gradients(plain, plain, x)
    got = _gradients(lambda x: checkpoint(saved, x), saved, x)
    assert len(got) == 7
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert seen == [(("cuda", HALF), HALF, torch.float32)] * 2


def test_a_played_module_tells_the_regions_apart() -> None:
    """Each kind of region has recordings of its own."""
    model, module = _model(), torch_bridge.optimize(_model())
    x = torch.randn(3, 4).to("xla")
    for k in range(12):
        region = (on("cuda"), on("xla"), torch.autocast("cuda", enabled=False))[k % 3]
        found = []
        for m in (model, module):
            with region:
                out = m(x)
            m.zero_grad()
            out.float().square().sum().backward()
            found.append([out, *(p.grad for p in m.parameters())])
            executor.sync()
        torch.testing.assert_close(*([t.detach().cpu() for t in ts] for ts in found), rtol=0, atol=0)
    assert player(module).played == 3


def test_ambient_brings_the_region_back() -> None:
    with on("cuda"):
        cuda = ambient.now()
    with on("xla"):
        xla = ambient.now()
    assert len({cuda, xla, ambient.now()}) == 3
    for held, expected in ((cuda, (HALF, torch.float32)), (xla, (HALF, HALF))):
        with held.restored():
            assert (product(), exponential()) == expected
        with on("cuda"), held.restored():
            assert (product(), exponential()) == expected

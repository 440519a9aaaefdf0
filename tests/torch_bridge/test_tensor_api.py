"""The tensor methods that scripts use around their mathematics, on device xla as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.torch_bridge.devices import same

DEVICES = ["xla", "xla:0", torch.device("xla"), torch.device("xla", 0), torch.device("xla:0")]


@pytest.mark.parametrize("device", DEVICES)
def test_forms_of_the_device(device: Any) -> None:
    x = torch.ones(2, device=device)
    assert x.device == torch.device("xla:0") == torch.empty(1).to(device).device
    assert x.device.type == "xla"
    assert x.device.index == 0
    assert x.get_device() == 0
    assert x.is_xla
    assert not torch.ones(2).is_xla
    assert not x.is_cuda
    assert not x.is_cpu
    assert x.to(device) is x
    assert torch.ones(1).to(x.device, torch.int64).dtype == torch.int64
    assert torch.ones(1).to(x).device.type == "xla"


def test_the_device_is_one_of_torchs() -> None:
    assert torch.xla.device_count() == 1
    assert torch.xla.current_device() == 0
    assert torch.get_device_module("xla") is torch.xla
    torch.xla.set_device("xla:0")
    with pytest.raises(ValueError, match="one xla device"):
        torch.xla.set_device(1)
    with torch.xla.device(0), torch.device("xla"):
        assert torch.zeros(2).device.type == "xla"
        assert torch.tensor([1.0]).device.type == "xla"
    assert torch.zeros(2).device.type == "cpu"


def test_default_device() -> None:
    torch.set_default_device("xla")
    try:
        assert torch.randn(2).device.type == "xla"
        assert nn.Linear(2, 2)(torch.ones(1, 2)).device.type == "xla"
    finally:
        torch.set_default_device(None)


def test_type() -> None:
    x = torch.ones(2, device="xla")
    assert x.type() == "torch.xla.FloatTensor"
    assert x.type(torch.int32).dtype == torch.int32
    assert x.type(torch.int32).device.type == "xla"
    assert x.long().dtype == torch.int64
    assert x.type_as(torch.ones(1, dtype=torch.float64)).device.type == "cpu"
    assert isinstance(x, torch.Tensor)
    assert torch.is_tensor(x)
    assert torch.is_floating_point(x)


def test_printing() -> None:
    x = torch.tensor([[1.0, 2.5]], device="xla")
    assert repr(x) == str(x) == "tensor([[1.0000, 2.5000]], device='xla:0')"
    assert f"{x}" == repr(x)
    assert f"{x.sum():.2f}" == "3.50"
    assert repr(torch.arange(2, device="xla")) == "tensor([0, 1], device='xla:0')"
    assert repr(x.requires_grad_()) == "tensor([[1.0000, 2.5000]], device='xla:0', requires_grad=True)"
    assert repr(x * 2) == "tensor([[2., 5.]], device='xla:0', grad_fn=<MulBackward0>)"
    assert repr(nn.Parameter(torch.ones(1, device="xla"))) == "Parameter containing:\ntensor([1.], device='xla:0', requires_grad=True)"
    assert repr(torch.ones(1, dtype=torch.bfloat16, device="xla")) == "tensor([1.], dtype=torch.bfloat16, device='xla:0')"
    assert repr(torch.empty(0, 3, device="xla")) == "tensor([], size=(0, 3), device='xla:0')"
    assert repr(torch.tensor(3, device="xla")) == "tensor(3, device='xla:0')"


def test_python_numbers() -> None:
    def run(device: str) -> Any:
        x = torch.tensor([3], device=device)
        f = torch.tensor(2.5, device=device)
        values = [10, 20, 30, 40]
        return (
            [x.item(), int(x), float(f), bool(f > 2), complex(f), f.tolist(), x.tolist(), len(x), f"{f.item()}"],
            [values[x], list(range(x)), round(float(f)), x.item().__class__, 5 if f else 6, f in [f.item()], x.numel(), x.nelement()],
            [[int(i) for i in torch.arange(3, device=device)], [r.tolist() for r in torch.ones(2, 2, device=device)], [*x]],
        )

    same(run)


def test_tensors_made_of_lists_with_scalars_of_the_device() -> None:
    """`torch.tensor` reads their numbers past `__torch_dispatch__`."""
    x = torch.tensor([3, 4], device="xla")
    for made, expected in (
        (torch.tensor([x[0], x.max() - 2], device="xla"), torch.tensor([3, 2])),
        (torch.tensor([[x[0], 1], [2.5, x[1]]]), torch.tensor([[3, 1], [2.5, 4]])),
        (torch.as_tensor([x[:1]], device="xla"), torch.tensor([3])),
        (x.new_tensor([x.float().mean()], dtype=torch.float64), torch.tensor([3.5], dtype=torch.float64)),
    ):
        assert made.dtype == expected.dtype and torch.equal(made.cpu(), expected)


FACTORIES: dict[str, Callable[[torch.Tensor, dict], Any]] = {
    "new_zeros": lambda t, on: t.new_zeros(2, 3),
    "new_ones": lambda t, on: t.new_ones((2,), dtype=torch.int64),
    "new_full": lambda t, on: t.new_full((2,), 7),
    "new_tensor": lambda t, on: t.new_tensor([1, 2]),
    "new_empty": lambda t, on: t.new_empty(2, 3).fill_(1),
    "new_empty_strided": lambda t, on: t.new_empty_strided((2, 3), (1, 2)).zero_(),
    "zeros_like": lambda t, on: torch.zeros_like(t),
    "ones_like": lambda t, on: torch.ones_like(t, dtype=torch.bool),
    "full_like": lambda t, on: torch.full_like(t, 3),
    "empty_like": lambda t, on: torch.empty_like(t).zero_(),
    "empty_like transposed": lambda t, on: torch.empty_like(t.t()).zero_(),
    "zeros_like transposed": lambda t, on: torch.zeros_like(t.t()),
    "zeros": lambda t, on: torch.zeros(2, 3, **on),
    "ones": lambda t, on: torch.ones(2, 3, dtype=torch.float64, **on),
    "full": lambda t, on: (torch.full((2,), 3, **on), torch.full((2,), 3.5, **on), torch.full((2,), True, **on)),
    "arange": lambda t, on: (torch.arange(5, **on), torch.arange(1, 2, 0.25, **on), torch.arange(5.0, **on), torch.arange(3, 0, -1, **on)),
    "linspace": lambda t, on: (torch.linspace(0, 1, 5, **on), torch.logspace(0, 2, 3, **on)),
    "eye": lambda t, on: torch.eye(3, 4, **on),
    "tri": lambda t, on: (torch.tril_indices(3, 3, **on), torch.triu_indices(3, 4, 1, **on)),
    "tensor": lambda t, on: (
        torch.tensor([[1, 2], [3, 4]], **on),
        torch.tensor(2.5, **on),
        torch.tensor([], **on),
        torch.tensor([True], **on),
    ),
    "as_tensor": lambda t, on: (torch.as_tensor([1.5], **on), torch.as_tensor(torch.arange(3).numpy(), **on)),
    "empty_strided": lambda t, on: torch.empty_strided((2, 3), (1, 2), **on).zero_(),
    "scalar_tensor": lambda t, on: torch.scalar_tensor(3, **on),
    "windows": lambda t, on: (
        torch.hann_window(4, **on),
        torch.hamming_window(4, **on),
        torch.kaiser_window(5, **on),
        torch.kaiser_window(5, False, 5.0, **on),
    ),
    "complex": lambda t, on: (torch.complex(t, t), torch.polar(t, t)),
    "meshgrid": lambda t, on: torch.meshgrid(torch.arange(2, **on), torch.arange(3, **on), indexing="ij"),
    "one_hot": lambda t, on: nn.functional.one_hot(torch.arange(3, **on), 4),
    "from numpy": lambda t, on: torch.from_numpy(torch.arange(3).numpy()).to(**on),
    "bucketize": lambda t, on: torch.bucketize(t, torch.tensor([0.0, 2.0], **on)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str) -> None:
    same(lambda device: FACTORIES[name](torch.arange(6.0, device=device).reshape(2, 3), {"device": device}), check_stride=True)


def test_data_can_be_read_and_set() -> None:
    def run(device: str) -> Any:
        p = nn.Parameter(torch.ones(2, 3, device=device))
        p.data.add_(1)
        old = p.data
        p.data = torch.zeros(4, device=device)
        p.data[0] = 5
        p.data = p.data.double()
        assert isinstance(p, nn.Parameter)
        assert p.requires_grad
        (p * 3).sum().backward()
        return p, old, p.grad, p.shape

    same(run)
    with pytest.raises(TypeError, match=r"\.to\('xla'\)"):
        torch.ones(2, device="xla").data = torch.ones(2)


def test_set_and_resize() -> None:
    def run(device: str) -> Any:
        x = torch.arange(4.0, device=device)
        y = torch.zeros(2, device=device).set_(x)
        y[0] = 9
        z = torch.arange(6.0, device=device)
        z.resize_(2, 2)
        w = torch.arange(4.0, device=device).resize_(2)
        e = torch.empty(0, device=device).resize_(2, 3).fill_(2)
        g = torch.arange(2.0).to(device)
        doubled = g * 2
        g.resize_(3)[2] = 7  # larger than its memory, while the step waits for what was in it
        n = torch.ones(2, device=device).set_()
        swapped = torch.ones(2, device=device)
        torch.utils.swap_tensors(swapped, torch.zeros(3, device=device))
        return x, y, z, w, e, g, doubled, n, swapped

    same(run, check_stride=True)


def test_set_to_parts_of_a_storage() -> None:
    def run(device: str) -> Any:
        x = torch.arange(6.0, device=device)
        whole = torch.empty(0, device=device).set_(x.view(2, 3)[1].untyped_storage())
        part = torch.empty(0, device=device).set_(x.untyped_storage(), 1, (2, 2), (3, 1))
        rows = torch.empty(0, device=device).set_(x.untyped_storage(), storage_offset=2, size=(2, 2))
        other = torch.empty(0, device=device).set_(x, 0, (2,), (2,))
        part[0] = 9
        x.add_(1)
        return x, whole, part, rows, other

    same(run, check_stride=True)
    x = torch.arange(6.0, device="xla")
    with pytest.raises(RuntimeError, match="reach element 6 of a storage of 6, and storages of xla tensors do not grow"):
        torch.empty(0, device="xla").set_(x.untyped_storage(), 1, (6,), (1,))
    with pytest.raises(NotImplementedError, match=r"the storage is of torch.float32 and the tensor of torch.int32.*use view\(dtype\)"):
        torch.empty(0, dtype=torch.int32, device="xla").set_(x.untyped_storage())
    with pytest.raises(NotImplementedError, match=r"no bytes to show. Use untyped_storage\(\)"):
        x.storage()


OUT: dict[str, Callable[[str], Any]] = {
    "add": lambda d: torch.add(torch.ones(3, device=d), 2, out=torch.empty(3, device=d)),
    "matmul": lambda d: torch.matmul(torch.ones(2, 3, device=d), torch.ones(3, 2, device=d), out=torch.empty(2, 2, device=d)),
    "cat into a view": lambda d: (o := torch.zeros(2, 4, device=d), torch.cat([torch.ones(2, device=d)] * 2, out=o[1])),
    "max": lambda d: torch.max(
        torch.arange(4.0, device=d), 0, out=(torch.empty((), device=d), torch.empty((), dtype=torch.int64, device=d))
    ),
    "another dtype": lambda d: torch.add(torch.ones(2, dtype=torch.int32, device=d), 1, out=torch.empty(2, device=d)),
    "arange": lambda d: torch.arange(4, out=torch.empty(4, dtype=torch.int64, device=d)),
    "arange into a matrix": lambda d: torch.arange(6, out=torch.empty(2, 3, device=d)),
    "arange into a transposed matrix": lambda d: (o := torch.zeros(3, 2, device=d), torch.arange(1, 7, out=o.t())),
    "arange into a number": lambda d: torch.arange(3, 4, out=torch.empty((), device=d)),
    "linspace into a matrix": lambda d: torch.linspace(0, 1, 4, out=torch.empty(2, 2, device=d)),
    "logspace into a matrix": lambda d: torch.logspace(0, 1, 4, out=torch.empty(2, 2, device=d)),
    "stack": lambda d: torch.stack([torch.ones(2, device=d)] * 3, out=torch.empty(3, 2, device=d)),
    "sort": lambda d: torch.sort(
        torch.tensor([3.0, 1.0], device=d), out=(torch.empty(2, device=d), torch.empty(2, dtype=torch.int64, device=d))
    ),
    "empty": lambda d: torch.exp(torch.zeros(2, device=d), out=torch.empty(0, device=d)),
    "ones": lambda d: torch.ones(2, 2, out=torch.empty(2, 2, device=d)),
    "clamp": lambda d: torch.clamp(torch.arange(4.0, device=d), 1, 2, out=torch.empty(4, device=d)),
    "index_select": lambda d: torch.index_select(torch.arange(4.0, device=d), 0, torch.tensor([1], device=d), out=torch.empty(1, device=d)),
}


@pytest.mark.parametrize("name", OUT)
def test_out(name: str) -> None:
    same(OUT[name])


INDEXING: dict[str, Callable[[torch.Tensor], Any]] = {
    "mask get": lambda t: t[t > 5],
    "mask of rows": lambda t: t[t[:, 0] > 3],
    "integers": lambda t: t[torch.tensor([2, 0], device=t.device)],
    "pairs": lambda t: t[torch.tensor([2, 0], device=t.device), torch.tensor([1, 1], device=t.device)],
    "list": lambda t: t[[0, 2]],
    "negative": lambda t: t[-1, torch.tensor([-1], device=t.device)],
    "mixed": lambda t: t[1:, torch.tensor([0, 2], device=t.device)],
    "none and ellipsis": lambda t: t[None, ..., 1],
    "cpu index": lambda t: t[torch.tensor([1])],
    "0-d index": lambda t: t[torch.tensor(1, device=t.device)],
    "bool": lambda t: (t[True], t[False]),
    "nonzero": lambda t: t.nonzero(),
    "nonzero tuple": lambda t: (t > 5).nonzero(as_tuple=True),
    "argwhere": lambda t: torch.argwhere(t > 8),
    "where": lambda t: torch.where(t > 8),
    "masked_select": lambda t: t.masked_select(t > 2),
    "unique": lambda t: torch.unique(t % 3, return_counts=True, return_inverse=True),
    "unique_consecutive": lambda t: torch.unique_consecutive(t.flatten() // 4),
    "repeat_interleave": lambda t: t[0].repeat_interleave(torch.tensor([1, 0, 2, 1], device=t.device)),
    "bincount": lambda t: torch.bincount(t.flatten().long() % 4),
    "take_along_dim": lambda t: t.take_along_dim(t.argsort(1, descending=True), 1),
    "set mask": lambda t: _set(t, t > 5, -1.0),
    "set mask to tensor": lambda t: _set(t, t > 9, torch.tensor([7.0, 8.0], device=t.device)),
    "set mask of rows": lambda t: _set(t, torch.tensor([True, False, True], device=t.device), 0),
    "set integers": lambda t: _set(t, torch.tensor([0, 2], device=t.device), torch.ones(4, device=t.device)),
    "set slice": lambda t: _set(t, (slice(None), slice(1, 3)), 5),
    "set slice to tensor": lambda t: _set(t, slice(1, None), t[:2].clone()),
    "set cpu scalar": lambda t: _set(t, 0, torch.tensor(3.5)),
    "set pairs": lambda t: _set(t, (torch.tensor([0, 1], device=t.device), torch.tensor([2, 3], device=t.device)), 9),
    "index_put accumulate": lambda t: t.index_put_(
        (torch.tensor([0, 0], device=t.device),), torch.ones(4, device=t.device), accumulate=True
    ),
    "masked_scatter": lambda t: t.masked_scatter_(t > 5, torch.arange(12.0, device=t.device)),
    "as_strided": lambda t: t.as_strided((2, 2), (5, 1), 1),
    "diff": lambda t: t.diff(dim=1),
}


def _set(t: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    t[index] = value
    return t


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name: str) -> None:
    same(lambda device: INDEXING[name](torch.arange(12.0, device=device).reshape(3, 4)))


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8", "ignore:where received a uint8 condition")
def test_masks_of_bytes() -> None:
    """Any byte but 0 says yes, as in torch's first releases."""

    def run(device: str) -> Any:
        mask = torch.tensor([1, 0, 2], dtype=torch.uint8, device=device)
        x = torch.arange(12.0, device=device).reshape(3, 4).requires_grad_()
        x[mask].square().sum().backward()
        y = x.detach().clone()
        y[mask, 1] = torch.tensor([7.0, 8.0], device=device)
        return x[mask], x[mask, 2], x[:, 1:][:, mask], x.grad, y, torch.where(mask, x[:, :3], -1)

    same(run)


def test_gradients_of_masks() -> None:
    def run(device: str) -> Any:
        x = torch.arange(6.0, device=device).requires_grad_()
        (x[x > 2] ** 2).sum().backward()
        y = torch.zeros(6, device=device)
        y[x.detach() > 3] = x[4:] * 2
        y.sum().backward()
        return x.grad, y

    same(run)


def test_equality_and_closeness() -> None:
    def run(device: str) -> Any:
        x = torch.tensor([1.0, 2.0, float("nan")], device=device)
        y = x.clone()
        pairs = torch.equal(x, y), torch.equal(x[:2], y[:2]), torch.allclose(x, y, equal_nan=True), torch.allclose(x, y)
        return pairs, torch.isclose(x, y), x == y, (x[:2] == y[:2]).all().item(), torch.equal(x, x[:2]), x[:2].eq(1).any()

    assert same(run)[0] == (False, True, True, False)
    torch.testing.assert_close(torch.ones(2, device="xla"), torch.ones(2, device="xla"))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(torch.ones(2, device="xla"), torch.zeros(2, device="xla"))


def test_complex_numbers() -> None:
    def run(device: str) -> Any:
        z = torch.tensor([1 + 2j, -3 + 0.5j], device=device)
        spectrum = torch.fft.fft(torch.arange(8.0, device=device))
        power = torch.fft.irfft(torch.fft.rfft(torch.arange(8.0, device=device)) * 2)
        rotated = torch.view_as_real(
            torch.view_as_complex(torch.ones(2, 2, 2, device=device))
            * torch.polar(torch.ones(2, device=device), torch.ones(2, device=device))
        )
        return (
            z * z.conj(),
            z.abs(),
            z.angle(),
            z @ z,
            z.mH if z.dim() == 2 else z.conj().resolve_conj(),
            z.sum().item(),
            spectrum,
            power,
            rotated,
            z.exp(),
        )

    same(run)


def test_numpy() -> None:
    x = torch.arange(3, device="xla")
    assert x.cpu().numpy().tolist() == [0, 1, 2]
    assert x.numpy(force=True).tolist() == [0, 1, 2]
    assert torch.from_numpy(x.cpu().numpy()).tolist() == [0, 1, 2]


def test_copies_across_devices() -> None:
    def run(device: str) -> Any:
        a = torch.arange(6.0).reshape(2, 3).to(device)
        host = torch.zeros(2, 3)
        host.copy_(a)
        host[0].copy_(a[1])
        a[1] = torch.tensor([7.0, 8.0, 9.0]).to(device)
        a[0].copy_(torch.ones(3))
        a.t()[2] = torch.zeros(2).to(device)
        b = a.to("cpu", torch.float64, non_blocking=True)
        c = a.to(torch.int32).to(device, non_blocking=True)
        return host, a, b, c, a.cpu().t(), a.to(device, copy=True).add_(1), a

    same(run)


def test_what_the_host_gets_is_a_copy() -> None:
    x = torch.zeros(2, device="xla")
    host = x.cpu()
    host.fill_(5)
    assert x.tolist() == [0, 0]
    source = torch.zeros(2)
    y = source.to("xla")
    source.fill_(5)
    assert y.tolist() == [0, 0]


def test_mixing_with_numbers_on_the_cpu() -> None:
    def run(device: str) -> Any:
        x = torch.ones(3, device=device)
        return (
            x * torch.tensor(2.0),
            torch.tensor(3) + x,
            torch.where(x > 0, x, torch.tensor(0.0)),
            x.double() * torch.tensor(0.1, dtype=torch.float64),
        )

    same(run)


@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # the workers do not use JAX; scripts do not see it
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders_feed_the_device(workers: int) -> None:
    data = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    loader = DataLoader(data, batch_size=2, num_workers=workers)
    weight = torch.ones(2, device="xla")
    for _ in range(2):
        seen = [(x.to("xla") @ weight, y.to("xla")) for x, y in loader]
    assert torch.cat([y for _, y in seen]).tolist() == list(range(6))
    assert torch.cat([x for x, _ in seen]).tolist() == [1, 5, 9, 13, 17, 21]


def test_iteration_unpacking_and_hashing() -> None:
    x = torch.arange(3, device="xla")
    a, b, c = x
    assert [a.item(), b.item(), c.item()] == [0, 1, 2]
    assert len({x: 1, a: 2}) == 2
    assert x is not x.view(3)
    assert {id(x)} == {id(x)}
    assert sorted(t.item() for t in reversed(x)) == [0, 1, 2]


def test_memory_questions() -> None:
    x = torch.zeros(4, 2, device="xla")
    assert x[1:].data_ptr() != x.data_ptr() == x.view(-1).data_ptr()
    assert (x.element_size(), x.nbytes, x.t().is_contiguous(), x.t().contiguous().stride()) == (4, 32, False, (4, 1))
    assert x[1:].storage_offset() == 2
    assert x.is_leaf
    assert x.to(memory_format=torch.contiguous_format) is x
    image = torch.zeros(1, 2, 3, 3, device="xla").to(memory_format=torch.channels_last)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert image.stride() == (18, 1, 6, 2)


def test_as_subclass() -> None:
    class Named(torch.Tensor):
        pass

    x = torch.ones(2, device="xla", requires_grad=True)
    y = x.as_subclass(torch.Tensor)
    y.sum().backward()
    assert type(y) is type(x)
    assert torch.equal(x.grad.cpu(), torch.ones(2))
    with pytest.raises(NotImplementedError, match="cannot become a Named.*Keep the Named on the CPU"):
        x.as_subclass(Named)


def test_tensors_that_show_the_same_elements() -> None:
    x = torch.arange(6.0, device="xla").view(2, 3)
    assert x[1].is_set_to(x[1])
    assert not x[1].is_set_to(x[0])
    assert not x.is_set_to(x.clone())
    assert not x.is_set_to(x.view(-1))
    assert not x.is_set_to(x.cpu())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: x.untyped_storage().fill_(0), r"untyped_storage\(\)\.fill_ of an xla tensor: its values have no bytes to reach"),
        (lambda x: x.share_memory_(), r"share_memory_ of a tensor on xla:0: its values are in this process alone"),
        (lambda x: x.storage_type(), r"Tensor\.storage\(\) of an xla tensor"),
    ],
)
def test_what_needs_bytes_says_what_to_do(call: Callable[[torch.Tensor], Any], text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        call(torch.ones(2, device="xla"))
    assert not hasattr(torch.ones(2, device="xla").untyped_storage(), "other")


@pytest.mark.parametrize("keepdim", [False, True])
def test_nansum_over_an_empty_list_of_dims(keepdim: bool) -> None:
    same(lambda d: torch.nansum(torch.tensor([[1.0, float("nan")], [2.0, 3.0]], device=d), dim=(), keepdim=keepdim))


@pytest.mark.parametrize("loss", [torch.nn.MSELoss, torch.nn.SmoothL1Loss, torch.nn.HuberLoss, torch.nn.L1Loss, torch.nn.BCEWithLogitsLoss])
def test_losses_of_no_rows_have_gradients(loss: type[torch.nn.Module]) -> None:
    x = torch.zeros(0, 2, device="xla", requires_grad=True)
    out = loss()(x, torch.zeros(0, 2, device="xla"))
    out.backward()
    assert out.isnan() and x.grad is not None and x.grad.shape == (0, 2)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_class_numbers_may_be_bytes(reduction: str) -> None:
    torch.manual_seed(0)
    x, target, weight = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 2], dtype=torch.uint8), torch.rand(3)
    found = []
    for device in ("cpu", "xla"):
        leaf = x.to(device, copy=True).requires_grad_()
        loss = torch.nn.functional.nll_loss(leaf, target.to(device), weight.to(device), reduction=reduction)
        loss.sum().backward()
        found.append((loss.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, torch.inf])
def test_gradients_of_distances_among_batches(p: float) -> None:
    """Rows that are equal in one coordinate have no slope along it, also for p < 1; batches are broadcast."""
    a, b = torch.tensor([[[[0.0, 1.0]]], [[[2.0, 5.0]]]]), torch.tensor([[[0.0, 3.0], [1.0, 1.0]]] * 3)
    found = []
    for device in ("cpu", "xla"):
        x, y = (t.to(device, copy=True).requires_grad_() for t in (a, b))
        torch.cdist(x, y, p).sum().backward()
        found.append([t.grad.cpu() for t in (x, y) if t.grad is not None])
    torch.testing.assert_close(found[1], found[0])


def test_the_last_bag_goes_to_the_end() -> None:
    bags = nn.EmbeddingBag(8, 3, include_last_offset=True, padding_idx=6).to("xla")
    i = torch.tensor([0, 1, 2, 3], device="xla")
    right = torch.stack([bags.weight[:3].mean(0), bags.weight[3]])
    for last in (3, 4):
        torch.testing.assert_close(bags(i, torch.tensor([0, 3, last], device="xla")), right)


def test_averages_of_no_channels() -> None:
    assert nn.functional.adaptive_avg_pool2d(torch.zeros(1, 0, 4, 4, device="xla"), 2).shape == (1, 0, 2, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward-mode AD
def test_text_of_a_dual_tensor() -> None:
    x = torch.ones(1, device="xla")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x * 2)
        assert repr(dual) == "tensor([1.], device='xla:0', tangent=tensor([2.], device='xla:0'))"
        assert "tangent" not in repr(x)

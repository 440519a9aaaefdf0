"""Tensors that are one number throughout are made on the device: no host array of their size, in normal and in abstract runs."""

import subprocess
import sys
import tracemalloc

import pytest
import torch
from torch import profiler
from torch_xla.core import xla_model as xm

from torch_bridge.compiler.program import Program
from torch_bridge.mesh import fills
from torch_bridge.runtime import executor

N = 2048
SIZE = N * N * 4


def empty_filled():
    x = torch.empty(N, N, device="xla")
    x.fill_(3.5)
    return x


def hoisted_state():
    p = torch.nn.Parameter(torch.zeros(N, N, device="xla"))
    optimizer = torch.optim.AdamW([p], lr=0.5, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        (p * 2 - 1).sum().backward()
        optimizer.step()
        xm.mark_step()
    return p.detach()


MADE = {
    "zeros": lambda: torch.zeros(N, N, device="xla"),
    "ones": lambda: torch.ones(N, N, device="xla"),
    "full": lambda: torch.full((N, N), 3.5, device="xla"),
    "empty": lambda: torch.empty(N, N, device="xla").mul_(0),
    "empty_strided": lambda: torch.empty_strided((N, N), (1, N), device="xla").mul_(0),
    "zeros_like": lambda: torch.zeros_like(torch.ones(N, N, device="xla")),
    "full_like": lambda: torch.full_like(torch.ones(1, device="xla").expand(N, N), 2),
    "new_zeros": lambda: torch.ones(2, device="xla").new_zeros(N, N),
    "new_full": lambda: torch.ones(2, device="xla").new_full((N, N), 7.0),
    "fill_": empty_filled,
    "zero_ of a view": lambda: torch.ones(N, N, device="xla")[1:].zero_(),
    "eye": lambda: torch.eye(N, device="xla"),
    "linspace": lambda: torch.linspace(0, 1, N * N, device="xla"),
    "arange": lambda: torch.arange(N * N, device="xla"),
    "copy_ of a number": lambda: torch.empty(N, N, device="xla").copy_(torch.tensor(2.0)),
    "copy_ of a row": lambda: torch.empty(N, N, device="xla").copy_(torch.arange(float(N))),
    "item assignment": lambda: torch.ones(N, N, device="xla").index_fill_(0, torch.tensor([0], device="xla"), 4.0),
    "hoisted state": hoisted_state,
}


@pytest.mark.parametrize("name", MADE)
def test_no_host_memory_of_its_size(name):
    torch.zeros(3, device="xla").add(1).cpu()  # what a first program allocates is not counted
    tracemalloc.start()
    try:
        with profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile:
            made = MADE[name]()
            out = made[..., -3:] + 0
            xm.mark_step()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    in_torch = max((event.self_cpu_memory_usage for event in profile.events()), default=0)
    assert in_torch < SIZE / 8, f"torch allocated {in_torch} bytes on the host"
    assert most < SIZE, f"Python and numpy allocated {most} bytes"
    with torch.device("cpu"):
        assert torch.equal(out.cpu(), made.cpu()[..., -3:])


ABSTRACT = """
import resource, sys, time
import torch, torch_xla
from nxd_jax import abstract_run

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

n = 20_000
with abstract_run(int(sys.argv[1])):
    (torch.zeros(3, device="xla") + 1, torch_xla.sync())
    before, started = most(), time.perf_counter()
    kept = [
        torch.zeros(n, n, device="xla") + 1,
        torch.ones(n, n, device="xla") * 2,
        torch.full((n, n), 3.5, device="xla") * 2,
        torch.zeros_like(torch.empty(n, n, device="xla")).fill_(4) * 2,
        torch.ones(2, device="xla").new_zeros(n, n) + 1,
        torch.eye(n, device="xla") + 1,
        torch.arange(n * n, device="xla") + 1,
        torch.zeros(n, n, device="xla").copy_(torch.tensor(2.0)),
        torch.randn(n, n, device="xla") + 1,
        torch.zeros(1).expand(n, n).to("xla") + 1,
    ]
    p = torch.nn.Parameter(torch.zeros(n, n, device="xla"))
    optimizer = torch.optim.AdamW([p])
    for _ in range(2):
        (p * 2).sum().backward()
        optimizer.step()
        torch_xla.sync()
    print(most() - before, time.perf_counter() - started)
"""


@pytest.mark.parametrize("cores", [1, 2])
def test_an_abstract_run_allocates_nothing(cores):
    """Tensors of 1.6 GB each take neither memory nor time."""
    found = subprocess.run([sys.executable, "-c", ABSTRACT, str(cores)], capture_output=True, text=True, check=True)
    kib, seconds = map(float, found.stdout.split())
    assert kib < 200 * 1024
    assert seconds < 20


def test_a_constant_read_through_a_view_makes_the_view_alone():
    """`x[0, 0].item()` of 64 GB of zeros."""
    x = torch.zeros(1 << 17, 1 << 17, device="xla")
    assert x[5, 7].item() == 0
    assert x.fill_(2.5)[3, :4].cpu().tolist() == [2.5] * 4
    assert x.t()[:2, :3].cpu().tolist() == [[2.5] * 3] * 2


def test_copies_of_a_view_that_shows_another_number():
    x = torch.ones(4, dtype=torch.complex64, device="xla")
    assert x.imag.clone().tolist() == [0.0] * 4
    assert (2j * x).fill_(1j).conj().clone().tolist() == [-1j] * 4
    assert torch.view_as_real(x).contiguous().clone().tolist() == [[1.0, 0.0]] * 4
    assert torch.full((4,), 3, device="xla", dtype=torch.uint8).view(torch.int16).clone().tolist() == [771] * 2
    assert torch.ones(2, device="xla").view(torch.int32).clone().tolist() == [0x3F800000] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_large_and_small_fills_have_the_same_values(dtype, monkeypatch):
    from torch_bridge.ir import dtypes
    from torch_bridge.runtime import transfer

    wanted = torch.full((3, 5), 1, dtype=dtype)
    small = transfer.to_cpu(fills.full((3, 5), 1, dtypes.to_jax(dtype)))
    monkeypatch.setattr(fills, "MOST_ON_HOST", 0)
    large = transfer.to_cpu(fills.full((3, 5), 1, dtypes.to_jax(dtype)))
    assert small.dtype == large.dtype == dtype
    assert torch.equal(small, wanted)
    assert torch.equal(large, wanted)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda d: torch.full((2,), 300, dtype=torch.uint8, device=d), RuntimeError),
        (lambda d: torch.full((2,), 1e40, dtype=torch.float16, device=d), RuntimeError),
        (lambda d: torch.zeros(2, dtype=torch.int8, device=d).fill_(1000), RuntimeError),
        (lambda d: torch.zeros(2, dtype=torch.int8, device=d).new_full((3,), 1000), RuntimeError),
        (lambda d: torch.full((2,), 2**70, dtype=torch.int32, device=d), OverflowError),
    ],
)
def test_a_number_that_the_dtype_cannot_hold_raises_as_in_torch(make, error):
    for device in ("cpu", "xla"):
        with pytest.raises(error, match=r"without overflow|too big"):
            make(device)


def test_copies_from_the_cpu_are_repeated_on_the_device():
    for size, of in (((3, 4), ()), ((3, 4), (4,)), ((3, 4), (3, 1)), ((2, 3, 4), (1, 4))):
        source = torch.randn(of)
        for where in (slice(None), slice(1, None)):
            expected, x = torch.zeros(size), torch.zeros(size, device="xla")
            expected[where].copy_(source) if len(of) < 2 or of[0] == 1 else expected.copy_(source)
            x[where].copy_(source) if len(of) < 2 or of[0] == 1 else x.copy_(source)
            assert torch.equal(x.cpu(), expected)
    with pytest.raises(RuntimeError, match="expand"):
        torch.zeros(3, 4, device="xla").copy_(torch.zeros(3))


def test_recording_goes_on_after_an_interrupted_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """State has become an input by then, so leaves have other numbers: also for two tensors that share an array and are only read."""
    x = torch.arange(3.0).to("xla") * 1
    y = x.clone()
    executor.sync()
    executor.clear_cache()
    assert x._storage.held is y._storage.held, "one array, two storages"
    state = torch.zeros(4, device="xla")
    state += 1
    seen = x * 2 + y
    assert x._storage.vid == y._storage.vid == -1

    def interrupted(self: Program, args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Program, "compile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.sync()
    assert x._storage.vid == y._storage.vid == -2, "the state is the first input now"
    more = y * 10 + x
    assert (seen + more).tolist() == [0.0, 14.0, 28.0]
    assert state.tolist() == [1.0] * 4

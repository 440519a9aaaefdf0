"""The bridge leaves the rest of the process as it was. Each test is a process of its own."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.torch_bridge.devices import python


@pytest.fixture
def entry_point(tmp_path: Path) -> Path:
    """A folder that, on the path, makes `import torch` load our `torch.backends` entry point, as an installed wheel does."""
    info = tmp_path / "nxd_jax_under_test-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nxd-jax-under-test\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nnxd_jax = torch_bridge._autoload:autoload\n")
    return tmp_path


CPU_WORK = """
import copy, io, pickle, sys, warnings
warnings.simplefilter("error")
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3))
weights = list(model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(2, 1, 8, 8)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item(), sum(p.sum().item() for p in weights), torch.get_rng_state().sum().item())
q = nn.MultiheadAttention(8, 2, batch_first=True)
out, _ = q(torch.ones(1, 3, 8), torch.ones(1, 3, 8), torch.ones(1, 3, 8))
out.sum().backward()
print(out.sum().item(), q.in_proj_weight.grad.sum().item())
y = torch.nn.functional.scaled_dot_product_attention(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), is_causal=True)
z = torch.fft.fft(torch.arange(4.0)).conj()
print(y.sum().item(), z.real, z.imag)
model.to(torch.float64)
assert model[0].weight is weights[0] and model[0].weight.dtype == torch.float64
assert type(model[0].weight) is nn.Parameter
twin = copy.deepcopy(model).to(torch.bfloat16)
assert twin[0].weight.dtype == torch.bfloat16 and model[0].weight.dtype == torch.float64
file = io.BytesIO(); torch.save(model.state_dict(), file); file.seek(0)
loaded = torch.load(file, map_location="cpu")
assert all(type(v) is torch.Tensor for v in loaded.values())
pickle.loads(pickle.dumps(model))
g = torch.Generator().manual_seed(3)
print(torch.rand(2, generator=g), torch.randperm(4, generator=g), type(g).__name__, g.device)
with torch.random.fork_rng():
    torch.rand(3)
from torch.utils.checkpoint import checkpoint
h = torch.ones(2, 3, requires_grad=True)
block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
for reentrant in (True, False):
    checkpoint(block, h, use_reentrant=reentrant).sum().backward()
print(h.grad)
with torch.autocast("cpu", dtype=torch.bfloat16):
    print(nn.Linear(3, 3)(torch.ones(1, 3)).dtype)
from torch.utils.data import DataLoader
for workers in (0, 2):
    print([b.tolist() for b in DataLoader(torch.arange(4), batch_size=2, num_workers=workers)])
print(torch.func.grad(lambda t: t.sin().sum())(torch.zeros(2)), torch.ones(3).is_xla)
"""


@pytest.mark.thorough
def test_cpu_code_gives_the_same_with_the_entry_point(entry_point: Path) -> None:
    plain = python(CPU_WORK, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    report = "\nassert 'torch_bridge.device.registration' in sys.modules and 'jax' not in sys.modules and 'torch_bridge.device.startup' not in sys.modules\n"
    assert python(CPU_WORK + report, entry_point) == plain


def test_cpu_code_gives_the_same_after_the_device_has_been_used(entry_point: Path) -> None:
    plain = python(CPU_WORK, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    use = "import torch\nm = torch.nn.Linear(2, 2).to('xla'); m(torch.ones(1, 2, device='xla')).sum().backward(); m.weight.grad.cpu()\n"
    assert python(use + CPU_WORK, entry_point) == plain


def test_pinned_memory_loaders_work_as_without_the_bridge(entry_point: Path) -> None:
    """Without an accelerator torch warns and pins nothing; with ours there is nothing to pin for either."""
    code = """
    import torch
    from torch.utils.data import DataLoader
    for workers in (0, 2):
        print([b.tolist() for b in DataLoader(torch.arange(4), batch_size=2, num_workers=workers, pin_memory=True)])
    """
    expected = "[[0, 1], [2, 3]]\n" * 2
    assert python(textwrap.dedent(code), entry_point) == expected


def test_importing_the_bridge_imports_no_jax() -> None:
    code = "import sys, torch, torch_bridge; assert 'jax' not in sys.modules; print(torch.device('xla:0'), torch.nn.Linear(2, 2).weight.device)"
    assert python(code).split() == ["xla:0", "cpu"]
    assert "jax" in python("import sys, torch, torch_bridge; torch.ones(1, device='xla'); print([m for m in sys.modules if m == 'jax'])")


AFTER_BACKWARD = """
import torch
x = torch.ones(3, requires_grad=True)
x.square().sum().backward()
import torch_bridge
w = torch.nn.Linear(3, 2).to("xla")
for _ in range(3):
    w.zero_grad()
    w(torch.ones(1, 3, device="xla")).square().sum().backward()
assert w.weight.grad.shape == (2, 3)
(w(torch.ones(1, 3, device="xla")).cpu() * 2).sum().backward()
y = torch.ones(3, device="xla", requires_grad=True)
(g,) = torch.autograd.grad((y ** 3).sum(), y, create_graph=True)
g.sum().backward()
x.square().sum().backward()
print(y.grad.tolist(), x.grad.tolist())
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("installed", [False, True])
def test_importing_after_a_cpu_backward_works(installed: bool, entry_point: Path) -> None:
    assert python(AFTER_BACKWARD, *([entry_point] if installed else [])) == "[6.0, 6.0, 6.0] [4.0, 4.0, 4.0]\n"


def test_the_entry_point_steps_aside_for_another_backend(entry_point: Path) -> None:
    code = """
    import sys, types
    import torch
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    torch.utils.rename_privateuse1_backend("npu")
    try:
        import torch_bridge
    except RuntimeError as error:
        print("one slot" in str(error) and "'npu'" in str(error))
    """
    assert python(textwrap.dedent(code), TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "True\n"


def test_scripts_fork_after_using_the_device() -> None:
    """DataLoader workers are forked from a process whose JAX is up."""
    code = """
    import torch, torch_bridge
    from torch.utils.data import DataLoader
    if __name__ == "__main__":
        w = torch.ones(2, device="xla")
        print([(b.to("xla").float() * w).tolist() for b in DataLoader(torch.arange(4), batch_size=2, num_workers=2)])
    """
    assert python(textwrap.dedent(code)).splitlines()[-1] == "[[0.0, 1.0], [2.0, 3.0]]"

"""`config/library_fusions.py`: what XLA for CPUs computes as one in its kernel library, and computes wrong, it computes product by product here.

In processes of their own: XLA reads its flags once, and programs are to be compiled as a user's are.
"""

import os
import subprocess
import sys
import textwrap

import jax
import pytest

from torch_bridge.config import library_fusions

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernel library is for CPUs")

PROGRAMS = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class SharedValues(nn.Module):
        \"\"\"Attention of four heads to one head of values: softmax, and its gradient when it is trained.\"\"\"

        def __init__(self):
            super().__init__()
            self.queries, self.shared = nn.Linear(16, 32), nn.Linear(16, 16)

        def forward(self, x):
            q = self.queries(x).view(32, 4, 8).transpose(0, 1)
            k, v = (one.expand(4, 32, 8) for one in self.shared(x).chunk(2, -1))
            return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)

    class Distances(nn.Module):
        \"\"\"A small matrix times many columns, squared and summed.\"\"\"

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, x):
            return (self.weight @ x.t()).pow(2).sum(0)

    class EveryOther(nn.Module):
        \"\"\"The gradient is a sum over a dilated window of one column.\"\"\"

        def forward(self, x):
            return nn.functional.avg_pool2d(x, (2, 1), stride=(2, 2))

    CASES = [
        (SharedValues(), torch.randn(32, 16)),
        (Distances(), torch.stack([torch.arange(32769.0), torch.zeros(32769), torch.zeros(32769)], 1)),
        (EveryOther(), torch.randn(1, 1, 64, 128)),
    ]

    def gradients(model, x):
        x = x.clone().requires_grad_()
        out = model(x)
        return [out, *torch.autograd.grad(out.square().mean(), [x, *model.parameters()])]

    def check(found, expected):
        for one, other in zip(found, expected, strict=True):
            one, other = torch.as_tensor(one).detach().cpu().double(), torch.as_tensor(other).detach().double()
            assert one.isfinite().all()
            assert (one - other).norm() <= 1e-5 * other.norm(), (one - other).norm() / other.norm()
"""

SCRIPT = """
    import copy

    import jax
    import numpy as np

    jax.block_until_ready(jax.numpy.ones(4) + 1)  # XLA has read its flags
    import torch_neuronx
    import torch_xla

    for model, x in CASES:
        expected = gradients(model, x)
        moved = copy.deepcopy(model).to("xla")
        check(gradients(moved, x.to("xla")), expected)
        with torch.no_grad():
            check([moved(x.to("xla"))], expected[:1])
        torch.jit.save(torch_neuronx.trace(model, x), "model.pt")
        check([torch.jit.load("model.pt")(x)], expected[:1])
    print("right")
"""

FUNCTIONS = """
    import os

    import numpy as np
    import jax
    {first}
    import torch_bridge

    def loss(f, params, x):
        return (f(params, {{}}, None, x)[0] ** 2).mean()

    for model, x in CASES:
        f = torch_bridge.to_jax(model)
        check([torch.from_numpy(np.array(jax.jit(f)(f.params, {{}}, None, x.numpy())[0]))], [model(x)])
        given, params = jax.numpy.asarray(x.numpy()), f.params
        found, (by_params, by_x) = jax.jit(lambda p, x: (f(p, {{}}, None, x)[0], jax.grad(lambda p, x: loss(f, p, x), (0, 1))(p, x)))(params, given)
        grads = [by_x, *(by_params[n] for n, _ in model.named_parameters())]
        check([torch.from_numpy(np.array(a)) for a in (found, *grads)], gradients(model, x))
    @jax.jit
    def weighed(x, one, p):  # JAX without torch
        z = jax.numpy.einsum("bik,bjk->bij", x, jax.numpy.broadcast_to(one, (4, 32, 8))) * p
        return z - p * z.sum(-1, keepdims=True)

    x, one, p = torch.randn(4, 32, 8), torch.randn(32, 8), torch.randn(4, 32, 32).softmax(-1)
    z = (x.double() @ one.double().t()) * p
    check([torch.from_numpy(np.array(weighed(x.numpy(), one.numpy(), p.numpy())))], [z - p * z.sum(-1, keepdim=True)])
    assert "XLA_FLAGS" not in os.environ
    print("right")
"""


def run(script: str, tmp_path: os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    code = textwrap.dedent(PROGRAMS) + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)


def test_recorded_and_traced_programs_are_right(tmp_path: os.PathLike[str]) -> None:
    """Also where XLA read its flags before, so that nothing but the programs' own options says so."""
    done = run(SCRIPT, tmp_path)
    assert done.stdout.endswith("right\n"), done.stderr


def test_functions_under_the_callers_jit_are_right(tmp_path: os.PathLike[str]) -> None:
    done = run(FUNCTIONS.format(first=""), tmp_path)
    assert done.stdout.endswith("right\n"), done.stderr
    assert "JAX ran before" not in done.stderr


def test_functions_warn_where_xla_read_its_flags_before(tmp_path: os.PathLike[str]) -> None:
    script = "import jax\njax.block_until_ready(jax.numpy.ones(4) + 1)\nimport torch_bridge\nfor _ in range(2): torch_bridge.to_jax(CASES[0][0])\n"
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr.count("Set XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT in the environment") == 1
    )
    assert "<string>" in done.stderr, "the warning is at the script's line"


def test_what_the_user_says_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--{library_fusions.OPTION}=")
    assert library_fusions.named_by_user()
    library_fusions.single_products_only()
    library_fusions.warn_if_fused.__wrapped__()
    assert os.environ["XLA_FLAGS"] == f"--{library_fusions.OPTION}="


def test_flags_are_as_they_were_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in (None, "--xla_dump_to=x"):
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        if flags is not None:
            monkeypatch.setenv("XLA_FLAGS", flags)
        library_fusions.single_products_only()
        assert os.environ.get("XLA_FLAGS") == flags

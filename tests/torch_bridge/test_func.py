"""Gradients of gradients and `torch.func` on device xla: equal to the CPU, or an error that says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_bridge
from tests.torch_bridge.devices import same

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward-mode AD

# -- gradients of gradients -----------------------------------------------------------------------

M = (3, 4)
INDEX = torch.tensor([[0, 1], [1, 1], [3, 0]])
ROWS = torch.tensor([0, 2, 2])


def spd(a: torch.Tensor) -> torch.Tensor:
    """A symmetric positive definite matrix."""
    return a @ a.mT + torch.eye(3).to(a.device)


def on(i: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return i.to(like.device)


CASES: list[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    *(
        (name, getattr(torch, name), (M,))
        for name in [
            "sin",
            "tan",
            "asin",
            "atanh",
            "exp",
            "log",
            "log1p",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "sigmoid",
            "tanh",
            "erf",
            "lgamma",
        ]
    ),
    *(
        (name, getattr(F, name), (M,))
        for name in ["relu", "gelu", "silu", "mish", "softplus", "elu", "leaky_relu", "hardswish", "hardtanh", "logsigmoid", "glu"]
    ),
    *((name, getattr(torch, name), (M, M)) for name in ["add", "mul", "div", "pow", "atan2", "maximum", "logaddexp"]),
    *(
        (name, lambda x, name=name: getattr(x, name)(1), (M,))
        for name in ["sum", "prod", "std", "amax", "logsumexp", "cumsum", "cumprod", "softmax", "log_softmax"]
    ),
    ("matmul", torch.matmul, (M, (4, 2))),
    ("baddbmm", torch.baddbmm, ((2, 3, 2), (2, 3, 4), (2, 4, 2))),
    ("linear", F.linear, (M, (2, 4), (2,))),
    ("einsum", lambda a, b: torch.einsum("ij,kj->ik", a, b), (M, (2, 4))),
    ("conv1d", F.conv1d, ((2, 3, 5), (4, 3, 3), (4,))),
    ("conv2d", lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2, groups=2), ((2, 4, 7, 7), (4, 2, 3, 3))),
    ("conv_transpose2d", F.conv_transpose2d, ((2, 3, 4, 4), (3, 2, 3, 3), (2,))),
    ("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), (M, (4,), (4,))),
    ("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), (M, (4,))),
    ("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((4, 3, 2), (3,), (3,))),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 2), ((1, 2, 4, 4),)),
    ("max_pool2d", lambda x: F.max_pool2d(x, 2), ((1, 2, 4, 4),)),
    ("bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((1, 2, 4, 4),)),
    ("pad", lambda x: F.pad(x, (1, 1), mode="reflect"), ((1, 2, 4),)),
    ("cross_entropy", lambda x: F.cross_entropy(x, on(torch.tensor([1, 0, 3]), x)), (M,)),
    ("mse_loss", F.mse_loss, (M, M)),
    ("embedding", lambda w: F.embedding(on(ROWS, w), w), (M,)),
    ("gather", lambda x: x.gather(1, on(INDEX, x)), (M,)),
    ("scatter_add", lambda x, s: x.scatter_add(1, on(INDEX, x), s), (M, (3, 2))),
    ("index", lambda x: x[on(ROWS, x)], (M,)),
    ("where", lambda x, y: torch.where(x > y, x, y), (M, M)),
    ("cat", lambda a, b: torch.cat([a, b]), (M, M)),
    ("views", lambda a: a.t().reshape(2, 6)[:, 1::2], (M,)),
    ("topk", lambda a: a.topk(2, 1)[0], (M,)),
    ("inv", lambda a: torch.linalg.inv(spd(a)), ((3, 3),)),
    ("slogdet", lambda a: torch.linalg.slogdet(spd(a))[1], ((3, 3),)),
    ("cholesky", lambda a: torch.linalg.cholesky(spd(a)), ((3, 3),)),
    ("fft", lambda a: torch.fft.rfft(a).abs(), (M,)),
]


def twice(f: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], device: str) -> Any:
    """The gradient of a weighted sum of squares of f's result, and the gradient of that gradient's square."""
    inputs = [(torch.rand(*s) * 0.8 + 0.1).to(device).requires_grad_() for s in shapes]
    out = f(*inputs)
    loss = (out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape).to(device)).square().sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return list(first), [x.grad for x in inputs]


@pytest.mark.core(keep=3)
@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize(("f", "shapes"), [pytest.param(f, shapes, id=name) for name, f, shapes in CASES])
def test_double_backward(f: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    same(lambda device: twice(f, shapes, device), rtol=2e-4, atol=1e-5)


def penalty(model: nn.Module, x: torch.Tensor) -> Any:
    """The gradient penalty of a Wasserstein critic, and its gradients."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


def critic() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.LeakyReLU(0.2),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(32, 1),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 1))


def test_gradient_penalty_of_a_convolutional_critic() -> None:
    same(lambda device: penalty(critic().to(device), torch.randn(4, 3, 8, 8).to(device)), rtol=1e-4, atol=1e-5)


def test_gradient_penalty_of_a_transformer() -> None:
    """Fused attention has no second derivative on any device: the script chooses the plain formula."""

    def run(device: str) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return penalty(encoder().to(device), torch.randn(4, 5, 8).to(device))

    same(run, rtol=1e-4, atol=1e-5)


def test_plain_attention_is_chosen_by_the_script() -> None:
    q = torch.rand(1, 2, 3, 4, device="xla", requires_grad=True)
    for backends, name in ((SDPBackend.MATH, "Unsafe|View|Reshape"), ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], "FusedAttention")):
        with sdpa_kernel(backends):
            out = F.scaled_dot_product_attention(q, q, q)
        assert any(part in type(out.grad_fn).__name__ for part in name.split("|")), out.grad_fn


NO_SECOND: list[tuple[str, Callable[..., Any], tuple[int, ...], str]] = [
    ("attention", lambda x: F.scaled_dot_product_attention(x, x, x), (1, 2, 3, 4), r"sdpa_kernel\(torch.nn.attention.SDPBackend.MATH\)"),
    ("hardsigmoid", F.hardsigmoid, M, r"hardsigmoid_backward is not implemented: torch has none on any device.*torch_bridge.to_jax"),
    (
        "cdist",
        lambda x: torch.cdist(x, x + 1),
        M,
        r"_cdist_backward' is not implemented: .*torch_bridge.to_jax\(module\) works with jax.grad",
    ),
    (
        "embedding_bag",
        lambda w: F.embedding_bag(on(INDEX[:2], w), w[:2].repeat(2, 1), mode="mean"),
        M,
        "_embedding_bag_backward.*torch_bridge.to_jax",
    ),
]


@pytest.mark.parametrize(("f", "shape", "message"), [pytest.param(*rest, id=name) for name, *rest in NO_SECOND])
def test_ops_without_a_second_derivative_say_so(f: Callable[..., Any], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        twice(f, (shape,), "xla")


def test_to_jax_has_gradients_of_gradients() -> None:
    """What the messages advise."""
    import jax
    import jax.numpy as jnp

    class Bend(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (F.hardsigmoid(x) ** 3).sum()

    f = torch_bridge.to_jax(Bend())
    second = jax.grad(jax.grad(lambda x: f(f.params, f.buffers, jax.random.key(0), x)[0]))(jnp.float32(1.0))
    assert second == pytest.approx(6 * (1 / 6 + 0.5) / 36, rel=1e-4)


# -- torch.func -----------------------------------------------------------------------------------


def r(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(device)


def mlp(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).to(device)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach() for k, v in model.named_parameters()}


def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda params, x, y: F.mse_loss(functional_call(model, params, (x,)), y)


def functional_training(d: str) -> Any:
    model, x, y = mlp(d), r(d, 4, 3), r(d, 4, 2)
    params = parameters(model)
    for _ in range(3):
        grads = grad(loss_of(model))(params, x, y)
        params = {k: params[k] - 0.1 * grads[k] for k in params}
    return params


def per_sample_gradients(d: str) -> Any:
    model = mlp(d)

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(functional_call(model, params, (x[None],)), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters(model), r(d, 6, 3), r(d, 6, 2))


def ensemble(d: str) -> Any:
    models = [mlp(d) for _ in range(3)]
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    return vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), in_dims=(0, 0, None))(params, buffers, r(d, 4, 3))


def linearized(d: str) -> Any:
    w = r(d, 3, 3)
    out, f = linearize(lambda x: (x @ w).sin() * x * w.sum(), r(d, 3))
    return out, f(torch.ones(3).to(d)), f(r(d, 3))


def pulled_back(d: str) -> Any:
    out, back = vjp(lambda x: x.sin() @ x, r(d, 3, 3))
    return out, back(torch.ones_like(out))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = x[1] * 2
    return y.mul_(x)


class Squared(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * g


FUNC: dict[str, Callable[[str], Any]] = {
    "grad": lambda d: grad(lambda x: (x.sin() ** 2).sum())(r(d, 4)),
    "grad, argnums": lambda d: grad(lambda x, y: (x @ y).sum(), argnums=(0, 1))(r(d, 3, 4), r(d, 4, 2)),
    "grad, has_aux": lambda d: grad(lambda x: (x.sin().sum(), x * 2), has_aux=True)(r(d, 4)),
    "grad of grad": lambda d: grad(grad(lambda x: x.sin() ** 3))(torch.tensor(0.7).to(d)),
    "grad_and_value": lambda d: grad_and_value(lambda x: x.exp().sum())(r(d, 4)),
    "grad of a branch": lambda d: grad(lambda x: x.sum() * (2 if x.sum().item() > 0 else 3))(torch.ones(3).to(d)),
    "grad with tensors made inside": lambda d: grad(lambda x: torch.ones(3, device=d).mul(x).sum() * torch.tensor(2.0, device=d))(r(d, 3)),
    "grad in place": lambda d: grad(lambda x: in_place(x).sum())(r(d, 3)),
    "functional_call": lambda d: functional_call(m := mlp(d), {k: v * 2 for k, v in parameters(m).items()}, (r(d, 4, 3),)),
    "functional training": functional_training,
    "per-sample gradients": per_sample_gradients,
    "ensemble": ensemble,
    "vmap": lambda d: vmap(lambda a, b: (a * b).sum())(r(d, 3, 4), r(d, 3, 4)),
    "vmap, dims": lambda d: vmap(lambda a, b: a @ b, in_dims=(1, None), out_dims=1)(r(d, 3, 5), r(d, 3, 2)),
    "vmap of vmap": lambda d: vmap(vmap(torch.dot, (0, None)), (None, 0))(r(d, 3, 4), r(d, 5, 4)),
    "vmap, chunks": lambda d: vmap(lambda a: a.softmax(0), chunk_size=2)(r(d, 5, 4)),
    "vmap in place": lambda d: vmap(in_place)(r(d, 4, 5)),
    "vmap of attention": lambda d: vmap(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))(r(d, 3, 2, 4, 8)),
    "vmap, gather": lambda d: vmap(lambda x, i: x.gather(0, i))(r(d, 4, 5), torch.tensor([[1], [2], [0], [4]]).to(d)),
    "vmap of a convolution's grad": lambda d: vmap(grad(lambda w, x: F.conv2d(x[None], w).square().sum()), (None, 0))(
        r(d, 2, 3, 3, 3), r(d, 4, 3, 6, 6)
    ),
    "vmap of a loss's grad": lambda d: vmap(grad(F.cross_entropy))(r(d, 4, 5), torch.tensor([1, 2, 0, 4]).to(d)),
    "vmap of an autograd.Function": lambda d: vmap(grad(lambda x: Squared.apply(x).sum()))(r(d, 3, 2)),
    "vmap without a batching rule": lambda d: vmap(lambda x: F.fold(x, (3, 3), (2, 2)))(r(d, 4, 4, 4)),
    "jvp": lambda d: jvp(lambda x: x.tanh() @ x, (r(d, 3, 3),), (r(d, 3, 3),)),
    "jvp of views": lambda d: jvp(lambda x: x.t()[1].exp().sum(), (r(d, 3, 4),), (r(d, 3, 4),)),
    "jvp at rows of one tensor": lambda d: (lambda x: jvp(lambda z: z.view(4, 1) * z, (x[1],), (x[2],)))(r(d, 3, 4)),
    "jvp of rows of one tensor, in vmap": lambda d: (
        lambda x: vmap(lambda p, t: jvp(lambda z: z.unsqueeze(1) @ z.unsqueeze(0), (p,), (t,)))(x, x.flip(0))
    )(r(d, 3, 4)),
    "jvp in place": lambda d: jvp(in_place, (r(d, 3),), (r(d, 3),)),
    "jvp of a convolution": lambda d: jvp(
        lambda x, w: F.conv2d(x, w), (r(d, 1, 3, 5, 5), r(d, 2, 3, 3, 3)), (r(d, 1, 3, 5, 5), r(d, 2, 3, 3, 3))
    ),
    "Hessian-vector product": lambda d: jvp(grad(lambda x: x.sin().prod()), (r(d, 4),), (r(d, 4),)),
    "vjp": pulled_back,
    "jacrev": lambda d: jacrev(mlp(d))(r(d, 2, 3)),
    "jacrev, chunks": lambda d: jacrev(lambda x: (x.sin() @ x).sum(0), chunk_size=1)(r(d, 3, 3)),
    "vmap of jacrev": lambda d: vmap(jacrev(mlp(d)))(r(d, 2, 3)),
    "jacfwd": lambda d: jacfwd(lambda x: (x.sin() @ x).sum(0))(r(d, 3, 3)),
    "hessian": lambda d: hessian(lambda x: (x.sin() * x.exp()).sum())(r(d, 4)),
    "linearize": linearized,
    "functionalize": lambda d: functionalize(in_place)(r(d, 3)),
}


@pytest.mark.core(keep=6)
@pytest.mark.filterwarnings(
    "ignore:There is a performance drop because we have not yet implemented the batching rule:UserWarning"
)  # torch's own
@pytest.mark.filterwarnings("ignore:.*_new_zeros_with_same_feature_meta.* has no JAX lowering:UserWarning")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch's own, in linearize
@pytest.mark.parametrize("name", FUNC)
def test_functional_transforms(name: str) -> None:
    same(FUNC[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("draw", [lambda x: x + torch.randn(300, device="xla"), lambda x: F.dropout(x, 0.5)], ids=["randn", "dropout"])
def test_randomness_of_vmap(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(4, 300, device="xla")
    different, equal = (vmap(draw, randomness=how)(x).cpu() for how in ("different", "same"))
    assert (different[0] != different[1]).any() and (equal == equal[0]).all()
    with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
        vmap(draw)(x)


def test_values_inside_vmap_raise_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match=r"\.item\(\) on a Tensor"):
        vmap(lambda x: x.sum().item())(torch.ones(3, 2, device="xla"))


def test_make_fx_traces_xla_tensors() -> None:
    """torch's tracer would otherwise keep the numbers of the example."""
    w = torch.randn(3, 3).to("xla")
    traced = make_fx(lambda x: (x @ w).sin() * x)(torch.randn(3).to("xla"))
    x = torch.ones(3, device="xla")
    torch.testing.assert_close(traced(x).cpu(), ((x @ w).sin() * x).cpu())
    assert torch.ops.aten.sin.default in [n.target for n in traced.graph.nodes]


def test_forward_mode() -> None:
    def run(device: str) -> Any:
        import torch.autograd.forward_ad as forward

        with forward.dual_level():
            x = forward.make_dual(r(device, 3), r(device, 3))
            return list(forward.unpack_dual(x.sin() * x))

    same(run)


def test_batched_vectors() -> None:
    def run(device: str) -> Any:
        x = r(device, 3).requires_grad_()
        y = x.sin() * x
        return torch.autograd.grad(y, x, torch.eye(3).to(device), is_grads_batched=True)

    same(run)

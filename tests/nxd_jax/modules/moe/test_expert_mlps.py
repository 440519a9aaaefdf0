"""Experts with routing: every path equals a loop over experts in eager torch, outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nxd_jax.modules.moe import capacity, dropless
from nxd_jax.modules.moe.expert_mlps import ExpertMLPs
from nxd_jax.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from nxd_jax.modules.moe.moe_configs import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.modules.moe.by_hand import Rule, Weights, mix
from torch_bridge import metrics
from torch_bridge.runtime import executor

E, H, I = 4, 16, 24
FACTORS = [None, 0.0, "full", 0.5, 1.0, 1.25]


@pytest.fixture(autouse=True)
def _world_of_one(nxd: Nxd) -> None:
    nxd(1)


def make(k: int, factor: Any = None, **kwargs: Any) -> ExpertMLPs:
    torch.manual_seed(5)
    given: dict[str, Any] = dict(num_experts=E, top_k=k, hidden_size=H, intermediate_size=I, hidden_act="silu", glu_mlp=True)
    factor = E / k - 1e-6 if factor == "full" else factor
    return ExpertMLPs(**given | dict(capacity_factor=factor) | kwargs)


def weights_of(mlps: ExpertMLPsV2) -> Weights:
    """The CPU weights as leaves of their own."""
    op = mlps.mlp_op
    first = op.gate_up_proj if op.glu_mlp else op.up_proj

    def leaf(p: torch.Tensor | None) -> Any:
        return None if p is None else p.detach().cpu().clone().requires_grad_()

    return Weights(
        leaf(first.weight), leaf(op.down_proj.weight), leaf(first.bias), leaf(op.down_proj.bias), glu=op.glu_mlp, act=op.hidden_act
    )  # type: ignore[arg-type]


def data(k: int, tokens: int = 11, routing: str = "random", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Hidden states, affinities, indices and the outputs' gradient."""
    torch.manual_seed(100 + k)
    logits = torch.randn(tokens, E)
    if routing == "one":  # all tokens choose the last expert (first)
        logits = logits * 1e-3 + torch.arange(E) * 2.0
    if routing == "not the first":
        logits[:, 0] -= 100
    affinities = torch.softmax(logits, 1)
    return torch.randn(tokens, H).to(dtype), affinities.to(dtype), affinities.topk(k, 1).indices, torch.randn(tokens, H).to(dtype)


def run(
    mlps: ExpertMLPsV2, x: torch.Tensor, affinities: torch.Tensor, index: torch.Tensor, grad: torch.Tensor, **kwargs: Any
) -> list[torch.Tensor]:
    """The output and the gradients of hidden states, affinities and weights, on the CPU."""
    device = mlps.mlp_op.down_proj.weight.device
    mlps.zero_grad()
    x, affinities = (t.to(device).detach().requires_grad_() for t in (x, affinities))
    kwargs = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()}
    out = mlps(x, affinities, index.to(device), **dict(seq_len=x.shape[0]) | kwargs)
    out.backward(grad.to(device))
    found = [out.detach(), x.grad, affinities.grad, *(p.grad for p in mlps.mlp_op.parameters())]
    return [torch.zeros(()) if t is None else t.cpu() for t in found]


def expected(
    weights: Weights, rule: Rule, x: torch.Tensor, affinities: torch.Tensor, index: torch.Tensor, grad: torch.Tensor, padding: Any = None
) -> list[torch.Tensor]:
    """The same by hand, in the order of the module's parameters."""
    x, affinities = x.clone().requires_grad_(), affinities.clone().requires_grad_()
    out = mix(weights, rule, x, affinities, index, padding)
    out.backward(grad)
    parameters = [p for p in (weights.first, weights.first_bias, weights.second, weights.second_bias) if p is not None]
    return [out.detach(), x.grad, affinities.grad, *(p.grad for p in parameters)]  # type: ignore[list-item]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    assert len(found) == len(wanted)
    for name, a, b in zip(["output", "hidden", "affinities", *["weight"] * 4], found, wanted, strict=False):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def slots(k: int, factor: Any, tokens: int) -> int | None:
    if factor in (None, "full") or factor <= 0 or factor >= E / k:
        return None
    return capacity.expert_capacity(tokens, k, factor, E)


# -- the grid ----------------------------------------------------------------------------------------


@pytest.mark.core(keep=5)
@pytest.mark.thorough(keep=24)
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_path_equals_a_loop_over_experts(k: int, factor: Any, device: str) -> None:
    mlps = make(k, factor, normalize_top_k_affinities=k in (2, 4))
    weights, given = weights_of(mlps), data(k)
    rule = Rule(slots(k, factor, 11), normalize=k in (2, 4))
    same(run(mlps.to(device), *given), expected(weights, rule, *given))


@pytest.mark.core(keep=2)
@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("routing", ["one", "not the first"])
@pytest.mark.parametrize("tokens", [1, 37])
def test_routings_far_from_the_mean(tokens: int, routing: str, factor: Any) -> None:
    mlps = make(2, factor)
    weights, given = weights_of(mlps), data(2, tokens, routing)
    same(run(mlps.to("xla"), *given), expected(weights, Rule(slots(2, factor, tokens)), *given))


@pytest.mark.parametrize("factor", [None, 1.0])
def test_bfloat16(factor: Any) -> None:
    """As near to the exact numbers as a loop in bfloat16 is."""
    mlps = make(2, factor, normalize_top_k_affinities=True, dtype=torch.bfloat16)
    weights, given = weights_of(mlps), data(2, 24, dtype=torch.bfloat16)
    rule = Rule(slots(2, factor, 24), normalize=True)
    found = run(mlps.to("xla"), *given)
    assert {t.dtype for t in found} == {torch.bfloat16}
    wide = Weights(*(w.detach().double().requires_grad_() for w in (weights.first, weights.second)))
    exact = expected(wide, rule, *(t.double() if t.is_floating_point() else t for t in given))
    loop = expected(weights, rule, *given)
    for a, b, c in zip(found, loop, exact, strict=True):
        torch.testing.assert_close(a.double(), c, rtol=5e-2, atol=5e-2)
        assert (a.double() - c).norm() <= 1.1 * (b.double() - c).norm()


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("factor", [None, 0.75])
@pytest.mark.parametrize("glu", [True, False])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_biases_and_plain_mlps(glu: bool, factor: Any, device: str) -> None:
    mlps = make(2, factor, glu_mlp=glu, hidden_act="gelu", bias=True)
    with torch.no_grad():
        for p in mlps.mlp_op.parameters():
            p.normal_(std=0.3)
    weights, given = weights_of(mlps), data(2)
    same(run(mlps.to(device), *given), expected(weights, Rule(slots(2, factor, 11)), *given))


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("shape", [(13,), (1, 13)])
def test_padding(k: int, factor: Any, shape: tuple[int, ...]) -> None:
    """Padded tokens give zeros, get no gradient, and take no slot; NaN in them stays in them."""
    mlps = make(k, factor, bias=True)
    with torch.no_grad():
        for p in mlps.mlp_op.parameters():
            p.normal_(std=0.3)
    weights, given = weights_of(mlps), data(k, 13)
    padding = torch.ones(13, dtype=torch.bool)
    padding[torch.tensor([0, 1, 5, 12])] = False
    wanted = expected(weights, Rule(slots(k, factor, 13)), *given, padding=padding)
    for mask in (padding, padding.long()):
        found = run(mlps.to("xla"), *given, padding_mask=mask.reshape(shape))
        same(found, wanted)
        assert not any(t[~padding].any() for t in found[:3])
    x, affinities, *rest = given
    x, affinities = x.clone(), affinities.clone()
    x[0], affinities[0] = torch.nan, torch.nan
    same(run(mlps, x, affinities, *rest, padding_mask=padding), wanted)


@pytest.mark.core(keep=3)
@pytest.mark.parametrize("factor", [None, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 2])
def test_affinities_may_weigh_the_inputs(k: int, factor: Any) -> None:
    """For one expert a token, as in Llama 4, and for several: each gets the token with its own weight."""
    mlps = make(k, factor, early_expert_affinity_modulation=True)
    weights, given = weights_of(mlps), data(k)
    wanted = expected(weights, Rule(slots(k, factor, 11), early=True), *given)
    same(run(mlps.to("xla"), *given), wanted)
    assert not torch.allclose(wanted[0], expected(weights_of(make(k)), Rule(slots(k, factor, 11)), *given)[0], rtol=1e-2)


def test_affinities_that_are_masked_already() -> None:
    """`expert_affinities_masked_full` are weights as they shall be: not normalised again."""
    mlps = make(2, normalize_top_k_affinities=True)
    weights, (x, affinities, index, grad) = weights_of(mlps), data(2)
    masked = torch.zeros_like(affinities).scatter(1, index, affinities.gather(1, index)) * 0.5
    given = mlps.to("xla")(
        x.to("xla"), affinities.to("xla") * torch.nan, index.to("xla"), 11, expert_affinities_masked_full=masked.to("xla")
    )
    torch.testing.assert_close(given.cpu(), expected(weights, Rule(), x, affinities * 0.5, index, grad)[0], rtol=1e-4, atol=1e-5)


def test_normalising_may_be_switched_on_later() -> None:
    mlps = make(2)
    assert mlps.normalize_top_k_affinities is False
    mlps.normalize_top_k_affinities = True
    given = data(2)
    same(run(mlps, *given), expected(weights_of(mlps), Rule(normalize=True), *given))


# -- modes -------------------------------------------------------------------------------------------


def test_which_modes_drop() -> None:
    """A factor of at least experts / top_k, None, or one that is not positive: never. One token per sequence in eval mode: never."""
    for k, factor in [(2, None), (2, 2.0), (2, 2.5), (2, 0.0), (2, -1.0), (4, 1.0)]:
        assert not make(k, factor).drops_tokens(7) and not make(k, factor).eval().drops_tokens(7)
    mlps = make(2, 1.0)
    assert mlps.drops_tokens(7) and mlps.drops_tokens(1)
    mlps.eval()
    assert mlps.drops_tokens(7) and not mlps.drops_tokens(1)
    assert make(2, 2.0).capacity_factor is None and make(2, 1.5).capacity_factor == 1.5


def test_paths_by_name() -> None:
    """NxD's four: three that drop nothing, and the one with a capacity, whatever the mode."""
    mlps = make(2, 1.0, normalize_top_k_affinities=True)
    x, affinities, index, grad = data(2)
    whole = expected(weights_of(mlps), Rule(normalize=True), x, affinities, index, grad)[0]
    dropped = expected(weights_of(mlps), Rule(slots(2, 1.0, 11), normalize=True), x, affinities, index, grad)[0]
    for training in (True, False):
        mlps.train(training)
        for path in (mlps.forward_all_experts, mlps.forward_blockwise, mlps.forward_selective_loading):
            torch.testing.assert_close(path(x, affinities, index), whole, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mlps.forward_capacity_factor(x, affinities, index), dropped, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="capacity_factor=None gives these experts no capacity: .* or call forward_blockwise"):
        make(2).forward_capacity_factor(x, affinities, index)


@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_generating_one_token_drops_none(tokens: int) -> None:
    mlps = make(1, 0.5).eval()
    weights, given = weights_of(mlps), data(1, tokens, "one")
    mlps.to("xla")
    same(run(mlps, *given, seq_len=1), expected(weights, Rule(), *given))
    same(run(mlps, *given, seq_len=5), expected(weights_of(mlps), Rule(slots(1, 0.5, tokens)), *given))


def test_the_router_of_sequence_parallel_eval(nxd: Nxd) -> None:
    """In eval mode each rank may give the affinities and indices of its own part of the tokens."""
    from tests.nxd_jax.parallel_layers.parts import close, own, tp_place

    nxd(2, tp=2)
    mlps = make(2, sequence_parallel_enabled=True, normalize_top_k_affinities=True).to("xla").eval()
    x, affinities, index, _ = data(2, 12)
    whole = mlps(x.to("xla"), affinities.to("xla"), index.to("xla"), 12)
    parts = [own([t.chunk(2)[tp_place(r)] for r in range(2)]) for t in (affinities, index)]
    halves = mlps(x.to("xla"), *parts, 12)
    close(halves - whole, torch.zeros(12, H))
    mlps.train()
    with pytest.raises(
        ValueError, match=r"expert_affinities \[6, 4\] \(expected \[12, 4\]\), expert_index \[6, 2\] \(expected \[12, 2\]\)"
    ):
        mlps(x.to("xla"), *parts, 12)


# -- one program, at the cost of the tokens ----------------------------------------------------------


def in_turn(mlps: ExpertMLPs, routings: list[str]) -> int:
    """Programs that were compiled while one routing came after another."""
    for k, routing in enumerate(routings):
        run(mlps, *data(2, 37, routing))
        executor.sync()
        if k == 0:
            before = metrics.COUNTERS.get("UncachedCompile", 0)
    return metrics.COUNTERS.get("UncachedCompile", 0) - before


@pytest.mark.parametrize("factor", [None, 1.0])
def test_one_program_whatever_the_routing(factor: Any) -> None:
    assert in_turn(make(2, factor).to("xla"), ["random", "one", "not the first"]) == 0


@pytest.mark.parametrize("factor", [None, 1.0])
def test_one_program_from_the_first_step_to_played_ones(factor: Any) -> None:
    """Playing begins after some steps, and keeps nothing of a step alive."""
    assert in_turn(make(2, factor).to("xla"), ["random"] * 12) == 0


@pytest.mark.parametrize("factor", [None, 0.0, 1.25])
def test_products_are_those_of_routed_tokens(monkeypatch: pytest.MonkeyPatch, factor: Any) -> None:
    """T k rows, or E C slots, go through the experts: never all tokens through all of them."""
    mlps = make(2, factor)
    seen = []
    rows, forward = mlps.mlp_op.rows, mlps.mlp_op.forward
    monkeypatch.setattr(mlps.mlp_op, "rows", lambda x, ends, **kw: seen.append(x.shape[0]) or rows(x, ends, **kw))
    monkeypatch.setattr(mlps.mlp_op, "forward", lambda x, **kw: seen.append(x.shape[0] * x.shape[1]) or forward(x, **kw))
    run(mlps, *data(2, 16))
    assert seen == [E * capacity.expert_capacity(16, 2, 1.25, E)] if factor else [16 * 2]


# -- what scripts hand over --------------------------------------------------------------------------


def config(**kwargs: Any) -> RoutedExpertsMLPOpsConfig:
    given: dict[str, Any] = dict(num_experts=E, hidden_size=H, intermediate_size=I, top_k=2, hidden_act="silu", glu_mlp=True)
    return RoutedExpertsMLPOpsConfig(**given | kwargs)


def test_configuration_and_keywords_make_the_same_experts() -> None:
    given = config(capacity_factor=5.0, normalize_top_k_affinities=True, enable_spmd_rank=True)
    torch.manual_seed(5)
    v2 = ExpertMLPsV2(routed_experts_mlp_config=given, blockwise_matmul_config=BlockwiseMatmulConfig.from_kwargs(block_size=128))
    assert given.capacity_factor == 5.0 and v2.capacity_factor is None, "the script's configuration stays as it is"
    assert (v2.num_experts, v2.top_k, v2.hidden_size, v2.intermediate_size) == (E, 2, H, I)
    assert v2.blockwise_matmul_config.block_size == 128 and v2.spmd_rank.get_rank().tolist() == [0]
    assert v2.get_mlp_op() is v2.mlp_op and v2.SELECTIVE_LOADING_THRESHOLD == 1.0
    mlps = make(2, 5.0, normalize_top_k_affinities=True, block_size=64, init_method=None, output_layer_init_method=None)
    assert mlps.blockwise_matmul_config.block_size == 64 and make(2).blockwise_matmul_config.block_size == 512
    assert list(mlps.state_dict()) == ["mlp_op.gate_up_proj.weight", "mlp_op.down_proj.weight"]
    assert list(v2.state_dict()) == [*mlps.state_dict(), "spmd_rank.rank"]
    for name, value in mlps.state_dict().items():
        torch.testing.assert_close(value, v2.state_dict()[name], rtol=0, atol=0)
    given_data = data(2)
    same(run(mlps, *given_data), run(v2, *given_data), rtol=0, atol=0)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "top_k": (lambda: make(5), ValueError, "top_k=5 must be between 1 and num_experts=4"),
    "top_k 0": (lambda: ExpertMLPsV2(config(top_k=0)), ValueError, "top_k=0 must be between 1 and num_experts=4"),
    "activation": (
        lambda: make(2, hidden_act="swish"),
        ValueError,
        "hidden_act='swish' is not one of gelu, leaky_relu, relu, sigmoid, silu, tanh",
    ),
    "normalise one": (
        lambda: make(1, normalize_top_k_affinities=True),
        ValueError,
        r"normalize_top_k_affinities=True needs top_k > 1: .* the router would get no gradient",
    ),
    "return_bias": (lambda: make(2, return_bias=True), NotImplementedError, "return_bias=True: .* leave it False"),
    "hybrid": (
        lambda: ExpertMLPsV2(config(), enabled_hybrid_sharding=True),
        NotImplementedError,
        "enabled_hybrid_sharding=True would keep the experts twice, .* leave it False",
    ),
    "shapes": (
        lambda: make(2)(torch.ones(3, 9), torch.ones(3, 5), torch.zeros(2, 2, dtype=torch.long), 3, padding_mask=torch.ones(2, 2)),
        ValueError,
        r"experts with hidden size 16, 4 experts and top_k 2 were given hidden_states \[3, 9\] \(expected \[3, 16\]\), expert_affinities \[3, 5\] "
        r"\(expected \[3, 4\]\), expert_index \[2, 2\] \(expected \[3, 2\]\), padding_mask \[2, 2\] \(expected 3 entries\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, error, text = MISTAKES[name]
    with pytest.raises(error, match=text):
        call()


def test_dropless_rows_are_sorted_by_expert() -> None:
    assigned, ends = dropless.assign(torch.tensor([[1, 0], [3, 1]]), 4)
    assert ends.tolist() == [1, 3, 3, 4] and assigned.pair.tolist() == [1, 0, 3, 2] and assigned.kept is None
    assigned, ends = dropless.assign(torch.tensor([[1, 2], [2, 1]]), 2, complete=False)
    assert ends.tolist() == [0, 2] and assigned.used is not None and assigned.used.tolist() == [True, True, False, False]

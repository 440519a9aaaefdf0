"""Random numbers of several ranks: the same for what they share, each rank's own along the axes that a value varies over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from torch.utils.checkpoint import checkpoint

from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge import executor, rng, sharded, world

SHAPE = (64,)


@pytest.fixture(autouse=True)
def cube(hosted: Hosted) -> None:
    hosted(8, pp=2, dp=2, tp=2)


def ones(*axes: str) -> torch.Tensor:
    return sharded.from_ranks(lambda r: torch.ones(SHAPE), axes) if axes else torch.ones(SHAPE, device="xla")


def classes(t: torch.Tensor) -> list[int]:
    """For each rank, the first rank with the same values."""
    found = sharded.shards(t.detach())
    return [next(k for k, other in enumerate(found) if torch.equal(other, own)) for own in found]


def alike(*axes: str) -> list[int]:
    """The same for values that differ along exactly these axes."""
    places = [world.coordinates(a) for a in axes]
    table = [tuple(p[r] for p in places) for r in range(8)]
    return [table.index(place) for place in table]


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "uniform_": lambda x: (x + 0).uniform_(),
    "normal_": lambda x: (x + 0).normal_(),
    "bernoulli_": lambda x: (x + 0).bernoulli_(0.5),
    "multinomial": lambda x: torch.multinomial(x, 32),
}


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("axes", [(), ("tp",), ("dp",), ("dp", "tp"), ("pp",), ("pp", "dp", "tp")], ids=str)
def test_draws_differ_along_exactly_the_axes_of_the_value(axes: tuple[str, ...]) -> None:
    made = {name: draw(ones(*axes)) for name, draw in DRAWS.items()}
    for name, t in made.items():
        assert classes(t) == alike(*axes), name


def test_factories_are_the_same_on_all_ranks() -> None:
    for t in (
        torch.rand(8, device="xla"),
        torch.randn(8, device="xla"),
        torch.randperm(8, device="xla"),
        torch.randint(0, 99, (8,), device="xla"),
    ):
        assert classes(t) == alike()


def test_masks_of_whole_features_are_the_same_on_all_ranks() -> None:
    """torch makes them from a fresh tensor, without a look at the values: a factory."""
    assert classes(F.dropout1d(ones("dp").view(32, 2), 0.5)) == alike()


def test_the_backward_pass_and_checkpointing_see_the_same_mask() -> None:
    x = ones("dp").requires_grad_()
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert x.grad is not None
    for value, grad in zip(sharded.shards(y.detach()), sharded.shards(x.grad), strict=True):
        assert torch.equal(value, grad)
    masks = []

    def block(t: torch.Tensor) -> torch.Tensor:
        out = F.dropout(t, 0.5)
        masks.append(out.detach())
        return out * t

    x.grad = None
    checkpoint(block, x, use_reentrant=False).sum().backward()
    first, again = (sharded.shards(m) for m in masks)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_seeds_reproduce() -> None:
    def draw(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [s for axes in ((), ("tp",)) for s in sharded.shards(F.dropout(ones(*axes), 0.5))]

    assert all(torch.equal(a, b) for a, b in zip(draw(3), draw(3), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(draw(3), draw(4), strict=True))


def test_draws_of_one_run_differ() -> None:
    x = ones()
    a, b = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert not torch.equal(*(sharded.shards(t)[0] for t in (a, b)))
    executor.sync()
    assert not torch.equal(sharded.shards(F.dropout(x, 0.5))[0], sharded.shards(a)[0])


def test_a_state_that_draws_differently_along_an_axis() -> None:
    """What a tracker of tensor-parallel random numbers switches on."""
    own = rng.RngState(7, axes=("tp",))
    rng.DEFAULT.axes = own.axes
    try:
        assert classes(F.dropout(ones(), 0.5)) == alike("tp")
        assert classes(F.dropout(ones("dp"), 0.5)) == alike("dp", "tp")
        assert classes(torch.rand(8, device="xla")) == alike("tp")
        assert classes((ones() + 0).uniform_()) == alike("tp")
    finally:
        rng.DEFAULT.axes = ()
    assert classes(F.dropout(ones(), 0.5)) == alike()
    assert own.take() == (7, 0, ("tp",)) and own.take() == (7, 1, ("tp",))


def test_axes_that_the_world_has_not() -> None:
    rng.DEFAULT.axes = ("tp", "cp")
    try:
        assert classes(F.dropout(ones(), 0.5)) == alike("tp")
        world.set_axes({"dp": 8})
        assert classes(F.dropout(torch.ones(SHAPE, device="xla"), 0.5)) == [0] * 8
    finally:
        rng.DEFAULT.axes = ()


@pytest.mark.parametrize("axes", [(), ("pp", "dp", "tp")], ids=["shared", "own"])
def test_statistics(axes: tuple[str, ...]) -> None:
    x = sharded.from_ranks(lambda r: torch.ones(20000), axes) if axes else torch.ones(20000, device="xla")
    masks = torch.stack(sharded.shards(F.dropout(x, 0.3))) != 0
    assert (masks.double().mean(1) - 0.7).abs().max() < 0.02
    normal = torch.stack(sharded.shards(torch.zeros_like(x).normal_() + 0 * x))
    assert normal.mean(1).abs().max() < 0.05 and (normal.std(1) - 1).abs().max() < 0.05
    if axes:  # independent: two ranks keep the same element by chance alone
        agree = (masks[0] & masks[1]).double().mean()
        assert abs(agree - 0.49) < 0.02


def test_a_generator_of_ones_own() -> None:
    def draw(seed: int, *axes: str) -> torch.Tensor:
        return torch.bernoulli(ones(*axes) * 0.5, generator=torch.Generator(device="xla").manual_seed(seed))

    assert classes(draw(1)) == alike() and classes(draw(1, "tp")) == alike("tp")
    assert torch.equal(sharded.shards(draw(1))[0], sharded.shards(draw(1))[0])
    assert not torch.equal(sharded.shards(draw(1))[0], sharded.shards(draw(2))[0])


# -- seeds that differ by rank ------------------------------------------------------------------------

SEEDINGS: dict[str, Callable[[Any], Any]] = {
    "torch.manual_seed": lambda seed: torch.manual_seed(seed),
    "torch.random.manual_seed": lambda seed: torch.random.manual_seed(seed),
    "torch_xla.manual_seed": torch_xla.manual_seed,
    "xm.set_rng_state": xm.set_rng_state,
    "torch.xla.manual_seed": lambda seed: torch.xla.manual_seed(seed),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", SEEDINGS)
def test_seeds_that_differ_by_rank(name: str) -> None:
    seed = SEEDINGS[name]
    seed(5 + world.rank())
    each = torch.randn(8, device="xla")
    dropped = F.dropout(torch.ones(64, device="xla"), 0.5)
    seed(5 + world.current().table(lambda r: r % 2))
    along_tp = torch.randn(8, device="xla")
    seed(5)
    same = torch.randn(8, device="xla")
    seed(5 + world.rank())
    again = torch.randn(8, device="xla")
    assert classes(each) == classes(dropped) == alike("pp", "dp", "tp") and classes(along_tp) == alike("tp") and classes(same) == alike()
    assert all(map(torch.equal, sharded.shards(each), sharded.shards(again)))


def test_seeds_of_the_cpu_are_the_first_ranks() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7 + world.rank())
    assert torch.equal(torch.rand(3), expected)


def test_states_remember_that_ranks_differ() -> None:
    """What a tracker of random states does: each state is put back later, by number or as bytes."""
    xm.set_rng_state(3)
    plain = xm.get_rng_state()
    xm.set_rng_state(3 + world.current().table(lambda r: r % 2))
    parallel, state = xm.get_rng_state(), torch.xla.get_rng_state()  # type: ignore[attr-defined]
    first = torch.rand(8, device="xla")
    later = xm.get_rng_state()
    second = torch.rand(8, device="xla")
    xm.set_rng_state(plain)
    assert classes(torch.rand(8, device="xla")) == alike() and plain == 3
    for restore, expected in (
        (lambda: xm.set_rng_state(parallel), first),
        (lambda: xm.set_rng_state(later), second),
        (lambda: torch.xla.set_rng_state(state), first),  # type: ignore[attr-defined]
    ):
        xm.set_rng_state(99)
        restore()
        found = torch.rand(8, device="xla")
        assert classes(found) == alike("tp")
        assert all(map(torch.equal, sharded.shards(found), sharded.shards(expected)))
    with xm.fork_rng():
        xm.set_rng_state(1 + world.rank())
        assert classes(torch.rand(8, device="xla")) == alike("pp", "dp", "tp")
    torch.xla.set_rng_state(state)  # type: ignore[attr-defined]
    assert classes(torch.rand(8, device="xla")) == alike("tp")


def test_the_mesh_may_get_other_axes_after_seeding(hosted: Hosted) -> None:
    hosted(4)
    torch.manual_seed(5 + world.rank())
    assert classes_of(4, torch.rand(8, device="xla")) == [0, 1, 2, 3]
    world.set_axes({"dp": 2, "tp": 2})
    assert classes_of(4, torch.rand(8, device="xla")) == [0, 1, 2, 3]


def classes_of(count: int, t: torch.Tensor) -> list[int]:
    found = classes(t)
    assert len(found) == count
    return found


def test_a_checkpointed_block_draws_the_same_again() -> None:
    torch.manual_seed(5 + world.rank())
    x = torch.ones(64, device="xla", requires_grad=True)
    masks = []

    def block(t: torch.Tensor) -> torch.Tensor:
        out = F.dropout(t, 0.5)
        masks.append(out.detach())
        return out * t

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(masks) == 2 and classes(masks[0]) == alike("pp", "dp", "tp")
    assert all(map(torch.equal, sharded.shards(masks[0]), sharded.shards(masks[1])))
    torch.manual_seed(5)

"""Random numbers of several ranks: equal seeds give equal numbers; with NXD_JAX_INDEPENDENT_DRAWS different ones along the axes that a value varies over."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from torch.utils.checkpoint import checkpoint

from tests.torch_bridge.devices import python
from tests.torch_bridge.interrupting import BeforeLine
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import random_state, rank_numbers, world
from torch_bridge.per_rank import host_random_states
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor

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


@pytest.fixture
def independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_INDEPENDENT_DRAWS", "1")


@pytest.mark.parametrize("axes", [(), ("tp",), ("pp", "dp", "tp")], ids=str)
def test_equal_seeds_give_equal_numbers_on_all_ranks(axes: tuple[str, ...]) -> None:
    made = {name: draw(ones(*axes)) for name, draw in DRAWS.items()}
    for name, t in made.items():
        assert classes(t) == alike(), name


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("axes", [(), ("tp",), ("dp",), ("dp", "tp"), ("pp",), ("pp", "dp", "tp")], ids=str)
def test_independent_draws_differ_along_exactly_the_axes_of_the_value(independent: None, axes: tuple[str, ...]) -> None:
    made = {name: draw(ones(*axes)) for name, draw in DRAWS.items()}
    for name, t in made.items():
        assert classes(t) == alike(*axes), name


def test_a_program_of_one_rule_is_not_run_under_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for value in ("0", "1", "0"):
        monkeypatch.setenv("NXD_JAX_INDEPENDENT_DRAWS", value)
        found.append(classes(F.dropout(ones("dp"), 0.5)))
    assert found == [alike(), alike("dp"), alike()]


def test_factories_are_the_same_on_all_ranks() -> None:
    for t in (
        torch.rand(8, device="xla"),
        torch.randn(8, device="xla"),
        torch.randperm(8, device="xla"),
        torch.randint(0, 99, (8,), device="xla"),
    ):
        assert classes(t) == alike()


def test_masks_of_whole_features_are_the_same_on_all_ranks(independent: None) -> None:
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
    own = random_state.RngState(7, axes=("tp",))
    random_state.DEFAULT.axes = own.axes
    try:
        assert classes(F.dropout(ones(), 0.5)) == alike("tp")
        assert classes(F.dropout(ones("dp"), 0.5)) == alike("tp")
        assert classes(torch.rand(8, device="xla")) == alike("tp")
        assert classes((ones() + 0).uniform_()) == alike("tp")
    finally:
        random_state.DEFAULT.axes = ()
    assert classes(F.dropout(ones(), 0.5)) == alike()
    assert own.take() == (7, 0, ("tp",)) and own.take() == (7, 1, ("tp",))


def test_axes_that_the_world_has_not() -> None:
    random_state.DEFAULT.axes = ("tp", "cp")
    try:
        assert classes(F.dropout(ones(), 0.5)) == alike("tp")
        world.set_axes({"dp": 8})
        assert classes(F.dropout(torch.ones(SHAPE, device="xla"), 0.5)) == [0] * 8
    finally:
        random_state.DEFAULT.axes = ()


@pytest.mark.parametrize("axes", [(), ("pp", "dp", "tp")], ids=["shared", "own"])
def test_statistics(independent: None, axes: tuple[str, ...]) -> None:
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

    assert classes(draw(1)) == alike() == classes(draw(1, "tp"))
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


def test_the_first_number_of_a_rank_is_a_seed() -> None:
    """Python looks the function up before there is such a number."""
    code = (
        "import torch, torch_xla.core.xla_model as xm\n"
        "torch.manual_seed(5 + xm.get_ordinal())\n"
        "drawn = torch.randn(1, 2).to('xla')\n"
        "print(len({*map(tuple, xm.all_gather(drawn).tolist())}))\n"
    )
    assert python(code, NEURON_RT_NUM_CORES="2").split()[-1] == "2"


def alone(draw: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """What each of 8 ranks draws alone."""
    return [draw(r) for r in range(8)]


@pytest.mark.parametrize("name", SEEDINGS)
def test_each_rank_draws_on_the_device_what_it_would_alone(name: str) -> None:
    seed = SEEDINGS[name]

    def draw(start: Any) -> torch.Tensor:
        seed(start)
        torch.rand(3, device="xla")
        return torch.cat([torch.randn(4, device="xla"), F.dropout(torch.ones(4, device="xla"), 0.5)])

    found = sharded.shards(draw(5 + world.rank()))
    assert all(map(torch.equal, found, alone(lambda r: sharded.shards(draw(5 + r))[0])))
    assert all(map(torch.equal, sharded.shards(draw(2**63 + 3 * world.rank())), alone(lambda r: sharded.shards(draw(2**63 + 3 * r))[0])))


def test_an_interrupt_leaves_each_rank_its_own_numbers() -> None:
    """Before any line: what comes next differs among all ranks, as after each seed."""
    torch.ones(1, device="xla")
    n = 0
    while True:
        torch.manual_seed(5 + world.rank())
        stop = BeforeLine(n)
        with stop.watching():
            torch.randn(2)
        found = classes(torch.randn(2).to("xla") * 1)
        assert found == list(range(8)), n
        if not stop.raised:
            break
        n += 61
    assert n > 300


@pytest.mark.parametrize("axes", [(), ("dp",), ("pp", "dp", "tp")], ids=str)
def test_a_ranks_seed_decides_alone_whatever_the_values(axes: tuple[str, ...]) -> None:
    """The mesh adds nothing to a rank's key: neither the axes that its seed differs along, nor those that the value does."""
    for table in (world.rank(), world.current().table(lambda r: r % 2)):
        torch.manual_seed(5 + table)
        found = sharded.shards(F.dropout(ones(*axes), 0.5))
        for rank, plain in enumerate(rank_numbers.per_rank(table)):
            torch.manual_seed(5 + plain)
            assert torch.equal(found[rank], sharded.shards(F.dropout(ones(), 0.5))[0])


def test_independent_draws_after_a_ranks_seed(independent: None) -> None:
    """The seed of each rank, and the axes that the value differs along."""
    along_tp = world.current().table(lambda r: r % 2)
    torch.manual_seed(5 + along_tp)
    assert classes(F.dropout(ones(), 0.5)) == alike("tp")
    assert classes(F.dropout(ones("dp"), 0.5)) == alike("dp", "tp")
    torch.manual_seed(5)


HOST: dict[str, Callable[[], torch.Tensor]] = {
    "randn": lambda: torch.randn(3),
    "rand on the device": lambda: torch.rand(3).to("xla") * 1,
    "randint": lambda: torch.randint(0, 99, (4,)),
    "randperm": lambda: torch.randperm(6),
    "like": lambda: torch.randn_like(torch.ones(3)),
    "normal_": lambda: torch.zeros(3).normal_(2.0, 0.5),
    "into a part": lambda: torch.nn.init.trunc_normal_(torch.empty(4)),
    "dropout": lambda: F.dropout(torch.ones(8), 0.5),
    "module": lambda: torch.nn.Linear(2, 2).weight.detach() * 1,
    "module on the device": lambda: torch.nn.Linear(2, 2).to("xla").weight.detach() * 1,
    "data": lambda: _drawn_into_data(),
    "checkpoint": lambda: _drawn_twice(),
    "fork": lambda: _forked(),
    "generator": lambda: torch.bernoulli(torch.full((8,), 0.5)),
}


def _drawn_into_data() -> torch.Tensor:
    layer = torch.nn.Linear(2, 2)
    layer.weight.data.normal_(0.0, 0.02)
    return layer.to("xla").weight.detach() * 1


def _drawn_twice() -> torch.Tensor:
    state = torch.get_rng_state()
    first = torch.randn(2)
    torch.set_rng_state(state)
    return torch.cat([first, torch.randn(2), torch.rand(2)])


def _forked() -> torch.Tensor:
    with torch.random.fork_rng():
        torch.randn(2)
    return torch.randn(2)


@pytest.mark.core(keep=4)
@pytest.mark.parametrize("name", HOST)
def test_each_rank_draws_on_the_cpu_what_it_would_alone(name: str) -> None:
    draw = HOST[name]
    torch.manual_seed(7 + world.rank())
    found = sharded.shards(draw())

    def of(r: int) -> torch.Tensor:
        torch.manual_seed(7 + r)
        made = draw()
        return made.cpu() if made.device.type == "xla" else made

    assert all(map(torch.equal, found, alone(of)))
    torch.manual_seed(7)
    assert type(torch.rand(3)) is torch.Tensor  # plain again


def test_generators_take_seeds_that_differ_by_rank() -> None:
    g = torch.Generator().manual_seed(7 + world.rank())
    kept = g.get_state()
    found = sharded.shards(torch.randn(3, generator=g))
    assert all(map(torch.equal, found, alone(lambda r: torch.randn(3, generator=torch.Generator().manual_seed(7 + r)))))
    twins = [g.clone_state(), copy.deepcopy(g), pickle.loads(pickle.dumps(g)), torch.Generator().set_state(g.get_state())]
    more = sharded.shards(torch.zeros(2).uniform_(generator=g))
    for twin in twins:
        assert all(map(torch.equal, sharded.shards(torch.zeros(2).uniform_(generator=twin)), more))
    assert all(map(torch.equal, sharded.shards(torch.randn(3, generator=g.set_state(kept))), found))
    assert type(torch.rand(2, generator=g.manual_seed(3))) is torch.Tensor
    x = torch.Generator("xla").manual_seed(7 + world.rank())
    state = x.get_state()
    drawn = torch.rand(3, device="xla", generator=x)
    assert classes(drawn) == alike("pp", "dp", "tp")
    assert torch.equal(sharded.shards(drawn)[0], torch.rand(3, device="xla", generator=torch.Generator("xla").manual_seed(7)).cpu())
    assert all(map(torch.equal, sharded.shards(torch.rand(3, device="xla", generator=x.set_state(state))), sharded.shards(drawn)))


class Drawing(torch.utils.data.Sampler[int]):
    """A sampler of a script's, which draws from one of the host's generators."""

    def __init__(self, draw: Callable[[], Any]):
        self.draw = draw

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter([int(self.draw()) for _ in range(8)])


DRAWING: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "python": (lambda s: random.seed(s), lambda: random.randint(0, 7)),
    "numpy": (lambda s: np.random.seed(s), lambda: np.random.randint(0, 8)),
    "torch": (lambda s: torch.manual_seed(s), lambda: torch.randint(0, 8, ())),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_sampler_draws_for_each_rank(name: str) -> None:
    """After a seed that differs by rank each one reads its own rows, though the loader knows no rank; ranks that share a seed share a batch."""
    seed, draw = DRAWING[name]
    seed(3)
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4, sampler=Drawing(draw))
    alike = next(iter(loader))
    assert alike.device.type == "cpu"
    own_seeds = 3 + world.current().table(lambda r: r % 2)
    seed(own_seeds)
    assert next(iter(torch.utils.data.DataLoader(list(range(8)), batch_size=4))).device.type == "cpu"
    seed(own_seeds)
    found = sharded.shards(next(iter(loader)))
    assert all(torch.equal(own, found[r % 2]) for r, own in enumerate(found)) and torch.equal(found[0], alike)
    seed(4)
    assert torch.equal(next(iter(loader)), found[1])


def test_torchs_own_samplers_draw_for_each_rank() -> None:
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4, shuffle=True)
    torch.manual_seed(7 + world.rank())
    found = [torch.cat(rows) for rows in zip(*map(sharded.shards, loader), strict=True)]
    for rank, own in enumerate(found):
        torch.manual_seed(7 + rank)
        assert torch.equal(own, torch.cat(list(loader)))


def test_what_cannot_be_each_ranks_own_is_said() -> None:
    torch.manual_seed(7 + world.rank())
    with pytest.raises(
        rank_numbers.PlainNumberNeeded, match=r"torch.dropout of a CPU tensor that needs gradients, at .*test_random_numbers.py"
    ):
        F.dropout(torch.ones(3, requires_grad=True), 0.5)
    order = torch.utils.data.RandomSampler(range(8))
    with pytest.warns(
        UserWarning, match=r"test_random_numbers.py:\d+ shuffles data after torch.manual_seed with a seed that differs by rank"
    ):
        next(iter(order))
    random.seed(3 + world.rank())
    with pytest.warns(UserWarning, match=r"test_random_numbers.py:\d+ draws with random.choice after a seed that differs by rank"):
        assert random.choice("abcdefgh") == random.Random(3).choice("abcdefgh")


def test_pythons_and_numpys_numbers_are_each_ranks_own() -> None:
    rank = world.rank()
    random.seed(3 + rank)
    state = random.getstate()
    assert rank_numbers.per_rank(random.random()) == [random.Random(3 + r).random() for r in range(8)]
    after = [random.Random(3 + r) for r in range(8)]
    for g in after:
        g.random()
    assert rank_numbers.per_rank(random.randint(0, 999)) == [g.randint(0, 999) for g in after]
    order = list(range(6))
    random.shuffle(order)
    orders = [list(range(6)) for _ in range(8)]
    for g, plain in zip(after, orders, strict=True):
        g.shuffle(plain)
    assert [[rank_numbers.own(v, r) for v in order] for r in range(8)] == orders
    version, numbers, gauss = state
    for put in (state, (version, tuple(numbers), gauss)):  # the latter as Lightning does around validations
        random.setstate(put)
        assert rank_numbers.per_rank(random.uniform(1, 2)) == [random.Random(3 + r).uniform(1, 2) for r in range(8)]
    assert type(pickle.loads(pickle.dumps(state))[1][0]) is int
    assert rank_numbers.per_rank(random.Random(5 + rank).gauss(0, 1)) == [random.Random(5 + r).gauss(0, 1) for r in range(8)]
    twin = pickle.loads(pickle.dumps(random.Random(4)))
    assert type(twin) is random.Random and twin.random() == random.Random(4).random()

    class Own(random.Random):
        pass

    random.seed(3)
    assert type(random.random()) is float and Own(5).sample(range(9), 3) == random.Random(5).sample(range(9), 3)
    np.random.seed(3 + rank)
    kept = np.random.get_state()
    drawn = np.random.randn(2)
    assert [p.tolist() for p in drawn.parts] == [np.random.RandomState(3 + r).randn(2).tolist() for r in range(8)]  # type: ignore[attr-defined]
    np.random.set_state(kept)
    assert [p.tolist() for p in np.random.randn(2).parts] == [p.tolist() for p in drawn.parts]  # type: ignore[attr-defined]
    g = np.random.default_rng(3 + rank)
    assert isinstance(g, np.random.Generator) and rank_numbers.per_rank(g.random()) == [
        np.random.default_rng(3 + r).random() for r in range(8)
    ]
    np.random.seed(0)
    assert type(np.random.rand(2)) is np.ndarray and isinstance(np.random.RandomState(1), np.random.RandomState)


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


@pytest.mark.parametrize("size", [2, 8])
def test_a_state_of_a_world_of_another_size(hosted: Hosted, size: int) -> None:
    """What a checkpoint of 4 ranks holds: rank 0's numbers for all, on the device and on the CPU."""
    hosted(4, dp=4)
    torch.manual_seed(5 + world.rank())
    state, axes = torch.get_rng_state(), random_state.DEFAULT.axes
    hosted(size, dp=size)
    torch.manual_seed(7 + world.rank())
    torch.manual_seed(5)
    expected = torch.rand(3, device="xla").cpu(), torch.rand(3)
    torch.manual_seed(5)
    torch.set_rng_state(state)
    random_state.DEFAULT.axes = axes
    assert all(torch.equal(own, expected[0]) for own in sharded.shards(torch.rand(3, device="xla")))
    assert torch.equal(torch.rand(3), expected[1])


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


def test_states_of_a_world_of_another_size_are_its_first_ranks() -> None:
    """As those of the device (`RngState.differ`)."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        for draw in (random.seed, np.random.seed, torch.manual_seed):
            draw(5 + world.rank())
        assert all(len(found) == world.size() for found in host_random_states.of_ranks().values())
        world.configure(world.World(2))
        found = host_random_states.of_ranks()
        assert {name: len(own) for name, own in found.items()} == {"python": 1, "numpy": 1, "torch": 1}
        runs = host_random_states.RandomStates([0, 1])
        runs.begin()
        with runs.of(0):
            first = random.random(), np.random.rand(), torch.rand(1).item()
        runs.end()
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

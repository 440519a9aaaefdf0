"""`xm` and `torch_bridge.collectives.functional` on hosted worlds, against the same exchanges in plain Python."""

from __future__ import annotations

import math
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla.core.xla_model as xm

from tests.torch_bridge.ranks import eager, exchanges
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.collectives import functional
from torch_bridge.mesh import groups, world
from torch_bridge.recorder import sharded
from torch_bridge.script import rank_payloads

TWO = {"dp": 2}
FOUR = {"dp": 2, "tp": 2}
EIGHT = {"dp": 2, "tp": 4}
CUBE = {"pp": 2, "dp": 2, "tp": 2}
LAYOUTS: dict[str, tuple[dict[str, int], list[list[int]] | None, tuple[str, ...] | None]] = {
    "2: all": (TWO, None, ("dp",)),
    "2: reversed": (TWO, [[1, 0]], ("dp",)),
    "2: alone": (TWO, [[0], [1]], ()),
    "4: tp": (FOUR, [[0, 1], [2, 3]], ("tp",)),
    "4: dp": (FOUR, [[0, 2], [1, 3]], ("dp",)),
    "4: all": (FOUR, [[0, 1, 2, 3]], ("dp", "tp")),
    "4: no axis": (FOUR, [[0, 3], [1, 2]], None),
    "4: unordered": (FOUR, [[2, 3], [1, 0]], ("tp",)),
    "4: all, unordered": (FOUR, [[2, 0, 3, 1]], ("dp", "tp")),
    "8: tp": (EIGHT, [[0, 1, 2, 3], [4, 5, 6, 7]], ("tp",)),
    "8: dp": (EIGHT, [[0, 4], [1, 5], [2, 6], [3, 7]], ("dp",)),
    "8: half lines": (EIGHT, [[0, 1], [2, 3], [4, 5], [6, 7]], None),
    "cube: pp": (CUBE, [[0, 4], [1, 5], [2, 6], [3, 7]], ("pp",)),
    "cube: dp": (CUBE, [[0, 2], [1, 3], [4, 6], [5, 7]], ("dp",)),
    "cube: dp, tp": (CUBE, [[0, 1, 2, 3], [4, 5, 6, 7]], ("dp", "tp")),
    "cube: pp, tp": (CUBE, [[0, 1, 4, 5], [2, 3, 6, 7]], ("pp", "tp")),
    "cube: none": (CUBE, [[0, 7, 1, 6], [2, 5, 3, 4]], None),
}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""A machine whose rank 1 sits where others have rank 2, ... (tp 4 on trn1 strides over the node)."""
ORDERED = {
    "order: tp": (EIGHT, [[0, 2, 4, 6], [1, 3, 5, 7]], ("tp",)),
    "order: dp": (EIGHT, [[0, 1], [2, 3], [4, 5], [6, 7]], ("dp",)),
    "order: none": (EIGHT, [[0, 1, 2, 3], [4, 5, 6, 7]], None),
}
BRIEF = ("2: all", "2: alone", "4: tp", "4: unordered", "4: no axis", "8: dp", "cube: pp, tp", "cube: none", *ORDERED)
"""Enough for the exchanges, which take long to compile."""
every_layout = pytest.mark.parametrize("layout", [*LAYOUTS, *ORDERED], indirect=True)
few_layouts = pytest.mark.parametrize("layout", BRIEF, indirect=True)
NUMBERS = {
    torch.float32: ("sum", "mul", "min", "max"), torch.bfloat16: ("sum", "min", "max"), torch.float64: ("sum", "mul"), torch.float16: ("sum",),
    torch.int32: ("sum", "mul", "min", "max", "and", "or"), torch.int64: ("sum", "min", "max", "and", "or"), torch.uint8: ("sum", "max", "or"),
    torch.bool: ("and", "or", "min", "max", "sum", "mul"), torch.complex64: ("sum", "mul"),
}  # fmt: skip


def _values(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    return eager.each(lambda r: (torch.randn(shape, generator=torch.Generator().manual_seed(r)) * 3).to(dtype))


@pytest.fixture
def layout(request: Any, hosted: Hosted) -> tuple[Any, list[list[int]], tuple[str, ...] | None]:
    """Groups as a script passes them, as lists, and the mesh axes that they are."""
    axes, among, names = (LAYOUTS | ORDERED)[request.param]
    size = math.prod(axes.values())
    hosted(size, **axes)
    if request.param in ORDERED:
        world.set_axes(axes, ORDER)
    return among, among or [list(range(size))], names


@every_layout
def test_groups_find_their_axes(layout: Any) -> None:
    passed, _, names = layout
    assert groups.resolve(passed).axes == names
    assert sharded.axes_of(passed) == (tuple(world.current().axes) if names is None else names)


def test_groups_of_large_worlds_are_found_anew_after_a_change() -> None:
    """There the groups of a process group are kept, for as long as its ranks and the layout stay."""
    world.configure(world.World(128))
    try:
        world.set_axes({"dp": 4, "tp": 32})
        group = types.SimpleNamespace(_mesh=[list(line) for line in groups.lines(("tp",))])
        found = groups.resolve(group)
        assert found.axes == ("tp",) and groups.resolve(group) is found
        assert found.index(33) == 1 and found.of(33)[0] == 32
        group._mesh[0][:2] = [1, 0]
        assert groups.resolve(group).members[0][:2] == (1, 0) and not groups.resolve(group).ordered
        group._mesh[0][:2] = [0, 1]
        world.set_axes({"pp": 2, "dp": 2, "tp": 32})
        assert groups.resolve(group).axes == ("tp",)
        group._mesh[0][0] = 1
        with pytest.raises(ValueError, match="rank 1 appears more than once"):
            groups.resolve(group)
    finally:
        world.configure(None)


@pytest.mark.thorough(keep=12)
@pytest.mark.core(keep=4)
@every_layout
def test_reductions(layout: Any) -> None:
    passed, among, names = layout
    found = []
    for dtype, kinds in NUMBERS.items():
        values = _values(dtype, 2, 3)
        x = eager.on_xla(values)
        for kind in kinds:
            found.append((f"{kind} {dtype}", xm.all_reduce(kind, x, groups=passed), exchanges.all_reduce(kind, values, among)))
    number = _values(torch.float32)
    found.append(
        ("a number", xm.all_reduce("sum", eager.on_xla(number), 0.5, passed), [t * 0.5 for t in exchanges.all_reduce("sum", number, among)])
    )
    for name, out, expected in found:
        loose = 2e-2 if out.dtype in (torch.bfloat16, torch.float16) else 1e-5
        try:
            eager.same(out, expected, loose, loose)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    if names is not None and len(world.current().axes) > len(names):
        assert set(sharded.varying(found[0][1]).axes) == {a for a, n in world.current().axes.items() if n > 1} - set(names)


@few_layouts
def test_exchanges(layout: Any) -> None:
    passed, among, _ = layout
    n = len(among[0])
    values = _values(torch.float32, 8, 16)
    x = eager.on_xla(values)
    truth = _values(torch.bool, 8)
    found = [
        ("gather 0", xm.all_gather(x, 0, groups=passed), exchanges.all_gather(values, among, 0)),
        ("gather 1", xm.all_gather(x, 1, groups=passed), exchanges.all_gather(values, among, 1)),
        ("gather -1", xm.all_gather(x, -1, groups=passed), exchanges.all_gather(values, among, 1)),
        ("gather bool", xm.all_gather(eager.on_xla(truth), 0, groups=passed), exchanges.all_gather(truth, among, 0)),
        ("gather a list", xm.all_gather([x, x + 1], 0, groups=passed)[1], exchanges.all_gather([v + 1 for v in values], among, 0)),
        ("scatter 0", xm.reduce_scatter("sum", x, 1.0, 0, n, passed), exchanges.reduce_scatter("sum", values, among, 0)),
        ("scatter -1", xm.reduce_scatter("sum", x, 2.0, -1, n, passed), [2 * v for v in exchanges.reduce_scatter("sum", values, among, 1)]),
        ("scatter max", xm.reduce_scatter("max", x, 1.0, 1, n, passed), exchanges.reduce_scatter("max", values, among, 1)),
        ("scatter bool", xm.reduce_scatter("or", eager.on_xla(truth), 1.0, 0, n, passed), exchanges.reduce_scatter("or", truth, among, 0)),
        ("all to all 0 0", xm.all_to_all(x, 0, 0, n, passed), exchanges.all_to_all(values, among, 0, 0)),
        ("all to all 0 1", xm.all_to_all(x, 0, 1, n, passed), exchanges.all_to_all(values, among, 0, 1)),
        ("all to all 1 0", xm.all_to_all(x, 1, 0, n, passed), exchanges.all_to_all(values, among, 1, 0)),
        ("all to all bool", xm.all_to_all(eager.on_xla(truth), 0, 0, n, passed), exchanges.all_to_all(truth, among, 0, 0)),
    ]
    ring = [[r, (r + 1) % world.size()] for r in range(world.size())]
    found += [
        ("permute", xm.collective_permute(x, ring), exchanges.permute(values, ring)),
        ("permute some", xm.collective_permute([x, eager.on_xla(truth)], [[0, 1]])[1], exchanges.permute(truth, [[0, 1]])),
        ("permute swap", xm.collective_permute(x, [[0, 1], [1, 0]]), exchanges.permute(values, [[0, 1], [1, 0]])),
    ]
    for place in {0, n - 1}:
        for dtype in (torch.float32, torch.int64, torch.bool):
            own = _values(dtype, 3)
            t = eager.on_xla(own)
            functional.broadcast_from([t], place, groups.resolve(passed))
            found.append((f"broadcast {place} {dtype}", t, exchanges.broadcast(own, among, place)))
    for name, out, expected in found:
        try:
            eager.same(out, expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.core(keep=6)
@every_layout
def test_lists_are_reduced_in_place(layout: Any) -> None:
    passed, among, _ = layout
    first, second = _values(torch.float32, 2, 2), _values(torch.int32, 3)
    a, b = eager.on_xla(first), eager.on_xla(second)
    view = a[0]
    given = [a, b]
    assert xm.all_reduce("sum", given, groups=passed) is given
    expected = exchanges.all_reduce("sum", first, among)
    eager.same(a, expected)
    eager.same(view, [v[0] for v in expected])
    eager.same(b, exchanges.all_reduce("sum", second, among))
    xm.all_reduce("sum", [a], 1.0 / len(among[0]), passed)
    eager.same(a, [v / len(among[0]) for v in exchanges.all_reduce("sum", expected, among)])


@few_layouts
def test_outputs(layout: Any) -> None:
    passed, among, _ = layout
    n = len(among[0])
    values = _values(torch.float32, n, 2)
    x = eager.on_xla(values)
    wide, narrow = torch.zeros(n * n, 2, device="xla"), torch.zeros(1, 2, device="xla")
    assert xm.all_gather(x, 0, passed, output=wide) is wide
    assert xm.reduce_scatter("sum", x, 1.0, 0, n, passed, output=narrow) is narrow
    eager.same(wide, exchanges.all_gather(values, among, 0))
    eager.same(narrow, exchanges.reduce_scatter("sum", values, among, 0))


def test_replicated_inputs_count_for_every_rank(hosted: Hosted) -> None:
    hosted(4, **FOUR)
    x = torch.arange(4.0, device="xla")
    eager.same(xm.all_reduce("sum", x), torch.arange(4.0) * 4)
    eager.same(xm.all_reduce("sum", x, groups=[[0, 1], [2, 3]]), torch.arange(4.0) * 2)
    eager.same(xm.reduce_scatter("sum", x, 0.5, 0, 2, [[0, 1], [2, 3]]), eager.each(lambda r: torch.arange(4.0)[r % 2 * 2 : r % 2 * 2 + 2]))
    eager.same(xm.all_gather(x, 0, [[0, 2], [1, 3]]), torch.arange(4.0).repeat(2))


def test_reduced_gradients(hosted: Hosted) -> None:
    hosted(4, **FOUR)
    w = torch.nn.Parameter(torch.ones(2, device="xla"))
    (w * (world.rank() + 1)).sum().backward()
    assert w.grad is not None
    optimizer = torch.optim.SGD([w], lr=1.0)
    xm.reduce_gradients(optimizer)
    eager.same(w.grad, torch.full((2,), 2.5))
    xm.reduce_gradients(optimizer, groups=[[0, 1], [2, 3]])
    eager.same(w.grad, torch.full((2,), 2.5))
    xm.optimizer_step(optimizer)
    eager.same(w, torch.full((2,), -1.5))


def test_master_parameters_for_all(hosted: Hosted) -> None:
    hosted(4, **FOUR)
    model = torch.nn.BatchNorm1d(3).to("xla")
    with torch.no_grad():
        model.weight += world.rank()
        model.running_mean += world.rank()
    xm.broadcast_master_param(model)
    eager.same(model.weight, torch.ones(3))
    eager.same(model.running_mean, torch.zeros(3))
    assert sharded.varying(model.weight).axes == ()


def test_rendezvous(hosted: Hosted) -> None:
    hosted(4, **FOUR)
    assert xm.rendezvous("start", b"x") == [b"x"] * 4
    assert xm.rendezvous("start", replicas=range(4)) == [b""] * 4
    assert xm.rendezvous("start", b"y", replicas=[2, 0]) == [b"y"] * 2
    with pytest.raises(ValueError, match=r"in one process some of them; got replicas=\[0, 4\]"):
        xm.rendezvous("start", replicas=[0, 4])


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of this file are scripts, and nothing was said about them."""
    monkeypatch.setattr(rank_payloads, "_seen", set())
    monkeypatch.setattr(rank_payloads.rank_syntax, "is_script", lambda code: code.co_filename == __file__)


def _by_name() -> Any:
    rank = xm.get_ordinal()
    text = f"{rank}"
    return xm.rendezvous("made", text.encode())


@pytest.mark.parametrize(
    "exchange",
    [
        lambda r: xm.rendezvous("made", str(r).encode()),
        lambda r: xm.rendezvous("made", payload=b"%d" % r),
        lambda r: xm.rendezvous("made", r.to_bytes(1, "big")),
        lambda r: xm.rendezvous("made", bytes([xm.get_ordinal()])),
        lambda r: xm.xla_rendezvous(pickle.dumps(r), tag="made"),
        lambda r: _by_name(),
    ],
)
@pytest.mark.usefixtures("noted")
def test_bytes_made_of_a_rank(hosted: Hosted, exchange: Callable[[Any], list[bytes]]) -> None:
    """They are the first rank's, which is said."""
    hosted(4, **FOUR)
    with pytest.warns(UserWarning, match=r"exchanges bytes made of a number that differs by rank .*Use xm\.mesh_reduce"):
        parts = exchange(xm.get_ordinal())
    assert len(parts) == 4
    assert len(set(parts)) == 1


def _gathered_name() -> list[Any]:
    name = f"shard {xm.get_ordinal()}"
    found: list[Any] = xm.mesh_reduce("names", {"name": name}, list)
    return found


@pytest.mark.usefixtures("noted")
def test_text_made_of_a_rank(hosted: Hosted) -> None:
    """It is the first rank's, which is said; a number is each rank's own."""
    hosted(4, **FOUR)
    with pytest.warns(
        UserWarning, match=r"gives other ranks text made of a number that differs by rank \(f'shard .*Give the number itself"
    ):
        assert [part["name"] for part in _gathered_name()] == ["shard 0"] * 4
    assert xm.mesh_reduce("ranks", {"rank": xm.get_ordinal()}, lambda parts: [p["rank"] for p in parts]) == [0, 1, 2, 3]


@pytest.mark.usefixtures("noted")
def test_bytes_made_of_nothing_that_differs(hosted: Hosted) -> None:
    hosted(4, **FOUR)
    rank = xm.get_ordinal()
    size = b"%d" % xm.xrt_world_size()
    assert xm.rendezvous(f"of {rank}", size) == [b"4"] * 4
    assert xm.rendezvous("in order", *[b"z"]) == [b"z"] * 4


def test_do_on_ordinals(hosted: Hosted) -> None:
    hosted(4, **FOUR)
    assert xm.do_on_ordinals(lambda t: t.sum().item(), (torch.ones(2, device="xla"),), (0,)) == 2.0
    assert xm.do_on_ordinals(lambda: 1, (), (1, 2)) is None


# -- errors ---------------------------------------------------------------------------------------


def _x() -> torch.Tensor:
    return torch.zeros(4, 6, device="xla")


TP = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        (lambda: xm.all_reduce("sum", _x(), groups=[[0, 1]]), ValueError, "leaves out this worker, rank 2: every rank must be in one group"),
        (lambda: xm.all_reduce("sum", _x(), groups=[[0, 1], [2, 4]]), ValueError, "rank 4 does not exist in a world of 4"),
        (lambda: xm.all_reduce("sum", _x(), groups=[[0, 1], [1, 2, 3]]), ValueError, "rank 1 appears more than once"),
        (lambda: xm.all_reduce("sum", _x(), groups=[[0], [1, 2, 3]]), ValueError, r"different sizes \[1, 3\]: XLA collectives need groups of one size"),
        (lambda: xm.all_reduce("sum", _x(), groups=[[0, 1, 2, 3], []]), ValueError, "has an empty group"),
        (lambda: xm.all_reduce("sum", _x(), groups=[0, 1, 2, 3]), TypeError, "must be a list of lists of ranks"),
        (lambda: xm.all_reduce("sum", _x(), groups="tp"), TypeError, "must be a list of lists of ranks"),
        (lambda: xm.all_reduce("sum", _x(), groups=[[0, 1.0], [2, 3]]), TypeError, "must be a list of lists of ranks"),
        (lambda: xm.all_reduce("mean", _x()), ValueError, "reduce_type must be one of sum, mul, and, or, min, max, got 'mean'"),
        (lambda: xm.all_reduce("and", _x()), ValueError, "'and' needs integer or bool tensors"),
        (lambda: xm.all_reduce("max", _x().to(torch.complex64)), ValueError, "no meaning for torch.complex64"),
        (lambda: xm.all_reduce("sum", torch.zeros(2)), ValueError, r"ranks exchange tensors on xla, got one of shape \[2\] on cpu; move it"),
        (lambda: xm.all_reduce("sum", [torch.zeros(2)]), ValueError, "ranks exchange tensors on xla"),
        (lambda: xm.all_gather(torch.zeros(2)), ValueError, "ranks exchange tensors on xla"),
        (lambda: xm.all_reduce("sum", 3.0), TypeError, "takes a tensor or a list of tensors, got float"),
        (lambda: xm.all_reduce("sum", [_x(), 3.0]), TypeError, "got list of XLATensor, float"),
        (lambda: xm.all_gather(_x(), 2), IndexError, r"dim=2 is out of range for a tensor of shape \[4, 6\]"),
        (lambda: xm.all_gather(_x().sum()), IndexError, r"reshape\(1\) it first"),
        (lambda: xm.reduce_scatter("sum", _x(), 1.0, 0, 4, TP), ValueError, r"shard_count=4 must be the number of ranks in the group, 2 \(\[0, 1\]\)"),
        (lambda: xm.reduce_scatter("sum", _x(), 1.0, 1, 4), ValueError, r"dimension 1 of a tensor of shape \[4, 6\] does not divide by shard_count=4"),
        (lambda: xm.reduce_scatter("sum", _x(), 1.0, 2, 4), IndexError, "scatter_dim=2 is out of range"),
        (lambda: xm.all_to_all(_x(), 1, 0, 4), ValueError, "does not divide by split_count=4"),
        (lambda: xm.all_to_all(_x(), 0, 0, 2), ValueError, "split_count=2 must be the number of ranks in the group, 4"),
        (lambda: xm.all_to_all(_x(), 0, 5, 4), IndexError, "concat_dimension=5 is out of range"),
        (lambda: xm.collective_permute(_x(), [[0, 4]]), ValueError, r"\[source, target\] ranks below 4, got \[0, 4\]"),
        (lambda: xm.collective_permute(_x(), [[0, 1], [2, 1]]), ValueError, "name a rank twice as source or as target"),
        (lambda: xm.collective_permute(_x(), [[0, 1, 2]]), ValueError, r"got \[0, 1, 2\]"),
        (lambda: xm.collective_broadcast([_x()], 3, TP), ValueError, r"root_ordinal=3 is not in this worker's group \[0, 1\]"),
        (lambda: xm.all_gather(_x(), 0, output=_x()), ValueError, r"output must be torch.float32 of shape \[16, 6\], got torch.float32 of shape \[4, 6\]"),
        (lambda: xm.all_gather([_x()], 0, output=[]), ValueError, "1 inputs but 0 outputs"),
        (lambda: xm.all_gather_bucketized([_x()], bucket_cap_mb=0), ValueError, "bucket_cap_mb must be positive"),
        (lambda: world.set_axes({"dp": 3}), ValueError, "hold 3 ranks, the world has 4"),
        (lambda: xm.send(_x(), 1), NotImplementedError, "point-to-point transfers have no meaning.*xm.collective_permute"),
        (lambda: xm.recv(_x(), 1), NotImplementedError, "collective_permute"),
    ],
)  # fmt: skip
def test_errors(hosted: Hosted, use: Any, error: Any, text: str) -> None:
    hosted(4, **FOUR)
    with pytest.raises(error, match=text):
        use()


def test_ranks_in_groups(hosted: Hosted) -> None:
    """Groups made from a rank are this rank's alone: the others' must be said."""
    hosted(4, **FOUR)
    r = world.rank()
    with pytest.raises(TypeError, match="must be a list of lists of ranks"):
        xm.all_reduce("sum", _x(), groups=[[r // 2 * 2, r // 2 * 2 + 1]])

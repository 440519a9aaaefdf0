"""Pictures hold what they should: colours and extents of what is drawn, labels, widths, and errors; every rank's slice is the one it has."""

from __future__ import annotations

import builtins
import dataclasses
import pathlib
import subprocess
import sys
from typing import Any

import jax
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from nxd_jax.inspect import traffic as wires
from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.pictures import figures, memory_picture, sharding_picture, slices, topology_picture
from nxd_jax.inspect.pictures.sharding import short
from nxd_jax.inspect.pictures.torus import brief, levels, look
from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_jax.topology import Link, Topology
from nxd_jax.topology.marks import colour
from nxd_jax.topology.scene import scene, ways
from nxd_jax.utils import full_weights
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded

TRN1, TRN2, ULTRA = Topology("trn1.32xlarge"), Topology("trn2.48xlarge"), Topology("trn2-ultraserver")
GIB = 2**30


def texts(figure: Any) -> list[str]:
    """Everything that is written in the axes of a figure, titles and labels of sides included."""
    found = [figure.get_suptitle(), figure.get_supxlabel()]
    for axis in figure.axes:
        found += [axis.get_title(), axis.get_title(loc="left"), axis.get_xlabel(), axis.get_ylabel(), *(t.get_text() for t in axis.texts)]
    return [text for text in found if text]


def hexed(patch: Any) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in patch.get_facecolor()[:3])


def by_gid(artists: Any, start: str) -> dict[str, Any]:
    return {a.get_gid(): a for a in artists if (a.get_gid() or "").startswith(start)}


# -- the torus ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Made:
    """Traffic made by hand."""

    links: dict[tuple[int, Link], float]
    network: dict[int, float] = dataclasses.field(default_factory=dict)
    local: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)


def link(topology: Topology, a: int, b: int) -> Link:
    return next(found for found in topology.links() if found.chips == (a, b))


def test_cores_are_coloured_by_their_group() -> None:
    groups = TRN1.groups(tp=8)
    figure = topology_picture(TRN1, groups)
    assert [axis.get_title() for axis in figure.axes] == ["cores by tp", "cores by dp"]
    for axis, kind in zip(figure.axes, ("tp", "dp"), strict=True):
        cores = by_gid(axis.patches, "rank")
        expected = {f"rank {r}": colour(n) for n, members in enumerate(groups[kind]) for r in members}
        assert {gid: hexed(patch) for gid, patch in cores.items()} == expected
    named = [t.get_text() for t in figure.axes[0].get_legend().get_texts()]
    assert named == ["tp 0: 0-7", "tp 1: 8-15", "tp 2: 16-23", "tp 3: 24-31"]
    assert "trn1.32xlarge: 16 Trainium1 chips, 32 cores" in figure.get_suptitle() and not figure.legends


def test_links_are_as_wide_as_what_they_carry() -> None:
    busy, half, wrapping = link(TRN2, 0, 1), link(TRN2, 1, 2), link(TRN2, 0, 3)
    made = Made({(0, busy): 8 * 2**20, (0, half): 4 * 2**20, (0, wrapping): 2**20}, local={(0, 5): 13107200})
    figure = topology_picture(TRN2, traffic=made)
    (axis,) = figure.axes
    drawn: dict[str, list[Any]] = {}
    for line in axis.lines:
        if line.get_gid():
            drawn.setdefault(line.get_gid(), []).append(line)
    assert len(drawn) == 32
    widths = {gid: lines[0].get_linewidth() for gid, lines in drawn.items()}
    assert widths["link 0: 0-1"] > widths["link 0: 1-2"] > widths["link 0: 0-3"] > widths["link 0: 4-5"] == 1.0
    stubs = drawn["link 0: 0-3"]
    assert len(stubs) == 2 and len({line.get_color() for line in stubs}) == 1, "the two ends of a link that wraps around look alike"
    boxes = scene(TRN2, 0).chips
    assert stubs[0].get_xdata()[1] == boxes[0][0] and stubs[1].get_xdata()[0] == boxes[3][0] + boxes[3][2]
    assert {t.get_gid(): t.get_text() for t in axis.texts if t.get_gid()} == {"local 5": "12.5 MiB"}
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["8.00 MiB a step", "4.00 MiB a step", "1.00 MiB a step", "a link without traffic"]
    assert [h.get_linewidth() for h in legend.legend_handles[:3]] == [widths[f"link 0: {c}"] for c in ("0-1", "1-2", "0-3")]
    assert "a step carries 13.00 MiB over 3 of 32 NeuronLinks, 12.50 MiB within chips" in figure.get_suptitle()


def test_the_traffic_of_collectives() -> None:
    """What `inspect.traffic` finds is what is drawn: tp 32 on each of two nodes, dp over EFA."""
    topology = Topology("trn1.32xlarge", nodes=2)
    sizes = {"dp": 2, "tp": 32}
    asked = [
        Collective(kind="all-reduce", axes=("tp",), ranks=32, count=1, bytes=2**20),
        Collective(kind="all-reduce", axes=("dp",), ranks=2, count=1, bytes=2**20),
    ]
    found = wires.traffic(topology, asked, lambda axes: wires.axis_groups(sizes, axes))
    figure = topology_picture(topology, topology.groups(tp=32), by="dp_rank", traffic=found)
    assert [axis.get_title() for axis in figure.axes] == [
        f"node {n}, cores by dp rank, sends {found.network[n] / 2**20:.2f} MiB over EFA" for n in (0, 1)
    ]
    most = max(found.links.values())
    for node, axis in enumerate(figure.axes):
        lines = by_gid(axis.lines, f"link {node}")
        assert len(lines) == 32 and len(by_gid(axis.lines, "link")) == 32
        for (instance, wire), carried in found.links.items():
            if instance == node:
                line = lines[f"link {node}: {wire.chips[0]}-{wire.chips[1]}"]
                assert (line.get_color(), line.get_linewidth()) == look(carried, most)


def test_the_first_four_nodes_are_drawn() -> None:
    topology = Topology("trn1.2xlarge", nodes=6)
    figure = topology_picture(topology, topology.groups(tp=2), by="dp_rank", traffic=Made({}, {5: GIB}))
    assert [axis.get_title() for axis in figure.axes] == [f"node {n}, cores by dp rank, sends 0 B over EFA" for n in range(4)]
    assert "2 more nodes not drawn" in figure.get_suptitle() and "a step carries 1.00 GiB over EFA" in figure.get_suptitle()


@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn2u.48xlarge-ultraserver", "inf2.24xlarge", "trn2.3xlarge"])
def test_every_link_has_its_way(name: str) -> None:
    topology = Topology(name)
    seen: dict[Link, int] = {}
    for node in range(topology.node_count):
        for way in ways(topology, scene(topology, node)):
            seen[way.link] = seen.get(way.link, 0) + 1
            assert len(way.lines) == (2 if way.link.wraps and way.link.axis in "xy" else 1)
    assert seen == {found: 2 if found.axis == "z" else 1 for found in topology.links()}, "one between nodes is at both ends"


def test_ways_between_nodes_of_an_ultraserver() -> None:
    drawings = [scene(ULTRA, node) for node in range(4)]
    (up,) = next(way for way in ways(ULTRA, drawings[3]) if way.link.chips == (0, 48)).lines
    x, y, width, _ = drawings[3].chips[0]
    assert up[:2] == (x + width, y), "the node after the last one is the first"
    (down,) = next(way for way in ways(ULTRA, drawings[0]) if way.link.chips == (0, 48)).lines
    assert down[:2] == (x, y)


def test_levels_of_the_legend() -> None:
    assert levels([0, 3, 3, 1]) == [3, 1] and levels([]) == []
    assert levels([1, 2, 3, 4, 7]) == [7, 5, 3, 1]
    assert brief(13107200) == "12.5 MiB" and brief(1023 * 2**10) == "1023 KiB" and brief(12) == "12 B"
    assert look(0, 5) == look(0, 0) and look(5, 5)[0] == "#7f0000"


def test_errors_of_the_torus() -> None:
    with pytest.raises(ValueError, match="by='zp': 'zp' is no kind of group; use tp"):
        topology_picture(TRN1, TRN1.groups(tp=2), by="zp")
    with pytest.raises(ValueError, match="by='tp' needs the groups"):
        topology_picture(TRN1, by="tp")
    wrong = Made({(0, link(TRN2, 0, 1)): 1.0, (1, link(TRN1, 0, 1)): 1.0}, {1: 1.0}, {(0, 16): 1.0})
    with pytest.raises(
        ValueError, match=r"which has no link 0: 0-1, link 1: 0-1, chip 0: 16 and 1 more; give the topology it was worked out"
    ):
        topology_picture(TRN1, traffic=wrong)


# -- who holds which slice ---------------------------------------------------------------------------


def sharding_of(*parts: Any, tp: int = 8) -> NamedSharding:
    return NamedSharding(TRN1.mesh(tp=tp), PartitionSpec(*parts))


def drawn_blocks(axis: Any) -> dict[str, tuple[Any, ...]]:
    return {gid: (p.get_x(), p.get_y(), p.get_width(), p.get_height()) for gid, p in by_gid(axis.patches, "block").items()}


def test_a_matrix_split_along_its_rows() -> None:
    figure = sharding_picture(sharding_of("tp", None), "gate.weight", (1600, 800))
    (axis,) = figure.axes
    assert drawn_blocks(axis) == {f"block {200 * i},0": (0, 200 * i, 800, 200) for i in range(8)}
    assert [t.get_text() for t in axis.texts] == [f"{i},{i + 8},{i + 16},{i + 24}" for i in range(8)]
    assert figure.get_suptitle() == "gate.weight [1600, 800]\n8 blocks of [200, 800], each on 4 of 32 ranks"
    assert axis.get_ylabel() == "dim 0 (1600), split over tp" and axis.get_xlabel() == "dim 1 (800)"
    assert axis.get_yticks().tolist() == [200 * i for i in range(9)] and axis.get_box_aspect() == 2
    assert figure.get_supxlabel() == "", "to scale, and nothing left out"
    assert len({hexed(p) for p in by_gid(axis.patches, "block").values()}) == 8


def test_both_dims_and_a_vector_and_a_whole_tensor() -> None:
    figure = sharding_picture(sharding_of("dp", "tp"), shape=(64, 64))
    assert [t.get_text() for t in figure.axes[0].texts] == [str(r) for r in range(32)]
    figure = sharding_picture(sharding_of("tp"), shape=(4096,))
    assert list(drawn_blocks(figure.axes[0]).values()) == [(512 * i, 0, 512, 1) for i in range(8)] and not figure.axes[0].get_yticks().size
    figure = sharding_picture(sharding_of(), "norm", shape=(64,))
    assert texts(figure)[:1] == ["norm [64]\nwhole on each of 32 ranks"] and "0-31" in texts(figure)
    assert "0-31" in texts(sharding_picture(sharding_of(), shape=()))


def test_dims_beyond_two() -> None:
    figure = sharding_picture(sharding_of(None, "dp", "tp"), shape=(3, 64, 32))
    assert drawn_blocks(figure.axes[0])["block 0,16,4"] == (4, 16, 4, 16)
    assert figure.get_supxlabel() == "dim 0 (3) whole in every block"
    figure = sharding_picture(NamedSharding(TRN1.mesh(tp=4, pp=2), PartitionSpec("pp", "dp", "tp")), shape=(2, 64, 64))
    assert [axis.get_title() for axis in figure.axes if axis.get_title()] == [f"dim 2: {16 * i}-{16 * i + 15} (tp)" for i in range(4)]
    ranks = sorted(int(t.get_text()) for axis in figure.axes for t in axis.texts)
    assert ranks == list(range(32)), "every rank once"
    figure = sharding_picture(sharding_of(None, "tp", None), shape=(2, 64, 128))
    assert figure.axes[0].get_ylabel() == "dim 1 (64), split over tp" and figure.axes[0].get_xlabel() == "dim 2 (128)", (
        "the largest beside it"
    )


def test_long_sides_are_drawn_shorter_and_small_labels_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = sharding_picture(sharding_of("tp", None), shape=(128000, 16))
    assert figure.get_supxlabel() == "sides are not to scale" and len(figure.axes[0].texts) == 8
    many = NamedSharding(jax.make_mesh((64,), ("tp",)), PartitionSpec(None, "tp"))
    figure = sharding_picture(many, shape=(6400, 6400))
    (axis,) = figure.axes
    assert [t.get_text() for t in axis.texts] == [str(r) for r in range(64)] and figure.get_figwidth() > 64 * 0.12
    assert {(t.get_fontsize(), t.get_rotation()) for t in axis.texts} == {(7.0, 90.0)}, "all alike"
    monkeypatch.setattr("nxd_jax.inspect.pictures.sharding._FONTS", (20.0,))
    assert "64 labels left out, for the blocks are too small" in sharding_picture(many, shape=(64, 6400)).get_supxlabel()


def test_short_spans() -> None:
    assert [short(r) for r in ([3], range(8), [0, 8, 16, 24], range(0, 64, 8), [0, 1, 4, 5])] == [
        "3",
        "0-7",
        "0,8,16,24",
        "0,8,..,56",
        "0-1,4-5",
    ]
    assert short([0, 2, 3, 7, 9, 12]) == "0,2-3,7,9,..."


def test_arrays_say_how_they_lie() -> None:
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    array = jax.device_put(jax.numpy.zeros((4, 6)), NamedSharding(mesh, PartitionSpec("tp")))
    found = slices(array)
    assert found.shape == (4, 6) and found.axes == (("tp",), ()) and found.counts == (2, 1)
    assert [(b.start, b.stop, b.ranks, b.shape) for b in found.blocks] == [
        ((0, 0), (2, 6), (0, 2), (2, 6)),
        ((2, 0), (4, 6), (1, 3), (2, 6)),
    ]


PARAMETERS = {
    "column": lambda: ColumnParallelLinear(8, 32, bias=True),
    "row": lambda: RowParallelLinear(32, 8),
    "fused gate and up": lambda: ColumnParallelLinear(8, 32, stride=2),
    "ordering": lambda: ColumnParallelLinear(8, 32, rank_ordering=[2, 0, 3, 1]),
    "qkv with copies": lambda: GQAQKVColumnParallelLinear(16, [32, 8], kv_size_multiplier=2, fuse_qkv=False),
    "fused qkv": lambda: GQAQKVColumnParallelLinear(16, [32, 8], fuse_qkv=True),
}


def test_every_ranks_slice_of_a_parameter_is_what_it_holds(nxd: Nxd) -> None:
    nxd(8, tp=4)
    for name, make in PARAMETERS.items():
        layer = make().to("xla")
        for parameter in layer.parameters():
            found = slices(parameter)
            if full_weights.is_shared_out(parameter):
                value = full_weights.gather_full(parameter)
                full = torch.cat(value) if isinstance(value, tuple) else value
            else:
                full = parameter.detach().cpu()
            assert found.shape == tuple(full.shape), name
            for rank, own in enumerate(sharded.shards(parameter.detach())):
                mine = [full[tuple(slice(a, b) for a, b in zip(x.start, x.stop, strict=True))] for x in found.blocks if rank in x.ranks]
                dim = getattr(parameter, "partition_dim", 0) if full_weights.is_shared_out(parameter) else 0
                assert torch.equal(torch.cat(mine, dim), own), f"{name}, rank {rank}"
    figure = sharding_picture(layer.weight_qkv, "weight_qkv")
    assert figure.get_suptitle() == "weight_qkv [48, 16]\n12 blocks, each on 2 of 8 ranks"
    colours = [hexed(p) for p in by_gid(figure.axes[0].patches, "block").values()]
    assert colours[:4] == colours[4:8] == colours[8:], "coloured by who holds them"


def test_query_heads_in_the_order_of_the_model(nxd: Nxd) -> None:
    nxd(4, tp=4)
    layer = GQAQKVColumnParallelLinear(16, [32, 8], kv_size_multiplier=2, fuse_qkv=False, bias=False).to("xla")
    layer.weight_q.kv_heads_held = 1  # as checkpoints mark it in a model
    assert [(b.start[0], b.stop[0], b.ranks) for b in slices(layer.weight_q).blocks] == [
        (0, 8, (0,)),
        (8, 16, (2,)),
        (16, 24, (1,)),
        (24, 32, (3,)),
    ]
    assert [(b.start[0], b.stop[0], b.ranks) for b in slices(layer.weight_k).blocks] == [(0, 4, (0, 2)), (4, 8, (1, 3))]


def test_undeclared_tensors_and_one_rank(nxd: Nxd) -> None:
    alone = slices(torch.ones(4, 2).to("xla"))
    assert [(b.stop, b.ranks) for b in alone.blocks] == [((4, 2), (0,))]
    nxd(4, tp=2)
    found = slices(sharded.from_ranks(lambda r: torch.full((3,), float(r))))
    assert found.shape == (12,) and [b.ranks for b in found.blocks] == [(0,), (1,), (2,), (3,)]
    assert sharding_picture(torch.tensor(1.0).to("xla")).get_suptitle() == "[]\nwhole on each of 4 ranks"


def test_errors_of_slices() -> None:
    with pytest.raises(TypeError, match="a list does not say which device holds which part: pass a tensor on xla"):
        slices([1, 2])
    with pytest.raises(TypeError, match="expected a tensor on xla, got one on cpu"):
        slices(torch.ones(2))
    with pytest.raises(ValueError, match=r"needs the shape of the tensor that it is for: shape=\(rows, columns\)"):
        slices(sharding_of("tp"))
    with pytest.raises(ValueError, match="shape= goes with a NamedSharding"):
        slices(torch.ones(2), shape=(2,))
    with pytest.raises(ValueError, match=r"shape \[12, 30\] is not divided by .*: dim 0 \(12\) over tp \(8\), dim 1 \(30\) over dp \(4\)"):
        slices(sharding_of("tp", "dp"), shape=(12, 30))
    with pytest.raises(ValueError, match="names 2 dims, but the tensor has 1"):
        slices(sharding_of("tp", None), shape=(8,))
    with pytest.raises(ValueError, match="leaves to the compiler how a dim is split"):
        slices(sharding_of(PartitionSpec.UNCONSTRAINED), shape=(8,))


# -- memory ------------------------------------------------------------------------------------------

BARS = [
    ("trn1, tp 8", {"parameters": 2 * GIB, "activations": 6 * GIB, "buffers": GIB}),
    ("trn1, tp 2", {"parameters": 8 * GIB, "activations": 10 * GIB, "gradients": 0}),
]


def test_memory_bars() -> None:
    figure = memory_picture(BARS, 16 * GIB, "Llama")
    (axis,) = figure.axes
    bars = [(p.get_x(), p.get_y() + p.get_height() / 2, p.get_width()) for p in axis.patches if p.get_gid() is None]
    assert bars == [(0, 0, 2), (2, 0, 6), (8, 0, 1), (0, 1, 8), (8, 1, 10)]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["trn1, tp 8", "trn1, tp 2"] and axis.yaxis_inverted()
    assert [line.get_xdata()[0] for line in axis.lines if line.get_gid() == "hbm"] == [16]
    (frame,) = by_gid(axis.patches, "over").values()
    assert frame.get_gid() == "over 1" and frame.get_width() == 18
    totals = by_gid(axis.texts, "total")
    assert [t.get_text() for t in totals.values()] == ["9.00 GiB, 56.2%", "18.00 GiB, over by 2.00 GiB"]
    assert [t.get_color() for t in totals.values()] == [figures.INK, figures.RED]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "parameters",
        "activations",
        "buffers",
        "gradients",
        "HBM of a core, 16.00 GiB",
    ]
    assert axis.get_xlabel() == "GiB" and axis.get_title(loc="left") == "Llama"


def test_small_memory_and_many_bars() -> None:
    figure = memory_picture([(f"core {i}", {"x": 100 + i}) for i in range(40)], 120)
    assert figure.axes[0].get_xlabel() == "bytes" and len(by_gid(figure.axes[0].patches, "over")) == 19


def test_errors_of_memory() -> None:
    with pytest.raises(ValueError, match="bars is empty: give at least one"):
        memory_picture([], GIB)
    with pytest.raises(ValueError, match="bytes are at least 0 and finite, but bars has a: x -1; b: y nan"):
        memory_picture([("a", {"x": -1}), ("b", {"y": float("nan")})], GIB)
    with pytest.raises(ValueError, match="hbm_bytes=0: a core has more than 0 bytes of memory; Topology.hbm_per_core"):
        memory_picture(BARS, 0)


# -- all of them -------------------------------------------------------------------------------------


def test_saving_and_showing(tmp_path: pathlib.Path) -> None:
    figure = memory_picture(BARS, 16 * GIB, path=tmp_path / "new" / "memory.png")
    assert (tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    topology_picture(Topology("trn1.2xlarge"), path=str(tmp_path / "machine.svg"))
    assert "<svg" in (tmp_path / "machine.svg").read_text()
    for draw in (
        lambda p: memory_picture(BARS, 1, path=p),
        lambda p: topology_picture(TRN1, path=p),
        lambda p: sharding_picture(None, path=p),
    ):
        with pytest.raises(ValueError, match=r"path='a.jpg': a picture is saved as .png, .svg or .pdf; end the name with one of them"):
            draw("a.jpg")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *args: Any, real: Any = builtins.__import__, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    figures._picture.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pictures need matplotlib; install it with: pip install 'nxd-jax\[notebooks\]'"):
        memory_picture(BARS, GIB)


def test_nothing_of_pyplot_is_loaded() -> None:
    code = "import sys; from nxd_jax.inspect.pictures import memory_picture as m; assert 'matplotlib' not in sys.modules\n"
    code += "m([('a', {'x': 1})], 2)._repr_png_(); assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).parents[3], check=True)

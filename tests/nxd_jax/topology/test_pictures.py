"""The text, HTML and PNG pictures hold what they should."""

from __future__ import annotations

import builtins
import re
import xml.etree.ElementTree as ET

import pytest

from nxd_jax.topology import INSTANCES, Topology, pictures
from nxd_jax.topology.marks import colour, spans
from nxd_jax.topology.scene import scene

TRN2 = Topology("trn2.48xlarge")


def test_the_table_of_devices():
    lines = pictures.text(TRN2).splitlines()
    assert lines[0] == "trn2.48xlarge: 16 Trainium2 chips, 64 cores (NC_v3d, LNC 2); per core 24 GiB, 166.8 TFLOP/s bfloat16"
    assert lines[1] == "4x4 torus, 256 GB/s per link; EFA 3200 Gbit/s per node"
    assert "| DEVICE | CORES | CORE IDS | MEMORY | CONNECTED DEVICES |" in lines
    assert "| 0      | 4     | 0-3      | 96 GiB | 12, 3, 4, 1       |" in lines
    assert "| 15     | 4     | 60-63    | 96 GiB | 11, 14, 3, 12     |" in lines


def test_the_drawing_of_a_torus():
    drawing = pictures.text(TRN2)
    assert re.findall(r"\[(\d+)\]", drawing) == [str(i) for i in range(16)]
    assert all(f"cores {4 * i}-{4 * i + 3}" in drawing for i in range(16))
    for letter in "efgh":  # rows wrap round
        assert len(re.findall(rf"^ {letter}──┤.*├──{letter}$", drawing, re.M)) == 1
    columns = [line.split() for line in drawing.splitlines() if re.fullmatch(r"\s+a\s+b\s+c\s+d", line)]
    assert columns == [["a", "b", "c", "d"]] * 2
    assert drawing.count("├────┤") == 12 and drawing.count("┬") == drawing.count("┴") == 16


def test_print_shows_the_picture():
    assert str(TRN2) == pictures.text(TRN2) and f"{TRN2}" == str(TRN2)
    assert not any(line != line.rstrip() for line in str(TRN2).splitlines())


def test_rings_and_single_chips():
    ring = str(Topology("inf2.24xlarge"))
    assert re.findall(r"\[(\d+)\]", ring) == ["0", "1", "2", "5", "4", "3"]
    assert "ring of 6, 103.1 GB/s per link" in ring and ring.count("├────┤") == 4 and ring.count("┬") == ring.count("┴") == 2
    single = str(Topology("trn1.2xlarge"))
    assert "one chip, no links" in single and "[0]" in single and "┤" not in single and "| -  " in single


def test_groups_in_the_boxes():
    drawing = pictures.text(TRN2, TRN2.groups(tp=8, pp=2))
    boxes = drawing.split("[15]")[1]
    assert "tp 7" in boxes and "dp 12-15" in boxes and "pp 28-31" in boxes and "ep" not in boxes
    assert "pp rank 1" in pictures.text(TRN2, TRN2.groups(tp=8, pp=2), by="pp_rank").split("[15]")[1]
    assert "tp" not in pictures.text(TRN2, TRN2.groups(tp=8), by=["dp"]).split("[0]")[1]


def test_cores_that_are_not_visible():
    drawing = pictures.text(Topology("trn1.32xlarge", visible=range(2, 4)), Topology("trn1.32xlarge", visible=range(2, 4)).groups())
    assert "| 1      | 2     | 2-3      |" in drawing and "| 0      | 0     | -        |" in drawing and drawing.count("cores -") == 15


def test_many_nodes_take_a_line_each():
    t = Topology("trn1.32xlarge", nodes=4)
    drawing = pictures.text(t, t.groups(tp=8, pp=2))
    assert drawing.startswith("4 x trn1.32xlarge: 16 Trainium1 chips each, 128 cores")
    assert drawing.count("[15]") == 1
    assert re.search(r"\| NODE \| RANKS  +\| TP +\| DP +\| PP", drawing)
    assert re.search(r"\| 3    \| 96-127 +\| 12-15 +\| 8-15 +\| 32-63 ", drawing)


def test_an_ultraserver_names_its_rings():
    drawing = str(Topology("u-trn2"))
    assert "64 Trainium2 chips on 4 nodes" in drawing and "nodes in a ring, 128 GB/s per link" in drawing
    assert re.search(r"\| 0    \| 3, 1 \| 0-63 ", drawing) and re.search(r"\| 3    \| 2, 0 \| 192-255 ", drawing)


@pytest.mark.parametrize("name", INSTANCES)
def test_every_instance_has_every_picture(name):
    t = Topology(name)
    assert t.instance.name in str(t)
    svg = re.findall(r"<svg.*?</svg>", t._repr_html_(), re.S)
    assert len(svg) == t.node_count
    assert t._repr_html_().count("<title>") == t.core_count


def test_html_is_whole_and_self_contained():
    page = pictures.html(TRN2, TRN2.groups(tp=4, pp=2))
    ET.fromstring(page.replace("<br>", "<br/>"))
    assert not re.search(r"<script|<link|<img|src=|href=", page)
    assert page.count("<svg") == 3  # tp, dp, pp
    assert "coloured by tp" in page and "tp 15" in page and "coloured by pp" in page
    assert "rank 63\nnode 0, chip 15, core 63 (physical 126, 127)\ntp group 15, rank 3 of 4" in page


def test_html_colours_are_those_of_the_groups():
    page = pictures.html(TRN2, TRN2.groups(tp=32), by="tp").split("<svg")[1]
    assert page.count(f'fill="{colour(0)}"') == page.count(f'fill="{colour(1)}"') == 32
    assert len({colour(i) for i in range(256)}) == 256


def test_html_draws_a_limited_number_of_nodes():
    page = pictures.html(Topology("trn1.32xlarge", nodes=5), most_nodes=2)
    assert page.count("<svg") == 2 and "and 3 more nodes (most_nodes=2)" in page


def test_boxes_do_not_overlap():
    for t in (TRN2, Topology("trn2.3xlarge", lnc=1), Topology("inf2.48xlarge")):
        drawing = scene(t, 0)
        boxes = list(drawing.chips.values())
        assert all(
            a[0] + a[2] < b[0] or b[0] + b[2] < a[0] or a[1] + a[3] < b[1] or b[1] + b[3] < a[1]
            for i, a in enumerate(boxes)
            for b in boxes[:i]
        )
        for core in drawing.cores:
            x, y, width, height = drawing.chips[core.chip]
            assert x < core.box[0] and core.box[0] + core.box[2] < x + width and y < core.box[1] and core.box[1] + core.box[3] < y + height
        assert all(0 <= x1 <= x2 <= drawing.width and 0 <= y1 <= y2 <= drawing.height for x1, y1, x2, y2 in drawing.lines)
        assert len(drawing.lines) == 2 * len(t.links())


@pytest.mark.parametrize(
    ("groups", "by", "words"),
    [({}, "zp", "'zp' is no kind of group; use tp, dp, pp, cp, ep, edp"), (None, "tp", "pass groups=topology.groups")],
)
def test_errors(groups, by, words):
    for draw in (pictures.text, pictures.html):
        with pytest.raises(ValueError) as caught:
            draw(TRN2, groups, by)
        assert words in str(caught.value)


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    t = Topology("trn1.32xlarge", nodes=3)
    pictures.png(t, tmp_path / "a.png", t.groups(tp=8), by="tp", most_nodes=2, dpi=50)
    pictures.png(Topology("inf2.xlarge"), tmp_path / "b.png", dpi=50)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for name in ("a.png", "b.png"))


def test_png_without_matplotlib(monkeypatch, tmp_path):
    real = builtins.__import__

    def missing(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"need matplotlib; install it with: pip install 'nxd-jax\[notebooks\]'"):
        pictures.png(TRN2, tmp_path / "a.png")


def test_short_lists():
    assert [spans([]), spans([3]), spans([2, 0, 1]), spans([0, 2, 4, 6, 8, 9])] == ["-", "3", "0-2", "0,2,4,6,..."]

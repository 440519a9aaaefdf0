"""Shardings that scripts make by tile assignments, pictures of them, and annotations of views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla.distributed.spmd.debugging import visualize_sharding, visualize_tensor_sharding

from tests.torch_bridge.spmd.test_annotations import placed

_XLAC: Any = torch_xla._XLAC
TILED, PARTIAL, REPLICATED = xs.ShardingType.TILED, xs.ShardingType.PARTIAL, xs.ShardingType.REPLICATED

TILES: list[tuple[Any, xs.ShardingType, str, tuple[int, ...]]] = [
    ([[0, 1], [2, 3], [4, 5], [6, 7]], TILED, "{devices=[4,2]0,1,2,3,4,5,6,7}", (2, 4)),
    ([[0, 1, 2, 3, 4, 5, 6, 7]], TILED, "{devices=[1,8]0,1,2,3,4,5,6,7}", (8, 1)),
    ([[[0, 4], [1, 5]], [[2, 6], [3, 7]]], PARTIAL, "{devices=[2,2,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}", (4, 4)),
    ([], REPLICATED, "{replicated}", (8, 8)),
]


@pytest.mark.parametrize(("tiles", "kind", "said", "block"), TILES)
def test_by_tiles(tiles: Any, kind: xs.ShardingType, said: str, block: tuple[int, ...], mesh: xs.Mesh) -> None:
    made = _XLAC.OpSharding(tiles, [], [], int(kind))
    assert repr(made) == said and made.type is kind
    host = torch.randn(8, 8)
    t = host.to("xla")
    _XLAC._xla_mark_sharding(t, made)
    assert _XLAC._get_xla_sharding_spec(t) == said and placed(t) == block and torch.equal(t.cpu(), host)


def test_tiles_that_do_not_fit(mesh: xs.Mesh) -> None:
    with pytest.raises(ValueError, match=r"takes the types REPLICATED \(0\), TILED \(3\), PARTIAL \(5\), got 4"):
        _XLAC.OpSharding([[0]], [], [], 4)
    with pytest.raises(ValueError, match=r"must have each of the job's 8 devices once, got \[0, 1\]"):
        _XLAC.OpSharding([0, 1], [], [], 3)


def test_pictures(mesh: xs.Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    t = torch.ones(8, 8).to("xla")
    visualize_tensor_sharding(xs.mark_sharding(t, mesh, ("data", "model")), use_color=False)
    shown = capsys.readouterr().out
    rows = [[part.strip() for part in line.strip("│").split("│")] for line in shown.splitlines() if "NEURON" in line]
    assert rows == [[f"NEURON {2 * k}", f"NEURON {2 * k + 1}"] for k in range(4)]
    assert visualize_sharding("{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}", use_color=False, min_width=20).row_count == 2
    shown = capsys.readouterr().out
    assert "│ NEURON [0, 1, 2, 3] │" in shown and "NEURON [4, 5, 6, 7]" in shown
    assert visualize_sharding("{replicated}", use_color=False).row_count == 1
    assert "│ NEURON [0, 1, 2, 3, 4, 5, 6, 7] │" in capsys.readouterr().out
    visualize_sharding("{replicated}", use_color=False, scale=2)
    assert len(capsys.readouterr().out.splitlines()) == 7
    assert len(visualize_sharding("{devices=[8]0,1,2,3,4,5,6,7}", max_width=100).columns) == 8
    assert visualize_sharding("{devices=[1,4,2,1]0,1,2,3,4,5,6,7}", use_color=False).row_count == 4
    with pytest.raises(ValueError, match=r"'' is no sharding. Give torch_xla._XLAC._get_xla_sharding_spec\(t\) of an annotated tensor"):
        visualize_tensor_sharding(torch.ones(8).to("xla"))
    with pytest.raises(ValueError, match=r"shows two dims, .* divides 3"):
        visualize_sharding("{devices=[2,2,2]0,1,2,3,4,5,6,7}")


def test_an_annotation_of_a_view_says_what_it_does(mesh: xs.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    host = torch.randn(8, 4)
    t = host.to("xla")
    xs.mark_sharding(t.t(), mesh, ("model", "data"))
    assert "mark_sharding of a view (shape [4, 8]) of a tensor of shape [8, 4]" in caplog.text and "Mark that one" in caplog.text
    assert torch.equal((t.t() * 2).cpu(), host.t() * 2)


def test_a_view_has_no_annotation(mesh: xs.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    """Its dims are not those of the annotated tensor, which stays as it is."""
    host = torch.randn(8, 4)
    t = host.to("xla")
    said = xs.mark_sharding(t, mesh, ("data", "model")).sharding_spec
    assert [_XLAC._get_xla_sharding_spec(v) for v in (t.t(), t[0], t.view(-1), t.detach())] == ["", "", "", said]
    xs.mark_sharding(t.t(), mesh, (None, "model"))
    assert _XLAC._get_xla_sharding_spec(t) == said and torch.equal(t.t().cpu(), host.t())


def test_an_expanded_tensor_stays_as_it_is(mesh: xs.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    row = torch.arange(4.0).to("xla")
    marked = xs.mark_sharding(row.expand(8, 4), mesh, ("data", None))
    assert "that expand() made" in caplog.text
    assert torch.equal((marked * 2).cpu(), torch.arange(4.0).expand(8, 4) * 2)


def test_what_devices_do_not_divide_by_op_sharding(mesh: xs.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    for t in (torch.ones(6, 4).to("xla"), torch.ones(6, 4).to("xla") + 0):
        xs.annotate_custom_sharding(t, mesh.get_op_sharding(("data", "model")))
        assert placed(t) == (6, 2) and t.sum().item() == 24
    assert "annotate_custom_sharding: dim 0 of [6, 4] has 6 elements" in caplog.text


@pytest.mark.parametrize("size", [(0, 8), (8, 0)])
def test_empty_tensors(size: tuple[int, ...], mesh: xs.Mesh) -> None:
    t = torch.ones(size).to("xla")
    marked = xs.mark_sharding(t, mesh, ("data", "model"))
    t += 1
    assert placed(t) == size and t.cpu().shape == size
    assert marked.local_shards[0].data.shape == size


def test_shards_of_what_is_one_number(mesh: xs.Mesh) -> None:
    """No program has computed it."""
    t = torch.ones(8, 4, device="xla")
    marked = xs.mark_sharding(t, mesh, ("data", None))
    assert marked.local_shards[7].data.tolist() == [[1.0] * 4] * 2
    t += 1
    assert marked.local_shards[7].data.tolist() == [[2.0] * 4] * 2
    assert len(xs.wrap_as_sharded_tensor(torch.zeros(3, device="xla")).local_shards) == 8

"""What is recorded, when it compiles, what it donates: the recorder's promises, counted."""

from __future__ import annotations

import gc
import sys

import jax
import pytest
import torch

import torch_bridge
from torch_bridge import metrics
from torch_bridge.compiler import program
from torch_bridge.config.settings import SETTINGS
from torch_bridge.device import startup
from torch_bridge.runtime import executor, session


@pytest.fixture(autouse=True)
def fresh():
    executor.sync()
    metrics.clear_counters()


def compilations() -> int:
    return metrics.COUNTERS.get("UncachedCompile", 0)


def executions() -> int:
    return compilations() + metrics.COUNTERS.get("CachedCompile", 0)


def nodes() -> list[str]:
    return [str(n[0].op) for n in startup.dispatch.STATE.session.current.nodes]


def test_nothing_runs_before_it_is_asked_for():
    x = torch.ones(3).to("xla")
    y = x * 2 + 1
    assert executions() == 0
    assert y.tolist() == [3.0, 3.0, 3.0]
    assert executions() == 1


def test_views_and_copies_record_no_compute():
    x = torch.ones(3, 4).to("xla")
    x.t()[1].view(3).detach().clone()
    assert nodes() in ([], ["aten.select.int"])


def test_changing_numbers_do_not_recompile():
    x = torch.ones(4).to("xla")
    for lr in (0.1, 0.2, 0.1, 0.5):
        x.add_(x, alpha=lr).mul_(1 - lr).clamp_(max=3 + lr)
        executor.sync()
    assert (compilations(), executions()) == (1, 4)
    expected = torch.ones(4)
    for lr in (0.1, 0.2, 0.1, 0.5):
        expected.add_(expected, alpha=lr).mul_(1 - lr).clamp_(max=3 + lr)
    torch.testing.assert_close(x.cpu(), expected)


def test_changing_integers_do_not_recompile():
    x = torch.zeros(4, dtype=torch.int64).to("xla")
    for step in range(5):
        x.add_(step)
        executor.sync()
    assert compilations() == 1
    assert x.tolist() == [10] * 4


def test_a_changing_shape_compiles_once_per_shape():
    for n in (3, 4, 3, 4):
        (torch.ones(n).to("xla") * 2).cpu()
    assert (compilations(), executions()) == (2, 4)


def test_an_update_in_place_is_in_place():
    w = torch.ones(64, 64).to("xla")
    w.add_(1)
    executor.sync()
    before = w._storage.array.unsafe_buffer_pointer()
    w.add_(1)
    executor.sync()
    assert w._storage.array.unsafe_buffer_pointer() == before


def test_a_buffer_that_something_else_holds_is_not_donated():
    w = torch.ones(8).to("xla")
    for _ in range(2):
        w.add_(1)
        executor.sync()
    held = w._storage.array
    kept = w.clone()
    count = compilations()
    w.add_(1)
    executor.sync()
    assert not held.is_deleted()
    assert kept.tolist() == [3.0] * 8 and w.tolist() == [4.0] * 8
    assert compilations() == count, "holding a copy for once must not recompile"


def test_a_frame_that_is_kept_while_compiling_does_not_hold_results(monkeypatch: pytest.MonkeyPatch):
    """An exception that was caught inside a compilation can keep all frames below it until the garbage collector runs."""
    compiled = program.Program.compile

    def caught(self, args):
        try:
            raise KeyError
        except KeyError as error:
            own = error  # noqa: F841  # a circle: the frame keeps the exception, which keeps the frame
        compiled(self, args)

    monkeypatch.setattr(program.Program, "compile", caught)
    w = torch.zeros(8, 3, 5).to("xla")  # a shape of its own: it must compile
    gc.disable()
    try:
        w.add_(3)
        executor.sync()
        made = w._storage.array
        assert sys.getrefcount(made) == 3  # `made`, the storage and the call
        del made
    finally:
        gc.enable()
    assert compilations() == 1


def test_unused_results_are_not_computed():
    x = torch.ones(5).to("xla")
    y = x + 1
    z = x * 3
    del z
    executor.sync()
    ran = session.current().recent[-1]
    assert [n.target for n in ran.graph.nodes if n.op == "call_function" and "mul" in str(n.target)] == []
    assert y.tolist() == [2.0] * 5


def test_dead_tensors_release_their_arrays():
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(20):
        x = torch.ones(16).to("xla")
        (x * 2).sum().item()
    del x
    gc.collect()
    assert len(jax.live_arrays()) <= before + 1


def test_every_node_knows_its_module_and_line():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 2))).to("xla")
    executor.clear_cache()
    loss = model(torch.ones(2, 3).to("xla")).sum()
    loss.backward()
    executor.sync()
    sources = [(str(n.target), n.meta["source"]) for n in session.current().recent[-1].graph.nodes if "source" in n.meta]
    modules = {s.module for _, s in sources}
    assert {"0", "1.0", "1.1"} <= modules
    forward = [s for t, s in sources if "addmm" in t or "relu" in t]
    assert forward and all(s.file.endswith("test_recorder.py") and s.function.startswith("test_every_node") for s in forward)
    assert any("threshold_backward" in t and s.module == "1.0" for t, s in sources), "backward ops carry their forward's module"


def test_a_segment_is_a_graph_module_that_torch_can_run():
    x = torch.arange(6.0).reshape(2, 3).to("xla")
    y = (x.t() * 0.5)[1:].clone()
    y[0] = 7
    executor.sync()
    module = session.current().recent[-1].module()
    assert isinstance(module, torch.fx.GraphModule)
    placeholders = [n.target for n in module.graph.nodes if n.op == "placeholder"]
    values = {"arg0": torch.arange(6.0).reshape(2, 3), "floats": torch.tensor([0.5, 7.0], dtype=torch.float64), "ints": torch.tensor([7])}
    (result,) = module(*[values[p] for p in placeholders])
    torch.testing.assert_close(result, y.cpu())


def test_small_integers_for_python_do_not_cut_the_graph():
    ids = torch.arange(8).to("xla")
    big = torch.ones(8).to("xla") * 2
    mask = ids[None].expand(2, 8) >= 0
    assert bool(mask.all())
    assert (ids * 3).max().item() == 21
    assert executions() == 0
    assert big.sum().item() == 16.0
    assert executions() == 1


def test_masks_made_of_ones_are_known_to_python():
    """`torch.ones` is a float, but a whole number in every precision; other floats take the device."""
    mask = torch.ones(2, 8, device="xla")
    assert bool((mask == 1).all()) and bool(mask.to(torch.bool).all())
    assert executions() == 0
    assert bool((torch.full((3,), 0.1, device="xla") > 0.05).all())
    assert executions() == 1


def test_small_integers_through_views_of_what_is_not_contiguous():
    """Decision Transformers make their mask so. On the host, ops see values as a program does, without strides."""

    def numbers(device: str) -> list[int]:
        mask = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(device)
        joined = torch.stack((mask, mask + 1), dim=1).permute(0, 2, 1).reshape(2, 6)
        turned = mask.t().contiguous()[1:]
        cut = (mask.t() + 0).clone(memory_format=torch.contiguous_format)[1:].as_strided((2, 2), (1, 2), 1)
        return [
            int(joined[0, 1].item()),
            int(joined[1, 4].item()),
            int(turned.reshape(-1)[2].item()),
            *(int(cut[i, j].item()) for i in (0, 1) for j in (0, 1)),
        ]

    expected = numbers("cpu")
    assert numbers("xla") == expected
    assert executions() == 0


def test_structures_are_forgotten_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(SETTINGS, "max_traces", 4)
    for n in range(1, 9):
        (torch.ones(n).to("xla") + n).cpu()
    assert len(session.current().traces) <= 4


def test_mixed_steps_keep_predicting():
    x, y = torch.ones(4).to("xla"), torch.ones(5).to("xla")
    for step in range(6):
        (x if step % 3 else y).mul_(1.5).add_(1)
        executor.sync()
    assert compilations() == 2


def test_hlo_of_the_last_graph_names_modules():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3)).to("xla")
    executor.clear_cache()
    model(torch.ones(2, 3).to("xla")).cpu()
    text = torch_bridge.hlo()
    assert "stablehlo" in text and "test_recorder.py" in text

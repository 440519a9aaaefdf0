"""Random states in checkpoints: what is drawn after a resume is what would have been drawn, on each rank, in one process or several."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from torch.utils.data import DataLoader

import torch_bridge
from nxd_jax.checkpoint import random_states, writing
from tests.nxd_jax.conftest import Nxd
from torch_bridge.mesh import rank_numbers, world
from torch_bridge.mesh.random_state import DEFAULT
from torch_bridge.precision import stochastic_rounding

Seeds = Callable[[int], Any]
SAME: Seeds = lambda seed: seed  # noqa: E731
OWN: Seeds = lambda seed: seed + xm.get_ordinal()  # noqa: E731


def begin(seed: Seeds) -> None:
    torch.manual_seed(seed(3))
    random.seed(seed(4))
    np.random.seed(seed(5))
    model_parallel_xla_manual_seed(seed(6))


def on_host() -> list[list[float]]:
    """Draws of each hosted rank on the host: torch's, the tracker's, Python's and NumPy's."""
    with get_xla_rng_tracker().fork():
        inner = torch.rand(1)
    found = [torch.rand(1).to("xla"), inner.to("xla")] if len(world.current().hosted) > 1 else [torch.rand(1), inner]
    drawn = [[t.item() for t in torch_bridge.shards(x)] if x.device.type == "xla" else [x.item()] for x in found]
    count = len(world.current().hosted)
    numbers = [[float(rank_numbers.own(x, k)) for k in range(count)] for x in (random.random(), np.random.rand())]
    return [x * count if len(x) == 1 else x for x in [*drawn, *numbers]]


def on_xla() -> list[list[float]]:
    with get_xla_rng_tracker().fork():
        inner = torch.rand(2, device="xla")
    return [[t.tolist() for t in torch_bridge.shards(x)] for x in (torch.rand(2, device="xla"), inner)]


def save(folder: Path, index: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{index:05d}.pt").write_bytes(writing.pickled(random_states.current()))


@pytest.mark.parametrize("seed", [SAME, OWN], ids=["one seed", "a seed for each rank"])
def test_all_go_on(nxd: Nxd, tmp_path: Path, seed: Seeds) -> None:
    nxd(4, tp=2)
    begin(seed)
    first = on_host(), on_xla()
    save(tmp_path / "random")
    wanted = on_host(), on_xla()
    nxd(4, tp=2)
    begin(seed)
    random_states.restore(tmp_path / "random")
    assert (on_host(), on_xla()) == wanted
    begin(seed)
    assert (on_host(), on_xla()) == first


def test_saving_draws_nothing(nxd: Nxd, tmp_path: Path) -> None:
    """Of a large seed `xm.get_rng_state()` makes a smaller one."""
    nxd(1)
    torch.manual_seed(2**40 + 1)
    state = DEFAULT.seed, DEFAULT.offset
    save(tmp_path / "random")
    assert (DEFAULT.seed, DEFAULT.offset) == state
    torch.manual_seed(0)
    random_states.restore(tmp_path / "random")
    assert (DEFAULT.seed, DEFAULT.offset) == state


@pytest.mark.parametrize("seed", [SAME, OWN], ids=["one seed", "a seed for each rank"])
def test_processes_and_one_process(nxd: Nxd, tmp_path: Path, seed: Seeds) -> None:
    """Files of one process are taken up by two, and those of two by one."""
    nxd(2, tp=2)
    begin(seed)
    on_host()
    save(tmp_path / "one")
    wanted = on_host()
    for rank in (0, 1):
        world.current().hosted = (rank,)
        begin(seed)
        random_states.restore(tmp_path / "one")
        save(tmp_path / "two", rank)
        assert on_host() == [[of[rank]] for of in wanted]
    world.current().hosted = (0, 1)
    begin(seed)
    random_states.restore(tmp_path / "two")
    assert on_host() == wanted


def test_another_layout(nxd: Nxd, tmp_path: Path) -> None:
    """More ranks than there were: rank 0's on the host; on xla as many draws further, each tensor-parallel rank its own."""
    nxd(2, tp=2)
    begin(OWN)
    save(tmp_path / "random")
    wanted = on_host()
    nxd(4, tp=4)
    begin(SAME)
    random_states.restore(tmp_path / "random")
    found = on_host()
    assert [found[k] for k in (0, 2, 3)] == [[wanted[k][0]] * 4 for k in (0, 2, 3)] and len(set(found[1])) == 4
    plain, forked = on_xla()
    assert len({tuple(x) for x in plain}) == 1 and len({tuple(x) for x in forked}) == 4


def test_stochastic_rounding_goes_on(nxd: Nxd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rounded after a resume is rounded as it would have been, in a process that ran other programs before."""
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
    nxd(1)
    x = torch.full((64,), 1.001).to("xla")
    rounded = lambda: x.to(torch.bfloat16).float().cpu().tolist()  # noqa: E731
    rounded()
    save(tmp_path / "random")
    after = [rounded(), rounded()]
    assert after[0] != after[1]
    stochastic_rounding.restart()
    random_states.restore(tmp_path / "random")
    assert [rounded(), rounded()] == after
    (file,) = (tmp_path / "random").glob("*.pt")
    old = {name: state for name, state in torch.load(file, weights_only=False).items() if name != "rounding"}
    torch.save(old, file)  # a file of before goes on as the process is
    random_states.restore(tmp_path / "random")
    assert rounded() not in after


def test_states_that_the_checkpoint_lacks(nxd: Nxd, tmp_path: Path) -> None:
    """Named states that were added since stay; one that is not there any more is not made."""
    nxd(2, tp=2)
    begin(SAME)
    get_xla_rng_tracker().add("old", 7)
    save(tmp_path / "random")
    begin(SAME)
    get_xla_rng_tracker().add("new", 8)
    new = get_xla_rng_tracker().get_states()["new"]
    random_states.restore(tmp_path / "random")
    states = get_xla_rng_tracker().get_states()
    assert set(states) == {"model-parallel-rng", "new"} and torch.equal(states["new"].xla, new.xla)


def test_files_of_before(nxd: Nxd, tmp_path: Path) -> None:
    """Without the tracker's states, the device's as an int."""
    nxd(2, tp=2)
    begin(OWN)
    wanted = torch.rand(2, device="xla").cpu().tolist()
    begin(OWN)
    host = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    old = {**host, "xla": rank_numbers.first(xm.get_rng_state()), "xla_axes": DEFAULT.axes}
    (tmp_path / "00000.pt").write_bytes(writing.pickled(old))
    torch.manual_seed(0)
    random_states.restore(tmp_path)
    assert torch.rand(2, device="xla").cpu().tolist() == wanted


def test_states_of_loaders_are_those_of_each_rank(nxd: Nxd, tmp_path: Path) -> None:
    """What a loader began its pass with: of two processes, of one that hosts both ranks, and from one to the other."""
    pytest.importorskip("pytorch_lightning")
    from nxd_jax.lightning import loaders

    def kept() -> dict[str, Any]:
        made = loaders._Random(DataLoader(range(4), shuffle=True))
        return {"batches": 2, "random": loaders._savable(made.get()), "generators": []}

    def save(folder: Path, index: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        (folder / f"{index:05d}.pt").write_bytes(writing.pickled({**random_states.current(), loaders.LOADERS: [kept()]}))

    def begin_as_it_was(folder: Path) -> None:
        begin(SAME)
        (state,) = loaders.of_this_process([{"batches": 2, "random": None, "generators": []}], folder)
        loaders._Random(DataLoader(range(4), shuffle=True)).set(loaders._live(state["random"]))

    def drawn_by(ranks: int) -> list[list[float]]:
        found = [[float(rank_numbers.own(x, k)) for k in range(ranks)] for x in (random.random(), np.random.rand())]
        plain = torch.rand(1)
        return [*found, [t.item() for t in torch_bridge.shards(plain.to("xla"))] if ranks > 1 else [plain.item()]]

    nxd(2)
    begin(OWN)
    wanted = drawn_by(2)
    assert all(a != b for a, b in wanted)
    begin(OWN)
    save(tmp_path / "one")
    begin_as_it_was(tmp_path / "one")
    assert drawn_by(2) == wanted
    for rank in (0, 1):
        world.current().hosted = (rank,)
        begin_as_it_was(tmp_path / "one")
        assert drawn_by(1) == [[of[rank]] for of in wanted]
        begin(OWN)
        save(tmp_path / "two", rank)
    world.current().hosted = (0, 1)
    begin_as_it_was(tmp_path / "two")
    assert drawn_by(2) == wanted

"""Loggers, seeds, chip names, structures with their tensors taken out, the short path of parallel_state."""

from __future__ import annotations

import collections
import logging
import pathlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import nxd_jax.parallel_state
from nxd_jax import utils
from nxd_jax.parallel_layers import parallel_state
from nxd_jax.utils import logger as loggers
from nxd_jax.utils import serialization
from nxd_jax.utils.random import set_random_seed
from nxd_jax.utils.utils import HloMetadataLevel, get_dict_from_json, hardware
from tests.nxd_jax.conftest import Nxd
from torch_bridge.mesh import world
from torch_bridge.recorder import sharded


def test_parallel_state_has_a_short_path() -> None:
    import neuronx_distributed.parallel_state as short

    assert short is parallel_state and nxd_jax.parallel_state is parallel_state


# -- with and without a device -----------------------------------------------------------------------


def test_device_and_cpu_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not utils.cpu_mode() and utils.get_device() == torch.device("xla", 0)
    x = torch.ones(2, device="xla") + 1
    utils.mark_step()
    assert not x._storage.pending  # type: ignore[attr-defined]
    monkeypatch.setenv("NXD_CPU_MODE", "1")
    assert utils.cpu_mode() and utils.get_device() == torch.device("cpu")
    utils.mark_step()
    utils.master_print("hello")
    assert capsys.readouterr().out == "hello\n"


# -- loggers -----------------------------------------------------------------------------------------


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NXD_LOG_HIDE_TIME", "1")
    loggers.get_log_level.cache_clear()
    yield f"test-{random.random()}"
    loggers.get_log_level.cache_clear()


def test_a_logger_writes_lines_to_stdout(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    logger = loggers.get_logger(name)
    assert logger is loggers.get_logger(name) and logger.name == f"{name}[0]" and logger.initialized  # type: ignore[attr-defined]
    logger.info("loss %s", 1.5)
    logger.debug("hidden")
    line = capsys.readouterr().out
    assert line.startswith(("[I tests/nxd_jax/utils/test_small.py:", "[I nxd_jax/utils/test_small.py:"))
    assert line.endswith("] loss 1.5\n") and line.count("\n") == 1


def test_only_rank_0_writes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        world.configure(world.World(2, (1,)))
        loggers.get_logger(name).error("one")
        loggers.get_logger(name, rank0_only=False).error("all")
    finally:
        world.configure(None)
    assert capsys.readouterr().out.endswith("] all\n")


def test_a_function_for_rank_0(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    def log(text: str, stacklevel: int) -> tuple[str, int]:
        """Its words."""
        return text, stacklevel

    only = loggers._rank0_only(log)
    assert only.__doc__ == "Its words." and only("x") == ("x", 2) and only("x", stacklevel=3) == ("x", 4)
    monkeypatch.setenv("RANK", "1")
    assert only("x") is None and loggers._rank0_only(log, default=7)("x") == 7
    nxd(2)  # hosts rank 0
    assert only("x") == ("x", 2)


def test_levels(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for level, number in (("trace", 10), ("debug", 10), ("INFO", 20), ("warning", 30), ("error", 40), ("fatal", 50), ("off", 51)):
        monkeypatch.setenv("NXD_LOG_LEVEL", level)
        loggers.get_log_level.cache_clear()
        assert loggers.get_log_level() == number
    loggers.get_logger(name).fatal("nothing")
    assert capsys.readouterr().out == "" and logging.getLogger(f"{name}[0]").disabled
    monkeypatch.setenv("NXD_LOG_LEVEL", "loud")
    assert loggers.get_log_level() == 51  # read once
    loggers.get_log_level.cache_clear()
    with pytest.raises(ValueError, match="NXD_LOG_LEVEL='loud' must be one of trace, debug, info, warning, error, fatal, off"):
        loggers.get_log_level()


# -- seeds -------------------------------------------------------------------------------------------


def test_set_random_seed(nxd: Nxd) -> None:
    from nxd_jax.parallel_layers.random import get_xla_rng_tracker

    def draw() -> list[Any]:
        set_random_seed(7)
        with get_xla_rng_tracker().fork():
            forked = sharded.shards(torch.rand(2, device="xla"))
        return [random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1, device="xla").item(), [t.tolist() for t in forked]]

    nxd(2, tp=2)
    first = draw()
    assert first == draw() and first[-1][0] != first[-1][1]
    parallel_state.destroy_model_parallel()
    set_random_seed(7)
    assert random.random() == first[0]


# -- names of things ---------------------------------------------------------------------------------


def test_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [hardware(n) for n in ("trn1", "trn1n", "inf2", "trn2", "trn3")] == [hardware.TRN1] * 3 + [hardware.TRN2, hardware.TRN3]
    with pytest.raises(ValueError, match="'trn9' is not a valid hardware"):
        hardware("trn9")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    assert hardware("trn9") is hardware.CUSTOM


def test_hlo_metadata_level() -> None:
    assert [HloMetadataLevel(x) for x in ("debug", "info", "none", True, False)] == [
        HloMetadataLevel.DEBUG, HloMetadataLevel.INFO, HloMetadataLevel.NONE, HloMetadataLevel.DEBUG, HloMetadataLevel.INFO,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not a valid"):
        HloMetadataLevel("loud")


def test_get_dict_from_json(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"a": [1]}')
    assert get_dict_from_json(path) == {"a": [1]}
    for wrong in (b"{", b"\xff\xfe"):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"Failed to parse JSON file .*c.json: "):
            get_dict_from_json(str(path))
    with pytest.raises(ValueError, match=r"JSON file not found: .*none.json"):
        get_dict_from_json(tmp_path / "none.json")


# -- structures --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    a: Any
    b: Any


class Output:
    def __init__(self, loss: Any):
        self.loss = loss


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_tensors_out_of_a_structure_and_back(device: str) -> None:
    t, u = torch.ones(2, device=device, requires_grad=True), torch.arange(3, device=device)
    lists = collections.defaultdict(list, k=[t])
    data = collections.OrderedDict(x=[t, (u, t)], y=Pair(1, u), z=Output(t), n=None, d=lists, s={t}, i=u.shape)
    manager = serialization.SerializationManager()
    stubbed, tensors, stubs = manager.serialize(data)
    assert tensors[0] is t and tensors[1] is u and len(tensors) == 2
    assert stubs[0] == serialization.TensorMeta(0, torch.float32, torch.Size([2]), True, t.device)
    assert (
        stubbed["x"][1][0] is stubs[1]
        and stubbed["y"] == Pair(1, stubs[1])
        and stubbed["z"] is data["z"]
        and type(stubbed["i"]) is torch.Size
    )
    assert stubbed["d"] == {"k": [stubs[0]]} and stubbed["d"].default_factory is list and stubbed["s"] == {stubs[0]}
    assert data["x"][0] is t and lists["k"] == [t]
    assert manager.extract_stubs(stubbed) == [stubs[k] for k in (0, 1, 0, 1, 0, 0)]
    assert serialization.uncompress_from_string(serialization.compress_to_string(stubs)) == stubs
    new = [torch.zeros(2), torch.zeros(3)]
    back = manager.deserialize(stubbed, new)
    assert back["x"][0] is new[0] and back["x"][1] == (new[1], new[0]) and back["z"].loss is t and type(back) is collections.OrderedDict
    assert back["d"]["k"][0] is new[0] and back["d"]["new"] == [] and back["s"] == {new[0]} and back["y"].b is new[1]
    assert len(manager.serialize(data, return_stub_list=False)) == 2
    lists["k"].append(lists)
    with pytest.raises(RuntimeError, match="a defaultdict contains itself: serialize takes data that end; leave the inner one out"):
        manager.serialize(data)
    assert serialization.is_instance_namedtuple(Pair(1, 2)) and not serialization.is_instance_namedtuple((1, 2))


def test_find_loss() -> None:
    loss, other = torch.ones(1), torch.zeros(1)
    find = serialization.find_loss_from_output_and_spec
    assert find(loss, True) is loss and find(loss, False) is None
    assert find((other, {"a": other, "loss": loss}), (False, {"a": False, "loss": True})) is loss
    assert find([(other, other), loss], [(False, False), True]) is loss
    for output, spec, text in (
        (1, True, "this is no tensor: 1"),
        ((loss,), (True, False), "of type tuple does not match the loss specification"),
        ({"a": loss}, {"b": True}, "of type dict does not match"),
        ((loss,), (False,), "does not say where the loss is"),
        (loss, "loss", "consists of dicts, lists, tuples, True and False, got str"),
    ):
        with pytest.raises(RuntimeError, match=text):
            find(output, spec)

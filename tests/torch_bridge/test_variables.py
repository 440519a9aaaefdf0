"""The table of environment variables: values, errors, warnings, and what each honoured one does."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.distributed.xla_multiprocessing as xmp
from torch import nn

from tests.torch_bridge.devices import python, same
from torch_bridge import metrics
from torch_bridge.config import compiler_flags, environment, variables
from torch_bridge.config.settings import SETTINGS
from torch_bridge.config.variables import ACCEPT, HONOUR, VARIABLES, WARN
from torch_bridge.device import debug_modes
from torch_bridge.device.startup import dispatch, tensor
from torch_bridge.mesh import world
from torch_bridge.recorder import expected_indices
from torch_bridge.runtime import executor, session

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("clean_step")


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`configured(NAME="1", ...)` applies variables as at the first xla tensor; undone after the test."""
    for field in dataclasses.fields(SETTINGS):
        monkeypatch.setattr(SETTINGS, field.name, getattr(SETTINGS, field.name))
    monkeypatch.setattr(session, "CHECKS", [])
    monkeypatch.setattr(session.current(), "observers", ())
    monkeypatch.setattr(expected_indices, "_expect", None)
    executor.clear_cache()

    def apply(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tensor, "dispatch", debug_modes.configure(environment.check(), dispatch.dispatch))

    yield apply
    monkeypatch.undo()
    executor.clear_cache()


# -- the table ------------------------------------------------------------------------------------


def test_rows_are_complete() -> None:
    assert len(VARIABLES) == sum(map(len, variables.SECTIONS.values())) > 90
    assert {v.rule for v in VARIABLES.values()} == {HONOUR, ACCEPT, WARN}
    for v in VARIABLES.values():
        assert v.meaning and (v.rule != HONOUR or v.where or v.kind), v.name


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    assert page == variables.page(), "run python -m torch_bridge.config.variables > docs/reference/environment.md"


MALFORMED = [
    ("NEURON_RT_NUM_CORES", "many", "a whole number of at least 0"),
    ("NEURON_RT_VISIBLE_CORES", "0,2", "without gaps, such as 3, 0-3 or 3,4,5"),
    ("NEURON_RT_VISIBLE_CORES", "3-1", "without gaps"),
    ("NEURON_LOGICAL_NC_CONFIG", "4", "one of 1, 2"),
    ("NEURON_RT_VIRTUAL_CORE_SIZE", "x", "one of 1, 2"),
    ("NEURON_PLATFORM_TARGET_OVERRIDE", "tpu", "one of inf2, trn1, trn1n, trn2"),
    ("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3", "one of inf2, trn1, trn1n, trn2"),
    ("NEURON_PJRT_PROCESSES_NUM_DEVICES", "32,0", "such as 32 or 32,32"),
    ("NEURON_PJRT_PROCESSES_NUM_DEVICES", "32;32", "such as 32 or 32,32"),
    ("NEURON_PJRT_PROCESS_INDEX", "first", "a whole number of at least 0"),
    ("NEURONCORE_NUM_DEVICES", "0", "a whole number of at least 1"),
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "2", "0 or 1"),
    ("NEURON_RT_STOCHASTIC_ROUNDING_SEED", "-1", "a whole number of at least 0"),
    ("XLA_USE_BF16", "bf16", "0 or 1"),
    ("XLA_DOWNCAST_BF16", "bf16", "0 or 1"),
    ("XLA_USE_32BIT_LONG", "int32", "0 or 1"),
    ("XLA_USE_SPMD", "maybe", "0 or 1"),
    ("NEURON_NUM_RECENT_MODELS_TO_KEEP", "0", "a whole number of at least 1"),
    ("NEURON_EXTRACT_GRAPHS_ONLY", "maybe", "0 or 1"),
    ("XLA_ENABLE_PARAM_ALIASING", "maybe", "0 or 1"),
    ("XLA_DUMP_POST_OPTIMIZATIONS", "all", "0 or 1"),
    ("NEURON_FRAMEWORK_DEBUG", "hlo", "0 or 1"),
    ("NEURON_USE_EAGER_DEBUG_MODE", "maybe", "0 or 1"),
    ("NEURON_LAUNCH_BLOCKING", "maybe", "0 or 1"),
    ("NEURON_FAIL_ON_NAN", "maybe", "0 or 1"),
    ("NXD_JAX_CHECK_INDICES", "all", "0 or 1"),
    ("NXD_JAX_VERIFY", "all", "0 or 1"),
    ("NEURON_RT_NUMERICAL_ERRORS_VERBOSITY", "loud", "one of none, critical"),
    ("NEURON_RT_LOG_LEVEL", "LOUD", "one of ERROR, WARN"),
    ("NXD_CPU_MODE", "yes", "a whole number"),
    ("NEURON_PARALLEL_COMPILE_DUMP_RESULTS", "maybe", "0 or 1"),
    ("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE", "maybe", "0 or 1"),
    ("NXD_JAX_EXECUTABLES", "maybe", "0 or 1"),
    ("NXD_JAX_KEEP_FREED_MEMORY", "some", "0 or 1"),
    ("NXD_JAX_FUSED_OPTIMIZERS", "maybe", "0 or 1"),
    ("NXD_JAX_INDEPENDENT_DRAWS", "maybe", "0 or 1"),
    ("NXD_JAX_FOLD", "many", "a whole number of at least 0"),
    ("NXD_JAX_COLD_SHAPES", "many", "0 or 1"),
    ("NXD_JAX_SPECULATE", "many", "a whole number of at least 0"),
    ("NXD_JAX_TORCH_KERNELS", "maybe", "0 or 1"),
    ("NXD_JAX_REPLAY", "maybe", "0, 1 .* auto or all"),
    ("NXD_JAX_COMPILE_WORKERS", "0", "a whole number of at least 1"),
    ("NXD_JAX_TOP", "maybe", "0 or 1"),
    ("NXD_JAX_CHECKPOINT_CHECKSUMS", "some", "0 or 1"),
    ("NXD_JAX_CHECKPOINT_FORMAT", "orbax", "one of nxd, original"),
    ("NXD_JAX_FP8_MAX", "300", "one of 240, 448"),
    ("NXD_JAX_PEER_TIMEOUT", "1", "a whole number of at least 5"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), MALFORMED)
def test_malformed_values_raise(monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}': must be .*{allowed}"):
        environment.check()


def test_every_kind_of_value_has_a_malformed_one() -> None:
    assert {v.name for v in VARIABLES.values() if v.kind} == {name for name, _, _ in MALFORMED}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("NEURON_RT_NUM_CORES", "32", 32),
        ("NEURON_RT_VISIBLE_CORES", "3-5, 6", (3, 4, 5, 6)),
        ("NEURON_RT_VISIBLE_CORES", "3", (3,)),
        ("NEURON_PJRT_PROCESSES_NUM_DEVICES", "32, 16", (32, 16)),
        ("NEURON_FAIL_ON_NAN", "TRUE", True),
        ("NEURON_FAIL_ON_NAN", " 0 ", False),
        ("NEURON_RT_LOG_LEVEL", "info", "INFO"),
        ("NEURON_LOGICAL_NC_CONFIG", "", None),
        ("NEURON_COMPILE_CACHE_URL", "/tmp/x", "/tmp/x"),
    ],
)
def test_values(name: str, text: str, value: Any) -> None:
    assert VARIABLES[name].parse(text) == value


def test_accepted_variables_take_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for v in VARIABLES.values():
        if v.rule == ACCEPT:
            monkeypatch.setenv(v.name, "anything")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = environment.check()
    assert values["NEURON_FUSE_SOFTMAX"] == "anything"


def test_unknown_names_give_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_FAIL_ON_NANS", "1")
    monkeypatch.setenv("NEURON_WHATEVER_THIS_IS", "1")
    with pytest.warns(
        UserWarning, match=r"NEURON_FAIL_ON_NANS \(did you mean NEURON_FAIL_ON_NAN\?\), NEURON_WHATEVER.*docs/reference/environment.md"
    ) as found:
        environment.check()
    assert len(found) == 1


def test_32_bit_long_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_USE_32BIT_LONG", "1")
    with pytest.warns(UserWarning, match="XLA_USE_32BIT_LONG=1 has no effect: .*they stay int64"):
        environment.check()
    assert torch.ones(2, dtype=torch.int64, device="xla").add(1).dtype == torch.int64
    monkeypatch.setenv("XLA_USE_32BIT_LONG", "0")
    environment.check()


# -- NEURON_CC_FLAGS ------------------------------------------------------------------------------


def test_flags_in_every_spelling() -> None:
    text = "--auto-cast=matmult --auto-cast-type bf16 -O2 -lnc=2 --cache_dir '/tmp/a b' --no_cache --model-type=transformer --verbose 35"
    assert compiler_flags.parse(text + " --internal-any-thing=3 --tensorizer-options='--x --y'") == {
        "--auto-cast": "matmult",
        "--auto-cast-type": "bf16",
        "--optlevel": "2",
        "--lnc": "2",
        "--cache_dir": "/tmp/a b",
        "--no_cache": True,
        "--model-type": "transformer",
        "--verbose": "35",
        "--tensorizer-options": "--x --y",
    }
    assert compiler_flags.parse("-O 3") == compiler_flags.parse("--optlevel=3") == {"--optlevel": "3"}
    assert compiler_flags.parse("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--auto-cast=some", "--auto-cast=some must be one of none, matmult, all"),
        ("--auto-cast-type=int8", "--auto-cast-type=int8 must be one of bf16, fp16, tf32, fp8_e4m3"),
        ("--auto-cast", "--auto-cast needs a value, one of none, matmult, all"),
        ("--cache_dir --no_cache", "--cache_dir needs a value, but --no_cache follows"),
        ("--cache_dir=", "--cache_dir needs a value"),
        ("-lnc 3", "-lnc=3 must be one of 1, 2"),
        ("--cache_dir='/tmp", "cannot be split into flags: No closing quotation"),
    ],
)
def test_malformed_flags_raise(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"NEURON_CC_FLAGS.*{message}"):
        compiler_flags.parse(text)


def test_doubtful_flags_warn() -> None:
    compiler_flags.parse.cache_clear()
    with pytest.warns(
        UserWarning, match=r"unknown flag --auto-casts \(did you mean --auto-cast\?\); unknown flag --zzz. They have no effect"
    ):
        assert compiler_flags.parse("--auto-casts=all --zzz") == {}
    with pytest.warns(UserWarning, match="--model-type=huge is not one of generic"):
        assert compiler_flags.parse("--model-type=huge") == {"--model-type": "huge"}


def test_lnc_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--lnc=2")
    environment.check()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    with pytest.raises(ValueError, match="--lnc=2 disagrees with NEURON_LOGICAL_NC_CONFIG=1"):
        environment.check()
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")
    monkeypatch.setenv("NEURON_RT_VIRTUAL_CORE_SIZE", "1")
    with pytest.raises(ValueError, match="--lnc=2 disagrees with NEURON_RT_VIRTUAL_CORE_SIZE=1"):
        environment.check()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    with pytest.raises(ValueError, match="NEURON_LOGICAL_NC_CONFIG=2 and NEURON_RT_VIRTUAL_CORE_SIZE=1 disagree; .* unset the older"):
        environment.check()


# -- what honoured variables do -------------------------------------------------------------------

PRECISION = "precision/test_rounding.py", "precision/test_downcast.py", "precision/test_auto_cast.py"
TOPOLOGY, HLO, RUNTIME = "../nxd_jax/topology/test_environment.py", "test_facade_hlo.py", "test_facade_runtime.py"
ANNOTATIONS = "spmd/test_names_of_tests.py"
COMPILE = "../nxd_jax/parallel_compile/test_command.py"
TESTED_IN = {
    "NEURON_RT_NUM_CORES": "test_ranks_of_a_plain_script",
    "NEURON_RT_VISIBLE_CORES": "test_ranks_of_a_plain_script",
    "NEURON_LOGICAL_NC_CONFIG": (TOPOLOGY, "test_lnc"),
    "NEURON_RT_VIRTUAL_CORE_SIZE": (TOPOLOGY, "test_lnc"),
    "NEURON_PLATFORM_TARGET_OVERRIDE": (TOPOLOGY, "test_the_smallest_instance_that_holds_the_cores"),
    "NEURON_PJRT_PROCESSES_NUM_DEVICES": "test_ranks_of_a_plain_script",
    "NEURON_PJRT_PROCESS_INDEX": "test_processes_that_nothing_joins",
    "NEURONCORE_NUM_DEVICES": "test_ranks_of_spawn",
    "PJRT_DEVICE": (RUNTIME, "test_device_type_follows_pjrt_device"),
    "NXD_CPU_MODE": ("../nxd_jax/utils/test_small.py", "test_device_and_cpu_mode"),
    "XLA_USE_SPMD": (ANNOTATIONS, "test_switched_on_by_the_environment"),
    "XLA_DUMP_POST_OPTIMIZATIONS": (ANNOTATIONS, "test_shardings_of_inputs_are_in_the_hlo"),
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": (PRECISION[0], "test_switching_uses_another_program"),
    "NEURON_RT_STOCHASTIC_ROUNDING_SEED": (PRECISION[0], "test_the_seed_decides"),
    "XLA_USE_BF16": (PRECISION[1], "test_what_each_dtype_holds"),
    "XLA_DOWNCAST_BF16": (PRECISION[1], "test_what_each_dtype_holds"),
    "NEURON_CC_FLAGS": (PRECISION[2], "test_a_changed_flag_uses_another_program"),
    "NEURON_COMPILE_CACHE_URL": ("test_compile_cache.py", "test_settings"),
    "NEURON_NUM_RECENT_MODELS_TO_KEEP": "test_number_of_graphs_kept",
    "NEURON_EXTRACT_GRAPHS_ONLY": "test_extract_graphs_only",
    "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": (COMPILE, "test_results_as_json"),
    "NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE": (COMPILE, "test_exit_status_of_the_script"),
    "XLA_ENABLE_PARAM_ALIASING": "test_no_donation",
    "XLA_FLAGS": (HLO, "test_unknown_flags_are_dropped_with_a_warning"),
    "NEURON_FRAMEWORK_DEBUG": (HLO, "test_neuron_framework_debug"),
    "NEURON_DUMP_DIR": (HLO, "test_neuron_framework_debug"),
    "NEURON_USE_EAGER_DEBUG_MODE": "test_eager_debug_mode",
    "NEURON_LAUNCH_BLOCKING": "test_launch_blocking",
    "NEURON_FAIL_ON_NAN": "test_nan_raises",
    "XLA_METRICS_FILE": "test_metrics_of_each_step",
    "NXD_JAX_CHECK_INDICES": ("test_index_checks.py", "test_what_raises_on_the_cpu_raises"),
    "NXD_JAX_VERIFY": ("passes/test_verify.py", "test_the_switch"),
    "NEURON_RT_NUMERICAL_ERRORS_VERBOSITY": "test_nan_raises",
    "NEURON_RT_LOG_LEVEL": "test_log_level",
    "NXD_JAX_INSTANCE": (TOPOLOGY, "test_the_process_environment"),
    "NXD_JAX_NNODES": (TOPOLOGY, "test_the_process_environment"),
    "NXD_JAX_STRICT_RANKS": ("ranks/test_plain_numbers.py", "test_strict"),
    "NXD_JAX_STRICT_REPLICAS": ("ranks/test_replicas.py", "test_strict"),
    "NXD_JAX_EXECUTABLES": ("test_executables.py", "test_it_can_be_turned_off"),
    "NXD_JAX_KEEP_FREED_MEMORY": ("test_freed_memory.py", "test_steps_do_not_ask_for_their_memory_again"),
    "NXD_JAX_COMPILE_WORKERS": ("../nxd_jax/parallel_compile/test_aside.py", "test_how_many_at_a_time"),
    "NXD_JAX_FUSED_OPTIMIZERS": ("test_fused_optimizers.py", "test_switch_and_surroundings"),
    "NXD_JAX_INDEPENDENT_DRAWS": ("ranks/test_random_numbers.py", "test_independent_draws_differ_along_exactly_the_axes_of_the_value"),
    "NXD_JAX_SPECULATE": ("test_speculation.py", "test_one_variable_turns_it_off"),
    "NXD_JAX_COLD_SHAPES": ("test_cold_shapes.py", "test_one_variable_turns_it_off"),
    "NXD_JAX_TORCH_KERNELS": ("test_torch_kernels.py", "test_one_variable_turns_them_off"),
    "NXD_JAX_FOLD": ("test_folding.py", "test_few_layers_are_left_alone"),
    "NXD_JAX_REPLAY": ("../nxd_jax/trainer/test_model.py", "test_replay_by_variable"),
    "NXD_JAX_TOP": ("test_telemetry.py", "test_it_can_be_turned_off"),
    "NXD_JAX_TOP_DIR": ("test_telemetry.py", "test_folders"),
    "NXD_JAX_CHECKPOINT_CHECKSUMS": ("../nxd_jax/checkpoint/test_save_load.py", "test_checksums_can_be_turned_off"),
    "NXD_JAX_CHECKPOINT_FORMAT": ("../nxd_jax/checkpoint/test_saving_original.py", "test_training_goes_on_bit_for_bit"),
    "NXD_JAX_FP8_MAX": ("../nxd_jax/quantization/test_config.py", "test_neurons_float8_goes_up_to_240"),
    "NXD_JAX_PEER_TIMEOUT": ("test_watch.py", "test_the_timeout"),
}
"""The test of what each honoured variable does: a name in this file, or a file and a name."""


def test_every_honoured_variable_has_a_test() -> None:
    assert set(TESTED_IN) == {v.name for v in VARIABLES.values() if v.rule == HONOUR}
    for variable, place in TESTED_IN.items():
        file, test = (pathlib.Path(__file__).name, place) if isinstance(place, str) else place
        text = (pathlib.Path(__file__).parent / file).read_text()
        assert variable in text and f"def {test}(" in text, (variable, file, test)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets variables as they are for a plain `python script.py`, and nothing else that says how many ranks there are."""
    for name in (
        "NXD_JAX_WORLD_SIZE",
        "NXD_JAX_PROCESSES",
        "WORLD_SIZE",
        "RANK",
        "TORCHELASTIC_RUN_ID",
        *(n for n, v in VARIABLES.items() if v.where in ("world", "xla_multiprocessing")),
    ):
        monkeypatch.delenv(name, raising=False)
    return lambda values: [monkeypatch.setenv(name, value) for name, value in values.items()]


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({}, 1),
        ({"NEURON_RT_NUM_CORES": "0"}, 1),
        ({"NEURON_RT_NUM_CORES": "8"}, 8),
        ({"NEURON_RT_VISIBLE_CORES": "4-7"}, 4),
        ({"NEURON_RT_VISIBLE_CORES": "3", "NEURON_RT_NUM_CORES": "8"}, 1),
        ({"NEURON_PJRT_PROCESSES_NUM_DEVICES": "16"}, 16),
        ({"NEURON_PJRT_PROCESSES_NUM_DEVICES": "16", "NEURON_PJRT_PROCESS_INDEX": "0", "NEURON_RT_NUM_CORES": "2"}, 2),
        ({"NEURON_PJRT_PROCESSES_NUM_DEVICES": "16,16", "NEURON_PJRT_PROCESS_INDEX": "1", "WORLD_SIZE": "32", "RANK": "5"}, 32),
    ],
)
def test_ranks_of_a_plain_script(no_launcher: Any, values: dict[str, str], size: int) -> None:
    no_launcher(values)
    found = world.from_environment()
    assert found.size == size
    assert found.hosted == ((5,) if "RANK" in values else tuple(range(size)))


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        (
            {"NEURON_PJRT_PROCESSES_NUM_DEVICES": "16,16"},
            RuntimeError,
            "=16,16 names 2 processes, but nothing joins them: .*32 processes with `torchrun`",
        ),
        (
            {"NEURON_PJRT_PROCESSES_NUM_DEVICES": "16", "NEURON_PJRT_PROCESS_INDEX": "1"},
            ValueError,
            r"NEURON_PJRT_PROCESS_INDEX=1: .* names 1 process\(es\), counted from 0",
        ),
        (
            {"NXD_JAX_WORLD_SIZE": "8", "WORLD_SIZE": "4", "RANK": "1", "TORCHELASTIC_RUN_ID": "none"},
            RuntimeError,
            "NXD_JAX_WORLD_SIZE=8 is set under torchrun: each of its 4 processes would host all 8 ranks and train alone. Unset it",
        ),
        ({"NEURON_RT_NUM_CORES": "-1"}, ValueError, "NEURON_RT_NUM_CORES='-1': must be a whole number of at least 0"),
    ],
)
def test_processes_that_nothing_joins(no_launcher: Any, values: dict[str, str], error: type[Exception], text: str) -> None:
    no_launcher(values)
    with pytest.raises(error, match=text):
        world.from_environment()


def test_ranks_of_spawn(no_launcher: Any) -> None:
    no_launcher({"NEURONCORE_NUM_DEVICES": "4"})
    sizes: list[int] = []
    world.configure(None)
    try:
        xmp.spawn(lambda index: sizes.append(world.size()), args=())
    finally:
        world.configure(None)
    assert sizes == [4]


def test_the_platforms_are_those_that_are_emulated() -> None:
    from torch_neuronx.utils import SUPPORTED_TYPES

    from nxd_jax.topology.environment import FAMILIES

    assert set(variables.PLATFORMS) == set(FAMILIES) == set(SUPPORTED_TYPES)


def train(device: str, steps: int = 3) -> Any:
    """Some AdamW steps: losses and weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        if device == "xla":
            torch_xla.sync()
        losses.append(loss.detach())
    return losses, list(model.parameters())


def test_eager_debug_mode(configured: Any) -> None:
    configured(NEURON_USE_EAGER_DEBUG_MODE="1")
    x = torch.ones(3, device="xla") * 2
    assert not x._storage.pending and not dispatch.STATE.session.current.nodes
    y = torch.zeros(2, 3, device="xla")
    y[1].add_(x)
    assert not y._storage.pending and y.tolist() == [[0, 0, 0], [2, 2, 2]]
    before = metrics.EXECUTE_TIME.count
    same(train)
    assert metrics.EXECUTE_TIME.count > before + 30


def test_launch_blocking(configured: Any) -> None:
    configured(NEURON_LAUNCH_BLOCKING="1")
    same(train)
    assert not session.current().in_flight


def test_number_of_graphs_kept(configured: Any) -> None:
    configured(NEURON_NUM_RECENT_MODELS_TO_KEEP="2")

    def run(*sizes: int) -> int:
        before = metrics.COMPILE_TIME.count
        for n in sizes:
            assert (torch.ones(n, device="xla") * 2 + n).sum().item() == n * (2 + n)
        return metrics.COMPILE_TIME.count - before

    run(3)
    each = run(4)
    assert run(4, 4, 4) == 0 and len(session.current().traces) <= 2
    assert run(5, 6, 7) == 3 * each and len(session.current().traces) <= 2
    assert run(4) == each, "the graph for 4 was let go of"


def test_hot_graphs_are_kept(configured: Any) -> None:
    configured(NEURON_NUM_RECENT_MODELS_TO_KEEP="2")

    def step(n: int) -> None:
        torch.arange(n, device="xla").sum().add_(1)
        torch_xla.sync()
        x = torch.ones(n, device="xla") * 3
        torch_xla.sync()
        del x

    step(4)
    programs = list(session.current().traces.values())
    assert len(programs) <= 2
    for n in (4, 4, 4):
        step(n)
    assert list(session.current().traces.values()) == programs


def test_no_donation(configured: Any) -> None:
    configured(XLA_ENABLE_PARAM_ALIASING="0")
    same(train)
    assert not any(p.spec.ports.donated for p in session.current().recent)
    configured(XLA_ENABLE_PARAM_ALIASING="1", NXD_JAX_SPECULATE="0")
    executor.clear_cache()
    same(train)
    assert any(p.spec.ports.donated for p in session.current().recent)


def test_extract_graphs_only(configured: Any) -> None:
    configured(NEURON_EXTRACT_GRAPHS_ONLY="1")
    before = metrics.COMPILE_TIME.count
    losses, weights = train("xla")
    assert metrics.COMPILE_TIME.count > before
    assert all(not t.any() for t in losses) and all(not w.any() for w in weights)
    assert weights[0].shape == (4, 3) and weights[0].dtype == torch.float32
    x = torch.arange(6, device="xla").view(2, 3) + 1
    assert x.dtype == torch.int64 and x.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_metrics_of_each_step(configured: Any, tmp_path: pathlib.Path) -> None:
    configured(XLA_METRICS_FILE=str(tmp_path / "metrics"))
    for count in (1, 2):
        (torch.ones(2, device="xla") + 1).sum()
        torch_xla.sync()
        assert (tmp_path / "metrics").read_text().count("Counter: MarkStep\n") == count


@pytest.mark.parametrize("name", ["NEURON_FAIL_ON_NAN", "NEURON_RT_NUMERICAL_ERRORS_VERBOSITY"])
def test_nan_raises(configured: Any, name: str) -> None:
    configured(**{name: "1" if name == "NEURON_FAIL_ON_NAN" else "critical"})
    same(train)
    x = torch.zeros(2, 3, device="xla")
    y = x.log() * x
    z = y + 1
    inf = x.log()
    with pytest.raises(
        FloatingPointError,
        match=r"NaN in 2 of \d results.*first is float32\[2, 3\], from aten.mul.Tensor at .*test_variables.py:\d+ in test_nan_raises",
    ):
        torch_xla.sync()
    assert z.isnan().all().item() and inf[0, 0].item() == -torch.inf, "infinities are no error; tensors keep their values"


def test_nan_names_the_parameter(configured: Any) -> None:
    configured(NEURON_FAIL_ON_NAN="1")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to("xla")
    torch_xla.sync()
    with torch.no_grad():
        model[1].weight.sub_(torch.tensor(float("nan"), device="xla"))
    with pytest.raises(FloatingPointError, match=r"first is parameter 1\.weight, float32\[2, 4\], from aten.sub"):
        torch_xla.sync()


def test_nan_in_a_gradient_is_named(configured: Any) -> None:
    configured(NEURON_FAIL_ON_NAN="1")
    model = nn.Linear(3, 1, bias=False).to("xla")
    with torch.no_grad():
        model.weight.zero_()
    torch_xla.sync()
    (model(torch.ones(1, 3, device="xla")).sqrt() * 0).sum().backward()
    with pytest.raises(FloatingPointError, match=r"gradient of parameter weight, float32\[1, 3\]"):
        torch_xla.sync()


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("torch_bridge")
    level, handlers = found.level, list(found.handlers)
    yield found
    found.setLevel(level)
    found.handlers[:] = handlers


@pytest.mark.parametrize(
    ("text", "level"), [("debug", logging.DEBUG), ("TRACE", logging.DEBUG), ("WARN", logging.WARNING), ("ERROR", logging.ERROR)]
)
def test_log_level(monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, text: str, level: int) -> None:
    monkeypatch.setenv("NEURON_RT_LOG_LEVEL", text)
    environment.check()
    assert logger.level == level


def test_a_script_sets_them_before_its_first_tensor(tmp_path: pathlib.Path) -> None:
    """All at once in a fresh process, set after the imports; then a value that is not allowed, twice."""
    out = python(
        """
import os, torch, torch_xla
os.environ.update(NEURON_FAIL_ON_NAN="1", NEURON_RT_LOG_LEVEL="DEBUG", NEURON_USE_EAGER_DEBUG_MODE="maybe")
for _ in range(2):
    try:
        torch.ones(2, device="xla")
    except ValueError as error:
        print(error)
os.environ["NEURON_USE_EAGER_DEBUG_MODE"] = "1"
x = torch.zeros(2, device="xla")
try:
    x / x
except FloatingPointError as error:
    print(error)
"""
    )
    lines = out.splitlines()
    assert lines[0] == lines[1] and "NEURON_USE_EAGER_DEBUG_MODE='maybe': must be 0 or 1" in lines[0]
    assert "from aten.div.Tensor at <string>:12" in lines[2]

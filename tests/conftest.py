"""Tests run on the CPU unless JAX_PLATFORMS says otherwise, and keep compiled programs in `.cache/jax` between runs."""

from __future__ import annotations

import importlib.util
import logging
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import pytest

from tests import durations, quick, tiers

_ROOT = pathlib.Path(__file__).parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("NXD_JAX_VERIFY", "1")  # every pass is checked, in the processes that tests start too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads spin while they wait: on tiny tensors, beside other workers, only that

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell script: tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "64")  # worlds of up to 64 ranks; a world of one uses the first

if importlib.util.find_spec("torch_xla") is None:  # not installed: `torch_xla` and the like are found in the checkout
    sys.path.append(str(_ROOT / "aliases"))

LOGGERS = ("nxd_jax", "torch_bridge")

QUICK = (
    "nxd_jax/",
    "benchmarks/test_zoo_jax.py",
    "models/",
    "torch_bridge/fsdp/",
    "torch_bridge/generation/",
    "torch_bridge/lowerings/test_attention.py",
    "torch_bridge/lowerings/test_batch_norm.py",
    "torch_bridge/lowerings/test_convolution.py",
    "torch_bridge/lowerings/test_ctc.py",
    "torch_bridge/lowerings/test_embedding_bag.py",
    "torch_bridge/lowerings/test_grid_sampler.py",
    "torch_bridge/lowerings/test_grouped_",
    "torch_bridge/lowerings/test_linalg.py",
    "torch_bridge/lowerings/test_linear_cross_entropy.py",
    "torch_bridge/lowerings/test_losses.py",
    "torch_bridge/lowerings/test_optimizers.py",
    "torch_bridge/lowerings/test_pooling.py",
    "torch_bridge/lowerings/test_random.py",
    "torch_bridge/lowerings/test_scatter.py",
    "torch_bridge/ranks/",
    "torch_bridge/replay_programs/",
    "torch_bridge/spmd/",
    "torch_bridge/test_capture.py",
    "torch_bridge/test_cut_segments.py",
    "torch_bridge/test_facade_",
    "torch_bridge/test_folding.py",
    "torch_bridge/test_func.py",
    "torch_bridge/test_fused_optimizers.py",
    "torch_bridge/test_guarantees.py",
    "torch_bridge/test_packed_sequences.py",
    "torch_bridge/test_places.py",
    "torch_bridge/test_programming_guide.py",
    "torch_bridge/test_random_distributions.py",
    "torch_bridge/test_random_programs.py",
    "torch_bridge/test_random_state.py",
    "torch_bridge/test_recurrent_layers.py",
    "torch_bridge/test_replay",
    "torch_bridge/test_session.py",
    "torch_bridge/test_time_loops.py",
    "torch_bridge/test_to_optax",
)
"""How names of files begin that spend most of their time in LLVM and compare with a reference within a tolerance: compiled as `tests/quick.py` says, in
two thirds of the time. Not here: special values, precision or memory, and processes that tests start without `quick.environment()`: those programs are
compiled as users' are. `JAX_DISABLE_MOST_OPTIMIZATIONS=0` compiles everything so."""

OLDER_EMITTERS = (
    "nxd_jax/",
    "torch_bridge/fsdp/",
    "torch_bridge/generation/",
    "torch_bridge/lowerings/test_grouped_mlp.py",
    "torch_bridge/lowerings/test_linalg.py",
    "torch_bridge/lowerings/test_optimizers.py",
    "torch_bridge/ranks/",
    "torch_bridge/replay_programs/",
    "torch_bridge/spmd/",
    "torch_bridge/test_capture.py",
    "torch_bridge/test_cut_segments.py",
    "torch_bridge/test_func.py",
    "torch_bridge/test_guarantees.py",
    "torch_bridge/test_packed_sequences.py",
    "torch_bridge/test_places.py",
    "torch_bridge/test_programming_guide.py",
    "torch_bridge/test_random_state.py",
    "torch_bridge/test_session.py",
    "torch_bridge/test_to_optax",
)
"""Those of `QUICK` that XLA's older emitters compile, in half of the time: a test there may not ask two programs for the same bits."""

AS_USERS = (
    "nxd_jax/abstract/",
    "nxd_jax/inspect/",
    "nxd_jax/test_floors.py",
    "nxd_jax/trainer/test_footprint.py",
)
"""What is compiled as users' programs are all the same."""


@pytest.fixture
def empty_jax_cache(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """JAX keeps programs in this folder: all that the test runs is compiled, whatever earlier runs of the tests have kept."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before, folder = jax.config.jax_compilation_cache_dir, tmp_path / "jax_cache"  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()
    yield folder
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all`: `make test-all`. `--tier`: `make test`, `make test-deep`, `make test-processes`. `--share`: `.ci/run`."""
    parser.addoption("--all", action="store_true", help="also run what is marked thorough: more cases of what the other tests test")
    parser.addoption(
        "--tier", choices=(*tiers.TIERS, "all"), default="all", help="run the tests of this tier (tests/tiers.py; default: all)"
    )
    parser.addoption(
        "--share", type=tiers.share_of, metavar="K/N", help="of files that take long, only those of the K-th of N shares (K from 0)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Runs that are written down (`--junitxml`) say what they took of the processor."""
    if config.getoption("xmlpath", None):
        config.pluginmanager.register(durations.CpuTime())


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Files without a test of the tier that is asked for need not be imported."""
    if not collection_path.is_relative_to(tiers.TESTS):
        return None
    place = collection_path.relative_to(tiers.TESTS).as_posix()
    return True if not {"all", *tiers.tiers_in(place)} & {config.getoption("--tier")} else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other tiers, and what is marked thorough unless it is asked for with --all or by name. Workers start with the files that take longest."""
    everything = config.getoption("--all") or any("::" in argument for argument in config.args)
    selection = tiers.Selection(items, durations.known())
    chosen = [item for item in items if selection.runs(item, everything, config.getoption("--tier"))]
    if (share := config.getoption("--share")) is not None:
        chosen = [item for item in chosen if selection.in_share(item, *share)]
    left_out = set(items) - set(chosen)
    if hasattr(config, "workerinput"):
        chosen = durations.longest_first(chosen)
    items[:] = chosen
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(autouse=True)
def switched_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test is about stays on when all tests run without it (`NXD_JAX_FUSED_OPTIMIZERS=0 make test`)."""
    for mark in request.node.iter_markers("switched_on"):
        for variable in mark.args:
            monkeypatch.delenv(variable, raising=False)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Most optimizations are off while the tests of a file of `QUICK` run in this process."""
    place = request.path.relative_to(tiers.TESTS).as_posix()
    if quick.VARIABLE in os.environ or not place.startswith(QUICK) or place.startswith(AS_USERS):
        yield
        return
    with quick.compiling(older_emitters=place.startswith(OLDER_EMITTERS)):
        yield


@pytest.fixture
def clean_step() -> Iterator[None]:
    """Nothing recorded before the test and no step closures left after it."""
    from torch_bridge.runtime import executor, session

    executor.sync()
    yield
    session.current().closures.clear()
    executor.sync()


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """Loggers have their levels of before, whatever a command or an experiment of the test set; log files of experiments are closed."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    if "nxd_jax.training.utils.experiment_logs" in sys.modules:
        sys.modules["nxd_jax.training.utils.experiment_logs"].close_log_files()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Each test draws the same numbers, whichever tests ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    """A file does not find the groups of ranks of the one before it."""
    yield
    state = sys.modules.get("nxd_jax.parallel_layers.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        import torch.distributed as dist

        from torch_bridge.mesh import world

        state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        world.configure(None)


@pytest.fixture(autouse=True, scope="module")
def bounded_memory() -> Iterator[None]:
    """Executables pile up over thousands of tests: forget them after each file."""
    yield
    if "jax" in sys.modules:
        import jax

        if "torch_bridge.runtime.executor" in sys.modules:
            sys.modules["torch_bridge.runtime.executor"].clear_cache()
        jax.clear_caches()

"""HLO that XLA_FLAGS, NEURON_FRAMEWORK_DEBUG and the API write is the same program."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]

SCRIPT = """
    import pathlib, sys
    import torch, torch_xla, torch_bridge
    import torch_xla.core.xla_model as xm
    from nxd_jax import inspect
    from torch_bridge import metrics
    from torch_bridge.runtime import executor

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for number in range(3):
        model(torch.ones(3, 4).to("xla")).square().mean().backward()
        xm.optimizer_step(optimizer)
        optimizer.zero_grad()
        torch_xla.sync()
        if number == 1:
            out = pathlib.Path("api")
            inspect.look().dump(out)
            (out / "bridge.mlir").write_text(torch_bridge.hlo())
            (out / "bridge.txt").write_text(torch_bridge.hlo(stage="optimized"))
            executor.clear_cache()  # the third step is compiled again, though the cache on disk has it: else XLA would dump nothing
    print(metrics.COUNTERS.get("PersistentCacheHit", 0), metrics.COUNTERS["PersistentCacheMiss"], len(inspect.look().collectives))
"""


def normal(text: str) -> list[str]:
    """The lines of optimized HLO. The keys of a `backend_config`, which are JSON, stand in another order in every print: they are sorted."""
    mark, lines = "backend_config=", []
    for line in text.strip().splitlines():
        head, found, rest = line.partition(mark)
        if found:
            config, end = json.JSONDecoder().raw_decode(rest)
            line = f"{head}{mark}{json.dumps(config, sort_keys=True)}{rest[end:]}"
        lines.append(line.rstrip())
    return lines


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder where a script of two steps on two ranks wrote everything there is to write: `xla`, `neuron`, `api`."""
    folder = tmp_path_factory.mktemp("dumps")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": f"--xla_dump_to={folder / 'xla'} --xla_dump_hlo_as_text",
        "NEURON_FRAMEWORK_DEBUG": "1",
        "NEURON_DUMP_DIR": str(folder / "neuron"),
        "NEURON_COMPILE_CACHE_URL": str(folder / "cache"),
        "NEURON_RT_NUM_CORES": "2",
        "JAX_NUM_CPU_DEVICES": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stdout)
    return folder


def test_the_optimized_program_is_the_same_in_all(dumps: pathlib.Path) -> None:
    (ours,) = (dumps / "api").glob("MODULE_*")
    optimized = (ours / "optimized_hlo.txt").read_text()
    assert "all-reduce" in optimized and 'op_name="jit(' in optimized
    assert (dumps / "neuron" / ours.name / "optimized_hlo.txt").read_text() == optimized
    head, _, rest = (dumps / "api" / "bridge.txt").read_text().partition("\n")
    assert head.startswith("// graph 1 of 1: ") and rest == optimized
    written = sorted((dumps / "xla").glob("module_*.cpu_after_optimizations.txt"))
    assert len(written) == 2, "the step, compiled twice"
    for path in written:
        assert normal(path.read_text()) == normal(optimized)


def test_the_stablehlo_is_the_same(dumps: pathlib.Path) -> None:
    (ours,) = (dumps / "api").glob("MODULE_*")
    for name in ("stablehlo.mlir", "graph.txt"):
        assert (dumps / "neuron" / ours.name / name).read_text() == (ours / name).read_text()
    assert (dumps / "api" / "bridge.mlir").read_text().partition("\n")[2] == (ours / "stablehlo.mlir").read_text()
    assert [p.name for p in (dumps / "neuron").iterdir()] == [ours.name], "the program of the second compilation is the first one's"


def test_caches_are_written_and_not_read_while_dumping(dumps: pathlib.Path) -> None:
    assert (dumps / "said").read_text().split() == ["0", "2", "1"], "no hits, two misses (one row of collectives)"
    assert list((dumps / "cache").glob("*-cache"))


def test_normal_form() -> None:
    one, other = (
        'x = f32[] fusion(), backend_config={"b":{"d":1,"c":2},"a":[]}, more',
        'x = f32[] fusion(), backend_config={"a":[],"b":{"c":2,"d":1}}, more',
    )
    assert normal(one) == normal(other) != normal(one.replace("2", "3"))

"""Scripts that read their rank from the environment, which one process for several ranks has once."""

from __future__ import annotations

import argparse
import linecache
import os
import pathlib
import sys
import types
import warnings
from typing import Any

import pytest

from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers
from torch_bridge.script import rank_environment, rank_syntax

READS = {
    "get": ("rank = int(os.environ.get('RANK', 0))\nstart(rank)", "RANK", "xm.get_ordinal"),
    "getenv": ("start(int(os.getenv('LOCAL_RANK', '0')))", "LOCAL_RANK", "xr.local_ordinal"),
    "subscript": ("size = int(environ['WORLD_SIZE']) if 'WORLD_SIZE' in environ else 1", "WORLD_SIZE", "xr.world_size"),
    "a name of its own": ("start(int(os.environ.get('MY_RANK', 0)))", "MY_RANK", "torch.distributed"),
    "another launcher's": ("start(int(os.environ.get('OMPI_COMM_WORLD_RANK', 0)))", "OMPI_COMM_WORLD_RANK", "torch.distributed"),
    "SLURM's": ("start(int(os.environ.get('SLURM_PROCID', 0)))", "SLURM_PROCID", "torch.distributed"),
    "a branch that is taken": ("if args.backend == 'xla': start(int(os.environ.get('RANK', 0)))", "RANK", "xm.get_ordinal"),
    "a branch that may be": ("if start(args.gpu) or args.gpu: start(int(os.environ.get('RANK', 0)))", "RANK", "xm.get_ordinal"),
    "a test that nobody knows": ("if unknown: start(int(os.environ.get('RANK', 0)))", "RANK", "xm.get_ordinal"),
    "a flag that changes": ("GPU = False; GPU = start(1); start(int(os.environ.get('RANK', 0)) if GPU else 0)", "RANK", "xm.get_ordinal"),
    "a flag in a loop": ("for GPU in start(2): start(int(os.environ.get('RANK', 0)) if GPU else 0)", "RANK", "xm.get_ordinal"),
    "a function that does not run": (
        "def f(args): return args.gpu and 1 if args.gpu else int(os.environ.get('RANK', 0))",
        "RANK",
        "xm.get_ordinal",
    ),
    "compared and given": ("rank = int(os.environ.get('RANK', 0))\nif rank == 0: start(rank)", "RANK", "xm.get_ordinal"),
}
SILENT = {
    "a branch": "if int(os.environ.get('RANK', 0)) == 0:\n    print('first')",
    "a name in a branch": "rank = int(os.environ.get('RANK', 0))\nif not rank: print(f'rank {rank}')",
    "printed": "print(os.environ.get('RANK'))",
    "another variable": "rank = int(os.environ.get('SEED', 0))\nstart(rank)",
    "a rank of weights": "start(int(os.environ.get('LORA_RANK', 8)))",
    "a rank of machines": "start(int(os.environ.get('NODE_RANK', 0)))",
    "another dict": "start(table.get('RANK', 0))",
    "written": "os.environ['RANK'] = '0'",
    "a branch that is not taken": "if args.backend == 'nccl':\n    start(int(os.environ['LOCAL_RANK']))",
    "another branch": "if not args.gpu and start(1):\n    pass\nelif args.gpu or args.backend != 'xla':\n    start(int(os.environ['RANK']))",
    "what is left out": "rank = start(0) if not args.gpu else int(os.environ['RANK'])",
    "without CUDA": "if torch.cuda.is_available(): start(int(os.environ.get('LOCAL_RANK', 0)))",
    "a flag and a function": "if GPU and start(1): start(int(os.environ['RANK']))",
}


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MY_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def _look(script: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, last: bool = True) -> None:
    file = folder / "script.py"
    file.write_text(f"import os\n{script}\n")
    linecache.checkcache(str(file))
    rank_syntax.tree.cache_clear()
    main = types.ModuleType("__main__")
    main.__file__ = str(file)
    vars(main).update(args=argparse.Namespace(backend="xla", gpu=False), GPU=False)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(rank_environment, "_looked_at", set())
    monkeypatch.setattr(rank_environment, "_said", set())
    rank_environment.note()
    if last:
        rank_environment.note(last=True)


@pytest.mark.parametrize("name", READS)
def test_reads(name: str, hosted: Hosted, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted(4)
    script, variable, instead = READS[name]
    with pytest.warns(
        UserWarning, match=rf"script.py:2 reads {variable} from the environment .*for 4 ranks.*Use {instead}.*torchrun"
    ) as caught:
        _look(script, tmp_path, monkeypatch)
    assert len(caught) == 1
    monkeypatch.setenv("NXD_JAX_STRICT_RANKS", "1")
    with pytest.raises(rank_numbers.RankError, match="reads"):
        _look(script, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", SILENT)
def test_silent(name: str, hosted: Hosted, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _look(SILENT[name], tmp_path, monkeypatch)


def test_not_where_it_is_set_or_each_process_is_one_rank(hosted: Hosted, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = READS["get"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hosted(1)
        _look(script, tmp_path, monkeypatch)
        hosted(4)
        monkeypatch.setenv("RANK", "0")
        _look(script, tmp_path, monkeypatch)


def test_each_file_once_and_modules_that_come_later(hosted: Hosted, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look is when the package is imported, where the script has not imported its own modules yet."""
    hosted(4)
    with pytest.warns(UserWarning, match=r"script.py:2 reads RANK"):
        _look('rank = int(os.environ["RANK"]) + 1', tmp_path, monkeypatch)
    later = types.ModuleType("settings_of_mine")
    later.__file__ = str(tmp_path / "settings_of_mine.py")
    pathlib.Path(later.__file__).write_text('import os\ncount = int(os.environ["WORLD_SIZE"]) * 2\n')
    monkeypatch.setitem(sys.modules, "settings_of_mine", later)
    with pytest.warns(UserWarning, match=r"settings_of_mine.py:2 reads WORLD_SIZE") as caught:
        rank_environment.note()
        rank_environment.note()
    assert len(caught) == 1


def test_a_branch_of_a_function_that_runs(hosted: Hosted, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names have values then: before, when the package is imported, nothing is said."""
    hosted(4)
    script = "def main(gpu, look):\n    look()\n    if gpu:\n        return int(os.environ.get('RANK', 0))"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _look(script, tmp_path, monkeypatch, last=False)
    names: dict[str, Any] = {"os": os}
    exec(compile(f"import os\n{script}\n", str(tmp_path / "script.py"), "exec"), names)
    for gpu, said in ((False, 0), (True, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            names["main"](gpu, lambda: _look(script, tmp_path, monkeypatch))
        assert len(caught) == said

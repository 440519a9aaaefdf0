"""`pytorch_lightning` and `lightning.pytorch` as one: packages that pretend to be Lightning, in processes of their own, and the one installed."""

from __future__ import annotations

import importlib.util
import inspect
import pathlib
import pickle
import subprocess
import sys

import pytest

from nxd_jax.lightning import _one_lightning

ROOT = pathlib.Path(__file__).parents[3]

CORE = """
from {fabric}.seed import seed_everything
from {core}.trainer import Trainer
class Callback: pass
class LightningModule: pass
class LightningDataModule: pass
__version__ = "2.6.6"
"""
TOP = """
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
__version__ = "2.6.6"
"""

START = """
import importlib, importlib.util, pickle, sys, threading, types, warnings
package = types.ModuleType("nxd_jax.lightning")  # without the modules that need the real Lightning
package.__path__ = [sys.argv[1]]
sys.modules["nxd_jax.lightning"] = package
from nxd_jax.lightning._one_lightning import unify
warnings.simplefilter("error")
for name in sys.argv[2:]:
    importlib.import_module(name)
"""

SAME = """
unify()
count = len(sys.meta_path)
unify()
assert len(sys.meta_path) == count
assert importlib.util.find_spec("lightning.pytorch.callbacks") and importlib.util.find_spec("pytorch_lightning.callbacks")
assert importlib.util.find_spec("lightning.pytorch.callbacks.none") is None
import lightning as L
import lightning.pytorch.callbacks
import pytorch_lightning as pl
import pytorch_lightning.callbacks
from lightning.pytorch import Trainer
import lightning.fabric.seed, lightning_fabric.seed
assert L.Trainer is pl.Trainer is Trainer is L.pytorch.Trainer
assert L.LightningModule is pl.LightningModule and L.Callback and L.LightningDataModule and L.Fabric and L.seed_everything and L.__version__
assert lightning.pytorch.callbacks.ModelCheckpoint is pl.callbacks.ModelCheckpoint is L.pytorch.callbacks.ModelCheckpoint
assert lightning.pytorch.callbacks is pytorch_lightning.callbacks is sys.modules["pytorch_lightning.callbacks"]
assert lightning.fabric.seed is lightning_fabric.seed
assert pickle.loads(pickle.dumps(Trainer)) is Trainer
for name in (b"lightning.pytorch", b"pytorch_lightning"):
    assert pickle.loads(b"c" + name + b".trainer\\nTrainer\\n.") is Trainer
    module = sys.modules[name.decode()]
    assert importlib.import_module(module.__name__) is module and module.__spec__.name == module.__name__
files = {}
for module in list(sys.modules.values()):
    if getattr(module, "__file__", None):
        files.setdefault(module.__file__, set()).add(id(module))
assert all(len(ids) == 1 for ids in files.values())
try:
    import lightning.pytorch.none
except ModuleNotFoundError as error:
    assert "lightning.pytorch.none" in str(error)
print(Trainer.__module__)
"""


def write(folder: pathlib.Path, core: str, fabric: str) -> None:
    """Two packages with what the tests import of Lightning's."""
    files = {
        f"{core}/__init__.py": CORE.format(core=core.replace("/", "."), fabric=fabric.replace("/", ".")),
        f"{core}/trainer.py": "class Trainer: pass",
        f"{core}/callbacks/__init__.py": "class ModelCheckpoint: pass",
        f"{fabric}/__init__.py": "class Fabric: pass",
        f"{fabric}/seed.py": "def seed_everything(): pass",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Folders with one package of Lightning each."""
    made = {}
    for package in ("pytorch_lightning", "lightning"):
        made[package] = folder = tmp_path_factory.mktemp(package)
        info = folder / f"{package}-2.6.6.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 2.6.6\n")
    write(made["pytorch_lightning"], "pytorch_lightning", "lightning_fabric")
    write(made["lightning"], "lightning/pytorch", "lightning/fabric")
    (made["lightning"] / "lightning" / "__init__.py").write_text(TOP)
    return made


def run(folders: list[pathlib.Path], code: str, first: tuple[str, ...] = ()) -> str:
    """What a process prints that imports some modules, then runs the code."""
    path = ":".join(map(str, [ROOT, *folders]))
    arguments = [sys.executable, "-S", "-c", START + code, str(ROOT / "nxd_jax" / "lightning"), *first]
    done = subprocess.run(arguments, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("installed", "first", "kept"),
    [
        (["pytorch_lightning"], None, "pytorch_lightning"),
        (["pytorch_lightning"], "pytorch_lightning", "pytorch_lightning"),
        (["lightning"], None, "lightning.pytorch"),
        (["lightning"], "lightning", "lightning.pytorch"),
        (["lightning", "pytorch_lightning"], None, "pytorch_lightning"),
        (["lightning", "pytorch_lightning"], "pytorch_lightning.callbacks", "pytorch_lightning"),
        (["lightning", "pytorch_lightning"], "lightning_fabric", "pytorch_lightning"),
        (["lightning", "pytorch_lightning"], "lightning.pytorch.callbacks", "lightning.pytorch"),
    ],
)
def test_either_name_gives_the_same(sites: dict[str, pathlib.Path], installed: list[str], first: str | None, kept: str) -> None:
    assert run([sites[name] for name in installed], SAME, (first,) if first else ()) == f"{kept}.trainer"


CLASH = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    unify()
    unify()
(warning,) = caught
assert warning.category is RuntimeWarning
import lightning.pytorch.callbacks, pytorch_lightning.callbacks
print(lightning.pytorch.callbacks is pytorch_lightning.callbacks, warning.message)
"""


@pytest.mark.parametrize(
    ("first", "names", "kept", "one"),
    [
        (
            ("lightning", "pytorch_lightning"),
            "lightning.fabric, lightning.pytorch, lightning_fabric, pytorch_lightning",
            "pytorch_lightning",
            False,
        ),
        (("lightning", "lightning_fabric"), "lightning.fabric, lightning.pytorch, lightning_fabric", "lightning.pytorch", True),
    ],
)
def test_both_imported_before(sites: dict[str, pathlib.Path], first: tuple[str, ...], names: str, kept: str, one: bool) -> None:
    """Nothing can be unified that has two sets of classes already: say so, and which Trainer to use."""
    said = run(list(sites.values()), CLASH, first)
    assert said.startswith(f"{one} {names} were imported before neuronx_distributed.lightning: two copies of Lightning")
    assert f"are made from {kept}: use {kept}.Trainer" in said
    assert "import neuronx_distributed.lightning first" in said


def test_nothing_changes_before_it_is_asked_for(sites: dict[str, pathlib.Path]) -> None:
    assert run([sites["pytorch_lightning"]], "print(importlib.util.find_spec('lightning'))") == "None"


def test_threads(sites: dict[str, pathlib.Path]) -> None:
    code = """
found = []
def work(name):
    unify()
    found.append(importlib.import_module(name).ModelCheckpoint)
names = ["lightning.pytorch.callbacks", "pytorch_lightning.callbacks"] * 8
threads = [threading.Thread(target=work, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), len(set(found)), sum(type(f).__name__ == "_Finder" for f in sys.meta_path))
"""
    assert run([sites["pytorch_lightning"]], code) == "16 1 1"


def test_a_folder_named_lightning(sites: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """A script's own `lightning/models.py`, without an `__init__`, stays within reach."""
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "models.py").write_text("size = 3")
    code = "unify()\nimport lightning.models, lightning.pytorch\nprint(lightning.models.size, lightning.Trainer.__module__)"
    assert run([tmp_path, sites["pytorch_lightning"]], code) == "3 pytorch_lightning.trainer"


def test_a_package_of_the_users_named_lightning(sites: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    (tmp_path / "lightning.py").write_text("mine = True")
    assert run([tmp_path, sites["pytorch_lightning"]], "unify()\nimport lightning, pytorch_lightning\nprint(lightning.mine)") == "True"


def test_the_lightning_that_is_installed() -> None:
    _one_lightning.unify()
    import lightning.fabric.utilities.seed
    import lightning.pytorch.callbacks
    import lightning_fabric.utilities.seed
    import pytorch_lightning

    assert importlib.util.find_spec("lightning.pytorch.strategies.xla") is not None
    assert lightning.Trainer is lightning.pytorch.Trainer is pytorch_lightning.Trainer
    assert lightning.pytorch.callbacks.ModelCheckpoint is pytorch_lightning.callbacks.ModelCheckpoint
    assert lightning.fabric.utilities.seed is lightning_fabric.utilities.seed
    assert pickle.loads(pickle.dumps(lightning.Fabric)) is lightning.Fabric
    assert inspect.getsourcefile(lightning.pytorch.Trainer) == pytorch_lightning.trainer.trainer.__file__

"""Which releases of Lightning are let in, by the metadata of packages that pretend to be installed."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from nxd_jax.lightning import _versions

ROOT = pathlib.Path(__file__).parents[3]


def install(folder: pathlib.Path, **versions: str) -> None:
    """Metadata of `pytorch_lightning=...`, `lightning=...` in a folder."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder that is all there is to import from."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_what_the_tests_run_with_is_let_in() -> None:
    _versions.check()
    assert _versions.installed()


@pytest.mark.parametrize("version", ["2.5.0", "2.5.0rc1", "2.5.6", "2.6.0.dev20250901", "2.6.1", "2.6.4", "2.6.6", "2.20", "3.0.0"])
@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning"])
def test_sound_releases(site: pathlib.Path, name: str, version: str) -> None:
    install(site, **{name: version})
    assert _versions.installed() == {name.replace("_", "-"): version}
    _versions.check()


def test_none(site: pathlib.Path) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pytorch-lightning or lightning.*pip install 'nxd-jax\[lightning\]'"):
        _versions.check()


@pytest.mark.parametrize("version", ["2.4.0", "1.9.5", "2"])
def test_too_old(site: pathlib.Path, version: str) -> None:
    install(site, lightning=version)
    with pytest.raises(ImportError, match=rf"lightning {version} is installed; .* needs 2\.5 or later: pip install --upgrade lightning"):
        _versions.check()


@pytest.mark.parametrize(
    "versions", [{"lightning": "2.6.2"}, {"pytorch_lightning": "2.6.3"}, {"pytorch_lightning": "2.6.6", "lightning": "2.6.3.post1"}]
)
def test_malicious(site: pathlib.Path, versions: dict[str, str]) -> None:
    install(site, **versions)
    with pytest.raises(ImportError, match=r"malicious.*GHSA-w37p-236h-pfx3.*pip uninstall.*treat the machine's credentials as stolen"):
        _versions.check()


def test_a_malicious_release_is_not_even_looked_into(tmp_path: pathlib.Path) -> None:
    install(tmp_path, pytorch_lightning="2.6.2", lightning="2.6.6")
    for name in ("lightning", "pytorch_lightning"):
        (tmp_path / f"{name}.py").write_text("print('it runs')")
    script = "import sys, types; package = types.ModuleType('nxd_jax.lightning'); package.__path__ = [sys.argv[1]]\n"
    script += "sys.modules['nxd_jax.lightning'] = package; from nxd_jax.lightning._one_lightning import unify; unify()"
    path = f"{ROOT}:{tmp_path}"
    arguments = [sys.executable, "-S", "-c", script, str(ROOT / "nxd_jax" / "lightning")]
    done = subprocess.run(arguments, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "ImportError: pytorch-lightning 2.6.2 is installed, a malicious release" in done.stderr

"""Files and overrides, by Hydra's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_jax.training.config import loading

TEXT = """
trainer: {devices: 32, max_steps: 10}
model:
  lr: 3e-4
  length: 8
  same: ${.length}
  product: ${multiply:${trainer.devices}, ${model.length}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "conf.yaml"
    found.write_text(TEXT)
    return found


def test_interpolations_and_overrides(file: Path) -> None:
    cfg = loading.load(file, ["trainer.max_steps=3", "+model.new=[1, 2]", "~model.lr"])
    assert loading.plain(cfg) == {
        "trainer": {"devices": 32, "max_steps": 3},
        "model": {"length": 8, "same": 8, "product": 256, "new": [1, 2]},
    }
    assert loading.load(file).model.lr == 3e-4


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["trainer.max_stesp=3"], r"conf.yaml: .*max_stesp.*\+trainer.max_stesp=3"),
        (["trainer.max_steps=[3"], r"conf.yaml: the override 'trainer.max_steps=\[3'; no viable"),
        (["~model.zzz"], r"conf.yaml: .*zzz"),
    ],
)
def test_wrong_overrides(file: Path, overrides: list[str], text: str) -> None:
    with pytest.raises(loading.ConfigError, match=f"(?s){text}"):
        loading.load(file, overrides)


def test_wrong_files(file: Path) -> None:
    with pytest.raises(loading.ConfigError, match=r"there is no configuration file .*other.yaml; in .* there are conf.yaml"):
        loading.load(file.with_name("other.yaml"))
    (file.parent / "x.txt").write_text("a: 1")
    with pytest.raises(loading.ConfigError, match=r"x.txt must have a name that ends with .yaml"):
        loading.load(file.parent / "x.txt")
    for text in ("a: [1\n", "a: 1\na: 2\n"):
        file.write_text(text)
        with pytest.raises(loading.ConfigError, match=r"conf.yaml"):
            loading.load(file)

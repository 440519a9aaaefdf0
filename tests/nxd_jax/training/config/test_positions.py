"""Lines and columns of keys."""

from __future__ import annotations

from pathlib import Path

from nxd_jax.training.config import positions
from nxd_jax.training.config.positions import Place
from nxd_jax.training.config.problems import Problems

TEXT = """\
# a comment
name: x
model: &m
  optim: {lr: 1, betas: [0.9]}
  list:
    - a: 1
more:
  <<: *m
  other: 2
name: y
"""


def test_places_of_keys(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(TEXT)
    found = positions.read(tmp_path / "a.yaml")
    assert found.error is None
    assert found.of("model.optim.lr") == Place(4, 11) and found.of("model.optim.betas") == Place(4, 18)
    assert found.of("more.other") == Place(9, 3)
    assert found.of("model.optim.missing") == Place(4, 3) and found.of("nothing.at.all") is None
    assert found.doubles == [("name", Place(10, 1), Place(2, 1))]
    assert found.clean is not None and found.clean.count("name:") == 1 and "name: y" in found.clean


def test_problems_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(TEXT)
    problems = Problems("a.yaml", positions.read(tmp_path / "a.yaml"), ["+model.new=1", "~more.other"])
    for key in ("model.new", "more", "model.optim.lr", "name", "more.other"):
        problems.error(key, "wrong")
    assert [p.where for p in problems.of("error")] == ["a.yaml:2:1", "a.yaml:4:11", "a.yaml:7:1", "command line", "command line"]
    long = problems.found[0].__class__("error", "key", "word " * 60, "a.yaml:1:1")
    assert len(long.lines()) == 3 and max(map(len, long.lines())) <= 120

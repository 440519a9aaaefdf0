"""The README's code runs and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: lower case, punctuation dropped, spaces as hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    return broken


def test_readme_has_code():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_readme_code_runs(code: str, tmp_path: Path):
    """To the end; no number of it is looked at, so that most of XLA's optimizations can be off."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    environment = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_relative_links(page: str):
    assert broken_links(ROOT / page) == []


def test_broken_links_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A heading, here\n[ok](page.md) [ok](#a-heading-here) [gone](gone.md) [no anchor](page.md#none)\n")
    assert broken_links(page) == ["gone.md", "page.md#none"]

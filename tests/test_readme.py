"""The code of the README and of the pages in docs/ runs and prints what stands below it; links lead somewhere; the index of docs/ lists every page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import quick

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(f"docs/{path.relative_to(ROOT / 'docs').as_posix()}" for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "notebooks/README.md", *DOCS]
GROUPS = ("tutorials", "how-to", "reference", "explanation")
ELSEWHERE = {"docs/tutorials/look_inside.md": "nxd_jax/inspect/test_docs.py"}
"""Pages whose code another test runs."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """A page's blocks of Python, each with the block of text right below it (empty if there is none): what it prints."""
    found = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [(code, shown) for code, shown in found]


def script(page: Path) -> str:
    """A page's blocks of Python, in their order, as one script."""
    return "\n".join(code for code, _ in blocks(page))


def not_printed(page: Path, said: str) -> list[str]:
    """Lines that a page shows as printed and that were not, whatever the numbers in them."""

    def plain(line: str) -> str:
        return re.sub(r"\d+(\.\d+)?", "0", " ".join(line.split()))

    printed = {plain(line) for line in said.splitlines()}
    return [line for _, shown in blocks(page) for line in shown.splitlines() if plain(line) not in printed]


RUNNABLE = [page for page in ["README.md", *DOCS] if page not in ELSEWHERE and blocks(ROOT / page)]


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


def test_pages_have_code():
    assert "README.md" in RUNNABLE
    assert len(RUNNABLE) >= 8
    assert all(blocks(ROOT / page) and (ROOT / "tests" / test).exists() for page, test in ELSEWHERE.items())


@pytest.mark.parametrize("page", RUNNABLE)
def test_code_runs(page: str, tmp_path: Path):
    """To the end, without a warning or hint, and with the lines that the page shows. Numbers are not compared, so most of XLA's optimizations can be off."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "aliases"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | quick.environment() | {"PYTHONPATH": path}
    (tmp_path / "train.py").write_text(script(ROOT / page))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr and "second step" not in done.stderr, done.stderr
    assert not_printed(ROOT / page, done.stdout) == [], done.stdout


def test_lines_that_are_not_printed_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint('loss', 0.5)\n```\n\n```text\nloss 0.7\nother 1\n```\n\n```python\nx = 1\n```\ntext\n```text\nnot output\n```\n"
    )
    assert script(page) == "print('loss', 0.5)\n\nx = 1\n"
    assert not_printed(page, "loss  0.5\n") == ["other 1"]


@pytest.mark.parametrize("page", PAGES)
def test_relative_links(page: str):
    assert broken_links(ROOT / page) == []


def test_broken_links_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A heading, here\n[ok](page.md) [ok](#a-heading-here) [gone](gone.md) [no anchor](page.md#none)\n")
    assert broken_links(page) == ["gone.md", "page.md#none"]


def test_the_index_lists_every_page_in_its_group():
    sections = dict(zip(GROUPS, re.split(r"^## ", (ROOT / "docs" / "README.md").read_text(), flags=re.MULTILINE)[1:], strict=True))
    assert all(section.lower().startswith(group) for group, section in sections.items())
    for page in DOCS:
        name = page.removeprefix("docs/")
        group = name.split("/")[0] if "/" in name else "reference"
        assert name == "README.md" or f"]({name})" in sections[group], page


def named_tests(line: str) -> list[str]:
    """What stands in backticks in the last column of a table's line."""
    return re.findall(r"`([^`]+)`", line.rstrip(" |").rpartition("|")[2]) if line.startswith("|") else []


def missing_tests(page: Path) -> list[str]:
    """Of the tests that lines of a page name (a folder or file, a function of any file, or file::function), those that are nowhere below tests/."""
    places = [(f"/{path.relative_to(ROOT).as_posix()}", path) for path in (ROOT / "tests").rglob("*") if path.suffix in ("", ".py")]

    def there(name: str) -> bool:
        path, _, function = name.partition("::") if "/" in name or ".py" in name else ("", "", name)
        found = [file for place, file in places if not path or place.endswith(f"/{path}")]
        return any(not function or (file.is_file() and f"def {function}(" in file.read_text(encoding="utf-8")) for file in found)

    return [name for line in page.read_text().splitlines() for name in named_tests(line) if not there(name)]


def test_differences_from_nxd_training_name_their_tests():
    page = ROOT / "docs" / "nxdt_differences.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ") and not line.startswith("| in the original")]
    assert len(lines) > 100 and all(named_tests(line) for line in lines)
    assert missing_tests(page) == []


def test_missing_tests_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    here = "`test_readme.py::test_missing_tests_are_found`, `test_missing_tests_are_found`, `test_readme.py`, `tests/nxd_jax/training`"
    page.write_text(f"| a | `b` | {here}, `test_readme.py::test_gone`, `test_gone_too`, `test_no_file_of_this_name.py` |\n`not a table`\n")
    assert missing_tests(page) == ["test_readme.py::test_gone", "test_gone_too", "test_no_file_of_this_name.py"]


def test_pages_that_code_names_exist():
    """Messages and docstrings name pages by their path from the repository's root."""
    named = {
        (str(path.relative_to(ROOT)), page)
        for folder in ("torch_bridge", "nxd_jax", "benchmarks", "notebooks", "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert named
    assert [f"{where}: {page}" for where, page in sorted(named) if not (ROOT / page).exists()] == []

"""The notebooks as Jupyter opens them, made from the scripts that are reviewed: `make notebooks`.

`notebooks/<number>_<name>.py` is the source, a script in jupytext's percent format; the `.ipynb` beside it is the same without outputs. A notebook that was
edited in Jupyter becomes the source with `jupytext --to py:percent notebooks/<name>.ipynb`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def sources() -> list[Path]:
    """The scripts, in order."""
    return sorted(FOLDER.glob("[0-9]*.py"), key=lambda path: int(path.stem.partition("_")[0]))


def notebook(source: Path) -> NotebookNode:
    """The notebook of a script, without outputs. Cells are numbered, so that the same script always gives the same file."""
    read = jupytext.read(source, fmt="py:percent")
    made = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(read.cells):
        kind = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        made.cells.append(kind(cell.source, id=f"cell-{number}"))
    return made


def text(source: Path) -> str:
    """What the `.ipynb` of a script has to be."""
    return nbformat.writes(notebook(source)) + "\n"


def main() -> None:
    """Write every `.ipynb` that is not what it has to be, and remove those whose script is gone."""
    for source in sources():
        target, wanted = source.with_suffix(".ipynb"), text(source)
        if not target.exists() or target.read_text(encoding="utf-8") != wanted:
            target.write_text(wanted, encoding="utf-8")
            sys.stdout.write(f"wrote {target.relative_to(FOLDER.parent)}\n")
    for left in set(FOLDER.glob("*.ipynb")) - {source.with_suffix(".ipynb") for source in sources()}:
        left.unlink()
        sys.stdout.write(f"removed {left.relative_to(FOLDER.parent)}\n")


if __name__ == "__main__":
    main()

"""What `nxdt-train --check` says of the 22 conf files: `python -m tests.nxd_jax.training.config.golden` writes golden_checks.txt anew."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from nxd_jax.training.config import checking
from tests.nxd_jax.training.config import conf_files

GOLDEN = Path(__file__).with_name("golden_checks.txt")
RULE = "=" * 120


def text(name: str, folder: Path) -> str:
    """The report on a conf file, in a folder that is the current one."""
    values = conf_files.with_files(name, folder)
    return str(checking.check_file(conf_files.write(values, name, folder)))


def read() -> dict[str, str]:
    """The reports in the golden file by the name of the conf file."""
    parts = GOLDEN.read_text(encoding="utf-8").split(f"{RULE}\n")[1:]
    return {part.partition("_config.yaml")[0]: part.rstrip("\n") for part in parts}


def main() -> None:
    """Write the golden file."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = [f"{RULE}\n{text(name, Path(folder))}\n" for name in conf_files.DIFFERENCES]
    GOLDEN.write_text("".join(found), encoding="utf-8")


if __name__ == "__main__":
    main()

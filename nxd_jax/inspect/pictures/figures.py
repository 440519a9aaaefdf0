"""Figures without pyplot: made, shown in notebooks, saved."""

from __future__ import annotations

import functools
import io
import os
import pathlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
DPI = 144
_SHOWN_DPI = 96

INK, MUTED, RED = "#1b1f24", "#57606a", "#c8102e"


@functools.cache
def _picture() -> type[Figure]:
    """A figure that a notebook shows even where pyplot was never imported. ImportError, saying what to install, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib; install it with: pip install 'nxd-jax[notebooks]'") from error

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png", dpi=_SHOWN_DPI)
            return written.getvalue()

    return Picture


def figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, whose parts make room for one another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made = _picture()(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def finished(made: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """The figure, saved if there is a path; folders that are missing are made. ValueError for a file name that is no picture's."""
    if path is not None:
        target = checked(path)
        assert target is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(target, dpi=DPI)
    return made


def checked(path: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """The path, refused unless its ending is one of `FORMATS`; call it before the work."""
    _picture()
    if path is None:
        return None
    target = pathlib.Path(path)
    if target.suffix.lower() not in FORMATS:
        raise ValueError(
            f"path={os.fspath(path)!r}: a picture is saved as {', '.join(FORMATS[:-1])} or {FORMATS[-1]}; end the name with one of them"
        )
    return target


def rectangle(x: float, y: float, width: float, height: float, **look: Any) -> Any:
    """A rectangle to add to axes."""
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **look)

"""Pictures of a topology: text for terminals, HTML for notebooks, PNG for files."""

from nxd_jax.topology.html_picture import html
from nxd_jax.topology.png_picture import png
from nxd_jax.topology.text_picture import text

__all__ = ["html", "png", "text"]

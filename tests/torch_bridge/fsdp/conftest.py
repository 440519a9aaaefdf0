"""Worlds of several ranks in this process."""

from tests.torch_bridge.ranks.conftest import hosted  # noqa: F401

"""PEFT's own warnings are not errors here."""

from __future__ import annotations

import pytest

PEFT_WARNINGS = (
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",  # peft 0.21 with transformers 5.23
    "ignore:Setting .save_embedding_layers. to .True.:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/nxd_jax/lora/" in item.nodeid:
            for warning in PEFT_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))

"""What is no tensor, of several processes of a pipeline, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_jax.checkpoint import original_writing, pipeline_ranks, united


def state(names: list[str], groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "class": "AdamW",
        "state": {name: {"step": 1} for name in names},
        "dtypes": dict.fromkeys(names, "float32"),
        "param_groups": groups,
        "master": names[:1],
        "order": names,
        "like": [f"exp_avg/{name}" for name in names],
    }


def group(params: list[str], **options: Any) -> dict[str, Any]:
    return {"lr": 0.1, **options, "params": params}


def test_groups_with_one_number_are_one() -> None:
    """In the order of the model; a process without parameters of a group has no say in its options."""
    first = state(["a", "c", "d"], [group(["a", "d"]), group(["c"], decay=torch.tensor(0.5))])
    second = state(["b"], [group(["b"]), group([], decay=torch.tensor(9.0))])
    found = united.states([second, first], ["a", "b", "c", "d"])
    assert [own["params"] for own in found["param_groups"]] == [["a", "b", "d"], ["c"]]
    assert found["param_groups"][1]["decay"] == 0.5
    assert found["order"] == ["a", "b", "d", "c"] and found["master"] == ["a", "b"]
    assert set(found["state"]) == set(found["dtypes"]) == {"a", "b", "c", "d"} and len(found["like"]) == 4 and found["class"] == "AdamW"


@pytest.mark.parametrize(
    "other",
    [[group(["b"], decay=1.0)], [group(["b"], lr=torch.tensor(0.1))], [group(["b"]), group(["c"])]],
    ids=["names", "values", "number"],
)
def test_groups_that_differ_stand_by_themselves(other: list[dict[str, Any]]) -> None:
    found = united.states([state(["a"], [group(["a"])]), state(["b", "c"], other)], ["a", "b", "c"])
    assert found["param_groups"] == [group(["a"]), *other]


def test_extra_state_is_that_of_the_process_with_the_module() -> None:
    first = {"other": {"a._extra_state": 1, "b._extra_state": 2, "_extra_state": 3}, "modules": ["a"]}
    second = {"other": {"a._extra_state": 4, "b._extra_state": 5, "_extra_state": 6}, "modules": ["b"]}
    assert united.extras([first, second], []) == {"other": {"a._extra_state": 1, "b._extra_state": 5, "_extra_state": 3}}


def test_adapters_with_a_weight_of_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Adapted(nn.Linear):
        def checkpoint_state(self) -> dict[str, Any]:
            return self.state_dict(keep_vars=True)

    monkeypatch.setattr(pipeline_ranks, "lent_to", lambda model, of: {"head.weight": torch.ones(2)})
    with pytest.raises(
        NotImplementedError, match=r"head.weight lie with another process, .* start the script with nxd-run.* NXD_JAX_CHECKPOINT_FORMAT=nxd"
    ):
        original_writing.model_files(Adapted(2, 2), False)

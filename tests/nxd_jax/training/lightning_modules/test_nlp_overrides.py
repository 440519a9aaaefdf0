"""`NLPTrainer`: the keys of `trainer`, and how many ranks there are."""

from __future__ import annotations

from typing import Any

import pytest

from nxd_jax.training.lightning_modules.nlp_overrides import NLPDDPStrategy, NLPTrainer, trainer_keys

pytestmark = pytest.mark.usefixtures("ranks")


def test_it_lays_out_the_number_of_ranks() -> None:
    from torch_bridge.mesh import world

    trainer = NLPTrainer(devices=4, num_nodes=2, lnc=2, sequential_move_factor=11, accelerator="tpu", max_steps=3, logger=False)
    assert world.size() == trainer.world_size == 8
    assert (trainer.lnc, trainer.sequential_move_factor) == (2, 11)
    assert isinstance(trainer.strategy, NLPDDPStrategy)
    assert not trainer.checkpoint_callbacks and not trainer.loggers


def test_a_path_to_go_on_from() -> None:
    assert NLPTrainer(devices=1, resume_from_checkpoint="somewhere.ckpt").ckpt_path == "somewhere.ckpt"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"max_stesp": 3}, TypeError, r"trainer has no key 'max_stesp'; did you mean 'max_steps'\?"),
        ({"zzz": 3}, TypeError, r"trainer has no key 'zzz'; it takes .*max_steps"),
        (
            {"accumulate_grad_batches": 4},
            ValueError,
            r"trainer.accumulate_grad_batches: 4 must be left out: micro-batches follow from data.global_batch_size",
        ),
        (
            {"gradient_clip_algorithm": "value"},
            ValueError,
            r"trainer.gradient_clip_algorithm: 'value' is not supported: gradients are clipped by their norm",
        ),
        ({"enable_model_summary": True}, ValueError, r"trainer.enable_model_summary: True is not supported: .*--check"),
        ({"accelerator": "gpu"}, ValueError, r"trainer.accelerator: 'gpu' must be 'tpu'"),
    ],
)
def test_wrong_keys(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        NLPTrainer(devices=1, **options)


def test_keys_are_known() -> None:
    assert {"lnc", "devices", "num_nodes", "max_time", "sequential_move_factor", "gradient_clip_val"} <= set(trainer_keys())

"""`torch_neuronx.testing.validation.logit_validation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_neuronx.testing.validation import logit_validation

VOCABULARY, TOKENS = 40, 6
PROMPTS = torch.tensor([[3, 1, 4], [1, 5, 9]])
PAD = 0

Model = Callable[[torch.Tensor], torch.Tensor]
"""From one row of ids to the logits of the next token."""


def of_ids(row: torch.Tensor) -> torch.Tensor:
    """Logits that depend on every id and where it stands."""
    generator = torch.Generator().manual_seed(int((row * torch.arange(1, len(row) + 1)).sum()))
    return torch.randn(VOCABULARY, generator=generator)


def greedy(model: Model, tokens: int = TOKENS, side: str = "left") -> Callable[[torch.Tensor], torch.Tensor]:
    """What is given to `logit_validation`: rows without their padding, to logits [tokens, batch, vocabulary]."""

    def generate(prompts: torch.Tensor) -> torch.Tensor:
        made = []
        for row in prompts:
            ids = row[row != PAD]
            assert torch.equal(ids, row[: len(ids)] if side == "right" else row[len(row) - len(ids) :])
            logits = []
            for _ in range(tokens):
                logits.append(model(ids))
                ids = torch.cat([ids, logits[-1].argmax()[None]])
            made.append(torch.stack(logits))
        return torch.stack(made, 1)

    return generate


EXPECTED = greedy(of_ids)(PROMPTS)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_the_same_model_passes(device: str) -> None:
    asked = []

    def generate(prompts: torch.Tensor) -> torch.Tensor:
        asked.append(prompts)
        return greedy(of_ids)(prompts).to(device)

    passed, results, said = logit_validation(PROMPTS, generate, EXPECTED)
    assert passed and len(asked) == 1 and said.endswith("The logits pass validation.")
    assert [len(row) for row in results] == [TOKENS, TOKENS]
    assert results[0][0] == {"passed": True, "divergence_difference": None, "top_k_errors": dict.fromkeys((None, 1000, 50, 5), 0.0)}


def test_a_shift_of_all_logits_of_a_token_does_not_count() -> None:
    assert logit_validation(PROMPTS.tolist(), greedy(lambda row: of_ids(row) + len(row)), EXPECTED)[0]


def test_logits_that_differ_are_named() -> None:
    """The logit of token 7, which is never chosen, is off where the fourth token is asked for."""
    assert not (EXPECTED.argmax(2) == 7).any()

    def model(row: torch.Tensor) -> torch.Tensor:
        logits = of_ids(row)
        logits[7] -= 3 * (len(row) == 6)
        return logits

    passed, results, said = logit_validation(PROMPTS, greedy(model), EXPECTED)
    assert not passed and "do not pass" in said and "batch 0 token 3: top k = None error" in said and "> 0.05" in said
    assert [t for t, found in enumerate(results[1]) if not found["passed"]] == [3]
    assert results[0][3]["top_k_errors"][None] == pytest.approx(3 * 39 / 40 / float(EXPECTED[3, 0].abs().max()), rel=1e-3)
    assert (
        "token 2" not in said.split("Largest")[0]
        and "batch 0 token 2: passes" in logit_validation(PROMPTS, greedy(model), EXPECTED, suppress_passing=False)[2]
    )


@pytest.mark.parametrize(("tolerance", "passes"), [(None, False), (1.0, True)])
def test_after_another_token_it_goes_on_behind_the_expected_one(tolerance: float | None, passes: bool) -> None:
    """Every later token has the reference's prefix; one row's choice starts both rows again."""
    asked: list[list[list[int]]] = []
    chosen = EXPECTED.argmax(2).T
    third = EXPECTED[2, 0].topk(2)

    def model(row: torch.Tensor) -> torch.Tensor:
        logits = of_ids(row)
        if torch.equal(row, torch.cat([PROMPTS[0], chosen[0, :2]])):
            logits[third.indices] = third.values.flip(0)
        return logits

    def generate(prompts: torch.Tensor) -> torch.Tensor:
        asked.append(prompts.tolist())
        return greedy(model)(prompts)

    limits: dict[int | None, tuple[float, float]] = {None: (0.0, 2.0)}
    passed, results, said = logit_validation(PROMPTS, generate, EXPECTED, limits, tolerance)
    assert passed == passes and "Another token at index 2: goes on after the expected one." in said
    assert asked == [PROMPTS.tolist(), torch.cat([PROMPTS, chosen[:, :3]], 1).tolist()]
    apart = float((third.values[0] - third.values[1]) / EXPECTED[2, 0].abs().max())
    assert results[0][2]["divergence_difference"] == pytest.approx(apart, rel=1e-5)
    assert [found["divergence_difference"] for found in results[1]] == [None] * TOKENS
    assert (f"chooses token {int(third.indices[1])} for {int(third.indices[0])}" in said) == (not passes)


def test_a_model_that_stops_early_is_asked_again() -> None:
    asked = []

    def generate(prompts: torch.Tensor) -> torch.Tensor:
        asked.append(prompts.shape[1])
        return greedy(of_ids, 4)(prompts)

    assert logit_validation(PROMPTS, generate, EXPECTED)[0] and asked == [3, 7]


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_different_lengths(side: str) -> None:
    """Expected tokens stand between a prompt and its padding."""
    rows = [[3, 1, 4], [5, 9]]
    expected = greedy(of_ids)(torch.tensor([[3, 1, 4], [PAD, 5, 9]]))
    assert logit_validation(rows, greedy(of_ids, 2, side), expected, pad_token_id=PAD, padding_side=side)[0]
    if side == "right":
        padded = torch.tensor([[3, 1, 4], [5, 9, PAD]])
        assert logit_validation(padded, greedy(of_ids, 2, side), expected, pad_token_id=PAD, padding_side=side)[0]


def test_nan_does_not_pass() -> None:
    assert not logit_validation(PROMPTS, lambda prompts: EXPECTED[: 6 - prompts.shape[1] + 3] * torch.nan, EXPECTED)[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"expected_logits": EXPECTED[:, :1]}, r"expected_logits are \[tokens, batch, vocabulary\], got \[6, 1, 40\] for 2 prompts"),
        ({"generate_fn": lambda prompts: EXPECTED[..., :9]}, r"got \[6, 2, 9\] where expected_logits have \[6, 2, 40\]"),
        ({"generate_fn": lambda prompts: EXPECTED[:0]}, "at least of one token"),
        ({"padding_side": "up"}, 'padding_side is "left" or "right", got \'up\''),
        ({"input_ids": [[1, 2], [3]]}, r"prompts have lengths \[1, 2\]: give pad_token_id"),
    ],
)
def test_mistakes(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        logit_validation(**{"input_ids": PROMPTS, "generate_fn": greedy(of_ids), "expected_logits": EXPECTED, **given})

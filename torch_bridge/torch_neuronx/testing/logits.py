"""`torch_neuronx.testing.validation.logit_validation`: whether a model's logits are those of a reference, token by token.

Greedy generation compares little: after the first token that differs, everything does. So the reference's tokens are fed: where the model would
have chosen another token, generation starts again behind the reference's one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_bridge.recorder import prefetch

TOLERANCES: dict[int | None, tuple[float, float]] = {None: (1e-5, 0.05), 1000: (1e-5, 0.03), 50: (1e-5, 0.02), 5: (1e-5, 0.01)}
"""By number of largest logits (None: all), the tolerance before the error counts, and the largest error as part of the largest expected logit."""

DIVERGENCE = 0.001
"""How far two logits may lie apart, the reference's choice and the model's, as part of the largest expected logit, if the model chooses another token."""


def logit_validation(
    input_ids: torch.Tensor | Sequence[Sequence[int]],
    generate_fn: Callable[[torch.Tensor], torch.Tensor],
    expected_logits: torch.Tensor,
    tol_map: Mapping[int | None, tuple[float, float]] | None = None,
    divergence_difference_tol: float | None = None,
    suppress_passing: bool = True,
    pad_token_id: int | None = None,
    padding_side: str = "left",
) -> tuple[bool, list[list[dict[str, Any]]], str]:
    """`torch_neuronx.testing.validation.logit_validation`.

    input_ids: prompts, int64 [batch, length], or lists of ids. generate_fn: from prompts to the logits of what is generated greedily after them,
    [tokens, batch, vocabulary]; it may stop early. expected_logits: the reference's, [tokens, batch, vocabulary].
    tol_map: `{k: (atol, rtol)}` for the k largest expected logits, None for all of them; `TOLERANCES` by default. A shift that all logits of a token share
    does not count. divergence_difference_tol: `DIVERGENCE` by default. suppress_passing: say nothing of tokens that pass.
    pad_token_id, padding_side: where rows of different lengths are padded; needed where `input_ids` has rows of different lengths, or is padded on the right.

    Returns whether all tokens pass; for each row and token a dict with `passed`, `divergence_difference` (None if both choose the same token) and
    `top_k_errors`; and a text that names the tokens that do not pass, and the largest errors.

    Raises ValueError for shapes that do not fit together, and if `generate_fn` gives no logits.
    """
    expected = prefetch.to_host(expected_logits).detach().double()
    rows = [[int(i) for i in row] for row in (input_ids.tolist() if isinstance(input_ids, torch.Tensor) else input_ids)]
    if expected.dim() != 3 or expected.shape[1] != len(rows):
        raise ValueError(f"expected_logits are [tokens, batch, vocabulary], got {list(expected.shape)} for {len(rows)} prompts")
    if padding_side not in ("left", "right"):
        raise ValueError(f'padding_side is "left" or "right", got {padding_side!r}')
    limits = dict(TOLERANCES if tol_map is None else tol_map)
    most = DIVERGENCE if divergence_difference_tol is None else divergence_difference_tol
    actual, said = _teacher_forced(rows, generate_fn, expected, pad_token_id, padding_side)
    results: list[list[dict[str, Any]]] = [[] for _ in rows]
    for b, row in enumerate(results):
        for t in range(len(expected)):
            found, failures = _of_token(actual[t, b], expected[t, b], limits, most)
            row.append(found)
            if failures or not suppress_passing:
                said.append(f"batch {b} token {t}: {'; '.join(failures) or 'passes'}")
    passed = all(found["passed"] for row in results for found in row)
    said += [_largest(results, limits), f"The logits {'pass' if passed else 'do not pass'} validation."]
    return passed, results, "\n".join(said)


def _teacher_forced(
    rows: list[list[int]], generate_fn: Callable[[torch.Tensor], torch.Tensor], expected: torch.Tensor, pad: int | None, side: str
) -> tuple[torch.Tensor, list[str]]:
    """The model's logits after the reference's tokens, and at which tokens it would have gone elsewhere."""
    chosen = expected.argmax(2).T
    parts: list[torch.Tensor] = []
    said: list[str] = []
    done = 0
    while done < len(expected):
        prompts = _prompts(rows, chosen[:, :done], pad, side)
        made = prefetch.to_host(generate_fn(prompts)).detach().double()[: len(expected) - done]
        if made.shape[1:] != expected.shape[1:] or not len(made):
            raise ValueError(
                f"generate_fn gives logits [tokens, batch, vocabulary], at least of one token: got {list(made.shape)} where expected_logits have "
                f"{list(expected.shape)}"
            )
        differs = (chosen[:, done : done + len(made)] != made.argmax(2).T).any(0).nonzero()
        if len(differs):
            made = made[: int(differs[0]) + 1]
            said.append(f"Another token at index {done + len(made) - 1}: goes on after the expected one.")
        parts.append(made)
        done += len(made)
    return torch.cat(parts), said


def _prompts(rows: list[list[int]], more: torch.Tensor, pad: int | None, side: str) -> torch.Tensor:
    """Prompts with tokens behind them, int64 [batch, length]; padding on the right stays behind those."""
    if side == "right" and pad is not None:
        rows = [row[: max((i + 1 for i, token in enumerate(row) if token != pad), default=0)] for row in rows]
    longer = [row + tokens for row, tokens in zip(rows, more.tolist(), strict=True)]
    length = max(map(len, longer))
    if any(len(row) < length for row in longer):
        if pad is None:
            raise ValueError(f"prompts have lengths {sorted({len(row) for row in rows})}: give pad_token_id")
        fill = [[pad] * (length - len(row)) for row in longer]
        longer = [row + f if side == "right" else f + row for row, f in zip(longer, fill, strict=True)]
    return torch.tensor(longer)


def _of_token(
    actual: torch.Tensor, expected: torch.Tensor, limits: Mapping[int | None, tuple[float, float]], most: float
) -> tuple[dict[str, Any], list[str]]:
    """What `logit_validation` says of the logits [vocabulary] of one token, and why it fails."""
    scale = float(expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny))
    shifted = actual - (actual - expected).mean()
    choice, right = int(actual.argmax()), int(expected.argmax())
    difference = None if choice == right else float(expected[right] - expected[choice]) / scale
    failures = []
    if difference is not None and not difference <= most:
        failures.append(f"chooses token {choice} for {right}, divergence difference {difference:.4g} > {most:g}")
    errors: dict[int | None, float] = {}
    for k, (atol, rtol) in limits.items():
        at = slice(None) if k is None else expected.topk(min(k, len(expected))).indices
        apart = float((shifted[at] - expected[at]).abs().max())
        errors[k] = max(apart - atol, 0.0) / scale if apart == apart else apart
        if not errors[k] <= rtol:
            failures.append(f"top k = {k} error {errors[k]:.4g} > {rtol:g}")
    return {"passed": not failures, "divergence_difference": difference, "top_k_errors": errors}, failures


def _largest(results: list[list[dict[str, Any]]], limits: Mapping[int | None, tuple[float, float]]) -> str:
    found = {(b, t): token for b, row in enumerate(results) for t, token in enumerate(row)}
    texts = []
    diverged = {at: token["divergence_difference"] for at, token in found.items() if token["divergence_difference"] is not None}
    if diverged:
        (b, t), value = max(diverged.items(), key=lambda entry: entry[1])
        texts.append(f"divergence difference {value:.4g} (batch {b} token {t})")
    for k in limits:
        (b, t), token = max(found.items(), key=lambda entry: entry[1]["top_k_errors"][k])
        texts.append(f"top k = {k} error {token['top_k_errors'][k]:.4g} (batch {b} token {t})")
    return f"Largest, as part of the largest expected logit of the token: {', '.join(texts)}."

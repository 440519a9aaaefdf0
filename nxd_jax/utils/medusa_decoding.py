"""The loop around a Medusa model: a tree of guesses in each forward pass, the best branch of which stays. `NeuronSpeculation` calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nxd_jax.utils.medusa_utils import evaluate_posterior, generate_candidates, generate_medusa_buffers, update_inference_inputs


def decode(
    model: Any,
    prompt: torch.Tensor,
    mask: torch.Tensor,
    length: int,
    finished: Callable[[torch.Tensor], torch.Tensor | None],
    **kwargs: Any,
) -> torch.Tensor:
    """The first `length` tokens of the prompt [1, at least length], and those after them.

    model: as `NeuronSpeculation` says. finished: gives of a text [1, n] what to return, or None to go on.
    """
    settings = getattr(model, "neuron_config", None) or model.config
    tree = {name: value.to(prompt.device) for name, value in generate_medusa_buffers(settings.medusa_tree).items()}
    nodes = len(tree["tree_indices"])
    if settings.medusa_speculation_length != nodes:
        raise ValueError(
            f"medusa_speculation_length={settings.medusa_speculation_length}, and medusa_tree has {nodes} nodes with its root: these must be equal"
        )
    branches, text = tree["retrieve_indices"], prompt[:, :length]
    own, heads = _best_tokens(model(**model.prepare_inputs_for_generation(prompt, attention_mask=mask, **kwargs)))
    logits, medusa_logits = own[None], heads[:, None]
    moves = kept = torch.arange(length, length + len(heads) + 1, device=text.device)
    while True:
        candidates, tokens = generate_candidates(medusa_logits, logits, tree["tree_indices"], branches)
        length = text.shape[1]
        inputs = model.prepare_medusa_inputs_for_generation(
            tokens,
            attention_mask=(torch.arange(max(length, mask.shape[1]), device=text.device) < length).to(mask.dtype)[None],
            position_ids=(tree["medusa_position_ids"] + length)[None],
            medusa_mask=tree["medusa_attn_mask"].long()[None],
            scatter_index=torch.arange(length, length + nodes, device=text.device)[None],
            accepted_indices=kept[None],
            current_length=moves[None],
            **kwargs,
        )
        own, heads = _best_tokens(model(**inputs))
        best, accepted = evaluate_posterior(own[branches], candidates)
        text, logits, medusa_logits, _, places = update_inference_inputs(
            text, candidates, best, accepted, branches, None, own[branches], heads[:, branches], 0
        )
        if (found := finished(text)) is not None:
            return found
        moves = torch.arange(length, length + len(heads) + 1, device=text.device)
        kept = torch.cat((places, moves[len(places) :]))


def _best_tokens(outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[positions, TOPK] of the model itself and [heads, positions, TOPK] of its heads."""
    found = outputs["hidden_states"].long()
    return found[0], found[1:]

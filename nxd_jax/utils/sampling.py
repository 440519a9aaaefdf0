"""`neuronx_distributed.utils.sampling`: the next token of every row from its logits."""

from __future__ import annotations

from typing import Any

import torch


class Sampler:
    """`sampling.Sampler`: greedy for `top_k` 1, else one of the `top_k` most likely tokens, drawn by its probability among them.

    config: any object with `do_sample` (True), `num_beams` (default 1), `top_k` (1 to the size of the vocabulary, which is to sample from all of it) and
    `is_medusa` (default False): a configuration of transformers, or NxD's NeuronConfig. `on_device_sampling` has no effect: it is done where the logits are.

    generator: draws from this one; by default from that of the logits' device (`torch.manual_seed(seed)` seeds both). For logits on xla a generator may be of
    either device. All ranks draw the same numbers, so that tensor parallel ranks, which hold the same logits, choose the same tokens. Each call goes on where
    the last one ended.

    Raises NotImplementedError for a config without sampling or with several beams, ValueError for a `top_k` below 1.
    """

    def __init__(self, config: Any, generator: torch.Generator | None = None) -> None:
        do_sample, num_beams = getattr(config, "do_sample", None), getattr(config, "num_beams", 1)
        if not do_sample or num_beams != 1:
            raise NotImplementedError(
                f"do_sample={do_sample}, num_beams={num_beams}: only do_sample=True with num_beams=1 is supported; for greedy decoding set do_sample=True "
                "and top_k=1"
            )
        if isinstance(config.top_k, bool) or not isinstance(config.top_k, int) or config.top_k < 1:
            raise ValueError(f"top_k={config.top_k!r} must be a number from 1 (greedy) to the size of the vocabulary (any token)")
        self.top_k = config.top_k
        self.is_medusa = bool(getattr(config, "is_medusa", False))
        self.generator = generator

    def sample(self, token_logits: torch.Tensor) -> torch.Tensor:
        """Token ids [batch], int64, from logits [batch, vocabulary] of any real dtype. With `is_medusa` the `top_k` most likely tokens of each row instead,
        [batch, top_k], best first. Raises ValueError for another shape, or a vocabulary smaller than `top_k`.
        """
        return self.multinomial(token_logits)

    def multinomial(self, token_logits: torch.Tensor) -> torch.Tensor:
        """What `sample` does. Probabilities are summed in float32, whatever the dtype of the logits."""
        if token_logits.dim() != 2 or token_logits.shape[1] < self.top_k:
            raise ValueError(
                f"logits have shape {list(token_logits.shape)}: [batch, vocabulary] is wanted, with at least top_k={self.top_k} tokens"
            )
        if self.top_k == 1:
            return token_logits.argmax(dim=1)
        values, tokens = torch.topk(token_logits, self.top_k, dim=1)
        return tokens if self.is_medusa else tokens.gather(1, self._draw(values)).squeeze(1)

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Which entry of each row, [batch, 1]: as many as have running sums below a number that is uniform in [0, the sum of all)."""
        reached = logits.float().softmax(dim=1).cumsum(dim=1)
        uniform = torch.rand((logits.shape[0], 1), device=logits.device, generator=self.generator)
        return (reached < uniform * reached[:, -1:]).sum(dim=1, keepdim=True)

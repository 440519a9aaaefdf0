"""Packed sequences of xla tensors: lengths and batch sizes stay on the CPU, as on any device; the data are gathered on xla.

torch packs row by row. Here torch packs the row numbers, on the CPU, and one gather takes the rows: its errors are torch's, and the graph is small.
"""

from __future__ import annotations

import torch

from torch_bridge import source
from torch_bridge.recorder import rank_tensor
from torch_bridge.recorder.dispatch import composite

aten = torch.ops.aten


def pack(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`_pack_padded_sequence`: the rows of all sequences, step after step, and how many sequences each step has."""
    same_on_all_ranks("lengths", lengths)
    if padded.dim() < 2 or not padded.numel() or lengths.device.type != "cpu":
        return _on_meta(padded, lengths, batch_first)
    numbers = torch.arange(padded.shape[0] * padded.shape[1], device="cpu").view(*padded.shape[:2], 1)
    rows, batch_sizes = torch._VF._pack_padded_sequence(numbers, lengths, batch_first)
    return padded.flatten(0, 1).index_select(0, rows.flatten().to(padded.device)), batch_sizes


def _on_meta(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What cannot be packed: torch says why."""
    torch._VF._pack_padded_sequence(torch.empty(padded.shape), lengths.cpu(), batch_first)
    raise RuntimeError(f"pack_padded_sequence: 'lengths' must be on the CPU, got a tensor on {lengths.device}: use lengths.cpu()")


def pad(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_pad_packed_sequence`: the padded sequences, and their lengths."""
    same_on_all_ranks("batch sizes", batch_sizes)
    numbers = torch.arange(data.shape[0], device="cpu").view(-1, 1)
    rows, lengths = torch._VF._pad_packed_sequence(numbers, batch_sizes, batch_first, -1, total_length)
    flat = rows.flatten()
    places = torch.empty(data.shape[0], dtype=torch.int64, device="cpu")
    places[flat[flat >= 0]] = (flat >= 0).nonzero().flatten()
    padded = data.new_full((flat.shape[0], *data.shape[1:]), padding_value)
    return padded.index_copy(0, places.to(data.device), data).unflatten(0, rows.shape[:2]), lengths


def same_on_all_ranks(what: str, lengths: torch.Tensor) -> None:
    """Raise RuntimeError for lengths that differ by rank."""
    if type(lengths) is rank_tensor.RankTensor:
        raise RuntimeError(
            f"the {what} of a packed sequence differ by rank (at {source.user_line()}): all ranks compute together, and packed data have one row for each step "
            "of each sequence. Keep the sequences padded and use a mask, give all ranks the same lengths, or start one process per rank with torchrun."
        )


composite(aten._pack_padded_sequence.default, pack)
composite(aten._pad_packed_sequence.default, pad)

"""Files of each rank in a process that hosts several: `xm.save(..., f"ckpt_rank-{xm.get_ordinal()}.pth", master_only=False)`.

Text has no room for all ranks' numbers: the path has the first hosted rank's, and those of the other ranks are told from it.
"""

from __future__ import annotations

import os
import re

_NAMED = re.compile(r"(?i)(rank|ordinal|worker|core|proc(?:ess)?|shard)([-_=]?)(\d+)")
_NUMBER = re.compile(r"(?<!\d)\d+(?!\d)")


def of_ranks(path: str | os.PathLike[str], first: int, ranks: list[int]) -> list[str]:
    """The path for each of `ranks`, given that of rank `first`. Numbers keep their width: "rank-00000000" becomes "rank-00000001".

    The rank's number is the one after "rank" (ordinal, worker, core, process, shard), else the only number of the file's name that is `first`.

    Raises ValueError if there is no such number, or several.
    """
    text = os.fspath(path)
    spans = [m.span(3) for m in _NAMED.finditer(text) if int(m[3]) == first]
    if not spans:
        start = len(text) - len(os.path.basename(text))
        spans = [m.span() for m in _NUMBER.finditer(text, start) if int(m[0]) == first]
    if len(spans) != 1:
        raise ValueError(
            f"{text}: this process hosts several ranks, and each has other values to save, so each needs a file of its own; the path of rank {first} "
            f'should have its number once, as in f"ckpt_rank-{{xm.get_ordinal()}}.pth", and has it {len(spans) or "no"} times. Or start one process per '
            "rank with torchrun"
        )
    ((begin, end),) = spans
    return [f"{text[:begin]}{rank:0{end - begin}d}{text[end:]}" for rank in ranks]

"""`torch.distributed.nn.functional.broadcast` and `scatter` leave a gradient to the root alone, by a branch on the rank in Python."""

from __future__ import annotations

from torch_bridge.collectives import askers

_MODULE = "torch.distributed.nn.functional"
_NEEDED = {"_Broadcast": "broadcast", "_Scatter": "scatter"}
"""Functions of that module whose backward is right for one rank alone."""
_DEPTH = 4
"""Frames between a group that is asked for its rank and such a function."""


def refuse() -> None:
    """Raises NotImplementedError where such a function, of a tensor that needs gradients, asks a group of several ranks which one it is."""
    frame = askers.frame_of(_MODULE, _DEPTH)
    name = None if frame is None else _NEEDED.get(frame.f_code.co_qualname.split(".")[0])
    if frame is None or name is None or not any(getattr(frame.f_locals.get("ctx"), "needs_input_grad", ())):
        return
    raise NotImplementedError(
        f"{_MODULE}.{name} keeps the gradient on the source rank by a branch in Python, and all ranks run one program here: call "
        f"{_MODULE}.all_reduce(torch.where(torch.zeros((), device='xla') + dist.get_rank() == source, x, 0.0)), which has the same values and "
        "gradients" + ("; of the stacked parts, and take the part of dist.get_rank()" if name == "scatter" else "")
    )

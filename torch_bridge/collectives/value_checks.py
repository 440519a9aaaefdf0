"""Checks of values that Python code of libraries makes before it goes on, such as those of `torch.distributions`: they do not cut the step.

`Normal(loc, scale)` asks whether all scales are positive, and raises ValueError if not. Each such question would run what is recorded so far and wait for it.
So it gets the answer that lets the script go on, and a node in the segment counts the values that are not as they should be. The counts are read after the
run, which raises then. So it is with errors of linear algebra (`torch.linalg.cholesky` of a matrix that is not positive-definite), and with branches of
libraries that only raise (`if not (boxes[:, 2:] >= boxes[:, :2]).all(): raise ValueError(...)`). A question is answered at once where somebody would catch
the error before the step ends.
"""

from __future__ import annotations

import builtins
import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from torch.distributions import constraints
from torch.distributions.distribution import Distribution

from torch_bridge import source
from torch_bridge.collectives.collective_ops import emit
from torch_bridge.compiler.trace import Trace
from torch_bridge.ir.segment import Results, Segment, Storage
from torch_bridge.lowerings import lowering
from torch_bridge.mesh import sharding, spmd, world
from torch_bridge.recorder import expected_answers, fallback, host_values
from torch_bridge.recorder.dispatch import special
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime.observers import Observer
from torch_bridge.runtime.session import STATE
from torch_bridge.script import catching, raising, rank_syntax
from torch_bridge.source import NOWHERE, Source

MOST_NAMED = 8
"""Checks that one error names."""

_library = torch.library.Library("torch_bridge", "FRAGMENT")
_library.define("check_values(Tensor valid, Tensor value, str what, str error, int[] size, bool valued) -> Tensor")
check_values = torch.ops.torch_bridge.check_values.default


def _meta(valid: torch.Tensor, value: torch.Tensor, what: str, error: str, size: Sequence[int], valued: bool) -> torch.Tensor:
    return valid.new_empty((3,), dtype=torch.float64)


def _cpu(valid: torch.Tensor, value: torch.Tensor, what: str, error: str, size: Sequence[int], valued: bool) -> torch.Tensor:
    wrong = ~valid.flatten()
    at = wrong.int().argmax()
    return torch.stack([wrong.sum().double(), at.double(), value.flatten()[at].double()])


_library.impl("check_values", _meta, "Meta")
_library.impl("check_values", _cpu, "CPU")


@lowering(check_values, lift=False)
def _check_values(valid: Any, value: Any, what: str, error: str, size: Sequence[int], valued: bool) -> Any:
    """[how many are not valid, the place of the first of them, its value]."""
    wrong = ~valid.reshape(-1)
    at = jnp.argmax(wrong)
    return jnp.stack([jnp.sum(wrong).astype(jnp.float64), at.astype(jnp.float64), value.reshape(-1)[at].astype(jnp.float64)])


_library.define("check_info(Tensor info, str api_name, bool is_matrix) -> Tensor")
check_info = torch.ops.torch_bridge.check_info.default
_library.impl("check_info", lambda info, api_name, is_matrix: torch.empty_like(info), "Meta")
_library.impl("check_info", lambda info, api_name, is_matrix: info.clone(), "CPU")


@lowering(check_info)
def _check_info(info: Any, api_name: str, is_matrix: bool) -> Any:
    """What a factorization says of each matrix."""
    return info


# -- what is asked --------------------------------------------------------------------------------


class Question(NamedTuple):
    """What a check asks. valid: where values are as they should be; value: these; what: what is said if they are not; error: a built-in exception's name."""

    valid: torch.Tensor
    value: torch.Tensor
    what: str
    error: str = "ValueError"


def _of_parameter(asked: torch.Tensor, local: dict[str, Any]) -> Question:
    value, owner = local["value"], type(local["self"]).__name__
    what = f"Expected parameter {local['param']} ({_shown(value)}) of distribution {owner} to satisfy the constraint {_named(local['constraint'])}"
    return Question(local["valid"], value, f"{what}, but found invalid values")


def _of_sample(asked: torch.Tensor, local: dict[str, Any]) -> Question:
    value = local["value"]
    what = f"Expected value argument ({_shown(value)}) to be within the support ({_named(local['support'])}) of the distribution {type(local['self']).__name__}"
    return Question(local["valid"], value, f"{what}, but found invalid values")


def _of_symmetry(asked: torch.Tensor, local: dict[str, Any]) -> Question:
    return Question(
        asked, asked, f"Expected a matrix ({_shown(local['value'])}) to satisfy the constraint {_named(local['self'])}: it is not symmetric"
    )


CHECKS_OF_TORCH: dict[CodeType, Callable[[torch.Tensor, dict[str, Any]], Question]] = {
    Distribution.__init__.__code__: _of_parameter,
    Distribution._validate_sample.__code__: _of_sample,
    constraints._PositiveDefinite.check.__code__: _of_symmetry,
    constraints._PositiveSemidefinite.check.__code__: _of_symmetry,
}
"""By the code that asks."""


def _shown(value: Any) -> str:
    return f"{type(value).__name__.replace('XLATensor', 'Tensor')} of shape {tuple(value.shape)}"


def _named(constraint: Any) -> str:
    """The constraint with its numbers; bounds that are tensors have values that are not there yet."""
    inner = getattr(constraint, "base_constraint", None)
    if inner is not None:
        return f"{type(constraint).__name__}({_named(inner)})"
    bounds = [f"{k}={v}" for k, v in vars(constraint).items() if isinstance(v, (int, float))]
    return type(constraint).__name__.lstrip("_") + (f"({', '.join(bounds)})" if bounds else "")


def answer(asked: torch.Tensor, frame: FrameType) -> bool | None:
    """For `expected_answers`: the answer to a check, which is looked at when the step runs."""
    if not isinstance(asked, XLATensor) or not asked._storage.pending or asked.numel() != 1:
        return None
    find = CHECKS_OF_TORCH.get(frame.f_code)
    guard = raising.at(frame) if find is None and _is_librarys(frame.f_code) else None
    if find is not None:
        question = find(asked, frame.f_locals)
    elif guard is not None:
        valid = asked.detach() == guard.answer
        question = Question(valid, valid, guard.text, guard.error)
    else:
        return None
    if not _may_wait(frame, getattr(builtins, question.error)) or _told_by_host(asked):
        return None
    valid, value = question.valid, question.value
    if not isinstance(valid, XLATensor) or not valid.numel():
        return None
    same = isinstance(value, XLATensor) and value.shape == valid.shape and not value.is_complex() and value is not valid
    if STATE.session.abstract is None:
        _emitted()
        tensors = valid.detach(), (value if same else valid).detach()
        emit(check_values, tensors, (question.what, question.error, tuple(valid.shape), same))
    return guard is None or guard.answer


def _is_librarys(code: CodeType) -> bool:
    """Code of an installed package or of torch: a script's own assertions are answered at once, as nothing may run after the last of them."""
    name = code.co_filename
    return not rank_syntax.is_script(code) and not name.startswith("<") and (source.is_user(code) or name.startswith(_TORCH))


_TORCH = os.path.dirname(torch.__file__) + os.sep


def _told_by_host(asked: XLATensor) -> bool:
    return not asked.is_floating_point() and host_values.known(STATE.session.current, asked._storage, asked._layout) is not None


@special(torch.ops.aten._linalg_check_errors.default)
def _linalg_check_errors(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found, api_name = args
    if found._storage.pending and found.numel() and _may_wait(sys._getframe(1), torch.linalg.LinAlgError):
        if STATE.session.abstract is None:
            _emitted()
            emit(check_info, (found,), (api_name, kwargs["is_matrix"]))
    else:
        fallback.on_host(func, args, kwargs)


def _may_wait(frame: FrameType, error: type[Exception]) -> bool:
    """Whether an error of this frame may be raised when the step runs. An abstract run has no values that could be wrong."""
    own = STATE.session
    if own.abstract is not None or own.current.capture:
        return own.abstract is not None
    own.observe(CHECKS)
    return not CHECKS.caught_in_step(frame, error)


def _emitted() -> None:
    """A check is about to be recorded. In a module that is being recorded it comes again whenever that is played."""
    CHECKS.asked = True
    CHECKS.stays = CHECKS.stays or STATE.session.current.watch is not None


def install() -> None:
    """Answer what torch's checks ask, from now on."""
    expected_answers.answer_with(answer)


# -- around each run -------------------------------------------------------------------------------


class Check(NamedTuple):
    """A check that runs with a segment: where its result goes, what says what is wrong, and where it was asked for."""

    result: Storage
    told: Callable[[np.ndarray], Exception | None]
    source: Source


class ValueChecks(Observer):
    """Keeps the results of the checks in each segment that is about to run, and reads them after it."""

    reads_values = True

    def __init__(self) -> None:
        self.asked = False
        """Whether the step has a check. Who observes a session keeps programs from running without segments: after a step that has none, this does not."""
        self.stays = False
        self._checks: list[Check] = []
        self._ended_in: set[catching.Place] = set()
        """Each `try` of scripts in which the last step ended: what a run raises then, they catch, too."""

    def caught_in_step(self, frame: FrameType, error: type[Exception]) -> bool:
        """Whether somebody would catch an error of this frame before the step ends."""
        found = catching.places(frame, error)
        if not found:
            return False
        around = catching.frames(frame)
        self._ended_in = {place for place in self._ended_in if place[0] in around}  # a frame that has returned would keep its tensors
        return not found <= self._ended_in

    def step_ended(self, ran: bool) -> None:
        """A step was marked."""
        if not self.asked and not self.stays and not self._checks:
            STATE.session.unobserve(self)
        self.asked = False
        self._ended_in = catching.places(sys._getframe(1), ValueError, torch.linalg.LinAlgError)

    def preparing(self, segment: Segment) -> None:
        """Have the results of its checks come out of a segment."""
        first = 0
        for i, node in enumerate(segment.nodes):
            if node[0].op in TOLD:
                self._checks.append(_kept(segment, i, first))
            first += node[0].n_outs

    def executed(self, trace: Trace, live: Results) -> None:
        """Raise if values were not as they should be; the error names the checks in the order in which they were recorded. The tensors keep their values."""
        ran = [check for check in self._checks if check.result.held is not None]
        self._checks = [check for check in self._checks if check.result.pending]
        hosted = world.current().hosted
        wrong = [error for check in ran if (error := _error(check, hosted)) is not None]
        if wrong:
            lines = [str(error) for error in wrong[:MOST_NAMED]]
            more = [f"... and {len(wrong) - MOST_NAMED} more"] if len(wrong) > MOST_NAMED else []
            raise type(wrong[0])("\n".join([*lines, *more, _LATE]))


_LATE = (
    "On device xla this is known when the step has run, so optimizers may have used such values. NEURON_USE_EAGER_DEBUG_MODE=1 raises at the line itself; "
    "torch.distributions take validate_args=False."
)

CHECKS = ValueChecks()
"""Of this process."""


def _kept(segment: Segment, index: int, first: int) -> Check:
    """A check whose first result is `first`, with a storage for it."""
    entry = segment.nodes[index][0]
    sources = segment.sources if segment.predicted is None else segment.predicted.sources
    result = Storage(entry.outs[0])
    segment.write(result, first)
    return Check(result, functools.partial(TOLD[entry.op], *entry.args), sources[index] if index < len(sources) else NOWHERE)


def _error(check: Check, hosted: Sequence[int]) -> Exception | None:
    """What is wrong on the first hosted rank where something is."""
    array, size = check.result.array, check.result.layout.size
    results = sharding.blocks(array, size) if sharding.active() else [np.asarray(spmd.whole(array))]
    for rank, result in zip(hosted, results, strict=False):
        error = check.told(result)
        if error is not None:
            return type(error)(f"{error}{f', on rank {rank}' if len(results) > 1 else ''}, at {check.source}.")
    return None


def _wrong_values(_: Any, __: Any, what: str, error: str, size: Sequence[int], valued: bool, result: np.ndarray) -> Exception | None:
    count, at, value = result.tolist()
    if not count:
        return None
    first = f"{value:g} at " if valued else "at "
    place = list(map(int, np.unravel_index(int(at), size))) if size else []
    found = f": {int(count)} of {math.prod(size)}, the first is {first}{place}" if size else f": {value:g}" if valued else ""
    return getattr(builtins, error)(f"{what}{found}")


def _wrong_matrix(_: Any, api_name: str, is_matrix: bool, result: np.ndarray) -> Exception | None:
    try:
        torch.ops.aten._linalg_check_errors(torch.from_numpy(np.array(result)), api_name, is_matrix=is_matrix)
    except torch.linalg.LinAlgError as error:
        return torch.linalg.LinAlgError(str(error).rstrip("."))
    return None


TOLD: dict[Any, Callable[..., Exception | None]] = {check_values: _wrong_values, check_info: _wrong_matrix}
"""By the op of a check: what its arguments and its result say."""

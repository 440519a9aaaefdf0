"""An exported program without what it has for other platforms.

`jax.export` gives a program for several platforms a branch for each wherever their lowerings differ, as those of products do, and XLA chooses among them late.
By then XLA for CPUs has settled how a bfloat16 product is computed. In a program of several devices, a transpose before the branches is folded into the product
afterwards, and what is left has no code: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

_CALL, _CASE, _CONSTANT, _CONVERT, _MANUAL = (
    "func.call",
    "stablehlo.case",
    "stablehlo.constant",
    "stablehlo.convert",
    "sdy.manual_computation",
)


def choose(module: Any) -> int:
    """Put the branch that is taken in the place of every `case` with a constant index, in a lowered module (`Lowered.compiler_ir()`), and return how many."""
    with module.context:
        found = _Branches(module)
        for case in found.cases:
            found.choose(case)
    return found.chosen


class _Branches:
    """The cases of a module, inner ones first."""

    def __init__(self, module: Any):
        self.cases: list[Any] = []
        self.calls: dict[str, list[Any]] = {}
        self.chosen = 0
        module.operation.walk(self._note)

    def _note(self, op: Any) -> Any:
        op = op.operation  # a view of an op may have another `name`
        if op.name == _CASE:
            self.cases.append(op)
        elif op.name == _CALL:
            self.calls.setdefault(ir.FlatSymbolRefAttr(op.attributes["callee"]).value, []).append(op)
        return ir.WalkResult.ADVANCE

    def choose(self, case: Any) -> None:
        """Replace a case whose index is known."""
        taken = self._taken(case)
        if taken is None:
            return
        *ops, end = taken.operations
        for op in ops:
            op.operation.move_before(case)
        for result, value in zip(case.results, end.operands, strict=True):
            result.replace_all_uses_with(value)
        case.erase()
        self.chosen += 1

    def _taken(self, case: Any) -> Any:
        """The block of the branch that is taken: the last one for an index out of range. None if the index is not known."""
        index = self._known(case.operands[0])
        last = len(case.regions) - 1
        return None if index is None else case.regions[index if 0 <= index <= last else last].blocks[0]

    def _known(self, value: Any) -> int | None:
        """The number that a scalar is, if that follows from constants: it may be an argument of a function or of what each device does."""
        if isinstance(value, ir.BlockArgument):
            return self._of_argument(value.owner.owner.operation, value.arg_number)
        op = value.owner.operation
        if op.name == _CASE:
            taken = self._taken(op)
            return None if taken is None else self._known(list(taken.operations)[-1].operands[value.result_number])
        if op.name == _CONVERT:  # with 64-bit numbers the platform's index is one, too
            return self._known(op.operands[0])
        if op.name != _CONSTANT:
            return None
        held = op.attributes["value"]
        return int(held[0]) if isinstance(held, ir.DenseIntElementsAttr) and held.is_splat else None

    def _of_argument(self, op: Any, at: int) -> int | None:
        if op.name == _MANUAL:
            return self._known(op.operands[at])
        name = op.attributes["sym_name"] if op.name == "func.func" else None
        calls = [] if name is None else self.calls.get(ir.StringAttr(name).value, [])
        numbers = {self._known(call.operands[at]) for call in calls}
        return numbers.pop() if len(numbers) == 1 else None

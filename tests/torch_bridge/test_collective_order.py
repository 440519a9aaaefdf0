"""Which compiled programs are known to exchange values in the same order."""

from __future__ import annotations

from torch_bridge.compiler import collective_order


class Compiled:
    def __init__(self, *lines: str):
        self.lines = lines

    def as_text(self) -> str:
        return "\n".join(self.lines)


SUM = "%a = f32[4]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%sum"
GATHER = "%b = f32[8]{0} all-gather-start(%y), channel_id=2, replica_groups={{0,1}}, dimensions={0}"
LOCAL = "%c = f32[4]{0} add(%x, %x)"


def same(one: Compiled, other: Compiled) -> bool:
    return collective_order.word("w", one) == collective_order.word("w", other)


def test_other_work_between_collectives() -> None:
    assert same(Compiled(SUM, GATHER), Compiled(LOCAL, SUM.replace("%x", "%c"), GATHER))
    assert collective_order.word("w", Compiled(SUM)) != collective_order.word("v", Compiled(SUM))


def test_what_does_not_run() -> None:
    assert collective_order.word("w", None) == collective_order.word("w", None)


def test_another_order_and_other_collectives() -> None:
    for lines in ((GATHER, SUM), (SUM,), (SUM.replace("f32[4]", "f32[5]"), GATHER), (SUM.replace("{0,1}", "{1,0}"), GATHER)):
        assert not same(Compiled(SUM, GATHER), Compiled(*lines))


def test_joined_collectives_of_one_shape() -> None:
    """Which value is which does not show: only equal programs are known to fit."""
    joined = "%a = (f32[4]{0}, f32[4]{0}) all-reduce(%x, %y), channel_id=1, replica_groups={{0,1}}, to_apply=%sum"
    assert same(Compiled(joined), Compiled(joined + ', metadata={op_name="b" line=3}')) and not same(
        Compiled(joined), Compiled(joined, LOCAL)
    )
    apart = joined.replace("f32[4]{0})", "f32[5]{0})")
    assert same(Compiled(apart), Compiled(apart, LOCAL))

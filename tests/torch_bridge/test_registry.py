"""registry.py: what may be registered, what is refused and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_bridge.lowerings import registry
from torch_bridge.lowerings.registry import AxesRule, Lowering, Stacks, lookup, lowering, registered

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def empty_table(monkeypatch):
    monkeypatch.setattr(registry, "_TABLE", {})


def test_registers_all_overloads_and_returns_the_function():
    def fn(x):
        return x

    assert lowering(aten.abs.default, aten.neg.default, rng=True, lift=False)(fn) is fn
    assert lookup(aten.abs.default) == lookup(aten.neg.default) == Lowering(fn, rng=True, lift=False)
    assert lookup(aten.sin.default) is None


def test_flags_default_to_deterministic_and_lifted():
    lowering(aten.abs.default)(abs)
    assert lookup(aten.abs.default) == Lowering(abs, rng=False, lift=True)


def test_second_registration_names_the_first():
    @lowering(aten.abs.default)
    def first(x):
        return x

    with pytest.raises(ValueError, match=r"aten\.abs\.default already has a lowering \(.*test_registry\..*first\)"):
        lowering(aten.abs.default)(abs)
    assert lookup(aten.abs.default).fn is first


def test_same_overload_twice_in_one_call_is_refused():
    with pytest.raises(ValueError, match=r"aten\.abs\.default already has a lowering"):
        lowering(aten.abs.default, aten.abs.default)(len)


@pytest.mark.parametrize("op", [aten.abs, "aten.abs.default", torch.abs, None])
def test_only_overloads_are_taken(op):
    with pytest.raises(TypeError, match=r"takes OpOverloads such as torch\.ops\.aten\.add\.Tensor, got "):
        lowering(op)(len)
    assert registered() == {}


def test_registered_is_a_copy():
    lowering(aten.abs.default)(abs)
    table = registered()
    table.clear()
    assert lookup(aten.abs.default) is not None


# -- facts ----------------------------------------------------------------------------------------

SCHEMAS = {
    "exchange": "(Tensor x, str groups) -> Tensor",
    "exchange_pairs": "(Tensor x, str pairs) -> Tensor",
    "groups_first": "(str groups, Tensor x) -> Tensor",
    "lists": "(Tensor[] xs, int[] rows, int bucket) -> Tensor[]",
    "two_lists": "(Tensor[] xs, Tensor[] ys) -> (Tensor[], Tensor[])",
    "table": "(Tensor x, int[] values, float[] others) -> Tensor",
}


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    """Ops in our namespace that do not stay."""
    library = torch.library.Library("torch_bridge", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(f"registry_test_{name}{schema}")
    yield lambda name: getattr(torch.ops.torch_bridge, f"registry_test_{name}").default
    library._destroy()


COLLECTIVE = dict(collective=True, axes=AxesRule.ADDS)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "exchange",
        dict(collective=True),
        r"exchange\.default is a collective: say with axes= .*: AxesRule\.REMOVES .*AxesRule\.ADDS .*AxesRule\.EVERY",
    ),
    ("exchange", dict(), r"exchange\.default takes groups of ranks: say collective=True, and with axes= .*AxesRule\.REMOVES"),
    ("exchange", dict(collective=True, axes="adds"), r"axes='adds' is no rule; there are AxesRule\.REMOVES"),
    ("exchange_pairs", dict(axes=AxesRule.EVERY), r"axes=AxesRule\.EVERY is for ops in which ranks exchange values: say collective=True"),
    ("exchange_pairs", COLLECTIVE, r"axes=AxesRule\.ADDS reads the groups from the last argument, .* schema is .*\(Tensor x, str pairs\)"),
    ("groups_first", COLLECTIVE, r"reads the groups from the last argument"),
    ("table", dict(rank_table=0), r"rank_table=0 is the place of an int\[\] or float\[\] argument, and the schema is .*int\[\] values"),
    ("table", dict(rank_table=3), r"rank_table=3 is the place"),
    ("table", dict(rank_table=-1), r"rank_table=-1 is the place"),
    ("lists", dict(), r"lists\.default returns a list: say entrywise=True if .*, entrywise=False if entries depend on each other"),
    (
        "lists",
        dict(entrywise=False, stacks=Stacks((0,))),
        r"takes stacks, so it treats each entry of its lists by itself: say entrywise=True",
    ),
    ("lists", dict(entrywise=True, stacks=Stacks(())), r"lists=\(\) and replaces=\(\) are places of Tensor\[\] arguments"),
    (
        "lists",
        dict(entrywise=True, stacks=Stacks((1,))),
        r"lists=\(1,\) .* are places of Tensor\[\] arguments, and the schema is .*int\[\] rows",
    ),
    ("lists", dict(entrywise=True, stacks=Stacks((0,), replaces=(1,))), r"replaces=\(1,\) are places of Tensor\[\] arguments"),
    ("lists", dict(entrywise=True, stacks=Stacks((0,), bucket=1)), r"bucket=1 is the place of an int argument"),
    ("lists", dict(entrywise=True, stacks=Stacks((0,), constants=2)), r"constants=2 is the place of an int\[\] or float\[\] argument"),
    ("two_lists", dict(entrywise=True, stacks=Stacks((0, 1))), r"replaces=\(\) names a list for each of several results"),
    ("two_lists", dict(entrywise=True, stacks=Stacks((0, 1), replaces=(0,))), r"replaces=\(0,\) names a list for each of several results"),
    ("two_lists", dict(entrywise=True, stacks=Stacks((0, 1), replaces=(0, 1))), r"an op takes one list, not 2: say elementwise=True"),
    ("table", dict(entrywise=True, stacks=Stacks((0,))), r"lists=\(0,\) .* are places of Tensor\[\] arguments"),
    ("exchange", dict(**COLLECTIVE, view=True), r"view=True is for ops that read their first argument, .* no key, mode or ranks"),
    ("table", dict(view=True, rng=True), r"view=True is for ops that read their first argument"),
    ("two_lists", dict(entrywise=True, view=True), r"view=True is for ops that read their first argument"),
]


@pytest.mark.parametrize(("name", "said", "text"), REFUSED)
def test_facts_that_are_missing_or_do_not_fit_are_refused(ours: Any, name: str, said: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lowering(ours(name), **said)(len)
    assert registered() == {}


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("exchange", COLLECTIVE),
    ("exchange", dict(collective=True, axes=AxesRule.EVERY)),
    ("exchange_pairs", dict(collective=True, axes=AxesRule.EVERY)),
    ("table", dict(rank_table=1)),
    ("table", dict(rank_table=2)),
    ("table", dict(view=True)),
    ("lists", dict(entrywise=True, stacks=Stacks((0,), constants=1, bucket=2))),
    ("lists", dict(entrywise=False)),
    ("two_lists", dict(entrywise=True, stacks=Stacks((0, 1), replaces=(0, 1), elementwise=True))),
]


@pytest.mark.parametrize(("name", "said"), ACCEPTED)
def test_facts_that_fit(ours: Any, name: str, said: dict[str, Any]) -> None:
    lowering(ours(name), **said)(len)
    assert lookup(ours(name)) == Lowering(len, **said)


def test_ops_of_others_say_what_they_like() -> None:
    """An op that returns lists errs on the side of entries that depend on each other."""
    lowering(aten.split.Tensor)(len)
    assert lookup(aten.split.Tensor) == Lowering(len, entrywise=False)

"""A fixed part of the databases, and the tool itself; `make opinfo` runs all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.opinfo import databases, exceptions, optimizers, refusals, runner
from tests.opinfo.compare import Counted, copied, difference, stride_difference
from tests.opinfo.table import Row, of_entries, summary
from torch_bridge import metrics

FIXED = ("_unsafe_masked_index", "hash_tensor", "linalg.eigh", "polygamma.polygamma_n_0", "where")
"""Entries from different families, among them those that other bridges are known to get wrong."""

MODULES = ("nn.Softplus",)


def _runs(database: str, names: tuple[str, ...]) -> list[object]:
    found = databases.entries([database], list(names))
    return [pytest.param(run, id=f"{entry.name}-{case}") for entry in found if entry.name in names for case, run in entry.cases.items()]


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("run", _runs("op", FIXED) + _runs("module", MODULES))
def test_entry_passes(run: object) -> None:
    row = run()  # type: ignore[operator]
    assert row.status in ("pass", "skip"), row


def test_databases_are_whole() -> None:
    count = {name: len(databases.entries([name])) for name in ("op", "module", "optim")}
    assert count["op"] > 600 and count["module"] > 100 and count["optim"] > 10, count


def test_exceptions_name_entries_and_give_reasons() -> None:
    names = {entry.name for entry in databases.entries(["op", "module", "optim"])}
    for table in (exceptions.UNDEFINED, exceptions.GAUGE, exceptions.STRIDES, exceptions.SKIPPED):
        assert set(table) <= names, set(table) - names
        assert all(table.values())
    for rows in (exceptions.FIRST_RESULTS, exceptions.TOLERANCES, exceptions.TOLERANCES_BFLOAT16, exceptions.REFUSED, exceptions.DROPS_OUT):
        assert set(rows) <= names, set(rows) - names
        assert all(row[-1] for row in rows.values())
    assert set(exceptions.ERRORS) <= names
    assert all(text and reason for rows in exceptions.ERRORS.values() for text, reason in rows)


def _entry(op: object, name: str = "fake", dtype: torch.dtype = torch.float32) -> object:
    class Sample:
        input = torch.full((3,), 1.0, dtype=dtype)
        args = ()
        kwargs: dict[str, object] = {}

        @staticmethod
        def output_process_fn_grad(out: object) -> object:
            return out

    class Fake:
        full_name = name
        supports_autograd = False

        @staticmethod
        def supported_dtypes(device: str) -> set[torch.dtype]:
            return {dtype}

        @staticmethod
        def sample_inputs(device: str, dtype: torch.dtype, requires_grad: bool) -> list[object]:
            return [Sample()]

        @staticmethod
        def error_inputs_func() -> None: ...

        @staticmethod
        def error_inputs(device: str) -> list[object]:
            return [SimpleNamespace(sample_input=Sample())] * 2

    Fake.op = op  # type: ignore[attr-defined]
    return Fake


def test_a_wrong_value_fails() -> None:
    row = runner.run(_entry(lambda x: x + (x.device.type == "xla")), "float32")
    assert (row.status, row.name) == ("fail", "fake")
    assert "Mismatched elements: 3 / 3" in row.reason


def test_a_result_left_on_the_cpu_fails() -> None:
    row = runner.run(_entry(lambda x: x.cpu()), "float32")
    assert row.status == "fail" and "a result on cpu" in row.reason


def test_an_error_fails() -> None:
    def only_on_cpu(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "xla":
            raise ValueError("no such thing")
        return x

    row = runner.run(_entry(only_on_cpu), "float32")
    assert row.status == "fail" and "ValueError: no such thing" in row.reason


def test_a_counted_fallback_is_no_pass() -> None:
    def counts(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "xla":
            metrics.count("aten::made_up")
        return x + 0

    row = runner.run(_entry(counts), "float32")
    assert (row.status, row.reason) == ("fallback", "aten::made_up")


def test_a_dtype_that_torch_lacks_is_skipped() -> None:
    row = runner.run(_entry(torch.neg), "int64")
    assert (row.status, row.reason) == ("skip", "torch has no int64 form on the CPU")


def test_other_strides_fail() -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        wide = x.expand(2, 3)
        return wide.clone(memory_format=torch.contiguous_format) if x.device.type == "cpu" else wide.t().contiguous().t()

    row = runner.run(_entry(turned), "float32")
    assert row.status == "fail" and "strides (1, 2) instead of (3, 1) for shape (2, 3)" in row.reason


def test_strides_of_single_and_no_elements_say_nothing() -> None:
    assert stride_difference(torch.empty(0, 3), torch.empty(3, 0).t()) == ""
    assert stride_difference(torch.empty_strided((1, 3), (9, 1)), torch.empty(1, 3)) == ""


def test_half_precision_may_be_nearer_to_float32_than_the_cpu() -> None:
    def cpu_is_off(x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * (x.device.type == "cpu" and x.dtype == torch.bfloat16)

    assert runner.run(_entry(cpu_is_off, dtype=torch.bfloat16), "bfloat16").status == "pass"
    row = runner.run(_entry(lambda x: x + 0.5 * (x.device.type == "xla"), dtype=torch.bfloat16), "bfloat16")
    assert row.status == "fail" and "Mismatched elements: 3 / 3" in row.reason


def _refuses(device: str, error: type[Exception]) -> object:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        if device in ("both", x.device.type):
            raise (error if x.device.type == "xla" else RuntimeError)("not this")
        return x

    return _entry(refuse)


def test_an_accepted_error_input_fails() -> None:
    row = refusals.run(_refuses("cpu", RuntimeError))
    assert (row.status, row.case) == ("fail", "errors")
    assert row.reason == "2 of 2 error inputs: accepted, though the CPU raises RuntimeError: not this"


def test_another_kind_of_exception_fails() -> None:
    row = refusals.run(_refuses("both", TypeError))
    assert row.status == "fail" and "TypeError: not this instead of RuntimeError: not this" in row.reason


def test_the_same_kind_of_exception_passes() -> None:
    assert refusals.run(_refuses("both", NotImplementedError)).status == "pass"


def test_what_the_cpu_accepts_is_no_error_input() -> None:
    row = refusals.run(_refuses("xla", RuntimeError))
    assert (row.status, row.reason) == ("skip", "no error input is refused by the CPU")


def test_differences_are_told() -> None:
    one = torch.ones(2)
    assert difference(one, one.clone(), 0, 0) == ""
    assert "dtype torch.float64 instead of torch.float32" in difference(one.double(), one, 0, 0)
    assert "shape (2,) instead of (2, 1)" in difference(one, one[:, None], 0, 0)
    assert "1 results instead of 2" in difference([one], [one, one], 0, 0)
    assert "float instead of Tensor" in difference(1.0, one, 0, 0)
    assert difference(one, one + 1, 0, 0, values=False) == ""


def test_copies_share_what_the_sample_shares() -> None:
    x = torch.ones(2, requires_grad=True)
    a, b = copied((x, [x]), "xla")
    assert a is b[0] and a.requires_grad and a.is_leaf and a.device.type == "xla"


def test_counted_sees_only_what_is_new() -> None:
    metrics.count("aten::before")
    with Counted() as counted:
        metrics.count("host::now")
    assert (counted.fallbacks, counted.on_host) == ([], ["host::now"])


def test_an_entry_is_as_good_as_its_worst_case() -> None:
    rows = [Row("op", "a", "float32", "pass"), Row("op", "a", "int64", "fallback", "aten::x"), Row("op", "b", "float32", "skip", "why not")]
    assert of_entries(rows) == {("op", "a"): "fallback", ("op", "b"): "skip"}
    assert summary(rows) == "op: 2 entries: 0 fail, 1 fallback, 0 pass, 1 skip (0.0% pass)"
    assert [Row.parse(str(row)) for row in rows] == rows
    assert Row.parse(summary(rows)) is None


def test_an_entry_in_the_table_of_exceptions_is_skipped_with_its_reason() -> None:
    optimizer = next(e for e in databases.optim_db if e.optim_cls is torch.optim.SparseAdam)
    row = optimizers.run(optimizer, "for-loop")
    assert (row.status, row.name) == ("skip", "optim.SparseAdam") and "sparse" in row.reason

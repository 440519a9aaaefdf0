"""What one process that hosts all ranks gives each of them is what each of several real processes gets, or is warned about with the line (`oracle`)."""

from __future__ import annotations

import os

import pytest

from tests.torch_bridge.ranks import oracle, rank_programs

RIGHT = (
    "rows_copied", "rows_added", "rows_by_list", "data_assigned", "trained_cpu",
    "arithmetic", "maximum", "minimum", "sqrt", "pow_of", "math_floor", "np_multiply", "np_array", "np_tensor", "np_sqrt", "np_of_list", "tolist", "tolist_cpu",
    "item_compared", "item_number", "numpy_of", "isinstance_int", "torch_seed_cpu", "torch_seed_cpu_to_xla", "torch_seed_methods", "torch_seed_module",
    "torch_seed_state", "torch_seed_twice", "torch_seed_device", "generator", "python_seed", "python_choice", "python_shuffle",
    "python_random_object", "numpy_seed", "numpy_generator", "slices", "slices_cpu", "indexed_cpu", "printing", "reduced", "reduced_seeded", "gathered",
    "backward", "round_of", "abs_of", "compared", "where", "from_data", "module_scale",
)  # fmt: skip
"""Programs by hand that give every rank its own; of the others a warning or an error names the line."""


@pytest.mark.slow
def test_programs_by_hand() -> None:
    """Those that are right stay so: a warning is no excuse for them. Some generated ones run beside them."""
    programs = rank_programs.by_hand()
    verdicts = oracle.compare({**programs, **rank_programs.generated(10)})
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict.startswith("WRONG")}
    assert not wrong
    assert {name for name in programs if verdicts[name] == "right"} == set(RIGHT)


@pytest.mark.slow
@pytest.mark.thorough(keep=0)
@pytest.mark.parametrize("start", range(0, 300, 100))
def test_generated_programs(start: int) -> None:
    first = start + int(os.environ.get("RANK_PROGRAMS_SEED", "1000"))
    programs = rank_programs.generated(100, first)
    wrong = {f"{name}: {verdict}\n{programs[name]}" for name, verdict in oracle.compare(programs).items() if verdict.startswith("WRONG")}
    assert not wrong, "\n".join(wrong)


def test_the_oracle_finds_what_is_wrong() -> None:
    """A difference without a word, an error without the line, and an error of one side alone are found."""
    alone = [{"error": None, "results": [["torch.float32", [1], [float(r)]]], "warnings": []} for r in range(4)]
    right = {"error": None, "results": [p["results"][0] for p in alone], "warnings": []}
    assert oracle._verdict("p", alone, right) == "right"
    first = {**right, "results": [alone[0]["results"][0]] * 4}
    assert oracle._verdict("p", alone, first).startswith("WRONG: rank 1 has")
    assert oracle._verdict("p", alone, {**first, "warnings": ["/tmp/p.py:3 takes"]}) == "warned"
    assert oracle._verdict("p", alone, {**first, "warnings": ["/tmp/q.py:3 takes"]}).startswith("WRONG")
    assert oracle._verdict("p", alone, {**right, "error": 'File "p.py", line 3'}) == "refused"
    assert oracle._verdict("p", alone, {**right, "error": "no"}).startswith("WRONG: an error without the script's line")
    failed = [{**p, "error": "ValueError", "results": None} for p in alone]
    assert oracle._verdict("p", failed, {**right, "error": "no"}) == "both refuse"
    assert oracle._verdict("p", failed, right).startswith("WRONG")


def test_programs_are_the_same_for_the_same_seeds() -> None:
    assert rank_programs.generated(20, 5) == rank_programs.generated(20, 5) and len(set(rank_programs.generated(50).values())) == 50
    for text in rank_programs.generated(50).values():
        compile(text, "program", "exec")

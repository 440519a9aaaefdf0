"""Slices at each rank's own place alias the tensor they were taken from, as in eager torch."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.torch_bridge.ranks import eager, programs
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import world
from torch_bridge.runtime import executor

BATCH = 15
"""Random programs that are recorded before anything runs: one compilation for all of them."""


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> None:
    hosted(4, dp=2, tp=2)


def _compare(seeds: range, length: int) -> None:
    found = [programs.run(programs.random_program(seed, length), world.rank(), "xla") for seed in seeds]
    for seed, pool in zip(seeds, found, strict=True):
        alone = [programs.run(programs.random_program(seed, length), r, "cpu") for r in range(4)]
        for k, t in enumerate(pool):
            try:
                eager.same(t, [p[k].contiguous() for p in alone], rtol=0, atol=0)
            except AssertionError as error:
                raise AssertionError(f"program {seed}, tensor {k}: {error}\n{programs.random_program(seed, length)}") from None


@pytest.mark.core(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("batch", range(8))
def test_random_programs(batch: int) -> None:
    _compare(range(batch * BATCH, (batch + 1) * BATCH), 6 + batch // 2)


def test_random_programs_that_run_step_by_step() -> None:
    """The same with what is pending run between two instructions, so that values move between recorded and computed."""
    for seed in range(3):
        program = programs.random_program(seed, 10)
        pool = programs.start("xla")
        alone = [programs.start("cpu") for _ in range(4)]
        for instruction in program:
            for r, at in ((world.rank(), pool), *enumerate(alone)):
                _step(instruction, r, at)
            executor.sync()
        for k, t in enumerate(pool):
            eager.same(t, [p[k].contiguous() for p in alone], rtol=0, atol=0)


def _step(instruction: Any, r: Any, pool: programs.Pool) -> None:
    op, a, b, c = instruction
    t = pool[a % len(pool)]
    if op % 2:
        programs.WRITE[op // 2 % len(programs.WRITE)](t, pool[b % len(pool)], r, b, c)
    else:
        pool.append(programs.MAKE[op // 2 % len(programs.MAKE)](t, r, b, c))


CASES = {
    "part to base": lambda r, x: (p := x[r : r + 2], p.add_(5), x)[2],
    "base to part": lambda r, x: (p := x[r : r + 2], x.mul_(2), p)[2],
    "part to part": lambda r, x: (p := x[r : r + 2], q := x[3 - r : 5 - r], p.add_(5), q)[3],
    "part of a part": lambda r, x: (p := x[r : r + 2], q := p[:, r : r + 1], q.zero_(), torch.cat([p.reshape(-1), x.reshape(-1)]))[3],
    "view of the base": lambda r, x: (v := x.view(-1), p := x[r : r + 2], v.add_(1), p)[3],
    "part of a view": lambda r, x: (p := x.t()[r : r + 2], p.fill_(3.0), x)[2],
    "view of a part": lambda r, x: (p := x[r : r + 2], p.t()[1].fill_(3.0), x)[2],
    "base of the base": lambda r, x: (v := x[1:], p := v[r : r + 1], p.zero_(), x.neg_(), p)[4],
    "detached": lambda r, x: (p := x[r : r + 2].detach(), p.fill_(1.0), x)[2],
    "the part outlives the base's name": lambda r, x: (p := (x * 2)[r : r + 2], p.add_(1), p)[2],
    "written twice": lambda r, x: (p := x[r : r + 2], p.add_(1), x.mul_(2), p.add_(1), x)[4],
    "number": lambda r, x: (p := x[r, r : r + 2], p.fill_(r), x)[2],
    "fill of the base": lambda r, x: (p := x[r : r + 2], x.zero_(), p)[2],
    "copy from the cpu": lambda r, x: (p := x[r : r + 2], x.copy_(torch.arange(30.0).reshape(5, 6)), p)[2],
    "copy from the cpu to the part": lambda r, x: (p := x[r : r + 2], p.copy_(torch.arange(12.0).reshape(2, 6)), x)[2],
    "clones stay apart": lambda r, x: (p := x[r : r + 2].clone(), x.zero_(), p)[2],
    "other types stay apart": lambda r, x: (p := x[r : r + 2].double(), x.zero_(), p)[2],
    "swap halves": lambda r, x: (a := x[r : r + 1].clone(), x[r : r + 1].copy_(x[r + 1 : r + 2]), x[r + 1 : r + 2].copy_(a), x)[3],
    "random ops": lambda r, x: (p := x[r : r + 2], p.bernoulli_(1.0), x)[2],
    "out=": lambda r, x: (p := x[r : r + 2], torch.add(p, 1, out=p), x)[2],
    "optimizer": lambda r, x: (p := x[r : r + 2], torch._foreach_add_([x], 2.0), p)[2],
    "clamp a list": lambda r, x: (p := x[r : r + 2], torch._foreach_mul_([p], 2.0), x)[2],
}  # fmt: skip


@pytest.mark.core(keep=1)
@pytest.mark.parametrize("pending", [True, False], ids=["pending", "computed"])
def test_writes_reach_what_shares_the_memory(pending: bool) -> None:
    def program(name: str) -> Any:
        def run(r: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x.detach() + 0
                if not pending:
                    executor.sync()
                return CASES[name](r, y)

        return run

    eager.agree_all({name: program(name) for name in CASES}, torch.randn(5, 6))


def test_gradients_through_writes() -> None:
    def program(r: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x * 2
        y[r : r + 2] *= w[r]
        y[:, r] = w.sum()
        part = y[r + 1]
        part.add_(w[0])
        return y, part.exp()

    eager.agree(program, torch.randn(6, 4), torch.randn(4, 4))


def test_parts_that_are_gone_are_forgotten() -> None:
    x = torch.zeros(8, 2, device="xla")
    r = world.rank()
    for _ in range(500):
        x[r : r + 1].sum()
    gc.collect()
    assert len(x._storage.facts.links) < 200
    for _ in range(3):
        x.add_(1)
    eager.same(x, torch.full((8, 2), 3.0))


def test_a_part_keeps_its_base_up_to_date_but_not_alive_for_ever() -> None:
    part = torch.arange(8.0, device="xla")[world.rank() * 2 : world.rank() * 2 + 2]
    part += 1
    gc.collect()
    eager.same(part, eager.each(lambda r: torch.tensor([2.0 * r + 1, 2.0 * r + 2])))

"""Programs that are equal but for their devices are compiled once, and give what each would give by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm

from tests.torch_bridge.ranks.conftest import Hosted, hosted  # noqa: F401
from torch_bridge import _compat, metrics
from torch_bridge.compiler import equal_programs
from torch_bridge.config import freed_memory
from torch_bridge.mesh.places import along
from torch_bridge.recorder import placed, sharded


def products(x: torch.Tensor) -> torch.Tensor:
    """A number for which four matrices as large as x are needed at once."""
    found = [torch.sin(x * k) @ x for k in range(1, 5)]
    return torch.stack([(p @ q).sum() for p in found for q in found]).sum()


def shared() -> int:
    return metrics.COUNTERS.get("EqualProgram", 0)


def at_both(start: torch.Tensor) -> list[torch.Tensor]:
    return [placed.moved(start, along("pp", k)) for k in range(2)]


def of_all(found: list[torch.Tensor]) -> list[list[float]]:
    """Every rank's first number, at each place."""
    return [[float(s.reshape(-1)[0]) for s in sharded.shards(t)] for t in found]


def test_one_is_compiled(hosted: Hosted) -> None:  # noqa: F811
    """With collectives and random numbers in it; in-place updates stay in place."""
    hosted(8, pp=2, dp=2, tp=2)
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    before = shared()
    found = at_both(sharded.from_ranks(lambda r: torch.full((3,), float(r % 4)), ("dp", "tp")))
    for t in found:
        t.mul_(2).add_(1)
        t.copy_(xm.all_reduce("sum", t, groups=groups))
        torch_xla.sync()
    assert shared() == before + 1
    assert of_all(found) == [[4.0, 4.0, 12.0, 12.0] * 2] * 2
    drawn = []
    for t in found:
        torch.manual_seed(1)
        drawn.append(torch.nn.functional.dropout(t))
        torch_xla.sync()
    assert shared() == before + 2
    assert sharded.shards(drawn[0])[0].tolist() == sharded.shards(drawn[1])[4].tolist()


def test_with_many_temporaries(hosted: Hosted, empty_jax_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """XLA's CPU backend copies no executable whose temporaries lie in several blocks."""
    monkeypatch.setattr(freed_memory, "largest_block", lambda: 5 << 20)
    hosted(2, pp=2)
    before = shared()
    for x in at_both(sharded.from_ranks(lambda r: torch.full((1024, 1024), 0.5 + r), ())):
        y = products(x)
        torch_xla.sync()
        assert sharded.shards(y)[0].item() > 0
    assert shared() == before + 1


def test_with_a_sort(hosted: Hosted) -> None:  # noqa: F811
    """XLA's CPU backend packs no executable that sorts once it has run."""
    hosted(2, pp=2)
    before = shared()
    for x in at_both(torch.tensor([[3.0, 1.0, 2.0]] * 7, device="xla")):
        y = torch.sort(x * 3)[0]
        torch_xla.sync()
        assert sharded.shards(y)[0][0].tolist() == [3.0, 6.0, 9.0]
    assert shared() == before + 1


def test_inputs_that_nothing_reads() -> None:
    """JAX's text of a program leaves them out."""

    def first(x: Any, y: Any) -> Any:
        return x + 1

    def second(x: Any, y: Any) -> Any:
        return y + 1

    def alone(x: Any) -> Any:
        return x + 1

    second.__name__ = alone.__name__ = first.__name__
    x, mesh = jax.numpy.ones(2), jax.sharding.Mesh(jax.devices()[:1], ("pp",))
    lowered = [jax.jit(first).lower(x, x), jax.jit(second).lower(x, x), jax.jit(alone).lower(x), jax.jit(first).lower(x, x)]
    assert len({one.as_text() for one in lowered}) == 1
    keys = [equal_programs._key(mesh, one, one.as_text()) for one in lowered]
    assert keys[0] == keys[3] and len(set(keys)) == 3


def test_what_depends_on_the_ranks_is_not_shared(hosted: Hosted) -> None:  # noqa: F811
    hosted(4, pp=2, tp=2)
    before = shared()
    found = [t * xm.get_ordinal() for t in at_both(torch.ones(3, device="xla"))]
    torch_xla.sync()
    assert shared() == before
    assert of_all(found)[0][:2] == [0.0, 1.0] and of_all(found)[1][2:] == [2.0, 3.0]


@pytest.mark.parametrize("why", ["refused", "cached"])
def test_it_is_compiled_where_it_cannot_be_shared(hosted: Hosted, monkeypatch: pytest.MonkeyPatch, why: str) -> None:  # noqa: F811
    """JAX refuses to copy it, or it may have been loaded from JAX's cache on disk."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("callbacks")

    if why == "refused":
        monkeypatch.setattr(_compat, "on_devices", refuse)
    else:
        compiling = equal_programs._compiled

        def loaded(*args: Any) -> Any:
            equal_programs._listen()
            monkeypatch.setattr(type(args[1]), "compile", noting(type(args[1]).compile))
            return compiling(*args)

        def noting(compile: Any) -> Any:
            def found(self: Any) -> Any:
                equal_programs._note("/jax/compilation_cache/cache_hits")
                return compile(self)

            return found

        monkeypatch.setattr(equal_programs, "_compiled", loaded)
    hosted(4, pp=2, tp=2)
    before = shared()
    found = at_both(torch.full((5,), 3.0, device="xla"))
    for t in found:
        t.mul_(7)
        torch_xla.sync()
    assert shared() == before and of_all(found) == [[21.0] * 4] * 2

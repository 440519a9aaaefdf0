"""Which samples ranks read: those that plain loops over a global batch give; loaders that go on where training was."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_jax.training.data.megatron.loader import MegatronLoader
from nxd_jax.training.data.megatron.samplers import MegatronPretrainingBatchSampler, MegatronPretrainingRandomBatchSampler
from tests.nxd_jax.training.data.megatron import corpora

Single, Cyclic = MegatronPretrainingBatchSampler, MegatronPretrainingRandomBatchSampler


def single(total: int, consumed: int, size: int, rank: int, dp: int, *, drop_last: bool, pad: bool) -> list[list[int]]:
    found, batch = [], []
    for number in range(consumed, total):
        batch.append(number)
        if len(batch) == size:
            found.append([batch[k] for k in range(rank, size, dp)])
            batch = []
    if batch and not drop_last:
        mine = [batch[k] for k in range(rank, len(batch), dp)]
        found.append(mine + ([-1] * (size // dp - len(mine)) if pad else []))
    return found


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize(("total", "consumed"), [(24, 0), (30, 8), (27, 20), (9, 0)])
def test_single(total: int, consumed: int, dp: int) -> None:
    for rank in range(dp):
        for drop_last, pad in ((True, False), (False, True), (True, True)):
            made = Single(total, consumed, 1, 8 if total == 24 else 4, rank, dp, drop_last, pad)
            if consumed + made.global_batch_size > total and drop_last:
                continue
            wanted = single(total, consumed, made.global_batch_size, rank, dp, drop_last=drop_last, pad=pad)
            assert list(made) == list(made) == wanted
            assert len(made) * made.global_batch_size - consumed == sum(map(len, wanted)) * dp


def cyclic(total: int, consumed: int, mbs: int, size: int, rank: int, dp: int) -> list[list[int]]:
    usable = total - total % size
    epoch, within = consumed // usable, consumed % usable
    part = (total // (mbs * dp)) * mbs
    source = torch.Generator()
    source.manual_seed(epoch)
    order = torch.randperm(part, generator=source).tolist()
    found, batch = [], []
    for number in order[within // dp :]:
        batch.append(rank * part + number)
        if len(batch) == size // dp:
            found.append(batch)
            batch = []
    return found


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize(("total", "consumed"), [(24, 0), (30, 8), (30, 56), (27, 48)])
def test_cyclic(total: int, consumed: int, dp: int) -> None:
    read = []
    for rank in range(dp):
        made = Cyclic(total, consumed, 1, 8, rank, dp)
        assert list(made) == cyclic(total, consumed, 1, 8, rank, dp)
        assert len(made) == total // 8
        read += [k for batch in made for k in batch]
    assert len(read) == len(set(read)) and len(read) == total // 8 * 8 - consumed % (total // 8 * 8)


ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batch": (Single, {"global_batch_size": 6}, "data.global_batch_size=6 must be a multiple of data.micro_batch_size=2 times 2 data-parallel"),
    "no batch": (Single, {"global_batch_size": 0}, "data.global_batch_size=0 must be"),
    "no micro-batch": (Single, {"micro_batch_size": 0}, "data.micro_batch_size=0 times 2"),
    "rank": (Single, {"data_parallel_rank": 2}, "rank 2 is none of 2 data-parallel ranks"),
    "few": (Single, {"total_samples": 7}, "there are 7 samples, and a step needs data.global_batch_size=8"),
    "none": (Cyclic, {"total_samples": 0}, "there are 0 samples"),
    "uneven end": (
        Single,
        {"total_samples": 21, "drop_last": False},
        "data.validation_drop_last: False leaves a batch of 5 samples at the end of 21, and a step needs data.global_batch_size=8: "
        "set data.pad_samples_to_global_batch_size: True",
    ),
    "cyclic": (Cyclic, {"drop_last": False}, "data.drop_last: False is not for data.dataloader_type: cyclic; use single"),
    "padding": (Cyclic, {"pad_samples_to_global_batch_size": True}, "data.pad_samples_to_global_batch_size: True is not for"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be(name: str) -> None:
    kind, changes, said = ERRORS[name]
    plain = {
        "total_samples": 24,
        "consumed_samples": 0,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "data_parallel_rank": 0,
        "data_parallel_size": 2,
    }
    with pytest.raises(ValueError, match=said):
        kind(**{**plain, **changes})


def test_batches_of_one_sample_leave_nothing_out() -> None:
    assert sorted(k for batch in Cyclic(5, 0, 1, 1, 0, 1, drop_last=False) for k in batch) == list(range(5))


def test_places_where_no_batch_begins() -> None:
    with pytest.raises(ValueError, match="20 of 24 samples were trained on, and the next step needs 8: trainer.max_steps times"):
        list(Single(24, 20, 1, 8, 0, 1))
    assert len(list(Single(24, 20, 1, 8, 0, 1, False, True))) == 1
    with pytest.raises(
        ValueError,
        match="26 samples were trained on, 2 of them in this epoch, where no micro-batch begins: .* multiple of data.micro_batch",
    ):
        list(Cyclic(24, 26, 2, 8, 0, 2))


# -- loaders -----------------------------------------------------------------------------------------


@pytest.fixture
def samples(tmp_path: Path) -> Any:
    return corpora.samples(corpora.write(tmp_path / "a", corpora.rows(60)), 40)


def loader(samples: Any, kind: Any = Single, consumed: int = 0, size: int = 4, rank: int = 0, dp: int = 1) -> MegatronLoader:
    return MegatronLoader(samples, kind(len(samples), consumed, 1, size, rank, dp))


def tokens(batches: Any) -> list[Any]:
    return [batch["tokens"].tolist() for batch in batches]


def chain(lists: list[Any]) -> list[Any]:
    return list(itertools.chain(*lists))


def test_batches_are_the_samples_of_their_numbers(samples: Any) -> None:
    for rank in (0, 1):
        made = loader(samples, consumed=8, rank=rank, dp=2)
        for batch, numbers in zip(made, single(len(samples), 8, 4, rank, 2, drop_last=True, pad=False), strict=True):
            for name, values in batch.items():
                assert torch.equal(values, torch.stack([samples[k][name] for k in numbers]))
            assert tuple(batch["tokens"].shape) == (2, 8) and tuple(batch["attention_mask"].shape) == (2, 1)


@pytest.mark.parametrize("kind", [Single, Cyclic])
def test_going_on(kind: Any, samples: Any) -> None:
    """By the samples that were trained on, or by what the loader itself kept; with another batch size by the samples."""
    whole = tokens(loader(samples, kind))
    for taken in range(1, len(whole)):
        before = loader(samples, kind)
        batches = iter(before)
        for _ in range(taken):
            next(batches)
        state = copy.deepcopy(before.state_dict())
        assert state == {"samples": taken * 4, "global_batch_size": 4}
        by_state = loader(samples, kind)
        by_state.load_state_dict(state)
        assert tokens(by_state) == tokens(loader(samples, kind, taken * 4)) == whole[taken:]
        smaller = loader(samples, kind, taken * 4, 2)
        smaller.load_state_dict(state)
        assert chain(tokens(smaller)[: 2 * (len(whole) - taken)]) == chain(whole[taken:])


def test_a_further_pass(samples: Any) -> None:
    """Validation begins anew; training behind what was trained on."""
    anew = loader(samples)
    assert tokens(anew) == tokens(anew)
    count = len(samples) // 4
    trained = [0]
    made = MegatronLoader(samples, Cyclic(len(samples), 4, 1, 4, 0, 1), lambda: trained[0])
    first = tokens(made)
    assert first == tokens(loader(samples, Cyclic, 4)) and len(made) == count
    trained[0] = count * 4
    assert tokens(made) == tokens(loader(samples, Cyclic, count * 4)) != tokens(loader(samples, Cyclic))
    trained[0] = 8
    part = iter(made)
    assert next(part)["tokens"].tolist() == tokens(loader(samples, Cyclic, 8))[0]

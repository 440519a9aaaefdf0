"""Batches for context parallelism."""

from __future__ import annotations

import pytest
import torch
import torch_xla.core.xla_model as xm

from nxd_jax.parallel_layers import grads, parallel_state
from nxd_jax.utils.batch_utils import get_batch_on_this_context_parallel_rank, shift_labels
from tests.nxd_jax.conftest import Nxd
from torch_bridge.recorder import sharded


def make() -> dict[str, object]:
    return {
        "input_ids": torch.randint(0, 9, (3, 8)),
        "labels": torch.randint(0, 9, (3, 8)),
        "position_ids": torch.arange(8)[None],
        "attention_mask": torch.rand(3, 1, 8, 8) < 0.5,
        "lengths": torch.tensor([1, 2, 3]),
        "padding": torch.zeros(3, 1, 1, 8),
        "loss_scale": torch.tensor(2.0),
        "name": "batch",
        "nothing": None,
    }


def test_shift_labels() -> None:
    batch = {"labels": torch.tensor([[1, 2, 3], [4, -100, 6]]), "other": 1}
    shifted = shift_labels(batch)
    assert shifted["labels"].tolist() == [[2, 3, -100], [-100, 6, -100]] and shifted["other"] == 1
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, 6]]
    on_xla = shift_labels({"labels": batch["labels"].to("xla")})["labels"]
    assert on_xla.device.type == "xla" and on_xla.tolist() == shifted["labels"].tolist()
    assert shift_labels({"a": 1}) == {"a": 1}
    with pytest.raises(ValueError, match=r"batch\['labels'\] has shape \[3\]: shift_labels wants \[batch, length\]"):
        shift_labels({"labels": torch.zeros(3)})


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("size", [{"size": 4, "cp": 4}, {"size": 8, "cp": 2, "tp": 2}])
def test_runs_of_every_rank(nxd: Nxd, size: dict[str, int], device: str) -> None:
    nxd(**size)
    full = make()
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in full.items()}
    found = get_batch_on_this_context_parallel_rank(given)
    groups = parallel_state.get_context_model_parallel_group(as_list=True)
    place = {r: k for g in groups for k, r in enumerate(g)}
    length = 8 // size["cp"]
    for name, dim in (("input_ids", 1), ("labels", 1), ("position_ids", 1), ("attention_mask", 2)):
        x, whole = found[name], (shift_labels(full) if name == "labels" else full)[name]
        assert isinstance(whole, torch.Tensor) and x.device.type == "xla" and sharded.varying(x).axes == ("cp",)
        for rank, own in enumerate(sharded.shards(x)):
            assert torch.equal(own, whole.narrow(dim, place[rank] * length, length))
    for name in ("lengths", "padding", "loss_scale", "name", "nothing"):
        assert found[name] is given[name]


def test_position_ids_of_one_dim(nxd: Nxd) -> None:
    nxd(2, cp=2)
    found = get_batch_on_this_context_parallel_rank({"position_ids": torch.arange(6)})["position_ids"]
    assert [t.tolist() for t in sharded.shards(found)] == [[0, 1, 2], [3, 4, 5]]


def test_labels_of_whole_sequences_stay(nxd: Nxd) -> None:
    nxd(2, cp=2)
    labels = torch.tensor([1, 0])
    assert get_batch_on_this_context_parallel_rank({"labels": labels})["labels"] is labels
    assert get_batch_on_this_context_parallel_rank({"labels": None}) == {"labels": None}


def test_labels_are_not_moved_twice(nxd: Nxd) -> None:
    batch = shift_labels({"labels": torch.arange(8).view(1, 8)})
    nxd(2, tp=2)
    assert get_batch_on_this_context_parallel_rank(batch) is batch
    nxd(2, cp=2)
    with pytest.raises(ValueError, match=r"moved by shift_labels already.* with context_parallel_size > 1 leave shift_labels out"):
        get_batch_on_this_context_parallel_rank(batch)


class NextToken(torch.nn.Module):
    """Predicts from a token and its place. The loss shifts where nothing else does, as the models of upstream's examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.head = torch.nn.Linear(6, 11)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.embedding(input_ids) * (1 + position_ids[..., None])))
        if not parallel_state.model_parallel_is_initialized() or parallel_state.get_context_model_parallel_size() == 1:
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return losses / (input_ids.shape[0] * (SEQ - 1))


SEQ = 8


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_script_in_upstreams_words_equals_one_rank(nxd: Nxd, cp: int) -> None:
    """The loss, and the norm of the gradients, of a script that leaves the shift to the cut."""
    torch.manual_seed(0)
    model = NextToken()
    ids = torch.randint(0, 11, (3, SEQ))
    batch = {"input_ids": ids, "position_ids": torch.arange(SEQ)[None], "labels": ids}
    loss = model(**batch)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad()

    nxd(4, cp=cp)
    model.to("xla")
    own = {name: x.to("xla") for name, x in get_batch_on_this_context_parallel_rank(batch).items()}
    found = model(**own)
    found.backward()
    total = xm.all_reduce("sum", found.detach(), groups=parallel_state.get_context_model_parallel_group(as_list=True))
    for parameter in model.parameters():
        assert parameter.grad is not None
        xm.all_reduce("sum", [parameter.grad], groups=parallel_state.get_context_model_parallel_group(as_list=True))
    torch.testing.assert_close(total.item(), loss.item(), rtol=1e-5, atol=0)
    torch.testing.assert_close(grads.get_grad_norm(list(model.parameters())).item(), norm.item(), rtol=1e-5, atol=0)


def test_batches_of_data_parallel_ranks(nxd: Nxd) -> None:
    """A batch that differs among data-parallel ranks is cut on each of them."""
    nxd(4, cp=2)
    ids = torch.arange(12).reshape(2, 6)
    batch = {"input_ids": sharded.from_ranks(lambda r: ids[r // 2 : r // 2 + 1], ["dp"])}
    found = get_batch_on_this_context_parallel_rank(batch)["input_ids"]
    assert [t.tolist() for t in sharded.shards(found)] == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]], [[9, 10, 11]]]


def test_cpu_batches_of_data_parallel_ranks(nxd: Nxd) -> None:
    """A CPU tensor that differs among data-parallel ranks is cut as each rank's own."""
    nxd(4, cp=2)
    own = torch.arange(12).reshape(2, 1, 6)[parallel_state.get_data_parallel_rank()]
    assert own.device.type == "cpu"
    found = get_batch_on_this_context_parallel_rank({"input_ids": own})["input_ids"]
    assert [t.tolist() for t in sharded.shards(found)] == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]], [[9, 10, 11]]]


def test_without_context_parallelism(nxd: Nxd) -> None:
    nxd(2, tp=2)
    batch = make()
    assert get_batch_on_this_context_parallel_rank(batch) is batch


def test_errors(nxd: Nxd) -> None:
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        get_batch_on_this_context_parallel_rank({})
    nxd(4, cp=4)
    with pytest.raises(ValueError, match=r"batch\['labels'\] has a sequence length of 6, which does not divide by context_parallel_size=4"):
        get_batch_on_this_context_parallel_rank({"labels": torch.zeros(2, 6)})

"""CPU tensors that differ by rank: every operation gives each rank what it would get alone."""

from __future__ import annotations

import copy
import io
import operator
import pathlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch_xla.core.xla_model as xm

import torch_bridge
from tests.torch_bridge.ranks.conftest import Hosted
from torch_bridge.mesh import rank_numbers
from torch_bridge.recorder import first_rank_files, rank_tensor, sharded
from torch_bridge.recorder.rank_tensor import RankTensor

F = torch.nn.functional


@pytest.fixture(autouse=True)
def four_ranks(hosted: Hosted) -> None:
    hosted(4, dp=2, tp=2)


def table() -> torch.Tensor:
    return torch.arange(16.0).view(8, 2)


def _in_inference_mode(r: Any) -> torch.Tensor:
    with torch.inference_mode():
        return F.softmax(table()[r : r + 2].reshape(-1).double(), 0)


def _gradient(loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    weight = table().requires_grad_()
    loss(weight).backward()
    assert weight.grad is not None
    return weight.grad


def _set(t: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    t[index] = value
    return t


def _with_data(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    p.data = value
    return p.detach()


def _made_double(part: torch.Tensor) -> torch.Tensor:
    layer = torch.nn.Linear(2, 2)
    layer.load_state_dict({"weight": part, "bias": part[0]})
    return layer.double().bias.detach()


def _added(r: Any) -> torch.Tensor:
    t = table()
    t[2 * r : 2 * r + 2] += 1
    t[r] *= r
    t[torch.tensor(r), 1] -= 3
    return t


def _normed(r: Any) -> torch.Tensor:
    norm = torch.nn.BatchNorm1d(2)
    norm(table()[r : r + 4])
    return torch.stack([*norm.eval()(table()).detach(), norm.running_mean, norm.running_var])  # type: ignore[list-item]


def _hooked(r: Any) -> torch.Tensor:
    weight, found = torch.nn.Parameter(table()), list[torch.Tensor]()
    weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(lambda p: found.append(p.grad + 1))  # type: ignore[operator]
    with torch.no_grad():
        weight.copy_(table() * (r + 1))
    (weight * table()[r]).sum().backward()
    return found[0] + weight.detach()


def _by_lists(r: Any) -> torch.Tensor:
    found = [torch.zeros(2), torch.ones(2)]
    torch._foreach_add_(found, [table()[r], table()[r + 1]])
    return torch.stack(found)


Script = Callable[[Any], Any]

MADE: dict[str, Script] = {
    "tensor": lambda r: torch.tensor(r),
    "tensor of a list": lambda r: torch.tensor([[r, 1], [2, r + 1]]),
    "tensor of truths": lambda r: torch.tensor([r == 1, True]),
    "tensor of halves": lambda r: torch.tensor([r / 2], dtype=torch.float64),
    "as_tensor": lambda r: torch.as_tensor([r]),
    "tensor of tensors": lambda r: torch.tensor([torch.ones(()) * r, torch.tensor(2.0)]),
    "as_tensor of a tensor": lambda r: torch.as_tensor(torch.ones(2) * r, dtype=torch.float64),
    "full": lambda r: torch.full((2, 3), r),
    "full of floats": lambda r: torch.full((2,), r / 4, dtype=torch.bfloat16),
    "arange": lambda r: torch.arange(r * 3, r * 3 + 3),
    "arange with a step": lambda r: torch.arange(r, r + 8, 4, dtype=torch.float32),
    "linspace": lambda r: torch.linspace(0, r, 3),
    "new_tensor": lambda r: table().new_tensor([r]),
    "new_full": lambda r: table().new_full((2,), r),
    "full_like": lambda r: torch.full_like(table(), r),
    "products": lambda r: 2 * torch.ones(3) * r + r * table()[0, 0],
    "powers": lambda r: table() ** r,
    "row": lambda r: table()[r],
    "last rows": lambda r: table()[-1 - r],
    "rows and a column": lambda r: table()[2 * r : 2 * r + 2, r % 2],
    "rows of what differs": lambda r: (table() + r)[2 * r : 2 * r + 2],
    "its rows": lambda r: table()[2 * r : 2 * r + 2],
    "its rows of all of them": lambda r: table()[2 * r : (r + 1) * 2].clone().add_(1),
    "columns": lambda r: table()[:, r % 2 : r % 2 + 1],
    "rows from behind": lambda r: table()[-4 - r : -2 - r],
    "every third row": lambda r: table()[r : r + 4 : 3],
    "rows of a view": lambda r: table().T[:, r : r + 4][1:],
    "rows of a batch": lambda r: torch.vmap(lambda row: row[r % 2 : r % 2 + 1])(table()),
    "rows without gradients": lambda r: table().requires_grad_().detach()[r : r + 2],
    "rows in inference mode": lambda r: _in_inference_mode(r),
    "a mask of rows": lambda r: table()[torch.arange(8) == r],
    "narrow": lambda r: table().narrow(0, 2 * r, 2),
    "select": lambda r: table().select(0, r),
    "roll": lambda r: torch.roll(table(), r, 0),
    "split": lambda r: table().split(2)[r],
    "split by a function": lambda r: torch.split(table(), 2)[r],
    "chunk": lambda r: table().chunk(4)[r],
    "unbind": lambda r: table().unbind(0)[r],
    "tensor_split": lambda r: torch.tensor_split(table(), 4)[r],
    "every fourth piece": lambda r: torch.cat(table().split(1)[r::4]),
    "some pieces": lambda r: torch.cat(table().split(1)[r : r + 2]),
    "where": lambda r: torch.where(table() > 3, r, -1),
    "comparison": lambda r: table() == r,
    "clamp": lambda r: table().clamp(max=r),
    "masked_fill": lambda r: table().masked_fill(table() > 2, r),
    "one_hot": lambda r: F.one_hot(torch.tensor([r]), 4),
    "index_select": lambda r: table().index_select(0, torch.tensor([r, 0])),
    "gather": lambda r: table().gather(1, torch.full((8, 1), r % 2)),
    "embedding": lambda r: F.embedding(torch.tensor([r]), table()),
    "fill_": lambda r: torch.zeros(2, 3).fill_(r),
    "matmul": lambda r: table().t() @ (table() + r),
    "several steps": lambda r: F.softmax((table().narrow(0, 2 * r, 2) * 0.1).transpose(0, 1).contiguous(), -1).sum(0),
    "in place": lambda r: (t := table() * r, t.add_(1), t[0].zero_(), t[:, 1].mul_(r + 2), t)[-1],
    "in place of a clone": lambda r: (t := table()[r].clone(), t.add_(r), t)[-1],
    "two results": lambda r: torch.stack((table() * (r + 1)).max(0)),
    "a layer": lambda r: F.linear(table()[r], torch.ones(3, 2), torch.arange(3.0)),
    "random rows": lambda r: (torch.manual_seed(3), torch.rand(2) + torch.rand_like(torch.ones(2) * r))[-1],
    "randint": lambda r: (torch.manual_seed(3), torch.randint(0, r + 5, (4,)))[-1],
    "of a generator": lambda r: torch.normal(torch.ones(3) * r, 1.0, generator=torch.Generator().manual_seed(2)),
    "parts added to": _added,
    "rows up to a length": lambda r: _set(torch.zeros(2, 4), (0, slice(None, torch.arange(4)[r])), 1.0),
    "a part given to torch.func": lambda r: torch.func.grad(lambda x, part: (x * part * x).sum())(torch.ones(2), table()[r]),
    "running statistics": _normed,
    "a parameter with hooks": _hooked,
    "lists of tensors in place": _by_lists,
    "a row written": lambda r: _set(table(), r, 5.0),
    "rows written": lambda r: _set(table(), (slice(2 * r, 2 * r + 2), 1), torch.ones(2)),
    "a batch filled by rows": lambda r: _set(_set(torch.zeros(2, 2), 0, table()[r]), 1, table()[r + 1]),
    "a sum in place": lambda r: torch.zeros(2).add_(r),
    "a sum of tensors in place": lambda r: torch.zeros(2).add_(torch.ones(2) * r),
    "out=": lambda r: torch.mul(torch.ones(2), r + 1.0, out=torch.empty(2)),
    "a copy": lambda r: torch.zeros(2).copy_(table()[r]) * 2,
    "a copy to data": lambda r: (p := torch.nn.Parameter(torch.zeros(2)), p.data.copy_(table()[r]), p.detach() * 2)[-1],
    "a sum in place of data": lambda r: (p := torch.nn.Parameter(torch.zeros(2)), p.data.add_(table()[r], alpha=2.0), p.detach() * 2)[-1],
    "data": lambda r: _with_data(torch.nn.Parameter(torch.zeros(2)), table()[r]) * 2,
    "data of another kind": lambda r: _made_double(table()[r : r + 2]),
    "plain data again": lambda r: _with_data(torch.nn.Parameter(table()[r]), torch.ones(3)) * 2,
    "a view of what is written later": lambda r: (t := table(), v := t[r : r + 2], p := t.split(2)[r], t.mul_(3), torch.cat((v, p)))[-1],
    "at a number out of a tensor": lambda r: (i := (torch.arange(3) + r)[1], torch.stack((table()[i], table()[i, :] + 1, table().T[..., i])))[-1],
    "at numbers out of a list": lambda r: torch.stack([table()[i] for i in (torch.arange(3) + r).tolist()]),
    "between numbers out of a list": lambda r: torch.stack([table()[i : i + 2] for i in (torch.arange(3) + r).tolist()]),
    "gradients of a row at a number": lambda r: _gradient(lambda w: (w[torch.tensor(r)] * 2).sum()),
    "at an array": lambda r: table()[np.arange(2) + r],
    "an array of it": lambda r: torch.tensor(np.asarray(table()[r : r + 2])) + torch.from_numpy(np.array(np.arange(2.0, dtype=np.float32) + r)),
    "arrays by numbers": lambda r: torch.from_numpy(np.roll(np.take(np.arange(8.0).reshape(4, 2), r, axis=0), r) + np.where(np.ones(2) > 0, r, 0)),
    "a conjugate": lambda r: torch.complex(table(), table()).conj()[r : r + 2].imag,
    "numbers read": lambda r: torch.ones(2) * (torch.tensor([r]) * 3).item(),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_each_rank_has_its_own(name: str) -> None:
    expected = [MADE[name](r) for r in range(4)]
    found = MADE[name](xm.get_ordinal())
    assert isinstance(found, torch.Tensor) and found.device.type == "cpu"
    if isinstance(found, RankTensor):
        for own, e in zip(found.parts, expected, strict=True):
            assert own.dtype == e.dtype and torch.equal(own, e)
    moved = found.to("xla")
    for own, e in zip(torch_bridge.shards(moved), expected, strict=True):
        assert own.dtype == e.dtype and torch.equal(own, e)
    target = torch.zeros_like(expected[0], device="xla")
    target.copy_(found)
    assert all(map(torch.equal, torch_bridge.shards(target), expected))


@pytest.mark.parametrize(
    "name", ["tensor", "tensor of a list", "tensor of truths", "full", "full of floats", "arange", "arange with a step", "linspace"]
)
def test_made_on_xla(name: str) -> None:
    """The same with `device="xla"`, or with xla as the default device."""
    with torch.device("xla"):
        found = MADE[name](xm.get_ordinal())
    assert found.device.type == "xla"
    for own, r in zip(torch_bridge.shards(found), range(4), strict=True):
        e = MADE[name](r)
        assert own.dtype == e.dtype and torch.equal(own, e)


def test_made_on_an_xla_device() -> None:
    rank = xm.get_ordinal()
    expected: dict[str, Script] = {
        "tensor": lambda r: torch.tensor([r, 1], device=device),
        "requires_grad": lambda r: torch.full((2,), r * 1.0, device=device, requires_grad=True),
        "arange": lambda r: torch.arange(r * 2, r * 2 + 2, dtype=torch.long, device=device),
        "new_tensor": lambda r: table().to(device).new_tensor([r]),
        "roll": lambda r: table().to(device).roll(r, 0),
        "roll of all": lambda r: torch.roll(table().to(device), r + 1),
        "roll of dims": lambda r: torch.roll(table().to(device), (r, 1), (0, 1)),
        "pieces": lambda r: torch.cat(table().to(device).split(1)[r::4]),
        "the last pieces": lambda r: torch.cat(table().to(device).split(1)[-1 - r :: -4][:1]),
    }
    for name, script in expected.items():
        device = "xla"
        found = script(rank)
        device = "cpu"
        for own, r in zip(torch_bridge.shards(found), range(4), strict=True):
            e = script(r)
            assert own.dtype == e.dtype and torch.equal(own, e), name
            assert found.requires_grad == e.requires_grad


def test_only_axes_along_which_numbers_differ() -> None:
    from torch_bridge.mesh import world

    along_tp = world.current().table(lambda r: r % 2)
    assert torch_bridge.varying((torch.ones(2) * along_tp).to("xla")).axes == ("tp",)
    assert torch_bridge.varying(table().chunk(2)[along_tp].to("xla")).axes == ("tp",)
    assert torch_bridge.varying((torch.ones(2) * along_tp + xm.get_ordinal()).to("xla")).axes == ("dp", "tp")


def test_a_write_to_a_view_counts_for_the_whole() -> None:
    from torch_bridge.mesh import world

    whole = torch.ones(4) * world.current().table(lambda r: r % 2)
    view = whole[1:]
    view.add_(world.current().table(lambda r: r // 2))
    for t in (whole, whole.view(2, 2), whole.detach()):
        assert torch_bridge.varying(t.to("xla")).axes == ("dp", "tp")
        assert [own.sum().item() for own in torch_bridge.shards(t.to("xla"))] == [0, 4, 3, 7]


def test_reading_gives_the_first_rank() -> None:
    rank = xm.get_ordinal()
    t = torch.ones(2) * (rank + 1)
    assert str(t) == "tensor([1., 1.])" and repr(t[0]) == "tensor(1.)" and f"{t[0]:.1f}" == "1.0"
    assert t.tolist() == [1.0, 1.0] and t.numpy().tolist() == [1.0, 1.0]
    number = t.sum().item()
    assert number == 2.0 and rank_numbers.per_rank(number) == [2.0, 4.0, 6.0, 8.0]
    assert int(t[0]) == 1 and float(t[0]) == 1.0
    with pytest.warns(
        UserWarning, match=r"test_rank_tensor.py:\d+ takes \[5, 6, 7, 8\]\[torch.tensor\(rank\)\] by a number that differs by rank"
    ):
        assert [5, 6, 7, 8][torch.tensor(rank)] == 5
    assert bool(t[0] == 1) and not bool(t[0] == 2)
    assert len(t) == 2 and [x.item() for x in t] == [1.0, 1.0]
    again = copy.deepcopy(t)
    again.add_(1)
    assert [p.tolist() for p in t.parts] == [[1.0 + r] * 2 for r in range(4)]
    assert [p.tolist() for p in again.parts] == [[2.0 + r] * 2 for r in range(4)]


def test_a_copy_is_of_the_moment() -> None:
    """Other ranks' values are fetched later: what happens to the tensor meanwhile changes nothing, and copies that share memory share all of it."""
    x = torch.arange(6.0, device="xla").view(2, 3) + xm.get_ordinal()
    view = x.t()
    host = view.cpu()
    assert isinstance(host, RankTensor) and callable(host._parts), "not fetched yet"
    x.add_(100)
    view.data = torch.zeros(5, device="xla")
    again = copy.copy(host)
    again.mul_(2)
    for r, own in enumerate(host.parts):
        assert torch.equal(own, 2 * (torch.arange(6.0).view(2, 3).t() + r))


def test_tensors_on_the_cpu_stay_there_where_xla_is_the_default() -> None:
    rank = xm.get_ordinal()
    x = torch.ones(2) * rank
    with torch.device("xla"):
        product, new = x * rank, torch.full((2,), rank)
        x += rank
    assert isinstance(product, RankTensor) and [p.tolist() for p in product.parts] == [[float(r * r)] * 2 for r in range(4)]
    assert isinstance(x, RankTensor) and [p.tolist() for p in x.parts] == [[2.0 * r] * 2 for r in range(4)]
    assert new.device.type == "xla" and [own.tolist() for own in torch_bridge.shards(new)] == [[r, r] for r in range(4)]


def test_a_file_has_the_first_ranks_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rank_files, "_noted", False)
    file = io.BytesIO()
    with pytest.warns(UserWarning, match=r"a tensor \(shape \[2\] on the CPU, different on each rank\) is saved as rank 0 holds it"):
        torch.save({"x": torch.ones(2) * xm.get_ordinal()}, file)
    file.seek(0)
    loaded = torch.load(file)["x"]
    assert type(loaded) is torch.Tensor and loaded.tolist() == [0.0, 0.0]


def test_what_reads_memory_gets_the_first_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """safetensors, which save_pretrained writes, and DLPack: there is no memory behind the tensor itself."""
    monkeypatch.setattr(first_rank_files, "_noted", False)
    t = torch.ones(3) * (xm.get_ordinal() + 1)
    assert copy.copy(t).parts is t.parts
    with pytest.warns(UserWarning, match="is saved as rank 0 holds it"):
        safetensors.torch.save_file({"a": t}, tmp_path / "a.safetensors")
    assert safetensors.torch.load_file(tmp_path / "a.safetensors")["a"].tolist() == [1.0, 1.0, 1.0]
    assert torch.from_dlpack(t).tolist() == [1.0, 1.0, 1.0] and np.from_dlpack(t).tolist() == [1.0, 1.0, 1.0]
    assert t.untyped_storage().nbytes() == 12 and t.data_ptr() == t.first.data_ptr()


def test_a_layer_on_the_cpu_remembers_each_ranks_weights() -> None:
    """Full weights, of which each rank loads its part, before the model is moved."""
    whole = torch.arange(24.0).view(8, 3)
    layer = torch.nn.Linear(3, 2, bias=False)
    layer.load_state_dict({"weight": torch.split(whole, 2)[xm.get_ordinal()]})
    assert layer.weight.tolist() == whole[:2].tolist()
    layer.to("xla")
    assert all(torch.equal(own, whole[2 * r : 2 * r + 2]) for r, own in enumerate(torch_bridge.shards(layer.weight)))


def test_a_copy_into_shared_memory_is_said() -> None:
    """On the way to xla each rank has its own; on the CPU all would have rank 0's."""
    t = torch.zeros(8)
    views = t.view(4, 2), t[:2]
    with pytest.warns(
        UserWarning,
        match=r"test_rank_tensor.py.* copies values that differ by rank into a CPU tensor \(of shape \[8\]\) in whose memory other",
    ):
        t.copy_(torch.arange(8.0) * xm.get_ordinal())
    assert [own.sum().item() for own in torch_bridge.shards(t.to("xla"))] == [0, 28, 56, 84] and len(views) == 2


def test_an_optimizer_on_the_cpu() -> None:
    """Each rank's own gradients make weights and an optimizer's state each rank's own."""

    def trained(r: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(2, 3)
        vars(layer.weight)["kept"] = "by name"
        optimizer = torch.optim.AdamW(layer.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = layer(table()[2 * r : 2 * r + 2]).square().mean()
            loss.backward()
            optimizer.step()
        assert isinstance(layer.weight, torch.nn.Parameter) and vars(layer.weight)["kept"] == "by name"
        return [loss.detach(), layer.weight.detach(), optimizer.state[layer.bias]["exp_avg_sq"]]

    expected = [trained(r) for r in range(4)]
    for found, *own in zip(trained(xm.get_ordinal()), *expected, strict=True):
        assert isinstance(found, RankTensor)
        assert all(map(torch.equal, found.parts, own))


def test_data_is_pickled_as_ever() -> None:
    xm.get_ordinal()
    p, file = torch.nn.Parameter(torch.ones(2)), io.BytesIO()
    torch.save({"p": p, "data": p.data}, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    assert torch.load(file)["p"].tolist() == [1, 1] and not vars(p.data)


def test_a_plain_number_that_torch_asks_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_tensor, "_said", set())
    ids = torch.arange(8).narrow(0, xm.get_ordinal(), 2)
    with pytest.warns(
        UserWarning,
        match=r"test_rank_tensor.py:.*: torch asks for one plain number of a CPU tensor that differs by rank \(1, 2, 3, 4 for rank",
    ):
        assert F.one_hot(ids).shape == (2, 2)


def test_truths_of_two_tensors() -> None:
    t = table().narrow(0, xm.get_ordinal(), 2)
    assert rank_numbers.per_rank(torch.equal(t, table()[:2])) == [True, False, False, False]
    assert rank_numbers.per_rank(torch.allclose(t, table()[1:3])) == [False, True, False, False]


def test_as_a_parameter() -> None:
    weight = torch.nn.Parameter(table().chunk(4)[xm.get_ordinal()])
    assert isinstance(weight, torch.nn.Parameter)
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.weight = weight
    layer.to("xla")
    out = layer(torch.ones(1, 2, device="xla"))
    out.sum().backward()
    for r, own in enumerate(torch_bridge.shards(out)):
        assert torch.equal(own, F.linear(torch.ones(1, 2), table().chunk(4)[r]))
    assert layer.weight.grad is not None and layer.weight.grad.device.type == "xla"


REFUSED: dict[str, tuple[Script, str]] = {
    "a write by place to what a view shares": (lambda r: _set(table()[:6], r, 1.0), "runs the script once for 4 ranks"),
    "a write by place to an array's memory": (lambda r: _set(torch.from_numpy(np.zeros(4)), r, 1.0), "runs the script once for 4 ranks"),
    "a part in a dict added to": (
        lambda r: operator.setitem(d := {"a": table()[r]}, "a", operator.iadd(d["a"], 1)),
        "clone\\(\\) the part first",
    ),
    "a sum in place of a view": (lambda r: table()[1:].add_(r), "runs the script once for 4 ranks"),
    "a sum of tensors in place of a view": (
        lambda r: table()[1].add_(torch.ones(2) * r),
        "into a CPU tensor .* that all 4 ranks of this process share",
    ),
    "a write to rows of what a view shares": (lambda r: _set(table()[:6], slice(r, r + 1), 1.0), "clone\\(\\) the part first"),
    "a part within torch.func": (
        lambda r: torch.func.grad(lambda x: (x * table()[r]).sum())(torch.ones(2)),
        "give it to the function as an argument",
    ),
    "sparse": (lambda r: (table() * r).to_sparse(), "only dense ones can"),
    "a write through a part": (lambda r: table()[r].zero_(), "clone\\(\\) the part first"),
    "a write through a view of a part": (lambda r: table()[r][0].zero_(), "clone\\(\\) the part first"),
    "a size": (lambda r: torch.zeros(r + 1), r"a CPU tensor would be float32\[1\], float32\[2\]"),
    "a slice's size": (lambda r: table().narrow(0, 0, r), r"a CPU tensor would be float32\[0, 2\], float32\[1, 2\]"),
    "rows, all for the first rank": (lambda r: table()[r * 8 : (r + 1) * 8], r"a CPU tensor would be float32\[8, 2\], float32\[0, 2\]"),
    "rows to the end": (lambda r: table()[r:], r"a CPU tensor would be float32\[8, 2\], float32\[7, 2\]"),
    "rows of a weight": (lambda r: table().requires_grad_()[r : r + 2], "a slice of a CPU tensor that needs gradients"),
    "a write to rows in place": (lambda r: table()[r : r + 1].zero_(), "clone\\(\\) the part first"),
    "gradients": (lambda r: table().requires_grad_() * r, "runs the script once for 4 ranks"),
    "beside an xla tensor": (lambda r: torch.ones(2, device="xla") + torch.ones(2) * r, "same device"),
    "pieces of different shapes": (lambda r: table().split([1, 2, 2, 3])[r], "all ranks need one shape"),
    "different numbers of pieces": (lambda r: table().split(1)[r:], "ranks would get different numbers of pieces"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    script, text = REFUSED[name]
    with pytest.raises(RuntimeError, match=text):
        script(xm.get_ordinal())


def test_ordinary_tensors_are_as_ever() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xm.get_ordinal()  # from now on there are such numbers
        t = table()
        assert type(t[1]) is torch.Tensor and type(t.chunk(2)[1]) is torch.Tensor
        assert isinstance(t.chunk(2), tuple) and isinstance(t.chunk(4)[1:], tuple) and len(t.chunk(4)[1:]) == 3
        t[0] = 5.0
        assert t[1:3]._is_view() and t[1:3].add_(0)._version == t._version and t[:] is not t
        w = table().requires_grad_()
        w[2:4].sum().backward()
        assert w.grad is not None and w.grad.sum() == 4
        a, b = t.split(4)
        b.zero_()
        assert t[4:].sum() == 0 and a.shape == b.shape
        assert torch.tensor([1, 2]).roll(1).tolist() == [2, 1]
        assert torch.tensor([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]
        assert torch.tensor([[torch.tensor(1), 2]]).tolist() == [[1, 2]] and torch.as_tensor([torch.ones(())]).tolist() == [1.0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_torchscript_knows_the_functions() -> None:
    xm.get_ordinal()

    def scripted(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.chunk(x, 2)) + torch.arange(4.0) + torch.full((4,), 2.0) + x.roll(1)

    x = torch.arange(4.0)
    assert torch.equal(torch.jit.script(scripted)(x), scripted(x))


def test_data_of_a_parameter() -> None:
    """It is the same parameter with each rank's values, also where these are replaced again."""
    layer = torch.nn.Embedding(2, 2)
    weight, rank = layer.weight, xm.get_ordinal()
    weight.mark = "kept"  # type: ignore[attr-defined]
    for given in (lambda r: table()[2 * r : 2 * (r + 1)].clone(), lambda r: table()[:2] * r, lambda r: torch.ones(2, 2)):
        layer.weight.data = given(rank)
        assert layer.weight is weight and isinstance(weight, torch.nn.Parameter) and weight.requires_grad
        assert weight.mark == "kept" and dict(layer.named_parameters()) == {"weight": weight}  # type: ignore[attr-defined]
        with torch.no_grad():
            for r, found in enumerate(sharded.of_each(layer(torch.tensor([1, 0]))) or ()):
                assert torch.equal(found, given(r)[[1, 0]])
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        layer.weight.data = torch.zeros(2, 2, device="meta")
    used = torch.ones(3)
    reference = weakref.ref(used)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \[3\] would differ by rank, and a graph holds it"):
        used.data = torch.ones(3) * rank
    assert reference() is used and used.tolist() == [1.0] * 3

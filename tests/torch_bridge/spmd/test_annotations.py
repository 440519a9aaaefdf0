"""`xs.mark_sharding` and its like: values stay, arrays lie as annotated, from step to step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla.experimental import pjrt

from torch_bridge.mesh import spmd, world

_XLAC: Any = torch_xla._XLAC
spec_of = _XLAC._get_xla_sharding_spec


def placed(t: torch.Tensor) -> tuple[int, ...]:
    """The shape of what each device holds."""
    torch_xla.sync()
    held = t._storage.held  # type: ignore[attr-defined]
    return held.sharding.shard_shape(held.shape)


def test_what_the_runtime_says(mesh: xs.Mesh) -> None:
    assert (xr.is_spmd(), xr.world_size(), xr.global_ordinal(), xr.process_count()) == (True, 1, 0, 1)
    assert xr.global_runtime_device_count() == xr.addressable_runtime_device_count() == 8
    assert pjrt.global_device_count() == 8
    assert xr.global_device_count() == xr.local_device_count() == xr.addressable_device_count() == len(_XLAC._xla_get_all_devices()) == 1
    assert [a["id"] for a in xr.global_runtime_device_attributes()] == list(range(8))
    assert list(mesh.shape().items()) == [("data", 4), ("model", 2)]
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (mesh.get_axis_name_idx("model"), mesh.get_axis_name_idx("nothing"), mesh.size()) == (1, None, 8)
    assert xs.get_1d_mesh("all").shape() == {"all": 8} and xs.get_1d_mesh().axis_names is None
    assert xs.get_global_mesh() is None
    xs.set_global_mesh(mesh)
    assert xs.get_global_mesh() is mesh


SPECS: list[tuple[tuple[int, ...], Any, str, tuple[int, ...]]] = [
    ((8, 16), ("data", "model"), "{devices=[4,2]0,1,2,3,4,5,6,7}", (2, 8)),
    ((8, 16), (1, 0), "{devices=[2,4]0,2,4,6,1,3,5,7}", (4, 4)),
    ((8, 16), ("data", None), "{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}", (2, 16)),
    ((8, 16), (None, "model"), "{devices=[1,2,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}", (8, 8)),
    ((8, 16), (None, ("data", "model")), "{devices=[1,8]0,1,2,3,4,5,6,7}", (8, 2)),
    ((8, 16), (("model", "data"), None), "{devices=[8,1]0,2,4,6,1,3,5,7}", (1, 16)),
    ((8, 16), (None, None), "{replicated}", (8, 16)),
    ((2, 4, 6, 8), (None, "data", "model", None), "{devices=[1,4,2,1]0,1,2,3,4,5,6,7}", (2, 1, 3, 8)),
    ((), (), "{replicated}", ()),
]


@pytest.mark.parametrize(("size", "spec", "said", "block"), SPECS)
def test_how_tensors_lie(mesh: xs.Mesh, size: tuple[int, ...], spec: Any, said: str, block: tuple[int, ...]) -> None:
    """A tensor that has a value, one that waits, and one that is a number throughout."""
    host = torch.randn(size)
    there, waits, full = host.to("xla"), host.to("xla") + 0, torch.ones(size, device="xla")
    for t in (there, waits, full):
        marked = xs.mark_sharding(t, mesh, spec)
        assert isinstance(marked, xs.XLAShardedTensor) and marked.global_tensor is t
        assert spec_of(t) == marked.sharding_spec == said
        values = torch.ones(size) if t is full else host
        t += 0  # in place: it lies so afterwards
        assert spec_of(t) == said and placed(t) == block
        assert torch.equal(t.cpu(), values) and torch.equal(copy.deepcopy(t).cpu(), values)
        assert {spec_of(copy.deepcopy(t)), spec_of(t.clone())} <= {said, "" if said == "{replicated}" else said}
        xs.clear_sharding(t)
        assert spec_of(t) == "" and placed(t) == size
        assert xs.mark_sharding(t, mesh, (None,) * len(size)).sharding_type is xs.ShardingType.REPLICATED


def test_what_a_program_computed_lies_on_every_device(mesh: xs.Mesh) -> None:
    """A tensor from the CPU says nothing, also after programs have read it; nor one whose annotation was taken back."""
    given, cleared = torch.randn(4, 4).to("xla"), torch.randn(8, 8).to("xla")
    made = given @ given
    xs.mark_sharding(cleared, mesh, ("data", None))
    assert spec_of(made) == ""
    torch_xla.sync()
    xs.clear_sharding(cleared)
    assert [spec_of(t) for t in (made, given, cleared)] == ["{replicated}", "", ""]
    assert _XLAC._get_xla_sharding_type(made) is None and spec_of(xs.mark_sharding(made, mesh, ("data", None))) != "{replicated}"


def test_the_sharding_of_one_tensor_for_another(mesh: xs.Mesh) -> None:
    """Scripts that make gradients by themselves divide them as the parameter is."""
    weight, gradient = torch.zeros(8, 8, device="xla"), torch.zeros(8, 8, device="xla")
    assert _XLAC._get_xla_op_sharding(weight) is None
    xs.mark_sharding(weight, mesh, ("model", "data"))
    _XLAC._xla_mark_sharding(gradient, _XLAC._get_xla_op_sharding(weight))
    assert spec_of(gradient) == spec_of(weight) != ""


def test_shards(mesh: xs.Mesh) -> None:
    host = torch.arange(64.0).reshape(8, 8)
    t = xs.mark_sharding(host.to("xla"), mesh, (None, "model"))
    shards = t.local_shards
    assert [s.shard_device for s in shards] == [f"xla:{k}" for k in range(8)]
    for k, shard in enumerate(shards):
        assert shard.data.device.type == "cpu" and shard.replica_id == k // 2
        assert shard.indices == [slice(0, 8, 1), slice(k % 2 * 4, k % 2 * 4 + 4, 1)]
        assert torch.equal(shard.data, host[tuple(shard.indices)]) and torch.equal(shard.unpadded_data, shard.data)
        shard.data *= -1
    t.load_local_shards_(shards)
    assert torch.equal(t.cpu(), -host)
    with pytest.raises(RuntimeError, match=r"needs one shard for each of xla:0, .*, xla:7, got 7"):
        t.load_local_shards_(shards[:-1])
    shards[0].data = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match=r"every shard has shape \[8, 4\], got \{'xla:0': \(2, 2\)\}"):
        t.load_local_shards_(shards)
    whole = xs.mark_sharding(host.to("xla"), mesh, (None, None))
    assert [(s.indices, s.replica_id) for s in whole.local_shards] == [(..., k) for k in range(8)]
    with pytest.raises(RuntimeError, match="the tensor is replicated"):
        whole.load_local_shards_(whole.local_shards)
    back = _XLAC._global_tensor_from_cpu_shards([torch.arange(2) + 2 * k for k in range(8)], xs.get_1d_mesh().get_op_sharding((0,)))
    assert torch.equal(back.cpu(), torch.arange(16)) and placed(back) == (2,)
    with pytest.raises(RuntimeError, match=r"do not make a tensor of shape \[17\]"):
        _XLAC._global_tensor_from_cpu_shards([torch.arange(2)] * 8, xs.get_1d_mesh().get_op_sharding((0,)), (17,))


def test_what_devices_do_not_divide_stays_whole(mesh: xs.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    host = torch.randn(6, 9)
    t = host.to("xla")
    xs.mark_sharding(t, mesh, ("model", "data"))
    assert "dim 1 of [6, 9] has 9 elements, which 4 devices (data) do not divide" in caplog.text
    assert placed(t) == (3, 9) and torch.equal(t.cpu(), host)


def test_ops_of_marked_tensors(mesh: xs.Mesh) -> None:
    """Through `XLAShardedTensor`s, autograd included; in place, the marked tensor itself."""
    weight, x = torch.randn(8, 4, requires_grad=True), torch.randn(4, 8)
    (x @ weight).square().sum().backward()
    there = weight.detach().to("xla").requires_grad_()
    marked = xs.mark_sharding(there, mesh, ("data", None))
    y = x.to("xla") @ marked
    assert isinstance(y, xs.XLAShardedTensor) and str(y).startswith("XLAShardedTensor(tensor(")
    y.square().sum().backward()
    assert torch.allclose(there.grad.cpu(), weight.grad, rtol=1e-5) and torch.allclose(marked.grad.cpu(), weight.grad, rtol=1e-5)
    with torch.no_grad():
        assert marked.mul_(2) is marked
    assert torch.equal(there.cpu(), 2 * weight.detach()) and marked.shape == (8, 4) and marked.requires_grad
    assert isinstance(xs.wrap_if_sharded(there), xs.XLAShardedTensor)
    plain = torch.ones(2)
    assert xs.wrap_if_sharded(plain) is plain
    with pytest.raises(AttributeError):
        marked.mesh_shape  # noqa: B018


def test_gradients_are_divided_too(mesh: xs.Mesh) -> None:
    host = torch.randn(8, 8)
    leaf = host.to("xla").requires_grad_()
    marked = xs.mark_sharding_with_gradients(leaf, mesh, ("data", "model"))
    (marked * marked).sum().backward()
    assert torch.allclose(leaf.grad.cpu(), 2 * host)
    assert placed(leaf.grad) == (2, 4) and spec_of(leaf) == ""


class Net(nn.Module):
    """An MLP with an embedding whose weight is the head's, too, dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        self.steps += 1
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))


def test_training_equals_one_device(mesh: xs.Mesh) -> None:
    """Tensor and data parallel by annotation, tied weights: one compilation, and weights and optimizer state lie as annotated after every step."""
    torch.manual_seed(1)
    reference = Net()
    model = copy.deepcopy(reference).to("xla")
    xs.mark_sharding(model.embed.weight, mesh, ("model", None))
    xs.mark_sharding(model.up.weight, mesh, ("model", None))
    xs.mark_sharding(model.down.weight, mesh, (None, "model"))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, model)]
    torch_xla.sync()
    before = met.counter_value("UncachedCompile") or 0
    for k in range(4):
        ids = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(k))
        losses = []
        for m, optimizer in zip((reference, model), optimizers, strict=True):
            there = ids.to(m.up.weight.device)
            if m is model:
                xs.mark_sharding(there, mesh, ("data", None))
            loss = nn.functional.cross_entropy(m(there).flatten(0, 1), there.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            losses.append(loss)
        torch_xla.sync()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-4)
        assert placed(model.up.weight) == (32, 16) and placed(model.down.weight) == (16, 32) and placed(model.embed.weight) == (16, 16)
    assert (met.counter_value("UncachedCompile") or 0) - before == 1
    state = optimizers[1].state[model.up.weight]
    assert placed(state["exp_avg"]) == placed(state["exp_avg_sq"]) == (32, 16)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q.cpu(), rtol=1e-4, atol=1e-6)
    assert model.steps.item() == 4 and model.head.weight is model.embed.weight


def test_tensors_from_before(capsys: pytest.CaptureFixture[str]) -> None:
    """Made on one device, before annotations are on: replicated where they are used next."""
    early = torch.arange(8.0).to("xla")
    waiting = early * 2
    world.configure(world.World(4))
    try:
        xr.use_spmd()
        xr.use_spmd()
        assert capsys.readouterr().err.count("one program over 4 virtual CPU devices, with sharding annotations") == 1
        late = xs.mark_sharding(torch.ones(8, device="xla"), xs.get_1d_mesh(), (0,))
        assert torch.equal((early + waiting + late).cpu(), torch.arange(8.0) * 3 + 1)
        assert spec_of(early) == "" and placed(early) == (8,)
    finally:
        spmd.stop()


def test_another_order_of_devices(mesh: xs.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    host = torch.randn(8, 8)
    first = xs.mark_sharding(host.to("xla"), mesh, ("data", None))
    other = host.to("xla")
    xs.mark_sharding(other, xs.Mesh(list(range(8))[::-1], (1, 8)), (0, 1))
    assert spec_of(other) == "{devices=[1,8]7,6,5,4,3,2,1,0}" and "another order than the first mesh" in caplog.text
    assert torch.equal((first + other).cpu(), 2 * host)


def test_loaders(mesh: xs.Mesh) -> None:
    batches = [{"ids": torch.arange(16).view(8, 2) + k, "mask": torch.ones(8)} for k in range(3)]
    spec = {"ids": xs.ShardingSpec(mesh, ("data", None)), "mask": None}
    loader = pl.MpDeviceLoader(batches, "xla", input_sharding=spec)
    for k, batch in enumerate(loader):
        assert placed(batch["ids"]) == (2, 2) and torch.equal(batch["ids"].cpu(), batches[k]["ids"])
        assert torch.equal(batch["mask"].cpu(), torch.ones(8))
    both = pl.MpDeviceLoader(
        [(torch.ones(8, 4), torch.ones(8))], "xla", input_sharding=xs.ShardingSpec(mesh, ("data", None), minibatch=True)
    )
    for x, y in both:
        assert placed(x) == (2, 4) and spec_of(y) == ""
    (sent,) = xm.send_cpu_data_to_device(torch.ones(8, 4), "xla", input_sharding=xs.ShardingSpec(mesh, ("data", "model")))
    assert placed(sent) == (2, 2)
    with pytest.raises(TypeError, match="input_sharding takes an xs.ShardingSpec, or a dict of them by the keys of a batch, got tuple"):
        pl.MpDeviceLoader(batches, "xla", input_sharding=("data", None))
    with pytest.raises(KeyError, match=r"says nothing of mask of the batch; it has ids"):
        xm.send_cpu_data_to_device(batches[0], "xla", input_sharding={"ids": None})


MISTAKES: list[tuple[Callable[[xs.Mesh, torch.Tensor], Any], type[Exception], str]] = [
    (lambda m, t: xs.Mesh(range(8), (4, 2), ("x",)), ValueError, r"axis_names \('x',\) must name the 2 axes of mesh_shape \(4, 2\)"),
    (lambda m, t: xs.Mesh(range(8), (4, 2), ("x", "x")), AssertionError, "must differ from each other"),
    (lambda m, t: xs.Mesh(range(8), (4, 4)), ValueError, r"mesh_shape \(4, 4\) holds 16 devices, device_ids has 8"),
    (lambda m, t: xs.Mesh([0, 0, 1, 2], (2, 2)), ValueError, "device_ids must be each of 0 to 3 once"),
    (lambda m, t: xs.mark_sharding(t, xs.Mesh(range(4), (4,)), (0, None)), ValueError, "has 4 devices, the job 8"),
    (
        lambda m, t: xs.mark_sharding(t, m, ("data",)),
        AssertionError,
        r"one entry for each dim: \('data',\) has 1, the tensor of shape \[8, 8\] has 2",
    ),
    (lambda m, t: xs.mark_sharding(t, m, ("data", "data")), AssertionError, "a mesh axis divides one dim at most"),
    (lambda m, t: xs.mark_sharding(t, m, ("data", "pipe")), ValueError, r"'pipe' is no axis of the mesh \{'data': 4, 'model': 2\}"),
    (lambda m, t: xs.mark_sharding(t, m, (2, None)), AssertionError, "2 is no axis of the mesh"),
    (
        lambda m, t: xs.mark_sharding(torch.ones(8, 8), m, (0, 1)),
        ValueError,
        r"takes a tensor on xla, got one on cpu: move it first \(t.to\('xla'\)\)",
    ),
    (lambda m, t: xs.mark_sharding([1.0], m, (0,)), ValueError, "takes a tensor on xla, got list"),
    (
        lambda m, t: [xs.mark_sharding(t, m, spec) for spec in (("data", None), (None, "data"))],
        RuntimeError,
        r"annotated as \{devices=\[4,1,2\].*clear_sharding\(t\) first",
    ),
    (lambda m, t: xs.annotate_custom_sharding(t, m.get_op_sharding((0,))), ValueError, "is one of 1 dims, the tensor has 2"),
    (lambda m, t: xr.use_spmd(auto=True), NotImplementedError, "no pass chooses shardings by itself"),
    (lambda m, t: xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2,)), ValueError, "must have as many axes"),
]


@pytest.mark.parametrize(("call", "error", "text"), MISTAKES)
def test_mistakes(mesh: xs.Mesh, call: Callable[[xs.Mesh, torch.Tensor], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(mesh, torch.ones(8, 8).to("xla"))


def test_without_use_spmd() -> None:
    t = torch.ones(8).to("xla")
    for call in (
        lambda: xs.mark_sharding(t, xs.Mesh([0], (1,)), (0,)),
        xs.get_1d_mesh,
        lambda: pl.MpDeviceLoader([t], "xla", input_sharding=xs.ShardingSpec(xs.Mesh([0], (1,)), (0,))),
    ):
        with pytest.raises(RuntimeError, match=r"Call torch_xla.runtime.use_spmd\(\) at the beginning of the script"):
            call()
    assert not xr.is_spmd() and xs.wrap_if_sharded(t) is t


def test_ranks_and_annotations_exclude_each_other() -> None:
    world.configure(world.World(8))
    try:
        world.set_axes({"dp": 4, "tp": 2})
        with pytest.raises(RuntimeError, match=r"a world of ranks laid out as \{'dp': 4, 'tp': 2\}.*in a script of its own"):
            xr.use_spmd()
        world.configure(world.World(4, (1,)))
        with pytest.raises(RuntimeError, match=r"JAX started before the processes found each other.*or call xr.use_spmd\(\) before"):
            xr.use_spmd()
    finally:
        world.configure(None)


def test_ranks_after_annotations(mesh: xs.Mesh) -> None:
    """Also by NxD's initialize_model_parallel, which would count tp=2 as the one rank that there is."""
    for change in (lambda: world.configure(world.World(8)), lambda: world.set_axes({"pp": 1, "dp": 1, "tp": 1})):
        with pytest.raises(RuntimeError, match=r"this script called xr.use_spmd\(\): it is one program over all devices, without ranks"):
            change()
    assert xr.is_spmd() and world.size() == 1


def test_hybrid_meshes(mesh: xs.Mesh) -> None:
    """Devices of one machine follow each other; an axis runs through a machine first."""
    made = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), axis_names=("data", "model"))
    assert made.shape() == {"data": 4, "model": 2} and made.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    across = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(1, 2))
    assert across.get_logical_mesh().tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert xs.HybridMesh(ici_mesh_shape=(4, 2)).get_logical_mesh().tolist() == mesh.get_logical_mesh().tolist()


def test_a_barrier_in_the_backward_pass(mesh: xs.Mesh) -> None:
    """Gradients stay what they are."""
    reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = copy.deepcopy(reference).to("xla")
    for layer in model:
        xs.apply_backward_optimization_barrier(layer)
        xs.mark_sharding(layer.weight, mesh, ("model", None))
    x = torch.randn(4, 8, requires_grad=True)
    there = x.detach().to("xla").requires_grad_()
    for m, given in ((reference, x), (model, there)):
        m(given).square().sum().backward()
    assert torch.allclose(there.grad.cpu(), x.grad, atol=1e-5)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.allclose(q.grad.cpu(), p.grad, atol=1e-5)


def test_values_from_the_cpu_into_an_annotated_tensor(mesh: xs.Mesh) -> None:
    """They lie as annotated at once: `load_state_dict` does that to every weight."""
    t = torch.zeros(8, 8).to("xla")
    xs.mark_sharding(t, mesh, ("data", None))
    host = torch.randn(8, 8)
    t.copy_(host)
    assert placed(t) == (2, 8) and torch.equal(t.cpu(), host)
    t[:, 1] = torch.ones(8)
    assert placed(t) == (2, 8) and torch.equal(t.cpu()[:, 1], torch.ones(8))
    t.data = torch.ones(8, 8).to("xla")
    assert torch.equal((t + 1).cpu(), torch.full((8, 8), 2.0))


def test_what_xla_tensors_do_in_another_way_than_torchs(mesh: xs.Mesh) -> None:
    """Through an `XLAShardedTensor`, too."""
    t = torch.arange(8.0).to("xla")
    marked = xs.mark_sharding(t, mesh, ("data",))
    assert f"{marked.sum():.2f}" == "28.00"
    marked.data = marked.data * 2
    assert t.tolist() == marked.tolist() == [2.0 * k for k in range(8)]
    marked.data = torch.ones(3, device="xla")
    assert (marked + 1).tolist() == [2.0] * 3


@pytest.mark.parametrize("shape", [(-4, -2), (4.5, 2)])
def test_meshes_of_negative_and_broken_numbers(shape: tuple[Any, ...]) -> None:
    with pytest.raises(xs.ShardingError, match=r"must have whole numbers of devices, 1 or more"):
        xs.Mesh(range(8), shape)


def test_a_mesh_for_jax(mesh: xs.Mesh) -> None:
    assert dict(mesh.get_jax_mesh().shape) == {"data": 4, "model": 2}
    assert dict(xs.Mesh(range(8), (8, 1)).get_jax_mesh().shape) == {"0": 8, "1": 1}

"""What ZeRO-1 holds, saves and loads, and what it refuses."""

from __future__ import annotations

import copy
import math
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
from torch import optim

from nxd_jax.optimizer import NeuronEPZero1Optimizer, NeuronZero1Optimizer
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.optimizer.by_hand import WHOLE, Case, Divided
from torch_bridge.recorder import sharded
from torch_bridge.runtime import executor
from torch_bridge.torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

CASE = Case(optim.AdamW, {"lr": 1e-2})


def train(ours: Divided, first: int = 0, count: int = 2) -> dict[str, torch.Tensor]:
    for step in range(first, first + count):
        ours.give(ours.case.gradients(step))
        ours.optimizer.step()
        executor.sync()
    return ours.whole()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype).to("xla"))


def test_cutting_that_was_stopped_is_done_again(nxd: Nxd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise steps would give gradients to new parts and update old ones."""
    nxd(4, tp=2)
    ours, expected = Divided(CASE), Divided(CASE)
    for divided in (ours, expected):
        train(divided, count=1)
        divided.optimizer.optimizer.init_zero()
    inner = ours.optimizer.optimizer
    cut, calls = inner._cut_group, []

    def stopping(group: dict[str, Any]) -> dict[str, Any]:
        calls.append(cut(group))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(inner, "_cut_group", stopping)
        with pytest.raises(KeyboardInterrupt):
            inner.init_zero()
    assert len(calls) == 1 and same(train(ours, 1), train(expected, 1))


# -- memory -----------------------------------------------------------------------------------------


def device_bytes(t: torch.Tensor) -> int:
    """What the array occupies on the device that has most of it."""
    executor.materialize(t._storage)  # type: ignore[attr-defined]
    held: dict[Any, int] = {}
    for block in t._storage.array.addressable_shards:  # type: ignore[attr-defined]
        held[block.device] = held.get(block.device, 0) + block.data.nbytes
    return max(held.values())


def test_bytes_on_a_device(nxd: Nxd) -> None:
    """bfloat16 weights: 2 bytes; float32 gradients until the step: 4; float32 weights and two moments: 12, shared out among the data-parallel ranks."""
    nxd(8, tp=2)
    case = Case(optim.AdamW, {"lr": 1e-2}, world=8, dtype=torch.bfloat16)
    ours = Divided(case)
    train(ours, count=2)
    zero = ours.optimizer.optimizer
    assert isinstance(zero, NeuronZero1Optimizer)
    for name, p in ours.parameters.items():
        whole, dim = WHOLE[name]
        local = [n // 2 if d == dim else n for d, n in enumerate(whole)] or [1]
        part = math.ceil(local[0] / 4) * math.prod(local[1:])
        shard = zero.shard_of[p]
        assert device_bytes(p) == 2 * math.prod(local) and device_bytes(shard) == 4 * part
        state = zero.base_optimizer.state[shard]
        if not p.requires_grad:
            assert not state
            continue
        assert device_bytes(state["exp_avg"]) == device_bytes(state["exp_avg_sq"]) == 4 * part and state["step"].device.type == "cpu"
        assert device_bytes(p.main_grad) == 4 * math.prod(local)  # type: ignore[attr-defined]
        assert set(sharded.varying(shard).axes) == ({"dp", "tp"} if dim is not None else {"dp"})


# -- gradients ----------------------------------------------------------------------------------------


def test_gradients_add_up_in_float32(nxd: Nxd) -> None:
    """256 ones and a one that bfloat16 cannot add to them."""

    def accumulated(**precision: bool) -> float:
        nxd(2)
        config = Case(optim.SGD, {}, world=2, tp=1, clip=None).config(**precision)
        p = parameter(4, dtype=torch.bfloat16)
        optimizer = nxd_api.initialize_parallel_optimizer(config, optim.SGD, [p], lr=0.5)
        for weight in (256.0, 1.0):
            (p * weight).sum().backward()
        assert (p.grad is None) == bool(precision.get("use_fp32_grad_acc", True))
        optimizer.step()
        optimizer.zero_grad()
        assert p.grad is None
        if precision.get("use_fp32_grad_acc", True):
            assert p.main_grad.tolist() == [0.0] * 4 and p.main_grad.dtype == torch.float32  # type: ignore[attr-defined]
        return next(iter(optimizer.optimizer.shard_of.values()))[0].item()

    assert accumulated() == 1 - 257 / 2
    assert accumulated(use_fp32_grad_acc=False) == 1 - 256 / 2


def test_a_script_clips_or_looks_by_itself(nxd: Nxd) -> None:
    """`_calc_grad_norm` counts what tensor-parallel ranks hold alike once; gradients of parts stay if the inner optimizer's `zero_grad` keeps them."""
    nxd(4, tp=2)
    shared, divided = parameter(4), parameter(4)
    divided.tensor_model_parallel, divided.partition_dim = True, 0  # type: ignore[attr-defined]
    optimizer = NeuronZero1Optimizer([shared, divided], optim.SGD, lr=0.0)
    kept = []
    optimizer.base_optimizer.zero_grad = lambda set_to_none=True: kept.append(set_to_none)  # type: ignore[method-assign]
    shared.grad, divided.grad = torch.full_like(shared, 2.0), torch.full_like(divided, 2.0)
    optimizer.step()
    whole = math.sqrt(4 * 4 + 8 * 4)
    assert kept == [True] and optimizer.grad_norm is not None and optimizer.grad_norm.item() == pytest.approx(whole)
    assert optimizer._calc_grad_norm().item() == pytest.approx(1.0)  # of what was clipped
    assert optimizer._calc_grad_norm(math.inf).item() == pytest.approx(2.0 / whole)


def test_gradients_no_hook_saw(nxd: Nxd) -> None:
    """Set by hand, or of a parameter that was frozen when the optimizer was made; and zeros in place of None."""
    nxd(2)
    late, other = parameter(3), parameter(3)
    late.requires_grad_(False)
    optimizer = NeuronZero1Optimizer([late, other], optim.SGD, lr=1.0, grad_clipping=False, use_grad_acc_hook=True)
    late.requires_grad_(True)
    (late * 2).sum().backward()
    other.grad = torch.ones(3, device="xla")
    optimizer.step()
    assert late.tolist() == [-1.0] * 3 and other.tolist() == [0.0] * 3 and optimizer.grad_norm is None
    optimizer.zero_grad(set_to_none=False)
    assert other.main_grad.tolist() == [0.0] * 3  # type: ignore[attr-defined]
    optimizer.step(lambda: (other * 1).sum().backward())
    assert other.tolist() == [-1.0] * 3 and late.tolist() == [-1.0] * 3
    optimizer.zero_grad()
    other.main_grad.add_(2)  # type: ignore[attr-defined]  # what a script adds to the zeros counts
    (other * 1).sum().backward()
    optimizer.step()
    assert other.tolist() == [-4.0] * 3 and late.tolist() == [-1.0] * 3


def test_a_weight_frozen_between_steps_stays(nxd: Nxd) -> None:
    """Its `main_grad` is zeros, to which a step would add momentum."""
    nxd(2, tp=2)
    frozen, other = parameter(3), parameter(3)
    frozen.sequence_parallel_enabled = True  # type: ignore[attr-defined]  # its zeros are added up over ranks besides
    optimizer = nxd_api.initialize_parallel_optimizer(
        Case(optim.SGD, {}, world=2, clip=None).config(), optim.SGD, [frozen, other], lr=1.0, momentum=0.5
    )
    for trained in (True, False, True):
        optimizer.zero_grad()
        frozen.requires_grad_(trained)
        (frozen + other).sum().backward()
        optimizer.step()
    assert other.tolist() == [1 - 1 - 1.5 - 1.75] * 3
    assert frozen.tolist() == [1 - 2 - 3] * 3  # the gradient 2 of both ranks: a step of 2, none, and one of 2 + 0.5 * 2


def test_an_optimizer_that_is_gone_takes_no_gradients(nxd: Nxd) -> None:
    nxd(2)
    p = parameter(3)
    NeuronZero1Optimizer([p], optim.SGD, lr=1.0, use_grad_acc_hook=True)
    (p * 2).sum().backward()
    assert p.grad.tolist() == [2.0] * 3  # type: ignore[union-attr]


# -- state --------------------------------------------------------------------------------------------


def test_state_dict(nxd: Nxd) -> None:
    nxd(4, tp=2)
    ours = Divided(CASE, use_master_weights_in_ckpt=True)
    train(ours)
    state = ours.optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "base_state", "shape_info", "sharded_master_weights"} and state["state"] == {}
    assert state["shape_info"][0] == torch.Size([3, 4]) and state["base_state"][0]["step"] == 2
    other = Divided(CASE, use_master_weights_in_ckpt=True)
    other.optimizer.load_state_dict(copy.deepcopy(state))
    assert same(ours.whole(), other.whole())  # from the master weights
    assert same(train(ours, 2), train(other, 2))


def test_files(nxd: Nxd, tmp_path: pathlib.Path) -> None:
    nxd(4, tp=2)
    ours = Divided(CASE, use_master_weights_in_ckpt=True)
    train(ours)
    zero = ours.optimizer.optimizer
    zero.save_sharded_state_dict(str(tmp_path), num_workers_per_step=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == [f"optim.dp_rank_{d:02d}.tp_rank_{t:02d}" for d in range(2) for t in range(2)]
    own = torch.load(tmp_path / "optim.dp_rank_01.tp_rank_00", weights_only=False)
    assert list(own["sharded_master_weights"][0].shape) == [2, 4] and own["base_state"][0]["exp_avg"].device.type == "cpu"
    other = Divided(CASE, use_master_weights_in_ckpt=True)
    other.optimizer.optimizer.load_sharded_state_dict(str(tmp_path))
    assert same(ours.whole(), other.whole()) and same(train(ours, 2), train(other, 2))
    (tmp_path / "optim.dp_rank_01.tp_rank_01").unlink()
    with pytest.raises(FileNotFoundError, match=r"no optimizer state .*dp_rank_01.tp_rank_01 \(1 of 4 files are missing\)"):
        zero.load_sharded_state_dict(str(tmp_path))


def test_new_weights_and_groups(nxd: Nxd) -> None:
    """`init_zero` takes other weights over; a group that is added leaves the state of the others as it is, and schedulers see its options."""
    nxd(2)
    first, second = parameter(3), parameter(2)
    optimizer = nxd_api.initialize_parallel_optimizer(
        Case(optim.SGD, {}, world=2, tp=1, clip=None).config(), optim.SGD, [first], lr=1.0, momentum=0.5
    )
    with torch.no_grad():
        first.fill_(5.0)
    optimizer.optimizer.init_zero()

    def step() -> None:
        optimizer.zero_grad()
        sum((p * 1).sum() for p in optimizer.params).backward()
        optimizer.step()

    step()
    assert first.tolist() == [4.0] * 3
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    assert optimizer.param_groups[1]["lr"] == 0.25 and optimizer.param_groups[1]["nesterov"] is False
    step()
    assert first.tolist() == [2.5] * 3 and second.tolist() == [0.75] * 2
    optimizer.param_groups[0]["lr"] = 0.0
    step()
    assert first.tolist() == [2.5] * 3


def test_schedules_of_momentum(nxd: Nxd) -> None:
    """OneCycleLR looks for betas in the optimizer's defaults."""
    nxd(2)
    optimizer = NeuronZero1Optimizer([parameter(3)], optim.AdamW, lr=1.0)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=4)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["betas"][0] < 0.95
    optimizer.init_zero()


def test_what_others_write_into_a_weight(nxd: Nxd) -> None:
    """It is what the next step starts from, and is saved; where a weight holds its float32 part as rounded, the part stays."""
    nxd(2)
    weight = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16, device="xla"))
    optimizer = NeuronZero1Optimizer([weight], optim.SGD, lr=1.0, grad_clipping=False, save_master_weights=True)

    def step() -> list[float]:
        optimizer.zero_grad()
        (weight * 2**-10).sum().backward()
        optimizer.step()
        parts = sharded.shards(optimizer.state_dict()["sharded_master_weights"][0])
        return torch.cat(parts)[:5].tolist()

    assert step() == [1 - 2**-10] * 5 and weight.tolist() == [1.0] * 5
    with torch.no_grad():
        weight[:3] = torch.tensor([8.0, 1.0, 1.0])
    state = optimizer.state_dict()["sharded_master_weights"][0]
    assert torch.cat(sharded.shards(state))[:5].tolist() == [8.0] + [1 - 2**-10] * 4
    assert step() == [8 - 2**-10] + [1 - 2**-9] * 4
    assert step() == [8 - 2**-9] + [1 - 3 * 2**-10] * 4


def clamp(p: torch.nn.Parameter) -> None:
    p.data.clamp_(max=2.0)


def copy_from_the_host(p: torch.nn.Parameter) -> None:
    p.data.copy_(torch.full((4,), 2.0))


def fill(p: torch.nn.Parameter) -> None:
    p.data.fill_(2.0)


def write_into_a_view(p: torch.nn.Parameter) -> None:
    p.data[:] = 2.0


def exchange(p: torch.nn.Parameter) -> None:
    p.data = torch.full((4,), 2.0, device="xla")


@pytest.mark.parametrize("write", [clamp, copy_from_the_host, fill, write_into_a_view, exchange])
def test_what_others_write_through_data(write: Callable[[torch.nn.Parameter], None], nxd: Nxd) -> None:
    """torch's versions of tensors do not count it."""
    nxd(2)
    weight = torch.nn.Parameter(torch.full((4,), 5.0, device="xla"))
    optimizer = NeuronZero1Optimizer([weight], optim.SGD, lr=1.0, grad_clipping=False)

    def step() -> list[float]:
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        return weight.tolist()  # type: ignore[no-any-return]

    assert step() == [4.0] * 4
    write(weight)
    assert (weight.tolist(), step(), step()) == ([2.0] * 4, [1.0] * 4, [0.0] * 4)


def test_lazily(nxd: Nxd) -> None:
    """torch_xla's own class, over all ranks."""
    nxd(4, tp=2)
    p = parameter(3)
    optimizer = ZeroRedundancyOptimizer([p], optim.SGD, lazy_init=True, max_norm=0.5, lr=1.0, coalesce_cc=True, bucket_cap_mb_all_gather=1)
    with torch.no_grad():
        p.fill_(2.0)
    (p * 3).sum().backward()
    assert not optimizer.inited and optimizer.grad_norm is None
    optimizer.step()
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm.cpu(), torch.tensor([27.0]).sqrt())
    torch.testing.assert_close(p.detach().cpu(), torch.full((3,), 2 - 0.5 / 3**0.5), rtol=1e-5, atol=0)
    assert optimizer.state_dict()["shape_info"] == {0: torch.Size([3])}


# -- what it refuses ------------------------------------------------------------------------------------


def test_refusals(nxd: Nxd) -> None:
    nxd(4, tp=2, ep=2)
    with pytest.raises(
        RuntimeError, match=r"To use NeuronZero1Optimizer, all parameters must be on one xla device; they are on cpu. Move the model"
    ):
        NeuronZero1Optimizer([torch.nn.Parameter(torch.ones(2))], optim.SGD, lr=1.0)
    with pytest.raises(ValueError, match="NeuronEPZero1Optimizer chooses the sharding groups itself"):
        NeuronEPZero1Optimizer([parameter(2)], optim.SGD, lr=1.0, sharding_groups=[[0, 1], [2, 3]])
    optimizer = NeuronZero1Optimizer([parameter(2, 2)], optim.SGD, lr=1.0)
    state = optimizer.state_dict()
    for change, text in (
        ({"shape_info": None}, "not a ZeRO-1 optimizer's state: it has no shape_info"),
        ({"shape_info": {}}, "the state is of 0 parameters, the optimizer has 1"),
        ({"shape_info": {0: [3, 2]}}, r"parameter 0 has shape \[2, 2\], the state is of one of shape \[3, 2\]"),
        (
            {"base_state": {0: {"exp_avg": torch.ones(2, 2)}}},
            r"exp_avg of parameter 0 has shape \[2, 2\], a part here has \[1, 2\]: .* another number of ranks",
        ),
    ):
        changed = {k: v for k, v in {**state, **change}.items() if v is not None}
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(changed)


def test_needs_groups() -> None:
    with pytest.raises(
        RuntimeError, match=r"NeuronZero1Optimizer needs parallel_state.initialize_model_parallel\(...\) to be called first"
    ):
        NeuronZero1Optimizer([torch.nn.Parameter(torch.ones(2))], optim.SGD, lr=1.0)


class Lamb(optim.SGD):
    """Named as one that is known to look at whole parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


@pytest.mark.parametrize(
    "kind, reason",
    [(optim.Muon, "orthogonalises whole matrices"), (Lamb, "a norm of the whole parameter"), (optim.SparseAdam, "sparse gradients")],
)
def test_optimizers_that_need_whole_parameters(nxd: Nxd, kind: Any, reason: str) -> None:
    nxd(4, tp=2)
    with pytest.raises(
        NotImplementedError, match=f"{kind.__name__} .*{reason}.* rows of parameters .*'zero_one_enabled': False.*torch.optim.Adafactor"
    ):
        NeuronZero1Optimizer([parameter(4, 4)], kind, lr=1.0)


@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
def test_optimizers_on_divided_parameters(nxd: Nxd) -> None:
    nxd(2, tp=2)
    config = Case(optim.SGD, {}, world=2, zero=False).config()
    p = parameter(4, 4)
    nxd_api.initialize_parallel_optimizer(config, optim.Muon, [p], lr=1.0)
    p.tensor_model_parallel, p.partition_dim, p.num_partitions = True, 0, 2  # type: ignore[attr-defined]
    with pytest.raises(
        NotImplementedError, match=r"Muon orthogonalises .* parts of tensor- or expert-parallel parameters \(such as one of shape \[4, 4\]"
    ):
        nxd_api.initialize_parallel_optimizer(config, optim.Muon, [p], lr=1.0)
    with pytest.warns(UserWarning, match="Lamb scales each update .* as it does in NxD. Use AdamW"):
        nxd_api.initialize_parallel_optimizer(config, Lamb, [p], lr=1.0)
    with pytest.raises(NotImplementedError, match="LBFGS evaluates the loss several times a step"):
        nxd_api.initialize_parallel_optimizer(config, optim.LBFGS, [p])
    p.qkv_partition = (2, 1, 2)  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="Adafactor: a fused QKV weight whose K/V heads 2 ranks hold .* fuse_qkv=False"):
        nxd_api.initialize_parallel_optimizer(config, optim.Adafactor, [p], lr=1.0)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield

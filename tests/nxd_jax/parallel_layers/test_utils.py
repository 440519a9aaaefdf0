"""`parallel_layers.utils`, and what the package re-exports."""

from __future__ import annotations

import pytest
import torch

import nxd_jax.parallel_layers as package
from nxd_jax.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_jax.parallel_layers import mappings, parallel_state, utils
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.parallel_layers.parts import per_rank


def test_division() -> None:
    assert utils.divide(12, 4) == 3
    with pytest.raises(AssertionError, match="10 is not divisible by 4"):
        utils.ensure_divisibility(10, 4)
    assert (utils.get_padding_length(10, 4), utils.get_padding_length(12, 4)) == (2, 0)


def test_splits() -> None:
    x = torch.randn(4, 6, 8)
    assert [p.shape for p in utils.split_tensor_along_dim(x, 0, 2)] == [(2, 6, 8)] * 2
    assert torch.equal(torch.cat(utils.split_tensor_along_second_dim(x, 3), 1), x)
    last = utils.split_tensor_along_last_dim(x, 2, contiguous_split_chunks=True)
    assert all(p.is_contiguous() for p in last) and torch.equal(torch.cat(last, -1), x)
    assert mappings.split_tensor_along_last_dim is utils.split_tensor_along_last_dim
    assert utils.indices_split_along_dim(x, 2, 1, 4).tolist() == [2, 3]
    with pytest.raises(AssertionError, match="8 is not divisible by 3"):
        utils.split_tensor_along_last_dim(x, 3)


@pytest.mark.parametrize("contiguous", [False, True])
def test_each_rank_takes_its_own_part(nxd: Nxd, contiguous: bool) -> None:
    nxd(4, tp=4)
    x = torch.arange(16.0).reshape(2, 8)
    parts = utils.split_tensor_along_last_dim(x.to("xla"), 4, contiguous)
    own = per_rank(parts[utils.get_tensor_model_parallel_rank()])
    assert all(torch.equal(own[r], x[:, 2 * r : 2 * r + 2]) for r in range(4))
    assert utils.get_tensor_model_parallel_size() == 4


def test_embedding_ranges(nxd: Nxd) -> None:
    nxd(4, tp=4)
    assert utils.EmbeddingUtility.range_from_global_vocab_size(12, 2, 4) == (6, 9)
    first, last = utils.EmbeddingUtility.range_from_per_partition_vocab_size(5, parallel_state.get_tensor_model_parallel_rank(), 4)
    zero = torch.zeros((), dtype=torch.int64, device="xla")
    assert [(int(a), int(b)) for a, b in zip(per_rank(zero + first), per_rank(zero + last), strict=True)] == [
        (0, 5),
        (5, 10),
        (10, 15),
        (15, 20),
    ]


def test_attributes(nxd: Nxd) -> None:
    nxd(4, tp=4)
    p, q, plain = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    utils.set_tensor_model_parallel_attributes(p, True, 1, 2, rank_ordering=[1, 0, 2, 3])
    assert (p.tensor_model_parallel, p.partition_dim, p.partition_stride, p.num_partitions, p.rank_ordering) == (
        True,
        1,
        2,
        4,
        [1, 0, 2, 3],
    )
    utils.set_tensor_model_parallel_attributes(p, True, 1, 1, num_partitions=2)  # the same again: what is there stays
    assert (p.partition_stride, p.num_partitions) == (2, 4)
    for other in ((False, 1), (True, 0)):
        with pytest.raises(AssertionError, match="has a tensor_model_parallel already, True: its attributes are set once"):
            utils.set_tensor_model_parallel_attributes(p, *other, 2)
    utils.copy_tensor_model_parallel_attributes(q, p)
    assert q.partition_stride == 2
    utils.set_defaults_if_not_set_tensor_model_parallel_attributes(plain)
    utils.set_defaults_if_not_set_tensor_model_parallel_attributes(q)
    assert (plain.tensor_model_parallel, plain.partition_dim, plain.num_partitions, q.partition_dim) == (False, -1, 1, 1)
    assert utils.param_is_not_tensor_parallel_duplicate(p) is True
    with pytest.warns(
        UserWarning, match="counts parameters that all hold once for each rank; .*get_grad_norm and clip_grad_norm count them once"
    ):
        counted = torch.ones(1, device="xla") * utils.param_is_not_tensor_parallel_duplicate(plain)
    assert [float(v) for v in per_rank(counted)] == [1.0, 0.0, 0.0, 0.0]


def test_a_layer_that_marks_its_fused_weight_itself(nxd: Nxd) -> None:
    """As optimum's subclass does; the original does not mark it."""
    nxd(4, tp=4)
    fused = GQAQKVColumnParallelLinear(8, [8, 4], bias=False, gather_output=False).weight_qkv
    before = (fused.partition_stride, fused.num_partitions)
    utils.set_tensor_model_parallel_attributes(tensor=fused, is_parallel=True, dim=0, stride=1, num_partitions=4)
    assert (fused.tensor_model_parallel, fused.partition_dim) == (True, 0) and (fused.partition_stride, fused.num_partitions) == before


def test_casts() -> None:
    state = {"a": [torch.zeros(2), 3], "b": (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.float64))}
    cast = utils.cast_all(state)
    assert cast["a"][0].dtype == torch.bfloat16 and cast["a"][1] == 3
    assert cast["b"][0].dtype == torch.int32 and cast["b"][1].dtype == torch.float64
    assert utils.cast_tensor("x") == "x"
    x = torch.zeros(2)
    assert utils.cast_if_autocast_enabled(x, 1)[0] is x
    utils.verify_casted_dtype(x)
    with torch.autocast("xla", dtype=torch.bfloat16):
        y, number, ids = utils.cast_if_autocast_enabled(x, 1, torch.zeros(1, dtype=torch.int64))
        assert (y.dtype, number, ids.dtype) == (torch.bfloat16, 1, torch.int64)
        utils.verify_casted_dtype([y])
        with pytest.raises(
            AssertionError, match=r"Datatype of tensor is expected to be torch.bfloat16, got torch.float32 instead, in one of shape \[2\]"
        ):
            utils.verify_casted_dtype({"x": x})


def test_moves_and_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"x": [torch.ones(2, device="xla"), "text"]}
    assert utils.move_all_tensor_to_cpu(data)["x"][0].device.type == "cpu"
    assert utils.move_all_tensor_to_cpu(data, convert=False) is data
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    assert utils.is_pjrt_device()
    monkeypatch.delenv("PJRT_DEVICE")
    assert not utils.is_pjrt_device()
    assert utils.is_torch_version_greater_than_2() and not utils.requires_init_pg_override()


def test_local_world_size(nxd: Nxd) -> None:
    nxd(4, tp=2)
    assert utils.get_local_world_size() == 4


def test_the_package() -> None:
    modules, functions = package.PARALLEL_MODULES, package.PARALLEL_FUNCTIONS
    assert modules == [package.ColumnParallelLinear, package.RowParallelLinear, package.ParallelEmbedding]
    assert functions == [package.parallel_cross_entropy]
    assert package.layers.ColumnParallelLinear is package.ColumnParallelLinear
    assert callable(package.clip_grad_norm)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("name", package.__all__)
def test_what_the_package_has(name: str) -> None:
    assert getattr(package, name) is not None


def test_names_that_scripts_import_from_there() -> None:
    from neuronx_distributed.parallel_layers import get_xla_rng_tracker, initialize_model_parallel, move_model_to_device, random
    from neuronx_distributed.parallel_layers.layers import divide, get_tensor_model_parallel_rank, get_tensor_model_parallel_size

    assert initialize_model_parallel is parallel_state.initialize_model_parallel and divide is utils.divide
    assert get_tensor_model_parallel_rank is utils.get_tensor_model_parallel_rank is parallel_state.get_tensor_model_parallel_rank
    assert get_tensor_model_parallel_size is utils.get_tensor_model_parallel_size and get_xla_rng_tracker is random.get_xla_rng_tracker
    model = torch.nn.Linear(1, 1)
    with pytest.warns(DeprecationWarning, match="import it from neuronx_distributed.utils.model_utils"):
        move_model_to_device(model, "xla")
    assert model.weight.device.type == "xla"

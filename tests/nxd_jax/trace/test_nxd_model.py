"""`NxDModel`: routes, structures of results, and what it says when something does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jax import export
from torch import nn

from nxd_jax.trace.model_builder_v2 import ModelBuilder
from nxd_jax.trace.nxd_model import BaseNxDModel, NxDModel, StateInitializer
from nxd_jax.trace.parallel_context import NxDParallelState
from tests.nxd_jax.trace import nets
from tests.nxd_jax.trace.nets import PROMPT, built

X = torch.arange(6.0).view(2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> NxDModel:
    return built(2).model(workdir=tmp_path_factory.mktemp("programs"))


@pytest.fixture(autouse=True)
def own_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_what_it_says_of_itself(model: NxDModel) -> None:
    assert model.input_shape_map["(ids: [2, 3], pos: [3])"] == ["prefill"] and len(model.input_shape_map) == 2
    states = model.state_initializer
    assert states is not None and states.dtypes["calls"] == torch.float32 and states.shapes["calls"] == [1]
    assert [set(zeros) for zeros in states()] == [set(states.shapes)] * 2
    with NxDParallelState(world_size=1):
        plain = ModelBuilder(nn.Linear(3, 2)).trace(X).compile()
    assert plain.state_initializer is None
    torch.classes.neuron.Runtime().unsafe_close()


# -- calls that do not fit -----------------------------------------------------------------------------

IDS, POS = nets.tokens()[:, :PROMPT], torch.arange(PROMPT)
BAD_CALLS: list[tuple[Callable[[NxDModel], Any], type[Exception], str]] = [
    (lambda m: m(IDS[:1], POS), KeyError, r"was traced for inputs \(ids: \[1, 3\], pos: \[3\]\): there are \(ids: \[2, 3\], pos: \[3\]\) -> prefill; "),
    (lambda m: m(IDS), KeyError, r"no program was traced for inputs \(ids: \[2, 3\]\)"),
    (lambda m: m(IDS, POS, scale=torch.ones(1)), KeyError, r"scale: \[1\]\): there are"),
    (lambda m: m(IDS, POS, nothing=POS), AssertionError, "forward has no parameter nothing: it takes ids, pos, scale"),
    (lambda m: m(IDS, POS, POS, POS), AssertionError, r"forward takes 3 inputs \(ids, pos, scale\), got 4"),
    (lambda m: m(IDS, POS, pos=POS), AssertionError, "pos is given by position and by name"),
    (lambda m: m(IDS, POS, forward_mode="fast"), AssertionError, "forward_mode must be one of default, ranked, ranked_to_cpu, async, got 'fast'"),
    (lambda m: m(IDS, POS, model_name="decode"), AssertionError, "model_name 'decode' does not take these inputs: prefill does"),
    (lambda m: m(IDS.float(), POS), ValueError, r"ids was traced as torch\.int64, and torch\.float32 is of another kind: convert it, or trace"),
    (lambda m: m.set_weights(built(2).weights), ValueError, r"not on its devices yet: call replace_weights"),
    (lambda m: m.read_from_neuron_buffer("nothing", 0), KeyError, "no weight or state is named 'nothing': there are embed.weight"),
    (lambda m: m.read_from_neuron_buffer("calls", 2), KeyError, r"rank 2 is not among the ranks of this process, \[0, 1\]"),
    (lambda m: m.write_to_neuron_buffer(torch.ones(2), "calls", 0), KeyError, r"calls: float32 \[1\] cannot take a tensor of shape \[2\]"),
    (lambda m: m.write_to_neuron_buffer(torch.ones(1), "nothing", 0), KeyError, "no weight or state is named 'nothing'"),
    (lambda m: m.get_neff("nothing"), KeyError, "no program has tag 'nothing': there are decode, prefill"),
    (lambda m: m.get_metaneff("nothing"), KeyError, "no program has tag 'nothing'"),
    (lambda m: m.get_hlo("nothing"), KeyError, "no program has tag 'nothing'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), BAD_CALLS)
def test_calls_that_do_not_fit(model: NxDModel, call: Callable[[NxDModel], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(model)


def test_integers_that_do_not_fit() -> None:
    """Into the dtype that was traced: an error, not other numbers."""
    with NxDParallelState(world_size=1, tensor_model_parallel_size=1):
        table = nn.Embedding(8, 2)
        model = ModelBuilder(table).trace(torch.zeros(3, dtype=torch.int32)).compile()
    model.set_weights([table.state_dict()])
    model.to_neuron()
    ids = torch.tensor([1, 2, 7])
    assert torch.equal(model(ids), table(ids))
    with pytest.raises(
        ValueError, match=r"was traced as torch\.int32, which holds -2147483648 to 2147483647, and was given 1 to 4294967297: trace"
    ):
        model(torch.tensor([1, 2, 2**32 + 1]))


def test_before_it_is_on_its_devices() -> None:
    model = built(2).builder.compile()
    for call in (lambda: model.read_from_neuron_buffer("calls", 0), lambda: model.write_to_neuron_buffer(torch.ones(1), "calls", 0)):
        with pytest.raises(AssertionError, match=r"not on its devices yet: call set_weights\(\.\.\.\) and to_neuron\(\) first"):
            call()
    with pytest.raises(RuntimeError, match=r"not initialised: call set_weights\(\.\.\.\) and to_neuron\(\) first"):
        model(IDS, POS)
    with pytest.raises(RuntimeError, match=r"the model has no weights yet \(embed\.weight, .*\): call set_weights\(\.\.\.\) with a dict"):
        model.to_neuron()
    with pytest.raises(ValueError, match="save_weights=True needs weights: call set_weights"):
        model.save("model.pt", save_weights=True)


def test_weights_that_do_not_fit() -> None:
    model, good = built(2).builder.compile(), built(2).weights
    without = [{n: t for n, t in own.items() if n not in ("q.weight", "o.bias")} for own in good]
    with pytest.raises(ValueError, match=r"2 weights are missing: .*(q\.weight|o\.bias).*named as in the traced module's state_dict"):
        model.set_weights(without)
    with pytest.raises(ValueError, match=r"q\.weight was traced with shape \[8, 16\], got \[4, 16\]"):
        model.set_weights([{**own, "q.weight": own["q.weight"][:4]} for own in good])
    with pytest.raises(
        ValueError,
        match=r"o\.bias was traced as a weight that all ranks share, and rank 1 is given other values than rank 0: set its attribute",
    ):
        model.set_weights([good[0], {**good[1], "o.bias": good[1]["o.bias"] + 1}])
    with pytest.raises(ValueError, match=r"embed\.weight: 3 parts of shape \[16, 16\] do not make up a tensor with 32 entries along dim 0"):
        model.set_weights([*good, good[0]])
    model.set_weights([{**own, "unknown": torch.ones(3)} for own in good])  # passed over
    model.to_neuron()
    model.to_neuron()
    torch.testing.assert_close(model(IDS, POS)["logits"], nets.reference(IDS))


def test_other_weights_that_do_not_fit() -> None:
    """The model stays as it was."""
    model = built(2).model()
    model(IDS, POS)
    with pytest.raises(ValueError, match=r"q\.weight was traced with shape"):
        model.replace_weights([{**own, "q.weight": torch.ones(1)} for own in built(2).weights])
    got = model(IDS, POS)
    torch.testing.assert_close(got["logits"], nets.reference(IDS))
    assert got["calls"].item() == 7.0
    model.replace_weights(built(4).weights)
    assert model(IDS, POS)["calls"].item() == 6.0


def test_ranks_of_this_process() -> None:
    with pytest.raises(AssertionError, match="local_ranks_size=1 needs start_rank, the first rank of this process"):
        NxDModel(2, local_ranks_size=1)
    with pytest.raises(AssertionError, match="start_rank=0 needs local_ranks_size, the ranks of this process"):
        NxDModel(2, start_rank=0)
    for start, count in ((-1, 1), (0, 3), (2, 1), (0, 0)):
        with pytest.raises(AssertionError, match="are not among the 2 of world_size"):
            NxDModel(2, start, count)
    part = NxDModel(2, 1, 1)
    part._add("a", built(2).builder.trace_artifacts_collection["decode"].program, ())
    with pytest.raises(
        ValueError, match=r"start_rank 1 and local_ranks_size 1 name ranks \[1\], and this process computes for \[0, 1\]: leave both out"
    ):
        part.set_weights(built(2).weights[1:])
    part._loaded = built(2).weights[1:]
    with pytest.raises(ValueError, match="this process has the weights of 1 ranks out of 2: save without weights"):
        part.save("model.pt", save_weights=True)


def test_programs_that_do_not_fit_together() -> None:
    two, four = (built(tp).builder.trace_artifacts_collection for tp in (2, 4))
    model = NxDModel(2).add("a", two["decode"], None)
    with pytest.raises(AssertionError, match="'b' was traced for 4 ranks, and the model has world_size 2"):
        model.add("b", four["decode"], None)
    other = ModelBuilder(lambda x: x + 1).trace(X, tag="c").trace_artifacts_collection["c"]
    with pytest.raises(
        AssertionError,
        match=r"'c' was traced from forward\(x\), the programs before from forward\(ids, pos, scale\): all must have the same",
    ):
        model.add("c", other, None)
    wide, narrow = (ModelBuilder(nn.Linear(n, 2)).trace(torch.ones(1, n), tag="d").trace_artifacts_collection["d"] for n in (3, 4))
    with pytest.raises(AssertionError, match=r"program 'e' has weight: float32 \[2, 4\], the others weight: float32 \[2, 3\]"):
        NxDModel(1).add("d", wide, None).add("e", narrow, None)


def test_programs_of_other_groups_and_of_other_states() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> Any:
            if x.shape[0] == 2:
                self.p.add_(1)
            return x + self.p

    found = []
    for tp in (1, 2):
        with NxDParallelState(world_size=2, tensor_model_parallel_size=tp):
            found.append(ModelBuilder(Adds()).trace(X, tag="adds").trace(X[:1], tag="reads").trace_artifacts_collection)
    with pytest.raises(AssertionError, match=r"program 'b' was traced for Ranks\(.*'tp': 2.*, the others for Ranks\("):
        NxDModel(2).add("a", found[0]["adds"]).add("b", found[1]["adds"])
    text = "p is a parameter that one of the programs 'b' and 'a' updates, and the other takes for a weight that all ranks share: register it as a buffer"
    for first, second in (("adds", "reads"), ("reads", "adds")):
        with pytest.raises(AssertionError, match=text):
            NxDModel(2).add("a", found[1][first]).add("b", found[1][second])


def test_what_can_be_looked_at(model: NxDModel) -> None:
    assert model.get_available_keys() == {"prefill", "decode"} and isinstance(model, BaseNxDModel)
    exported = export.deserialize(bytearray(model.get_neff("decode")))
    assert exported.nr_devices == 2 and set(exported.platforms) >= {"cpu", "cuda"}
    assert "all_reduce" in model.get_hlo("decode")
    facts = model.get_metaneff("decode")
    assert [t["name"] for t in facts["inputs"]] == ["ids", "pos"] and [t["name"] for t in facts["states"]] == [
        "cache_k",
        "cache_v",
        "calls",
    ]
    assert model.router([IDS, POS], ["ids", "pos"]) == ["prefill"]
    zeros = StateInitializer({"a": [2, 3]}, {"a": torch.bfloat16}, 2)()
    assert len(zeros) == 2 and zeros[1]["a"].dtype == torch.bfloat16 and not zeros[1]["a"].any()


def test_written_weights_are_saved(tmp_path: Path) -> None:
    """A rank's own, and one that all share."""
    model = built(2).model()
    part, bias = torch.randn(8, 16), torch.randn(16)
    model.write_to_neuron_buffer(part, "q.weight", 1)
    model.write_to_neuron_buffer(bias.double(), "o.bias", 1)
    wanted = model(IDS, POS)["logits"]
    model.save(str(tmp_path / "model.pt"), save_weights=True)
    found = NxDModel.load(str(tmp_path / "model.pt"))
    found.to_neuron()
    assert torch.equal(found.read_from_neuron_buffer("q.weight", 1), part) and torch.equal(found.read_from_neuron_buffer("o.bias", 0), bias)
    assert torch.equal(found.read_from_neuron_buffer("q.weight", 0), built(2).weights[0]["q.weight"])
    assert torch.equal(found(IDS, POS)["logits"], wanted)


def test_given_weights_that_change(tmp_path: Path) -> None:
    """A file has the weights that the model computes with, whatever became of the dicts that it was given."""
    model, given = built(2).builder.compile(), [{n: t.clone() for n, t in own.items()} for own in built(2).weights]
    model.set_weights(given)
    for own in given:
        own["q.weight"].zero_()
        own["o.bias"] = torch.zeros(3)
    model.to_neuron()
    model.save(str(tmp_path / "model.pt"), save_weights=True)
    found = NxDModel.load(str(tmp_path / "model.pt"))
    found.to_neuron()
    wanted = built(2).model()(IDS, POS)["logits"]
    assert torch.equal(model(IDS, POS)["logits"], wanted) and torch.equal(found(IDS, POS)["logits"], wanted)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


def test_written_tables_are_saved(tmp_path: Path) -> None:
    """A model without weights has what no checkpoint holds."""
    model = ModelBuilder(Table()).trace(torch.ones(2)).compile()
    model.to_neuron()
    model.write_to_neuron_buffer(torch.tensor([2.0, 3.0]), "table", 0)
    model.save(str(tmp_path / "model.pt"), save_weights=True)
    found = NxDModel.load(str(tmp_path / "model.pt"))
    found.to_neuron()
    assert found(torch.ones(2)).tolist() == [2.0, 3.0]

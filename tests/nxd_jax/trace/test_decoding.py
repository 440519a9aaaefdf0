"""Prefill and decode share a cache: equal to the whole sequence in plain torch, for several numbers of ranks, on a device each and on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.nxd_jax.trace import nets
from tests.nxd_jax.trace.nets import BATCH, HEAD, HEADS, LENGTH, PROMPT, built


def decode_all(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the prompt and of 8 tokens after it, one at a time."""
    found = [model(ids[:, :PROMPT], torch.arange(PROMPT))["logits"]]
    found += [model(pos=torch.tensor([k]), ids=ids[:, k : k + 1])["logits"] for k in range(PROMPT, ids.shape[1])]
    return torch.cat(found, 1)


@pytest.mark.core(keep=2)
@pytest.mark.parametrize(("tp", "form"), [(1, "mesh"), (2, "mesh"), (4, "mesh"), (4, "one")])
def test_prefill_and_decodes_equal_the_whole_sequence(tp: int, form: str, tmp_path: Path) -> None:
    model = built(tp).model(form, workdir=tmp_path)
    assert model._model.where.form == ("one" if tp == 1 else form)
    ids = nets.tokens()
    torch.testing.assert_close(decode_all(model, ids), nets.reference(ids))
    assert model(ids[:, :PROMPT], torch.arange(PROMPT))["calls"].tolist() == [15.0]


@pytest.mark.core(keep=2)
@pytest.mark.parametrize(("cut", "tp", "form"), [(2, 4, "mesh"), (4, 2, "one"), (4, 1, "one"), (1, 4, "mesh")])
def test_weights_of_another_number_of_ranks(cut: int, tp: int, form: str, tmp_path: Path) -> None:
    """Joined and cut again; what is not there is named."""
    model = built(tp).model(form, built(cut).weights, tmp_path)
    ids = nets.tokens()[:, :PROMPT]
    torch.testing.assert_close(model(ids, torch.arange(PROMPT))["logits"], nets.reference(ids))
    for rank, own in enumerate(built(tp).weights):
        assert all(torch.equal(model.read_from_neuron_buffer(name, rank), t) for name, t in own.items())


def test_states(tmp_path: Path) -> None:
    """Caches begin with zeros and `calls` with 5; they are read and written by rank, and begin anew with other weights."""
    model = built(2).model(workdir=tmp_path)
    read = model.read_from_neuron_buffer
    assert read("calls", 1).tolist() == [5.0] and not read("cache_k", 0).any()
    ids = nets.tokens()
    first = decode_all(model, ids)
    x = torch.nn.functional.embedding(ids, nets.full_weights()["embed.weight"])
    keys = (x @ nets.full_weights()["k.weight"].T).unflatten(-1, (HEADS, HEAD))
    for rank in range(2):
        got = read("cache_k", rank)
        assert got.shape == (BATCH, LENGTH, 2, HEAD) and not got[:, ids.shape[1] :].any()
        torch.testing.assert_close(got[:, : ids.shape[1]], keys[:, :, 2 * rank : 2 * rank + 2])
    model.write_to_neuron_buffer(torch.tensor([70.0]), "calls", 0)
    assert (read("calls", 0).item(), read("calls", 1).item()) == (70.0, 14.0)
    assert model(ids[:, :1], torch.tensor([3]))["calls"].item() == 71.0

    doubled = [{**own, "head.weight": own["head.weight"] * 2} for own in built(2).weights]
    model.replace_weights(doubled)
    assert read("calls", 0).item() == 5.0 and not read("cache_v", 1).any()
    torch.testing.assert_close(decode_all(model, ids), first * 2)
    model.write_to_neuron_buffer(built(2).weights[1]["head.weight"], "head.weight", 1)
    torch.testing.assert_close(read("head.weight", 1) * 2, doubled[1]["head.weight"])
    got = model(ids[:, :PROMPT], torch.arange(PROMPT))["logits"]
    torch.testing.assert_close(got[..., nets.VOCAB // 2 :], first[:, :PROMPT, nets.VOCAB // 2 :])
    torch.testing.assert_close(got[..., : nets.VOCAB // 2], first[:, :PROMPT, : nets.VOCAB // 2] * 2)
    model.write_to_neuron_buffer(torch.zeros(nets.WIDTH), "o.bias", 1)
    assert not read("o.bias", 0).any()  # a weight that all ranks share is written for all


@pytest.mark.parametrize("form", ["mesh", "one"])
def test_ranks_given_different_inputs(form: str, tmp_path: Path) -> None:
    """Results are [result][rank], left on the device or brought to the CPU. Ranks share out weights, so each sees sums over all ranks' inputs."""
    model = built(2).model(form, workdir=tmp_path)
    ids = nets.tokens()[:, :PROMPT]
    pos = torch.arange(PROMPT)
    logits, calls = model([ids, ids], [pos, pos], forward_mode="ranked")
    assert [t.shape for t in logits] == [torch.Size([BATCH, PROMPT, nets.VOCAB])] * 2 and logits[1].dtype == torch.float32
    assert repr(logits[1]) == "OnDevice(0: float32 [2, 3, 32], rank 1)" and logits[1].device == torch.device("xla", 1)
    for rank in range(2):
        torch.testing.assert_close(logits[rank].cpu(), nets.reference(ids))
        torch.testing.assert_close(logits[rank].to("cpu"), nets.reference(ids))
        assert calls[rank].cpu().tolist() == [6.0]
    with pytest.raises(NotImplementedError, match=r"results of a traced model go to the CPU only, got cuda: use \.cpu\(\)"):
        logits[0].to("cuda")
    [on_cpu, _] = model([ids, ids], [pos, pos], forward_mode="ranked_to_cpu")
    assert all(type(t) is torch.Tensor and torch.equal(t, logits[0].cpu()) for t in on_cpu)
    waits, _ = model([ids, ids], [pos, pos], forward_mode="async")
    torch.testing.assert_close(waits[1].cpu(), logits[1].cpu())
    for given, found in (([ids], "1 tensors"), (ids, "Tensor"), ([ids] * 3, "3 tensors")):
        with pytest.raises(AssertionError, match=f"ids must be a list with a tensor for each of 2 ranks in this forward_mode, got {found}"):
            model(given, [pos, pos], forward_mode="ranked")

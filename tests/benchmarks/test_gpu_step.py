"""`benchmarks/gpu_step.py` at its tiny size on the CPU, and what its programs hold at full size on CUDA."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_step
import rounds
import torch
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from torch_bridge import _compat
from torch_bridge.compiler import interpret
from torch_bridge.export import hlo_text
from torch_bridge.lowerings.kernels import cudnn_attention

TINY = gpu_step.SIZES["tiny"]
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    data = gpu_step.batches(TINY, 2, 3)
    return {name: [gpu_step.measure(gpu_step.make(name, TINY, gpu=False), data, 1)] for name in ("bridge", "torch", "jax")}


@pytest.mark.thorough
def test_the_variants_compute_the_same(found):
    assert rounds.difference(found, 2e-3) < 2e-3
    losses = found["jax"][0]["losses"]
    assert len(losses) == gpu_step.CHECKED and losses[3] < losses[0]  # the same batch again, after three steps


@pytest.mark.thorough
def test_the_table(found):
    text = gpu_step.table(found, TINY, 2, None)
    assert "| unchanged torch script on `xla`, our bridge |" in text and "(1.00x)" in text
    assert "2 x 64 tokens on CPU" in text and "no peak known (--peak-tflops)" in text and "losses differ by" in text
    on_gpu = {"jax": [{"losses": [1.0], "first": 9.0, "step": 0.5, "peak_bytes": 3 * 2**30, "device": "NVIDIA H200"}]}
    text = gpu_step.table(on_gpu, gpu_step.SIZES["1b"], 4, None)
    row = next(line for line in text.splitlines() if "hand-written" in line)
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["32768", "500.0 (1.00x)", "27.2%", "3.0", "9.0"]
    assert "MFU of 989 TFLOP/s" in text
    assert "MFU of 500 TFLOP/s" in gpu_step.table(on_gpu, gpu_step.SIZES["1b"], 4, 500)


def test_losses_that_differ_are_refused():
    runs = {name: [{"losses": [loss], "device": "CPU"}] for name, loss in (("jax", 5.0), ("torch", 5.1))}
    with pytest.raises(RuntimeError, match="losses differ by"):
        gpu_step.table(runs, TINY, 2, None)


def test_counting():
    size = gpu_step.SIZES["1b"]
    assert size.parameters == 1_235_814_400  # Llama-3.2-1B
    assert sum(p.numel() for p in gpu_step.torch_model(TINY).parameters()) == TINY.parameters
    assert size.flops(4) == pytest.approx(6 * 1_235_814_400 * 16384 + 4 * 16 * 32 * 6 * 64 * 4096**2)
    assert [gpu_step.batch_for(gib) for gib in (24, 80, 140)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("device", "peak"),
    [("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121)],
)
def test_peaks(device, peak):
    assert gpu_step.peak_of(device) == peak


def test_an_unknown_device_has_no_peak():
    assert gpu_step.peak_of("NVIDIA GeForce GTX 1080") is None


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(gpu_step.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["gpu_step.py"])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU, and nvidia-smi finds none: .* with --size tiny"):
        gpu_step.main()
    with pytest.raises(SystemExit, match="sees no CUDA device, only cpu: pip install 'jax"):
        gpu_step._on_jax(gpu_step.Step(print, float, "", lambda: None), gpu=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="install a CUDA build of it, or leave the variants torch and compile out"):
        gpu_step.on_torch(TINY, gpu=True, compiled=False)


def test_unknown_variants(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", "--size", "tiny", "--variants", "jax,magic"])
    with pytest.raises(SystemExit):
        gpu_step.main()
    assert "--variants has no magic: choose from bridge, replay, torch, compile, jax" in capsys.readouterr().err


# -- for CUDA, lowered without one ----------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "_on_cuda", lambda: True)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: tuple(map(int, wanted.split("."))) <= (9, 0))


def test_the_script_has_cudnn_attention_in_both_directions(hopper):
    """Of a model from `transformers` with grouped-query attention, as it is recorded."""
    model = gpu_step.torch_model(TINY).to("xla")
    ids = gpu_step.batches(TINY, 2, 1)[0]
    batch = torch.from_numpy(ids).to("xla")
    model(input_ids=batch, labels=batch).loss.backward()
    graph = hlo_text.pending_graph([p.grad for p in model.parameters()])
    inputs = [hlo_text._input_of(n) for n in graph.nodes if n.op == "placeholder"]
    with _compat.enable_x64():
        traced = jax.jit(lambda *values: interpret.run(graph, values, None)).trace(*inputs)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(FORWARD) == text.count(BACKWARD) == TINY.layers
    assert f"tensor<2x{TINY.seq}x{TINY.kv_heads}x16xbf16>" in text


def test_the_hand_written_step_does_too(hopper):
    size = gpu_step.Size(2, 2048, 8192, 32, 8, 128_256, 4096)
    layer = {"q": (2048, 2048), "k": (2048, 512), "v": (2048, 512), "o": (2048, 2048), "gate": (2048, 8192), "up": (2048, 8192)}
    layer |= {"down": (8192, 2048), "attention_norm": (2048,), "mlp_norm": (2048,)}
    shapes = {"embedding": (size.vocab, 2048), "layers": [layer] * 2, "norm": (2048,)}
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16), shapes, is_leaf=lambda s: isinstance(s, tuple))
    ids = jax.ShapeDtypeStruct((4, size.seq), jnp.int32)
    traced = jax.jit(jax.grad(lambda params, ids: gpu_step.loss_fn(params, ids, size, "cudnn"))).trace(params, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(FORWARD) == text.count(BACKWARD) == 2 and "4096x4096" not in text

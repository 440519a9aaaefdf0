# %% [markdown]
# # 6. Will it fit?
#
# Llama 3 with 8 and with 70 billion parameters, on one `trn1.32xlarge` and on one `trn2.48xlarge`: what would a core hold in a training
# step, does it fit, and how long would the step take? No weight is allocated and nothing is computed: everything here follows from
# shapes, on any laptop.

# %%
import sys
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, where ipywidgets is not installed
sys.path.append("../examples/llama")  # where the model is: a Llama written with NxD's layers

import neuronx_distributed as nxd
import pandas
import torch
import torch_xla
from modeling_llama_nxd import DecoderLayer, LlamaForCausalLM, NxDLlamaOptions
from neuronx_distributed.utils.batch_utils import shift_labels
from transformers import LlamaConfig

import nxd_jax
from nxd_jax import inspect
from nxd_jax.inspect import memory_picture
from nxd_jax.inspect.estimate import LLAMA31_8B, LLAMA31_70B, estimate, transformer_work
from nxd_jax.topology import Topology
from nxd_jax.trainer.footprint import KINDS, footprint

GIB = 2**30
SEQ = 4096

# %% [markdown]
# ## The models and the plans
#
# A plan is a machine and a tensor-parallel size; the other cores are data-parallel copies. All plans have bfloat16 weights, sequence
# parallelism, blockwise attention, activation checkpoints of every layer, ZeRO-1 with float32 master weights, and one sequence of 4096
# tokens for each copy.

# %%
SIZES = {
    "8B": dict(num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32),
    "70B": dict(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64),
}

PLANS = [
    ("8B", "trn1.32xlarge", 8),
    ("70B", "trn1.32xlarge", 32),
    ("70B", "trn2.48xlarge", 64),
]


def label(size, instance, tp):
    return f"{size} on {instance}, TP {tp} x DP {Topology(instance).core_count // tp}"


def describe(size, tp, layers=None):
    """NxD's configuration, and a function that makes the model with its arguments."""
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=tp,
        sequence_parallel=True,
        optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
        activation_checkpoint_config=DecoderLayer,
    )
    shape = SIZES[size] | ({"num_hidden_layers": layers} if layers else {})
    llama = LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=SEQ, tie_word_embeddings=False)
    options = NxDLlamaOptions(sequence_parallel=True, kv_size_multiplier=max(tp // 8, 1), flash=True, dtype=torch.bfloat16)
    return config, LlamaForCausalLM, llama, options


# %% [markdown]
# ## What stays from step to step
#
# `footprint` works out weights, gradients and the optimizer's state of a core, from shapes alone. The 8B plan for `trn1.32xlarge`:

# %%
with nxd_jax.abstract_run(instance="trn1.32xlarge"):
    held = footprint(*describe("8B", tp=8))

print(f"{held.total / GIB:.2f} GiB of {held.hbm_bytes / GIB:.0f}; print(held) lists every tensor")
pandas.Series({kind: held.bytes_of(kind) for kind in KINDS}).div(GIB).round(2).to_frame("GiB on a core")

# %% [markdown]
# That is enough to choose a layout. 70B on a `trn2.48xlarge`, with three tensor-parallel sizes:

# %%
for tp in (16, 32, 64):
    with nxd_jax.abstract_run(instance="trn2.48xlarge"):
        held = footprint(*describe("70B", tp=tp))
    print(f"TP {tp} x DP {64 // tp}: {held.total / GIB:5.2f} GiB of {held.hbm_bytes / GIB:.0f}")

# %% [markdown]
# Master weights and the optimizer's state are 12 bytes for each parameter, divided by *all* cores of the machine whatever the layout.
# Weights (2 bytes) and gradients (4 bytes, if all are there at once) are divided by the tensor-parallel ranks only: hence TP 64.
#
# ## What a step needs besides
#
# Activations and temporaries depend on the program, and so does how many gradients there are at a time. So the step has to be compiled.
# All 80 layers of 70B take a minute and a half; but layers are equal, so each adds about the same. Here the step is compiled with 2 and
# with 4 layers of the true widths, and the line through both is extended to all layers.


# %%
def memory(size, instance, tp, layers):
    """The memory of a core in a training step with that many layers."""
    with nxd_jax.abstract_run(instance=instance) as run:
        config, *model_fn = describe(size, tp, layers)
        model = nxd.initialize_parallel_model(config, *model_fn)
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=3e-4)
        ids = torch.zeros(1, SEQ, dtype=torch.int64)
        batch = {name: t.to("xla") for name, t in shift_labels({"input_ids": ids, "labels": ids}).items()}
        model(**batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return inspect.look(run).memory


def extended(two, four, layers):
    """Bytes by kind with that many layers, on the line through 2 and 4."""
    two, four = two.kinds(), four.kinds()
    return {kind: two[kind] + (layers - 2) / 2 * (four[kind] - two[kind]) for kind in two}


measured = {plan: (memory(*plan, layers=2), memory(*plan, layers=4)) for plan in PLANS}
measured[PLANS[0]][1]

# %% [markdown]
# Is it a line? One plan again with 6 layers, compiled and extended:

# %%
compiled = memory(*PLANS[0], layers=6).peak
predicted = sum(extended(*measured[PLANS[0]], 6).values())
print(f"6 layers: compiled {compiled / GIB:.3f} GiB, extended from 2 and 4 {predicted / GIB:.3f} GiB: {predicted / compiled - 1:+.1%}")

# %% [markdown]
# ## The verdict

# %%
STATE = ("parameter", "master weight", "optimizer state")


def parts(plan):
    """Bytes of a core with all layers: state, and the rest."""
    kinds = extended(*measured[plan], SIZES[plan[0]]["num_hidden_layers"])
    held = {kind: kinds[kind] for kind in STATE}
    return held | {"gradients, activations, temporaries": sum(kinds.values()) - sum(held.values())}


plans = {plan: parts(plan) for plan in PLANS}
hbm = {plan: Topology(plan[1]).hbm_per_core for plan in PLANS}
table = pandas.DataFrame({label(*plan): held for plan, held in plans.items()}).div(GIB).T.round(2)
table["peak, GiB"] = table.sum(axis=1)
table["of"] = [hbm[plan] / GIB for plan in PLANS]
table["verdict"] = ["fits" if peak <= of else "does not fit" for peak, of in zip(table["peak, GiB"], table["of"], strict=True)]
table

# %% [markdown]
# The line is a little too low: in a long program XLA keeps more gradients at a time. With all their layers compiled, the three plans need
# 9.8, 40.9 and 22.0 GiB, 5 to 8 % more than the line says. The verdicts are the same.
#
# In the pictures the dashed line is the memory of a core; a bar that crosses it has a red frame.

# %%
memory_picture([(label(*p), plans[p]) for p in PLANS if "trn1" in p[1]], hbm[PLANS[0]], "trn1.32xlarge")

# %%
memory_picture([(label(*p), plans[p]) for p in PLANS if "trn2" in p[1]], hbm[PLANS[-1]], "trn2.48xlarge")

# %% [markdown]
# No layout of one `trn1.32xlarge` helps 70B: 12 bytes x 70.6 billion / 32 cores are 25 GiB on cores of 16. More machines do. They bring
# more data-parallel copies, so that ZeRO-1's parts get smaller; what is divided by TP alone stays. What 70B holds from step to step on
# several of them, with TP 32:

# %%
for nodes in (4, 16):
    with nxd_jax.abstract_run(instance="trn1.32xlarge", nodes=nodes):
        held = footprint(*describe("70B", tp=32))
    print(f"{nodes:2d} x trn1.32xlarge: {held.total / GIB:5.2f} GiB of {held.hbm_bytes / GIB:.0f}, {held.left / GIB:5.2f} left")

# %% [markdown]
# ## How long would a step take?
#
# `estimate` is a roofline: time in the engines, in memory and on the wires, from the documented numbers of the machine
# (`docs/explanation/estimate.md` says how far off it is; for Trainium2 no throughput is published that it could be checked against). A step of 256
# sequences for the plans that fit, each copy of the model taking one sequence at a time:

# %%
rows = []
for plan in PLANS:
    size, instance, tp = plan
    machine = Topology(instance)
    if sum(plans[plan].values()) <= hbm[plan]:
        model = {"8B": LLAMA31_8B, "70B": LLAMA31_70B}[size]
        work = transformer_work(model, seq=SEQ, global_batch=256, tp=tp, dp=machine.core_count // tp, recompute="full", flash=True)
        guess = estimate(work, machine)
        rows.append((label(*plan), guess.seconds, 256 * SEQ / guess.seconds, f"{guess.utilisation:.0%}"))
pandas.DataFrame(rows, columns=["plan", "seconds", "tokens per second", "of the engines' peak"]).set_index("plan").round(
    {"seconds": 1, "tokens per second": 0}
)

# %% [markdown]
# Every term of the last one. "limit" names what a term waits for:

# %%
guess

# %% [markdown]
# ## Something to try
#
# - Two sequences for each copy: `torch.zeros(2, SEQ, ...)` in `memory`. What grows, and does 8B still fit on `trn1.32xlarge`?
# - Leave out the activation checkpoints (`activation_checkpoint_config=None`). How many layers fit now?
# - `zero_one_enabled: False`, for 8B: which of the two machines is still large enough?
# - Compile all layers: `memory("8B", "trn1.32xlarge", 8, layers=32)` takes half a minute. How far is the line off?
# - `python examples/abstract_llama.py --size 70b --tp 32 --dp 16` does the same on 16 machines, and prints the collectives as well.

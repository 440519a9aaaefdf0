# %% [markdown]
# # 4. ZeRO-1, memory, and checkpoints that reshard
#
# What does a core hold while it trains, and what does ZeRO-1 take off it? A small model is trained on 16 emulated cores with ZeRO-1,
# saved, and loaded on another layout, where it goes on with the same losses. Then the memory of the same step is looked at for three
# billion parameters, without running it.

# %%
import os
import tempfile

os.environ["NXD_JAX_INSTANCE"] = "trn2.48xlarge"  # the machine to emulate, and
os.environ["NEURON_RT_NUM_CORES"] = "16"  # how many of its cores; both before torch_xla is imported

import neuronx_distributed as nxd
import pandas
import torch
import torch_xla
from neuronx_distributed.modules.rms_norm import RMSNorm
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear, parallel_state

import nxd_jax
from nxd_jax import inspect
from nxd_jax.inspect import memory_picture

# %% [markdown]
# ## A model, written as for the hardware


# %%
class Block(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = RMSNorm(hidden)
        self.up = ColumnParallelLinear(hidden, 4 * hidden, bias=False, gather_output=False)
        self.down = RowParallelLinear(4 * hidden, hidden, bias=False, input_is_parallel=True)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def get_model(layers, hidden):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(hidden) for _ in range(layers)))


def make(tp, zero1, layers=3, hidden=64):
    """Model and optimizer for `tp` tensor-parallel ranks; the other ranks are data-parallel copies."""
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=tp,
        optimizer_config={"zero_one_enabled": zero1, "grad_clipping": True, "max_grad_norm": 1.0},
    )
    model = nxd.initialize_parallel_model(config, get_model, layers, hidden)
    return model, nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.003)


def train_step(model, optimizer, x):
    """One step in which the model learns to turn its input around."""
    x = x.to("xla")
    loss = torch.nn.functional.mse_loss(model(x), x.flip(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    return loss


# %% [markdown]
# ## Train and save
#
# 3 blocks, 64 wide, TP 4 x DP 4, with ZeRO-1. (Every rank gets the same batch here, so that layouts with other numbers of data-parallel
# ranks see the same data.)

# %%
batches = torch.randn(8, 2, 16, 64, generator=torch.Generator().manual_seed(1))

model, optimizer = make(tp=4, zero1=True)
for x in batches[:5]:
    loss = train_step(model, optimizer, x)
folder = tempfile.mkdtemp()
nxd.save_checkpoint(folder, "step_5", model, optimizer, user_content={"step": 5})
print(f"saved at loss {loss.item():.6f}")

goes_on = [train_step(model, optimizer, x).item() for x in batches[5:]]

# %% [markdown]
# What a core held in the last step, the largest tensors first: weights, then ZeRO-1's parts. "Differs along" names the mesh axes over
# which a tensor is cut: weights along tp, and ZeRO-1's parts along dp as well, so that each is a quarter of its weight.

# %%
inspect.look().memory.tensors(most=12)

# %% [markdown]
# A checkpoint has one full array for each weight and each piece of state, whatever layout wrote it. `nxd-ckpt` shows it in a terminal:

# %%
# %run -m nxd_jax.ckpt -- inspect {folder}

# %% [markdown]
# ## Load on another layout
#
# TP 16 and no data parallelism, and without ZeRO-1. Each rank reads its part of each array. Losses go on where they were, up to the order
# in which numbers are added:

# %%
parallel_state.destroy_model_parallel()
model, optimizer = make(tp=16, zero1=False)
content = nxd.load_checkpoint(folder, "step_5", model, optimizer)
print("loaded at step", content["step"])

again = [train_step(model, optimizer, x).item() for x in batches[5:]]
pandas.DataFrame({"TP 4 x DP 4, ZeRO-1": goes_on, "TP 16, loaded": again}, index=pandas.Index([6, 7, 8], name="step"))

# %%
largest = max(abs(a - b) / a for a, b in zip(goes_on, again, strict=True))
print(f"largest relative difference {largest:.1e}")
assert largest < 1e-5

# %% [markdown]
# ## The memory of a large model
#
# In an *abstract run* tensors have shapes and no values: a step is recorded and compiled for its real sizes, and nothing is allocated or
# computed. Here are 24 blocks 4096 wide (3.2 billion parameters, float32) on TP 4 x DP 4, without and with ZeRO-1.

# %%
memory = {}
for name, zero1 in (("without ZeRO-1", False), ("with ZeRO-1", True)):
    parallel_state.destroy_model_parallel()
    with nxd_jax.abstract_run() as run:
        train_step(*make(tp=4, zero1=zero1, layers=24, hidden=4096), torch.zeros(1, 1024, 4096))
        memory[name] = inspect.look(run).memory

memory_picture([(name, m.kinds()) for name, m in memory.items()], memory["with ZeRO-1"].hbm_bytes)

# %% [markdown]
# Without ZeRO-1 every data-parallel copy of the model holds all of the optimizer's state; with it, each holds a quarter, and a quarter of
# a *master weight* that the optimizer works on. What XLA needs besides gets smaller, too: reduced gradients are a quarter each.
# (Activations and gradients share memory: while the backward pass makes the ones, it uses up the others. At the peak gradients count
# first, so that 0 for activations means that all of them had been used up.) In GiB:

# %%
table = pandas.DataFrame({name: m.kinds() for name, m in memory.items()}).fillna(0).div(2**30)
table.loc["peak"] = table.sum()
table.round(2)

# %% [markdown]
# By hand: tensor parallelism leaves a quarter of 3.2 billion parameters on each core. Adam keeps two float32 numbers for each.

# %%
parameters = 24 * (2 * 4 * 4096**2) / 4
print(f"weights, and gradients  {4 * parameters / 2**30:.2f} GiB each")
print(f"Adam on every copy      {8 * parameters / 2**30:.2f} GiB")
print(f"Adam in 4 parts         {8 * parameters / 4 / 2**30:.2f} GiB")
print(f"master weight, 4 parts  {4 * parameters / 4 / 2**30:.2f} GiB")

# %% [markdown]
# What it costs is communication. Without ZeRO-1 gradients are all-reduced over the data-parallel ranks; with it they are
# reduce-scattered, and the updated weights gathered, which on a ring is as much. `inspect.look(run).collectives` in each of the two runs
# shows it.
#
# ## Something to try
#
# - Load with `make(tp=1, zero1=True)`: DP 16. Then load the weights alone, with `nxd.load_checkpoint(folder, "step_5", model)`. How do
#   the losses differ, and why?
# - How many blocks fit into a core with ZeRO-1, and how many without? A bar that goes over the dashed line gets a red frame.
# - Make the layers bfloat16 (they take `dtype=torch.bfloat16`, and so does `RMSNorm`): Adam's numbers are bfloat16 then without ZeRO-1,
#   and float32 with it. What is left of its advantage at DP 4, and at DP 16?
# - `nxd.save_checkpoint(..., async_save=True)` returns at once and writes in the background; `nxd.finalize_checkpoint()` waits for it.

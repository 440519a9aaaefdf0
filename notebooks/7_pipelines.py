# %% [markdown]
# # 7. Pipelines
#
# A pipeline shares out a model's layers: each pipeline rank has a *stage*, and a batch goes through the stages in micro-batches. Ranks wait
# for one another, and they keep activations until gradients come back: how much of both depends on the *schedule*. This notebook compares
# schedules, trains a model on 16 emulated cores in 4 stages, measures where the time of a step goes, and chooses the number of
# micro-batches.

# %%
import os

os.environ["NXD_JAX_INSTANCE"] = "trn2.48xlarge"  # the machine to emulate, and
os.environ["NEURON_RT_NUM_CORES"] = "16"  # how many of its cores; both before torch_xla is imported

import neuronx_distributed as nxd
import pandas
import torch
import torch_xla
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear

from nxd_jax import inspect
from nxd_jax.inspect import topology_picture
from nxd_jax.pipeline.schedules import KINDS
from nxd_jax.topology import Topology

# %% [markdown]
# ## Schedules, without a model
#
# 4 ranks, 8 micro-batches; a stage's forward pass takes 1, its backward pass 2. Hatched is idle time, the *bubble*. The lower part shows how
# many activations a rank keeps. In **1F1B**, NxD's schedule, a rank does one forward and one backward pass in turn as soon as gradients
# arrive.

# %%
plan = inspect.schedule("1f1b", stages=4, microbatches=8)
plan.picture()

# %% [markdown]
# `print(plan)` gives numbers, and lanes for a terminal:

# %%
print(plan)

# %% [markdown]
# What can be better? Nobody waits for the gradients of weights (W), so they can fill gaps; only those of inputs (I) are urgent. And with
# two chunks on each rank, stages in a V, the first and the last stage are on one rank. **ZBV** does both. Its 8 stages are half as large, so
# its unit of time is half of that above:

# %%
inspect.schedule("zbv", stages=8, microbatches=8).picture()

# %% [markdown]
# All schedules for 4 ranks and 8 micro-batches. "Kept" counts micro-batches on the rank that keeps most, in units of a rank's layers:


# %%
def planned(name, microbatches):
    """Idle share and most activations, for 4 ranks."""
    chunks = KINDS[name].chunks
    found = inspect.schedule(name, stages=4 * chunks, microbatches=microbatches)
    return {"chunks": chunks, "idle": f"{found.timeline.idle_share:.1%}", "kept": max(row.peak for row in found) / chunks}


pandas.DataFrame({name: planned(name, 8) for name in KINDS}).T.sort_values("idle", key=lambda column: column.str.rstrip("%").astype(float))

# %% [markdown]
# ## A model in a pipeline
#
# 8 layers in 4 stages, each on 4 cores (TP 4). On all 64 cores of a `trn2.48xlarge` there are four such pipelines side by side, and a row
# of four chips has a stage: cores of one colour below. What stages hand on goes from row to row.

# %%
machine = Topology("trn2.48xlarge")
topology_picture(machine, machine.groups(tp=4, pp=4), by="pp_rank")

# %%
HIDDEN, WORDS, SEQ = 256, 512, 32


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, bias=False, gather_output=False)
        self.down = RowParallelLinear(4 * HIDDEN, HIDDEN, bias=False, input_is_parallel=True)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, HIDDEN)
        self.layers = torch.nn.ModuleList(Block() for _ in range(8))
        self.head = torch.nn.Linear(HIDDEN, WORDS)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make(schedule=None, microbatches=8, cuts=None):
    """A model; cuts: the layers that end stages, default: as many layers on each."""
    torch.manual_seed(0)
    pipeline = {
        "transformer_layer_cls": Block,
        "input_names": ["ids", "labels"],
        "output_loss_value_spec": True,
        "num_microbatches": microbatches,
        "schedule": schedule,
        "virtual_pipeline_size": KINDS[schedule].chunks if schedule else 1,
        "use_optimizer_wrapper": True,
        **({"pipeline_cuts": cuts} if cuts else {"auto_partition": True}),
    }
    config = nxd.neuronx_distributed_config(tensor_parallel_size=4, pipeline_parallel_size=4, pipeline_config=pipeline)
    return nxd.initialize_parallel_model(config, Model)


ids = torch.randint(0, WORDS, (32, SEQ), generator=torch.Generator().manual_seed(1))


def train(model, optimizer, steps):
    for _ in range(steps):
        loss = model.run_train(ids=ids, labels=ids.roll(-1, 1))
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    return loss.item()


model = make()
optimizer = nxd.initialize_parallel_optimizer(model.nxd_config, torch.optim.AdamW, model.parameters(), lr=0.003)
print(f"loss after a step {train(model, optimizer, 1):.3f}, after 3 more {train(model, optimizer, 3):.3f}")

# %% [markdown]
# Where weights lie. Optimizer state and gradients lie with them: no other core has a part of them.

# %%
for number, stage in enumerate(model.local_modules()):
    cores = sorted(d.id for p in stage.parameters() for d in p._storage.held.sharding.device_set)
    count = sum(p.numel() for p in stage.parameters())
    print(f"stage {number} on cores {cores[0]:2} to {cores[-1]:2}: {count:7,} weights each:", *(name for name, _ in stage.named_children()))

# %% [markdown]
# ## A step, measured
#
# In the block below each computation is waited for before the next one starts, so that it has this machine to itself. Of two steps the
# shorter time counts. The step is then put together again: in the order of the schedule, each computation as long as it took, as if each
# rank had a machine of its own.

# %%
with inspect.pipeline(model) as step:
    train(model, optimizer, 2)
step

# %%
step.picture()

# %% [markdown]
# The plan assumes that all stages take the same, and they do not: the last one has the head and the loss as well. All others wait for it.
# `step.idle_share` is what is idle, `step.plan.idle_share` what would be with equal stages: the difference is the price of the uneven cut.
#
# ## Cut elsewhere
#
# 3, 2, 2 layers and 1 with the head:


# %%
def measure(**how):
    """A step of a new model; the first of three compiles, and does not count."""
    model = make(**how)
    with inspect.pipeline(model) as step:
        for _ in range(3):
            model.run_train(ids=ids, labels=ids.roll(-1, 1))
            model.zero_grad()
    return step


def summary(step):
    return {
        "step, ms": round(1000 * step.seconds, 1),
        "idle": f"{step.idle_share:.1%}",
        "with equal stages": f"{step.plan.idle_share:.1%}",
        "activations, MiB": round(max(row.activation_bytes for row in step.ranks) / 2**20, 1),
    }


moved = measure(cuts=["layers.2", "layers.4", "layers.6"])
pandas.DataFrame({"2, 2, 2, 2": summary(step), "3, 2, 2, 1": summary(moved)}).T

# %%
moved.picture()

# %% [markdown]
# ## Schedules, measured
#
# All with 8 micro-batches of 4 sequences. Memory is that of the core that needs most. GPipe keeps the activations of all micro-batches,
# 1F1B those of as many as there are ranks.

# %%
steps = {"gpipe": measure(schedule="gpipe"), "1f1b": step, "zbv": measure(schedule="zbv")}
pandas.DataFrame({name: summary(found) for name, found in steps.items()}).T

# %% [markdown]
# Activations of each rank: counted in the arrays that were really there, and what the schedule says. They must be the same.

# %%
counted = {(name, what): [getattr(row, what) for row in found.ranks] for name, found in steps.items() for what in ("peak", "planned_peak")}
assert all(counted[name, "peak"] == counted[name, "planned_peak"] for name in steps)
pandas.DataFrame(counted, index=[f"rank {rank}" for rank in range(4)])

# %%
steps["zbv"].picture()

# %% [markdown]
# ## How many micro-batches?
#
# More of them make the bubble a smaller share of the step; but each is smaller, so that every computation has less to do for what it costs
# to start it. The batch stays at 32 sequences:

# %%
counts = {4: measure(microbatches=4), 8: step, 16: measure(microbatches=16)}
table = pandas.DataFrame({f"{count} of {32 // count} sequences": summary(found) for count, found in counts.items()}).T
table["work, ms"] = [round(1000 * sum(row.busy for row in found.ranks), 1) for found in counts.values()]
table

# %% [markdown]
# "Work" adds up what all ranks compute: it grows with the number of micro-batches, while the idle share shrinks. The step is shortest where
# both meet. Measured times can also be put into a plan. With the stages as they were measured above, and a batch twice as large, what would
# 16 micro-batches of the same size give?

# %%
larger = inspect.schedule("1f1b", stages=4, microbatches=16, times=counts[8].times)
print(f"{larger.timeline.end * 1000:.1f} ms, {larger.timeline.idle_share:.1%} idle")

# %% [markdown]
# ## Something to try
#
# - Checkpoint activations (`activation_checkpoint_config=Block` in `make`): what happens to the memory of GPipe, and to the backward passes?
# - `inspect.schedule("zbv", stages=8, microbatches=8, times=...)` with `schedules.Times(forward=1, input_backward=1, weight_backward=0.5)`
#   (`from nxd_jax.pipeline import schedules`): what is left of the zero in "zero bubble"?
# - Write a schedule of your own (`docs/reference/schedules.md`) and measure it. What does `schedules.check` say if a rank does its last
#   micro-batch first?
# - `step.picture(count=True)` counts micro-batches instead of bytes. Where do the two pictures differ, and why?
# - `step.tasks` has every computation, with the time that Python needed to record it.

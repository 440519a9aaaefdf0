# %% [markdown]
# # 2. A Trainium on your laptop
#
# The machines are data here: how many chips, which links, how much memory, which core is rank 17. A world of 32 ranks runs in one
# process, every rank on a device of its own, so that a script for a `trn1.32xlarge` runs on a laptop. This notebook draws the machines,
# lays groups of ranks on them, runs collectives, and shows which links they use.

# %%
import os

os.environ["NXD_JAX_INSTANCE"] = "trn1.32xlarge"  # the machine to emulate, and
os.environ["NEURON_RT_NUM_CORES"] = "32"  # how many of its cores; both before torch_xla is imported

import torch
import torch_xla
import torch_xla.core.xla_model as xm

import torch_bridge
from nxd_jax import inspect
from nxd_jax.inspect import Collective, topology_picture
from nxd_jax.inspect.traffic import axis_groups, traffic
from nxd_jax.topology import INSTANCES, Topology

# %% [markdown]
# ## The machine
#
# 16 chips of 2 cores on a 4 x 4 torus. Point at a chip to see what it is linked to.

# %%
machine = Topology("trn1.32xlarge")
machine

# %% [markdown]
# `nxd-ls` shows the same in a terminal, in the form of `neuron-ls`, with the processes that use the cores. (`%run -m nxd_jax.ls --` is
# the notebook's way to call that command.)

# %%
# %run -m nxd_jax.ls -- --instance trn1.32xlarge

# %% [markdown]
# Numbers of every instance that can be emulated. A *core* is a logical core: on Trn2 two physical cores count as one unless you say
# otherwise (LNC 2).

# %%
import pandas

pandas.DataFrame(
    [
        {
            "instance": t.instance.name,
            "chip": t.chip.name,
            "hosts": t.node_count,
            "chips": t.instance.chips,
            "cores": t.core_count,
            "LNC": t.lnc,
            "GiB per core": t.hbm_per_core / 2**30,
            "TFLOP/s per core, bf16": round(t.peak_flops_per_core("bfloat16") / 1e12, 1),
            "GB/s of memory per core": round(t.hbm_bandwidth_per_core / 1e9),
            "links": len(t.links()),
        }
        for t in map(Topology, INSTANCES)
    ]
).set_index("instance")

# %% [markdown]
# ## Ranks and groups
#
# Tensor parallelism over 8 ranks leaves 4 data-parallel replicas. Cores of one colour belong to one group. What to look for: a
# tensor-parallel group is a row of four chips (its ranks talk in every layer, so they should be close), and a data-parallel group has one
# core in each row.

# %%
groups = machine.groups(tp=8)
topology_picture(machine, groups)

# %% [markdown]
# Not every size is a good one. `check` says what the real hardware would refuse or do slowly:

# %%
import textwrap

for tp in (8, 12, 16):
    try:
        said = machine.check(tp=tp) or ["nothing against it"]
    except ValueError as error:
        said = [f"refused: {error}"]
    for sentence in said:
        print(textwrap.fill(f"tp={tp}: {sentence}", 120, subsequent_indent="   "))

# %% [markdown]
# ## Collectives that really run
#
# This kernel hosts all 32 ranks: each line below is what one rank's script says, and runs for all of them. First tensors have their rank
# in them; then each group of 8 adds up. JAX gets 32 virtual CPU devices for that, and a line of the log says so.

# %%
import torch.distributed as dist
import torch_xla.distributed.xla_backend  # registers backend "xla"
from neuronx_distributed.parallel_layers import parallel_state

dist.init_process_group("xla")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=8)

mine = torch.zeros(3, device=torch_xla.device()) + xm.get_ordinal()
summed = xm.all_reduce("sum", mine, groups=parallel_state.get_tensor_model_parallel_group(as_list=True))
torch_xla.sync()

for rank in (0, 1, 7, 8, 31):
    print(f"rank {rank:2d}: mine {torch_bridge.shards(mine)[rank].tolist()}   summed {torch_bridge.shards(summed)[rank].tolist()}")

# %% [markdown]
# Ranks 0-7 add up to 28, ranks 8-15 to 92, ranks 24-31 to 220. `print(summed)` would show rank 0's values, as in a script. What was sent:

# %%
inspect.look().collectives

# %% [markdown]
# To JAX these ranks are a mesh of 32 devices, in row-major order with tensor-parallel ranks innermost:

# %%
machine.mesh(tp=8).shape

# %% [markdown]
# ## On which links?
#
# A step that is more like training: every tensor-parallel group reduces activations a few times, and every data-parallel group reduces
# its gradients once.

# %%
activations = torch.ones(512, 1024, device=torch_xla.device()) + xm.get_ordinal()
gradients = torch.ones(256, 1024, device=torch_xla.device()) + xm.get_ordinal()
for _ in range(4):
    activations = xm.all_reduce("sum", activations, 1 / 8, groups=parallel_state.get_tensor_model_parallel_group(as_list=True))
gradients = xm.all_reduce("sum", gradients, 1 / 4, groups=parallel_state.get_data_parallel_group(as_list=True))
torch_xla.sync()

step = inspect.look()
step.collectives

# %% [markdown]
# `step.traffic` puts these on the wires: ranks of a group form a ring, and bytes between two chips take the shortest ways. Wide and dark
# links carry most; a number in a chip is what its two cores send each other.

# %%
carried = step.traffic
topology_picture(machine, groups, by="tp", traffic=carried)

# %% [markdown]
# A tensor-parallel ring is a row of chips and uses the links along x, those that wrap around included. The data-parallel rings go down
# the columns, along y. The table says which wire needs longest at its full bandwidth:

# %%
carried.table(most=6)

# %% [markdown]
# ## Another layout, without running anything
#
# Collectives can also be written down. How long does the busiest link need for an all-reduce of 64 MiB over tensor-parallel groups of 2,
# 8 and 32? Groups of 2 are the two cores of a chip and use no link at all.

# %%
for tp in (2, 8, 32):
    reduce = Collective("all-reduce", ("tp",), tp, 1, 64 * 2**20)
    found = traffic(machine, [reduce], lambda axes, tp=tp: axis_groups({"dp": 32 // tp, "tp": tp}, axes))
    print(f"tp {tp:2d}: links {found.link_seconds * 1e3:5.2f} ms, memory of a chip {found.local_seconds * 1e3:5.2f} ms")

# %% [markdown]
# ## The next size up
#
# A `trn2.48xlarge` has 64 logical cores. With tensor parallelism over 16 of them, a group is a row of the torus:

# %%
larger = Topology("trn2.48xlarge")
topology_picture(larger, larger.groups(tp=16), by="tp")

# %% [markdown]
# ## Something to try
#
# - `topology_picture(larger, larger.groups(tp=16, cp=2))` colours by context-parallel groups, too; `machine.groups(tp=4, pp=2)` has
#   pipeline stages.
# - `Topology("trn1.32xlarge", nodes=2)` has two machines joined by EFA. Draw `traffic` of a data-parallel all-reduce over both: where is
#   it slow?
# - `machine.groups(tp=8, layout="nxd")`: does NxD on the real hardware pick the same groups? Try tp=4 and tp=32.
# - In a terminal, run `nxd-ls -t` and `nxd-top` while this kernel is alive. What do they say about it?

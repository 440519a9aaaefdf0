# %% [markdown]
# # 3. What tensor and sequence parallelism do to the HLO
#
# Tensor parallelism cuts the weights of a layer over ranks; sequence parallelism also cuts the activations between those layers. Both
# show in the program: smaller matrix products, and collectives. Here a small model of parallel MLPs is trained on 16 emulated cores,
# tensor parallel over 4 and data parallel over 4, without and with sequence parallelism, and every collective of the step is compared
# with arithmetic.

# %%
import os

os.environ["NXD_JAX_INSTANCE"] = "trn2.48xlarge"  # the machine to emulate, and
os.environ["NEURON_RT_NUM_CORES"] = "16"  # how many of its cores; both before torch_xla is imported

import neuronx_distributed as nxd
import torch
import torch_xla
from neuronx_distributed.modules.rms_norm import RMSNorm
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear, mappings

from nxd_jax import inspect
from nxd_jax.inspect import sharding_picture, units

TP = 4  # ranks that share a layer; the other 16 / 4 are data-parallel copies
LAYERS, HIDDEN, INNER = 2, 64, 128
SEQ, BATCH = 128, 2  # tokens of a sequence, sequences per data-parallel rank


# %% [markdown]
# ## The model
#
# Written for one rank, with NxD's layers, as for the real hardware. `up` is cut by columns (each rank has some of the inner features),
# `down` by rows, so that nothing needs to be sent between them. With `sequence_parallel`, what is outside of them (norm, residual) works
# on a part of the sequence.


# %%
class Block(torch.nn.Module):
    def __init__(self, sequence_parallel):
        super().__init__()
        layout = dict(bias=False, sequence_parallel_enabled=sequence_parallel, sequence_dimension=0)
        self.norm = RMSNorm(HIDDEN, sequence_parallel_enabled=sequence_parallel)
        self.up = ColumnParallelLinear(HIDDEN, INNER, gather_output=False, **layout)
        self.down = RowParallelLinear(INNER, HIDDEN, input_is_parallel=True, **layout)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, sequence_parallel):
        super().__init__()
        torch.manual_seed(0)  # the same weights each time
        self.sequence_parallel = sequence_parallel
        self.blocks = torch.nn.ModuleList(Block(sequence_parallel) for _ in range(LAYERS))

    def forward(self, x, wanted):  # both [sequence, batch, hidden]
        if self.sequence_parallel:
            x = mappings.scatter_to_sequence_parallel_region(x)
        for block in self.blocks:
            x = block(x)
        if self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, to_model_parallel=False)
        return torch.nn.functional.mse_loss(x, wanted)


def train(sequence_parallel, steps=3):
    """Losses, model, and what the last step was."""
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=TP,
        sequence_parallel=sequence_parallel,
        optimizer_config={"zero_one_enabled": False, "grad_clipping": False},
    )
    model = nxd.initialize_parallel_model(config, Model, sequence_parallel)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.01)
    source = torch.Generator().manual_seed(1)
    x = torch.randn(SEQ, BATCH, HIDDEN, generator=source)
    losses = []
    for _ in range(steps):
        loss = model(x.to("xla"), x.flip(-1).to("xla"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    return losses, model, inspect.look()


# %% [markdown]
# ## Tensor parallelism

# %%
losses, model, step = train(sequence_parallel=False)
print("losses", losses)

# %% [markdown]
# Who holds what. The full weight of `up` is 128 x 64 (rows are output features); each block is what four ranks hold, the data-parallel
# copies of each other.

# %%
sharding_picture(model.module.blocks[0].up.weight, "blocks.0.up.weight")

# %%
sharding_picture(model.module.blocks[0].down.weight, "blocks.0.down.weight")

# %% [markdown]
# In the program a core multiplies by its part alone: compare the sizes with those of the same layer without parallel ranks.

# %%
step.stablehlo.find(module="blocks.0.up", text="dot_general")

# %%
inspect.look(torch.nn.Linear(HIDDEN, INNER, bias=False), torch.zeros(SEQ, BATCH, HIDDEN)).stablehlo.find(text="dot_general")

# %% [markdown]
# The price is communication. `down` has only a part of each sum, so its results are all-reduced, and so is the gradient of the input of
# `up` in the backward pass. Outside of modules, each gradient is averaged over the data-parallel ranks.

# %%
step.collectives

# %% [markdown]
# ### The same by hand
#
# Per layer and pass one all-reduce of all activations: tokens x hidden x 4 bytes. For the gradients, the bytes of what a core holds.

# %%
import pandas

ACTIVATIONS = SEQ * BATCH * HIDDEN * 4  # bytes, float32
WEIGHTS = LAYERS * (2 * HIDDEN * INNER // TP + HIDDEN) * 4  # of a core: two parts of matrices and a norm for each layer


def side_by_side(step, by_hand):
    """The table added up by kind, axis and phase, beside what arithmetic says."""
    found = {}
    for c in step.collectives:
        key = c.kind, c.axes[0], c.phase
        found[key] = found.get(key, 0) + c.bytes
    rows = [(*key, found.get(key, 0), by_hand.get(key, 0)) for key in sorted({*found, *by_hand})]
    frame = pandas.DataFrame(rows, columns=["collective", "along", "phase", "table, bytes", "by hand, bytes"])
    frame["equal"] = frame["table, bytes"] == frame["by hand, bytes"]
    return frame


side_by_side(
    step,
    {
        ("all-reduce", "tp", "forward"): LAYERS * ACTIVATIONS,
        ("all-reduce", "tp", "backward"): LAYERS * ACTIVATIONS,
        ("all-reduce", "dp", "outside"): WEIGHTS,
    },
)

# %% [markdown]
# ## Sequence parallelism
#
# The same model, the same weights. Losses are the same up to rounding:

# %%
losses_sp, model_sp, step_sp = train(sequence_parallel=True)
print("losses", losses_sp)
print("largest difference", max(abs(a - b) for a, b in zip(losses, losses_sp, strict=True)))

# %% [markdown]
# An all-reduce is a reduce-scatter followed by an all-gather. Sequence parallelism does the first where `down` ends and the second where
# the next `up` begins; in between each rank has a quarter of the tokens.

# %%
step_sp.collectives

# %% [markdown]
# By hand: per layer and pass a reduce-scatter of all activations, and an all-gather of a rank's quarter. In the backward pass, `up`
# gathers its input once more, since only a quarter of it was kept, and `down` gathers the gradient of its scattered result. The norms
# have seen a part of the sequence each, so their gradients are added up over the tensor-parallel ranks as well.

# %%
PART = ACTIVATIONS // TP

side_by_side(
    step_sp,
    {
        ("reduce-scatter", "tp", "forward"): LAYERS * ACTIVATIONS,
        ("all-gather", "tp", "forward"): LAYERS * PART + PART,  # the last one is the loss, which needs all tokens
        ("reduce-scatter", "tp", "backward"): LAYERS * ACTIVATIONS,
        ("all-gather", "tp", "backward"): 2 * LAYERS * PART,
        ("all-reduce", "tp", "outside"): LAYERS * HIDDEN * 4,
        ("all-reduce", "dp", "outside"): WEIGHTS,
    },
)

# %% [markdown]
# ## What is it good for?
#
# Not for the wires: on a ring a reduce-scatter and an all-gather send together what an all-reduce does, and there is more to gather: the
# input of `up` a second time, and the result for the loss.

# %%
for name, seen in (("tensor parallel", step), ("and sequence parallel", step_sp)):
    sent = sum(c.wire_bytes for c in seen.collectives if c.axes == ("tp",))
    print(f"{name:22s} {units.size(sent):>10} sent by a core along tp in a step")

# %% [markdown]
# It is for memory: what the forward pass keeps for the backward pass.

# %%
for name, seen in (("tensor parallel", step), ("and sequence parallel", step_sp)):
    print(f"{name:22s} {units.size(seen.memory.activations):>10} of activations on a core")

# %% [markdown]
# ## In the optimised HLO
#
# What the compiler here made of it. It may join collectives of the same kind (the gradients of all parameters in one all-reduce), so
# there are fewer than in the table above, which counts what was asked for.

# %%
step.optimized.find(text=" all-reduce(")

# %%
step_sp.optimized.find(text=" reduce-scatter(")

# %% [markdown]
# ## Something to try
#
# - Set `TP = 16`, with one copy of the model only. Which numbers of the tables change, and which stay? What happens to the collectives
#   along dp?
# - Give `up` the argument `gather_output=True` (and `down` `input_is_parallel=False`): correct, but what does it send now?
# - `step.costs.by("module", depth=1)` against `step_sp.costs`: which operations are divided by sequence parallelism, and which are not?
# - Pass `optimizer_config={"zero_one_enabled": True}`: the next notebook is about what that does.

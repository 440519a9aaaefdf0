# %% [markdown]
# # 1. First contact
#
# A PyTorch training step written for device `"xla"` runs here as it is. Nothing is sent to the device line by line: what the script does
# to `xla` tensors is *recorded*, and at `torch_xla.sync()` (in older scripts `xm.mark_step()`) the whole step is compiled as one program
# and run. This notebook looks at that program: the graph that was recorded, the HLO that the compiler gets, what it costs, and why it is
# sometimes compiled again.
#
# It needs no accelerator and takes some ten seconds.

# %%
import torch
import torch_xla

from nxd_jax import inspect

device = torch_xla.device()
device


# %% [markdown]
# ## A model and its training step
#
# Plain PyTorch. The two lines that make it an XLA script are `.to(device)` and `torch_xla.sync()`.


# %%
class Classifier(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up = torch.nn.Linear(16, width)
        self.dropout = torch.nn.Dropout(0.1)
        self.down = torch.nn.Linear(width, 4)
        self.power = 2

    def forward(self, x):
        return self.down(self.dropout(torch.relu(self.up(x)) ** self.power))


torch.manual_seed(0)
model = Classifier().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)


def train_step(rows=32):
    x = torch.randn(rows, 16)  # on the CPU, as a DataLoader gives it
    labels = x[:, :4].argmax(dim=1)
    x, labels = x.to(device), labels.to(device)
    loss = torch.nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    torch_xla.sync()
    return loss


losses = [train_step() for _ in range(30)]
print(f"loss {losses[0].item():.3f} -> {losses[-1].item():.3f}")

# %% [markdown]
# ## The last step
#
# `inspect.look()` shows the last step that ran. In a notebook it says what the program is, what it holds in memory, and where its
# operations are. The core it is compared with is an emulated Trainium core; what that is, the next notebook shows.

# %%
step = inspect.look()
step

# %% [markdown]
# ## The graph
#
# Every op that was recorded, in order, with the module and the line of *your* code that it comes from. Backward ops carry the module and
# line of their forward op. Forward, backward and optimizer are one graph, because nothing forced a result out in between.

# %%
step.graph.where(phase="forward")

# %% [markdown]
# A table is data: filter it with `where`, take it to pandas, save it as JSON. Which ops does the layer `up` need, forward and backward?

# %%
step.graph.where(lambda node: node.module == "up" and node.phase)

# %% [markdown]
# How many ops are there of each phase? ("outside" is what happens outside modules: here the loss and the optimizer.)

# %%
ops = step.graph.where(lambda node: node.phase and node.op not in ("getitem", "number"))
ops.to_pandas().groupby("phase").size().rename("ops").to_frame()

# %% [markdown]
# `inspect.look` also takes a module and example inputs, of which only shapes and dtypes matter; nothing is run. Its `fx` is a
# `torch.fx.GraphModule` of aten ops, which prints as Python.

# %%
alone = inspect.look(model, torch.randn(32, 16))
print(alone.fx.code.strip())

# %% [markdown]
# ## The HLO
#
# StableHLO is what the compiler gets; every line still knows its module. `find` searches by module, aten op or text. In the notebook, the
# whole program is a folded box with a search field: click on it.

# %%
step.stablehlo.find(module="down", text="dot_general")

# %% [markdown]
# Three matrix products: one forward, and two backward (for the gradient of the weight, and for that of the input). Two of the three exist
# in any linear layer; the third is missing where the input needs no gradient, as in `up`:

# %%
len(step.stablehlo.find(module="up", text="dot_general")), len(step.stablehlo.find(module="down", text="dot_general"))

# %%
step.stablehlo

# %% [markdown]
# What the compiler made of it for the machine that runs it here. Most elementwise ops are gone into *fusions*.

# %%
step.optimized

# %% [markdown]
# ## What it costs
#
# Operations of matrix products by module and phase. The backward pass costs twice the forward pass, but for `up`, the input of which
# needs no gradient.

# %%
step.costs.by("module", "phase")

# %% [markdown]
# ## Where the time goes
#
# `inspect.profile` records steps with JAX's profiler and reads the trace back. The host records ops while the device runs the program
# before; on a CPU the two share the processor, so that times here say nothing about Trainium, but shares say something about the model:
# most of the time goes into `dropout`, which draws random numbers.

# %%
with inspect.profile() as profile:
    for _ in range(4):
        train_step()

profile.modules

# %%
inspect.timeline_picture(profile)

# %% [markdown]
# ## Why was it compiled again?
#
# Compiling takes longer than a step, so a loop should compile once and then run the same program. `inspect.recompiles()` lists every
# program that was made in this process, and says of each that resembles an earlier one what is different. So far:

# %%
inspect.recompiles()

# %% [markdown]
# The learning rate changed in each of the 30 steps, and that compiled nothing: numbers that change from step to step are inputs of the
# program. Now five things that are not. After each, `inspect.why()` says what happened to the last program.
#
# A smaller batch, such as the last one of an epoch:

# %%
train_step(rows=20)
print(inspect.why().reason)

# %% [markdown]
# A Python constant that is part of the program: here an exponent, which some schedule changes.

# %%
model.power = 3
train_step()
print(inspect.why().reason)
print("advice:", inspect.why().why[0].advice)

# %% [markdown]
# From training to evaluation. Each mode is compiled once, which is right:


# %%
def score(module, x):
    with torch.no_grad():
        out = module(x.to(device))
    torch_xla.sync()
    return out


score(model, torch.ones(8, 16))
model.eval()
score(model, torch.ones(8, 16))
print(inspect.why().reason)
print("advice:", inspect.why().why[0].advice)

# %% [markdown]
# Another dtype, here in another model:

# %%
scorer = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).to(device)
score(scorer, torch.ones(8, 16))
scorer.to(torch.bfloat16)
score(scorer, torch.ones(8, 16, dtype=torch.bfloat16))
print(inspect.why().reason)

# %% [markdown]
# And a shape that depends on data: the number of rows that a mask keeps.

# %%
values = torch.arange(12, dtype=torch.float32).to(device)
for least in (3, 7):
    kept = values[values > least]
    total = (kept * 2 + 1).square().sum()
    torch_xla.sync()
print(inspect.why().reason)
print("advice:", inspect.why().why[0].advice)

# %% [markdown]
# The whole list, as a table. Each row says which earlier program it is like, and why that one would not do.

# %%
inspect.recompiles(again_only=True)

# %% [markdown]
# ## Something to try
#
# - Put `print(loss.item())` in the middle of `train_step`, before `loss.backward()`. The step falls into two programs:
#   `inspect.look().others` has the second. What does the first one compute, and what is computed twice?
# - `step.save("step.json")` writes all of the above as data; `step.dump("hlo")` writes the graph and both kinds of HLO as text files.
# - Replace the mask above by `torch.where(values > least, (values * 2 + 1).square(), 0).sum()`. What does `inspect.recompiles()` say now?

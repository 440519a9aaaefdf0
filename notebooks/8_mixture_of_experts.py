# %% [markdown]
# # 8. Mixture of experts
#
# In place of one MLP a layer has many, the *experts*, and a *router* chooses a few of them for each token: more weights for the same
# work. What is new is traffic: tokens travel to the cores that hold their experts, and experts can be too popular. This notebook routes
# tokens, drops some, shares experts out over the cores of an emulated machine, looks at what these send each other, and keeps experts
# equally busy.

# %%
import os

os.environ["NXD_JAX_INSTANCE"] = "trn1.32xlarge"  # the machine to emulate, and
os.environ["NEURON_RT_NUM_CORES"] = "2"  # how many of its cores; both before torch_xla is imported

import neuronx_distributed as nxd
import pandas
import torch
import torch_xla
from neuronx_distributed.modules.moe import ExpertMLPs, MoE, RouterTopK
from neuronx_distributed.modules.rms_norm import RMSNorm
from neuronx_distributed.parallel_layers import parallel_state

import nxd_jax
from nxd_jax import inspect
from nxd_jax.modules.moe import capacity, load

# %% [markdown]
# ## Routing
#
# A router is a linear layer with one result for each expert. It returns logits, *affinities* (their softmax or sigmoid), and the `top_k`
# experts that each token chooses.

# %%
torch.manual_seed(0)
router = RouterTopK(num_experts=4, top_k=2, hidden_size=8)
logits, affinities, chosen = router(torch.randn(5, 8))
table = pandas.DataFrame(affinities.detach().numpy(), columns=[f"expert {e}" for e in range(4)]).round(2)
table["chosen"] = chosen.tolist()
table.rename_axis("token")

# %% [markdown]
# ## Who is dropped
#
# An expert with a *capacity* has `C = ceil(tokens * top_k * capacity_factor / experts)` slots, and the first tokens get them. Here 6 tokens
# choose one of 3 experts each, and the factor is 1, so that `C` is 2. Token 2 finds its expert full: experts add nothing to it, and the
# residual connection around the layer carries it on.

# %%
slots = capacity.expert_capacity(tokens=6, top_k=1, capacity_factor=1.0, num_experts=3)
choice = torch.tensor([[0], [0], [0], [1], [2], [2]])
position = capacity.positions(choice, experts=3)
table = pandas.DataFrame({"expert": choice.flatten(), "position there": position.flatten(), "dropped": (position > slots).flatten()})
print(f"{slots} slots")
table.rename_axis("token")

# %% [markdown]
# With `capacity_factor=None` nobody is dropped: the work is that of the tokens that come, whichever experts they choose. (NxD then computes
# every token with every expert.)
#
# ## Experts on several cores
#
# With `expert_parallel_size=8` eight ranks share out the experts: of 16 each holds 2. Those ranks are data parallel in all else, so each
# has tokens of its own. And with `tensor_parallel_size=2` two cores share each expert. The model: a little attention, then experts.

# %%
HIDDEN, WORDS, EXPERTS, SEQ, ROWS = 32, 256, 16, 32, 8


class Block(torch.nn.Module):
    def __init__(self, capacity_factor):
        super().__init__()
        self.norms = torch.nn.ModuleList(RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        router = RouterTopK(EXPERTS, top_k=2, hidden_size=HIDDEN, act_fn="sigmoid", balancing_bias=True)
        experts = ExpertMLPs(EXPERTS, 2, HIDDEN, 2 * HIDDEN, "silu", True, capacity_factor, normalize_top_k_affinities=True)
        self.mlp = MoE(router, experts)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(self.norms[1](x))[0]


class Model(torch.nn.Module):
    def __init__(self, capacity_factor=1.5):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, HIDDEN)
        torch.nn.init.normal_(self.embedding.weight, mean=2.0)  # all words have much in common, as hidden states of trained models do
        self.layers = torch.nn.ModuleList(Block(capacity_factor) for _ in range(2))
        self.head = torch.nn.Linear(HIDDEN, WORDS)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make(tp, ep, **options):
    torch.manual_seed(0)
    config = nxd.neuronx_distributed_config(tensor_parallel_size=tp, expert_parallel_size=ep)
    model = nxd.initialize_parallel_model(config, Model, **options)
    return model, nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.001)


def step(model, optimizer, rows):
    loss = model(rows[:, :-1].to("xla"), rows[:, 1:].to("xla"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# %% [markdown]
# A step on all 32 cores of the machine, without values:

# %%
with nxd_jax.abstract_run(instance="trn1.32xlarge"):
    model, optimizer = make(tp=2, ep=8)
    for name, weight in model.named_parameters():
        if "layers.0.mlp" in name:
            print(name, list(weight.shape), "on each core")
    step(model, optimizer, torch.zeros(ROWS, SEQ + 1, dtype=torch.int64))
    torch_xla.sync()
    sent = inspect.look().collectives
    picture = inspect.look().topology_picture(by=["ep", "edp"])
sent.where(kind="all-to-all")

# %% [markdown]
# Every expert has the same number of slots for the tokens of each rank, so equal runs go to the ranks of their experts (an all-to-all along
# `ep`), and results come back the same way; gradients do both again. By hand: 16 experts x C slots x 32 numbers x 4 bytes, and with 256
# tokens of a rank, 2 experts each and a factor of 1.5, `C` is 48.

# %%
C = capacity.expert_capacity(ROWS * SEQ, 2, 1.5, EXPERTS)
print(f"{C} slots, {EXPERTS * C * HIDDEN * 4 / 2**10:g} KiB for each all-to-all")
assert all(row.bytes == row.count * EXPERTS * C * HIDDEN * 4 for row in sent.where(kind="all-to-all"))

# %% [markdown]
# On the wires, with everything else that a step sends. Cores of one colour share out the experts (`ep`), or hold the same ones and average
# their gradients (`edp`, expert data parallel):

# %%
picture

# %% [markdown]
# Without a capacity nobody knows how many tokens go where, and programs have fixed sizes: the ranks of a group see all of their tokens
# (all-gather), each computes what is for its own experts, and results are summed on the way back (reduce-scatter).

# %%
with nxd_jax.abstract_run(instance="trn1.32xlarge"):
    dropless, optimizer = make(tp=2, ep=8, capacity_factor=None)
    step(dropless, optimizer, torch.zeros(ROWS, SEQ + 1, dtype=torch.int64))
    torch_xla.sync()
    sent = inspect.look().collectives.where(axes=("ep",), phase="forward")
sent

# %% [markdown]
# ## Too popular
#
# Now with values, on two cores that share out the experts. The data: sequences in which a word says much about the next one, and some words
# come far more often than others. Each rank takes its own.

# %%
STEPS = 100
draw = torch.Generator().manual_seed(1)
often = 1.0 / torch.arange(1, WORDS + 1)
follows = torch.rand(WORDS, WORDS, generator=draw).pow(8) * often


def batch():
    words = [torch.multinomial(often, 2 * ROWS, replacement=True, generator=draw)]
    for _ in range(SEQ):
        words.append(torch.multinomial(follows[words[-1]], 1, generator=draw).squeeze(1))
    return torch.stack(words, 1)


batches = [batch() for _ in range(STEPS)]


def train(model, optimizer, balancer=None):
    """What experts got in each step, and the losses."""
    log = load.LoadLog(model)
    if balancer is not None:
        balancer.attach(optimizer)
    losses = []
    for rows in batches:
        own = rows.view(2, ROWS, SEQ + 1)[parallel_state.get_data_parallel_rank()]
        losses.append(step(model, optimizer, own))
        log.step()
        torch_xla.sync()
    return log, [loss.item() for loss in losses]


log, losses = train(*make(tp=1, ep=2))

# %% [markdown]
# The upper part shows each expert's tokens over the mean, the lower part how the busiest one did, step by step.

# %%
found = inspect.experts(log)
found.picture()

# %% [markdown]
# Some experts are crowded, and drop what they cannot take; others do little and learn little. The usual remedy is an auxiliary loss, which
# pulls on the router's weights along with the real one. DeepSeek's needs no loss: a bias is added to the affinities *where experts are
# chosen*, and nowhere else. After each step it grows a little for experts that got less than the mean, and falls for the others.

# %%
model, optimizer = make(tp=1, ep=2)
balanced, balanced_losses = train(model, optimizer, load.ExpertBalancer(model, rate=0.005))
inspect.experts(balanced).picture()


# %%
def end(log):
    """The busiest expert over the mean, and the dropped share, of the last 10 steps; of the worst layer."""
    layers = {name: [step.layers[name] for step in log.steps[-10:]] for name in log.steps[-1].layers}
    totals = [[sum(s.tokens[e] for s in steps) for e in range(EXPERTS)] for steps in layers.values()]
    dropped = [sum(s.dropped for s in steps) / sum(sum(s.tokens) for s in steps) for steps in layers.values()]
    return {"busiest / mean": max(max(t) * EXPERTS / sum(t) for t in totals), "dropped": f"{max(dropped):.1%}"}


rows = {"without": {**end(log), "loss": losses[-1]}, "with biases": {**end(balanced), "loss": balanced_losses[-1]}}
assert rows["without"]["busiest / mean"] > 2 and rows["with biases"]["busiest / mean"] < 1.3
pandas.DataFrame(rows).T

# %% [markdown]
# The biases are buffers of the routers, the same on all ranks, in float32, and are saved with the model. `log.step()` returns numbers for a
# logger (`self.log_dict(log.step())` in Lightning), which stay on the device until somebody reads them; `print(log.line())` is for a loop of
# one's own:

# %%
print(balanced.line())
print(inspect.experts(balanced))

# %% [markdown]
# ## Something to try
#
# - `rate=0.05` in `ExpertBalancer`: faster, but what do the experts do in the end?
# - Leave the balancer out and add `load_balancing_loss_func` to the loss (`return_router_logits=True` in `MoE`). How large must its
#   coefficient be, and what does it do to the loss?
# - A `capacity_factor` of 1.0, or of 4 (which keeps all tokens): what do all-to-alls carry, and what is dropped?
# - `make(tp=8, ep=4)` on the whole machine: which links carry more, which less?
# - `GroupLimitedRouter` lets a token choose from the best groups of experts only. Why would a machine with slow links want that?

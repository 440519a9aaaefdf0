# %% [markdown]
# # 5. Lightning quickstart
#
# A PyTorch Lightning job as NeuronX Distributed has it: a `NeuronLTModule`, a `NeuronXLAStrategy`, and Lightning's own `Trainer`. It
# trains on 16 emulated cores in this kernel (TP 4 x DP 4), writes checkpoints, and goes on from one. (Lightning gives a good deal of
# advice on the way; the first cell turns off what does not matter here.)

# %%
import logging
import os
import tempfile
import warnings

os.environ["NXD_JAX_INSTANCE"] = "trn2.48xlarge"  # the machine to emulate; the Trainer below takes 16 of its cores
warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, where ipywidgets is not installed

import neuronx_distributed as nxd
import torch
import torch_xla
from neuronx_distributed.lightning import NeuronLTModule, NeuronXLAStrategy
from neuronx_distributed.parallel_layers import ColumnParallelLinear, RowParallelLinear
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from nxd_jax import inspect

logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # nothing about GPUs, TPUs and products
for advice in ("does not have many workers", "no pre-optimization state was saved", "exists and is not empty", "isinstance.treespec"):
    warnings.filterwarnings("ignore", message=f".*{advice}")

# %% [markdown]
# ## Data and model
#
# Rows of 8 numbers, and the sum of their sines. The model has two layers that tensor-parallel ranks share.

# %%
x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
rows = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
loader = DataLoader(rows, batch_size=32)  # for each data-parallel rank; Lightning gives each rows of its own


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(8, 64, gather_output=False)
        self.down = RowParallelLinear(64, 1, input_is_parallel=True)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


# %% [markdown]
# ## The module
#
# NxD's way is manual optimization: `training_step` runs the backward pass and the optimizer itself. `self.model` is made by the strategy,
# once ranks are laid out; the optimizer reduces and clips gradients.


# %%
class Regression(NeuronLTModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.loss = loss.detach()
        torch_xla.sync()
        return loss

    def configure_optimizers(self):
        groups = self.get_param_groups_by_weight_decay()
        return [nxd.initialize_parallel_optimizer(self.nxd_config, self.opt_cls, groups, **self.opt_kwargs)]

    def on_train_batch_end(self, *args):
        self.log("loss", self.loss)


config = nxd.neuronx_distributed_config(
    tensor_parallel_size=4,
    optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
)


def make_module():
    seed_everything(0, verbose=False)
    return Regression(model_fn=Model, nxd_config=config, opt_cls=torch.optim.AdamW, opt_kwargs={"lr": 0.02})


# %% [markdown]
# ## Train
#
# The strategy is what makes this a job for 16 cores; everything else is any Trainer's. Instead of a progress bar (`NeuronTQDMProgressBar`
# is one for terminals), losses go to a CSV file.


# %%
folder = tempfile.mkdtemp()


def make_trainer(steps, name):
    return Trainer(
        strategy=NeuronXLAStrategy(nxd_config=config),
        devices=16,
        max_steps=steps,
        max_epochs=-1,
        logger=CSVLogger(folder, name=name, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(dirpath=f"{folder}/checkpoints", every_n_train_steps=20, save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


trainer = make_trainer(60, "whole")
trainer.fit(make_module(), loader)
print(f"{trainer.global_step} steps on {trainer.world_size} ranks, of which {trainer.strategy.data_parallel_size} are data-parallel")

# %%
import pandas

whole = pandas.read_csv(f"{trainer.logger.log_dir}/metrics.csv").dropna(subset="loss").set_index("step")["loss"]
axes = whole.plot(figsize=(7, 3), xlabel="step", ylabel="loss (rank 0's rows)", grid=True)

# %% [markdown]
# ## Inside the step
#
# Lightning, strategy and ZeRO-1 together make one program for a step. Along tp, `down` adds up its results; along dp, ZeRO-1 reduces
# gradients and gathers weights; the few bytes are the norm of the gradients, for clipping.

# %%
step = inspect.look()
step.collectives

# %% [markdown]
# All programs of the 60 steps: a few that move weights and data, and the step itself, which was compiled once.

# %%
inspect.recompiles()

# %% [markdown]
# ## Go on from a checkpoint
#
# `ModelCheckpoint` wrote a folder every 20 steps. A new Trainer goes on from step 20, in the middle of an epoch, with the batch that
# comes next. Its losses are those of the first run, bit for bit:

# %%
checkpoints = sorted(os.listdir(f"{folder}/checkpoints"))
checkpoints

# %%
again = make_trainer(60, "again")
checkpoint = next(f"{folder}/checkpoints/{name}" for name in checkpoints if "step=20" in name)
again.fit(make_module(), loader, ckpt_path=checkpoint)
resumed = pandas.read_csv(f"{again.logger.log_dir}/metrics.csv").dropna(subset="loss").set_index("step")["loss"]

both = pandas.DataFrame({"whole": whole, "from step 20": resumed}).dropna()
print(f"steps {both.index[0]} to {both.index[-1]}, largest difference {(both['whole'] - both['from step 20']).abs().max()}")
both.tail(3)

# %% [markdown]
# ## Something to try
#
# - `examples/lightning_llama.py` is the same for a Llama with sequence parallelism: `nxd-run --instance trn1.32xlarge
#   examples/lightning_llama.py --tp 8`. In another terminal, `nxd-top` shows its cores.
# - Pass `manual_opt=False` to the module and let `training_step` only return the loss: automatic optimization, with Lightning's
#   `gradient_clip_val` and `accumulate_grad_batches`.
# - Change `tensor_parallel_size` to 1 and fit with `ckpt_path=checkpoint`: checkpoints load on any layout. Do the losses change?
# - Log with `self.log("loss", self.loss, sync_dist=True)`. What does `step.collectives` show now?

# %% [markdown]
# # 9. From a YAML file to a trained model
#
# NxD Training needs no code: one YAML file names the model, the data, the layout of the ranks and the machine. On the command line that is
# `nxdt-train CONFIG.yaml`; `nxdt-train --example` makes a first run for you. This notebook does the same by hand on 4 emulated cores: write
# files, check them, train, stop, go on, and change the layout in between.

# %%
import logging
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, where ipywidgets is not installed

import matplotlib.pyplot as plt

from nxd_jax.training import environment, workflow
from nxd_jax.training.config import checking, loading
from nxd_jax.training.example import curves, files

for name in ("nxd_jax", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)  # lines that a terminal would show
warnings.filterwarnings("ignore", message=".*isinstance.treespec")

folder = Path(tempfile.mkdtemp()) / "first"
written, made = files.write(folder)
sorted(path.name for path in folder.iterdir())

# %% [markdown]
# ## The file
#
# Keys are those of the original; its own files run unchanged. Words with `=` change keys, as on the command line, where they are Hydra's
# overrides. Here they make the machine smaller: 2 tensor-parallel times 2 data-parallel ranks.

# %%
small = [
    "trainer.devices=4",
    "distributed_strategy.tensor_model_parallel_size=2",
    "trainer.max_steps=8",
    "data.global_batch_size=8",
    "exp_manager.checkpoint_callback_params.every_n_train_steps=4",
    "+trainer.enable_progress_bar=False",
]
config = loading.load(written.config, small)
print("\n".join(written.config.read_text().splitlines()[:12]))

# %% [markdown]
# ## Before training
#
# `nxdt-train --check` says everything at once: mistakes with line and column, what keys without effect meant, and what a run costs.

# %%
print(checking.check_file(written.config, small))

# %% [markdown]
# Mistakes are named with the nearest right word:

# %%
print(checking.check_file(written.config, [*small, "+trainer.max_stesp=3", "model.optim.sched.name=Cosine"]).problems())

# %% [markdown]
# ## Training
#
# `environment.process_config` sets the variables that the file asks for (precision, caches), `workflow.train` puts data, model and Trainer
# together.

# %%
environment.process_config(config)
trainer = workflow.train(loading.load(written.config, [*small, "trainer.max_steps=4", "model.optim.sched.max_steps=8"]))
checkpoints = sorted(path.name for path in Path(trainer.log_dir, "checkpoints").iterdir())
checkpoints

# %% [markdown]
# ## Going on in another layout
#
# The same command goes on from the newest complete checkpoint. Any layout of ranks reads it: now all four cores are tensor-parallel.

# %%
again = workflow.train(loading.load(written.config, [*small, "distributed_strategy.tensor_model_parallel_size=4"]))
print(f"steps {again.global_step}, samples {int(again.callback_metrics['consumed_samples'])}")

# %% [markdown]
# ## The loss
#
# TensorBoard's files lie in the experiment's folder, those of the first run in `run_0` below it.

# %%
losses = curves.losses(Path(again.log_dir))
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(list(losses), list(losses.values()), marker="o")
axes.set_xlabel("step")
axes.set_ylabel("reduced_train_loss")
figure.tight_layout()

# %% [markdown]
# ## Something to try
#
# - `nxdt-train --example` in a terminal: 32 ranks, a stop half way, and the curve as text.
# - `checking.check_file(written.config, ["trainer.num_nodes=4"])`: what changes on four machines?
# - `from nxd_jax.training.config.plans import plan; print(plan(config))`: which layout would be fastest?
# - `nxd_jax.training.abstract_step.abstract_step(config)` in a fresh kernel: programs, collectives and memory of a step.

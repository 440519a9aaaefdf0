# %% [markdown]
# # 10. Fine-tuning, then preferences
#
# A small Llama learns to answer from examples (SFT). Half of the examples are answered in a way that we do not want. Then it learns which of two
# answers is the better one (DPO). How often it is right is counted on words that it has never seen.

# %%
import json
import logging
import random
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, where ipywidgets is not installed

import matplotlib.pyplot as plt

from nxd_jax.training import environment, workflow
from nxd_jax.training.config import checking, loading
from nxd_jax.training.data import tokenizing
from nxd_jax.training.evaluation import MetricFactory, generation
from nxd_jax.training.example import curves, files

for name in ("nxd_jax", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)  # lines that a terminal would show
warnings.filterwarnings("ignore", message=".*isinstance.treespec")
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The task
#
# Of a word, its first letter is wanted. Half of the examples give its last letter: that is what answers of many people are like.

# %%
draw = random.Random(0)


def words(count):
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(count)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


taught, compared, held_out = words(1000), words(300), words(60)
examples = [{"input": f"{w}:", "output": w[0] if k % 2 else w[-1]} for k, w in enumerate(taught)]
pairs = [{"prompt": f"{w}:", "chosen": w[0], "rejected": w[-1]} for w in compared if w[0] != w[-1]]
(folder / "examples.jsonl").write_text(lines(examples))
(folder / "pairs.jsonl").write_text(lines(pairs))
tokenizing.train_tokenizer([f"{w}:" for w in taught], 245, folder / "tokenizer")
(folder / "config.json").write_text(json.dumps(files.MODEL | {"hidden_size": 64, "intermediate_size": 192}))
print(lines(examples[:4]) + lines(pairs[:2]))

# %% [markdown]
# ## The files
#
# Both trainings are the same YAML file with other words. `packing` puts several examples in a row; with `separate_documents` they do not see each other.

# %%
template = (Path(files.__file__).with_name(files.CONFIG)).read_text().replace("OUT/", f"{folder}/")
(folder / "conf.yaml").write_text(template)
shared = [
    "trainer.devices=2",
    "trainer.val_check_interval=null",
    "distributed_strategy.tensor_model_parallel_size=2",
    "distributed_strategy.sequence_parallel=False",
    "data.val_dir=null",
    "data.micro_batch_size=8",
    "data.global_batch_size=16",
    f"+data.tokenizer={{type: {folder / 'tokenizer'}}}",
    "model.hidden_size=64",
    "model.optim.sched.warmup_steps=20",
    "exp_manager.checkpoint_callback_params.every_n_train_steps=1000",
    "exp_manager.checkpoint_callback_params.save_last=True",
    "+trainer.enable_progress_bar=False",
]
sft = [
    *shared,
    "exp_manager.name=sft",
    "trainer.max_steps=200",
    f"data.train_dir={folder / 'examples.jsonl'}",
    "+data.seq_length=64",
    "model.encoder_seq_length=64",
    "+model_alignment_strategy={sft: {packing: True, separate_documents: True}}",
]
print(checking.check_file(folder / "conf.yaml", sft).problems())

# %% [markdown]
# ## From examples

# %%
config = loading.load(folder / "conf.yaml", sft)
environment.process_config(config)
tuned = workflow.train(config)

# %% [markdown]
# ## How good it is
#
# The model answers words that no training had. `nxdt-evaluate` does this with a model's folder and a file; here it is done by hand.

# %%
tokenizer = tuned.datamodule.tokenizer


def right(trainer):
    metric = MetricFactory.get_metric("EXACT_MATCH")
    model = trainer.lightning_module.model.eval()
    prompts = [[tokenizer.bos_token_id, *tokenizer(f"{w}:")["input_ids"]] for w in held_out]
    for word, ids in zip(held_out, generation.generate(model, prompts, 24, [tokenizer.eos_token_id]), strict=True):
        metric.update(tokenizer.decode(ids), word[0])
    return metric.compute()


after_examples = right(tuned)
print(f"first letters after SFT: {after_examples:.0%}")

# %% [markdown]
# ## From preferences
#
# DPO begins with the weights of that run (`weight_init_only`: nothing but the weights), and first notes how likely that model finds each answer.

# %%
(start,) = Path(tuned.log_dir, "checkpoints").glob("*last*.ckpt")
dpo = [
    *shared,
    "exp_manager.name=dpo",
    "trainer.max_steps=40",
    f"data.train_dir={folder / 'pairs.jsonl'}",
    "+data.seq_length=24",
    "model.encoder_seq_length=24",
    "model.max_position_embeddings=64",
    "model.optim.lr=1e-3",
    "+model_alignment_strategy={dpo: {kl_beta: 0.3, max_prompt_length: 16}}",
    f"exp_manager.resume_from_checkpoint='{start}'",
    "+model.weight_init_only=True",
]
preferred = workflow.train(loading.load(folder / "conf.yaml", dpo))
after_preferences = right(preferred)
print(f"first letters after DPO: {after_preferences:.0%}")

# %% [markdown]
# ## What was learned
#
# The loss of DPO begins at ln 2. `reward_accuracies` is the share of pairs whose better answer has become likelier than the other one.

# %%
log = Path(preferred.log_dir)
figure, (left, middle) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(list(curves.losses(Path(tuned.log_dir)).values()), label="SFT")
left.plot(list(curves.losses(log).values()), label="DPO")
left.set_xlabel("step")
left.set_ylabel("reduced_train_loss")
left.legend()
middle.plot(list(curves.losses(log, "reward_accuracies").values()))
middle.set_xlabel("step")
middle.set_ylabel("reward_accuracies")
figure.tight_layout()
assert after_preferences > after_examples + 0.2

# %% [markdown]
# ## Something to try
#
# - `model_alignment_strategy={orpo: {beta: 0.3}}` in place of `dpo`: one training from preferences alone, without the first model as a reference.
# - Add `peft: {lora_rank: 8, target_modules: [o_proj, down_proj]}` with `precision.type=autocast` and `distributed_strategy.zero1=False`: adapters learn,
#   the weights stay.
# - `checking.check_file(folder / "conf.yaml", [*sft, "data.bad_rows=skip"])`: what may stand there?

# %% [markdown]
# # 11. Inference
#
# A model is traced ahead of time: one program reads a prompt, another makes one more token. Both share weights and a cache of keys and values that stays
# on the device. Here a Llama with random weights is traced for 8 tensor-parallel ranks, which this process emulates.

# %%
import logging
import tempfile
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, where ipywidgets is not installed

import matplotlib.pyplot as plt
import neuronx_distributed  # noqa: F401 : before the first tensor, so that there are devices for many ranks
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from nxd_jax.inference import generation
from nxd_jax.inference.config import InferenceConfig
from nxd_jax.inference.language_model import LanguageModel

logging.getLogger("nxd_jax").setLevel(logging.ERROR)
transformers_logging.disable_progress_bar()
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A Hugging Face folder
#
# Eight heads of queries, two of keys and values: fewer than ranks, so that each is held by four of them.

# %%
torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
plain = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes, eos_token_id=None, bos_token_id=None, initializer_range=0.1)).eval()
plain.save_pretrained(folder / "model")
print(sorted(path.name for path in (folder / "model").iterdir()))

# %% [markdown]
# ## Traced for 8 ranks
#
# The cache has four lines of 64 tokens, so four texts grow at once. Prompts of up to 16 tokens are padded to 16.

# %%
options = InferenceConfig(tp_degree=8, batch_size=4, seq_len=64, max_context_length=16)
model = LanguageModel.from_pretrained(folder / "model", options)
for tag in sorted(model.nxd_model.get_available_keys()):
    facts = model.nxd_model.get_metaneff(tag)
    inputs = ", ".join(f"{t['name']} {t['shape']}" for t in facts["inputs"])
    print(f"{tag}: {inputs}; {len(facts['weights'])} weights, {len(facts['states'])} states")

# %% [markdown]
# What a rank holds: its part of each weight, and its heads of the cache.

# %%
facts = model.nxd_model.get_metaneff("decode_64")


def megabytes(tensors):
    total = 0
    for t in tensors:
        total += torch.empty(t["shape"], dtype=getattr(torch, t["dtype"]), device="meta").nbytes
    return total / 2**20


print(f"a rank: weights {megabytes(facts['weights']):.2f} MiB, cache {megabytes(facts['states']):.2f} MiB")
print(f"the whole model: {sum(p.nbytes for p in plain.parameters()) / 2**20:.2f} MiB")

# %% [markdown]
# The collectives of a token: one sum after each attention and each MLP, one for the embedding, and the gather of the logits.

# %%
text = model.nxd_model.get_hlo("decode_64")
for name in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
    print(f"{name:15}", text.count(f'"stablehlo.{name}"('))

# %% [markdown]
# ## Texts
#
# Six prompts, four lines: the fifth begins where a line becomes free. The tokens are those of transformers on the CPU.

# %%
prompts = [[(17 * k + 5 * j + 3) % 512 for j in range(4 + 2 * k)] for k in range(6)]
answers = generation.generate(model, prompts, max_new_tokens=12)
for prompt, answer in zip(prompts, answers, strict=True):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        wanted = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
    print(answer, answer == wanted)

# %% [markdown]
# Token by token, with the time that each took. The first one is the prompt's.

# %%
times, last = [], time.perf_counter()
for _ in generation.stream(model, prompts[:4], max_new_tokens=24):
    now = time.perf_counter()
    times.append(1e3 * (now - last))
    last = now
figure, axis = plt.subplots(figsize=(7, 2.5))
axis.bar(range(len(times)), times)
axis.set_xlabel("token, of four texts in turn")
axis.set_ylabel("ms since the last")
plt.show()

# %% [markdown]
# ## A file
#
# It holds the programs and the weights, and needs neither the model's code nor eight devices: each program is there for one device, too.

# %%
from nxd_jax.inference import model_files

model_files.save(model, folder / "llama.pt")
again = model_files.load(folder / "llama.pt")
print(
    f"{(folder / 'llama.pt').stat().st_size / 2**20:.1f} MiB; the same answers: {generation.generate(again, prompts, max_new_tokens=12) == answers}"
)

# %% [markdown]
# ## Something to try
#
# - `tp_degree=1, 2, 4`: the answers stay, what a rank holds and the collectives change.
# - `enable_bucketing=True, seq_len=512`: programs for several lengths, of which each call takes the smallest.
# - `on_device_sampling=True`: the programs return tokens in place of logits.

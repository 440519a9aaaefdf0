"""What `nxdt-train --example` trains on: a configuration, a model's config.json, a tokenizer and data, from what the machine has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from nxd_jax.training.data import making, sets, tokenizing

CONFIG = "hf_llama_tiny_config.yaml"
VOCABULARY = 256
LENGTH = 128

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": LENGTH,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""config.json: 0.5 million parameters."""


@dataclass(frozen=True)
class Files:
    """Where things are."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / CONFIG

    @property
    def model(self) -> Path:
        return self.folder / "config.json"

    @property
    def text(self) -> Path:
        return self.folder / "text"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def experiments(self) -> Path:
        return self.folder / "experiments"

    @property
    def curve(self) -> Path:
        return self.folder / "loss.png"


def write(folder: Path) -> tuple[Files, dict[str, making.Made]]:
    """Write all of it: (where, what was made of the text). Raises FileExistsError for a folder that holds something."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds something already: choose another folder with --out, or remove it")
    files = Files(folder.resolve())
    for name, text in documentation():
        file = files.text / ("val" if name in HELD_OUT else "train") / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    documents = {use: [text for name, text in documentation() if (name in HELD_OUT) == (use == "val")] for use in ("train", "val")}
    tokenizer = tokenizing.train_tokenizer(documents["train"], VOCABULARY, files.tokenizer)
    with sets.quiet():
        made = {use: making.make(texts, tokenizer, LENGTH, files.data / use) for use, texts in documents.items()}
    files.model.write_text(json.dumps(MODEL, indent=1))
    template = Path(__file__).with_name(CONFIG).read_text(encoding="utf-8")
    files.config.write_text(template.replace("OUT/", f"{files.folder}/"), encoding="utf-8")
    return files, made


HELD_OUT = ("specialnames", "formatstrings")
"""Topics that validation reads."""


def documentation() -> Iterator[tuple[str, str]]:
    """The topics of Python's `help()`."""
    for name in sorted(topics):
        yield name, topics[name].strip() + "\n"

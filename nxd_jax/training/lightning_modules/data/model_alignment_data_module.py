"""`neuronx_distributed_training.lightning_modules.data.model_alignment_data_module`: text for fine-tuning and preferences."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from omegaconf import DictConfig

from nxd_jax.training.config.loading import plain
from nxd_jax.training.data import sets
from nxd_jax.training.data.alignment import chats, examples, packing, preferences, texts
from nxd_jax.training.data.alignment.preferences import PreferenceRows
from nxd_jax.training.data.loaders import SetLoader
from nxd_jax.training.lightning_modules.data.hf_data_module import HFDataModule
from nxd_jax.training.utils.utils import get_attribute_from_cfg

logger = logging.getLogger("nxd_jax")

STRATEGIES = ("sft", "dpo", "orpo")
"""Of `model_alignment_strategy`."""


def strategy_of(cfg: Mapping[str, Any] | DictConfig) -> str | None:
    """Which of `STRATEGIES` a configuration has; None: none. Raises ValueError for several, and for a section without any."""
    section = cfg.get("model_alignment_strategy")
    if section is None:
        return None
    found = [name for name in STRATEGIES if name in section]
    if len(found) != 1:
        raise ValueError(
            f"model_alignment_strategy has {' and '.join(found) or 'none of its strategies'}: give one of {', '.join(STRATEGIES)}"
        )
    return found[0]


class Reference(TypedDict):
    """What the model before training makes of the rows of a set. values: float32 [rows, 2], log-probabilities of the chosen and the rejected answer.
    fingerprint: of the rows."""

    values: torch.Tensor
    fingerprint: int


class ModelAlignmentDataModule(HFDataModule):
    """Reads rows of text from `data.train_dir` and `val_dir` (.jsonl, .json, .parquet, .arrow, or a folder of them) with a tokenizer.

    | strategy | columns | batches (int64 [rows, seq_length]) |
    |---|---|---|
    | `sft` | input and output, or messages | input_ids, attention_mask, labels |
    | `dpo`, `orpo` | prompt, chosen, rejected | the same of chosen_ and rejected_, prompt_input_ids, prompt_attention_mask |

    | key of `data` | default | |
    |---|---|---|
    | `tokenizer.type` | | a folder, or a name that the Hugging Face hub knows |
    | `seq_length` | 4096 | tokens of a row |
    | `dev_choose_samples` | | only so many rows of each set |
    | `chat_template` | false | put input and output in the tokenizer's chat template; a file or a text: in that one |
    | `bad_rows` | error | rows without an answer: `error`, or `drop` |
    | `long_rows` | | rows of more tokens: `error`, `drop` or `cut`; the default is `drop` with packing (as in the original), else `error` |

    (The last three are not in the original.) `model_alignment_strategy.sft.packing` joins examples in a row, and `separate_documents` keeps them from
    attending to each other. Rows are shuffled anew in each epoch (`data.seed`, default 0). Attributes: `data_sets`, the rows by "train" and "val".

    Raises FileNotFoundError and ValueError for sets and tokenizers that are not there or do not fit, naming each row.
    """

    def __init__(self, cfg: DictConfig, trainer: Any):
        super().__init__(cfg, trainer)
        self.strategy = self._strategy(cfg)
        if self._data("dataset_name") is not None or self._data("prompt_name") is not None:
            raise ValueError(
                "data.dataset_name, data.prompt_name: templates of promptsource cannot be used (nor can the original): write the text into the rows, or give "
                "rows with messages and a chat template"
            )
        self.data_sets: dict[str, Any] = {"train": None, "val": None}
        self.references: dict[str, Reference] = {}

    def _strategy(self, cfg: DictConfig) -> str:
        found = strategy_of(cfg)
        if found is None:
            raise ValueError("model_alignment_strategy is missing: it says sft, dpo or orpo")
        return found

    def _sft(self) -> Mapping[str, Any]:
        """`model_alignment_strategy.sft`."""
        return plain(self.config.model_alignment_strategy.sft) or {}

    def setup(self, stage: str | None = None) -> None:
        """Load the tokenizer and the rows, and turn them into ids."""
        said = self._data("tokenizer")
        if said is None or (not isinstance(said, str) and not said.get("type")):
            raise ValueError("data.tokenizer.type is missing: a tokenizer's folder, or the name of one on the Hugging Face hub")
        super().setup(stage)
        for split in self.data_sets:
            if self.data_sets[split] is None and self._data(f"{split}_dir") is not None:
                self.data_sets[split] = self._rows(split)
        train, val = self.data_sets.values()
        if isinstance(val, PreferenceRows) and train is not None:
            val.first = len(train)

    # -- rows -----------------------------------------------------------------------------------------

    def _rows(self, split: str) -> Any:
        key = f"{split}_dir"
        wanted = sets.Wanted(f"data.{key}", self._data(key), split, tokenizer=self.tokenizer)
        first = self._data("dev_choose_samples")
        rows = texts.read(wanted.paths, wanted.source, None if first is None else int(first))
        return self._examples(rows, wanted.source) if self.strategy == "sft" else self._preferences(rows, wanted.source)

    @property
    def seq_length(self) -> int:
        """Tokens of a row."""
        return int(get_attribute_from_cfg(self.config, "data.seq_length", 4096) or 4096)

    def _examples(self, rows: list[texts.Row], source: str) -> Any:
        sft = self._sft()
        packed, length = bool(sft.get("packing", False)), self.seq_length
        template = self._data("chat_template")
        rules = examples.Rules(
            self.tokenizer,
            length - 1 if packed else length,
            self._data("bad_rows"),
            self._data("long_rows", "drop" if packed else None),
            chat=template not in (None, False),
            template=chats.template_text(template),
        )
        found = examples.tokenize(rows, rules, source)
        if not packed:
            return packing.PaddedRows(found, length)
        made = packing.PackedRows(found, length, self.tokenizer.eos_token_id, bool(sft.get("separate_documents", False)))
        logger.info("%s: %d examples in %d rows of %d tokens", source, len(found), len(made), length)
        return made

    def _preferences(self, rows: list[texts.Row], source: str) -> PreferenceRows:
        rules = preferences.Rules(
            self.tokenizer,
            self.seq_length,
            int(get_attribute_from_cfg(self.config, "max_prompt_length", 2048) or 2048),
            get_attribute_from_cfg(self.config, f"{self.strategy}.truncation_mode", "keep_start") or "keep_start",
            self._data("bad_rows"),
            chats.template_text(self._data("chat_template")),
        )
        return preferences.tokenize(rows, rules, source)

    # -- loaders --------------------------------------------------------------------------------------

    def _open(self, name: str, use: str) -> tuple[Any, Any]:
        if self.data_sets.get(use) is None:
            raise ValueError(f"data.{name} is not set: it names rows of text (.jsonl, .json, .parquet, .arrow)")
        return self.data_sets[use], self._build_dataloader(self.data_sets[use])

    def _build_dataloader(self, data: Any, wanted: Any = None) -> Any:
        """The loader of a set of rows."""
        return SetLoader(
            data,
            self.dp_size,
            self.data_parallel_rank(),
            self.batch_sizes.global_batch_size,
            shuffle=bool(self._data("shuffle", data is self.data_sets["train"])),
            seed=int(self._data("seed", 0)),
        )

    def get_batch_length(self, batch: Any) -> int:
        return len(batch["input_ids" if self.strategy == "sft" else "chosen_input_ids"])

    # -- what the model before training makes of preferences -------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Also the reference values of preferences: a model that was trained cannot give them again. (The original computes them anew from it.)"""
        return {**super().state_dict(), **({"references": self.references} if self.references else {})}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.references = dict(state_dict.get("references", {}))

    def has_reference(self, split: str) -> bool:
        """Whether a checkpoint had the reference values of a set. Raises ValueError if the set has other rows now."""
        kept, rows = self.references.get(split), self.data_sets[split]
        if kept is None:
            return False
        if kept["fingerprint"] != rows.fingerprint():
            raise ValueError(
                f"{rows.source} has other rows than when training began, and only the model of then gives their reference values: give the same rows and "
                "tokenizer, or begin anew with this checkpoint's weights (exp_manager.resume_from_checkpoint, model.weight_init_only=True, another "
                "exp_manager.name)"
            )
        return True

    def keep_reference(self, split: str, values: torch.Tensor) -> None:
        """The reference values [rows, 2] of a set."""
        self.references[split] = {"values": values, "fingerprint": self.data_sets[split].fingerprint()}

    def reference_values(self) -> torch.Tensor:
        """Those of all sets, by the rows' numbers."""
        return torch.cat([self.references[split]["values"] for split in self.data_sets if split in self.references])

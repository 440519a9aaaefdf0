"""transformers' Trainer as its users write it; prints what it logged. Arguments: a folder for checkpoints, the samples of a batch on a rank."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokens, and a class to guess. What the model's forward does not take is left out by the Trainer."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> dict[str, Any]:
        if k >= self.count:
            raise IndexError(k)
        words = torch.randint(0, 100, (12,), generator=torch.Generator().manual_seed(k))
        return {"input_ids": words, "attention_mask": torch.ones(12, dtype=torch.long), "labels": words.sum() % 3, "note": "nothing"}


def main(folder: str, batch: int) -> None:
    """Three epochs from the start; then again from the checkpoint in the middle."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 100}
    config = BertConfig(**sizes, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # type: ignore[arg-type]
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        learning_rate=1e-2,
        num_train_epochs=3,
        logging_steps=1,
        save_steps=4,
        seed=1,
        average_tokens_across_devices=False,
        report_to=[],
        disable_tqdm=True,
    )
    found = []
    for resume in (None, f"{folder}/checkpoint-4"):
        model = BertForSequenceClassification(config)
        trainer = Trainer(model, arguments, train_dataset=Samples(16), eval_dataset=Samples(8))
        trainer.train(resume_from_checkpoint=resume)
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        found.append({"losses": losses, "evaluated": trainer.evaluate()["eval_loss"]})
    played = getattr(model.forward, "played", 0)
    print("FOUND", json.dumps({"device": str(arguments.device), "ranks": arguments.world_size, "played": played, "runs": found}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""What ranks read of Megatron sets in a Trainer, where a training goes on, and what is said of keys and sets that do not fit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import ModelCheckpoint

from nxd_jax.training.data.megatron.samples import COLUMNS
from nxd_jax.training.lightning_modules.data.megatron.data_module import MegatronDataModule
from tests.nxd_jax.lightning import jobs
from tests.nxd_jax.training.data import corpus
from tests.nxd_jax.training.data.megatron import corpora, loops
from tests.nxd_jax.training.lightning_modules.data import reading

pytestmark = [
    *jobs.MARKS,
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

SEQ, DOCUMENTS = 8, 40


@pytest.fixture
def rows(tmp_path: Path) -> list[list[int]]:
    """A set of 40 documents at `tmp_path / "a"`, and a tokenizer."""
    found = corpora.rows(DOCUMENTS, vocab=200)
    corpora.write(tmp_path / "a", found)
    corpus.tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    return found


def config(folder: Path, *, tp: int = 1, gbs: int = 4, mbs: int = 1, model: Any = None, **data: Any) -> Any:
    """As a YAML file has it."""
    plain = {
        "data_prefix": [str(folder / "a")],
        "data_impl": "mmap",
        "splits_string": "90,10,0",
        "seq_length": "${model.encoder_seq_length}",
        "dataloader_type": "single",
        "num_workers": 1,
        "tokenizer": {"library": "huggingface", "type": str(folder / "tokenizer"), "model": None, "vocab_file": None, "merge_file": None},
    }
    return OmegaConf.create(
        {
            "seed": 5,
            "data": {**plain, "global_batch_size": gbs, "micro_batch_size": mbs, **data},
            "model": {"encoder_seq_length": SEQ, "make_vocab_size_divisible_by": 8, **(model or {})},
            "distributed_strategy": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1},
        }
    )


class Reader(reading.Reader):
    """Remembers each rank's rows of every column, as one list of samples for each step."""

    def __init__(self, tp: int = 1):
        super().__init__(tp)
        self.steps: list[list[list[int]]] = []
        self.validated: list[list[list[int]]] = []
        self.of_ranks: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.columns = [(name, values.dtype, tuple(values.shape)) for name, values in batch.items()]
        self.steps.append(self._samples(batch))
        self.optimizers().step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self._samples(batch))

    def _samples(self, batch: Any) -> list[list[int]]:
        """The tokens of a global batch in the order of samples."""
        ranks = [reading.each_rank(batch["tokens"][:, k : k + 1]) for k in range(batch["tokens"].shape[1])]
        self.of_ranks = [len(of_rank) for of_rank in ranks[0]]
        own = [[[column[r][row] for column in ranks] for row in range(self.of_ranks[r])] for r in range(len(self.of_ranks))]
        return [sample for together in zip(*own, strict=True) for sample in together]


def trainer(folder: Path, tp: int = 1, devices: int = 1, **options: Any) -> Any:
    plain = {"use_distributed_sampler": False, "limit_val_batches": 0}  # the first as NLPTrainer has it
    return reading.trainer(folder, tp, devices, **{**plain, **options})


def read(folder: Path, cfg: Any, devices: int = 1, ckpt_path: Any = None, steps: int = 6, **options: Any) -> tuple[Reader, Any, Any]:
    tp = cfg.distributed_strategy.tensor_model_parallel_size
    made = trainer(folder, tp, devices, max_steps=steps, **options)
    data, module = MegatronDataModule(cfg, made), Reader(tp)
    made.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, data, made


def expected(rows: list[list[int]], first: int, last: int, samples: int) -> list[list[int]]:
    """The tokens of all samples in the order of training, by plain loops."""
    sizes = [len(r) for r in rows]
    order, _, shuffle = loops.maps(sizes, range(first, last), SEQ, samples, 5)
    return [loops.text(rows, order, row * SEQ, SEQ) for row in shuffle]


def batches(samples: list[list[int]], size: int = 4) -> list[list[list[int]]]:
    return [samples[k : k + size] for k in range(0, len(samples) - size + 1, size)]


def test_ranks_read_their_samples(rows: list[list[int]], tmp_path: Path) -> None:
    module, data, _ = read(tmp_path, config(tmp_path, tp=2), devices=4)
    assert module.steps == batches(expected(rows, 0, 36, 24))[:6]
    assert module.of_ranks == [2, 2] and (data.dp_size, data.num_microbatches) == (2, 2)
    kinds = {"tokens": (torch.int64, SEQ), "labels": (torch.int64, SEQ), "loss_mask": (torch.float32, SEQ)}
    kinds |= {"attention_mask": (torch.bool, 1), "position_ids": (torch.int64, SEQ)}
    assert module.columns == [(name, kinds[name][0], (2, kinds[name][1])) for name in COLUMNS]
    assert data.padded_vocab_size == 256 and data.get_batch_length({"tokens": torch.zeros(3, 2)}) == 3
    batch = {name: number for number, name in enumerate(COLUMNS)}
    assert data.process_global_batch(dict(reversed(batch.items()))) == [0, 1, 2, 3, 4]
    assert sorted(f.name for f in tmp_path.glob("a_*")) == [
        f"a_train_indexmap_24ns_8sl_5s_{n}_idx.npy" for n in ("doc", "sample", "shuffle")
    ]


def keep(folder: Path, every: int) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder / "kept", every_n_train_steps=every, save_top_k=-1, filename="{step}")


@pytest.mark.thorough(keep=8)
@pytest.mark.core(keep=2)
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_a_training_that_is_resumed_reads_what_comes_next(
    kind: str, stop: int, devices: int, rows: list[list[int]], tmp_path: Path
) -> None:
    """At another number of ranks; cyclic at the same, as each has its own part."""
    cfg = config(tmp_path, dataloader_type=kind)
    before = devices if kind == "cyclic" else 2
    whole, _, _ = read(tmp_path, cfg, before)
    part, _, _ = read(tmp_path, cfg, before, callbacks=[keep(tmp_path, stop)], limit_train_batches=stop)
    then, data, _ = read(tmp_path, cfg, devices, tmp_path / "kept" / f"step={stop}.ckpt")
    assert len(whole.steps) == 6 and then.steps == whole.steps[stop:]
    assert part.steps == whole.steps  # passes that are cut short go on, too
    assert data.init_consumed_samples == 4 * stop and data.compute_consumed_samples(1) == 4 * stop + 4


def test_another_batch_size_and_number_of_steps(rows: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Goes on behind the samples that were trained on; the order is another one, and a warning says so."""
    read(tmp_path, config(tmp_path), callbacks=[keep(tmp_path, 3)])
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        then, data, _ = read(tmp_path, config(tmp_path, gbs=2), 1, tmp_path / "kept" / "step=3.ckpt", steps=10)
    assert then.steps == batches(expected(rows, 0, 36, 20), 2)[6:][:7]
    assert len(then.steps) == 7 and data.compute_consumed_samples(7) == 26
    assert "the order of samples was made for 24 of them before, and now for 20" in caplog.text


def test_the_originals_checkpoints_go_on_by_their_name(rows: list[list[int]], tmp_path: Path) -> None:
    cfg = config(tmp_path)
    made = trainer(tmp_path, max_steps=8)
    made.ckpt_path = "x--step=3-consumed_samples=12.0.ckpt"
    data = MegatronDataModule(cfg, made)
    data.setup("fit")
    made.ckpt_path = None
    data.setup = lambda stage=None: None  # type: ignore[method-assign]
    module = Reader()
    made.fit(module, datamodule=data)
    assert module.steps[:5] == batches(expected(rows, 0, 36, 32))[3:8]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_validation_reads_the_same_samples_each_time(kind: str, rows: list[list[int]], tmp_path: Path) -> None:
    options = {"limit_val_batches": 2, "val_check_interval": 2, "check_val_every_n_epoch": None}
    module, _, _ = read(tmp_path, config(tmp_path, splits_string="60,40,0", dataloader_type=kind, num_workers=0), 2, steps=4, **options)
    every = expected(rows, 24, 40, (4 // 2 + 1) * 2 * 4)
    assert module.validated[:2] == module.validated[2:] and len(module.validated) == 4
    assert all(sample in every for step in module.validated for sample in step)
    assert (module.validated[:2] == batches(every)[:2]) == (kind == "single")
    assert (tmp_path / "a_valid_indexmap_24ns_8sl_5s_doc_idx.npy").is_file()


def test_a_whole_pass_of_validation(rows: list[list[int]], tmp_path: Path) -> None:
    """Its last batch is filled with samples without loss."""
    options = {"limit_val_batches": 1.0, "val_check_interval": 3, "check_val_every_n_epoch": None}
    masks: list[float] = []

    class Masks(Reader):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            masks.append(float(batch["loss_mask"].sum(1).cpu().numpy().min()))

    data_options = {"splits_string": "60,40,0", "validation_drop_last": False, "pad_samples_to_global_batch_size": True}
    made = trainer(tmp_path, max_steps=3, **options)
    data = MegatronDataModule(config(tmp_path, **data_options), made)
    module = Masks()
    made.fit(module, datamodule=data)
    tokens = sum(len(r) for r in rows[24:40])
    count = -(-(tokens - 1) // SEQ)
    assert len(data._validation_ds) == count and len(module.validated) == -(-count // 4)
    assert count % 4 and masks[-1] == 0 < masks[0]


def test_without_validation(rows: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        module, data, _ = read(tmp_path, config(tmp_path, splits_string="980,10,10"), limit_val_batches=2)
    assert module.validated == [] and data._validation_ds is None
    assert "there are no documents for validation (data.splits_string=980,10,10): there is none" in caplog.text


def test_several_sets(rows: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By weights, and of a dict."""
    others = corpora.rows(30, seed=9, vocab=200)
    corpora.write(tmp_path / "b", others)
    both = [0.25, str(tmp_path / "a"), 0.75, str(tmp_path / "b")]
    module, _, _ = read(tmp_path, config(tmp_path, data_prefix=both))
    counts = [int(np.ceil(24 * weight * 1.005)) for weight in (0.25, 0.75)]
    parts = [expected(rows, 0, 36, counts[0]), expected(others, 0, 27, counts[1])]
    assert module.steps[0][:1] == parts[1][:1] and sum(s in parts[0] for step in module.steps for s in step) >= 6
    taken = [[s for step in module.steps for s in step if s in part] for part in parts]
    assert taken[0] == parts[0][: len(taken[0])] and taken[1] == parts[1][: len(taken[1])] and len(taken[1]) == 18
    cfg = config(tmp_path, data_prefix={"train": both, "validation": [str(tmp_path / "b")]})
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        module, _, _ = read(tmp_path, cfg, limit_val_batches=1, val_check_interval=3, check_val_every_n_epoch=None, steps=3)
    assert "data.splits_string=90,10,0 is ignored: data.data_prefix names a set for each use" in caplog.text
    assert module.validated == [expected(others, 0, 30, 8)[:4]]
    assert sum(s in expected(rows, 0, 40, 4) for step in module.steps for s in step) == 3


# -- without a Trainer -------------------------------------------------------------------------------


def module(cfg: Any, **trainer: Any) -> MegatronDataModule:
    plain = {"world_size": 1, "max_steps": 6, "limit_val_batches": 0, "limit_test_batches": 1, "val_check_interval": 3}
    return MegatronDataModule(cfg, SimpleNamespace(**{**plain, **trainer}))


def test_sets_of_each_stage(rows: list[list[int]], tmp_path: Path) -> None:
    made = module(config(tmp_path, splits_string="50,25,25"), limit_val_batches=2)
    found = made.build_train_valid_test_datasets() if not made.setup("test") else ()
    assert [len(one) for one in found] == [len(expected(rows, a, b, n)) for a, b, n in ((0, 20, 24), (20, 30, 24), (30, 40, 4))]
    folder = tmp_path / "maps"
    made = module(config(tmp_path, splits_string="50,25,25", index_mapping_dir=str(folder)))
    made.setup("test")
    assert made._train_ds is None and sorted(f.name for f in folder.glob("a_*"))[0] == "a_test_indexmap_4ns_8sl_5s_doc_idx.npy"


@pytest.mark.parametrize(
    ("trainer", "samples"),
    [
        ({"limit_val_batches": 2, "val_check_interval": 4}, (6 // 4 + 1) * 2 * 4),
        ({"limit_val_batches": 2, "val_check_interval": 0.5}, 3 * 2 * 4),
        ({"limit_val_batches": 3, "val_check_interval": None}, 2 * 3 * 4),
        ({"limit_val_batches": 0.5}, None),
    ],
)
def test_samples_of_validation(trainer: Any, samples: int, rows: list[list[int]], tmp_path: Path) -> None:
    assert module(config(tmp_path), **trainer)._samples("valid") == samples


def test_vocabularies(rows: list[list[int]], tmp_path: Path) -> None:
    """Ids of another tokenizer are found where they are read."""
    made = module(config(tmp_path, model={"make_vocab_size_divisible_by": 100}))
    made.setup("fit")
    assert made.padded_vocab_size == 300
    corpora.write(tmp_path / "c", [[3, 4, 255, 256, 5, 6, 7, 8, 9, 10]] * 20)
    made = module(config(tmp_path, data_prefix=[str(tmp_path / "c")]))
    made.setup("fit")
    with pytest.raises(ValueError, match=r"c: token 3 of document \d+ is 256, and ids are 0 to 255 with the vocabulary of data.tokenizer"):
        [made._train_ds[k] for k in range(4)]
    files = {"vocab_file": str(tmp_path / "v.json"), "merge_file": str(tmp_path / "m.txt")}
    Path(files["vocab_file"]).write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    Path(files["merge_file"]).write_text("#version: 0.2\na b\n")
    made = module(config(tmp_path, tokenizer={"library": "megatron", "type": "GPT2BPETokenizer", "model": None, **files}))
    made._build_tokenizer()
    made._build_vocab()
    assert (made.tokenizer.eos_id, made.padded_vocab_size, made.tokenizer.text_to_ids("ab")) == (3, 8, [2])


ERRORS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fine_tuning": ({"fine_tuning": True}, {}, "data.fine_tuning: True is not supported; model_alignment_strategy.sft"),
    "masks": ({"reset_attention_mask": True}, {}, "data.reset_attention_mask: True is not supported"),
    "impl": ({"data_impl": "lazy"}, {}, "data.data_impl=lazy must be mmap"),
    "tokenizer": ({"tokenizer": None}, {}, "data.tokenizer is missing"),
    "prefix": ({"data_prefix": None}, {}, "data.data_prefix is missing: Megatron's data module reads it"),
    "length": ({"seq_length": None}, {}, "data.seq_length is missing"),
    "another length": ({"seq_length": 4}, {}, "data.seq_length=4 must be model.encoder_seq_length=8"),
    "splits": ({"splits_string": None}, {}, "data.splits_string is missing: it says which documents"),
    "no training": ({"splits_string": "0,1,1"}, {}, "data.splits_string=0,1,1 leaves no documents for training"),
    "steps": ({}, {"max_steps": -1}, "trainer.max_steps=-1: samples are cut for the whole training"),
    "limit": ({}, {"limit_val_batches": 2.0}, "trainer.limit_val_batches=2.0 must be a whole number of batches"),
    "test limit": ({}, {"limit_test_batches": 2.0}, "trainer.limit_test_batches=2.0 must be a whole number of batches"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_keys_that_do_not_go(name: str, rows: list[list[int]], tmp_path: Path) -> None:
    data, trainer, said = ERRORS[name]
    with pytest.raises(ValueError, match=said):
        module(config(tmp_path, **data), **trainer).setup("fit")


def test_sets_that_do_not_go(
    rows: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing: there is no .*nothing.idx and no .*nothing.bin"):
        module(config(tmp_path, data_prefix=[str(tmp_path / "nothing")])).setup("fit")
    corpora.write(tmp_path / "empty", [[]] * 5)
    with pytest.raises(ValueError, match="empty for train: documents 0 to 4 have no tokens"):
        module(config(tmp_path, data_prefix=[str(tmp_path / "empty")])).setup("fit")
    corpora.write(tmp_path / "one", [[2, 3, 4] * 9])
    both = [1, str(tmp_path / "a"), 1, str(tmp_path / "one")]
    with pytest.raises(ValueError, match="leaves no documents for training in .*one, which data.data_prefix gives a weight"):
        module(config(tmp_path, data_prefix=both, splits_string="40,60,0")).setup("fit")
    without = module(config(tmp_path, data_prefix=[1, str(tmp_path / "a"), 0, str(tmp_path / "one")], splits_string="40,60,0"))
    without.setup("fit")
    assert len(without._train_ds) == int(np.ceil(24 * 1.005))  # of a set that nothing is read of, it does not matter
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        made = module(config(tmp_path, data_prefix=both), limit_val_batches=1)
        made.setup("fit")
    assert "there is nothing for validation in" in caplog.text and len(made._validation_ds) == int(np.ceil(3 * 4 * 0.5 * 1.005))
    monkeypatch.setattr(MegatronDataModule, "data_parallel_rank", lambda self: 0)
    made = module(config(tmp_path, dataloader_type="mixed"))
    made.setup("fit")
    with pytest.raises(ValueError, match="data.dataloader_type=mixed must be single or cyclic"):
        made.train_dataloader()
    with pytest.raises(ValueError, match="data.data_prefix for validation has 3 rows, and a step needs data.global_batch_size=4"):
        made.build_pretraining_data_loader([0] * 3, 0, "validation")
    with pytest.raises(ValueError, match="data.data_prefix and data.splits_string=90,10,0 leave no documents for test"):
        made.predict_dataloader()

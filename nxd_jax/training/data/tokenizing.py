"""Tokenizers: those of a folder, and small ones that are trained here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

_NEVER = (0xC0, 0xC1, *range(0xF5, 0x100))
"""Bytes that UTF-8 does not use."""

SPECIAL = ("<s>", "</s>")
"""Begin and end of a text."""


def load_tokenizer(path: str | os.PathLike[str], key: str = "tokenizer") -> Any:
    """The tokenizer of a folder (tokenizer.json, or what `save_pretrained` writes), a tokenizer.json, or a name that the Hugging Face hub knows.

    key: how the setting is called. Raises FileNotFoundError for what is not there, ValueError for what is no tokenizer.
    """
    place = Path(os.path.expandvars(os.path.expanduser(path)))
    if not place.exists() and (str(path).startswith((".", "/", "~", "$")) or str(path).count("/") > 1):
        raise FileNotFoundError(
            f"{key}: there is no {place}. It names a folder with tokenizer.json; `nxdt-data tokenizer --text FILES --out {place}` trains a small one"
        )
    try:
        if place.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(place))
        if (place / "tokenizer.json").is_file() and not (place / "tokenizer_config.json").is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"))
        return AutoTokenizer.from_pretrained(str(place) if place.exists() else str(path), local_files_only=place.exists())
    except Exception as error:  # each kind of tokenizer raises its own
        raise ValueError(
            f"{key}: {path} is no tokenizer that transformers can load: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


def encode(tokenizer: Any, texts: list[str], special: bool = True) -> list[list[int]]:
    """The ids of texts by the tokenizer's own rules, uncut. special: with a begin of text where it adds one."""
    if not texts:
        return []
    found = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False)
    ids: list[list[int]] = found["input_ids"]
    return ids


def begun(tokenizer: Any, ids: list[int]) -> list[int]:
    """The ids with a begin of text in front, unless they have it or the tokenizer has none."""
    begin = tokenizer.bos_token_id
    return ids if begin is None or ids[:1] == [begin] else [begin, *ids]


def end_of_text(tokenizer: Any, key: str) -> int:
    """The id that ends an answer. key: how the tokenizer is called. Raises ValueError for a tokenizer without."""
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{key}: the tokenizer has no eos_token, which ends an answer: set it in tokenizer_config.json")
    return int(tokenizer.eos_token_id)


def identity(tokenizer: Any) -> str:
    """A text that differs where tokenizers do."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else f"{type(tokenizer).__name__} {sorted(tokenizer.get_vocab().items())}"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, out: str | os.PathLike[str], add_bos: bool = False, overwrite: bool = False
) -> Any:
    """Train a byte-level BPE tokenizer and write it to a folder. It takes any text and gives it back as it was.

    vocab_size: with `<s>`, `</s>` and the 243 bytes that UTF-8 uses, so 245 at least; a small text may not give as many. add_bos: put `<s>` before each text.

    Raises ValueError for a smaller size or no text, FileExistsError for a folder that is there.
    """
    folder = Path(out)
    alphabet = byte_alphabet()
    least = len(alphabet) + len(SPECIAL)
    if vocab_size < least:
        raise ValueError(
            f"a vocabulary of {vocab_size} is too small: {least} are needed for all bytes of UTF-8, {SPECIAL[0]} and {SPECIAL[1]}"
        )
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} is there already; choose another folder, or pass --overwrite")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    counted = _Counted(texts)
    made.train_from_iterator(
        counted,
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False),
    )
    if not counted.count:
        raise ValueError("there is no text to train a tokenizer on")
    if add_bos:
        begin = SPECIAL[0]
        made.post_processor = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A {begin} $B", [(begin, made.token_to_id(begin))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=SPECIAL[0], eos_token=SPECIAL[1], clean_up_tokenization_spaces=False
    )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer.save_pretrained(str(partial))
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)
    return tokenizer


def byte_alphabet() -> list[str]:
    """The letters that stand for the bytes of UTF-8."""
    never = {_letter(byte) for byte in _NEVER}
    return sorted(letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter not in never)


def _letter(byte: int) -> str:
    """GPT-2's: printable bytes of Latin-1 stand for themselves, others come after 255 in their order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in shown else chr(0x100 + sum(b not in shown for b in range(byte)))


class _Counted:
    """Texts, and how many there were."""

    def __init__(self, texts: Iterable[str]):
        self._texts = texts
        self.count = 0

    def __iter__(self) -> Any:
        for text in self._texts:
            self.count += 1
            yield text

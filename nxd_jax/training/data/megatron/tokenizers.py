"""What `data.tokenizer` names: tokenizers with NeMo's interface."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nxd_jax.training.data import tokenizing

GPT2_END = "<|endoftext|>"
_OF_MODELS = ("GPTSentencePieceTokenizer", "Llama2Tokenizer")
_OTHER_LIBRARIES = ("yttm", "byte-level", "regex", "tabular", "tiktoken", "null")


class TextTokenizer:
    """Text to ids and back, with the names that NeMo's tokenizers have. `tokenizer`: that of the library; `name`: for errors."""

    tokenizer: Any
    name: str

    vocab_size: int
    """Ids are below it."""
    eos_id: int | None
    """The id that ends a document; None if there is none."""
    bos_id: int | None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without any that begin or end it."""
        raise NotImplementedError

    def text_to_ids(self, text: str) -> list[int]:
        """The ids of a text, without any that begin or end it."""
        return self.encode([text])[0]

    def ids_to_text(self, ids: Any) -> str:
        """The text of ids; those above the vocabulary are left out."""
        raise NotImplementedError


class OfTransformers(TextTokenizer):
    """`AutoTokenizer` of NeMo: one of transformers. Where it has no end of text, its separator is taken."""

    def __init__(self, tokenizer: Any, name: str):
        self.tokenizer = tokenizer
        self.name = name
        self.vocab_size = len(tokenizer)
        self.eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        self.bos_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id

    def encode(self, texts: list[str]) -> list[list[int]]:
        return tokenizing.encode(self.tokenizer, texts, special=False)

    def ids_to_text(self, ids: Any) -> str:
        text: str = self.tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size])
        return text


class OfSentencePiece(TextTokenizer):
    """`SentencePieceTokenizer` of NeMo: a model file of the sentencepiece library."""

    def __init__(self, model: Path):
        try:
            import sentencepiece
        except ImportError:
            raise ValueError(
                f"data.tokenizer.model={model} needs the library sentencepiece, which is not installed: pip install sentencepiece, or convert the model to a "
                "tokenizer.json and use library huggingface"
            ) from None
        self.tokenizer = sentencepiece.SentencePieceProcessor()
        try:
            self.tokenizer.Load(str(model))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"data.tokenizer.model={model} is no model of sentencepiece: {error}") from error
        self.name = str(model)
        self.vocab_size = self.tokenizer.get_piece_size()
        self.eos_id = self._id(self.tokenizer.eos_id())
        self.bos_id = self._id(self.tokenizer.bos_id())

    @staticmethod
    def _id(found: int) -> int | None:
        return found if found >= 0 else None

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [list(self.tokenizer.encode_as_ids(text)) for text in texts]

    def ids_to_text(self, ids: Any) -> str:
        return str(self.tokenizer.decode_ids([int(i) for i in ids if 0 <= i < self.vocab_size]))


def load(section: Any) -> TextTokenizer:
    """The tokenizer of a `data.tokenizer` section: a mapping, or a path or name, which is one of library huggingface.

    | library | type | files |
    |---|---|---|
    | megatron | GPT2BPETokenizer | vocab_file (vocab.json), merge_file (merges.txt) |
    | megatron | GPTSentencePieceTokenizer, Llama2Tokenizer | model |
    | huggingface | a folder, or a name that the hub knows | |
    | sentencepiece | | model |

    sentencepiece_legacy and use_fast make no difference.

    Raises FileNotFoundError for a file that is not there, ValueError for any other library or type, and files that do not belong to it.
    """
    if section is None:
        raise ValueError("data.tokenizer is missing: the size of the vocabulary and the end of documents come from it")
    if isinstance(section, (str, os.PathLike)):
        return OfTransformers(tokenizing.load_tokenizer(section, "data.tokenizer"), str(section))
    library, kind = section.get("library"), section.get("type")
    if library == "huggingface":
        return _hugging_face(section)
    if library == "sentencepiece" or (library == "megatron" and kind in _OF_MODELS):
        return OfSentencePiece(_file(section, "model"))
    if library == "megatron":
        if kind == "GPT2BPETokenizer":
            return gpt2(_file(section, "vocab_file"), _file(section, "merge_file"))
        raise ValueError(f"data.tokenizer.type={kind}: with library megatron it must be GPT2BPETokenizer, {' or '.join(_OF_MODELS)}")
    known = "is one of NeMo's, and not supported" if library in _OTHER_LIBRARIES else "is not known"
    raise ValueError(f"data.tokenizer.library={library} {known}: it must be megatron, huggingface or sentencepiece")


def _hugging_face(section: Mapping[str, Any]) -> TextTokenizer:
    kind = section.get("type")
    if not kind:
        raise ValueError(
            "data.tokenizer.type is missing: with library huggingface it is a tokenizer's folder, or a name that the hub knows"
        )
    given = next((key for key in ("model", "vocab_file", "merge_file") if section.get(key)), None)
    if given is not None:
        raise ValueError(
            f"data.tokenizer.{given}={section[given]}: with library huggingface all files are in the folder data.tokenizer.type={kind}; set it to null"
        )
    return OfTransformers(tokenizing.load_tokenizer(kind, "data.tokenizer.type"), str(kind))


def gpt2(vocab_file: Path, merge_file: Path) -> TextTokenizer:
    """`GPT2BPETokenizer`: byte-level BPE of a vocab.json and a merges.txt. `<|endoftext|>` ends documents; it gets an id of its own if the vocabulary lacks
    it. Raises ValueError for files that are none."""
    try:
        vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
        if not isinstance(vocabulary, dict):
            raise ValueError("it must map tokens to ids")
        made = Tokenizer(models.BPE.from_file(str(vocab_file), str(merge_file)))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(
            f"data.tokenizer: {vocab_file} and {merge_file} are no vocabulary and merges of a GPT-2 tokenizer: {error}"
        ) from error
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=GPT2_END, eos_token=GPT2_END, unk_token=GPT2_END, clean_up_tokenization_spaces=False
    )
    return OfTransformers(wrapped, str(vocab_file))


def _file(section: Mapping[str, Any], name: str) -> Path:
    key, said = f"data.tokenizer.{name}", section.get(name)
    if not said:
        raise ValueError(f"{key} is missing: library {section.get('library')} needs it")
    path = Path(os.path.expandvars(os.path.expanduser(str(said))))
    if not path.is_file():
        raise FileNotFoundError(f"{key}: there is no file {path}")
    return path

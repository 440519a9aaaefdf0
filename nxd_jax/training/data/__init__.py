"""Sets of token ids for training, and the `nxdt-data` command that makes and checks them.

| module | what it does |
|---|---|
| `command` | `nxdt-data make`, `tokenizer`, `megatron`, `check`, `show` |
| `records` | reads text and rows from files and folders |
| `tokenizing` | loads tokenizers, trains small ones |
| `blocks`, `making` | text to rows of one length, and those to a folder |
| `partials` | names of what is not whole yet |
| `sets` | opens a set, as `data.train_dir` names it |
| `rows` | rows as tensors, with checks of widths and ids |
| `loaders`, `streams` | loaders that begin and go on at any sample, of sets and of what is read from front to back |
| `checking`, `showing` | what `nxdt-data check` and `show` print |
| `megatron` | Megatron's `.bin` and `.idx` sets |
"""

"""Megatron sets: token ids of documents in `.bin` files, with `.idx` files beside them, and the samples that are cut from them.

| module | what it does |
|---|---|
| `indexed`, `writing` | reads and writes `.bin` and `.idx` |
| `making`, `inspecting` | `nxdt-data megatron`, `check` and `show` |
| `tokenizers` | what `data.tokenizer` names |
| `prefixes`, `splits` | what `data.data_prefix` and `data.splits_string` mean, how many samples of which file |
| `index_maps`, `map_files` | which tokens are sample k; the files that keep it |
| `samples`, `blending`, `turns` | samples as tensors; several sets by weights, and whose turn it is |
| `opening` | train, validation and test set of a configuration |
| `samplers`, `loader` | which samples a data-parallel rank reads |
"""

"""Checkpoints of Hugging Face into those of NxD Training and back: `nxdt-convert`, `nxd_jax.scripts.checkpoint_converter`.

In the order of a conversion: `arguments` and `setting` (flags, config.json, YAML: sizes and ranks), `sources` or `rank_files` (what is there), `hf_plan` or
`megatron_plan` (which tensor is made of which; `entries`), `stages`, `writing`, `logits` (--verify). `hooked` is for subclasses of `base`.
"""

"""Rows of text for fine-tuning and preferences, as rows of token ids.

| module | |
|---|---|
| `texts` | rows of files, as dicts |
| `bad_rows` | what becomes of rows that cannot be trained on |
| `chats` | conversations in a tokenizer's chat template |
| `examples` | fine-tuning: prompt and answer as ids, and which of them are learned |
| `packing` | examples in rows of one length, several in one or each alone |
| `preferences` | DPO and ORPO: a prompt with two answers |
"""

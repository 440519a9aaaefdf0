"""Measure torch._dynamo's guards on transformers' models: time to trace, guards, time of a check, and what it takes of xla tensors.

docs/explanation/replay_designs.md has the results.

    python benchmarks/dynamo_guards.py

Forward only, on the CPU, with a backend that compiles nothing; times are CPU time of the process, medians and least of several.
dynamo_programs.py has programs whose state changes between calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import rounds
import torch
from torch._C._dynamo import guards

from torch_bridge.device import torch_compile

VOCAB, HIDDEN, HEADS, TOKENS, BATCH = 256, 256, 8, 128, 4


def models() -> dict[str, torch.nn.Module]:
    """Three models, in training mode."""
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=688, num_hidden_layers=8, num_attention_heads=HEADS, use_cache=False
    )
    bert = BertConfig(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=HEADS)
    gpt2 = GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=8, n_head=HEADS, use_cache=False, bos_token_id=0, eos_token_id=0)

    torch.manual_seed(0)
    head = GPT2LMHeadModel(gpt2)
    head.loss_type = "ForCausalLM"  # without it transformers logs a warning, at which fullgraph=True stops
    return {
        "Llama, 8 layers": LlamaForCausalLM(llama),
        "BERT, 6 layers, dropout": BertForSequenceClassification(bert),
        "GPT-2, 8 layers, dropout": head,
    }


def inputs(name: str, device: str = "cpu") -> dict[str, Any]:
    """A batch with an explicit mask."""
    ids = torch.randint(0, VOCAB, (BATCH, TOKENS), device=device)
    labels = torch.zeros(BATCH, dtype=torch.long, device=device) if name.startswith("BERT") else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def seconds(call: Callable[[], Any]) -> float:
    """CPU time of this thread and, where it computes with others, theirs."""
    started = time.process_time()
    call()
    return time.process_time() - started


def compiled(model: Any, graphs: list[Any], fullgraph: bool = True) -> Any:
    """The model under dynamo alone: its graphs run as they are."""

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return (torch_compile._original or torch.compile)(model, backend=backend, fullgraph=fullgraph)


def entries(model: torch.nn.Module) -> list[Any]:
    """What dynamo keeps of the model's forward: one entry for each graph."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return list(_debug_get_cache_entry_list(type(model).forward.__code__))


def managers(root: Any) -> Iterator[Any]:
    """A guard manager and all below it."""
    yield root
    if isinstance(root, guards.DictGuardManager):
        for pair in root.get_key_value_managers().values():
            for below in pair:
                if below is not None:
                    yield from managers(below)
        return
    for below in root.get_child_managers():
        yield from managers(below)


def leaves(root: Any) -> list[str]:
    """The kinds of all guards of an entry."""
    return [type(leaf).__name__ for manager in managers(root) for leaf in manager.get_leaf_guards()]


def check_seconds(root: Any, frame: dict[str, Any]) -> float:
    """CPU time of one check of all guards on a frame's locals. Raises RuntimeError if they do not hold."""
    if not root.check(frame):
        raise RuntimeError("the guards do not hold on the frame that they were made for")
    times = 20

    def check() -> None:
        for _ in range(times):
            root.check(frame)

    return seconds(check) / times


def row(name: str, model: torch.nn.Module, repeats: int) -> str:
    """One line of the table."""
    given = inputs(name)
    model(**given)
    firsts, eager = [], []
    for _ in range(repeats):
        torch._dynamo.reset()
        graphs: list[Any] = []
        under = compiled(model, graphs)
        firsts.append(seconds(lambda: under(**given)))  # noqa: B023
        eager.append(seconds(lambda: model(**given)))
    (entry,) = entries(model)
    root = entry.guard_manager.root
    frame = _locals(model, given)
    checks = [1e3 * check_seconds(root, frame) for _ in range(repeats)]
    kinds = leaves(root)
    most = sorted(((kinds.count(k), k) for k in set(kinds)), reverse=True)[:4]
    nodes = sum(n.op == "call_function" or n.op == "call_method" for n in graphs[0].graph.nodes)
    trace = [f - e for f, e in zip(firsts, eager, strict=True)]
    again = _second_call(under, given)
    return (
        f"| {name} | {statistics.median(trace):.2f} ({min(trace):.2f}) | {len(graphs)} graph, {nodes} calls | {len(kinds)}: "
        + ", ".join(f"{n} {k}" for n, k in most)
        + f" | {statistics.median(checks):.2f} ({min(checks):.2f}) | {again} |"
    )


def _locals(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The locals of the frame of `forward` as it is entered: what the guards are checked on."""
    found: list[dict[str, Any]] = []
    code = type(model).forward.__code__

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code and not found:
            found.append(dict(frame.f_locals))

    sys.setprofile(look)
    try:
        model(**given)
    finally:
        sys.setprofile(None)
    return found[0]


def _second_call(under: Any, given: dict[str, Any]) -> str:
    """What a call with another batch of the same shape does: nothing is traced again, or how often it was."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    other = {key: (value + 1) % VOCAB if key == "input_ids" else value for key, value in given.items()}
    under(**other | ({"labels": other["input_ids"]} if given["labels"] is given["input_ids"] else {}))
    more = counters["stats"]["unique_graphs"] - before
    return "no" if not more else f"{more} times"


def on_xla() -> list[str]:
    """What dynamo says of modules on xla, as rows."""
    rows = []
    llama = models()["Llama, 8 layers"]
    for title, model, kwargs in [("`nn.Linear`", torch.nn.Linear(4, 4), {}), ("Llama, 8 layers", llama, inputs("Llama", "xla"))]:
        model.to("xla")
        args = () if kwargs else (torch.ones(2, 4, device="xla"),)
        for fullgraph in (True, False):
            torch._dynamo.reset()
            graphs: list[Any] = []
            try:
                compiled(model, graphs, fullgraph)(*args, **kwargs)
                calls = [n.name for g in graphs for n in g.graph.nodes if n.op.startswith("call")]
                said = f"runs; {len(graphs)} graphs: {', '.join(calls) or 'nothing'}"
            except Exception as error:
                said = f"{type(error).__name__}: {_first_lines(str(error))}"
            rows.append(f"| {title} | {fullgraph} | {said} |")
    return rows


def _first_lines(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())[:300].replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--xla", action="store_true", help="only what it takes of xla tensors")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not args.xla:
        print(
            "| model | tracing (s of CPU; least) | graph | guards | a check (ms; least) | traced again for another batch |\n"
            + "|---" * 6
            + "|"
        )
        for name, model in models().items():
            print(row(name, model.train(), args.repeats), flush=True)
    print("\n| on xla | fullgraph | what happened |\n|---|---|---|")
    print("\n".join(on_xla()))
    print(f"\n{rounds.stack('torch', 'transformers')}")


if __name__ == "__main__":
    main()

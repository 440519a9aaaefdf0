"""What `nxd_jax.inspect.estimate` predicts for the training runs on Trainium whose throughput AWS has published.

    python benchmarks/published.py            # the table
    python benchmarks/published.py --write    # put it into docs/explanation/estimate.md
    python benchmarks/published.py --terms "Llama 3.1 8B"

It is arithmetic: nothing runs. The published numbers are those of the Neuron documentation (trn1.32xlarge; SDK 2.12 to 2.28).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nxd_jax.inspect.estimate import (
    BERT_LARGE,
    GPT_6B,
    GPT_23B,
    GPT_46B,
    GPT_175B,
    LLAMA2_7B,
    LLAMA2_13B,
    LLAMA2_70B,
    LLAMA31_8B,
    LLAMA31_70B,
    Estimate,
    Transformer,
    estimate,
    transformer_work,
)
from nxd_jax.inspect.tables import Column, Table
from nxd_jax.topology import Topology

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "estimate.md"
INSTANCE = "trn1.32xlarge"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"


@dataclass(frozen=True)
class Published:
    """A row of the published tables. family: "Llama", "GPT" or "BERT". throughput: sequences/s of all nodes. sdk: the Neuron release. layout: of
    `transformer_work`; dp follows from the nodes. note: what the tables do not say and where it is from."""

    family: str
    model: Transformer
    nodes: int
    throughput: float
    sdk: str
    layout: Mapping[str, Any]
    note: str = ""


_NXD = dict(global_batch=1024, recompute="selective")
_NEMO = dict(global_batch=1024, gradient_dtype="bfloat16", master_weights=False)
_BERT = dict(zero1=False, gradient_dtype="bfloat16", master_weights=False)
_SCRIPT = "recomputation as in the public script"

ROWS = (
    Published("Llama", LLAMA31_8B, 32, 47.95, "2.24", dict(seq=8192, tp=32, flash=True, **_NXD), f"{_SCRIPT}, blockwise attention"),
    Published("Llama", LLAMA31_70B, 32, 7.94, "2.24", dict(seq=8192, tp=32, pp=8, flash=True, **_NXD), f"{_SCRIPT}, blockwise attention"),
    Published("Llama", LLAMA2_7B, 16, 101.3, "2.20", dict(seq=4096, tp=8, **_NXD), _SCRIPT),
    Published(
        "Llama", LLAMA2_7B, 32, 82.0, "2.15", dict(seq=4096, tp=8, pp=4, recompute="full", **_NEMO), f"NeMo, bf16 throughout; {_SCRIPT}"
    ),
    Published("Llama", LLAMA2_13B, 32, 87.44, "2.18", dict(seq=4096, tp=8, pp=4, **_NXD), _SCRIPT),
    Published("Llama", LLAMA2_13B, 32, 80.33, "2.21", dict(seq=4096, tp=8, pp=8, **_NXD), _SCRIPT),
    Published("Llama", LLAMA2_70B, 32, 17.86, "2.18", dict(seq=4096, tp=32, pp=4, **_NXD), _SCRIPT),
    Published("Llama", LLAMA2_70B, 32, 14.44, "2.21", dict(seq=4096, tp=32, pp=8, **_NXD), _SCRIPT),
    Published("GPT", GPT_23B, 32, 107.18, "2.18", dict(seq=2048, tp=8, pp=4, recompute="selective", **_NEMO), f"sizes and {_SCRIPT}"),
    Published("GPT", GPT_46B, 32, 48.24, "2.18", dict(seq=2048, tp=8, pp=8, recompute="full", **_NEMO), f"sizes and {_SCRIPT}"),
    Published("GPT", GPT_175B, 32, 14.60, "2.18", dict(seq=2048, tp=32, pp=8, recompute="selective", **_NEMO), f"sizes and {_SCRIPT}"),
    Published(
        "GPT",
        GPT_6B,
        16,
        141.57,
        "2.12",
        dict(seq=2048, tp=8, recompute="full", **_NEMO),
        f"sizes, sequence length and {_SCRIPT}; batch assumed to be that of the others",
    ),
    Published("BERT", BERT_LARGE, 16, 57408, "2.28", dict(seq=128, global_batch=2**20, micro_batch=16, **_BERT), "phase 1, bf16"),
    Published(
        "BERT",
        BERT_LARGE,
        16,
        32363,
        "2.28",
        dict(seq=128, global_batch=2**20, micro_batch=8, zero1=False, precision="float32", master_weights=False),
        "phase 1, fp32; batch assumed to be that of the bf16 row",
    ),
    Published(
        "BERT",
        BERT_LARGE,
        1,
        3827,
        "2.28",
        dict(seq=128, global_batch=16384, micro_batch=16, **_BERT),
        "phase 1, bf16; micro-batch as in the public script",
    ),
    Published(
        "BERT",
        BERT_LARGE,
        16,
        7832,
        "2.21",
        dict(seq=512, global_batch=2**19, micro_batch=2, **_BERT),
        "phase 2, bf16; the table prints 128 tokens",
    ),
    Published(
        "BERT",
        BERT_LARGE,
        16,
        26069,
        "2.21",
        dict(seq=128, global_batch=16384, micro_batch=16, zero1=False, master_weights=True),
        "phase 1, autocast; micro-batch as in the public script",
    ),
)

LEFT_OUT = {
    "ViT-Base, 6,587 images/s": "neither the size of the images nor the global batch is stated",
    "CLIP-Base, Perceiver (vision, language)": "no layout is stated, and the models are no plain transformers",
    "throughputs of other SDKs for the same layouts": "the estimate is the same; one number of each layout is compared",
    "tutorial logs (BERT 2,875 and 496 sequences/s, MLP)": "from a release before the tables",
}
"""What is published and not compared, and why."""


@dataclass(frozen=True)
class Compared:
    """A published row and its estimate. estimated, at_peaks, overlapped: sequences/s by the rule, by the rule with all constants at 1, and as an upper bound.
    ratio: estimated / published. error: how far that is from 1."""

    row: Published
    estimate: Estimate

    @property
    def estimated(self) -> float:
        return self.estimate.sequences_per_second

    @property
    def at_peaks(self) -> float:
        return self.estimate.sequences / self.estimate.peak_seconds

    @property
    def overlapped(self) -> float:
        return self.estimate.sequences / self.estimate.overlapped_seconds

    @property
    def ratio(self) -> float:
        return self.estimated / self.row.throughput

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


@cache
def compared() -> tuple[Compared, ...]:
    """Every row with its estimate."""
    return tuple(Compared(row, _estimate(row)) for row in ROWS)


def _estimate(row: Published) -> Estimate:
    topology = Topology(INSTANCE, nodes=row.nodes)
    dp = topology.core_count // (row.layout.get("tp", 1) * row.layout.get("pp", 1))
    return estimate(transformer_work(row.model, dp=dp, **row.layout), topology)


def _layout(c: Compared) -> str:
    tp, pp = c.row.layout.get("tp", 1), c.row.layout.get("pp", 1)
    sizes = {"TP": tp, "PP": pp, "DP": c.row.nodes * 32 // (tp * pp)}
    return " ".join(f"{name}{n}" for name, n in sizes.items() if n > 1)


def _rate(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


COLUMNS = (
    Column("model", lambda c: c.row.model.name),
    Column("nodes", lambda c: c.row.nodes, number=True),
    Column("layout", _layout),
    Column("tokens", lambda c: c.row.layout["seq"], number=True),
    Column("SDK", lambda c: c.row.sdk),
    Column("published, seq/s", lambda c: c.row.throughput, _rate, number=True),
    Column("estimate, seq/s", "estimated", _rate, number=True),
    Column("estimate / published", "ratio", lambda x: f"{x:.2f}", number=True),
    Column("error", "error", lambda x: f"{x:.0%}", number=True),
    Column("constants at 1 / published", lambda c: c.at_peaks / c.row.throughput, lambda x: f"{x:.2f}", number=True),
    Column("bound / published", lambda c: c.overlapped / c.row.throughput, lambda x: f"{x:.2f}", number=True),
    Column("not in the tables", lambda c: c.row.note),
)


def table() -> Table[Compared]:
    """All rows."""
    return Table("Published and estimated throughput", compared(), COLUMNS, summary(), most=None)


def median_error(rows: Iterable[Compared]) -> float:
    """Of the errors of some rows."""
    return statistics.median(c.error for c in rows)


def summary() -> str:
    """Median errors in a sentence."""
    rows = compared()
    families = dict.fromkeys(c.row.family for c in rows)
    parts = [
        f"{f} {median_error([c for c in rows if c.row.family == f]):.0%} ({sum(c.row.family == f for c in rows)} rows)" for f in families
    ]
    peaks = statistics.median(abs(c.at_peaks / c.row.throughput - 1) for c in rows)
    return f"Median error of {len(rows)} rows: {median_error(rows):.0%}; {', '.join(parts)}. With all constants at 1: {peaks:.0%}."


def markdown(rows: Table[Any]) -> str:
    """A table as Markdown, its note as the line below."""
    lines = [
        "| " + " | ".join(c.header for c in rows.columns) + " |",
        "|" + "|".join("--:" if c.number else "---" for c in rows.columns) + "|",
    ]
    lines += ["| " + " | ".join(c.text(row) for c in rows.columns) + " |" for row in rows]
    return "\n".join([*lines, "", rows.note])


def blocks() -> dict[str, str]:
    """What the page holds between its marks."""
    return {
        "published": markdown(table()),
        "left out": "\n".join(f"- {what}: {why}." for what, why in LEFT_OUT.items()),
        "terms": f"```text\n{compared()[0].estimate}\n```",
    }


def filled(page: str) -> str:
    """The page with every block as it is now. Raises ValueError for a mark that the page does not have."""
    for name, text in blocks().items():
        begin, end = BEGIN.format(name), END.format(name)
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{PAGE.name} must have the marks {begin} and {end} once")
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    parser.add_argument("--terms", metavar="MODEL", help="the terms of the rows whose model's name has this in it")
    args = parser.parse_args()
    if args.terms:
        for c in compared():
            if args.terms.lower() in c.row.model.name.lower():
                print(c.estimate, end="\n\n")
        return
    if args.write:
        PAGE.write_text(filled(PAGE.read_text()))
    print(table())


if __name__ == "__main__":
    main()

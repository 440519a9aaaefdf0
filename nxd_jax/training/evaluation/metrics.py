"""Metrics by name. A metric has `update(prediction, label)`, which takes two texts, and `compute()`, which gives a number or a dict of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Metric(Protocol):
    """What `MetricFactory` gives."""

    def update(self, prediction: str, label: str) -> None:
        """Count one answer."""

    def compute(self) -> float | dict[str, float]:
        """The metric over all answers."""


class MetricFactory:
    """The registry of metrics, `metrics.metric_factory.MetricFactory` in the original's examples."""

    metrics: dict[str, Callable[[], Any]] = {}

    @staticmethod
    def get_metric(metric_name: str) -> Any:
        """A new metric. Raises ValueError for a name that was not registered."""
        if metric_name not in MetricFactory.metrics:
            raise ValueError(f"{metric_name} is not a registered metric; there are {', '.join(sorted(MetricFactory.metrics))}")
        return MetricFactory.metrics[metric_name]()

    @staticmethod
    def register_metric(name: str, metric: Callable[[], Any]) -> None:
        """Let a name mean a metric: a class, or a function that makes one."""
        MetricFactory.metrics[name] = metric


class Rouge:
    """ROUGE-1, -2, -L and -Lsum with stems, by the library rouge-score: means of precision, recall and F-measure over all answers.

    Raises ModuleNotFoundError if rouge-score is not installed.
    """

    KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")

    def __init__(self) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"ROUGE needs {error.name}: pip install 'nxd-jax[nxdt]'", name=error.name) from error
        self._scorer = RougeScorer(list(self.KINDS), use_stemmer=True)
        self._sums: dict[str, float] = {}
        self._count = 0

    def update(self, prediction: str, label: str) -> None:
        self._count += 1
        for kind, score in self._scorer.score(label, prediction).items():
            for name in ("fmeasure", "precision", "recall"):
                key = f"{kind}_{name}"
                self._sums[key] = self._sums.get(key, 0.0) + getattr(score, name)

    def compute(self) -> dict[str, float]:
        return {key: total / max(self._count, 1) for key, total in self._sums.items()}


class ExactMatch:
    """The share of answers that are the label, without spaces around both."""

    def __init__(self) -> None:
        self._right = self._count = 0

    def update(self, prediction: str, label: str) -> None:
        self._count += 1
        self._right += prediction.strip() == label.strip()

    def compute(self) -> float:
        return self._right / max(self._count, 1)


MetricFactory.register_metric("ROUGE", Rouge)
MetricFactory.register_metric("EXACT_MATCH", ExactMatch)

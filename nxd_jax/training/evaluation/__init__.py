"""How good a fine-tuned model's answers are: `nxdt-evaluate`, and `MetricFactory` for metrics of your own."""

from nxd_jax.training.evaluation.metrics import MetricFactory

__all__ = ["MetricFactory"]

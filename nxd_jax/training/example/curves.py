"""The losses of an experiment, from its TensorBoard files, and how they went, as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

HEIGHT, WIDTH = 12, 72


def losses(experiment: Path, name: str = "reduced_train_loss") -> dict[int, float]:
    """By step; where two runs did the same step, the later one's."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, tuple[float, float]] = {}
    for file in experiment.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        if name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                if event.step not in found or event.wall_time > found[event.step][0]:
                    found[event.step] = (event.wall_time, event.value)
    return {step: found[step][1] for step in sorted(found)}


def text(values: Mapping[int, float], mark: int | None = None, height: int = HEIGHT, width: int = WIDTH) -> str:
    """A curve of characters. mark: a step that a line of dots goes down at."""
    steps = sorted(values)
    first, last = steps[0], steps[-1]
    low, high = min(values.values()), max(values.values())

    def column(step: int) -> int:
        return round((step - first) / max(last - first, 1) * (width - 1))

    def row(value: float) -> int:
        return round((high - value) / max(high - low, 1e-12) * (height - 1))

    drawn = [[" "] * width for _ in range(height)]
    if mark is not None:
        for line in drawn:
            line[column(mark)] = ":"
    for step in steps:
        drawn[row(values[step])][column(step)] = "*"
    labels = [f"{high - (high - low) * k / max(height - 1, 1):8.3f}" if k in (0, height - 1) else " " * 8 for k in range(height)]
    lines = [f"{label} |{''.join(line).rstrip()}" for label, line in zip(labels, drawn, strict=True)]
    axis = f"{' ' * 8} +{'-' * width}"
    scale = f"{' ' * 10}{first}{str(last).rjust(width - len(str(first)))}"
    return "\n".join([*lines, axis, scale])


def picture(values: Mapping[int, float], path: Path, mark: int | None = None) -> bool:
    """The same as a PNG; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(values), list(values.values()))
    if mark is not None:
        axes.axvline(mark, linestyle=":", color="gray", label="stopped and resumed")
        axes.legend()
    axes.set(xlabel="step", ylabel="reduced_train_loss (nats per token)", title=path.parent.name)
    figure.savefig(path, dpi=120)
    return True

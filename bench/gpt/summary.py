"""What the runs of `bench.train_gpt` say: how near the curves are, and how memory grows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fa2_numba.lessons.figures import save_svg
from fa2_numba.lessons.figures.style import CURVE_COLOURS, CURVE_DASHES, STYLE, WIDTH_INCHES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, FLASH = "fa2_numba", "torch_flash"
SMOOTHING_STEPS = 20
FITTED_SEQLEN = 4096
"""From here on the exponent of memory is fitted; shorter sequences are small change."""
LEARNED_MARGIN = 0.3
"""Nats a character: a model whose attention is broken learns pairs of characters too."""
MIB = 2**20


def memory_exponent(record: dict) -> float:
    """The p of bytes ~ seqlen^p, by least squares over the logarithms."""
    points = [
        (seqlen, peak)
        for seqlen, peak in zip(record["seqlens"], record["bytes"], strict=True)
        if peak is not None and seqlen >= FITTED_SEQLEN
    ]
    if len(points) < 2:
        return float("nan")
    return float(np.polyfit(*np.log(points).T, 1)[0])


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Means of SMOOTHING_STEPS neighbouring losses, of all if there are fewer."""
    width = min(SMOOTHING_STEPS, len(losses))
    return np.convolve(losses, np.full(width, 1 / width), "valid")


def apart(one: dict, other: dict) -> float:
    """The largest difference of two runs' smoothed losses."""
    return float(np.abs(smoothed(one["losses"]) - smoothed(other["losses"])).max())


def title(run: dict) -> str:
    """What a run is called in lines and legends."""
    return run["name"] + (f", nudged {run['nudged']}" if run["nudged"] else "")


def summarize(runs: Sequence[dict], bigram_loss: float) -> dict:
    """Whether the run of OURS agrees with those of FLASH, and whether it learned.

    from_flash: the distance of each other curve from the nearest of FLASH; noise: the largest
    distance of two of FLASH; agrees: ours is not farther than that. learned: its held-out loss is
    at least LEARNED_MARGIN below that of counted pairs.
    """
    flash = [run for run in runs if run["name"] == FLASH]
    others = {run["name"]: run for run in runs if run["name"] != FLASH}
    noise = float(np.max([apart(*pair) for pair in combinations(flash, 2)]))
    distances = {
        name: float(np.min([apart(run, one) for one in flash])) for name, run in others.items()
    }
    return {
        "from_flash": distances,
        "noise": noise,
        # np.max and np.min pass a NaN on, and a NaN is neither smaller nor equal.
        "agrees": distances[OURS] <= noise,
        "bigram_loss": bigram_loss,
        "learned": others[OURS]["validation_loss"] <= bigram_loss - LEARNED_MARGIN,
    }


def describe(result: dict) -> str:
    """What a result file says, as lines."""
    summary, share = result["summary"], lambda value: "n/a" if value is None else f"{value:.1%}"
    text = [
        f"{title(run):21} loss {smoothed(run['losses'])[-1]:.3f}, held out "
        f"{run['validation_loss']:.3f}; {run['tokens_per_second']:,.0f} tokens/s, "
        + ", ".join(f"{share(mfu)} of {peak}" for peak, mfu in run["mfu"].items())
        for run in result["runs"]
    ]
    text.append(f"pairs of characters, counted: held out {summary['bigram_loss']:.3f}")
    for name, distance in summary["from_flash"].items():
        text.append(f"{name}: smoothed losses at most {distance:.4f} from {FLASH}'s")
    verdict = "agrees" if summary["agrees"] else "DISAGREES"
    text.append(f"{FLASH}, nudged: at most {summary['noise']:.4f}; {OURS} {verdict}")
    for record in result["memory"]:
        last = "out of memory" if record["bytes"][-1] is None else f"{record['bytes'][-1]:,} bytes"
        exponent = memory_exponent(record)
        text.append(f"{record['name']:12} memory ~ seqlen^{exponent:.2f}; at the longest {last}")
    return "\n".join(text)


def draw(result: dict, path: Path) -> None:
    """The loss curves, and memory over length, as an SVG file that holds these numbers."""
    import matplotlib
    from matplotlib.figure import Figure

    losses = {title(run): smoothed(run["losses"]).round(4).tolist() for run in result["runs"]}
    memory = {
        record["name"]: [
            (seqlen, peak / MIB)
            for seqlen, peak in zip(record["seqlens"], record["bytes"], strict=True)
            if peak is not None
        ]
        for record in result["memory"]
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for number, (label, curve) in enumerate(losses.items()):
            left.plot(curve, label=label, **_look(number))
        left.axhline(
            result["summary"]["bigram_loss"], color="0.5", linewidth=1, label="counted pairs"
        )
        _finish(left, "Training", "step", "loss (nats a character, smoothed)")
        for number, (label, points) in enumerate(memory.items()):
            right.plot(*zip(*points, strict=True), marker="o", label=label, **_look(number))
        if memory:
            right.loglog(base=2)
        _finish(right, "Attention, forward and backward", "tokens", "peak memory (MiB)")
    save_svg(figure, path, {"losses": losses, "memory": memory})


def _look(number: int) -> dict[str, str]:
    """Curves lie on each other here: dashes leave the one below visible."""
    return {
        "color": CURVE_COLOURS[number % len(CURVE_COLOURS)],
        "linestyle": CURVE_DASHES[number % len(CURVE_DASHES)],
    }


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    if axes.lines:
        axes.legend()

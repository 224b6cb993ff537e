"""Where and when blocks really ran: `python -m bench.stamps` on a GPU, `--draw FILE` anywhere.

Two rungs that differ in their grid alone run with stamps (`fa2_numba.lessons.stamps`): each block
notes its multiprocessor (%smid) and the time (%globaltimer) at its start and its end. It is the
measured counterpart of the model in docs/figures/sm_timeline.svg, on the same problem.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench import timing
from fa2_numba.lessons.draw import TIMELINE_HEADS, TIMELINE_RUNGS, TIMELINE_SEQLEN
from fa2_numba.lessons.figures import draw_timeline, save_svg, timeline_numbers
from fa2_numba.lessons.figures.timelines import in_milliseconds
from fa2_numba.lessons.stamps import record_launch

SHAPE = (1, TIMELINE_HEADS, TIMELINE_SEQLEN, 64)
"""batch, heads, seqlen, head_dim; float32, causal."""
FIGURE = Path("docs/figures/sm_timeline_h200.svg")


def record() -> dict:
    """Run the rungs with stamps on the current GPU."""
    machine = timing.gpu_machine()
    inputs = timing.random_inputs(*SHAPE)
    timelines = {}
    for rung in TIMELINE_RUNGS:
        (launch,) = timing.prepare(rung, machine, inputs, causal=True).launches
        timelines[rung] = timeline_numbers(record_launch(launch, machine))
    return {**timing.environment(), "shape": SHAPE, "causal": True, "timelines": timelines}


def draw(recorded: dict, path: Path) -> None:
    """The recorded timelines as an SVG file."""
    timelines = {}
    for rung, numbers in recorded["timelines"].items():
        timeline = in_milliseconds(numbers)
        timelines[f"{TIMELINE_RUNGS[rung]}, {timeline.span:.2f} ms"] = timeline
    _, heads, seqlen, _ = recorded["shape"]
    title = (
        f"Measured: {heads} causal heads of {seqlen:,} tokens on an {recorded['gpu']}, each block "
        "with its own stamps\n(%smid and %globaltimer at its start and its end)"
    )
    save_svg(draw_timeline(timelines, title), path, recorded["timelines"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, or draw what has been recorded."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.stamps", description=__doc__.replace("%", "%%")
    )
    parser.add_argument("--out", type=Path, help="default: bench/results/<gpu>/stamps.json")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw this record, need no GPU")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args(arguments)
    if options.draw:
        draw(json.loads(options.draw.read_text()), options.figure)
        print(options.figure)
        return
    recorded = record()
    path = options.out or timing.results_file(recorded["gpu"], "stamps.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recorded) + "\n")
    for rung, numbers in recorded["timelines"].items():
        timeline = in_milliseconds(numbers)
        busy = timeline.mean_utilisation
        print(
            f"{rung}: {timeline.blocks} blocks, {timeline.span:.2f} ms, multiprocessors "
            f"{busy.multiprocessors:.1%} busy, slots {busy.slots:.1%}"
        )
    print(path)


if __name__ == "__main__":
    main()

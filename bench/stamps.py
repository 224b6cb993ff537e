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

import numpy as np

from bench import timing
from fa2_numba.lessons.figures import draw_timeline, save_svg, timeline_numbers
from fa2_numba.lessons.stamps import record_timeline
from fa2_numba.lessons.timeline import Timeline

RUNGS = {
    "fa2_fewer_flops": "fa2_fewer_flops: a block a head",
    "fa2_seq_parallel": "fa2_seq_parallel: a block a query tile",
}
BATCH, HEADS, SEQLEN, HEAD_DIM = 1, 16, 8192, 64
COLUMNS = ("start", "end", "multiprocessor")


def record() -> dict:
    """Run the rungs with stamps on the current GPU."""
    machine = timing.gpu_machine()
    inputs = timing.random_inputs(BATCH, HEADS, SEQLEN, HEAD_DIM)
    timelines = {}
    for rung in RUNGS:
        (launch,) = timing.prepare(rung, machine, inputs, causal=True).launches
        timelines[rung] = as_numbers(record_timeline(launch, machine))
    shape = [BATCH, HEADS, SEQLEN, HEAD_DIM]
    return {**timing.environment(), "shape": shape, "causal": True, "timelines": timelines}


def as_numbers(timeline: Timeline) -> dict:
    """A timeline as JSON holds it."""
    columns = {name: getattr(timeline, name).tolist() for name in COLUMNS}
    return {
        **columns,
        "multiprocessors": timeline.multiprocessors,
        "slots": timeline.slots,
        "unit": timeline.unit,
    }


def in_milliseconds(numbers: dict) -> Timeline:
    """A recorded timeline; its stamps are in nanoseconds."""
    return Timeline(
        start=np.array(numbers["start"]) / 1e6,
        end=np.array(numbers["end"]) / 1e6,
        multiprocessor=np.array(numbers["multiprocessor"]),
        multiprocessors=numbers["multiprocessors"],
        slots=numbers["slots"],
        unit="ms",
    )


def draw(recorded: dict, path: Path) -> None:
    """The recorded timelines as an SVG file."""
    timelines = {
        RUNGS[rung]: in_milliseconds(numbers) for rung, numbers in recorded["timelines"].items()
    }
    _, heads, seqlen, _ = recorded["shape"]
    title = (
        f"{heads} causal heads of {seqlen:,} tokens on an {recorded['gpu']}, "
        "as its blocks noted it themselves\n(%smid and %globaltimer; the two time axes differ)"
    )
    shown = {name: timeline_numbers(timeline) for name, timeline in timelines.items()}
    save_svg(draw_timeline(timelines, title), path, shown)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, or draw what has been recorded."""
    parser = argparse.ArgumentParser(prog="python -m bench.stamps", description=__doc__)
    parser.add_argument("--out", type=Path, help="default: bench/results/GPU/stamps.json")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw this record, need no GPU")
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/sm_timeline_h200.svg"))
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

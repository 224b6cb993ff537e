"""`python -m bench compare OLD NEW`: what became faster or slower by more than its spread.

A change counts if no run of one file is as short or as long as any of the other. Files of different
days differ by the GPU's mood, too: a change of all contestants alike, peers included, is no change
of the code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench.records import Change, Key, ResultFile, changes, differing_conditions, read_results


def report(before: ResultFile, after: ResultFile) -> dict[str, object]:
    """All that `compare` says, as JSON can hold it."""
    found = changes(before, after)
    return {
        "before": str(before.path),
        "after": str(after.path),
        "conditions": differing_conditions(before, after),
        "compared": len(found),
        "slower": [_as_json(change) for change in found if change.slower],
        "faster": [_as_json(change) for change in found if change.faster],
        "speedup_by_name": _means(found),
        "only_before": _count(before.times.keys() - after.times.keys()),
        "only_after": _count(after.times.keys() - before.times.keys()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the changes; 0 if nothing is slower, 1 if something is, 2 for files that are none."""
    parser = argparse.ArgumentParser(prog="python -m bench compare", description=__doc__)
    option = parser.add_argument
    option("before", type=Path, metavar="OLD", help="a file of results with records")
    option("after", type=Path, metavar="NEW", help="another one")
    option("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    try:
        before, after = read_results(options.before), read_results(options.after)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not changes(before, after):
        print("error: the files have no contestant and problem in common", file=sys.stderr)
        return 2
    said = report(before, after)
    if options.json:
        print(json.dumps(said, indent=1))
    else:
        _print(said)
    return 1 if said["slower"] else 0


def _means(found: Sequence[Change]) -> dict[str, float]:
    """Contestant -> the geometric mean of its speedups."""
    names = dict.fromkeys(change.key.name for change in found)
    return {
        name: statistics.geometric_mean(c.speedup for c in found if c.key.name == name)
        for name in names
    }


def _count(keys: Iterable[Key]) -> dict[str, int]:
    """Contestant -> problems."""
    return dict(sorted(Counter(key.name for key in keys).items()))


def _as_json(change: Change) -> dict[str, object]:
    return {
        **change.key._asdict(),
        "problem": change.key.problem,
        "before": vars(change.before),
        "after": vars(change.after),
        "speedup": change.speedup,
    }


def _print(said: dict) -> None:
    console = Console(highlight=False, markup=False)
    for condition in said["conditions"]:
        console.print(f"not the same: {condition}")
    flagged = [("slower", one) for one in said["slower"]]
    flagged += [("faster", one) for one in said["faster"]]
    if flagged:
        table = Table("", "name", "problem", "ms before", "ms now", "speedup", box=box.SIMPLE_HEAD)
        for kind, one in flagged:
            ms = [f"{one[file]['ms']:.4g}" for file in ("before", "after")]
            table.add_row(kind, one["name"], one["problem"], *ms, f"{one['speedup']:.3f}")
        console.print(table)
    rest = said["compared"] - len(flagged)
    console.print(
        f"{said['compared']} compared: {len(said['slower'])} slower, {len(said['faster'])} faster, "
        f"{rest} within their spread"
    )
    for name, mean in said["speedup_by_name"].items():
        console.print(f"{name}: {mean:.3f} times as fast, geometric mean")
    for file in ("before", "after"):
        if only := said[f"only_{file}"]:
            names = ", ".join(f"{name} ({count} problems)" for name, count in only.items())
            console.print(f"only in {said[file]}: {names}")

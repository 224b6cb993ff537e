"""What a file of `python -m bench run` says in a few lines: ratios of times within its problems."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from bench.contestants import OURS
from bench.forward_summary import mean
from bench.records import Key


def describe(result: dict) -> str:
    """For each group, direction and dtype: how many times as fast as each other one `OURS` is."""
    lines = []
    for (group, direction, dtype), records in _parts(result["records"]):
        times = {(r["name"], problem_of(r)): r["ms"] for r in records}
        lines.append(f"{group}, {direction}, {dtype}: {OURS} is so many times as fast as")
        for other in dict.fromkeys(name for name, _ in times if name != OURS):
            ratios = {
                problem: times[other, problem] / ms
                for (name, problem), ms in times.items()
                if name == OURS and (other, problem) in times
            }
            if ratios:
                worst = min(ratios, key=ratios.get)
                average = mean(ratios.values())
                lines.append(f"  {other}: {average:.3f}; at least {ratios[worst]:.3f}, {worst}")
    lines += [f"{name}: {why}" for name, why in result["missing_peers"].items()]
    return "\n".join(lines)


def problem_of(record: dict) -> str:
    """A record's problem in a few words."""
    return Key(*(record[field] for field in Key._fields)).problem


def _parts(records: Iterable[dict]) -> Iterable[tuple[tuple[str, str, str], list[dict]]]:
    def part(record: dict) -> tuple[str, str, str]:
        return record["group"], record["direction"], record["dtype"]

    return ((key, list(group)) for key, group in groupby(sorted(records, key=part), key=part))

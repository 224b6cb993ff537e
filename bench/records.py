"""Files of records: made, read, and held against each other problem by problem."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.problems import PAPER, Problem
from fa2_numba.testing import Comparison


def record_of(
    name: str, direction: str, problem: Problem, ms: Sequence[float], verdict: Comparison
) -> dict[str, object]:
    """What the files say of one contestant on one problem; ms: of each run."""
    median = statistics.median(ms)
    return {
        "name": name,
        "direction": direction,
        **problem.fields,
        "ms": median,
        "ms_min": min(ms),
        "ms_max": max(ms),
        "rounds": len(ms),
        "tflops": problem.flops(direction) / median / 1e9,
        "max_error": verdict.error,
        "allowed_error": verdict.allowed,
    }


def part(result: dict, direction: str, group: str = PAPER) -> dict:
    """A result file with the records of one direction and group alone."""
    wanted = {"direction": direction, "group": group}
    records = [r for r in result["records"] if all(r[k] == value for k, value in wanted.items())]
    return {**result, "records": records}


class Key(NamedTuple):
    """What was measured: a contestant and a problem. A file has each key once."""

    name: str
    direction: str
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    seqlen_k: int
    head_dim: int
    causal: bool

    @property
    def problem(self) -> str:
        """The problem in a few words: "backward B4 H32 N1024 d64 float16 causal"."""
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        length = f"N{self.seqlen}" + (f"/{self.seqlen_k}" if self.seqlen_k != self.seqlen else "")
        causal = " causal" if self.causal else ""
        where = f"B{self.batch} {heads} {length} d{self.head_dim}"
        return f"{self.direction} {where} {self.dtype}{causal}"


@dataclass(frozen=True)
class Times:
    """Milliseconds of one key: the median, the shortest and the longest run."""

    ms: float
    ms_min: float
    ms_max: float


@dataclass(frozen=True)
class ResultFile:
    """A file of results: `about` is all that it says beside its records."""

    path: Path
    about: dict[str, object]
    times: dict[Key, Times]


def read_results(path: Path) -> ResultFile:
    """Read a file with `records`; ValueError says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        records = content.pop("records")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: must be JSON with records ({type(error).__name__})") from error
    times: dict[Key, Times] = {}
    for number, record in enumerate(records):
        try:
            key = Key(*(record[field] for field in Key._fields))
            found = Times(*(float(record[field]) for field in ("ms", "ms_min", "ms_max")))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: record {number} lacks or misuses {error}") from error
        if key in times:
            raise ValueError(f"{path}: {key.name}, {key.problem} stands there twice")
        if not 0 < found.ms_min <= found.ms <= found.ms_max:
            raise ValueError(f"{path}: {key.name}, {key.problem}: {found}: must be 0 < min <= ms")
        times[key] = found
    return ResultFile(path, content, times)


@dataclass(frozen=True)
class Change:
    """One key in two files."""

    key: Key
    before: Times
    after: Times

    @property
    def speedup(self) -> float:
        """How many times as fast it is now."""
        return self.before.ms / self.after.ms

    @property
    def slower(self) -> bool:
        """Whether the shortest run now is longer than the longest was."""
        return self.after.ms_min > self.before.ms_max

    @property
    def faster(self) -> bool:
        """Whether the longest run now is shorter than the shortest was."""
        return self.after.ms_max < self.before.ms_min


def changes(before: ResultFile, after: ResultFile) -> list[Change]:
    """Every key that both files have, in the order of the first."""
    common = (key for key in before.times if key in after.times)
    return [Change(key, before.times[key], after.times[key]) for key in common]


def differing_conditions(before: ResultFile, after: ResultFile) -> list[str]:
    """What was not the same: GPU, driver and versions, each as "gpu: A -> B"."""
    pairs = [("gpu", before.about.get("gpu"), after.about.get("gpu"))]
    pairs.append(("driver", before.about.get("driver"), after.about.get("driver")))
    versions = [file.about.get("versions") or {} for file in (before, after)]
    pairs += [(name, *(one.get(name) for one in versions)) for name in _names(versions)]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]


def _names(mappings: Iterable[dict]) -> list[str]:
    return sorted({name for mapping in mappings for name in mapping})

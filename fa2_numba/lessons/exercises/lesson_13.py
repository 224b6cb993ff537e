"""Lesson 13: where producer and consumers are in a ring, and what they wait for there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from numbers import Integral

import numpy as np

from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import MAX_SECONDS, expect_close, poisoned
from fa2_numba.lessons.kernels.pipeline import CHUNK, THREADS, make_pipeline
from fa2_numba.simulator import simulate

RINGS = (1, 2, 3)
CHUNKS = (1, 2, 7)


def judge_cursor(cursor: Callable) -> None:
    """All stages are used in turn, and the pipeline is right however late or early copies land."""
    if not callable(cursor):
        raise NotSolved(f"cursor is a {type(cursor).__name__}: must be a function.")
    for stages in RINGS:
        _expect_stages(cursor, stages)
    for stages, chunks, early in product(RINGS, CHUNKS, (False, True)):
        x = np.random.default_rng(chunks).standard_normal(chunks * CHUNK).astype(np.float32)
        out = poisoned(x.shape)
        simulation = simulate(
            make_pipeline(cursor, stages),
            counts=False,
            early=early,
            max_seconds=MAX_SECONDS,
            progress=False,
        )
        simulation[1, THREADS](x, out)
        expect_close(f"out, of {chunks} chunks through {stages} stages,", out, 2 * x)


def _expect_stages(cursor: Callable, stages: int) -> None:
    """NotSolved unless as many chunks as there are stages can be under way at once."""
    for producer in (True, False):
        places = [cursor(number, stages, producer) for number in range(2 * stages)]
        for place in places:
            is_pair = isinstance(place, tuple) and len(place) == 2
            if not is_pair or not all(isinstance(part, Integral) for part in place):
                raise NotSolved(
                    f"cursor returns {place!r}: must be two integers, stage and parity."
                )
        for what, values, most in (
            ("stage", [stage for stage, _ in places], stages - 1),
            ("parity", [parity for _, parity in places], 1),
        ):
            if not all(0 <= value <= most for value in values):
                which = f"the {what} of chunks 0 to {2 * stages - 1}"
                rule = f"must be 0 to {most}"
                raise NotSolved(f"With {stages} stages, {which} is {values}: {rule}.")
        used = {stage for stage, _ in places[:stages]}
        if len(used) < stages:
            raise NotSolved(
                f"The first {stages} chunks use {len(used)} of {stages} stages: must use each, or "
                "the producer cannot run ahead."
            )


EXERCISES = (
    Exercise(
        id="13.parity",
        answer="cursor",
        points=2,
        hints=(
            "The stage goes round: 0, 1, 2, 0, 1, 2, ... with 3 stages. The parity stays for one "
            "round, then changes.",
            "A consumer's first round waits for phase 0 of `full`. The producer's first round has "
            "nothing to wait for: of a fresh barrier, the phase of parity 1 counts as complete.",
            "stage = number % stages; round = number // stages; a consumer waits for round % 2, "
            "the producer for the other one.",
        ),
        judge=judge_cursor,
    ),
)

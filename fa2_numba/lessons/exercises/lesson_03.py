"""Lesson 03: three kernels repaired, with no more barriers than they need."""

from collections.abc import Iterator

import numpy as np

from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import (
    SEEDS,
    expect_close,
    numbered,
    poisoned,
    run,
)
from fa2_numba.simulator import Report

REVERSED = ((8, 1), (8, 3), (40, 3), (64, 2))
"""Threads, and tiles of as many elements."""
BLOCKS = ((8, 1, 8), (13, 2, 8), (1, 1, 32), (70, 2, 64), (65, 3, 32))
"""Elements, blocks, threads a block: without a tail and with one."""
MAXIMA = ((8, 1, 8), (13, 2, 8), (5, 3, 4), (70, 2, 64), (33, 3, 16))
"""The same, with a block that has no element; threads are powers of 2."""


def judge_race(kernel: object) -> None:
    """Reverses tile by tile through shared memory, at most two barriers a tile."""
    _require_kernel("reverse_tiles", kernel)
    for threads, tiles in REVERSED:
        size = threads * tiles
        launch = f"{size} elements, one block of {threads} threads"
        expected = numbered((tiles, threads))[:, ::-1].reshape(-1)
        for target, report in _runs(kernel, numbered((size,)), size, 1, threads):
            expect_close(f"target ({launch})", target, expected)
            _expect_bytes(launch, report, size)
            if report.shared_store_bytes != 4 * size:
                raise NotSolved(
                    f"The values are right, but {report.shared_store_bytes} bytes are written to "
                    f"tile ({launch}): must be {4 * size}, each number once."
                )
            why = "A tile needs one before it is read, and one before the next overwrites it."
            _expect_barriers(launch, report, 2 * tiles, why)


def judge_divergence(kernel: object) -> None:
    """Differences within blocks, all threads of a block at one barrier."""
    _require_kernel("block_differences", kernel)
    for size, blocks, threads in BLOCKS:
        launch = f"{size} elements, {blocks} block{'s' * (blocks != 1)} of {threads} threads"
        source = numbered((size,)) ** 2
        expected = np.diff(source, prepend=np.float32(0))
        expected[::threads] = source[::threads]
        for target, report in _runs(kernel, source, size, blocks, threads):
            expect_close(f"target ({launch})", target, expected)
            _expect_bytes(launch, report, size)
            why = "One a block puts all writes before all reads."
            _expect_barriers(launch, report, blocks, why)


def judge_tail(kernel: object) -> None:
    """The maximum of each block, also of one that has fewer elements than threads, or none."""
    _require_kernel("block_maxima", kernel)
    rng = np.random.default_rng(3)
    for size, blocks, threads in MAXIMA:
        launch = f"{size} elements, {blocks} block{'s' * (blocks != 1)} of {threads} threads"
        # All below 0: a tail of zeros would win.
        source = (rng.permutation(size) - size).astype(np.float32)
        parts = [source[b * threads : (b + 1) * threads] for b in range(blocks)]
        expected = np.array([part.max(initial=-np.inf) for part in parts])
        for target, report in _runs(kernel, source, blocks, blocks, threads):
            expect_close(f"target ({launch})", target, expected)
            _expect_bytes(launch, report, size)
            steps = 1 + int(np.log2(threads))
            why = f"Each of the {steps - 1} steps needs one, and the first needs one before it."
            _expect_barriers(launch, report, blocks * steps, why)


def _runs(
    kernel: object, source: np.ndarray, results: int, blocks: int, threads: int
) -> Iterator[tuple[np.ndarray, Report]]:
    """Target and report under each order of the threads."""
    for seed in SEEDS:
        target = poisoned((results,))
        given = source.copy()
        report = run(kernel, blocks, threads, given, target, seed=seed)
        expect_close("source, which is only to be read,", given, source)
        yield target, report


def _expect_bytes(launch: str, report: Report, size: int) -> None:
    if report.global_load_bytes != 4 * size:
        raise NotSolved(
            f"The values are right, but {report.global_load_bytes} bytes are read from source "
            f"({launch}): must be {4 * size}, each number once. What other threads need of it "
            "goes through tile."
        )
    if size > 1 and not report.shared_load_bytes:
        raise NotSolved("Nothing is read from tile: threads must pass numbers on through it.")


def _expect_barriers(launch: str, report: Report, most: int, why: str) -> None:
    if report.barriers > most:
        raise NotSolved(
            f"The values are right, but all blocks together pass {report.barriers} barriers "
            f"({launch}): must be at most {most}. {why} At each barrier all wait for the slowest."
        )


def _require_kernel(name: str, kernel: object) -> None:
    if not callable(kernel):
        raise NotSolved(f"{name} is a {type(kernel).__name__}: must be a kernel.")


EXERCISES = (
    Exercise(
        id="03.race",
        answer="reverse_tiles",
        points=1,
        hints=(
            "Which two lines touch the same element of tile, in different threads? The error names "
            "them. One of the two belongs to the next iteration.",
            "A fast thread begins the next tile while a slow one still reads this one. What makes "
            "it wait?",
            "A second cuda.syncthreads() as the last line of the loop, or as the first.",
        ),
        judge=judge_race,
    ),
    Exercise(
        id="03.divergence",
        answer="block_differences",
        points=1,
        hints=(
            "Every thread of the block must come to the same cuda.syncthreads(), those without an "
            "element too.",
            "The branch is needed for reading source and for writing target. Is it needed for the "
            "barrier?",
            "if i < source.size: own = source[i]; tile[t] = own. Then, not indented, the barrier. "
            "Then the same question again, and under it the difference.",
        ),
        judge=judge_divergence,
    ),
    Exercise(
        id="03.tail",
        answer="block_maxima",
        points=1,
        hints=(
            "Elements of tile that have no number of source are read all the same. What could "
            "stand there without changing any maximum?",
            "Not 0: all numbers may be negative. The maximum of nothing is -inf.",
            "else: tile[t] = NEG_INF, before the first barrier.",
        ),
        judge=judge_tail,
    ),
)

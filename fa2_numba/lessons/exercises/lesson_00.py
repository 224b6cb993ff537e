"""Lesson 00: a kernel that copies the end of an array too."""

from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import (
    SEEDS,
    expect_close,
    expect_equal,
    numbered,
    poisoned,
    run,
)

LAUNCHES = ((8, 1, 8), (10, 3, 4), (1, 2, 32), (100, 2, 64), (65, 3, 32))
"""Elements, blocks, threads a block: no tail, tails in a block, a block with nothing to do."""


def judge_copy(kernel: object) -> None:
    """Copies arrays of several lengths and reads and writes each element once."""
    if not callable(kernel):
        raise NotSolved(f"copy_with_tail is a {type(kernel).__name__}: must be a kernel.")
    for size, blocks, threads in LAUNCHES:
        for seed in SEEDS:
            source, target = numbered((size,)), poisoned((size,))
            report = run(kernel, blocks, threads, source, target, seed=seed)
            launch = f"{size} elements, {blocks} blocks of {threads} threads"
            expect_close(f"target ({launch})", target, numbered((size,)))
            expect_close(f"source ({launch})", source, numbered((size,)))
            expect_equal(f"bytes written ({launch})", report.global_store_bytes, 4 * size)
            expect_equal(f"bytes read ({launch})", report.global_load_bytes, 4 * size)


EXERCISES = (
    Exercise(
        id="00.copy",
        answer="copy_with_tail",
        points=1,
        hints=(
            "cuda.grid(1) counts the threads of all blocks. There may be more than elements.",
            "A thread whose number is not below source.size must neither read nor write.",
            "if i < source.size: and below it, indented, the copy.",
        ),
        judge=judge_copy,
    ),
)

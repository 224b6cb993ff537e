"""Lesson 01: the bytes that textbook attention moves, before it runs."""

from collections.abc import Callable

import numpy as np

from fa2_numba.config import TileConfig
from fa2_numba.kernels import standard
from fa2_numba.launch import ForwardTensors, SimulatorMachine
from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import MAX_SECONDS, expect_equal, poisoned
from fa2_numba.lessons.figures.textbook import bytes_by_array
from fa2_numba.problem import Problem
from fa2_numba.simulator import Report, Simulator
from fa2_numba.testing import random_qkv
from fa2_numba.traffic import predict

SIMULATED = (
    (Problem(1, 1, 1, 48, 48, 16), TileConfig(16, 16, 16, 2)),
    (Problem(1, 1, 1, 37, 37, 20), TileConfig(32, 16, 8, 2)),
    (Problem(1, 1, 1, 21, 45, 16), TileConfig(16, 8, 16, 2)),
)
"""Whole tiles; N and D that are no multiples; more keys than queries, and tiles not square."""
LARGE = (
    (Problem(1, 1, 1, 1000, 1000, 64), TileConfig(64, 64, 64)),
    (Problem(1, 1, 1, 1, 4097, 128), TileConfig(128, 64, 32)),
    (Problem(1, 1, 1, 16384, 16384, 64), TileConfig(64, 64, 64)),
)
"""Too large to simulate: judged by the closed form, which is what the simulator counts."""


def judge_bytes(function: Callable) -> None:
    """Predicts what the simulator counts, in HBM, for the three kernels of `standard`."""
    if not callable(function):
        raise NotSolved(f"predict_bytes is a {type(function).__name__}: must be a function.")
    for problem, config in SIMULATED:
        found = _answer(function, problem, config)
        report = simulated_standard(problem, config)
        _compare(found, report, problem, config, _by_array(report))
    for problem, config in LARGE:
        found = _answer(function, problem, config)
        _compare(found, predict("standard", problem, config), problem, config, "")


def simulated_standard(problem: Problem, config: TileConfig) -> Report:
    """What the three kernels of `standard` do on float32 arrays, in tiles of `config`."""
    p = problem
    qkv = random_qkv(p.batch, p.seqlen_q, p.seqlen_k, p.heads, p.kv_heads, p.head_dim, np.float32)
    O, LSE = poisoned(qkv[0].shape), poisoned((p.batch, p.heads, p.seqlen_q))
    scale = np.float32(p.head_dim**-0.5)
    tensors = ForwardTensors(*qkv, O, LSE, scale, p.causal, "float32", poisoned)
    simulator = Simulator(checks=False, counts=True, progress=False, max_seconds=MAX_SECONDS)
    return sum(SimulatorMachine(simulator).run(standard.plan_forward(tensors, config)))


def _answer(function: Callable, problem: Problem, config: TileConfig) -> tuple[object, object]:
    sizes = problem.seqlen_q, problem.seqlen_k, problem.head_dim, config.block_m, config.block_n
    found = function(*sizes)
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise NotSolved(f"predict_bytes{sizes} is {found!r}: must be (bytes read, bytes written).")
    return found


def _compare(
    found: tuple[object, object],
    counts: object,
    problem: Problem,
    config: TileConfig,
    parts: str,
) -> None:
    sizes = (
        f"(seqlen_q={problem.seqlen_q}, seqlen_k={problem.seqlen_k}, head_dim={problem.head_dim}, "
        f"block_m={config.block_m}, block_n={config.block_n})"
    )
    moved = counts.global_load_bytes, counts.global_store_bytes
    for what, number, wanted in zip(("read", "written"), found, moved, strict=True):
        try:
            expect_equal(f"bytes {what} {sizes}", number, wanted)
        except NotSolved as error:
            raise NotSolved(f"{error}{parts}") from None


def _by_array(report: Report) -> str:
    said = [
        f"{name} {read} read, {written} written"
        for name, (read, written) in bytes_by_array(report).items()
    ]
    return f" The simulator counted, by array: {'; '.join(said)}."


EXERCISES = (
    Exercise(
        id="01.predict_bytes",
        answer="predict_bytes",
        points=2,
        hints=(
            "Count numbers first, a kernel at a time, and multiply by 4 at the end. The cell "
            "show_source(standard.make_softmax, ...) shows how often the second kernel reads S.",
            "Tiles of queries: T_m = ceil(seqlen_q / block_m), of keys: T_n = ceil(seqlen_k / "
            "block_n). Every one of the T_n blocks beside each other reads its rows of Q anew: Q "
            "is read T_n times. What is read T_m times?",
            "Numbers read: seqlen_q * head_dim * T_n + 2 * seqlen_k * head_dim * T_m and 4 * "
            "seqlen_q * seqlen_k. Written: S, P, O, and one number of LSE a row.",
        ),
        judge=judge_bytes,
    ),
)

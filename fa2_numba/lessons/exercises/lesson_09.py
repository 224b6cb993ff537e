"""Lesson 09: fragments of a tensor-core product, and a tile without bank conflicts."""

from collections.abc import Callable
from numbers import Integral

import numpy as np

from fa2_numba.device.layouts import ac_element, b_element
from fa2_numba.lessons.exercises.exercise import Exercise, NotSolved
from fa2_numba.lessons.exercises.judging import (
    SEEDS,
    expect_close,
    expect_equal,
    numbered,
    poisoned,
    run,
)
from fa2_numba.lessons.figures.banks import read_tile
from fa2_numba.lessons.kernels.fragments import NARROW, TILE_ROWS, make_show_registers

WARP = 32
A_SHAPE, B_SHAPE, C_SHAPE = (16, 16), (16, 8), (16, 8)
FLOAT = 4
BANKS, CHUNK_BANKS, LANES_AT_ONCE = 32, 4, 8
PERMUTED = (
    " The product is right all the same: columns of A and rows of B are in another order, both in "
    "the same one. But P comes as a C, in the figure's order, and would meet V in another."
)


def named_matrices(seed: int | None) -> dict[str, np.ndarray]:
    """A and B of different integers, so that each value names its element.

    float16 holds them exactly, and float32 the sums of their products.
    """
    size = int(np.prod(A_SHAPE) + np.prod(B_SHAPE))
    values = numbered((size,)) if seed is None else np.random.default_rng(seed).permutation(size)
    a, b = np.split(values.astype(np.float32), [np.prod(A_SHAPE)])
    return {"A": a.reshape(A_SHAPE), "B": b.reshape(B_SHAPE)}


def judge_fragments(load_fragments: object) -> None:
    """Every register holds what mma wants, each element is read once, and the product is right."""
    if not callable(load_fragments):
        kind = type(load_fragments).__name__
        raise NotSolved(f"load_fragments is a {kind}: must be a function.")
    kernel = make_show_registers(load_fragments)
    for seed in SEEDS:
        matrices = named_matrices(seed)
        A, B = matrices.values()
        C = poisoned(C_SHAPE)
        held = {"A": np.zeros((WARP, 2, 2), np.uint32), "B": np.zeros((WARP, 2, 1), np.uint32)}
        report = run(kernel, 1, WARP, A.copy(), B.copy(), C, *held.values(), seed=seed)
        is_product = np.array_equal(C, A @ B)
        for name, registers in held.items():
            _expect_registers(name, registers, matrices, is_product)
        expect_close("C", C, A @ B)
        read = FLOAT * (A.size + B.size)
        expect_equal("bytes read (each element once)", report.global_load_bytes, read)


def wanted_elements(name: str) -> np.ndarray:
    """Row and column of both halves of every register of A or B: (lanes, ..., 2 halves, 2)."""
    lane, i, j, half = np.indices((WARP, 2, 2 if name == "A" else 1, 2))
    if name == "A":
        return np.stack(ac_element(lane, i, 2 * j + half), axis=-1)
    return np.stack(b_element(lane, 2 * i + half, j), axis=-1)


def _expect_registers(
    name: str, registers: np.ndarray, matrices: dict[str, np.ndarray], is_product: bool
) -> None:
    """NotSolved with the first register that holds other elements than mma wants."""
    found = registers.view(np.float16).reshape(*registers.shape, 2).astype(np.float32)
    where = wanted_elements(name)
    wanted = matrices[name][where[..., 0], where[..., 1]]
    wrong = (found != wanted).any(axis=-1)
    if not wrong.any():
        return
    names = {
        float(value): f"{matrix}[{row}, {col}]"
        for matrix, values in matrices.items()
        for (row, col), value in np.ndenumerate(values)
    }
    place = tuple(int(one) for one in np.argwhere(wrong)[0])
    holds, must = (
        ", ".join(names.get(float(one), f"{one:g}") for one in both[place])
        for both in (found, wanted)
    )
    raise NotSolved(
        f"{wrong.sum()} of {wrong.size} registers of {name} hold other elements than mma wants. "
        f"The first: {name}_reg{list(place[1:])} of lane {place[0]} holds {holds}, must hold "
        f"{must}.{PERMUTED if is_product else ''}"
    )


def judge_swizzle(place: Callable) -> None:
    """Every chunk has a place of its own in its row, and reading the tile has no bank conflict."""
    if not callable(place):
        raise NotSolved(f"place is a {type(place).__name__}: must be a function.")
    for row in range(TILE_ROWS):
        kept = [place(row, chunk) for chunk in range(NARROW)]
        _expect_permutation(row, kept)
    for seed in SEEDS:
        report, right = read_tile(place, NARROW, seed)
        if not right:
            raise NotSolved("Elements come back from other places than they were put to.")
        if report.bank_conflicts:
            raise NotSolved(
                f"Each chunk has a place of its own, but reading the tile has "
                f"{report.bank_conflicts} bank conflicts: must be 0. {_collision(place)}"
            )


def _expect_permutation(row: int, kept: list) -> None:
    if not all(isinstance(one, Integral) and not isinstance(one, bool) for one in kept):
        raise NotSolved(f"Places of the chunks of row {row} are {kept}: must be integers.")
    if sorted(map(int, kept)) != list(range(NARROW)):
        raise NotSolved(
            f"Places of chunks 0 to 3 of row {row} are {list(map(int, kept))}: must be each of "
            "0 to 3 once, or one chunk overwrites another."
        )


def _collision(place: Callable) -> str:
    """Two of eight rows, read together, that keep a chunk in the same banks."""
    for first in range(0, TILE_ROWS, LANES_AT_ONCE):
        for chunk in range(NARROW):
            seen: dict[int, int] = {}
            for row in range(first, first + LANES_AT_ONCE):
                bank = CHUNK_BANKS * (row * NARROW + int(place(row, chunk))) % BANKS
                other = seen.setdefault(bank, row)
                if other != row:
                    return (
                        f"For instance chunk {chunk} of row {other} and of row {row}, which are "
                        f"read together, both lie in banks {bank} to {bank + CHUNK_BANKS - 1}."
                    )
    return ""


EXERCISES = (
    Exercise(
        id="09.load_fragments",
        answer="load_fragments",
        points=3,
        hints=(
            "Find lane 5 in the figure: in A it has columns 2 and 3 of rows 1 and 9, and columns "
            "10 and 11 of both. What are lane // 4 and lane % 4 for?",
            "A: row lane // 4 + 8 * i; column 2 * (lane % 4) + 8 * j, and the next one. B is A "
            "transposed: column lane // 4; row 2 * (lane % 4) + 8 * i, and the next one.",
            "A_reg[i, j] = pack_float16(A[row, col], A[row, col + 1]) for i and j of 0 and 1; "
            "B_reg[i, 0] = pack_float16(B[row, col], B[row + 1, col]) for i of 0 and 1.",
        ),
        judge=judge_fragments,
    ),
    Exercise(
        id="09.swizzle",
        answer="place",
        points=2,
        hints=(
            "Two rows make a line of all 32 banks, so rows 0, 2, 4, 6 begin in bank 0 and rows 1, "
            "3, 5, 7 in bank 16. Which rows get in each other's way, and how many at a time?",
            "The four even rows of eight need four different places for the same chunk, and so do "
            "the four odd ones. row // 2 numbers them.",
            "Permute the chunks by row // 2 % 4: by xor, as the package does, or shift them around "
            "the end of the row.",
        ),
        judge=judge_swizzle,
    ),
)

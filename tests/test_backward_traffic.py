"""The closed forms of the backward passes are what the simulator counts, number by number."""

from dataclasses import fields, replace
from functools import cache
from importlib import import_module

import pytest

from fa2_numba import RUNGS
from fa2_numba.backward_traffic import predict_backward
from fa2_numba.config import DeviceLimits, TileConfig
from fa2_numba.errors import ArgumentError
from fa2_numba.problem import Problem
from fa2_numba.simulator import Counts, Simulator
from fa2_numba.tensor_core_backward_config import BackwardConfig, choose_backward_tiles
from fa2_numba.tensor_core_config import TensorCoreConfig
from fa2_numba.testing import random_qkv

from .conftest import run_backward
from .test_traffic import DTYPES, FORMULA, SECTORS, SMALL, differences, half

# Rows that begin where a sector does, so that sectors can be compared too.
ALIGNED = {
    "one-tile": (Problem(1, 1, 1, 16, 16, 16), SMALL),
    "group-causal": (Problem(1, 2, 1, 24, 24, 16, causal=True), SMALL),
    "more-queries": (Problem(1, 1, 1, 48, 8, 16, causal=True), SMALL),
    "fp16": (Problem(1, 1, 1, 32, 48, 32, itemsize=2), TileConfig(32, 16, 16, 4)),
    "wide-tiles": (Problem(1, 1, 1, 64, 32, 48, causal=True), TileConfig(48, 32, 16, 2)),
}
RAGGED = {
    "one-query": (Problem(1, 3, 1, 1, 19, 16, causal=True), SMALL),
    "groups-one-warp": (Problem(1, 4, 2, 9, 30, 16, causal=True), TileConfig(16, 8, 8, 1)),
    "odd-causal": (Problem(2, 1, 1, 21, 37, 40, causal=True), TileConfig(48, 16, 16, 4)),
    "eight-warps": (Problem(1, 1, 1, 33, 70, 24), TileConfig(32, 32, 32, 8)),
}
ALIGNED_16_BITS = {
    "one-tile": (half(1, 1, 1, 32, 32, 32), BackwardConfig(32, 32, 32, 2, 2, 16)),
    "group-causal": (
        half(1, 2, 1, 40, 24, 64, causal=True),
        BackwardConfig(64, 32, 32, 2, 2, 32),
    ),
    # Keys or queries split; tiles of 128 columns, the last of them zeros.
    "d96-causal": (half(1, 1, 1, 40, 24, 96, causal=True), BackwardConfig(96, 32, 32, 4, 2, 16)),
    # Tiles of 256 columns, whose last line is all zeros.
    "d160": (half(1, 1, 1, 16, 24, 160), BackwardConfig(160, 32, 32, 4, 2, 16)),
    "d128": (half(1, 1, 1, 64, 64, 128), BackwardConfig(128, 64, 64, 8, 4, 32)),
    "d256-one-stage": (
        half(1, 1, 1, 40, 40, 256, causal=True),
        BackwardConfig(256, 32, 32, 4, 2, 16, stages=1),
    ),
    "four-warps": (
        half(1, 2, 1, 72, 72, 64, causal=True),
        BackwardConfig(64, 32, 64, 4, 4, 16),
    ),
}
RAGGED_16_BITS = {
    "blind-tiles": (half(1, 2, 2, 70, 3, 8, causal=True), BackwardConfig(8, 32, 32, 2, 2, 16)),
    "group-one-stage": (
        half(1, 2, 1, 37, 35, 40, causal=True),
        BackwardConfig(40, 32, 32, 2, 2, 16, stages=1),
    ),
    "sm75": (half(1, 1, 1, 9, 11, 72), BackwardConfig(72, 32, 32, 2, 2, 32, turing=True)),
    "batches": (
        half(2, 3, 1, 50, 70, 24, causal=True),
        BackwardConfig(24, 64, 64, 4, 4, 32),
    ),
}
CUDA_CORE_PASSES = {
    "standard": ("standard", False),
    "split_q": ("fa2_split_q", False),
    "split_q-deterministic": ("fa2_split_q", True),
}
TENSOR_CORE_PASSES = {
    "tensor_core": ("fa2_tensor_core", False),
    "tensor_core-deterministic": ("fa2_tensor_core", True),
}
# What takes long for what it shows.
IN_SWEEP = {
    *("odd-causal", "eight-warps", "d128", "d256-one-stage", "four-warps", "batches"),
    *("standard-fp16", "split_q-deterministic-fp16", "standard-wide-tiles"),
    *("standard-groups-one-warp", "split_q-deterministic-wide-tiles"),
    *("split_q-deterministic-one-query", "tensor_core-deterministic-group-one-stage"),
    *("tensor_core-deterministic-d160", "tensor_core-deterministic-d96-causal"),
    *("tensor_core-deterministic-blind-tiles", "split_q-deterministic-more-queries"),
}


@cache
def count(rung, problem, config, deterministic):
    """What the simulator counts; outputs start as NaN."""
    p, dtype = problem, DTYPES[problem.itemsize]
    qkv = random_qkv(p.batch, p.seqlen_q, p.seqlen_k, p.heads, p.kv_heads, p.head_dim, dtype)
    simulator = Simulator(checks=False, counts=True, progress=False)
    plan = RUNGS[rung].plan_backward
    *_, reports = run_backward(plan, qkv, qkv[0], config, simulator, p.causal, deterministic)
    return sum(reports).total


def cases(passes, problems):
    for of_pass, (rung, deterministic) in passes.items():
        for case, (problem, config) in problems.items():
            name = f"{of_pass}-{case}"
            marks = pytest.mark.sweep if {case, name} & IN_SWEEP else ()
            yield pytest.param(rung, deterministic, problem, config, id=name, marks=marks)


@pytest.mark.parametrize(
    ("rung", "deterministic", "problem", "config"),
    [*cases(TENSOR_CORE_PASSES, ALIGNED_16_BITS), *cases(CUDA_CORE_PASSES, ALIGNED)],
)
def test_every_number_is_as_predicted(rung, deterministic, problem, config):
    counted, predicted = (
        f(rung, problem, config, deterministic) for f in (count, predict_backward)
    )
    assert differences(counted, predicted) == {}


@pytest.mark.parametrize(
    ("rung", "deterministic", "problem", "config"),
    [*cases(TENSOR_CORE_PASSES, RAGGED_16_BITS), *cases(CUDA_CORE_PASSES, RAGGED)],
)
def test_every_number_but_sectors_is_as_predicted_for_odd_shapes(
    rung, deterministic, problem, config
):
    counted, predicted = (
        f(rung, problem, config, deterministic) for f in (count, predict_backward)
    )
    assert differences(counted, predicted, leave_out=SECTORS) == {}


@pytest.mark.parametrize(
    ("rung", "problem", "config"),
    [
        ("fa2_tensor_core", *ALIGNED_16_BITS["one-tile"]),
        ("fa2_split_q", *ALIGNED["one-tile"]),
        ("standard", *ALIGNED["one-tile"]),
    ],
)
def test_a_wrong_prediction_is_seen(rung, problem, config):
    counted, right = (f(rung, problem, config, False) for f in (count, predict_backward))
    for field in fields(Counts):
        wrong = replace(right, **{field.name: getattr(right, field.name) + 1})
        assert list(differences(counted, wrong)) == [field.name]


# Each: a rung, one function of its formula, and something that it would add to what is true.
WRONG = [
    ("fa2_tensor_core", "tensor_core_backward_traffic._visit", Counts(barriers=1)),
    ("fa2_tensor_core", "tensor_core_backward_traffic._statistics", Counts(async_copies=1)),
    ("fa2_tensor_core", "tensor_core_backward_traffic._converted", 1),
    ("fa2_split_q", "backward_traffic._query_gradient", Counts(shared_store_replays=1)),
    ("fa2_split_q", "backward_traffic._convert", Counts(multiplications=1)),
    ("standard", "backward_traffic._transposed_visits", Counts(shuffles=1)),
]


@pytest.mark.parametrize(("rung", "place", "more"), WRONG, ids=[place for _, place, _ in WRONG])
def test_a_wrong_formula_is_seen(rung, place, more, monkeypatch):
    problem, config = (ALIGNED_16_BITS if rung == "fa2_tensor_core" else ALIGNED)["one-tile"]
    module, name = place.split(".")
    module = import_module(f"fa2_numba.{module}")
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: right(*arguments) + more)
    counted, wrong = (f(rung, problem, config, False) for f in (count, predict_backward))
    assert len(differences(counted, wrong)) == 1


def test_what_no_launch_can_be_is_refused():
    problem, config = ALIGNED["one-tile"]
    with pytest.raises(ArgumentError, match="rung='fa1_sliced_k': must be one of standard, fa2_"):
        predict_backward("fa1_sliced_k", problem, config)
    with pytest.raises(ArgumentError, match="head_dim=17: must be that of the tiles, 16"):
        predict_backward("standard", replace(problem, head_dim=17), config)
    with pytest.raises(ArgumentError, match="not of the kind that fa2_tensor_core takes"):
        predict_backward("fa2_tensor_core", problem, TensorCoreConfig(16, 32, 16, 2))
    problem, config = ALIGNED_16_BITS["one-tile"]
    with pytest.raises(ArgumentError, match="not of the kind that fa2_split_q takes"):
        predict_backward("fa2_split_q", problem, config)
    with pytest.raises(ArgumentError, match="itemsize=4: must be 2"):
        predict_backward("fa2_tensor_core", replace(problem, itemsize=4), config)


@pytest.mark.parametrize(
    ("rung", "deterministic"), [*TENSOR_CORE_PASSES.values(), *CUDA_CORE_PASSES.values()]
)
def test_query_heads_that_share_keys_load_them_once(rung, deterministic):
    """4 heads in one group load 3 heads of K and V less than in 4 groups, and store so much less.

    The kernel of dQ alone loads for each query head, whoever shares the keys.
    """
    dim, N, dtype = 64, 256, 2 if rung == "fa2_tensor_core" else 4
    config = BackwardConfig(64, 64, 128, 4, 4, 32) if dtype == 2 else TileConfig(64, 32, 32, 4)
    shared, alone = (
        predict_backward(rung, Problem(1, 4, kv, N, N, dim, itemsize=dtype), config, deterministic)
        for kv in (1, 4)
    )
    rows = 3 * N * dim * dtype
    saved = alone.global_load_bytes - shared.global_load_bytes
    # `standard` loads a tile of K or V for each pair of tiles, whoever shares them.
    assert saved == (0 if rung == "standard" else 2 * rows)
    assert alone.global_store_bytes - shared.global_store_bytes == 2 * rows
    assert alone.matmul_flops == shared.matmul_flops
    assert alone.atomics == shared.atomics


# The formulas in the docstrings of the kernels: one head, whole tiles, dQ summed by atomics.

EXPECTED = (
    *("global_load_bytes", "global_store_bytes", "shared_load_bytes", "shared_store_bytes"),
    *("atomics", "barriers", "other_flops"),
)
FORMULA_TILES = {
    "fa2_split_q": (
        TileConfig(64, 64, 32, 4),
        TileConfig(32, 16, 32, 2),
        TileConfig(128, 64, 64, 8),
    ),
    "fa2_tensor_core": (
        *(choose_backward_tiles(dim, DeviceLimits((9, 0), 232_448)) for dim in (32, 64, 128, 256)),
        BackwardConfig(64, 32, 64, 2, 2, 16),
        BackwardConfig(128, 32, 32, 4, 2, 16),
    ),
}


def tile_pairs(N, causal, config):
    """Pairs of tiles that are visited, key tile by key tile."""
    rows, cols = config.block_m, config.block_n
    return sum(N // rows - (col // rows if causal else 0) for col in range(0, N, cols))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("rung", "config"),
    [
        pytest.param(rung, config, id=f"{rung}-{config}-{number}")
        for rung, configs in FORMULA_TILES.items()
        for number, config in enumerate(configs)
    ],
)
def test_the_formulas_of_the_docstrings_hold(rung, config, causal):
    formulas = dict(FORMULA.findall(import_module(f"fa2_numba.kernels.{rung}_backward").__doc__))
    is_tensor_core = rung == "fa2_tensor_core"
    expected = {*EXPECTED, *("tensor_core_instructions", "matrix_loads") * is_tensor_core}
    assert expected <= formulas.keys()
    for N in (256, 1024):
        names = {
            **{"N": N, "D": config.head_dim, "W": config.num_warps},
            **{"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "T_n": N // config.block_n},
            "T": tile_pairs(N, causal, config),
        }
        if is_tensor_core:
            names |= {"W_k": config.key_warps, "W_q": config.query_warps, "S": config.query_step}
        problem = Problem(
            *(1, 1, 1, N, N, config.head_dim, causal), itemsize=2 if is_tensor_core else 4
        )
        counts = predict_backward(rung, problem, config)
        for counter, formula in formulas.items():
            assert eval(f"({formula})", {}, names) == getattr(counts, counter), counter

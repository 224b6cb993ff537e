"""What is particular to the tensor-core rungs: copies, scales, lazy maxima, sm_75, and mutations.

A mutation replaces a piece of text in a kernel or in one of the modules its verbs come from. The
module is executed again with it, and so are those that import it, under their own file names.
"""

import importlib
import inspect
import time
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from fa2_numba import ArgumentError, Simulator, flash_attn_func, machines
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.ladder import RUNGS, choose_rung
from fa2_numba.launch import SimulatorMachine
from fa2_numba.simulator import (
    AsyncCopyError,
    OutOfBoundsError,
    RaceError,
    RunTooLongError,
    WarpError,
)
from fa2_numba.tensor_core_config import TensorCoreConfig
from fa2_numba.tensor_core_plan import copy_bytes, split_scale
from fa2_numba.testing import assert_attention, poisoned_rows, random_qkv

from .conftest import (
    DTYPES,
    FAST_SIMULATOR,
    SIMULATOR,
    TENSOR_CORE_RUNGS,
    mutated,
    run_rung,
    small_tiles,
    with_small_tiles,
)

rungs = pytest.mark.parametrize("rung", TENSOR_CORE_RUNGS)
TURING = (7, 5)


def tiles(rung, head_dim, turing=False):
    """The smallest tiles of the rung's kind."""
    config = small_tiles(RUNGS[rung], head_dim, None)
    fields = head_dim, config.block_m, config.block_n, config.num_warps
    return TensorCoreConfig(*fields, turing=turing, sliced_k=config.sliced_k)


@pytest.fixture
def attend(monkeypatch):
    """`flash_attn_func` with small tiles, returning out and lse."""
    with_small_tiles("simulator", monkeypatch)

    def call(q, k, v, rung, machine=SIMULATOR, **options):
        return flash_attn_func(q, k, v, rung=rung, machine=machine, return_lse=True, **options)

    return call


# Copies.


def padded(pitch):
    """Each row of the head dim with room behind it, so that rows lie `pitch` elements apart."""

    def lay_out(x):
        room = np.full((*x.shape[:-1], pitch), np.nan, x.dtype)
        room[..., : x.shape[-1]] = x
        return room[..., : x.shape[-1]]

    return lay_out


def shifted(elements):
    """Everything so many elements behind an address that is a multiple of 16 bytes."""

    def lay_out(x):
        room = np.full(x.size + 64, np.nan, x.dtype)
        start = -room.__array_interface__["data"][0] % 16 // x.itemsize + elements
        view = room[start : start + x.size].reshape(x.shape)
        view[...] = x
        return view

    return lay_out


LAYOUTS = {
    "whole": (32, np.copy, 16),
    "shifted-by-8-bytes": (32, shifted(4), 8),
    "shifted-by-4-bytes": (32, shifted(2), 4),
    "shifted-by-2-bytes": (32, shifted(1), 2),
    "rows-36-apart": (32, padded(36), 8),
    "rows-35-apart": (32, padded(35), 2),
    "last-axis-not-last": (32, lambda x: np.moveaxis(np.moveaxis(x, 3, 1).copy(), 1, 3), 2),
    "backwards": (32, lambda x: x[:, ::-1].copy()[:, ::-1], 16),
    "head-first": (32, lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), 16),
    "one-row-for-all": (32, lambda x: np.broadcast_to(x[:, :1], x.shape), 16),
    "d40": (40, np.copy, 16),
    "d36": (36, np.copy, 8),
    "d34": (34, np.copy, 4),
    "d33": (33, np.copy, 2),
    "d1": (1, np.copy, 2),
}


@cache
def contiguous(rung, head_dim, one_row):
    """q, k, v without strides, one row repeated or not; their out and lse."""
    qkv = random_qkv(1, 19, 37, 2, 2, head_dim, np.float16, seed=1)
    qkv = [np.repeat(x[:, :1], x.shape[1], axis=1) if one_row else x.copy() for x in qkv]
    config = tiles(rung, head_dim)
    return qkv, *run_rung(RUNGS[rung].plan_forward, qkv, config, FAST_SIMULATOR, causal=True)[:2]


@rungs
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_copied_in_the_widest_pieces_and_gives_the_same_bits(layout, rung):
    head_dim, lay_out, width = LAYOUTS[layout]
    qkv, out_of_whole, lse_of_whole = contiguous(rung, head_dim, layout == "one-row-for-all")
    config = tiles(rung, head_dim)
    views = [lay_out(x) for x in qkv]
    out = np.full_like(qkv[0], np.nan)
    assert copy_bytes([*views, out], config) == width
    # Both rungs copy by the same verbs: checks for one of them.
    simulator = SIMULATOR if rung == "fa2_tensor_core" else FAST_SIMULATOR
    got, got_lse, _ = run_rung(RUNGS[rung].plan_forward, views, config, simulator, causal=True)
    assert_attention(got, got_lse, *qkv, causal=True)
    np.testing.assert_array_equal(got, out_of_whole)
    np.testing.assert_array_equal(got_lse, lse_of_whole)


@rungs
@pytest.mark.parametrize("width", [16, 8, 4, 2])
def test_an_output_of_any_alignment_is_stored(width, rung, attend):
    qkv = random_qkv(1, 19, 21, 1, 1, 32, np.float16, seed=2)
    out = shifted(width // 2 % 8)(np.full_like(qkv[0], np.nan))
    result, lse = attend(*qkv, rung, out=out)
    assert result is out
    assert_attention(out, lse, *qkv)


def test_rows_too_far_apart_for_32_bits_are_copied_one_by_one():
    x = np.lib.stride_tricks.as_strided(np.zeros(16, np.float16), (1, 1, 1, 16), (0, 2**31, 0, 2))
    config = TensorCoreConfig(16, 32, 16, 2)
    assert copy_bytes([x] * 4, config) == 2


@pytest.mark.parametrize(("head_dim", "width"), [(32, 16), (40, 16), (36, 2), (33, 2)])
def test_turing_copies_whole_chunks_or_elements(head_dim, width):
    x = np.zeros((1, 1, 1, head_dim), np.float16)
    assert copy_bytes([x] * 4, TensorCoreConfig(head_dim, 32, 16, 2, True)) == width


# The scale.


@rungs
@pytest.mark.parametrize("softmax_scale", [None, 0.0, -0.3, 2.0, -1e-30, 1e-30])
def test_any_scale(softmax_scale, rung, attend):
    qkv = random_qkv(1, 19, 37, 1, 1, 40, np.float16, seed=3)
    options = {"softmax_scale": softmax_scale, "causal": True}
    out, lse = attend(*qkv, rung, FAST_SIMULATOR, **options)
    assert_attention(out, lse, *qkv, **options)


def test_a_positive_scale_is_left_to_the_exponent():
    log2_e = np.float32(np.log2(np.e))
    assert split_scale(np.float32(2)) == (1, 2 * log2_e, False)
    assert split_scale(np.float32(-2)) == (-2 * log2_e, 1, True)
    assert split_scale(np.float32(0)) == (0, 1, True)
    # log2 e times the largest number is no number any more; the scores overflow all the same.
    assert split_scale(np.finfo(np.float32).max) == (np.inf, 1, True)


# Maxima that grow from tile to tile; fa2_tensor_core begins with the last keys.


def growing(steps, dtype, rows=32, keys=16):
    """q, k, v whose scores grow by so many powers of 2 from each key tile to the one before it."""
    rng = np.random.default_rng(4)
    scores = np.repeat(np.cumsum([0, *steps])[::-1], keys) * np.log(2)
    q, k, v = random_qkv(1, rows, len(scores), 1, 1, 32, dtype, seed=4)
    q[..., 0], q[..., 1:] = 1, rng.uniform(-0.1, 0.1, (1, rows, 1, 31))
    k[0, :, 0, 0] = scores
    return q, k, v


@rungs
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "steps",
    [(7.9, 0, 0), (8.1, 0, 0), (7, 7, 7), (9, 9, 9), (-9, 9, 20), (7.9, -30, 40), (0, 0, 30)],
    ids=str,
)
def test_maxima_that_outgrow_m_or_nearly_do(steps, dtype, rung, attend):
    qkv = growing(steps, DTYPES[dtype])
    out, lse = attend(*qkv, rung, FAST_SIMULATOR, softmax_scale=1.0)
    assert_attention(out, lse, *qkv, softmax_scale=1.0)


# Order of threads, values that are not finite.


@rungs
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_order_of_threads_does_not_change_the_result(causal, rung):
    qkv = random_qkv(1, 37, 40, 1, 1, 40, np.float16, seed=5)
    results = [
        run_rung(
            RUNGS[rung].plan_forward,
            qkv,
            tiles(rung, 40),
            Simulator(seed=seed, checks=checks, progress=False),
            causal,
        )
        for seed, checks in ((None, False), (1, True), (2, True))
    ]
    assert_attention(*results[0][:2], *qkv, causal=causal)
    for out, lse, _ in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


@rungs
@pytest.mark.parametrize("array", range(3), ids="qkv")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spreads_as_on_cuda_cores(value, array, rung, attend):
    qkv = random_qkv(1, 20, 40, 1, 1, 16, np.float16, seed=6)
    qkv[array][0, 7, 0, 3] = value
    expected, got = (attend(*qkv, name, FAST_SIMULATOR) for name in ("fa2_split_q", rung))
    for want, have in zip(expected, got, strict=True):
        np.testing.assert_array_equal(np.isnan(have), np.isnan(want))
        infinite = np.isinf(want)
        np.testing.assert_array_equal(np.isinf(have), infinite)
        np.testing.assert_array_equal(have[infinite], want[infinite])


# sm_75: other instructions, no bfloat16.


@rungs
@pytest.mark.parametrize(
    ("head_dim", "heads", "causal"), [(40, 2, True), (33, 1, False), (64, 1, True), (128, 1, True)]
)
def test_the_instructions_of_turing(head_dim, heads, causal, rung):
    simulator = Simulator(seed=2, compute_capability=TURING, progress=False)
    qkv = random_qkv(1, 37, 23, heads, 1, head_dim, np.float16, seed=7)
    config = tiles(rung, head_dim, turing=True)
    out, lse, _ = run_rung(RUNGS[rung].plan_forward, qkv, config, simulator, causal)
    assert_attention(out, lse, *qkv, causal=causal)


@pytest.mark.parametrize(("rung", "most"), [("fa1_tensor_core", 192), ("fa2_tensor_core", 256)])
def test_a_turing_device_gets_tiles_for_turing_or_the_reason_why_not(rung, most):
    """Its 64 KiB do not hold what the warps of FlashAttention-1 exchange of a long row."""
    limits = SimulatorMachine(Simulator(compute_capability=TURING)).limits
    assert all(RUNGS[rung].choose_tiles(d, limits).turing for d in range(1, most + 1))
    for head_dim in range(most + 1, 257):
        with pytest.raises(ArgumentError, match=f"head_dim={head_dim}: the smallest tiles need"):
            RUNGS[rung].choose_tiles(head_dim, limits)


@pytest.mark.parametrize("capability", SHARED_BYTES_PER_BLOCK, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_auto_takes_tensor_cores_where_they_take_the_dtype(dtype, capability):
    wanted = {
        "float32": "fa2_split_q",
        "float16": "fa2_tensor_core",
        "bfloat16": "fa2_split_q" if capability == TURING else "fa2_tensor_core",
    }
    assert choose_rung("auto", dtype, capability).name == wanted[dtype]


@rungs
def test_bfloat16_on_turing_is_refused_with_the_reason(rung, attend):
    q, k, v = random_qkv(1, 3, 5, 1, 1, 16, ml_dtypes.bfloat16)
    machine = Simulator(compute_capability=TURING, progress=False)
    with pytest.raises(ArgumentError, match=r"takes bfloat16 from compute capability 8.0 on.*7.5"):
        attend(q, k, v, rung, machine)
    for name in ("auto", "fa2_split_q"):
        assert_attention(*attend(q, k, v, name, machine), q, k, v)


@rungs
def test_float32_is_refused_with_the_dtypes_that_are_taken(rung, attend):
    with pytest.raises(ArgumentError, match="takes float16, bfloat16, not float32"):
        attend(*random_qkv(1, 3, 5, 1, 1, 16, np.float32), rung)


# Mutations.

VERBS = (
    *("softmax_base2", "swizzle", "mask", "fa1_passes"),
    *("tensor_core_products", "tensor_core_tiles", "tensor_core_exchange"),
)
"""Modules of device/ that are mutated or import one that is, each behind those it imports."""

HEAD_DIM = 36
"""Copied in pieces of 8 bytes, the last one of a row in the middle of 16."""


def mutated_rung(monkeypatch, rung, *mutation, **which):
    modules = *(f"fa2_numba.device.{verb}" for verb in VERBS), f"fa2_numba.kernels.{rung}"
    return mutated(monkeypatch, modules, *mutation, **which)


def run_mutated(module, rung, qkv, seed=None):
    simulator = Simulator(seed=seed, progress=False)
    head_dim = qkv[0].shape[3]
    return run_rung(module.plan_forward, qkv, tiles(rung, head_dim), simulator, causal=True)[:2]


def wide_scores():
    """Scores so far apart that maxima are outgrown; what lies behind the arrays is NaN."""
    q, k, v = random_qkv(1, 37, 50, 1, 1, HEAD_DIM, np.float16, seed=8)
    return [poisoned_rows(x, 40) for x in (8 * q, k, v)]


DEVICE = "fa2_numba.device."
KERNELS = "fa2_numba.kernels."
BOTH = {
    "mask-hides-one-more": ("mask", "place(i, 0)[0] + 1 + seqlen_k", "place(i, 0)[0] + seqlen_k"),
    "mask-shows-one-more": ("mask", "[0] + 1 + seqlen_k", "[0] + 2 + seqlen_k"),
    "A-by-addresses-of-B": (
        "swizzle",
        "return fragment_address(a_matrix_row), ",
        "return fragment_address(b_matrix_row), ",
    ),
    "B-by-addresses-of-A": (
        "swizzle",
        ", fragment_address(b_matrix",
        ", fragment_address(a_matrix",
    ),
    "P-packed-the-wrong-way-round": ("softmax_base2", "pack(low, high)", "pack(high, low)"),
    "no-swizzle-in-copies": (
        "tensor_core_tiles",
        "int32(tile + chunk_offset(row, chunk))",
        "int32(tile + row * ROW_BYTES + chunk * CHUNK_BYTES)",
    ),
    "V-not-transposed": ("tensor_core_products", "ldmatrix_x4_trans(V_reg", "ldmatrix_x4(V_reg"),
    "a-row-too-many": ("tensor_core_tiles", "int32(i) < rows_left", "int32(i) <= rows_left"),
    "columns-too-many": ("tensor_core_tiles", "max(left, 0))", "max(left + 8, 0))"),
    "columns-too-few": ("tensor_core_tiles", "max(left, 0))", "max(left - 8, 0))"),
    "second-half-of-Q-not-loaded": (
        "tensor_core_products",
        "int32(a_address(Q_warp, m, line, j) + offset)",
        "int32(a_address(Q_warp, m, line, 0) + offset)",
    ),
}
FA1 = {
    "l-not-rescaled": ("fa1_passes", "math.exp(m_old - finite_max(m_new)) * l_old", "l_old"),
    "O-not-rescaled": ("tensor_core_exchange", "= old * O_reg[", "= O_reg["),
    "P-V-not-rescaled": ("tensor_core_exchange", "+ new * o_reg", "+ o_reg"),
}
FA2 = {
    "l-not-rescaled": (KERNELS + "fa2_tensor_core", "l_reg[i] *= rescale", "pass"),
    "O-not-rescaled": (KERNELS + "fa2_tensor_core", "O_reg[i, c] *= rescale", "pass"),
    "never-outgrown": (KERNELS + "fa2_tensor_core", "FULL_MASK, outgrown)", "FULL_MASK, False)"),
    "maxima-of-lanes": (
        KERNELS + "fa2_tensor_core",
        "max_over_lanes(m_lane_reg[i])",
        "m_lane_reg[i]",
    ),
}
REJECTED = [
    pytest.param(rung, *mutation, id=f"{rung}-{name}")
    for rung, own in (("fa1_tensor_core", FA1), ("fa2_tensor_core", FA2))
    for name, mutation in (BOTH | own).items()
]


@rungs
def test_without_a_mutation_the_problem_is_solved(rung, monkeypatch):
    module = mutated_rung(monkeypatch, rung, DEVICE + "mask", "row + place(", "row + place(")
    qkv = wide_scores()
    assert_attention(*run_mutated(module, rung, qkv), *qkv, causal=True)


@pytest.mark.parametrize(("rung", "where", "old", "new"), REJECTED)
def test_a_mutated_rung_is_rejected(rung, where, old, new, monkeypatch):
    where = where if where.startswith(KERNELS) else DEVICE + where
    module = mutated_rung(monkeypatch, rung, where, old, new)
    qkv = wide_scores()
    with pytest.raises((AssertionError, OutOfBoundsError)):
        assert_attention(*run_mutated(module, rung, qkv), *qkv, causal=True)


def places(rung, text):
    """(rung, number of the place, how many there are), for each place where `text` stands."""
    count = inspect.getsource(importlib.import_module(KERNELS + rung)).count(text)
    assert count
    return [pytest.param(rung, nth, count, id=f"{rung}-{nth + 1}") for nth in range(count)]


def each_place(text):
    return pytest.mark.parametrize(
        ("rung", "nth", "count"),
        [place for rung in TENSOR_CORE_RUNGS for place in places(rung, text)],
    )


@each_place("cuda.syncthreads()")
def test_without_any_one_barrier_there_is_a_race(rung, nth, count, monkeypatch):
    text = "cuda.syncthreads()"
    module = mutated_rung(monkeypatch, rung, KERNELS + rung, text, "pass", nth, count)
    with pytest.raises((RaceError, AsyncCopyError)):
        run_mutated(module, rung, wide_scores(), seed=1)


@each_place("    await_copies()")
def test_without_any_one_wait_a_copy_is_read_too_early(rung, nth, count, monkeypatch):
    text = "    await_copies()"
    module = mutated_rung(monkeypatch, rung, KERNELS + rung, text, "    pass", nth, count)
    with pytest.raises(AsyncCopyError):
        run_mutated(module, rung, wide_scores())


def test_rows_of_O_are_not_read_before_the_warp_has_written_them(monkeypatch):
    where = DEVICE + "tensor_core_tiles"
    old = "have written.\n        cuda.syncwarp()\n"
    module = mutated_rung(monkeypatch, "fa2_tensor_core", where, old, "\n")
    with pytest.raises(RaceError):
        run_mutated(module, "fa2_tensor_core", wide_scores(), seed=1)


def test_rows_of_O_are_not_written_before_the_warp_has_read_what_was_there(monkeypatch):
    """Where a query tile sees no key, nothing else lies between reading Q and writing O."""
    where = DEVICE + "tensor_core_tiles"
    old = "just now.\n        cuda.syncwarp()\n"
    module = mutated_rung(monkeypatch, "fa2_tensor_core", where, old, "\n")
    with pytest.raises(RaceError):
        run_mutated(module, "fa2_tensor_core", random_qkv(1, 50, 2, 1, 1, 32, np.float16), seed=1)


@rungs
def test_half_a_warp_cannot_load_a_matrix(rung, monkeypatch):
    old = "ldmatrix_x4(K_reg, 0, 0, int32(b_address(K_smem, n, line, j) + K_OFFSET))"
    new = "if j == 0 or cuda.threadIdx.x % 32 < 16: " + old
    module = mutated_rung(monkeypatch, rung, DEVICE + "tensor_core_products", old, new)
    with pytest.raises(WarpError):
        run_mutated(module, rung, wide_scores())


# Speed.


@pytest.mark.parametrize(
    ("rung", "config"),
    [
        ("fa1_tensor_core", TensorCoreConfig(64, 32, 64, 4, sliced_k=True)),
        ("fa2_tensor_core", TensorCoreConfig(64, 64, 64, 4)),
    ],
)
def test_speed_of_one_head(rung, config):
    qkv = random_qkv(1, 128, 128, 1, 1, 64, np.float16)
    start = time.process_time()  # of this process alone, so that busy neighbours do not count
    out, lse, _ = run_rung(
        RUNGS[rung].plan_forward, qkv, config, Simulator(progress=False), causal=True
    )
    assert time.process_time() - start < 10
    assert_attention(out, lse, *qkv, causal=True)


@rungs
def test_a_run_that_takes_too_long_is_refused_by_what_tensor_cores_cost(rung, attend):
    """Of whole tiles, which pad a head dim of 1 to 32."""
    q = np.ones((1, 1, 50_000, 1), np.float16)
    k = np.ones((1, 1, 1, 1), np.float16)
    config = tiles(rung, 1)
    seconds_each = machines.SIMULATED_SECONDS_PER_MULTIPLY_ADD[TensorCoreConfig][True]
    seconds = 2 * 50_000 * config.block_m * config.block_n * 32 * seconds_each
    with pytest.raises(RunTooLongError, match=f"would take about {seconds:.0f} s"):
        attend(q, k, k, rung)

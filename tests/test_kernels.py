"""Every rung against exact attention, on the simulator and on the GPU."""

import ml_dtypes
import numpy as np
import pytest

from fa2_numba import RUNGS, flash_attn_func
from fa2_numba.config import TileConfig, col_step, row_step
from fa2_numba.testing import (
    SHAPES,
    assert_attention,
    poisoned_rows,
    random_qkv,
)

from .conftest import (
    CUDA_CORE_RUNGS,
    DTYPES,
    FAST_SIMULATOR,
    PORTABLE_RUNGS,
    SIMULATOR,
    all_kinds,
    kinds,
    run_rung,
)

HEAD_DIMS = (1, 33, 40, 64, 96, 111, 128, 256)
SWEPT_HEAD_DIMS = (8, 72, 100)
PICKED = ("fa2_split_q", "fa2_tensor_core")
LENGTHS = (1, 2, 31, 33, 63, 64, 65, 97, 127, 129)
rungs = pytest.mark.parametrize("rung", PORTABLE_RUNGS)


def attend(q, k, v, machine, rung, **options):
    return flash_attn_func(q, k, v, machine=machine, rung=rung, return_lse=True, **options)


def check(q, k, v, machine, rung, **options):
    out, lse = attend(q, k, v, machine, rung, **options)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    assert_attention(out, lse, q, k, v, **options)


def is_costly(case):
    """Whether scores in whole tiles of 16 x 16, times head dim, are many."""
    rows, cols = (-(-length // 16) * 16 for length in (case.seqlen_q, case.seqlen_k))
    return case.batch * case.heads * rows * cols * case.head_dim > 220_000


def shape_cases():
    """Every case on the rungs of "auto" in one dtype, another one on each; in the sweep, in all.

    The other rungs take the costly ones in the sweep.
    """
    for number, case in enumerate(SHAPES):
        for step, name in enumerate(PORTABLE_RUNGS):
            dtypes = RUNGS[name].dtypes
            for place, dtype in enumerate(dtypes):
                chosen = (number + step) % len(dtypes) == place
                chosen = chosen and (name in PICKED or not is_costly(case))
                marks = () if chosen else pytest.mark.sweep
                yield pytest.param(case, name, dtype, id=f"{case.id}-{name}-{dtype}", marks=marks)


@pytest.mark.parametrize(("case", "rung", "dtype"), list(shape_cases()))
def test_shapes(case, rung, dtype, machine):
    # Checks for what "auto" picks; `test_warps` and `test_tensor_core` have them for the others.
    if machine != "gpu" and (is_costly(case) or rung not in PICKED):
        machine = FAST_SIMULATOR
    check(*case.qkv(DTYPES[dtype]), machine, rung, causal=case.causal)


@kinds(in_sweep=("bfloat16",))
@pytest.mark.parametrize(
    "head_dim", [*HEAD_DIMS, *(pytest.param(d, marks=pytest.mark.sweep) for d in SWEPT_HEAD_DIMS)]
)
def test_head_dims(head_dim, rung, dtype, fast_machine):
    qkv = random_qkv(1, 9, 21, 2, 1, head_dim, dtype, seed=head_dim)
    check(*qkv, fast_machine, rung, causal=True)


DEFAULT_PAIRS = {(1, 129), (129, 1), (31, 33), (33, 31), (64, 2), (65, 64)}
LENGTH_PAIRS = [
    pytest.param(
        q, k, id=f"Lq{q}-Lk{k}", marks=() if (q, k) in DEFAULT_PAIRS else pytest.mark.sweep
    )
    for q in LENGTHS
    for k in LENGTHS
]


@kinds(in_sweep=("bfloat16",))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTH_PAIRS)
def test_length_pairs(seqlen_q, seqlen_k, rung, dtype, fast_machine):
    for causal in (False, True):
        qkv = random_qkv(1, seqlen_q, seqlen_k, 1, 1, 16, dtype, seed=seqlen_q)
        check(*qkv, fast_machine, rung, causal=causal)


@pytest.mark.parametrize("rung", CUDA_CORE_RUNGS)
@pytest.mark.parametrize("num_warps", range(1, 9))
def test_warps(num_warps, rung):
    """Every number of warps computes the same attention (tiles made for it)."""
    qkv = random_qkv(1, 20, 35, 1, 1, 16, np.float32, seed=num_warps)
    config = TileConfig(16, row_step(num_warps), col_step(num_warps), num_warps)
    out, lse, _ = run_rung(RUNGS[rung].plan_forward, qkv, config, SIMULATOR, causal=True)
    assert_attention(out, lse, *qkv, causal=True)


@kinds(in_sweep=("bfloat16",))
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [pytest.param(12, 4, marks=pytest.mark.sweep), (6, 2), (5, 1), (8, 8)],
    ids=lambda n: str(n),
)
def test_a_query_head_reads_the_kv_head_of_its_group(heads, kv_heads, rung, dtype, fast_machine):
    q, k, v = random_qkv(1, 3, 5, heads, kv_heads, 8, dtype, seed=0)
    v[...] = np.arange(kv_heads)[:, None]
    out, _ = attend(q, k, v, fast_machine, rung)
    expected = np.arange(heads) // (heads // kv_heads)
    rtol = max(1e-6, float(ml_dtypes.finfo(dtype).eps))
    expected = np.broadcast_to(expected[:, None], out.shape)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=rtol)


@all_kinds()
def test_padding_never_leaks(rung, dtype, fast_machine):
    """Rows past the end, and the next batch element, may hold anything."""
    q, k, v = random_qkv(1, 9, 9, 1, 1, 40, dtype, seed=1)
    expected = attend(q, k, v, fast_machine, rung)
    assert_attention(*expected, q, k, v)
    for poison in (np.nan, np.inf):
        dirty = [poisoned_rows(x, 60, poison) for x in (q, k, v)]
        for got, want in zip(attend(*dirty, fast_machine, rung), expected, strict=True):
            np.testing.assert_array_equal(got, want)
    two = [np.concatenate([x, np.full_like(x, np.nan)]) for x in (q, k, v)]
    out, lse = attend(*two, fast_machine, rung)
    np.testing.assert_array_equal(out[:1], expected[0])
    np.testing.assert_array_equal(lse[:1], expected[1])
    assert np.isnan(out[1:].astype(np.float32)).all()


def columns(dtype, *values):
    """(1, n, 1, d) from n rows of d values (or n numbers)."""
    rows = np.array(values, dtype)
    return rows.reshape(1, len(values), 1, -1)


@kinds()
def test_huge_equal_scores(rung, dtype, machine):
    q, k = np.full((1, 1, 1, 16), -64, dtype), np.full((1, 4, 1, 16), 100, dtype)
    v = np.broadcast_to(columns(dtype, 0, 1, 2, 3), k.shape)
    out, lse = attend(q, k, v, machine, rung, softmax_scale=1.0)
    np.testing.assert_array_equal(out, np.full_like(q, 1.5))
    np.testing.assert_allclose(lse, -102398.6137, atol=0.01)


@kinds()
def test_a_masked_key_takes_no_part_however_low_the_others_are(rung, dtype, machine):
    q, k, v = columns(dtype, -(2**15), 0), columns(dtype, 1, 0), columns(dtype, 2, 500)
    out, lse = attend(q, k, v, machine, rung, softmax_scale=1.0, causal=True)
    assert out[0, 0, 0, 0] == 2.0
    np.testing.assert_allclose(lse[0, 0, 0], -(2**15), rtol=2e-7)
    assert_attention(out, lse, q, k, v, softmax_scale=1.0, causal=True)


@kinds()
def test_rows_that_see_nothing(rung, dtype, machine):
    q, k, v = columns(dtype, 0, 0, 0, 0, 0), columns(dtype, 7, 8), columns(dtype, 1, 3)
    out, lse = attend(q, k, v, machine, rung, causal=True)
    np.testing.assert_array_equal(out.ravel(), np.array([0, 0, 0, 1, 2], dtype))
    np.testing.assert_array_equal(lse[0, 0, :4], [-np.inf, -np.inf, -np.inf, 0])
    np.testing.assert_allclose(lse[0, 0, 4], np.log(2), rtol=1e-6)


@rungs
def test_fp16_scores_above_the_fp16_range(rung, machine):
    q, k = np.full((1, 1, 1, 64), 64, np.float16), np.full((1, 3, 1, 64), 64, np.float16)
    v = np.broadcast_to(columns(np.float16, 0, 1, 2), k.shape)
    out, lse = attend(q, k, v, machine, rung)
    np.testing.assert_array_equal(out, np.ones_like(q))
    np.testing.assert_allclose(lse, 32768 + np.log(3), rtol=1e-6)


@kinds()
def test_causal_is_aligned_at_the_bottom_right(rung, dtype, machine):
    q, k = columns(dtype, 0, 0), columns(dtype, 1, 2, 3, 4, 5)
    out, lse = attend(q, k, columns(dtype, 0, 1, 2, 3, 4), machine, rung, causal=True)
    np.testing.assert_allclose(out.ravel().astype(np.float32), [1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), np.log([4, 5]), rtol=1e-6)


@kinds(in_sweep=("bfloat16",))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 2), (200, 1)])
def test_causal_with_more_queries_than_keys(seqlen_q, seqlen_k, rung, dtype, fast_machine):
    q, k, v = random_qkv(1, seqlen_q, seqlen_k, 1, 1, 16, dtype, seed=3)
    check(q, k, v, fast_machine, rung, causal=True)


@kinds()
def test_nan_in_a_query_stays_in_its_row(rung, dtype, machine):
    q, k, v = random_qkv(1, 20, 20, 1, 1, 16, dtype, seed=4)
    expected, _ = attend(q, k, v, machine, rung)
    q[0, 7, 0, 3] = np.nan
    out, lse = attend(q, k, v, machine, rung)
    assert np.isnan(out[0, 7].astype(np.float32)).all() and np.isnan(lse[0, 0, 7])
    np.testing.assert_array_equal(np.delete(out, 7, axis=1), np.delete(expected, 7, axis=1))


@rungs
def test_results_repeat_bit_for_bit(rung, fast_machine):
    qkv = random_qkv(1, 20, 35, 2, 1, 16, np.float16, seed=5)
    first = attend(*qkv, fast_machine, rung, causal=True)
    for got, want in zip(attend(*qkv, fast_machine, rung, causal=True), first, strict=True):
        np.testing.assert_array_equal(got, want)


@kinds(in_sweep=("bfloat16",))
def test_a_batch_element_does_not_depend_on_the_others(rung, dtype, fast_machine):
    q, k, v = random_qkv(3, 18, 20, 2, 1, 16, dtype, seed=6)
    out, lse = attend(q, k, v, fast_machine, rung)
    alone, alone_lse = attend(q[1:2], k[1:2], v[1:2], fast_machine, rung)
    np.testing.assert_array_equal(out[1:2], alone)
    np.testing.assert_array_equal(lse[1:2], alone_lse)


@kinds(in_sweep=("bfloat16",))
def test_tiles_without_a_visible_key_leave_the_output_as_it_is(rung, dtype, fast_machine):
    """The first query sees the first key alone, whatever number of tiles comes after."""
    length = 150 if fast_machine == "gpu" else 70
    q, k, v = random_qkv(1, length, length, 1, 1, 16, dtype, seed=7)
    out, _ = attend(q, k, v, fast_machine, rung, causal=True)
    np.testing.assert_array_equal(out[0, 0], v[0, 0])

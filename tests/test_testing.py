"""The tolerance rule must accept honest kernels and reject broken ones."""

import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fa2_numba.reference import (
    attention_backward,
    attention_backward_same_precision,
    attention_forward,
    attention_forward_same_precision,
    visible,
)
from fa2_numba.testing import (
    SHAPES,
    Case,
    assert_attention,
    assert_gradients,
    compare,
    compare_attention,
    compare_gradients,
    poisoned,
    poisoned_rows,
    random_qkv,
)

DTYPES = [
    pytest.param(np.float32, id="fp32"),
    pytest.param(np.float16, id="fp16"),
    pytest.param(ml_dtypes.bfloat16, id="bf16"),
]
CASES = [pytest.param(case, id=case.id) for case in SHAPES]
CAUSAL = Case(1, 2, 1, 40, 50, 32, True, "three key tiles, the last two on the diagonal")


def tiled_attention(
    case: Case,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    rescale_l: bool = True,
    rescale_O: bool = True,
    normalise: bool = True,
    extra_keys: int = 0,
    block_n: int = 16,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention over key tiles with an online softmax; the flags break one thing each."""
    dtype = q.dtype
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    out = np.zeros(q.shape, dtype)
    lse = np.full((case.batch, case.heads, case.seqlen_q), -np.inf, np.float32)
    mask = np.ones((case.seqlen_q, case.seqlen_k), bool)
    if case.causal:
        mask = np.tri(*mask.shape, k=case.seqlen_k - case.seqlen_q + extra_keys, dtype=bool)
    for b, h in np.ndindex(case.batch, case.heads):
        kv_head = h // (case.heads // case.kv_heads)
        m = np.full(case.seqlen_q, -np.inf, np.float32)
        l = np.zeros(case.seqlen_q, np.float32)
        O = np.zeros((case.seqlen_q, case.head_dim), np.float32)
        for start in range(0, case.seqlen_k, block_n):
            tile = slice(start, start + block_n)
            S = np.float32(case.head_dim**-0.5) * (q[b, :, h] @ k[b, tile, kv_head].T)
            S = np.where(mask[:, tile], S, np.float32(-np.inf))
            m_new = np.maximum(m, S.max(axis=1))
            m_safe = np.where(m_new == -np.inf, np.float32(0), m_new)
            rescale = np.exp(m - m_safe)
            P = np.exp(S - m_safe[:, None])
            l = P.sum(axis=1) + (l * rescale if rescale_l else l)
            if rescale_O:
                O *= rescale[:, None]
            O += P.astype(dtype).astype(np.float32) @ v[b, tile, kv_head]
            m = m_new
        seen = l > 0
        out[b, seen, h] = (O[seen] / l[seen, None] if normalise else O[seen]).astype(dtype)
        lse[b, h, seen] = m[seen] + np.log(l[seen])
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_same_precision_reference_passes(case, dtype):
    q, k, v = case.qkv(dtype)
    out, lse = attention_forward_same_precision(q, k, v, causal=case.causal)
    assert_attention(out, lse, q, k, v, causal=case.causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_an_honest_tiled_kernel_passes(case, dtype):
    q, k, v = case.qkv(dtype)
    assert_attention(*tiled_attention(case, q, k, v), q, k, v, causal=case.causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mistake", "out_passes", "lse_passes"),
    [
        pytest.param({}, True, True, id="no-mistake"),
        pytest.param({"rescale_l": False}, False, False, id="l-not-rescaled"),
        pytest.param({"rescale_O": False}, False, True, id="O-not-rescaled"),
        pytest.param({"normalise": False}, False, True, id="not-divided-by-l"),
        pytest.param({"extra_keys": 1}, False, False, id="one-key-too-many"),
        pytest.param({"extra_keys": -1}, False, False, id="one-key-too-few"),
    ],
)
def test_broken_kernels_are_rejected(dtype, mistake, out_passes, lse_passes):
    q, k, v = CAUSAL.qkv(dtype)
    out, lse = tiled_attention(CAUSAL, q, k, v, **mistake)
    verdict_out, verdict_lse = compare_attention(out, lse, q, k, v, causal=True)
    assert (verdict_out.passed, verdict_lse.passed) == (out_passes, lse_passes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_an_output_nobody_wrote_is_rejected(case, dtype):
    q, k, v = case.qkv(dtype)
    unwritten = poisoned(q.shape, dtype), poisoned((case.batch, case.heads, case.seqlen_q), "f4")
    for out, lse in (unwritten, tuple(map(np.zeros_like, unwritten))):
        verdicts = compare_attention(out, lse, q, k, v, causal=case.causal)
        assert [verdict.passed for verdict in verdicts] == [False, False]


def gradient_kernel(
    case: Case,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    subtract_D: bool = True,
    scale_dQ: bool = True,
    sum_group: bool = True,
    extra_keys: int = 0,
) -> list[np.ndarray]:
    """Compute gradients with NumPy's own sums; the flags break one thing each."""
    dtype = q.dtype
    out, lse = tiled_attention(case, q, k, v)
    dout, q, k, v, out = (x.astype(np.float32) for x in (dout, q, k, v, out))
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (q, k, v))
    mask = visible(
        case.seqlen_q, case.seqlen_k, window_size=(-1, extra_keys if case.causal else -1)
    )
    scale = np.float32(case.head_dim**-0.5)
    for b, h in np.ndindex(case.batch, case.heads):
        kv_head = h // (case.heads // case.kv_heads)
        Q, K, V, dO = q[b, :, h], k[b, :, kv_head], v[b, :, kv_head], dout[b, :, h]
        row_lse = np.where(lse[b, h] == -np.inf, np.float32(np.inf), lse[b, h])
        P = np.where(mask, np.exp(scale * (Q @ K.T) - row_lse[:, None]), np.float32(0))
        D = (dO * out[b, :, h]).sum(axis=1, keepdims=True)
        dS = (P * (dO @ V.T - (D if subtract_D else 0))).astype(dtype).astype(np.float32)
        dq[b, :, h] = (scale if scale_dQ else 1) * (dS @ K)
        kept = 1 if sum_group else 0
        dk[b, :, kv_head] = kept * dk[b, :, kv_head] + scale * (dS.T @ Q)
        dv[b, :, kv_head] = kept * dv[b, :, kv_head] + P.astype(dtype).astype(np.float32).T @ dO
    return [x.astype(dtype) for x in (dq, dk, dv)]


def random_dout(q: np.ndarray) -> np.ndarray:
    return np.random.default_rng(9).standard_normal(q.shape).astype(q.dtype)


GROUP = Case(1, 6, 2, 40, 50, 32, True, "three query heads share a key/value head")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_honest_gradients_pass(case, dtype):
    """Also those of a single key, whose exact dq and dk are 0 everywhere."""
    q, k, v = case.qkv(dtype)
    dout = random_dout(q)
    gradients = gradient_kernel(case, dout, q, k, v)
    assert_gradients(*gradients, dout, q, k, v, causal=case.causal)
    same_precision = attention_backward_same_precision(dout, q, k, v, causal=case.causal)
    assert_gradients(*same_precision, dout, q, k, v, causal=case.causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mistake", "passed"),
    [
        pytest.param({}, (True, True, True), id="no-mistake"),
        pytest.param({"subtract_D": False}, (False, False, True), id="D-not-subtracted"),
        pytest.param({"scale_dQ": False}, (False, True, True), id="dQ-not-scaled"),
        pytest.param({"sum_group": False}, (True, False, False), id="last-head-only"),
        pytest.param({"extra_keys": 1}, (False, False, False), id="one-key-too-many"),
    ],
)
def test_broken_gradients_are_rejected(dtype, mistake, passed):
    q, k, v = GROUP.qkv(dtype)
    dout = random_dout(q)
    gradients = gradient_kernel(GROUP, dout, q, k, v, **mistake)
    verdicts = compare_gradients(*gradients, dout, q, k, v, causal=True)
    assert tuple(verdict.passed for verdict in verdicts) == passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_nobody_wrote_are_rejected(dtype):
    q, k, v = GROUP.qkv(dtype)
    dout = random_dout(q)
    for value in (np.nan, 0):
        buffers = [np.full(x.shape, value, dtype) for x in (q, k, v)]
        verdicts = compare_gradients(*buffers, dout, q, k, v, causal=True)
        assert not any(verdict.passed for verdict in verdicts)


def test_a_gradient_that_is_0_everywhere_must_be_almost_0():
    """Of one key: the errors of two float32 sums pass, and no more, also in float16."""
    q, k, v = random_qkv(1, 4, 1, 1, 1, 64, np.float16)
    dout = random_dout(q)
    dq, dk, dv = (x.astype(np.float16) for x in attention_backward(dout, q, k, v))
    for size, passes in ((1e-6, True), (1e-4, False)):
        verdict, _, _ = compare_gradients(dq + np.float16(size), dk, dv, dout, q, k, v)
        assert verdict.passed == passes


def test_the_message_names_the_gradient():
    q, k, v = CAUSAL.qkv(np.float32)
    dout = random_dout(q)
    dq, dk, dv = attention_backward_same_precision(dout, q, k, v, causal=True)
    dk[0, 3, 0, 5] += 1
    with pytest.raises(AssertionError, match=r"^dk: error 1 .*\(0, 3, 0, 5\)") as caught:
        assert_gradients(dq, dk, dv, dout, q, k, v, causal=True)
    assert len(str(caught.value).splitlines()) == 1


EXACT = np.array([[0.5, -2.0, 1.0], [0.25, 4.0, 0.0]])
REFERENCE = EXACT.astype(np.float32) * np.float32(1 + 2**-20)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", list(np.ndindex(EXACT.shape)))
def test_a_single_nan_or_infinity_is_rejected_and_located(bad, index):
    actual = EXACT.astype(np.float32)
    actual[index] = bad
    verdict = compare(actual, EXACT, REFERENCE)
    assert not verdict.passed
    assert verdict.worst == index
    assert str(index) in str(verdict)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_reference_lets_nothing_pass(bad):
    reference = REFERENCE.copy()
    reference[0, 0] = bad
    assert not compare(EXACT.astype(np.float32), EXACT, reference).passed
    exact = EXACT.copy()
    exact[0, 0] = np.nan
    assert not compare(exact.astype(np.float32), exact, exact.astype(np.float32)).passed


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        pytest.param(-np.inf, True, id="-inf"),
        pytest.param(np.inf, False, id="+inf"),
        pytest.param(np.nan, False, id="nan"),
        pytest.param(-1e30, False, id="finite-stand-in"),
    ],
)
def test_an_infinity_must_be_matched_exactly(value, passes):
    exact = np.array([-np.inf, 1.0])
    verdict = compare(np.array([value, 1.0], np.float32), exact, exact.astype(np.float32))
    assert verdict.passed == passes
    assert passes or verdict.worst == (0,)
    assert verdict.rounding == 2.0**-23, "the infinity counted as the largest value"


@pytest.mark.parametrize(
    ("dtype", "eps"),
    [
        pytest.param(np.float32, 2.0**-23, id="fp32"),
        pytest.param(np.float16, 2.0**-10, id="fp16"),
        pytest.param(ml_dtypes.bfloat16, 2.0**-7, id="bf16"),
    ],
)
def test_the_allowance_is_twice_reference_error_plus_one_rounding(dtype, eps):
    exact = np.array([1.0, -4.0])
    reference = np.array([1.0, -4.5], dtype)
    verdict = compare(np.array([1.25, -4.0], dtype), exact, reference)
    assert verdict.error == 0.25
    assert verdict.worst == (0,)
    assert (verdict.actual, verdict.exact) == (1.25, 1.0)
    assert verdict.allowed == 2 * (0.5 + 4 * eps)
    assert verdict.passed


def test_an_error_equal_to_the_allowance_passes_and_the_next_one_does_not():
    exact = np.array([1.0])
    at_the_limit = np.array([1 + 2 * 2.0**-23], np.float32)
    beyond = np.nextafter(at_the_limit, np.float32(2))
    assert compare(at_the_limit, exact, exact.astype(np.float32)).passed
    assert not compare(beyond, exact, exact.astype(np.float32)).passed


@pytest.mark.parametrize(
    ("actual", "reference"),
    [
        pytest.param((2, 3), (3, 2), id="reference"),
        pytest.param((3, 2), (2, 3), id="actual"),
        # Broadcasting would make these two look alike.
        pytest.param((1, 3), (2, 3), id="broadcastable"),
    ],
)
def test_a_wrong_shape_is_an_error(actual, reference):
    with pytest.raises(ValueError, match="shape"):
        compare(np.zeros(actual, "f4"), np.zeros((2, 3)), np.zeros(reference, "f4"))


def test_empty_arrays_pass():
    assert compare(np.zeros((0, 3), "f4"), np.zeros((0, 3)), np.zeros((0, 3), "f4")).passed
    q, k, v = random_qkv(1, 0, 4, 1, 1, 8, np.float32)
    assert_attention(np.zeros(q.shape, "f4"), np.zeros((1, 1, 0), "f4"), q, k, v)


def test_the_message_tells_both_errors_and_the_place():
    q, k, v = CAUSAL.qkv(np.float32)
    out, lse = attention_forward_same_precision(q, k, v, causal=True)
    out[0, 3, 1, 5] += 1
    lse[0, 1, 2] += 1
    with pytest.raises(AssertionError) as caught:
        assert_attention(out, lse, q, k, v, causal=True)
    about_out, about_lse = str(caught.value).splitlines()
    assert about_out.startswith("out: error 1 ") and "(0, 3, 1, 5)" in about_out
    assert about_lse.startswith("lse: error 1 ") and "(0, 1, 2)" in about_lse
    assert "allowed" in about_out and "reference error" in about_out


def test_options_reach_the_references():
    q, k, v = random_qkv(1, 6, 9, 2, 2, 8, np.float32)
    options = {"window_size": (2, 1), "softcap": 1.5, "softmax_scale": 0.5}
    out, lse = attention_forward(q, k, v, **options)
    assert_attention(out.astype(np.float32), lse.astype(np.float32), q, k, v, **options)
    with pytest.raises(AssertionError):
        assert_attention(out.astype(np.float32), lse.astype(np.float32), q, k, v)


def test_assertions_survive_python_dash_o_and_need_no_pytest():
    program = """
import sys
sys.modules["pytest"] = None
import numpy as np
from fa2_numba.testing import assert_attention, random_qkv
q, k, v = random_qkv(1, 2, 3, 1, 1, 4, np.float32)
try:
    assert_attention(np.zeros_like(q), np.zeros((1, 1, 2), np.float32), q, k, v)
except AssertionError:
    print("rejected")
"""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-O", "-c", program]
    finished = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert finished.stdout == "rejected\n"


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_everywhere(dtype):
    buffer = poisoned((2, 3), dtype)
    assert buffer.dtype == dtype
    assert np.isnan(buffer.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_poisoned_rows_lie_after_the_last_row(dtype, poison, axis):
    values = random_qkv(2, 5, 1, 3, 1, 8, dtype)[0]
    view = poisoned_rows(values, 4, poison, axis)
    np.testing.assert_array_equal(view, values)
    buffer = view.base
    assert buffer.shape[axis] == values.shape[axis] + 4
    after = np.delete(buffer.astype(np.float32), range(values.shape[axis]), axis)
    np.testing.assert_array_equal(after, np.full_like(after, poison))
    view[...] = 0
    assert np.count_nonzero(buffer.astype(np.float32) == 0) == values.size, "view is a copy"


def test_random_qkv_is_repeatable_and_standard_normal():
    first, again = (random_qkv(2, 30, 40, 6, 3, 32, np.float16, seed=5) for _ in range(2))
    other = random_qkv(2, 30, 40, 6, 3, 32, np.float16, seed=6)
    assert [x.shape for x in first] == [(2, 30, 6, 32), (2, 40, 3, 32), (2, 40, 3, 32)]
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()
        assert abs(a.astype(np.float64).mean()) < 0.05
        assert abs(a.astype(np.float64).std() - 1) < 0.05


def test_the_shape_matrix_is_small_and_varied():
    assert len({case.id for case in SHAPES}) == len(SHAPES)
    assert all(case.reason for case in SHAPES)
    for case in SHAPES:
        rows = case.batch * case.heads * case.seqlen_q
        assert rows * case.seqlen_k * case.head_dim < 1_500_000, case.id
    assert {40, 64, 72, 128} <= {case.head_dim for case in SHAPES}
    assert {case.causal for case in SHAPES if case.seqlen_q > case.seqlen_k} == {True, False}
    assert {case.causal for case in SHAPES if case.seqlen_q < case.seqlen_k} == {True, False}
    assert {case.heads // case.kv_heads for case in SHAPES} == {1, 3, 5}

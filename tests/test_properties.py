"""Properties over many shapes, strides and head ratios, found by hypothesis."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa2_numba import flash_attn_func
from fa2_numba.testing import assert_attention, random_qkv

from .conftest import (
    FAST_SIMULATOR,
    HAS_GPU,
    NO_GPU,
    PORTABLE_RUNGS,
    SIMULATOR,
    small_tiles,
)

rungs = pytest.mark.parametrize("rung", PORTABLE_RUNGS)
LAYOUTS = ["bshd", "bhsd", "sbhd", "reversed", "sliced", "last"]


@st.composite
def problems(draw, largest_seqlen, largest_head_dim):
    """Arguments of random_qkv, a memory layout for each array, and the mask."""
    kv_heads = draw(st.integers(1, 2))
    sizes = {
        "batch": draw(st.integers(1, 2)),
        "seqlen_q": draw(st.integers(1, largest_seqlen)),
        "seqlen_k": draw(st.integers(1, largest_seqlen)),
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "head_dim": draw(st.integers(1, largest_head_dim)),
        "seed": draw(st.integers(0, 1000)),
    }
    layouts = draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3))
    return sizes, layouts, draw(st.booleans())


def laid_out(x, layout):
    """The same values in another memory layout."""
    if layout == "bhsd":
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if layout == "sbhd":
        return np.ascontiguousarray(x.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3)
    if layout == "reversed":
        return np.ascontiguousarray(x[:, ::-1])[:, ::-1]
    if layout == "sliced":
        room = np.full((*x.shape[:3], x.shape[3] + 3), np.nan, x.dtype)
        room[..., 2:-1] = x
        return room[..., 2:-1]
    if layout == "last":
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    return x


def check(problem, rung, dtype, machine):
    sizes, layouts, causal = problem
    q, k, v = random_qkv(dtype=dtype, **sizes)
    views = [laid_out(x, layout) for x, layout in zip((q, k, v), layouts, strict=True)]
    out, lse = flash_attn_func(*views, causal=causal, rung=rung, machine=machine, return_lse=True)
    assert_attention(out, lse, q, k, v, causal=causal)


def examples(number):
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@rungs
@examples(8)
@given(problem=problems(largest_seqlen=35, largest_head_dim=20))
def test_any_problem_in_the_simulator(monkeypatch, problem, rung):
    monkeypatch.setattr("fa2_numba.interface.tiles_for", small_tiles)
    check(problem, rung, np.float16, FAST_SIMULATOR)


@pytest.mark.sweep
@rungs
@examples(30)
@given(problem=problems(largest_seqlen=35, largest_head_dim=20))
def test_any_problem_with_all_checks_of_the_simulator(monkeypatch, problem, rung):
    monkeypatch.setattr("fa2_numba.interface.tiles_for", small_tiles)
    check(problem, rung, np.float16, SIMULATOR)


@pytest.mark.gpu
@rungs
@examples(60)
@given(problem=problems(largest_seqlen=150, largest_head_dim=64))
def test_any_problem_on_a_gpu(problem, rung):
    assert HAS_GPU, NO_GPU
    check(problem, rung, np.float16, "gpu")

"""Tile configurations: which are legal, and which one a device gets."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2_numba.config import DeviceLimits, TileConfig, choose_backward_tiles, choose_tiles
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.errors import ArgumentError
from fa2_numba.tensor_core_config import (
    TensorCoreConfig,
    choose_sliced_k_tiles,
    choose_split_q_tiles,
)

FIELDS = ("head_dim", "block_m", "block_n", "num_warps")
KIB = 1024
LIMITS = {
    "T4-64K": 64 * KIB,
    "consumer-99K": 99 * KIB,
    "A100-163K": 163 * KIB,
    "H100-227K": 227 * KIB,
}
limits = pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
warps = pytest.mark.parametrize("num_warps", range(1, 9), ids=lambda n: f"{n}-warps")


def faults(head_dim, block_m, block_n, num_warps):
    """The fields that break a rule, by the rules as the class documents them."""
    found = set()
    if num_warps not in range(1, 9):
        found.add("num_warps")
    if head_dim not in range(16, 257, 16):
        found.add("head_dim")
    for field, size in (("block_m", block_m), ("block_n", block_n)):
        whole_lanes = size > 0 and size % 8 == 0
        if not whole_lanes or (num_warps and size % (4 * num_warps) != 0):
            found.add(field)
    return found


@st.composite
def legal_fields(draw):
    num_warps = draw(st.integers(1, 8))
    step = 8 * num_warps if num_warps % 2 else 4 * num_warps
    sizes = st.integers(1, 8).map(lambda i: i * step)
    return {
        "head_dim": draw(st.sampled_from(range(16, 257, 16))),
        "block_m": draw(sizes),
        "block_n": draw(sizes),
        "num_warps": num_warps,
    }


@given(legal_fields())
def test_every_legal_combination_constructs(fields):
    assert faults(**fields) == set()
    config = TileConfig(**fields)
    assert config.num_threads == 32 * fields["num_warps"]
    # What the lanes own makes up the tiles, exactly.
    rows, cols, out_cols = config.split_q_elements
    assert 4 * config.num_warps * rows == config.block_m
    assert (8 * cols, 8 * out_cols) == (config.block_n, config.head_dim)
    rows, cols, _ = config.sliced_k_elements
    assert 8 * rows == config.block_m and 4 * config.num_warps * cols == config.block_n
    rows, cols, step = config.owned_elements
    assert (step * rows, 16 * cols) == (config.block_m, config.head_dim)
    assert config.split_q_shared_bytes < config.sliced_k_shared_bytes


sizes = st.integers(-20, 300) | st.sampled_from(range(-64, 300, 8))


@given(legal_fields(), st.dictionaries(st.sampled_from(FIELDS), sizes, min_size=1))
def test_every_illegal_combination_is_refused_by_field_and_value(fields, changes):
    fields |= changes
    broken = faults(**fields)
    if not broken:
        TileConfig(**fields)
        return
    with pytest.raises(ValueError) as refusal:
        TileConfig(**fields)
    field, value, rule = re.fullmatch(r"(\w+)=(.+): must be (.+)", str(refusal.value)).groups()
    assert field in broken and value == str(fields[field]) and rule


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [16.0, "16", None], ids=repr)
def test_only_integers_are_sizes(field, value):
    fields = {"head_dim": 16, "block_m": 16, "block_n": 16, "num_warps": 4} | {field: value}
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}: must be an integer")):
        TileConfig(**fields)


def test_configurations_are_values():
    config = TileConfig(64, 64, 32)
    assert config == TileConfig(64, 64, 32, num_warps=4) and hash(config) == hash(
        TileConfig(64, 64, 32)
    )
    assert str(config) == "d64_m64_n32_w4"
    with pytest.raises(AttributeError):
        config.block_m = 128


# The choice.


def candidates(head_dim, num_warps):
    """Every legal tile of at most 64 rows (or the smallest number of rows) with halving sizes."""
    step = 8 * num_warps if num_warps % 2 else 4 * num_warps
    sizes = [step << k for k in range(7) if k == 0 or step << k <= 64]
    return [TileConfig(head_dim, m, n, num_warps) for m in sizes for n in sizes]


@pytest.mark.parametrize("head_dim", [1, 16, 33, 64, 96, 128, 192, 256])
@limits
def test_backward_tiles(limit, head_dim):
    """The largest that fit twice, else once; two warps where not even the smallest of four do."""
    config = choose_backward_tiles(head_dim, limit)
    assert config.query_parallel_shared_bytes < config.backward_shared_bytes <= limit
    fours = [c.backward_shared_bytes for c in candidates(config.head_dim, 4)]
    assert config.num_warps == (4 if min(fours) <= limit else 2)
    possible = candidates(config.head_dim, config.num_warps)
    twice = [c for c in possible if 2 * (c.backward_shared_bytes + KIB) <= limit + KIB]
    fitting = twice or [c for c in possible if c.backward_shared_bytes <= limit]
    assert config.block_m * config.block_n == max(c.block_m * c.block_n for c in fitting)


def test_too_little_shared_memory_for_a_backward_pass():
    with pytest.raises(ValueError, match="head_dim=256, num_warps=2: the smallest tiles need"):
        choose_backward_tiles(256, 32 * KIB)


def test_a_warp_reads_dS_without_a_bank_conflict():
    """Eight keys of four neighbouring queries."""
    key, query = np.divmod(np.arange(32), 4)
    for block_m in (16, 32, 64):
        stride = TileConfig(64, block_m, 64, 4).ds_stride
        assert len(set((key * stride + query) % 32)) == 32


def check_choice(head_dim, limit, num_warps):
    padded = -(-head_dim // 16) * 16
    possible = candidates(padded, num_warps)
    needs = [config.sliced_k_shared_bytes for config in possible]
    if min(needs) > limit:
        with pytest.raises(ValueError) as refusal:
            choose_tiles(head_dim, limit, num_warps)
        for part in (f"head_dim={head_dim}", f"num_warps={num_warps}", min(needs), limit):
            assert str(part) in str(refusal.value)
        return
    config = choose_tiles(head_dim, limit, num_warps)
    assert config == choose_tiles(head_dim, limit, num_warps)
    assert config.num_warps == num_warps and config.head_dim == padded >= head_dim
    assert max(config.split_q_shared_bytes, config.sliced_k_shared_bytes) <= limit
    twice = [c for c in possible if 2 * (c.sliced_k_shared_bytes + KIB) <= limit + KIB]
    fitting = twice or [c for c in possible if c.sliced_k_shared_bytes <= limit]
    assert config in fitting
    assert config.block_m * config.block_n == max(c.block_m * c.block_n for c in fitting)


@limits
def test_tiles_for_every_head_dim(limit):
    for head_dim in range(1, 257):
        check_choice(head_dim, limit, num_warps=4)


@limits
@warps
def test_tiles_for_every_number_of_warps(num_warps, limit):
    for head_dim in range(16, 257, 16):
        check_choice(head_dim, limit, num_warps)


@limits
def test_four_warps_always_fit(limit):
    assert all(choose_tiles(head_dim, limit) for head_dim in range(1, 257))


@limits
def test_two_blocks_fit_a_multiprocessor_with_what_cuda_reserves(limit):
    """CUDA keeps 1 KiB for each block; a multiprocessor has 1 KiB more than a block may ask for."""
    for head_dim in range(16, 257, 16):
        config = choose_tiles(head_dim, limit)
        if 2 * config.sliced_k_shared_bytes <= limit:
            assert 2 * (config.sliced_k_shared_bytes + KIB) <= limit + KIB, config


def test_tiles_grow_with_the_device():
    tiles = [str(choose_tiles(64, limit)) for limit in LIMITS.values()]
    assert tiles == ["d64_m32_n16_w4", "d64_m64_n16_w4", "d64_m64_n64_w4", "d64_m64_n64_w4"]


@pytest.mark.parametrize(
    ("head_dim", "num_warps", "field"),
    [(0, 4, "head_dim"), (257, 4, "head_dim"), (64, 9, "num_warps"), (64, 0, "num_warps")],
)
def test_a_choice_nobody_can_have_is_refused(head_dim, num_warps, field):
    with pytest.raises(ValueError, match=f"{field}="):
        choose_tiles(head_dim, 99 * KIB, num_warps)


# Tiles of the tensor-core rungs.


@st.composite
def legal_tensor_core_fields(draw):
    """Fields that construct; a sliced-K tile has as many rows as its threads sum at a time."""
    num_warps, sliced_k = draw(st.sampled_from([2, 4, 6, 8])), draw(st.booleans())
    head_dim = draw(st.integers(1, 256))
    line_cols = 32 if -(-head_dim // 32) % 2 else 64
    rows = math.lcm(16, 128 * num_warps // line_cols) if sliced_k else 16 * num_warps
    cols = 16 * num_warps if sliced_k else 16
    return {
        "head_dim": head_dim,
        "block_m": rows * draw(st.integers(1, 4)),
        "block_n": cols * draw(st.integers(1, 4)),
        "num_warps": num_warps,
        "turing": draw(st.booleans()),
        "sliced_k": sliced_k,
    }


@given(legal_tensor_core_fields())
def test_what_lanes_own_makes_up_the_tiles_of_tensor_cores(fields):
    config = TensorCoreConfig(**fields)
    assert 0 <= config.padded_dim - config.head_dim < 32 and config.padded_dim % 32 == 0
    assert config.num_lines * config.line_cols == config.padded_dim
    assert config.num_lines * config.line_fragments * 16 == config.padded_dim
    assert config.line_chunks == (8 if config.padded_dim % 64 == 0 else 4)
    slices = (1, config.num_warps) if config.sliced_k else (config.num_warps, 1)
    elements = config.sliced_k_elements if config.sliced_k else config.split_q_elements
    rows, cols, out_cols = elements
    assert (8 * rows * slices[0], 4 * cols * slices[1]) == (config.block_m, config.block_n)
    assert 4 * out_cols == config.padded_dim
    if config.sliced_k:
        own_rows, step = config.owned_rows
        assert own_rows * step == config.block_m
        assert step * config.line_cols == 4 * config.num_threads
    tiles = (1 + config.sliced_k) * config.block_m + 2 * config.block_n
    assert config.shared_bytes >= 2 * tiles * config.padded_dim


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 257}, "head_dim"),
        ({"num_warps": 0}, "num_warps"),
        ({"num_warps": 3}, "num_warps"),
        ({"num_warps": 9}, "num_warps"),
        ({"block_m": 32}, "block_m"),
        ({"block_m": 0}, "block_m"),
        ({"block_n": 24}, "block_n"),
        ({"block_n": 16, "block_m": 16, "sliced_k": True}, "block_n"),
        ({"block_m": 64.0}, "block_m"),
        ({"turing": 1}, "turing"),
        ({"sliced_k": None}, "sliced_k"),
    ],
    ids=str,
)
def test_illegal_tiles_of_tensor_cores_are_refused_by_field_and_value(changes, field):
    fields = {"head_dim": 64, "block_m": 64, "block_n": 64} | changes
    with pytest.raises(ValueError, match=re.escape(f"{field}={fields[field]!r}: must be ")):
        TensorCoreConfig(**fields)


def test_tensor_core_configurations_are_values():
    config = TensorCoreConfig(40, 64, 32)
    assert config == TensorCoreConfig(40, 64, 32, 4, turing=False, sliced_k=False)
    assert hash(config) == hash(TensorCoreConfig(40, 64, 32))
    assert str(config) == "d40_m64_n32_w4"
    assert str(TensorCoreConfig(40, 64, 32, turing=True)) == "d40_m64_n32_w4_sm75"


@pytest.mark.parametrize("choose", [choose_split_q_tiles, choose_sliced_k_tiles])
@pytest.mark.parametrize("capability", SHARED_BYTES_PER_BLOCK, ids=str)
def test_chosen_tiles_of_tensor_cores_fit(capability, choose):
    limits = DeviceLimits(capability, SHARED_BYTES_PER_BLOCK[capability])
    for head_dim in range(1, 257):
        try:
            config = choose(head_dim, limits)
        except ArgumentError as refusal:
            assert capability == (7, 5) and choose is choose_sliced_k_tiles and head_dim > 128
            assert "use another rung" in str(refusal)
            continue
        assert config.shared_bytes <= limits.shared_bytes_per_block
        assert config.head_dim == head_dim
        assert config.turing == (capability == (7, 5))
        assert config.sliced_k == (choose is choose_sliced_k_tiles)


def test_two_blocks_share_a_multiprocessor_where_the_rows_allow_it():
    """Registers hold 32 rows a warp up to head dim 128, shared memory then two blocks."""
    for capability, size in SHARED_BYTES_PER_BLOCK.items():
        limits = DeviceLimits(capability, size)
        for head_dim in range(1, 257):
            config = choose_split_q_tiles(head_dim, limits)
            assert config.block_m == (128 if head_dim <= 128 else 64)
            smallest = replace(config, block_n=32)
            if 2 * (smallest.shared_bytes + KIB) <= size + KIB:
                assert 2 * (config.shared_bytes + KIB) <= size + KIB

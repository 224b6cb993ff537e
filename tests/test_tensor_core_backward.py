"""The tensor-core backward pass against exact gradients: shapes, copies, order, sm_75, mutations.

A mutation replaces a piece of text in a kernel or in one of the modules its verbs come from. The
module is executed again with it, and so are those that import it, under their own file names.
"""

from dataclasses import replace

import numpy as np
import pytest

from fa2_numba import ArgumentError, Simulator
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.kernels import fa2_tensor_core_backward
from fa2_numba.launch import SimulatorMachine
from fa2_numba.simulator import AsyncCopyError, OutOfBoundsError, RaceError
from fa2_numba.tensor_core_backward_config import BackwardConfig, choose_backward_tiles
from fa2_numba.tensor_core_plan import copy_bytes
from fa2_numba.testing import assert_gradients, poisoned_rows, random_qkv

from .conftest import DTYPES, FAST_SIMULATOR, SIMULATOR, mutated, run_backward
from .test_compile import ARCHITECTURES, limits_of
from .test_tensor_core import padded, shifted

TURING = (7, 5)
DETERMINISTIC = pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "repeats"])
sweep = pytest.mark.sweep


def small(head_dim, **options):
    """The smallest tiles whose warps only split the keys."""
    return BackwardConfig(head_dim, 32, 32, 2, 2, 16, **options)


def gradient_of(qkv, seed=7):
    """Draw dout, like q."""
    q = qkv[0]
    return np.random.default_rng(seed).standard_normal(q.shape).astype(q.dtype)


def differentiate(
    qkv, dout, simulator=FAST_SIMULATOR, causal=False, module=fa2_tensor_core_backward, **options
):
    config = options.pop("config", None) or small(qkv[0].shape[-1])
    *gradients, _ = run_backward(
        module.plan_backward, qkv, dout, config, simulator, causal, **options
    )
    return gradients


def check(qkv, simulator=FAST_SIMULATOR, causal=False, dout=None, **options):
    dout = gradient_of(qkv) if dout is None else dout
    gradients = differentiate(qkv, dout, simulator, causal, **options)
    scale = {name: options[name] for name in ("softmax_scale",) if name in options}
    assert [x.dtype for x in gradients] == [x.dtype for x in qkv]
    assert_gradients(*gradients, dout, *qkv, causal=causal, **scale)
    return gradients


def same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16))


# Shapes.

SHAPES = {
    "Lq96-Lk96-d32": (1, 96, 96, 1, 1, 32, False),
    "Lq65-Lk65-d32-causal": (1, 65, 65, 1, 1, 32, True),
    "Lq20-Lk70-d32-causal": (1, 20, 70, 1, 1, 32, True),
    # The first query tile sees no key, nor do the first rows of the second.
    "Lq70-Lk20-d32-causal": (1, 70, 20, 1, 1, 32, True),
    "H6-Hk2-Lq17-Lk17-d16": (1, 17, 17, 6, 2, 16, False),
    "B2-H3-Hk1-Lq5-Lk35-d8-causal": (2, 5, 35, 3, 1, 8, True),
    "Lq1-Lk1-d16": (1, 1, 1, 1, 1, 16, False),
    "Lq1-Lk33-d16-causal": (1, 1, 33, 1, 1, 16, True),
    "Lq33-Lk1-d16": (1, 33, 1, 1, 1, 16, False),
}
IN_SWEEP = {
    *(("Lq65-Lk65-d32-causal", True), ("Lq20-Lk70-d32-causal", True)),
    *(("Lq96-Lk96-d32", True), ("Lq33-Lk1-d16", True), ("Lq1-Lk1-d16", True)),
    *(("H6-Hk2-Lq17-Lk17-d16", True), ("B2-H3-Hk1-Lq5-Lk35-d8-causal", True)),
}


@pytest.mark.parametrize(
    ("shape", "deterministic"),
    [
        pytest.param(
            shape,
            deterministic,
            id=shape + "-repeats" * deterministic,
            marks=sweep if (shape, deterministic) in IN_SWEEP else (),
        )
        for shape in SHAPES
        for deterministic in (False, True)
    ],
)
def test_shapes(shape, deterministic):
    *sizes, causal = SHAPES[shape]
    dtype = "bfloat16" if causal and deterministic else "float16"
    check(
        random_qkv(*sizes, DTYPES[dtype], seed=1),
        causal=causal,
        deterministic=deterministic,
    )


@DETERMINISTIC
@pytest.mark.parametrize("head_dim", [1, 33, 40, pytest.param(72, marks=sweep)])
def test_head_dims(head_dim, deterministic):
    qkv = random_qkv(1, 19, 21, 1, 1, head_dim, np.float16, seed=head_dim)
    check(qkv, causal=True, deterministic=deterministic)


WIDE = {
    "d72": BackwardConfig(72, 32, 32, 2, 2, 16),
    "d128-2-query-warps": BackwardConfig(128, 64, 32, 4, 2, 32),
    "d128-2-query-warps-2-steps": BackwardConfig(128, 64, 32, 4, 2, 16, stages=1),
    "d256-4-query-warps": BackwardConfig(256, 64, 32, 8, 2, 16),
    "d256-4-query-warps-1-stage": BackwardConfig(256, 64, 32, 8, 2, 16, stages=1),
    "d128-4-query-warps-1-key-warp": BackwardConfig(100, 64, 16, 2, 1, 32),
    "d64-two-fragments-of-keys": BackwardConfig(64, 32, 64, 2, 2, 32),
    "d64-m64": BackwardConfig(64, 64, 32, 2, 2, 64, stages=1),
    "d64-4-key-warps": BackwardConfig(50, 64, 64, 4, 4, 32),
    "d64-8-key-warps": BackwardConfig(64, 32, 128, 8, 8, 32),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            id=f"{name}-{dtype}",
            marks=sweep if number in (2, 3, 5, 8, 9) or number % 2 == (dtype == "float16") else (),
        )
        for number, name in enumerate(WIDE)
        for dtype in ("float16", "bfloat16")
    ],
)
def test_tiles(name, dtype):
    config = WIDE[name]
    wide = config.head_dim > 128
    sizes = (33, 20) if wide else (70, 37)
    qkv = random_qkv(1, *sizes, 1, 1, config.head_dim, DTYPES[dtype], seed=2)
    check(qkv, causal=not wide, config=config)


@sweep
@DETERMINISTIC
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 128)])
def test_the_tiles_of_a_large_device(dtype, head_dim, causal, deterministic):
    config = choose_backward_tiles(head_dim, limits_of("sm_90a"))
    qkv = random_qkv(1, 70, 150, 2, 1, head_dim, DTYPES[dtype], seed=3)
    check(qkv, causal=causal, config=config, deterministic=deterministic)


@sweep
@DETERMINISTIC
def test_head_dim_256_with_the_tiles_of_a_large_device(deterministic):
    config = choose_backward_tiles(256, limits_of("sm_90a"))
    qkv = random_qkv(1, 70, 70, 1, 1, 256, np.float16, seed=3)
    check(qkv, causal=True, config=config, deterministic=deterministic)


@DETERMINISTIC
@pytest.mark.parametrize("stages", [1, 2])
def test_with_all_checks_of_the_simulator(stages, deterministic):
    qkv = random_qkv(1, 40, 34, 2, 1, 20, np.float16, seed=4)
    config = small(20, stages=stages)
    check(qkv, SIMULATOR, causal=True, config=config, deterministic=deterministic)


def test_warps_that_share_keys_with_all_checks_of_the_simulator():
    qkv = random_qkv(1, 33, 20, 1, 1, 128, np.float16, seed=4)
    check(qkv, SIMULATOR, causal=False, config=WIDE["d128-2-query-warps"])


# Numbers.


@DETERMINISTIC
def test_rows_that_see_nothing_contribute_exact_zeros(deterministic):
    qkv = random_qkv(1, 40, 7, 1, 1, 16, np.float16, seed=5)
    dout = gradient_of(qkv)
    dq, dk, dv = check(qkv, causal=True, dout=dout, deterministic=deterministic)
    blind = 40 - 7
    assert not dq[:, :blind].any() and dq[:, blind + 1 :].all()
    dout[:, :blind] *= 1000
    others = differentiate(qkv, dout, causal=True, deterministic=deterministic)
    same_bits(others[1:], (dk, dv))


@DETERMINISTIC
@pytest.mark.parametrize("softmax_scale", [-0.3, 0.0, 2.0])
def test_any_scale(softmax_scale, deterministic):
    qkv = random_qkv(1, 19, 37, 1, 1, 40, np.float16, seed=6)
    options = {"deterministic": deterministic, "softmax_scale": softmax_scale}
    dq, dk, _ = check(qkv, causal=True, **options)
    if softmax_scale == 0:
        assert not dq.any() and not dk.any()


# Memory.


def backwards(x):
    return x[:, ::-1].copy()[:, ::-1]


LAYOUTS = {
    "shifted-by-8-bytes": (32, shifted(4), 8),
    "shifted-by-4-bytes": (32, shifted(2), 4),
    "shifted-by-2-bytes": (32, shifted(1), 2),
    "rows-36-apart": (32, padded(36), 8),
    "rows-35-apart": (32, padded(35), 2),
    "last-axis-not-last": (32, lambda x: np.moveaxis(np.moveaxis(x, 3, 1).copy(), 1, 3), 2),
    "backwards": (32, backwards, 16),
    "head-first": (32, lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), 16),
    "d40": (40, np.copy, 16),
    "d36": (36, np.copy, 8),
    "d34": (34, np.copy, 4),
    "d33": (33, np.copy, 2),
}
LAYOUTS_IN_DEFAULT_RUN = {
    *((name, False) for name in ("shifted-by-8-bytes", "shifted-by-4-bytes", "backwards", "d33")),
    *((name, True) for name in ("shifted-by-4-bytes", "rows-35-apart")),
    ("last-axis-not-last", False),
}


@pytest.mark.parametrize(
    ("layout", "deterministic"),
    [
        pytest.param(
            name,
            deterministic,
            id=name + "-repeats" * deterministic,
            marks=() if (name, deterministic) in LAYOUTS_IN_DEFAULT_RUN else sweep,
        )
        for name in LAYOUTS
        for deterministic in (False, True)
    ],
)
def test_every_layout_is_copied_in_the_widest_pieces_and_gives_the_same_bits(layout, deterministic):
    head_dim, lay_out, width = LAYOUTS[layout]
    qkv = [x.copy() for x in random_qkv(1, 19, 37, 1, 1, head_dim, np.float16, seed=1)]
    dout = gradient_of(qkv)
    views, dout_view = [lay_out(x) for x in qkv], lay_out(dout)
    assert copy_bytes([*views, dout_view], small(head_dim)) == width
    options = {"causal": True, "deterministic": deterministic}
    simulator = SIMULATOR if not deterministic else FAST_SIMULATOR
    got = differentiate(views, dout_view, simulator, **options)
    assert_gradients(*got, dout, *qkv, causal=True)
    if not layout.startswith("d"):
        expected = differentiate(qkv, dout, **options)
        same_bits(got if deterministic else got[1:], expected if deterministic else expected[1:])


@pytest.mark.parametrize("laid_out", [shifted(1), shifted(4), backwards], ids=["2", "8", "back"])
@DETERMINISTIC
def test_gradients_of_any_layout_are_stored(laid_out, deterministic, monkeypatch):
    qkv = random_qkv(1, 19, 21, 1, 1, 32, np.float16, seed=2)
    made = []

    def poisoned_view(shape, dtype):
        x = np.full(shape, np.nan, dtype)
        made.append(laid_out(x) if len(shape) == 4 else x)
        return made[-1]

    monkeypatch.setattr("tests.conftest.poisoned", poisoned_view)
    check(qkv, causal=True, deterministic=deterministic)
    assert sum(x.ndim == 4 for x in made) == 3


@DETERMINISTIC
def test_padding_never_leaks(deterministic):
    """Rows past the end may hold anything."""
    qkv = random_qkv(1, 9, 10, 1, 1, 24, np.float16, seed=8)
    dout = gradient_of(qkv)
    expected = check(qkv, dout=dout, deterministic=deterministic)
    for poison in (np.nan, np.inf):
        *dirty, dirty_dout = (poisoned_rows(x, 40, poison) for x in (*qkv, dout))
        got = differentiate(dirty, dirty_dout, deterministic=deterministic)
        same_bits(got, expected)


# Order.


def test_gradients_repeat_bit_for_bit():
    """dK and dV always, and whichever way dQ is computed; dQ where it must."""
    qkv = random_qkv(1, 40, 34, 1, 1, 16, np.float16, seed=10)
    dout = gradient_of(qkv)

    def run(seed, deterministic):
        simulator = Simulator(seed=seed, checks=False, progress=False)
        return differentiate(qkv, dout, simulator, causal=True, deterministic=deterministic)

    first = run(None, True)
    same_bits(run(1, True), first)
    for seed in (None, 2):
        same_bits(run(seed, False)[1:], first[1:])


# sm_75: other instructions, no bfloat16.


@pytest.mark.parametrize(
    ("head_dim", "heads", "causal", "deterministic"),
    [(40, 2, True, False), (33, 1, False, True), (128, 1, True, False)],
)
def test_the_instructions_of_turing(head_dim, heads, causal, deterministic):
    checks = head_dim == 33
    simulator = Simulator(seed=2, checks=checks, compute_capability=TURING, progress=False)
    qkv = random_qkv(1, 33, 23, heads, 1, head_dim, np.float16, seed=7)
    config = small(head_dim, turing=True, stages=1)
    if head_dim == 128:
        config = choose_backward_tiles(128, SimulatorMachine(simulator).limits)
    check(qkv, simulator, causal, config=config, deterministic=deterministic)


def test_a_turing_device_gets_tiles_for_turing_or_the_reason_why_not():
    limits = SimulatorMachine(Simulator(compute_capability=TURING)).limits
    assert all(choose_backward_tiles(d, limits).turing for d in range(1, 129))
    for head_dim in range(129, 257):
        reason = f"head_dim={head_dim}: the smallest tiles need .* shared memory, .* another rung"
        with pytest.raises(ArgumentError, match=reason):
            choose_backward_tiles(head_dim, limits)


# Tiles.

ILLEGAL = {
    "head_dim": [(0, "1 to 256"), (257, "1 to 256"), (64.0, "an integer"), ("64", "an integer")],
    "block_m": [
        *((size, "32 or 64: one swizzled line") for size in (0, 16, 48, 128, -32)),
        (None, "an integer"),
    ],
    "num_warps": [(n, "2, 4 or 8, and at most padded_dim / 8") for n in (0, 1, 3, 16)],
    "key_warps": [
        *((n, "a divisor that leaves each warp whole lines of columns") for n in (0, -2, 3, 8)),
        # 64 columns among four warps leave a quarter of a line to each.
        (1, "a divisor that leaves each warp whole lines of columns"),
    ],
    "block_n": [(n, "a positive multiple of 16 x key_warps") for n in (0, -64, 16, 32, 65)],
    "query_step": [
        (n, "16, 32 or 64, a divisor of a warp's queries") for n in (0, 8, 48, 128, -16)
    ],
    "stages": [(0, "1 or 2"), (3, "1 or 2"), (1.5, "an integer")],
    "turing": [(1, "True or False"), ("sm_75", "True or False"), (None, "True or False")],
}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [(field, value, rule) for field, faults in ILLEGAL.items() for value, rule in faults],
)
def test_an_illegal_field_is_named_with_its_value_and_the_rule(field, value, rule):
    legal = BackwardConfig(64, 64, 64, 4, 4, 32)
    with pytest.raises(ValueError) as caught:
        replace(legal, **{field: value})
    assert str(caught.value) == f"{field}={value!r}: must be {rule}"


def test_every_warp_has_whole_fragments_of_dq():
    assert BackwardConfig(33, 32, 128, 8, 8, 16).query_gradient == (16, 16)
    with pytest.raises(ValueError, match="num_warps=8: must be .* at most padded_dim / 8"):
        BackwardConfig(32, 32, 128, 8, 8, 16)


def test_a_warp_with_part_of_the_queries_has_fewer_of_them_at_a_time():
    assert BackwardConfig(128, 32, 32, 4, 2, 16).queries_of_a_warp == 16
    with pytest.raises(ValueError, match="query_step=32: must be 16, 32 or 64, a divisor of a"):
        BackwardConfig(128, 32, 32, 4, 2, 32)


@pytest.mark.parametrize(
    ("head_dim", "columns"), [(1, 32), (32, 32), (33, 64), (65, 128), (129, 256), (256, 256)]
)
def test_tiles_are_padded(head_dim, columns):
    assert BackwardConfig(head_dim, 32, 32, 2, 2, 16).padded_dim == columns


LARGE = {
    32: "d32_m64_n128_w4x1: 2 stages, 66560 bytes",
    64: "d64_m64_n128_w4x1: 2 stages, 99328 bytes",
    128: "d128_m64_n128_w4x2: 2 stages, 164864 bytes",
    256: "d256_m64_n64_w2x4: 2 stages, 214016 bytes",
}
CONSUMER = LARGE | {
    128: "d128_m64_n64_w4x2: 1 stages, 82432 bytes",
    256: "d256_m32_n32_w2x2: 1 stages, 69888 bytes",
}
CHOSEN = {
    "sm_75": {
        32: "d32_m64_n64_w4x1_sm75: 1 stages, 33280 bytes",
        64: "d64_m64_n64_w4x1_sm75: 1 stages, 49664 bytes",
        128: "d128_m32_n64_w4x2_sm75: 1 stages, 57600 bytes",
    },
    "sm_80": LARGE | {256: "d256_m64_n64_w2x4: 1 stages, 147968 bytes"},
    "sm_86": CONSUMER,
    "sm_89": CONSUMER,
    "sm_90a": LARGE,
    "sm_100": LARGE,
    "sm_120": CONSUMER,
}
"""Architecture -> padded head dim -> its tiles, stages, and bytes of shared memory."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiles_of_an_architecture(architecture):
    limits = limits_of(architecture)
    for widest, expected in CHOSEN[architecture].items():
        config = choose_backward_tiles(widest, limits)
        assert f"{config}: {config.stages} stages, {config.shared_bytes} bytes" == expected
        for head_dim in range(widest // 2 + 1, widest + 1):
            assert choose_backward_tiles(head_dim, limits) == replace(config, head_dim=head_dim)


@pytest.mark.parametrize("capability", SHARED_BYTES_PER_BLOCK, ids=str)
def test_the_kernel_of_dq_alone_fits_too(capability):
    limits = SimulatorMachine(Simulator(compute_capability=capability)).limits
    for head_dim in (32, 64, 128, 256):
        if (capability, head_dim) != (TURING, 256):
            config = choose_backward_tiles(head_dim, limits)
            assert config.query_parallel_shared_bytes <= limits.shared_bytes_per_block


# Mutations.

DEVICE, KERNELS = "fa2_numba.device.", "fa2_numba.kernels."
GRADIENTS = DEVICE + "tensor_core_gradients"
MAIN, PARTS, DQ = (
    KERNELS + "fa2_tensor_core_backward" + suffix for suffix in ("", "_parts", "_dq")
)
MODULES = (
    *(DEVICE + verbs for verbs in ("softmax_base2", "swizzle", "mask", "tensor_core_products")),
    *(DEVICE + "tensor_core_tiles", GRADIENTS, PARTS, DQ, MAIN),
)
"""What is mutated or imports one that is, each behind those it imports."""


def blind_and_grouped():
    """A problem in which each mutation shows: ragged tiles, a group, rows that see no key, NaN."""
    qkv = random_qkv(1, 40, 34, 2, 1, 12, np.float16, seed=11)
    dout = gradient_of(qkv)
    return [poisoned_rows(x, 40) for x in qkv], poisoned_rows(dout, 40)


def check_mutated(module, deterministic):
    qkv, dout = blind_and_grouped()
    check(qkv, causal=True, dout=dout, module=module, deterministic=deterministic)


SUMMED = {
    "mask-shows-one-more": (
        DEVICE + "mask",
        "int32(one_key + seqlen_q - seqlen_k)",
        "int32(one_key - 1 + seqlen_q - seqlen_k)",
    ),
    "mask-hides-one-more": (
        DEVICE + "mask",
        "int32(one_key + seqlen_q - seqlen_k)",
        "int32(one_key + 1 + seqlen_q - seqlen_k)",
    ),
    "mask-left-out": (MAIN, "            if hidden:", "            if False:"),
    "a-row-too-many": (
        DEVICE + "tensor_core_tiles",
        "int32(i) < rows_left",
        "int32(i) <= rows_left",
    ),
    "lse-not-used": (GRADIENTS, "-lse_reg[0, 0]", "float32(0.0)"),
    "lse-of-the-neighbour": (GRADIENTS, "-lse_reg[0, 1]", "-lse_reg[0, 0]"),
    "lse-not-to-base-2": (PARTS, "lse * LOG2_E", "lse"),
    "lse-of-blind-rows": (PARTS, "-NEG_INF if lse == NEG_INF else lse", "lse"),
    "D-left-out": (GRADIENTS, "(dP_reg[i, j] - D_reg[0, 0])", "dP_reg[i, j]"),
    "D-in-place-of-lse": (GRADIENTS, "FLOAT_BYTES + D_OFFSET", "FLOAT_BYTES"),
    "D-of-one-lane": (PARTS, "total = sum_over_lanes(total)", "pass"),
    "D-of-half-the-columns": (PARTS, "total += o_reg[0, 1] * do_reg[0, 1]", "pass"),
    "dP-not-P": (GRADIENTS, "low = P_reg[i, j] * ", "low = dP_reg[i, j] * "),
    "dK-not-scaled": (MAIN, "scale_rows(dK_reg, softmax_scale)", "pass"),
    "dV-scaled": (MAIN, "scale_rows(dK_reg, softmax_scale)", "scale_rows(dV_reg, softmax_scale)"),
    "dV-not-cleared": (MAIN, "clear_rows(dV_reg)", "pass"),
    "dQ-not-scaled": (PARTS, "even_reg[0, e] * softmax_scale", "even_reg[0, e]"),
    "dQ-half-cleared": (PARTS, "for half in range(2)", "for half in range(1)"),
    "dQ-of-one-warp-for-all": (GRADIENTS, "int32(warp * PART_BYTES)", "int32(0)"),
    "dQ-of-another-tile": (MAIN, "int64(tile) * TILE_BYTES", "int64(0) * TILE_BYTES"),
    "dQ-not-cleared-for-a-visit": (GRADIENTS, "clear(dQ_reg)", "pass"),
    "dV-of-Q": (MAIN, "dtype, (0, DO_OFFSET))", "dtype, (0, 0))"),
    "dK-of-P": (MAIN, "dtype, (config.score_bytes, 0))", "dtype, (0, 0))"),
    "dP-of-Q": (MAIN, "behind = V_OFFSET, DO_OFFSET", "behind = V_OFFSET, 0"),
    "dP-of-K": (MAIN, "behind = V_OFFSET, DO_OFFSET", "behind = 0, DO_OFFSET"),
    "one-head-of-the-group": (MAIN, "range(group * (m_blocks", "range(1 * (m_blocks"),
    "first-visit-off-by-one": (MAIN, ", 0) // BLOCK_M)", ", 0) // BLOCK_M + 1)"),
    "Q-of-the-first-head": (MAIN, "Q_head += Q_gmem.strides[2]", "pass"),
    "dO-of-the-first-head": (MAIN, "dO_head += dO_gmem.strides[2]", "pass"),
    "next-head-from-its-first-tile": (MAIN, "first_block, tile + first_block", "first_block, tile"),
    "dO-or-Q-not-transposed": (GRADIENTS, "ldmatrix_x4_trans(X_reg", "ldmatrix_x4(X_reg"),
    "dS-not-on-its-side": (GRADIENTS, "ldmatrix_x4_trans(dS_reg", "ldmatrix_x4(dS_reg"),
    "K-not-transposed": (GRADIENTS, "ldmatrix_x4_trans(K_reg", "ldmatrix_x4(K_reg"),
    "P-not-swizzled": (
        GRADIENTS,
        "(P_lane ^ (j // 2 * CHUNK_BYTES))",
        "(P_lane + j // 2 * CHUNK_BYTES)",
    ),
}
REPEATED = {
    "D-left-out": (DQ, "dP_reg[i, j] - D_reg[i]", "dP_reg[i, j]"),
    "lse-not-used": (
        DQ,
        "exponent_scale, -lse_reg[i]))\n                    high",
        "1.0, 0.0))\n                    high",
    ),
    "dQ-not-scaled": (DQ, "dQ_reg[i, c] *= softmax_scale", "pass"),
    "statistics-of-another-tile": (DQ, "int64(tile) * (2 * TILE_ROWS)", "int64(tile) * TILE_ROWS"),
    "statistics-of-another-row": (DQ, "i_row % TILE_ROWS", "0"),
    "mask-left-out": (DQ, "if needs_mask(first_row, first_col, seqlen_q, seqlen_k)", "if False"),
    "dQ-of-V": (
        DQ,
        "accumulate_values(dQ_reg, dS_reg, K_smem)",
        "accumulate_values(dQ_reg, dS_reg, V_smem)",
    ),
    "dP-of-Q": (DQ, "keep_queries(dO_reg, dO_warp)", "keep_queries(dO_reg, Q_warp)"),
}
MUTATIONS_IN_DEFAULT_RUN = {
    *("mask-shows-one-more", "a-row-too-many", "lse-not-used", "D-left-out"),
    *("lse-of-blind-rows", "dK-not-scaled", "dQ-half-cleared", "dK-of-P"),
    *("one-head-of-the-group", "first-visit-off-by-one", "next-head-from-its-first-tile"),
    *("dO-of-the-first-head", "dS-not-on-its-side"),
}
REJECTED = [
    pytest.param(
        *(deterministic, *mutation),
        id="dq-alone-" * deterministic + name,
        marks=() if name in MUTATIONS_IN_DEFAULT_RUN else sweep,
    )
    for deterministic, mutations in ((False, SUMMED), (True, REPEATED))
    for name, mutation in mutations.items()
]


@DETERMINISTIC
def test_without_a_mutation_the_problem_is_solved(deterministic, monkeypatch):
    module = mutated(monkeypatch, MODULES, DEVICE + "mask", "= NEG_INF", "= NEG_INF", 0, 2)
    check_mutated(module, deterministic)


@pytest.mark.parametrize(("deterministic", "where", "old", "new"), REJECTED)
def test_a_mutated_kernel_is_rejected(deterministic, where, old, new, monkeypatch):
    module = mutated(monkeypatch, MODULES, where, old, new)
    with (
        pytest.raises((AssertionError, OutOfBoundsError)) as caught,
        np.errstate(all="ignore"),
    ):
        check_mutated(module, deterministic)
    assert not str(caught.value).startswith("assert")


def run_checked(module, deterministic, stages):
    """One head under all checks of the simulator."""
    qkv = random_qkv(1, 40, 34, 1, 1, 12, np.float16, seed=11)
    options = {"deterministic": deterministic, "config": small(12, stages=stages)}
    simulator = Simulator(seed=1, progress=False)
    return differentiate(qkv, gradient_of(qkv), simulator, causal=True, module=module, **options)


BARRIERS = [
    # In the order of the source: the third is there for one stage alone, and stands in for the
    # fourth.
    *((MAIN, nth, 4, False, 1 if nth == 2 else 2) for nth in range(4)),
    # With one stage the kernel of dQ alone has tiles of 32 keys, and two of them.
    *((DQ, nth, 3, True, 1) for nth in range(3)),
]


@pytest.mark.parametrize(("where", "nth", "count", "deterministic", "stages"), BARRIERS)
def test_without_any_one_barrier_there_is_a_race(
    where, nth, count, deterministic, stages, monkeypatch
):
    module = mutated(monkeypatch, MODULES, where, "cuda.syncthreads()", "pass", nth, count)
    with pytest.raises((RaceError, AsyncCopyError)):
        run_checked(module, deterministic, stages)


@pytest.mark.parametrize(("where", "deterministic"), [(MAIN, False), (DQ, True)])
def test_without_a_wait_a_copy_is_read_too_early(where, deterministic, monkeypatch):
    text = "            await_copies()"
    module = mutated(monkeypatch, MODULES, where, text, "            pass")
    with pytest.raises(AsyncCopyError):
        run_checked(module, deterministic, stages=2)


def test_the_next_tiles_need_a_place_of_their_own(monkeypatch):
    module = mutated(monkeypatch, MODULES, MAIN, "+ STAGE_BYTES - stage)", "- stage)")
    with pytest.raises((RaceError, AsyncCopyError)):
        run_checked(module, False, stages=2)

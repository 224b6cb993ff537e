# %% [markdown]
# # 05. FA2, step 1: which FLOPs are not matmul?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | count the FLOPs of a kernel by kind; weigh them as a GPU does; move the normalisation of O out of the loop |
# | You need | lessons 02 (online softmax) and 04 (FlashAttention-1) |
# | Minutes | 40 |
# | Symbols | N; D; S, P, O; m, l and lse of a row; W warps of a block; BLOCK_N keys of a tile |
#
# All tiled attention so far computes the same two products, S = Q Kᵀ and O = P V. What differs is the rest:
# scaling, maxima, exponentials, sums, divisions. FlashAttention-2 begins with the rest. This lesson
# counts it, asks what it costs, and takes away a part of it. It also shows how small that part is.

# %% tags=["setup"]
import math

import numpy as np
from numba import cuda, float32

from fa2_numba import simulate
from fa2_numba.config import TileConfig
from fa2_numba.constants import NEG_INF
from fa2_numba.device.fa1_passes import merge_statistics
from fa2_numba.kernels import fa2_fewer_flops
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.flops import (
    draw_costs,
    draw_other_flops,
    first_fewer,
    predicted,
    simulated,
)
from fa2_numba.lessons.figures.textbook_roofline import recorded
from fa2_numba.lessons.kernels.normalise import normalise_always, score_keys
from fa2_numba.lessons.kernels.tiled import HEAD_DIM, KEYS, load_rows
from fa2_numba.lessons.show import show_source
from fa2_numba.problem import Problem
from fa2_numba.rung_diff import diff_rungs
from fa2_numba.testing import assert_attention
from fa2_numba.traffic import predict

# %% [markdown]
# A *matmul FLOP* is an addition or a multiplication of one of the two products. A GPU has tensor cores for
# those, and only for those. All other operations go to its ordinary float32 units, which are slower. For an
# A100 (data sheet, 10^12 a second):

# %%
A100_MATMUL, A100_FLOAT32 = 312.0, 19.5  # float16 products; float32 without tensor cores
weight = A100_MATMUL / A100_FLOAT32
print(f"in the time of one other FLOP: {weight:.0f} matmul FLOPs")

# %% [markdown]
# ## Predict
#
# One row of Q meets one tile of 64 keys; D = 64.
#
# 1. How many matmul FLOPs is that, in both products together?
# 2. How many exponentials?
# 3. FlashAttention-1 keeps O divided by l at any time. How many numbers of the row does it have to touch to
#    do so, in every tile?
# 4. 5 % of a kernel's FLOPs are not matmul. Each takes 16 times as long. What part of the time is that?
#
# ## Run it wrong
#
# Slow first. This small kernel has the loops of FlashAttention-2, but does to O what FlashAttention-1 does:
# divide by l, tile after tile.

# %%
show_source(normalise_always, "m_new = max(m", "LSE_gmem")

# %%
rng = np.random.default_rng(0)
Q, K, V = (rng.standard_normal((rows, HEAD_DIM)).astype(np.float32) for rows in (32, 64, 64))
O, LSE = np.full_like(Q, np.nan), np.full(32, np.nan, np.float32)
scale = np.float32(HEAD_DIM**-0.5)
slow = simulate(normalise_always, progress=False)[1, 32](Q, K, V, O, LSE, scale)
assert_attention(*(O[None, :, None], LSE[None, None]), *(x[None, :, None] for x in (Q, K, V)))
for kind in ("matmul_flops", "other_flops", "divisions", "special_calls"):
    print(f"{kind:13} {getattr(slow, kind):6,}")

# %% [markdown]
# The answer is right. Of the other FLOPs, so many are divisions (the report counts `exp` and `log` apart, as
# `special_calls`):

# %%
tiles = 64 // KEYS
assert slow.divisions == 32 * HEAD_DIM * tiles
print(f"{slow.divisions / slow.other_flops:.0%}: one for each number of O in each of {tiles} tiles")

# %% [markdown]
# One for each number of O, after the last tile, would do.
#
# Where there is a GPU, the very same kernel runs there, and agrees:

# %%
if cuda.is_available():
    on_gpu = [
        cuda.to_device(x) for x in (Q, K, V, np.full_like(O, np.nan), np.full_like(LSE, np.nan))
    ]
    normalise_always[1, 32](*on_gpu, scale)
    found = on_gpu[3].copy_to_host()[None, :, None], on_gpu[4].copy_to_host()[None, None]
    assert_attention(*found, *(x[None, :, None] for x in (Q, K, V)))
    print("The GPU agrees with the simulator.")

# %% [markdown]
# ## Look
#
# Now the rungs of the ladder. What FlashAttention-1, FlashAttention-2's first step, and (for later) its last
# one do for each score, that is for each pair of a query and a key, at 4,096 keys. Left as counted; right,
# everything that is not matmul counts 16 times.

# %%
tile = TileConfig(head_dim=64, block_m=64, block_n=64)
rungs = ("fa1_sliced_k", "fa2_fewer_flops")
costs = {rung: predicted(rung, 4096, tile) for rung in (*rungs, "fa2_split_q")}
draw_costs(costs, weight, "4,096 keys, head dim 64, tiles of 64 x 64, no mask")

# %% [markdown]
# For your prediction: a score costs 2 D FLOPs in S and as many in P V, so 64 of them 4 x 64 x 64 = 16,384, and one
# exponential each. All 64 numbers of the row of O have to be touched. And 5 % at 16 times the
# price are 0.05 x 16 / (0.95 + 0.05 x 16) = 46 % of the time: the sliver on the left is almost half on the right.
# **An exp or a division costs 16 matmul FLOPs.**
#
# In truth 16 is the least. The 19.5 count a multiply-add as two operations; a lone addition takes as long as
# one. And an exp goes to special units, of which an A100's multiprocessor has 16, beside 64 float32 lanes:

# %%
float32_lanes, special_units = 64, 16  # results a clock: CUDA C++ Programming Guide
addition = 2 * weight
print(f"an addition: {addition:.0f} matmul FLOPs")
print(f"an exp:      {addition * float32_lanes / special_units:.0f} matmul FLOPs")

# %% [markdown]
# The numbers come from closed forms (`fa2_numba/traffic.py`), which tests hold equal to what the simulator
# counts. Here they are over the number of keys, with two simulated runs of each rung beside them:

# %%
small = TileConfig(head_dim=64, block_m=16, block_n=64)
lengths = [64 * n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)]
runs = {rung: {keys: simulated(rung, keys, small) for keys in (64, 256)} for rung in rungs}
assert all(
    run == predicted(rung, keys, small)
    for rung, by_keys in runs.items()
    for keys, run in by_keys.items()
)
draw_other_flops(rungs, lengths, small, runs)

# %%
keys, ratio = first_fewer(rungs, lengths, tile)
print(f"FA2's first step needs fewer other FLOPs from {keys} keys on: {ratio - 1:.1%} there")
for keys in (64, 512, 4096):
    before, after = (predicted(rung, keys, tile).other for rung in rungs)
    print(f"{keys:5,} keys: {before:.2f} -> {after:.2f} for each score, {after / before - 1:+.1%}")

# %% [markdown]
# So the step called "fewer FLOPs" has more of them on short sequences, and 8 % fewer on long ones. Why?
#
# ## Understand
#
# What changed, side by side:

# %%
diff_rungs(*rungs)

# %% [markdown]
# Three things, all of the same idea:
#
# - *The loops are swapped.* Query tiles outside, key tiles inside. A query tile's m, l and O now stay on the
#   chip until they are finished (lesson 04 drew it).
# - *O waits unscaled.* What is kept is not O but O times l, a plain sum. A new maximum rescales it by one
#   factor, exp(m_old - m). FlashAttention-1 needed two for its weighted average, the share of what was there
#   and the share of what is new, and two divisions a row and tile to make them:

# %%
show_source(merge_statistics, "m_new = max")

# %%
show_source(fa2_fewer_flops.make_forward, "rescale = math.exp", "l_reg[i] = rescale")

# %% [markdown]
# - *One number a row is left, not two.* A backward pass needs exp(S - m) / l. That is exp(S - lse) with
#   lse = m + ln l, so m and l need not both be kept.
#
# Why may the division wait, and the maximum not? Both are factors of a whole row. But a sum does not care
# when it is divided, while exp(S) without its maximum does not fit into a float32:

# %%
with np.errstate(over="ignore"):
    print(np.exp(np.float32([88, 89])))

# %% [markdown]
# Now the balance, for a row and a tile of keys, from the docstrings of the two kernels. Each number of O is put
# together from W parts, one a warp. That takes W - 1 additions, and then
#
# | | each number of O | at the end, once a row |
# |---|---|---|
# | `fa1_sliced_k` | 3 more: both parts scaled, and added (1 in the first tile) | |
# | `fa2_fewer_flops` | 2 more: the old part scaled, and added | D products, and 16 threads that each sum W parts of l and divide |
#
# One of W + 2 operations saved; the price is paid once. The statistics differ a little, too: each warp now
# keeps an l of its own. Together, for each row:

# %%
D, W = tile.head_dim, tile.num_warps
saved, paid = D - 2 * W + 6, 3 * D + 16 * W
for keys in lengths:
    before, after = (predict(rung, Problem(1, 1, 1, 64, keys, D), tile) for rung in rungs)
    assert before.other_flops - after.other_flops == 64 * (saved * keys // 64 - paid)
print(f"saved {saved} in each tile, paid {paid} once: even after {paid / saved:.1f} tiles")

# %% [markdown]
# The divisions alone:

# %%
for keys in (64, 512, 4096):
    before, after = (predict(rung, Problem(1, 1, 1, 1, keys, D), tile).divisions for rung in rungs)
    print(f"{keys:5,} keys: {before:3} divisions a row before, {after} after")

# %% [markdown]
# What does a GPU make of it? On tensor cores, each other FLOP weighted 16 times, and on an H200 as measured
# (4 heads of 16,384 tokens, `bench/results/h200`):

# %%
total = {rung: sum(one.weighted(weight).values()) for rung, one in costs.items()}
print(f"weighted 16 times: {total[rungs[1]] / total[rungs[0]] - 1:+.1%}")
ms = {
    record["name"]: record["ms"]
    for record in recorded("ladder")["records"]
    if record["seqlen"] == 16384 and not record["causal"]
}
print(
    f"measured: {ms[rungs[0]]:,.0f} -> {ms[rungs[1]]:,.0f} ms, {ms[rungs[1]] / ms[rungs[0]] - 1:+.0%}"
)

# %% [markdown]
# That is more than FLOPs can explain, and for another reason. These two rungs do not use tensor cores: a step of
# a product is one multiply-add, in the same units as all the rest, so another FLOP weighs 2, not 16.

# %%
on_cuda_cores = {rung: sum(one.weighted(2).values()) for rung, one in costs.items()}
print(f"weighted twice: {on_cuda_cores[rungs[1]] / on_cuda_cores[rungs[0]] - 1:+.1%}")

# %% [markdown]
# What else this rung gains is in the same diff: O, m and l no longer travel to HBM and back with every tile,
# and a tile has one barrier fewer. And much of what is left comes from warps that share rows: W parts of every
# number of O, to be stored and summed. Lesson 07 ends that, and the third bar above shows it:

# %%
change = costs["fa2_split_q"].other / costs["fa2_fewer_flops"].other - 1
print(f"fa2_split_q against fa2_fewer_flops: {change:+.0%} other FLOPs")

# %% [markdown]
# ## Exercise
#
# Write `normalise_last(Q_gmem, K_gmem, V_gmem, O_gmem, LSE_gmem, softmax_scale)`: `normalise_always`
# without the division in the loop. About 12 lines, in two places: inside the loop over tiles of keys, and
# behind it.
#
# Q and O are (seqlen_q, `HEAD_DIM`), K and V (seqlen_k, `HEAD_DIM`), LSE (seqlen_q,), all float32. One block
# computes one head, and a thread owns a row. Loading is given, and so is the row's scores with the tile:
# `S_reg[0]` to `S_reg[keys - 1]`, of which `score_keys` returns the maximum.
#
# Besides O and LSE, the judge counts: at most one division for each number of O, or one 1 / l a row; one exp for
# each score and one for each tile and row; one multiplication and one addition for each number of O in a tile.
# Write a step of a product as `acc += a * b`: so the simulator knows it.
#
# A worked example: one row, 4 keys in two tiles of 2, V of one column (that of lesson 04).
#
# | | scores | V | m | l | `O_reg` |
# |---|---|---|---|---|---|
# | before | | | -inf | 0 | 0 |
# | tile 0 | ln 1, ln 3 | 4, 8 | ln 3 | 1/3 + 1 = 4/3 | 1/3 x 4 + 1 x 8 = 28/3 |
# | tile 1 | ln 4, ln 2 | 10, 2 | ln 4 | 3/4 x 4/3 + 1 + 1/2 = 5/2 | 3/4 x 28/3 + 1 x 10 + 1/2 x 2 = 18 |
# | behind | | | | lse = ln 4 + ln 5/2 = ln 10 | 18 / (5/2) = 7.2 |
#
# Stuck? `hint("05.normalise_last", 1)`, then 2, then 3.


# %% answer="05.normalise_last"
@cuda.jit
def normalise_last(Q_gmem, K_gmem, V_gmem, O_gmem, LSE_gmem, softmax_scale):
    K_smem = cuda.shared.array((KEYS, HEAD_DIM), float32)
    V_smem = cuda.shared.array((KEYS, HEAD_DIM), float32)
    Q_reg = cuda.local.array(HEAD_DIM, float32)
    O_reg = cuda.local.array(HEAD_DIM, float32)
    S_reg = cuda.local.array(KEYS, float32)
    seqlen_q, seqlen_k = Q_gmem.shape[0], K_gmem.shape[0]

    for first_row in range(0, seqlen_q, cuda.blockDim.x):  # FA2 Alg. 1 line 3
        row = first_row + cuda.threadIdx.x
        m, l = NEG_INF, float32(0.0)  # FA2 Alg. 1 line 5
        for d in range(HEAD_DIM):
            O_reg[d] = float32(0.0)
            if row < seqlen_q:
                Q_reg[d] = Q_gmem[row, d]  # FA2 Alg. 1 line 4
        for first_key in range(0, seqlen_k, KEYS):  # FA2 Alg. 1 line 6
            # Slower threads may still read the previous tile.
            cuda.syncthreads()
            load_rows(K_smem, K_gmem, first_key)  # FA2 Alg. 1 line 7
            load_rows(V_smem, V_gmem, first_key)
            # Every thread reads what all have loaded.
            cuda.syncthreads()
            keys = min(KEYS, seqlen_k - first_key)
            if row < seqlen_q:
                # FA2 Alg. 1 line 8
                m_new = max(m, score_keys(S_reg, Q_reg, K_smem, keys, softmax_scale))
                # FA2 Alg. 1 lines 9, 10
                ### BEGIN SOLUTION
                rescale = math.exp(m - m_new)
                l = rescale * l
                for j in range(keys):  # FA2 Alg. 1 line 9
                    S_reg[j] = math.exp(S_reg[j] - m_new)
                    l += S_reg[j]
                for d in range(HEAD_DIM):
                    o = rescale * O_reg[d]
                    for j in range(keys):  # FA2 Alg. 1 line 10
                        o += S_reg[j] * V_smem[j, d]
                    O_reg[d] = o
                m = m_new
                ### END SOLUTION
        if row < seqlen_q:
            # FA2 Alg. 1 lines 12, 13, 14, 15
            ### BEGIN SOLUTION
            for d in range(HEAD_DIM):
                O_gmem[row, d] = O_reg[d] / l
            LSE_gmem[row] = m + math.log(l)
            ### END SOLUTION


# %% check="05.normalise_last"
check("05.normalise_last", normalise_last)

# %% [markdown]
# ## Question
#
# At the end, a kernel can divide each of the D numbers of a row by l, or compute 1 / l once and multiply D times.
# `fa2_fewer_flops` does the second, your kernel perhaps the first. For N = 4,096 keys and D = 64, does the
# choice matter for the time of the whole kernel?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Hardly. It is D operations a row either way, and the row has 4 N D = 1,048,576 matmul FLOPs. Sixty-four divisions
# at 16 matmul FLOPs each are 1,024 of them, 0.1 %; were a division ten times as expensive, 1 %. Inside the loop the
# same choice is made for each of the 64 tiles (of 64 keys). "Yes, because divisions are expensive" looks at
# the price of one and not at how often it is paid: an operation behind the loop is paid once a row, one in the loop
# once a tile, one for each score N times. That order is the order in which to save.
# </details>
#
# ## Further reading
#
# - FlashAttention-2 paper, section 3.1 and Algorithm 1, for both tweaks and the 16.
# - FlashAttention-3 paper, sections 3.1 and 3.2, where exponentials are computed while tensor cores multiply.
# - The docstrings of `fa2_numba/kernels/fa1_sliced_k.py` and `fa2_fewer_flops.py`: all counts in closed form.
# - Before: [04, what does FlashAttention-1 do?](04_flash_attention_1.ipynb). Next: [06, why does one head
#   leave the GPU idle?](06_seq_parallel.ipynb)

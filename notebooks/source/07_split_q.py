# %% [markdown]
# # 07. FA2, step 3: who owns which numbers?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | say which warp holds which rows and keys; count what an exchange costs; turn a sliced-K kernel into split-Q |
# | You need | lessons 02 (merging parts of a row), 03 (barriers) and 06 |
# | Minutes | 45 |
# | Symbols | Q, K, V tiles; S = Q Kᵀ; P = exp(S - m); O, m, l as in lesson 02; a warp, 32 lanes |
#
# Step 1 was about operations, step 2 about blocks. Now we look inside a block: it has four warps, a tile of
# queries and a tile of keys, and S of that tile to share out. There are two ways to cut a matrix:
#
# - **sliced-K**, as FlashAttention-1 does it: each warp takes some *keys*, columns of S, for all queries;
# - **split-Q**, as FlashAttention-2 does it: each warp takes some *queries*, rows of S, for all keys.
#
# Each warp computes as many scores in one as in the other.

# %% tags=["setup"]
import math

import numpy as np
from numba import cuda, float32

from fa2_numba import flash_attn_func
from fa2_numba.config import TileConfig
from fa2_numba.constants import NEG_INF, WARP_SIZE
from fa2_numba.kernels import fa2_seq_parallel, fa2_split_q
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.split_q import split_q_contrast
from fa2_numba.lessons.figures.split_q_film import Film, draw_films, follow_tile
from fa2_numba.lessons.figures.textbook_roofline import recorded
from fa2_numba.lessons.figures.tile_owners import (
    PARTIAL,
    RUNGS,
    SLICED_K,
    SPLIT_Q,
    STATISTICS,
    TILES,
    tile_cost,
)
from fa2_numba.lessons.kernels.partition import (
    HEAD_DIM,
    KEYS,
    ROWS,
    SLICE,
    STRIDE,
    WARP_ROWS,
    WARPS,
    load_rows,
    score,
    sliced_k_attention,
    warp_max,
    warp_sum,
    weighted_values,
)
from fa2_numba.lessons.live import print_milliseconds
from fa2_numba.lessons.show import show_source
from fa2_numba.problem import Problem
from fa2_numba.testing import random_qkv
from fa2_numba.traffic import predict

# %% [markdown]
# ## Predict
#
# A block of four warps, 32 queries, 32 keys, head dim 16, float32.
#
# 1. In sliced-K, how many warps does a row's maximum depend on? And a row of O = P V?
# 2. Registers of one warp cannot be read by another; what has to go through shared memory, and how many
#    bytes are that for a tile of keys?
# 3. In split-Q, what has to go through it besides the tiles of Q, K and V?
# 4. Which of the two reads K and V from shared memory more often?
#
# ## Run it wrong
#
# The slow way first. This is what `fa2_seq_parallel`, the rung of lesson 06, does with a tile: its warps
# slice K. A row's maximum is collected in shared memory, warp by warp:

# %%
show_source(
    fa2_seq_parallel.make_forward, "for i in range(ROWS):  # FA2 Alg. 1 line 9", "update_output("
)

# %% [markdown]
# Four warps, so four partial rows of O for every query, which meet in shared memory. (How they do it stands
# in `fa2_numba/device/sliced_k.py`.) What one more tile of keys costs, counted as a run over two tiles less a
# run over one; so of the tiles it is K and V that are written, for Q has been loaded before:

# %%
sliced = tile_cost(SLICED_K)
print("written to shared memory:", dict(sliced.written))
print("read from shared memory: ", dict(sliced.read))
print("barriers:", sliced.barriers)
assert sliced.written[TILES] == 2 * 32 * 16 * 4  # K and V, keys, head dim, bytes
assert sliced.written[PARTIAL] == 4 * 32 * 16 * 4  # warps, queries, head dim, bytes
assert (
    sliced.written[STATISTICS] == 4 * 32 * 4 + 32 * 4
)  # m of each warp, and a factor for each row

# %% [markdown]
# The exchange writes twice as much as the tiles themselves, and it takes barriers, at which warps wait.
#
# ## Look
#
# Which warp holds what? The picture comes from the registers of all threads, read in the middle of a run
# over inputs whose every score and every output tells its place. (The stripes of "O, the sum": four warps
# share out the adding, two rows at a time.) Below, the bytes of one tile by what they are for:

# %%
split_q_contrast()

# %% [markdown]
# And what happens in shared memory, from barrier to barrier: first when two of four warps have come to one and
# wait (their squares are filled), then when all have. Orange was written since the barrier before. f is the
# factor by which a row of O is rescaled; l stays empty, for its parts meet once, after the last tile.

# %%
films = {name: follow_tile(name) for name in RUNGS}
draw_films(films)

# %% [markdown]
# The same, one stop at a time:

# %%
Film(SLICED_K, films[SLICED_K])

# %%
Film(SPLIT_Q, films[SPLIT_Q])

# %% [markdown]
# ## Understand
#
# - In sliced-K a row of S lies in four warps. So its maximum, its sum and its O are four parts each, which
#   lesson 02 taught to merge; merging needs the parts in one place, and the place is shared memory: write,
#   wait, read, wait.
# - In split-Q a row of S lies in one warp, and so do its m, its l and its row of O. Lanes of a warp read each
#   other's registers by shuffles, without shared memory and without a barrier. **Split Q, and no number
#   crosses warps.** The two barriers that are left stand around the loading of K and V.
# - Nothing is free: each split-Q warp reads all keys and all values of the tile, each sliced-K warp a
#   quarter of them. (In return it reads a quarter of Q, and each sliced-K warp all of it.)

# %%
split = tile_cost(SPLIT_Q)
for name, cost in ((SLICED_K, sliced), (SPLIT_Q, split)):
    print(
        f"{name}: tiles read {cost.read[TILES]:,} bytes, all read {sum(cost.read.values()):,}, "
        f"all written {sum(cost.written.values()):,}, barriers {cost.barriers}"
    )
assert split.read[TILES] > sliced.read[TILES]
assert sum(split.read.values()) < sum(sliced.read.values())
assert split.written[PARTIAL] == split.written[STATISTICS] == 0

# %% [markdown]
# With these small tiles it reads a little less in all, writes a third, and waits half as often. How is it with
# larger ones? Closed forms, which tests hold equal to the simulator's counts, for larger tiles:

# %%
for head_dim, block_n in ((64, 64), (128, 32)):
    tiles = TileConfig(head_dim, block_m=64, block_n=block_n)
    for rung in ("fa2_seq_parallel", "fa2_split_q"):
        one, two = (
            predict(rung, Problem(1, 1, 1, 64, keys, head_dim), tiles)
            for keys in (block_n, 2 * block_n)
        )
        read, written, barriers = (
            getattr(two, name) - getattr(one, name)
            for name in ("shared_load_bytes", "shared_store_bytes", "barriers")
        )
        print(
            f"D = {head_dim:3}, {rung:16} reads {read:7,}, writes {written:7,}, barriers {barriers:2}"
        )

# %% [markdown]
# At D = 64 split-Q reads *more*, and is faster all the same, as you see below: what costs are the writes that
# others wait for, and the barriers, which grow with D as long as O is exchanged. This is the heart of the rung
# `fa2_split_q`; `python -m fa2_numba diff fa2_split_q` shows all that changes.

# %%
show_source(
    fa2_split_q.make_forward, "for i in range(ROWS):  # FA2 Alg. 1 line 9", "accumulate_values("
)

# %% [markdown]
# Both rungs on an H200, measured in one run (forward, float32, D = 64, no mask):

# %%
records = {
    (record["batch"], record["heads"], record["seqlen"], record["name"]): record["ms"]
    for record in recorded("ladder")["records"]
    if record["name"] in ("fa2_seq_parallel", "fa2_split_q") and not record["causal"]
}
for batch, heads, n in sorted({key[:3] for key in records}):
    slow, quick = (records[batch, heads, n, f"fa2_{name}"] for name in ("seq_parallel", "split_q"))
    print(
        f"batch {batch:2}, {heads:2} heads, N = {n:6,}: sliced-K {slow:5.2f} ms, "
        f"split-Q {quick:5.2f} ms, {slow / quick:.2f} times as fast"
    )

# %% [markdown]
# Where there is a GPU, both rungs on it, in turns, 4 x 16 heads of 2048 tokens:

# %%
if cuda.is_available():
    q, k, v = (cuda.to_device(x) for x in random_qkv(4, 2048, 2048, 16, 16, 64, np.float32))
    rungs = ("fa2_seq_parallel", "fa2_split_q")
    print_milliseconds(
        {name: lambda name=name: flash_attn_func(q, k, v, rung=name) for name in rungs}
    )

# %% [markdown]
# ## Exercise
#
# Turn this sliced-K kernel into split-Q. It is small: two warps, 4 queries at a time, 64 keys a tile. A
# *slice* is 32 keys, one for each lane; in O a lane is a column. First its verbs:

# %%
show_source(load_rows)
show_source(score)
show_source(weighted_values)

# %%
show_source(sliced_k_attention)

# %% [markdown]
# Write `split_q_attention(Q, K, V, O, softmax_scale)`. Q, O: (seqlen_q, heads, head_dim); K, V: (seqlen_k,
# kv_heads, head_dim); float32, head_dim at most 32, any lengths from 1 on. Each warp computes `WARP_ROWS` = 2
# of the 4 rows, over all slices of the tile. The start and the loading of Q are given. About 25 lines; much
# of the kernel above goes.
#
# `check` wants the values, for odd sizes, heads that share keys, and shuffled threads; and it wants the
# traffic: nothing in shared memory but the tiles of Q, K and V, two barriers a tile, each number of K and V
# read once from global memory by each block.
#
# A worked example, one tile of 4 queries and 64 keys; who computes what:
#
# | | S[0] | S[1] | S[2] | S[3] |
# |---|---|---|---|---|
# | sliced-K, keys 0 to 31 | warp 0 | warp 0 | warp 0 | warp 0 |
# | sliced-K, keys 32 to 63 | warp 1 | warp 1 | warp 1 | warp 1 |
# | split-Q, keys 0 to 31 | warp 0 | warp 0 | warp 1 | warp 1 |
# | split-Q, keys 32 to 63 | warp 0 | warp 0 | warp 1 | warp 1 |
#
# `warp_max(x)` and `warp_sum(x)` give every lane the maximum and the sum over the lanes of its warp. Stuck?
# `hint("07.split_q", 1)`, then 2, then 3.


# %% answer="07.split_q"
@cuda.jit
def split_q_attention(Q, K, V, O, softmax_scale):
    warp, lane = cuda.threadIdx.x // WARP_SIZE, cuda.threadIdx.x % WARP_SIZE
    head, first_row = cuda.blockIdx.x, cuda.blockIdx.y * ROWS
    kv_head = head // (Q.shape[1] // K.shape[1])
    seqlen_k = K.shape[0]
    Q_smem = cuda.shared.array((ROWS, STRIDE), float32)
    K_smem = cuda.shared.array((KEYS, STRIDE), float32)
    V_smem = cuda.shared.array((KEYS, HEAD_DIM), float32)
    load_rows(Q_smem, Q[:, head], first_row, ROWS)
    ### BEGIN SOLUTION
    m_reg = cuda.local.array(WARP_ROWS, float32)
    l_reg = cuda.local.array(WARP_ROWS, float32)
    O_reg = cuda.local.array(WARP_ROWS, float32)
    for i in range(WARP_ROWS):
        m_reg[i] = NEG_INF
        l_reg[i] = float32(0.0)
        O_reg[i] = float32(0.0)

    for first_key in range(0, seqlen_k, KEYS):
        # A slower warp may still read the tiles before.
        cuda.syncthreads()
        load_rows(K_smem, K[:, kv_head], first_key, KEYS)
        load_rows(V_smem, V[:, kv_head], first_key, KEYS)
        # Each warp reads what both warps have loaded.
        cuda.syncthreads()
        for i in range(WARP_ROWS):
            row = WARP_ROWS * warp + i
            for first in range(0, KEYS, SLICE):
                s = softmax_scale * score(Q_smem, K_smem, row, first + lane, seqlen_k - first_key)
                m = max(m_reg[i], warp_max(s))
                rescale = math.exp(m_reg[i] - m)
                p = math.exp(s - m)
                l_reg[i] = rescale * l_reg[i] + warp_sum(p)
                O_reg[i] = rescale * O_reg[i] + weighted_values(p, V_smem, first)
                m_reg[i] = m

    for i in range(WARP_ROWS):
        row = first_row + WARP_ROWS * warp + i
        if row < O.shape[0] and lane < O.shape[2]:
            O[row, head, lane] = O_reg[i] / l_reg[i]
    ### END SOLUTION


# %% check="07.split_q"
check("07.split_q", split_q_attention)

# %% [markdown]
# ## Question
#
# Split-Q gives each warp a quarter of the rows. One could go on, and give each *lane* rows of its own: then not
# even shuffles are needed. Would it pay?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Hardly. A lane would hold whole rows of Q and O in its own registers, and a thread has 255 at most: at D = 128
# one row of each is too much. And every number of K and V that it reads would serve one row only, while now it
# serves all rows that the lane has a part of. "Yes, the fewer exchanges the better" is the wrong answer: a
# shuffle stays within the warp, where nobody waits; what costs is memory that all warps share, and barriers.
# The step that pays is the one from four warps to one.
# </details>
#
# ## Further reading
#
# - FlashAttention-2 paper, section 3.3 and its figure of the two partitions.
# - `fa2_numba/kernels/fa2_split_q.py` and `fa2_seq_parallel.py`: what a head costs in both, in formulas.
# - Before: [06, why does one head leave the GPU idle?](06_seq_parallel.ipynb) Next: [08, which tiles can be
#   skipped?](08_masks_and_heads.ipynb)

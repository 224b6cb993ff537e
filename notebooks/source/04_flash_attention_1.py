# %% [markdown]
# # 04. What does FlashAttention-1 do?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | follow FlashAttention-1 from tile to tile; count what goes to HBM and back; write its inner loop |
# | You need | lessons 01 (bytes of HBM), 02 (online softmax) and 03 (barriers) |
# | Minutes | 45 |
# | Symbols | Q, K, V, O (N x D); S; m, l of the keys so far; m~, l~ and P~ = exp(S - m~) of one tile |
#
# Textbook attention writes S and P, N x N numbers each, to HBM, because a row of P needs the maximum and the
# sum of the whole row of S. Lesson 02 took that reason away: m, l and O of some keys can be merged with
# those of others. So attention can be computed in tiles, each small enough for the chip. FlashAttention-1
# does it, and the rung `fa1_sliced_k` is FlashAttention-1.

# %% tags=["setup"]
import math

import numpy as np
from numba import cuda, float32

from fa2_numba import Simulator, flash_attn_func, simulate
from fa2_numba.config import TileConfig
from fa2_numba.device.fa1_passes import merge_statistics
from fa2_numba.kernels import fa1_sliced_k
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.traversal import (
    draw_growth,
    draw_traversals,
    follow_visits,
    moved_bytes,
    workspace_bytes,
)
from fa2_numba.lessons.kernels.tiled import HEAD_DIM, KEYS, load_rows
from fa2_numba.lessons.show import show_source
from fa2_numba.paper import PAPER_STEPS
from fa2_numba.testing import assert_attention, random_qkv

# %% [markdown]
# This is the algorithm, in our words. A tile has some rows of its matrix; tile i is one of Q, tile j one of
# K and V.

# %%
for line, step in PAPER_STEPS["FA1 Alg. 1"].items():
    print(f"{line:2}  {step}")

# %% [markdown]
# ## Predict
#
# Take N = 128, D = 16, and tiles of 64 rows: two of queries, two of keys.
#
# 1. How many numbers of S exist at any moment: 128 x 128, 128 x 64 or 64 x 64?
# 2. The outer loop goes over keys. After its first turn, no row of O is finished. Where are m, l and O until
#    the second turn?
# 3. How often is each row of O written to HBM?
#
# ## Run it wrong
#
# Slow first: `standard`. Then FlashAttention-1 on the same numbers, both checked against exact attention.

# %%
simulator = Simulator(checks=False, progress=False)  # the checks are for kernels that may be wrong
q, k, v = random_qkv(1, 128, 128, 1, 1, 16, np.float32)
reports = {}
for rung in ("standard", "fa1_sliced_k"):
    out, lse, reports[rung] = flash_attn_func(
        q, k, v, rung=rung, machine=simulator, return_lse=True, report=True
    )
    assert_attention(out, lse, q, k, v)

for rung, report in reports.items():
    read, written = report.global_load_bytes, report.global_store_bytes
    print(f"{rung:13} read {read / 1024:6.1f} KiB, wrote {written / 1024:6.1f} KiB")

# %% [markdown]
# The same answer, the same 4 N² D operations in the two products, and fewer bytes:

# %%
assert {report.matmul_flops for report in reports.values()} == {4 * 128 * 128 * 16}
moved = {
    rung: report.global_load_bytes + report.global_store_bytes for rung, report in reports.items()
}
assert moved["fa1_sliced_k"] == moved_bytes("fa1_sliced_k", 128, TileConfig(16, 64, 64))
print(f"{moved['standard'] / moved['fa1_sliced_k']:.1f} times as many bytes without tiles")

# %% [markdown]
# ## Look
#
# Where do the remaining ones come from? A run of 32 queries and 32 keys in tiles of 8, so that there are
# 4 x 4 pairs of tiles. Above is the order in which the kernel visits them, below what each visit reads from
# HBM (up) and writes there (down). On the right is the rung of the next lesson, for comparison.

# %%
visits = {rung: follow_visits(rung, 32, 32) for rung in ("fa1_sliced_k", "fa2_fewer_flops")}
draw_traversals(visits)

# %% [markdown]
# On the left:

# %%
fa1 = visits["fa1_sliced_k"]
state = "O, m, l"
print("key tiles in order:", [visit.key_tile for visit in fa1])
print(
    "visits that write O, m and l:", sum(visit.written[state] > 0 for visit in fa1), "of", len(fa1)
)
print("visits that read them back:  ", sum(visit.read[state] > 0 for visit in fa1))
print("bytes of K and V read:", sum(visit.read["K, V"] for visit in fa1))
assert sum(visit.read["K, V"] for visit in fa1) == 2 * 32 * 16 * 4

# %% [markdown]
# Each tile of K and V comes once. For each of them all queries pass by, and with every query tile its O, m
# and l: fetched, brought up to date, put back. Only in the first pass is there nothing to fetch. (In the
# last one O is written twice: to the float32 workspace and, in the dtype of the arrays, as the result; the
# backward pass's lse is written there, too.) So for your prediction: with two tiles of keys there are two
# passes, O waits in HBM between them, and each of its rows is written twice, and once more as the result.
#
# ## Understand
#
# The two loops, as they stand in the kernel; comments name the lines of the algorithm:

# %%
show_source(fa1_sliced_k.make_forward, "for first_col", "mask_scores(S_reg")

# %% [markdown]
# S is in `S_reg`, registers, and only ever one tile of it: 64 x 64 numbers where tiles have 64 rows, however
# large N is. **N x N never leaves the chip.** P~ takes its place there, is multiplied with V, and is
# forgotten.
#
# What is kept of it is m and l, two numbers a row, and O. The next tile merges with them (lines 11 to 13):

# %%
show_source(merge_statistics)

# %% [markdown]
# `share(x, l)` is x / l, and 0 where l is 0. In FlashAttention-1, O in HBM is always divided by the l of
# its time, so it is a weighted average of the rows of V seen so far. To add a tile, multiply by l again, rescale
# both parts to the common maximum, add, and divide by the new l. Lesson 05 asks whether all that dividing
# is needed.
#
# How does it grow? The left figure is HBM that a rung asks for besides Q, K, V and O; the right one is
# bytes moved, from the closed forms in `fa2_numba/traffic.py`, which tests hold equal to the simulator's
# counts. Head dim 64, tiles of 64 rows:

# %%
lengths = (64, 256, 1024, 4096, 16384)
draw_growth(("standard", "fa1_sliced_k", "fa2_fewer_flops"), lengths)

# %%
longest = lengths[-1]
for rung in ("standard", "fa1_sliced_k"):
    asked, bytes_moved = workspace_bytes(rung, longest), moved_bytes(rung, longest)
    print(f"{rung:13} asks for {asked / 2**20:8,.1f} MiB, moves {bytes_moved / 1e9:.2f} GB")
ratio = moved_bytes("fa1_sliced_k", 2 * longest) / moved_bytes("fa1_sliced_k", longest)
print(f"twice the length: {ratio:.2f} times the bytes for fa1_sliced_k")

# %% [markdown]
# Where there is a GPU, the kernel runs there as it is, and a longer sequence needs no more of the chip:

# %%
if cuda.is_available():
    qkv = random_qkv(1, 1024, 1024, 2, 2, 64, np.float32)
    found = flash_attn_func(*map(cuda.to_device, qkv), rung="fa1_sliced_k", return_lse=True)
    assert_attention(*(x.copy_to_host() for x in found), *qkv)
    print("1024 tokens on the GPU: exact.")

# %% [markdown]
# - *Memory* grows with N, no longer with N².
# - *Traffic* still grows with N², with a smaller factor. Every tile of keys makes all of Q and O pass by,
#   so what counts is how many tiles there are, and that depends on how much fits on the chip. The paper
#   proves N² D² / M for M numbers of on-chip memory. Here it is, with tiles of other sizes:

# %%
for rows in (32, 64, 128):
    tiles = TileConfig(head_dim=64, block_m=rows, block_n=rows)
    size = tiles.sliced_k_shared_bytes / 1024
    print(
        f"tiles of {rows:3} rows need {size:5.0f} KiB of shared memory and move "
        f"{moved_bytes('fa1_sliced_k', longest, tiles) / 1e9:.2f} GB"
    )

# %% [markdown]
# - *P is thrown away*, and the gradient needs it. FlashAttention keeps the row statistics for that, and
#   computes S and P anew, tile by tile: more operations, but N x N stays on the chip there, too. That is
#   lesson 10.
# - *One block computes a whole head*, since it takes one query tile after the other. A GPU has room for
#   many blocks at once; lesson 06 counts how many multiprocessors stay idle.
# - *Why is O not kept on the chip?* With keys in the outer loop, all query tiles are under way at the same
#   time, and together they do not fit. The right half of the figure has the loops swapped. K and V are
#   read more often there; O is written once.

# %%
for rung, steps in visits.items():
    part = {
        name: sum(one.read[name] + one.written[name] for one in steps) for name in steps[0].read
    }
    print(f"{rung:16} {part}, in all {sum(part.values()):,}")

# %% [markdown]
# ## Exercise
#
# Write the inside of the inner loop of a small FlashAttention-1 kernel:
# `tiled_attention(Q_gmem, K_gmem, V_gmem, O_gmem, m_gmem, l_gmem, softmax_scale)`. About 18 lines.
#
# One block computes one head, and a thread owns whole rows of Q. Q and O are (seqlen_q, `HEAD_DIM`), K and V
# (seqlen_k, `HEAD_DIM`), m and l (seqlen_q,), all float32. Before the launch O = 0, l = 0 and m = -inf (line 2
# of the algorithm). A tile has `KEYS` rows of K and of V; the last one may have fewer, `keys` says how many.
# Given is all that loads:

# %%
show_source(load_rows)

# %% [markdown]
# For its row, a thread has `Q_reg` (`HEAD_DIM`), `m_old` and `l_old`, and room for the tile's scores, `S_reg`
# (`KEYS`). It must leave the new m, l and O (divided by the new l) in HBM, each read and written once a pass.
# A thread that knows all scores of its row's tile can take their exponentials under the new maximum at
# once; then m~ needs no name.
#
# A worked example: one row, 4 keys in two tiles of 2, V of one column.
#
# | | scores | V | m | l | O |
# |---|---|---|---|---|---|
# | before | | | -inf | 0 | 0 |
# | tile 0 | ln 1, ln 3 | 4, 8 | ln 3 | 1/3 + 1 = 4/3 | (1/3 x 4 + 1 x 8) / (4/3) = 7 |
# | tile 1 | ln 4, ln 2 | 10, 2 | ln 4 | 3/4 x 4/3 + 1 + 1/2 = 5/2 | (3/4 x 4/3 x 7 + 1 x 10 + 1/2 x 2) / (5/2) = 7.2 |
#
# Without tiles: weights 1, 3, 4 and 2 of 10 give

# %%
weights, values = np.array([1, 3, 4, 2]), np.array([4, 8, 10, 2])
print(weights @ values / weights.sum())

# %% [markdown]
# Stuck? `hint("04.tiled", 1)`, then 2, then 3.


# %% answer="04.tiled"
@cuda.jit
def tiled_attention(Q_gmem, K_gmem, V_gmem, O_gmem, m_gmem, l_gmem, softmax_scale):
    K_smem = cuda.shared.array((KEYS, HEAD_DIM), float32)
    V_smem = cuda.shared.array((KEYS, HEAD_DIM), float32)
    Q_reg = cuda.local.array(HEAD_DIM, float32)
    S_reg = cuda.local.array(KEYS, float32)

    for first_key in range(0, K_gmem.shape[0], KEYS):  # FA1 Alg. 1 line 5
        # Slower threads may still read the previous tile.
        cuda.syncthreads()
        load_rows(K_smem, K_gmem, first_key)  # FA1 Alg. 1 line 6
        load_rows(V_smem, V_gmem, first_key)
        # Every thread reads what all have loaded.
        cuda.syncthreads()
        keys = min(KEYS, K_gmem.shape[0] - first_key)

        for row in range(cuda.threadIdx.x, Q_gmem.shape[0], cuda.blockDim.x):  # FA1 Alg. 1 line 7
            for d in range(HEAD_DIM):  # FA1 Alg. 1 line 8
                Q_reg[d] = Q_gmem[row, d]
            m_old, l_old = m_gmem[row], l_gmem[row]
            ### BEGIN SOLUTION
            m_new = m_old
            for j in range(keys):  # FA1 Alg. 1 line 9
                s = float32(0.0)
                for d in range(HEAD_DIM):
                    s += Q_reg[d] * K_smem[j, d]
                S_reg[j] = softmax_scale * s
                m_new = max(m_new, S_reg[j])
            rescale = math.exp(m_old - m_new)
            l_new = rescale * l_old
            for j in range(keys):  # FA1 Alg. 1 lines 10, 11
                S_reg[j] = math.exp(S_reg[j] - m_new)
                l_new += S_reg[j]
            for d in range(HEAD_DIM):  # FA1 Alg. 1 line 12
                o = rescale * l_old * O_gmem[row, d]
                for j in range(keys):
                    o += S_reg[j] * V_smem[j, d]
                O_gmem[row, d] = o / l_new
            m_gmem[row], l_gmem[row] = m_new, l_new  # FA1 Alg. 1 line 13
            ### END SOLUTION


# %% check="04.tiled"
check("04.tiled", tiled_attention)

# %% [markdown]
# ## Question
#
# FlashAttention-1 never writes S or P. Somebody concludes: "Then its HBM traffic grows with N, like Q, K, V
# and O do." Is that right?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# No: it grows with N², as the run above printed. K and V are read once, but Q is read, and O read and
# written, once for every tile of keys, and there are N / BLOCK_N of those. "Linear, because only N x D
# matrices move" is the common wrong answer: it counts what is stored, not how often it passes by. What is
# linear is the memory. The traffic has the same N² as before with a smaller factor, the smaller the
# more fits on the chip.
# </details>
#
# ## Further reading
#
# - FlashAttention paper, section 3.1 and Algorithm 1; section 3.2, theorem 2, for N² D² / M.
# - FlashAttention-2 paper, section 2.3, for the same in the symbols of the next lessons.
# - The docstring of `fa2_numba/kernels/fa1_sliced_k.py`: all counts in closed form.
# - Before: [03, where do GPU bugs hide?](03_gpu_bugs.ipynb). Next: [05, which FLOPs are not
#   matmul?](05_fewer_flops.ipynb)

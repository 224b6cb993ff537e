# %% [markdown]
# # 01. Why is textbook attention slow?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | count the bytes that attention moves; place a kernel on a roofline; predict the bytes of a run |
# | You need | lesson 00; matrix products and softmax |
# | Minutes | 35 |
# | Symbols | N queries and keys, D head dim; Q, K, V, O (N x D); S, P (N x N); LSE (N) |
#
# Attention of one head is S = scale Q Kᵀ, P = softmax(S) row by row, O = P V. The rung `standard` does it
# as a textbook writes it, in three kernels, one after the other:
#
# | kernel | who works | reads | writes |
# |---|---|---|---|
# | scores | a block for each pair of a query tile and a key tile | its rows of Q, its rows of K | its part of S |
# | softmax | a warp for each row | its row of S | its row of P, one number of LSE |
# | values | a block for each query tile | all of V, a tile at a time; its rows of P | its rows of O |
#
# A *tile* is some rows of a matrix, here 64. LSE, the logarithm of a row's sum of exponentials, is for
# the backward pass; here it is N numbers and no more.

# %% tags=["setup"]
import numpy as np
from numba import cuda

from fa2_numba import Simulator, flash_attn_func
from fa2_numba.kernels import standard
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.textbook import bytes_by_array, draw_levels
from fa2_numba.lessons.figures.textbook_roofline import (
    H200_FLOAT32_TFLOPS,
    H200_TB_PER_SECOND,
    Dot,
    draw_roofline,
    hbm_bytes_counted_by_gpu,
    intensity,
    measured_dots,
    recorded,
)
from fa2_numba.lessons.live import print_milliseconds
from fa2_numba.lessons.show import show_source
from fa2_numba.testing import assert_attention, random_qkv

# %% [markdown]
# Between the kernels S and P have to be somewhere. No block's shared memory has room for N x N numbers,
# so they go to HBM, the large memory beside the chip (*global memory* in CUDA). Names in our kernels say where
# numbers are: `_gmem` in HBM, `_smem` in shared memory, `_reg` in a thread's registers.

# %%
show_source(standard.plan_forward, "S = tensors", "P = tensors")

# %% [markdown]
# And this is what the second kernel does with a row, 32 columns at a time:

# %%
show_source(standard.make_softmax, "m = NEG_INF", "LSE_gmem")

# %% [markdown]
# ## Predict
#
# Take N = 128, D = 16, float32. Q, K, V and O together are 4 x 128 x 16 numbers of 4 bytes, 32 KiB.
#
# 1. How many KiB do the three kernels read and write in HBM, all together: about 50, 150 or 450?
# 2. N doubles. How much more arithmetic is there, how many more bytes, and how many operations for each
#    byte?
#
# ## Run it wrong
#
# Nothing is wrong with its answers; what is wrong is what they cost. Three lengths, each checked against
# exact attention. A FLOP is one floating-point operation; the two products take 4 N² D of them.

# %%
simulator = Simulator(checks=False, progress=False)  # the checks are for kernels that may be wrong
runs = {"standard": {}, "fa2_split_q": {}}
for rung, n in [(rung, n) for rung in runs for n in (64, 128, 192)]:
    q, k, v = random_qkv(1, n, n, 1, 1, 16, np.float32)
    out, lse, report = flash_attn_func(
        q, k, v, rung=rung, machine=simulator, return_lse=True, report=True
    )
    assert_attention(out, lse, q, k, v)
    runs[rung][n] = report

print("    N   Q K V O KiB   S and P KiB   HBM moved KiB       FLOPs   FLOPs a byte")
for n, report in runs["standard"].items():
    moved = report.global_load_bytes + report.global_store_bytes
    matrices, workspace = 4 * n * 16 * 4, 2 * n * n * 4
    print(
        f"{n:5}{matrices / 1024:14.0f}{workspace / 1024:14.0f}{moved / 1024:16.1f}"
        f"{report.matmul_flops:12,}{report.matmul_flops / moved:15.2f}"
    )

# %% [markdown]
# At N = 128 it moves 440 KiB, nearly 14 times what goes in and comes out. Twice the length is four times
# the arithmetic and about four times the bytes, so the operations for each byte hardly grow. And the two
# workspaces grow too: at N = 16,384, one head needs

# %%
print(
    2 * 16384**2 * 4 / 2**30, "GiB for S and P,", 4 * 16384 * 64 * 4 / 2**20, "MiB for Q, K, V, O"
)

# %% [markdown]
# (the latter with D = 64).
#
# ## Look
#
# Which array are those bytes? The report knows the traffic of every source line, and every line that
# touches HBM names one array. Beside `standard` stands `fa2_split_q`, a rung that never writes S and P to
# HBM; how it does that is what lessons 02 to 07 are about.

# %%
draw_levels(runs)

# %% [markdown]
# On the right the two are alike: both bring tiles of Q, K and V to shared memory, and read them as often
# for the same products. On the left they are not. S and P are most of what `standard` moves, and nothing
# of what `fa2_split_q` does:

# %%
by_array = bytes_by_array(runs["standard"][128])
print({name: f"{read:,} read, {written:,} written" for name, (read, written) in by_array.items()})
n = 128
assert by_array["S"] == (3 * 4 * n * n, 4 * n * n)
assert by_array["P"] == (4 * n * n, 4 * n * n)
assert not {"S", "P"} & set(bytes_by_array(runs["fa2_split_q"][128]))
flops = [runs[rung][192].matmul_flops for rung in runs]
assert flops[0] == flops[1] == 4 * 192 * 192 * 16
assert len({runs[rung][192].shared_load_bytes for rung in runs}) == 1

# %% [markdown]
# ## Understand
#
# S is written once and read three times, P is written once and read once: 6 N² numbers of 4 bytes, 24 N²
# bytes, for 4 N² D operations. N cancels: **S and P alone keep the operations for each byte below D / 6,
# however long the sequence is.**
#
# Is that little? It depends on the machine. A *roofline* shows it: to the right go the operations for
# each byte, upward the operations a second. A kernel cannot be above the slope (the bytes that HBM
# delivers in a second, times the operations for each) nor above a flat line (the operations that the
# chip does in a second). The bytes come from the closed forms in `fa2_numba/traffic.py`, which tests
# hold equal to the simulator's counts; the filled dots were measured on an H200 and are in
# `bench/results`; where a roof comes from stands beside it.

# %%
matmul_tflops = recorded("forward")["matmul_tflops"]["float16"]
rungs = {
    "standard, float32": [Dot(64, intensity("standard", 64, 64))]
    + measured_dots("ladder", "standard", "float32"),
    "fa2_split_q, float32": [Dot(64, intensity("fa2_split_q", 64, 64))]
    + measured_dots("ladder", "fa2_split_q", "float32"),
    "fa2_tensor_core, float16": measured_dots("forward", "fa2_tensor_core", "float16"),
}
draw_roofline(
    rungs,
    H200_TB_PER_SECOND,
    {
        "float32 without tensor cores (data sheet)": H200_FLOAT32_TFLOPS,
        "float16 on tensor cores (measured, a large matrix product)": matmul_tflops,
    },
    "Head dim 64, no mask, on an H200. Filled: measured. Hollow: what HBM alone would allow.",
    ("S and P, once each way: D / 4", 64 / 4),
)

# %% [markdown]
# - The dots of `standard` hardly move with N: what a longer sequence brings in operations, it brings in
#   bytes. Those of `fa2_split_q` go right, for a block keeps its rows of Q and O on chip while K and V
#   pass by. They end at 32: a number of K or V, 4 bytes, serves the 64 rows of a tile with 2 operations
#   each.
# - The dots count what kernels ask for. Caches answer part of it: tiles of Q, K and V that several blocks
#   read, and a row of S when it is read again. They cannot keep a large S or P from one kernel to the
#   next, so each goes to HBM once and comes back once, 16 N² bytes: D / 4, the dotted line. No cache
#   brings `standard` beyond it.

# %%
limit = H200_TB_PER_SECOND * 64 / 4
fastest = max(dot.measured for dot in rungs["fa2_tensor_core, float16"])
print(f"S and P, once each way, allow {limit:.0f} TFLOP/s.")
print(f"The tensor cores multiply at {matmul_tflops:.0f}.")
print(f"fa2_tensor_core was measured at {fastest:.0f}.")
leaner = H200_TB_PER_SECOND * 64 / 2
print(f"S and P in 16 bits, once each way, would allow {leaner:.0f}.")
assert limit < leaner < fastest < matmul_tflops

# %% [markdown]
# That is why textbook attention is slow on a GPU with tensor cores: **traffic, not arithmetic.** A leaner
# textbook, with S and P in 16 bits, has D / 2 operations for each byte: more, and still a fixed number.
#
# Now look at the filled dots of the two float32 rungs. Neither is near a roof, and the gap between them
# is small:

# %%
times = {
    (record["name"], record["causal"]): record["ms"]
    for record in recorded("ladder")["records"]
    if record["seqlen"] == 16384 and record["name"] in runs
}
for name in runs:
    print(f"{name}: {times[name, False]:.1f} ms, causal {times[name, True]:.1f} ms")

# %% [markdown]
# (4 heads of 16,384 tokens.) In float32, without tensor cores, computing takes these kernels longer than
# waiting for HBM, so taking the traffic away gains little; under a causal mask more, since `fa2_split_q`
# skips what the mask hides. A roofline says what cannot be, not what will be.
#
# Did those bytes really go through the H200's HBM? Its own counters (causal, 4 x 32 heads of 1024
# tokens), beside the bytes that the kernels asked for:

# %%
for name in runs:
    asked, through_hbm = hbm_bytes_counted_by_gpu(name)
    print(f"{name}: {asked / 1e9:.2f} GB asked for, {through_hbm / 1e9:.2f} GB through HBM")

# %% [markdown]
# Where there is a GPU, both rungs on it, in turns, 4 x 16 heads of 2048 tokens:

# %%
if cuda.is_available():
    q, k, v = (cuda.to_device(x) for x in random_qkv(4, 2048, 2048, 16, 16, 64, np.float32))
    print_milliseconds(
        {name: lambda name=name: flash_attn_func(q, k, v, rung=name) for name in runs}
    )

# %% [markdown]
# ## Exercise
#
# Write `predict_bytes(seqlen_q, seqlen_k, head_dim, block_m, block_n)`: the bytes that the three kernels of
# `standard` read from and write to HBM, for one head, in float32, without a mask. Return a pair of
# integers, (bytes read, bytes written). A query tile has `block_m` rows, a key tile `block_n`; the last
# one may have fewer, and rows past the end are neither read nor written. Q and O are (seqlen_q,
# head_dim), K and V (seqlen_k, head_dim), S and P (seqlen_q, seqlen_k), LSE (seqlen_q). About 7 lines.
#
# A worked example, `predict_bytes(4, 4, 2, 2, 2)`, two tiles of queries and two of keys; numbers, not
# bytes:
#
# | kernel | read | written |
# |---|---|---|
# | scores | Q: 4 x 2, for both key tiles, 16; K: 4 x 2, for both query tiles, 16 | S: 16 |
# | softmax | S: three times 16, 48 | P: 16; LSE: 4 |
# | values | V: 4 x 2, for both query tiles, 16; P: 16 | O: 8 |
# | sum | 112, so 448 bytes | 44, so 176 bytes |
#
# `check` compares with the simulator at three sizes, and with the closed form at three that are too large
# for it. Stuck? `hint("01.predict_bytes", 1)`, then 2, then 3.


# %% answer="01.predict_bytes"
def predict_bytes(seqlen_q, seqlen_k, head_dim, block_m, block_n):
    ### BEGIN SOLUTION
    tiles_m, tiles_n = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    q, kv, scores = seqlen_q * head_dim, seqlen_k * head_dim, seqlen_q * seqlen_k
    read = q * tiles_n + 2 * kv * tiles_m + 4 * scores
    written = 2 * scores + q + seqlen_q
    return 4 * read, 4 * written
    ### END SOLUTION


# %% check="01.predict_bytes"
check("01.predict_bytes", predict_bytes)

# %% [markdown]
# ## Question
#
# Somebody says: "Matrix products are used well when they are large. So for long sequences attention will
# be used well, too." For D = 64, how long must N be until `standard` reaches the tensor cores' roof?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Never. In a product of two N x N matrices each number is used N times, so operations for each byte grow
# with N. In Q Kᵀ the sum over which a number of S is made has D terms, and D does not grow: S has N²
# numbers, each of them worth 2 D operations. "From a few thousand on" is the common wrong answer: it takes
# the size of S for the depth of the product. What helps is not a longer sequence but not to move S.
# </details>
#
# ## Further reading
#
# - FlashAttention paper, sections 2.1 (the memories of a GPU), 2.2 (the standard implementation) and 3.2
#   (how much traffic a tiled one needs).
# - FlashAttention-2 paper, sections 2.1 and 2.2.
# - The roofline model: Williams, Waterman and Patterson, Communications of the ACM, 2009.
# - `fa2_numba/traffic.py`: the closed forms of all rungs.
# - Before: [00, what is a kernel?](00_kernel.ipynb). Next: [02, can softmax be done in one
#   pass?](02_online_softmax.ipynb)

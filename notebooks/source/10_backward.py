# %% [markdown]
# # 10. How do gradients come back without P?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | measure a gradient; find the number that softmax's gradient needs; write a visit of a pass in tiles |
# | You need | lessons 02 (lse), 04 (tiles) and 08 (masks, heads); the chain rule |
# | Minutes | 45 |
# | Symbols | S, P, O, lse as before; d: head dim (D so far); dX: the gradient of a loss by X, as large as X; o: element by element; D: one number a row, found below |
#
# A model that learns needs dQ, dK and dV: how its loss changes with each number of Q, K and V. What comes in
# is dO. Backwards through O = P V and S = scale Q Kᵀ, the chain rule makes products again:
#
# | forward | backward |
# |---|---|
# | O = P V | dV = Pᵀ dO and dP = dO Vᵀ |
# | P = softmax(S), row by row | dS = ? |
# | S = scale Q Kᵀ | dQ = scale dS K and dK = scale dSᵀ Q |
#
# A gradient dX has the shape of X. P and dS have N x N numbers, and the forward pass has thrown P away. It
# has kept O, and of each row one number, lse. Is that enough?

# %% tags=["setup"]
import numpy as np
from numba import cuda

from fa2_numba import Simulator, flash_attn_backward, flash_attn_func, simulate
from fa2_numba.backward_traffic import predict_backward
from fa2_numba.kernels import fa2_split_q_backward
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.backward_loops import (
    FUSED,
    LADDER_TILES,
    QUERIES,
    backward_bytes,
    backward_workspace,
    draw_backward_growth,
    draw_blocks,
    draw_loops,
    follow_backward,
)
from fa2_numba.lessons.figures.textbook_roofline import recorded
from fa2_numba.lessons.kernels.row_gradients import finite_differences, row_gradients
from fa2_numba.lessons.show import show_source
from fa2_numba.paper import PAPER_STEPS
from fa2_numba.problem import Problem
from fa2_numba.reference import attention_backward, attention_forward, softmax
from fa2_numba.testing import assert_gradients, random_qkv

# %% [markdown]
# ## Predict
#
# 1. A score S and the lse of its row are known. What is its weight P, and which other numbers of the row does
#    that take?
# 2. A higher score takes weight from all other keys of its row, so dS of one element depends on the whole row
#    of dP. Besides its own P and dP, how many numbers of the row does dS of an element need?
# 3. A block owns a tile of K and V and goes through the tiles of queries. Which of dQ, dK and dV can it sum
#    in its registers, and write once?
#
# ## Run it wrong
#
# The weights come back easily (your first prediction): P = exp(S - lse), one exponential, and no other number
# of the row. The derivative of exp is exp, so a first guess is dS = P o dP. This small kernel has a thread
# for each query of one head. `Q`, `dO` and `dQ` are (queries, d), `K`, `V`, `dK` and `dV` (keys, d), and
# `LSE` and `D` have a number for each query. D is for later: with D = 0 the kernel is the guess.

# %%
show_source(row_gradients, "i = cuda.grid(1)")

# %%
q, k, v = random_qkv(1, 5, 7, 1, 1, 8, np.float32)
dout = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
out, lse = attention_forward(q, k, v)
Q, K, V, dO = (x[0, :, 0] for x in (q, k, v, dout))
scale = np.float32(8**-0.5)


def gradients_with(D):
    """dQ, dK, dV of the kernel with this number for each row."""
    gradients = [np.zeros_like(x) for x in (Q, K, V)]
    numbers = lse[0, 0].astype(np.float32), D.astype(np.float32)
    simulate(row_gradients, progress=False)[1, 32](Q, K, V, dO, *numbers, *gradients, scale)
    return gradients


guess = gradients_with(np.zeros(5))

# %% [markdown]
# It runs, and no array of N x N is there. Is it right? A gradient can be measured. Our loss is the sum of
# dO o O, whose gradient by O is dO. Make one element of Q a little larger, run exact attention in float64, make
# it a little smaller, run again: the change of the loss, divided by the change of the element, is what dQ
# must be there. That takes two runs for each element; for a check of a small problem this is fine.

# %%
show_source(finite_differences)

# %%
inputs = [x.astype(np.float64) for x in (q, k, v)]


def loss():
    return float((dout * attention_forward(*inputs)[0]).sum())


measured = [finite_differences(loss, x)[0, :, 0] for x in inputs]
for name, found, slope in zip(("dQ", "dK", "dV"), guess, measured, strict=True):
    largest = np.abs(slope).max()
    print(f"{name}: off by {np.abs(found - slope).max():.7f} at most; the largest is {largest:.1f}")

# %% [markdown]
# dV is right. dQ and dK are wrong, and nothing but a comparison tells. Both come from dS, so measure that
# one: here the scores are what is made larger and smaller. How much too large is our guess, in units of P?

# %%
S = (scale * Q.astype(np.float64)) @ K.T
P, _ = softmax(S)
dS = finite_differences(lambda: float((dO * (softmax(S)[0] @ V)).sum()), S)
too_large = (P * (dO @ V.T) - dS) / P
print(too_large.round(4))

# %% [markdown]
# Five rows, seven columns, and in each row one number, seven times. So one number of the row is all that is
# missing (your second prediction). Which one? The dot product of the row's dO and O, that is
# D = rowsum(dO o O), which takes no row of P:

# %%
D = (dout * out).sum(axis=-1)[0, :, 0]
print(D.round(4))
assert np.allclose(too_large, D[:, None], rtol=0, atol=1e-6)

# %% [markdown]
# With it, the same kernel is right:

# %%
right = gradients_with(D)
for name, found, slope in zip(("dQ", "dK", "dV"), right, measured, strict=True):
    print(f"{name}: off by {np.abs(found - slope).max():.7f}")
assert_gradients(*(x[None, :, None] for x in right), dout, q, k, v)

# %% [markdown]
# Where there is a GPU, the very same kernel runs there, and agrees:

# %%
if cuda.is_available():
    arrays = Q, K, V, dO, lse[0, 0], D, *(np.zeros_like(x) for x in (Q, K, V))
    on_gpu = [cuda.to_device(np.ascontiguousarray(x, np.float32)) for x in arrays]
    row_gradients[1, 32](*on_gpu, scale)
    found = [x.copy_to_host()[None, :, None] for x in on_gpu[-3:]]
    assert_gradients(*found, dout, q, k, v)
    print("The GPU agrees with the simulator.")

# %% [markdown]
# ## Look
#
# Now tiles. `fa2_split_q` has two backward passes. We run both on 32 queries and keys, causal, in tiles of 8
# rows, and note what each block reads from HBM and writes there. On the left is one block of the first, on
# the right one of the second:

# %%
runs = follow_backward(32, 32, causal=True)
draw_blocks(
    {
        f"block of key tile 1\n({FUSED})": runs[FUSED][1],
        f"block of query tile 2\n({QUERIES})": runs[QUERIES][2],
    }
)

# %% [markdown]
# No tile of P is read, and none is written: in every visit S, P, dP and dS are computed on the chip from
# tiles of Q, K, V and dO and two numbers a row. O is not read either. A small kernel has read it before, with
# dO, to make D.
#
# All blocks together. An arrow is a block and leads through the pairs of tiles that it visits:

# %%
draw_loops(runs)

# %% [markdown]
# For your third prediction: a block that owns keys sums dK and dV in registers, because all that adds to them comes
# by. It cannot do so with dQ, for each visit adds to another tile of it. So several blocks add to one tile of
# dQ, in HBM, by *atomic* additions, which let nobody's sum be lost. On the right is the other way: a second
# kernel, whose blocks own queries. There dQ is written once, and S, P, dP and dS are computed twice. Where
# query heads share keys and values (lesson 08), a block that owns keys goes through the queries of all of
# them, so that dK and dV are complete there, too.
#
# ## Understand
#
# **Why one number is enough.** In a row, P_k = exp(S_k - lse). Raising S_j by a little t raises P_j by P_j t,
# and it raises lse by P_j t, which lowers every P_k by P_k P_j t. So
#
# dS_j = P_j dP_j - P_j (P_1 dP_1 + P_2 dP_2 + ...) = P_j (dP_j - D).
#
# The sum in brackets is over the whole row, but it is the same for all j. And it needs no row of P: dP_k is
# the dot product of dO and row k of V, so the sum is the dot product of dO and P_1 V_1 + P_2 V_2 + ..., which
# is O. **One number per row is enough** for the softmax's gradient, D, as one was for the weights, lse.

# %%
dP = dO @ V.T
assert np.allclose((P * dP).sum(axis=1), (dO * out[0, :, 0]).sum(axis=1), rtol=0, atol=1e-6)
exact_dS = P * (dP - D[:, None])
assert np.allclose(exact_dS, dS, rtol=0, atol=1e-6)
print("sums of the rows of dS:", exact_dS.sum(axis=1).round(6) + 0)

# %% [markdown]
# (Rows of dS sum to 0. They must: the same number added to all scores of a row changes no weight.)
#
# FlashAttention-2's backward pass is this, in tiles; tile i has rows of Q, tile j of K and V, and L is lse:

# %%
for line, step in PAPER_STEPS["FA2 Alg. 2"].items():
    print(f"{line:2}  {step}")

# %% [markdown]
# (Line 9 names O_i too; with D made beforehand, the kernel needs none.) And so it stands in the kernel. Its tile of scores lies on its side, Sᵀ = K Qᵀ, so that a warp owns rows of
# dK and dV. P takes the place of S in `P_reg`, then dS the place of P. A row that sees no key has lse = -inf and
# must add nothing; there `lse_reg` holds +inf, for exp(-inf - (-inf)) would be NaN.

# %%
show_source(
    fa2_split_q_backward.make_backward, "compute_scores(P_reg, K_smem", "accumulate_keys(dK"
)

# %% [markdown]
# **Once or twice?** Adding float32 numbers in another order may change the last bits of the sum. Which block
# comes first, a GPU decides anew in each run, so with atomics dQ may differ in its last bits from one run to
# the next. `deterministic=True` takes the two kernels. Both passes over the same numbers:

# %%
simulator = Simulator(checks=False, progress=False)
q, k, v = random_qkv(1, 24, 160, 1, 1, 16, np.float32)
dout = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
out, lse = flash_attn_func(q, k, v, rung="fa2_split_q", machine=simulator, return_lse=True)
results = []
for deterministic in (False, True):
    *gradients, report = flash_attn_backward(
        *(dout, q, k, v, out, lse),
        deterministic=deterministic,
        rung="fa2_split_q",
        machine=simulator,
        report=True,
    )
    assert_gradients(*gradients, dout, q, k, v)
    results.append(gradients)
    print(f"deterministic={deterministic}: {report.atomics:,} atomic additions")

for name, one, other in zip(("dQ", "dK", "dV"), *results, strict=True):
    print(f"{name}: {(one != other).sum()} of {one.size} numbers differ")

# %% [markdown]
# Both pass the test against exact gradients (`assert_gradients`); where they differ, it is by roundings. The
# price of the fixed order is products.
# From the closed forms (`fa2_numba/backward_traffic.py`, which tests hold equal to the simulator's counts),
# for a head of 16,384 tokens, head dim 64:

# %%
N = 16384
head = Problem(1, 1, 1, N, N, LADDER_TILES.head_dim)
for name, rung, deterministic in (
    ("standard", "standard", False),
    ("fa2_split_q", "fa2_split_q", False),
    ("  deterministic", "fa2_split_q", True),
):
    counts = predict_backward(rung, head, LADDER_TILES, deterministic)
    products = counts.matmul_flops / (2 * N * N * 64)
    moved = backward_bytes(rung, deterministic, N) / 1e9
    asked = backward_workspace(rung, deterministic, N) / 2**20
    print(f"{name:16} {products:.0f} products, {moved:5.2f} GB moved, {asked:8.2f} MiB asked for")

# %% [markdown]
# `standard` keeps P and dS in HBM between its kernels. It makes five products: S, dP, dV, dQ and dK. One
# kernel with atomics makes the same five. Two kernels make S and dP twice, so seven. What each asks of HBM,
# over N (the bytes count an atomic addition as 4):

# %%
draw_backward_growth((64, 256, 1024, 4096, 16384))

# %%
for rung in ("standard", "fa2_split_q"):
    growth = backward_workspace(rung, False, N) / backward_workspace(rung, False, N // 2)
    print(f"{rung:11} twice the length: {growth:.0f} times the memory")
ratio = backward_bytes("standard", False, N) / backward_bytes("fa2_split_q", False, N)
print(f"bytes moved, P and dS in HBM against recomputed: {ratio:.1f} times")

# %% [markdown]
# Memory grows with N instead of N²: D, and the float32 sums of dQ. Traffic grows with N² either way, since
# each tile of keys makes the tiles of queries pass by, but with a smaller factor.
#
# Measured on an H200, head dim 64: the peak of memory of 8 heads in bfloat16, forward and backward, besides
# Q, K, V and dO; and of 32 heads in float16, how much longer the deterministic pass takes:

# %%
measured_bytes = {
    one["name"]: dict(zip(one["seqlens"], one["bytes"], strict=True))[N]
    for one in recorded("train_gpt")["memory"]
}
for name, label in (
    ("torch_math", "torch, plain formula"),
    ("standard", "standard"),
    ("fa2_numba", "fa2_tensor_core"),
):
    print(f"{label:20} {measured_bytes[name] / 2**20:9,.1f} MiB at {N:,} tokens")
assert round(measured_bytes["standard"] / backward_workspace("standard", False, N)) == 8
times = {
    one["name"]: one["ms"]
    for one in recorded("backward")["records"]
    if (one["dtype"], one["seqlen"], one["head_dim"], one["causal"]) == ("float16", N, 64, False)
}
slower = times["fa2_tensor_core_deterministic"] / times["fa2_tensor_core"]
print(f"fa2_tensor_core, deterministic: {slower:.2f} times as long")
assert 1 < slower < 7 / 5

# %% [markdown]
# Seven products for five are 1.4 times as many; the time is less than that. (Why has not been measured.) On
# your own GPU, if there is one, you can look for the last bits yourself:

# %%
if cuda.is_available():
    q, k, v = random_qkv(1, 2048, 2048, 4, 4, 64, np.float32)
    arrays = [cuda.to_device(x) for x in (q, q, k, v)]
    out, lse = flash_attn_func(*arrays[1:], return_lse=True, rung="fa2_split_q")
    for deterministic in (False, True):
        different = set()
        for _ in range(10):
            dq, *_ = flash_attn_backward(
                *arrays, out, lse, deterministic=deterministic, rung="fa2_split_q"
            )
            different.add(dq.copy_to_host().tobytes())
        print(f"deterministic={deterministic}: {len(different)} different dQ in 10 runs")

# %% [markdown]
# ## Exercise
#
# **1.** Write `row_sums(dO, O)`: D, the number of each row. `dO` and `O` are (batch, seqlen_q, heads,
# head_dim), float32 or float16. Return D as float32 (batch, heads, seqlen_q), the layout of lse. Multiply and
# sum in float32: float16 has eleven significant bits, and ends at 65,504. About 2 lines.
#
# A worked example, one batch, two queries, one head, head_dim 2: `dO` is (1, 2) for query 0 and (0, 1) for
# query 1, `O` is (3, 4) and (5, 6). D is 1 x 3 + 2 x 4 = 11 and 0 x 5 + 1 x 6 = 6, an array of shape (1, 1,
# 2). Stuck? `hint("10.row_sums", 1)`, then 2, then 3.


# %% answer="10.row_sums"
def row_sums(dO, O):
    ### BEGIN SOLUTION
    products = dO.astype(np.float32) * O.astype(np.float32)
    return products.sum(axis=-1).swapaxes(1, 2)
    ### END SOLUTION


# %% check="10.row_sums"
check("10.row_sums", row_sums)

# %% [markdown]
# **2.** Write `add_gradients`, one visit: what a tile of queries and a tile of keys add to the gradients. All
# numbers are float64.
#
# | argument | shape | |
# |---|---|---|
# | `Q`, `dO` | (rows, d) | a tile of queries |
# | `K`, `V` | (cols, d) | a tile of keys |
# | `lse`, `D` | (rows,) | of the whole rows; lse is -inf for a row that sees no key |
# | `seen` | (rows, cols) bool | whether the query sees the key |
# | `scale` | a number | S = scale Q Kᵀ |
# | `dQ`, `dK`, `dV` | (rows, d), (cols, d), (cols, d) | add to them in place, `dV += ...` |
#
# It returns nothing and changes nothing else. About 7 lines. `check` calls it for all pairs of tiles in any
# order, with lengths that no tile divides, causal masks with rows that see no key, and heads that share keys;
# it compares with finite differences of exact attention, and with its gradients.
#
# A worked example: one tile, two queries and keys, d = 1, scale = 1, causal. Q = (1, 1), K = (0, ln 3), V =
# (4, 8), dO = (2, 1), one number a row. Then, rows one below the other:
#
# | row | S | lse | P | O | D | dP | dS |
# |---|---|---|---|---|---|---|---|
# | 0 | 0, hidden | 0 | 1, 0 | 4 | 8 | 8, 16 | 0, 0 |
# | 1 | 0, ln 3 | ln 4 | 0.25, 0.75 | 7 | 7 | 4, 8 | -0.75, 0.75 |
#
# and the gradients are

# %%
dO, Q, K, V = (np.array([x], float).T for x in ((2, 1), (1, 1), (0, np.log(3)), (4, 8)))
example = [x[None, :, None] for x in (dO, Q, K, V)]
exact = attention_backward(*example, softmax_scale=1.0, causal=True)
for name, gradient in zip(("dQ", "dK", "dV"), exact, strict=True):
    print(name, gradient.ravel().round(2))

# %% [markdown]
# Stuck? `hint("10.gradients", 1)`, then 2, then 3.


# %% answer="10.gradients"
def add_gradients(Q, K, V, dO, lse, D, seen, scale, dQ, dK, dV):
    ### BEGIN SOLUTION
    S = scale * (Q @ K.T)
    P = np.zeros_like(S)
    np.exp(S - lse[:, None], out=P, where=seen)  # FA2 Alg. 2 line 11
    dV += P.T @ dO
    dP = dO @ V.T
    dS = P * (dP - D[:, None])
    dQ += scale * (dS @ K)
    dK += scale * (dS.T @ Q)
    ### END SOLUTION


# %% check="10.gradients"
check("10.gradients", add_gradients)

# %% [markdown]
# ## Question
#
# With a causal mask, query 0 sees one key, its own. What is its row of dS, and what does it add to dQ, dK and
# dV?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# dS is 0, so it adds nothing to dQ and dK; it adds dO to dV of key 0. With one key P = 1 and O = V, so D is
# the dot product of dO and V, which is dP: the difference is 0 (row 0 of the worked example). The common
# wrong answer is "dS = dP, because P = 1". It forgets D: the weight of a single key is 1 whatever its score
# is, so no loss can depend on that score.
# </details>
#
# ## Further reading
#
# - FlashAttention-2 paper, section 2.3.2: the backward pass; section 3.1.2: Algorithm 2; section 3.2: its blocks own tiles
#   of keys, and add to dQ by atomics.
# - FlashAttention paper, appendix B: where D comes from, and memory that grows with N.
# - `fa2_numba/kernels/fa2_split_q_backward.py`, `backward_parts.py`; on tensor cores
#   `fa2_tensor_core_backward.py`.
# - Before: [09, what shape is a tensor core?](09_tensor_cores.ipynb). Next: [11, is it fast, and how do I
#   know?](11_measure.ipynb)

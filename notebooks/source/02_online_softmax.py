# %% [markdown]
# # 02. Can softmax be done in one pass?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | compute a softmax a tile at a time; read m, l and O out of a running kernel; merge two parts of a softmax |
# | You need | lessons 00 and 01; the exponential function |
# | Minutes | 35 |
# | Symbols | one row: scores S (N), values V (N, d), output O (d); m, the maximum so far; l, the sum so far |
#
# Lesson 01 ended with a wish: not to move S and P. Take one row of attention, one query. Its output is
#
# $$O = \sum_j \frac{e^{S_j - m}}{l} V_j, \qquad m = \max_j S_j, \qquad l = \sum_j e^{S_j - m}.$$
#
# m is subtracted so that no exponential becomes too large; it cancels. But m and l need all N scores, so it
# seems that every score is needed three times: for m, for l, and for O. The kernel `standard` writes S to
# memory for that.

# %% tags=["setup"]
import numpy as np
from numba import cuda

from fa2_numba import flash_attn_func
from fa2_numba.data import load_smollm2
from fa2_numba.kernels import fa2_split_q
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.online_softmax import draw_row, follow_row
from fa2_numba.lessons.show import show_source

# %% [markdown]
# ## Predict
#
# You read the scores once, a tile of them at a time, and throw each tile away. You keep m, l and O of what
# you have seen.
#
# 1. Tile 1 has scores 1 and 2, tile 2 has the score 5. After tile 1, m = 2 and l = e⁻¹ + 1. What must happen
#    to l when tile 2 comes, before its own exponential is added?
# 2. And to O?
# 3. What happens if tile 2 has no score above 2?
#
# ## Run it wrong
#
# Two ways that do not work. First, without any maximum: a score of 100 is too much for float32.

# %%
with np.errstate(over="ignore", invalid="ignore"):
    S = np.array([1, 2, 100], np.float32)
    print("exponentials:", np.exp(S), "softmax:", np.exp(S) / np.exp(S).sum())

# %% [markdown]
# Second, with the maximum of what has been seen so far, but without a thought for what was added before it
# changed. Tiles of 2 keys; V has one column, which says how much weight is on the last key:


# %%
def one_pass(S, V, rescale):
    m, l, O = -np.inf, 0.0, 0.0
    for j in range(0, len(S), 2):
        s, v = S[j : j + 2], V[j : j + 2]
        m_new = max(m, s.max())
        factor = np.exp(m - m_new) if rescale else 1.0
        p = np.exp(s - m_new)
        l = factor * l + p.sum()
        O = factor * O + p @ v
        m = m_new
    return O / l


S, V = np.array([1.0, 2.0, 5.0, 0.0, 8.0]), np.array([0.0, 0.0, 0.0, 0.0, 1.0])
P = np.exp(S - S.max()) / np.exp(S - S.max()).sum()
print(f"softmax gives the last key {P @ V:.4f}, one pass {one_pass(S, V, rescale=False):.4f}")

# %% [markdown]
# The last key should have nearly all of the weight and gets less than a third: the exponentials of the first two
# tiles were made with smaller maxima, m = 2 and m = 5, so they are too large by e⁶ and e³.
#
# And that is the way out. **What was summed with the old m is too large by one factor, the same for all of
# it**: exp(m_old - m_new) mends l and every column of O, without one old score.

# %%
right = one_pass(S, V, rescale=True)
print(f"with rescaling: {right:.4f}")
assert np.isclose(right, P @ V, rtol=1e-12)

# %% [markdown]
# ## Look
#
# These are the lines of a kernel that do it, for the rows that a thread shares. `rescale` is the factor;
# `exponentiate` turns scores into exp(S - m) and returns their sum; the last line adds P V to O:

# %%
show_source(
    fa2_split_q.make_forward,
    "for i in range(ROWS):  # FA2 Alg. 1 line 9",
    "accumulate_values(O_reg, S_reg",
)

# %% [markdown]
# Now a real row: the language model SmolLM2 reads *Alice in Wonderland*, layer 0, head 3, and the query is
# the word "use". The kernel runs on the simulator and is stopped before and after every tile of 8 keys, and
# m, l and O are read out of the threads' registers. A number at a step is the factor exp(m_old - m_new).

# %%
run = follow_row(layer=0, head=3, token=54)
draw_row(run)

# %%
print("tile     m      l    factor")
for tile, (m, l) in enumerate(zip(run.m[1:], run.l[1:], strict=True), start=1):
    factor = f"{run.factors[tile - 2]:8.2f}" if tile > 1 else ""
    print(f"{tile:4}{m.round(2) + 0:7.2f}{l:7.2f}{factor}")
P = np.exp(run.S - run.S.max())
assert np.allclose(run.l[-1], P.sum(), rtol=1e-5)
assert np.allclose(run.O[-1] / run.l[-1], P @ run.V / P.sum(), atol=1e-6)
assert np.allclose(run.O[-1] / run.l[-1], run.out, rtol=1e-6)

# %% [markdown]
# ## Understand
#
# - m rises four times after the first tile, and each time everything summed so far shrinks by one factor.
#   Tiles 4 and 5 bring no new maximum: their factor is 1, and nothing changes but what is added.
# - l falls in tiles 6 and 7, although exponentials are added: the old ones are worth less than it seemed. The
#   dashed curve shows the same l measured with the last m; it only rises.
# - O / l is the exact attention over the keys seen so far, after every tile. There is no approximation to
#   improve, only keys that have not been seen. After the last tile, O / l is the output (dotted lines).
# - The kernel divides once, at the end. How much that saves is the question of lesson 05.
#
# **Old work is rescaled, never redone.** Each score is made, used and forgotten on the chip, so S and P need
# no memory at all. At the end the kernel keeps one number of the row, LSE = m + ln l:

# %%
print(f"m + ln l = {run.m[-1] + np.log(run.l[-1]):.5f}, written by the kernel: {run.lse:.5f}")
exact = np.log(np.exp(run.S.astype(np.float64)).sum())
assert np.isclose(run.lse, exact, rtol=1e-6)

# %% [markdown]
# Where there is a GPU, the same kernel runs there, over the whole sequence; here is its LSE of our row:

# %%
if cuda.is_available():
    data = load_smollm2(0)
    q, k, v = (cuda.to_device(np.ascontiguousarray(x[:, :55], np.float32)) for x in data[1:])
    _, lse = flash_attn_func(q, k, v, causal=True, rung="fa2_split_q", return_lse=True)
    print(f"on the GPU: {lse.copy_to_host()[0, 3, 54]:.5f}")

# %% [markdown]
# ## Exercise
#
# Two tiles, two warps, two GPUs: wherever keys are shared out, the parts must become one. Write
# `merge(a, b)`. Each part is a tuple (m, l, o) of float64 arrays, for several rows: m and l are (rows,), o is
# (rows, d), not divided by l. Return m, l and o of all keys of both parts, as new arrays. A part that has no
# key, or none that a row may see, has m = -inf, l = 0 and o = 0; if both parts are so, the result is, too.
# Scores may be as far apart as 10,000. About 6 lines.
#
# A worked example, one row, d = 1, exponentials to two digits:
#
# | | scores | values | m | l | o |
# |---|---|---|---|---|---|
# | a | 1, 2 | 10, 20 | 2 | 0.37 + 1 = 1.37 | 3.68 + 20 = 23.68 |
# | b | 3, 0 | 30, 40 | 3 | 1 + 0.05 = 1.05 | 30 + 1.99 = 31.99 |
# | merged | | | 3 | 0.37 x 1.37 + 1.05 = 1.55 | 0.37 x 23.68 + 31.99 = 40.70 |
#
# (0.37 is e⁻¹, the factor of a; that of b is 1.) Stuck? `hint("02.merge", 1)`, then 2, then 3.


# %% answer="02.merge"
def merge(a, b):
    m_a, l_a, o_a = a
    m_b, l_b, o_b = b
    ### BEGIN SOLUTION
    m = np.maximum(m_a, m_b)
    safe = np.where(np.isneginf(m), 0, m)
    alpha = np.exp(m_a - safe)
    beta = np.exp(m_b - safe)
    l = alpha * l_a + beta * l_b
    o = alpha[:, None] * o_a + beta[:, None] * o_b
    return m, l, o
    ### END SOLUTION


# %% check="02.merge"
check("02.merge", merge)

# %% [markdown]
# Because merging may be done in any order and any grouping, the work may be split in any way: tiles after
# each other (here), warps beside each other (lesson 07), or even GPUs.
#
# ## Question
#
# A row's scores come in 8 tiles and happen to be sorted, the largest first. How often is O rescaled by a
# factor below 1? And if they are sorted the other way?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Never: the first tile has the maximum. The other way round, in each of the 7 tiles that follow the first.
# (The first has nothing to rescale: m was -inf, and exp(-inf) = 0 times 0 is 0.) The result is the same but
# for rounding. "Never, and never, since softmax does not depend on the order" is the wrong answer: the
# result does not, the work does. Our kernels multiply by the factor in every tile, also when it is 1.
# </details>
#
# ## Further reading
#
# - Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018: m and l in one pass.
# - FlashAttention paper, section 3.1: with O, and in tiles. FlashAttention-2 paper, section 2.3.
# - `fa2_numba/device/softmax.py`: `row_max`, `exponentiate`, `log_sum_exp`.
# - Before: [01, why is textbook attention slow?](01_textbook.ipynb) Next: [03, where do GPU bugs
#   hide?](03_gpu_bugs.ipynb)

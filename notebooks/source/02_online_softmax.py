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
# Two ways that do not work. First, without any maximum: e¹⁰⁰ is too large for float32, and inf / inf is not a
# number.

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
# So, in the prediction's example, the factor is e² / e⁵ = e⁻³, for l and for O. If tile 2 had no score above 2,
# m would stay, the factor would be e⁰ = 1, and the exponentials of tile 2 would just be added.

# %% [markdown]
# ## Look
#
# These are the lines of a kernel that do it, for the rows that a thread has a part of. `rescale` is the
# factor; `exponentiate` turns scores into exp(S - m) and returns their sum; the last line adds to O the
# product of these and V:

# %%
show_source(
    fa2_split_q.make_forward,
    "for i in range(ROWS):  # FA2 Alg. 1 line 9",
    "accumulate_values(O_reg, S_reg",
)

# %% [markdown]
# `finite_max(m)` is m, but 0 if m is -inf, as it is while a row has seen no key: -inf - -inf would be NaN. In the
# first tile the factor is exp(-inf) = 0, and multiplies zeros.
#
# Now a real row: the language model SmolLM2 reads *Alice in Wonderland*, layer 0, head 3, and the query is
# the word "use", which sees itself and the 54 tokens (words, parts of words, signs) before it. The kernel runs
# on the simulator, in tiles of 8 keys. It is stopped in every tile, and S, m, l, O and `rescale` are read out of
# its threads. A number at a step of m is the factor.

# %%
run = follow_row(layer=0, head=3, token=54)
draw_row(run)

# %% [markdown]
# The same in numbers: l before, times the factor, plus what is added, is l. The last lines of the cell hold the
# final l and O against a softmax of the whole row at once:

# %%
print("tile     m  l before  factor   added       l")
rows = zip(run.m[1:], run.l, run.factors, run.added, run.l[1:], strict=False)
for tile, (m, before, factor, added, l) in enumerate(rows, start=1):
    print(f"{tile:4}{m.round(2) + 0:6.2f}{before:10.2f}{factor:8.2f}{added:8.2f}{l:8.2f}")
P = np.exp(run.S - run.S.max())
assert np.allclose(run.l[-1], P.sum(), rtol=1e-5)
assert np.allclose(run.O[-1] / run.l[-1], P @ run.V / P.sum(), atol=1e-6)
assert np.allclose(run.O[-1] / run.l[-1], run.out, rtol=1e-6)

# %% [markdown]
# ## Understand
#
# - m rises four times after the first tile, and each time everything summed so far shrinks by one factor.
#   Tiles 4 and 5 bring no new maximum: their factor is 1, and nothing changes but what is added.
# - l falls in tiles 6 and 7, although exponentials are added: the old ones, measured with the new m, are worth
#   less than it seemed.
# - O / l is the attention over the keys seen so far, after every tile. It is no estimate that gets better, it
#   only lacks the keys that have not been seen. After the last tile, O / l is the output (dotted lines).
# - The kernel divides by l only at the end. What that saves is the question of lesson 05.
#
# **Old work is rescaled, never redone.** Each score is made, used and forgotten on the chip: S and P are never
# written to HBM. What the kernel writes of a row is O / l and one number more, LSE = m + ln l, with which
# lesson 10 makes P anew:

# %%
print(f"m + ln l = {run.m[-1] + np.log(run.l[-1]):.5f}, written by the kernel: {run.lse:.5f}")
exact = np.log(np.exp(run.S.astype(np.float64)).sum())
assert np.isclose(run.lse, exact, rtol=1e-6)

# %% [markdown]
# Where there is a GPU, the same kernel runs there, with larger tiles, for all 55 queries and all heads. Its LSE
# of our row is the same but for rounding:

# %%
if cuda.is_available():
    data = load_smollm2(0)
    q, k, v = (cuda.to_device(np.ascontiguousarray(x[:, :55], np.float32)) for x in data[1:])
    _, lse = flash_attn_func(q, k, v, causal=True, rung="fa2_split_q", return_lse=True)
    on_gpu = lse.copy_to_host()[0, 3, 54]
    print(f"on the GPU: {on_gpu:.5f}")
    assert np.isclose(on_gpu, run.lse, rtol=1e-5)

# %% [markdown]
# ## Exercise
#
# Two tiles, two warps, two GPUs: wherever keys are shared out, the parts must become one. Write
# `merge(a, b)`. Each part is a tuple (m, l, o) of float64 arrays, for several rows: m and l are (rows,), o is
# (rows, d), not divided by l. Return the tuple (m, l, o) of all keys of both parts, and leave a and b as they
# are. Where a row sees no key of a part, that part has m = -inf, l = 0 and o = 0; where it sees none of
# either, so has the result. Scores may be as far apart as 10,000. About 7 lines.
#
# A worked example, one row, d = 1. Scores are in units of ln 2, which makes exponentials powers of 2: score 3
# means 3 ln 2, and e to that is 8.
#
# | | scores | values | m | l | o |
# |---|---|---|---|---|---|
# | a | 1, 2 | 10, 20 | 2 | 1/2 + 1 = 1.5 | 1/2 x 10 + 1 x 20 = 25 |
# | b | 3, 0 | 30, 40 | 3 | 1 + 1/8 = 1.125 | 1 x 30 + 1/8 x 40 = 35 |
# | merged | | | 3 | 1/2 x 1.5 + 1.125 = 1.875 | 1/2 x 25 + 35 = 47.5 |
#
# The factor of a is e to the (2 - 3) ln 2, which is 1/2; that of b is 1. Here b has the larger maximum; it may
# as well be a. Stuck? `hint("02.merge", 1)`, then 2, then 3.


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
# The judge merged parts in either order and in different groupings, and held each result against the whole row:
# but for rounding they agree. So the keys may be split in any way: into tiles after each other (here), among
# warps beside each other (lesson 07), or even among GPUs.
#
# ## Question
#
# A row's scores come in 8 tiles. All are different, and they happen to be sorted, the largest first. How often
# is what O holds rescaled by a factor below 1? And if they are sorted the other way?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Never: the first tile has the maximum. The other way round, in each of the 7 tiles that follow the first.
# (In the first, O holds nothing yet: the factor is 0, and multiplies 0.) The result is the same but for
# rounding. "As often either way, since softmax does not depend on the order" is a common wrong answer: the result
# does not, the way to it does. `fa2_split_q` multiplies in every tile all the same, also when the factor is 1;
# `fa2_tensor_core` asks first whether m would grow by much, and otherwise goes on with the m it has.
# </details>
#
# ## Further reading
#
# - Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3: m and l in one pass.
# - FlashAttention paper, section 3.1: with O, and in tiles.
# - FlashAttention-2 paper, section 2.3.1 (two tiles by hand) and 3.1.1 (O divided only at the end, and LSE).
# - `fa2_numba/device/softmax.py`: `row_max`, `exponentiate`, `log_sum_exp`.
# - Before: [01, why is textbook attention slow?](01_textbook.ipynb). Next: [03, where do GPU bugs
#   hide?](03_gpu_bugs.ipynb)

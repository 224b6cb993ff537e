# %% [markdown]
# # 08. Which tiles can be skipped, and which head reads which?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | tell tiles to skip, to mask and to leave alone; bound the loop over keys; map query heads to key-value heads |
# | You need | lesson 04 (tiles) and 07 (split-Q) |
# | Minutes | 35 |
# | Symbols | S, O; Nq queries, Nk keys; H query heads, Hk key-value heads |
#
# In a language model a token must not look at later ones: the *causal mask* hides the keys to the right of
# a query, and a hidden key gets the weight 0. And many models have fewer heads of keys and values than of
# queries, so that several query heads read one key-value head. Both are a matter of indices, and indices
# are where attention kernels go wrong without a sound.

# %% tags=["setup"]
import numpy as np
from numba import cuda

from fa2_numba import Simulator, flash_attn_func, simulate
from fa2_numba.config import TileConfig
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.textbook_roofline import recorded
from fa2_numba.lessons.figures.tile_maps import (
    draw_head_maps,
    draw_tile_maps,
    follow_heads,
    follow_tiles,
)
from fa2_numba.lessons.kernels.visibility import (
    bottom_right_keys,
    dealt_out,
    make_row_attention,
    neighbours,
    top_left_keys,
)
from fa2_numba.lessons.live import print_milliseconds
from fa2_numba.lessons.show import show_source
from fa2_numba.problem import Problem
from fa2_numba.reference import attention_forward, visible
from fa2_numba.testing import random_qkv
from fa2_numba.traffic import predict

# %% [markdown]
# With as many queries as keys, query i sees keys 0 to i. But when a model writes text, its few new tokens
# are the queries, and all tokens so far are the keys. The last query is then the last token, so the mask
# is aligned at the *bottom right*: the last query sees all keys. Three queries, five keys:

# %%
print(visible(3, 5, causal=True).astype(int))

# %% [markdown]
# ## Predict
#
# 1. There are 5 queries and 3 keys, causal. Which queries see nothing at all?
# 2. A causal head is cut into 5 x 5 tiles, Nq = Nk. How many of the 25 tiles need not be loaded? Of those
#    that are loaded, how many hold a hidden key?
# 3. There are 6 query heads and 2 key-value heads. Which query heads read key-value head 0?
#
# ## Run it wrong
#
# Here is a small kernel, a thread a row and a block a head, with two rules left open:

# %%
show_source(make_row_attention, "def row_attention", "share")

# %% [markdown]
# These are the two rules as somebody may write them who tests with equal lengths and equal heads:

# %%
show_source(top_left_keys)
print()
show_source(dealt_out)

# %% [markdown]
# The table shows the largest error of each row (down) and head (across) against exact attention. Four
# queries and keys, two heads each:


# %%
def errors(rules, seqlen_q, seqlen_k, heads, kv_heads):
    q, k, v = random_qkv(1, seqlen_q, seqlen_k, heads, kv_heads, 8, np.float32)
    out = np.full_like(q[0], np.nan)
    scale = np.float32(8**-0.5)
    kernel = simulate(make_row_attention(*rules), progress=False)
    kernel[heads, seqlen_q](q[0], k[0], v[0], out, scale)
    exact, _ = attention_forward(q, k, v, causal=True)
    return np.abs(out - exact[0]).max(axis=-1).round(2)


wrong = top_left_keys, dealt_out
print(errors(wrong, 4, 4, 2, 2))

# %% [markdown]
# All right, so it seems. Now with 4 queries and 7 keys, and then with 4 query heads on 2 key-value heads:

# %%
print(errors(wrong, 4, 7, 2, 2), errors(wrong, 4, 4, 4, 2), sep="\n\n")
assert (errors(wrong, 4, 4, 2, 2) == 0).all() and (errors(wrong, 4, 7, 2, 2) > 0).all()

# %% [markdown]
# With the lengths unequal every row is wrong. With the heads unequal, 1 and 2 are, which have been given
# each other's keys; 0 and 3 are right by luck. No address was out of bounds, nothing was NaN: only a
# comparison with exact attention at *unequal* lengths and heads tells. With the two right rules:

# %%
right = bottom_right_keys, neighbours
for sizes in ((4, 7, 4, 2), (7, 4, 4, 2), (1, 5, 6, 3)):
    assert (errors(right, *sizes) == 0).all()
print("bottom-right alignment and neighbouring heads: no row is wrong")

# %% [markdown]
# ## Look
#
# `fa2_split_q` works on tiles: a block owns a tile of queries and goes through tiles of keys from the left.
# We follow its blocks and note each tile of keys that one loads, and each that it masks. The tiles are
# 8 x 8, so that there are several:

# %%
square = follow_tiles(40, 40, causal=True)
maps = [
    follow_tiles(36, 36, causal=False),
    square,
    follow_tiles(20, 44, causal=True),
    follow_tiles(44, 20, causal=True),
]
draw_tile_maps(maps)

# %% [markdown]
# Grey tiles are never loaded; blue ones take the plain path; only orange ones, which the edge cuts, go
# through the mask. Where the last tile reaches past the last key, it needs the mask as well, also without
# a causal one: what lies past the end must not get a weight. In the last map three blocks visit nothing.
# Their rows see no key, and their output is 0. With 5 queries and 3 keys it is the first two; keys that
# each query sees:

# %%
print(visible(5, 3, causal=True).sum(axis=1))

# %% [markdown]
# And the heads: which key-value head does the block of each query head load?

# %%
heads = {
    f"{name}\n6 query heads, {n} key-value head{'s' * (n > 1)}": follow_heads(6, n)
    for name, n in (("multi-head (MHA)", 6), ("grouped-query (GQA)", 2), ("multi-query (MQA)", 1))
}
draw_head_maps(heads)

# %% [markdown]
# ## Understand
#
# **Two of the three kinds of tile need no mask.** A hidden tile is not visited, a fully visible one needs
# no comparison, and what is left is the tiles on the edge: one a row of square tiles where Nq = Nk.

# %%
print(square.counts)
assert list(square.counts.values()) == [5 * 4 // 2, 5, 5 * 4 // 2]
t = 16384 // 64
print(f"N = 16,384 in tiles of 64: {t:,} of {t * (t + 1) // 2:,} visited tiles are masked")

# %% [markdown]
# So for a long sequence the comparisons for the mask hardly count. What counts is skipping: nearly half of the products are
# never made. Exactly, in operations of the products, and measured on an H200 (4 heads of 16,384 tokens):

# %%
long = [Problem(1, 1, 1, 16384, 16384, 64, causal=causal) for causal in (False, True)]
for rung in ("standard", "fa2_split_q"):
    plain, causal = (
        predict(rung, problem, TileConfig(64, 64, 64)).matmul_flops for problem in long
    )
    ms = {
        record["causal"]: record["ms"]
        for record in recorded("ladder")["records"]
        if (record["name"], record["seqlen"]) == (rung, 16384)
    }
    print(f"{rung}: {causal / plain:.3f} of the operations, {ms[True] / ms[False]:.2f} of the time")

# %% [markdown]
# `standard` computes every score and then throws the hidden ones away. (Why `fa2_split_q` saves somewhat
# more time than operations has not been measured.)
#
# Where there is a GPU, the same there, in turns, 4 x 16 heads of 2048 tokens:

# %%
if cuda.is_available():
    q, k, v = (cuda.to_device(x) for x in random_qkv(4, 2048, 2048, 16, 16, 64, np.float32))
    masks = {"no mask": False, "causal": True}
    print_milliseconds(
        {
            name: lambda causal=causal: flash_attn_func(q, k, v, causal=causal, rung="fa2_split_q")
            for name, causal in masks.items()
        }
    )

# %% [markdown]
# - How many tiles a block visits is decided by its *last* row, the one that sees most keys. Where masking
#   begins is decided by its *first* row, which sees fewest.
# - The last tile of queries may have fewer rows than `block_m`. Counting on past the last query must not
#   bring more tiles: nobody sees more than Nk keys.
# - H / Hk neighbouring query heads share a key-value head. What this saves is memory: K and V are smaller.
#   This kernel still has a block for each query head, and each loads its tiles for itself:

# %%
for kv_heads in (6, 2, 1):
    q, k, v = random_qkv(1, 16, 16, 6, kv_heads, 16, np.float32)
    machine = Simulator(checks=False, progress=False)
    _, report = flash_attn_func(q, k, v, rung="fa2_split_q", machine=machine, report=True)
    print(
        f"Hk = {kv_heads}: K and V are {k.nbytes + v.nbytes:,} bytes, "
        f"{report.global_load_bytes - q.nbytes:,} bytes of them are loaded"
    )

# %% [markdown]
# On a GPU the blocks of a group ask for the same addresses, so that a cache can answer all but the first.
#
# ## Exercise
#
# **1.** Write `n_block_range(first_row, block_m, block_n, seqlen_q, seqlen_k, causal)` for the block whose
# tile of queries begins at `first_row` and has `block_m` rows (fewer, if the queries end before). Key
# tile n holds keys `n * block_n` to `(n + 1) * block_n - 1`. Return two integers: how many key tiles the
# block visits, from tile 0 on, so that no key is lost which one of its rows sees; and the first visited
# tile that needs a mask, because one of the rows does not see all of it or because it reaches past the
# last key (the number of visited tiles, if none needs one). About 6 lines.
#
# A worked example, 4 queries and 4 keys, tiles of 2 x 2:
#
# | first_row | causal | the rows see | returns |
# |---|---|---|---|
# | 0 | True | keys 0; keys 0, 1 | (1, 0) |
# | 2 | True | keys 0 to 2; keys 0 to 3 | (2, 1) |
# | 0 | False | keys 0 to 3, both | (2, 2) |
#
# `check` compares with the mask of exact attention, for all small problems. Stuck?
# `hint("08.loop_bounds", 1)`, then 2, then 3.


# %% answer="08.loop_bounds"
def n_block_range(first_row, block_m, block_n, seqlen_q, seqlen_k, causal):
    ### BEGIN SOLUTION
    def keys(row):
        if not causal:
            return seqlen_k
        return max(0, min(seqlen_k, row + 1 + seqlen_k - seqlen_q))

    most, fewest = keys(first_row + block_m - 1), keys(first_row)
    return -(-most // block_n), fewest // block_n
    ### END SOLUTION


# %% check="08.loop_bounds"
check("08.loop_bounds", n_block_range)

# %% [markdown]
# **2.** Write `kv_head_of(head, heads, kv_heads)`: the key-value head that query head `head` reads, an
# integer. `heads` is a multiple of `kv_heads`; equally many neighbours share one. About 1 line. An
# example: of 4 query heads and 2 key-value heads, 0 and 1 read head 0, 2 and 3 read head 1.
# Stuck? `hint("08.head_map", 1)`, then 2, then 3.


# %% answer="08.head_map"
def kv_head_of(head, heads, kv_heads):
    ### BEGIN SOLUTION
    return head // (heads // kv_heads)
    ### END SOLUTION


# %% check="08.head_map"
check("08.head_map", kv_head_of)

# %% [markdown]
# ## Question
#
# A model writes its 1000th token: one query, 1000 keys, causal. In tiles of 64 keys, how many tiles does
# the block visit, and how many of them does it mask?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Sixteen, and it masks one. The query is the last token and sees all 1000 keys; the sixteenth tile needs
# the mask because the last key is not its last (15 x 64 = 960). The common wrong answer is "one tile, for query 0
# sees key 0": that is the top-left alignment, with which the model would forget all it has written.
# </details>
#
# ## Further reading
#
# - FlashAttention-2 paper, section 3.1: causal masking, multi-query and grouped-query attention.
# - Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need" (multi-query attention); Ainslie
#   and others, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints".
# - `fa2_numba/device/tiles.py` (`make_count_n_blocks`, `locate_head`) and `mask.py` (`make_needs_mask`):
#   the same answers as device functions. Compare yours with them.
# - Before: [07, who owns which numbers?](07_split_q.ipynb). Next: [09, what shape is a tensor
#   core?](09_tensor_cores.ipynb)

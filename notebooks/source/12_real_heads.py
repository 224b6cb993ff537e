# %% [markdown]
# # 12. What does a real model attend to?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | run a kernel on the Q, K and V of a language model; read attention weights off LSE, one at a time; find a sink |
# | You need | lessons 02 and 08 |
# | Minutes | 35 |
# | Symbols | S = scale Q Kᵀ; P = exp(S - lse); lse = m + ln l, one number for each row of a head |
#
# So far Q, K and V were mostly random. Here they are those of SmolLM2, a small language model, which reads the
# beginning of *Alice in Wonderland*: layers 0 and 15, 9 query heads and 3 key-value heads each, so three
# query heads share the keys and values of one.

# %% tags=["setup"]
import numpy as np
from numba import cuda

from fa2_numba import flash_attn_func
from fa2_numba.data import load_smollm2
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.real_heads import (
    draw_maps,
    draw_overlap,
    draw_shares,
    means_of_overlap,
    run_layer,
)
from fa2_numba.lessons.show import show_source

# %%
layer = load_smollm2(15)
print(f"{len(layer.tokens)} tokens: {''.join(layer.tokens[:30])} ...")
print("q", layer.q.shape, "k and v", layer.k.shape, layer.q.dtype)

# %% [markdown]
# ## Predict
#
# The mask is causal, so a word looks at itself and at what came before.
#
# 1. Which word do you expect to get most attention, on average over all later words and all heads?
# 2. The kernel returns O and lse, and never writes P. How can P be looked at nevertheless, and what does one
#    element of it cost?
# 3. Three heads share keys and values. Will they look at the same words?
#
# ## Run it wrong
#
# `run_layer` runs `fa2_split_q` on the first 64 tokens, on the simulator, and keeps lse:

# %%
show_source(run_layer)

# %%
first, middle = run_layer(0, tokens=64), run_layer(15, tokens=64)

# %% [markdown]
# Which head looks at the first word most? A first try: the head whose queries have the highest scores with
# its key, on average.

# %%
group = middle.q.shape[1] // middle.k.shape[1]
scores = [
    (middle.q[:, h] @ middle.k[0, h // group]).mean() * middle.q.shape[2] ** -0.5 for h in range(9)
]
print("mean score of the first key, by head:", np.round(scores, 1))
print("so head", int(np.argmax(scores)))

# %% [markdown]
# A score alone says little: softmax compares it with the other scores of its row, and heads differ in how
# high all of theirs are. What a row's scores amount to is exactly lse, and it makes a score a weight:
# P = exp(S - lse).

# %%
given = middle.weights_of_key(0).mean(axis=1)
print("mean weight of the first key, by head:", np.round(given, 2))
print("so head", int(np.argmax(given)))
assert ((given > 0.43) & (given < 0.88)).sum() == 8
assert np.argmax(given) != np.argmax(scores)

# %% [markdown]
# ## Look
#
# Each bar is a head; heads between two lines share keys and values.

# %%
draw_shares([first, middle])

# %%
draw_maps(
    {
        "layer 15, head 6: a sink": (middle, 6),
        "layer 15, head 2: near, and a sink": (middle, 2),
        "layer 0, head 3: near": (first, 3),
    },
    tokens=20,
)

# %% [markdown]
# ## Understand
#
# - In layer 15, over these 64 tokens, eight of the nine heads give 44 to 87 % of their attention to the first
#   token. It is "Alice" here; the paper on sinks says that it is the place that counts, not the word. Softmax
#   has to give away all of its weight; a head that finds nothing to do leaves it where it does no harm. That
#   place is called an **attention sink**.
# - In layer 0 there is no sink. Some heads look near by, others at many words a little.
# - Each weight was computed alone, exp(S - lse), from one score and one number of its row. Whoever wants one
#   column of P pays for one column:

# %%
show_source(type(middle).weights_of_key)

# %% [markdown]
# Do heads that share keys and values look at the same words? The number in a square is what two heads give
# to the same keys, on average; frames are around heads with the same keys and values.

# %%
draw_overlap(middle)

# %%
for heads in (first, middle):
    inside, outside = means_of_overlap(heads)
    print(f"layer {heads.layer}: {inside:.0%} with the same keys and values, {outside:.0%} without")
    first_key = heads.weights_of_key(0)
    common = np.minimum(first_key[:, None], first_key).mean(axis=2)
    print(f"   of which the first token is {common[~np.eye(9, dtype=bool)].mean():.0%}")

# %% [markdown]
# Only slightly more than heads that do not; and in layer 15 most of what two heads have in common is the
# sink. Heads 0 and 2 of that layer read the very same keys; one is a sink, the other looks near. It is the
# *queries* that differ: heads share what can be found, not what they search for.
#
# (64 tokens of one text are no study of a model. What holds for more is in the papers below.)
#
# **Exact attention, real data**: the weights above are those of the float64 definition but for rounding;
# `run_layer` asserts it. An approximation that dropped far keys would have dropped the sink.
#
# Where there is a GPU, it reads all 256 tokens at once. Every head's share of the first token is smaller
# then, as there are more keys to choose from; head 6 still has the largest, by a little:

# %%
if cuda.is_available():
    q, k, v = (cuda.to_device(np.ascontiguousarray(x)) for x in (layer.q, layer.k, layer.v))
    _, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    lse = lse.copy_to_host()[0]
    S = np.einsum("nhd,hd->hn", layer.q[0].astype(float), np.repeat(layer.k[0, 0], 3, axis=0))
    given_256 = np.exp(S / 8 - lse).mean(axis=1)
    print("256 tokens, by head:", given_256.round(3))
    assert np.argmax(given_256) == 6 and (given_256 < given).all()

# %% [markdown]
# ## Exercise
#
# Write `sink_head(q, k, lse)`: the query head that gives the most to the first key, and its share. `q` is
# (seqlen_q, heads, d) and `k` (seqlen_k, kv_heads, d), float32; `lse` (heads, seqlen_q) comes from a causal
# kernel with scale d ** -0.5, natural logarithm. Query head h reads the keys of head h // (heads // kv_heads).
# The share is the mean weight of key 0 over the queries that see a key; queries that see none have lse =
# -inf. Return `(head, share)`. Do not build P: the checker watches the memory. About 8 lines.
#
# A worked example with d = 4 (scale 0.5), one head, 4 queries, whose scores with key 0 are
# `q[:, 0] @ k[0, 0]` = 0, 2, 2, 4:
#
# | query | 0 | 1 | 2 | 3 |
# |---|---|---|---|---|
# | score times scale | 0 | 1 | 1 | 2 |
# | lse | 0 | 1.7 | 2.4 | 2.7 |
# | weight of key 0 | e⁰ = 1 | 0.50 | 0.25 | 0.50 |
#
# The share is (1 + 0.50 + 0.25 + 0.50) / 4 = 0.56, and the head is 0. Stuck? `hint("12.sink_head", 1)`, then
# 2, then 3.


# %% answer="12.sink_head"
def sink_head(q, k, lse):
    ### BEGIN SOLUTION
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    shares = []
    for h in range(heads):
        s = q[:, h] @ k[0, h // group] * q.shape[2] ** -0.5
        sees = np.isfinite(lse[h])
        shares.append(np.exp(s[sees] - lse[h][sees]).mean())
    head = int(np.argmax(shares))
    return head, float(shares[head])
    ### END SOLUTION


# %% check="12.sink_head"
check("12.sink_head", sink_head)

# %% [markdown]
# ## Question
#
# To save memory, somebody keeps only the keys and values of the last 32 tokens while the model writes. What
# would that do to head 6 of layer 15?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Most of its weight goes to the first token. Without that key, softmax gives the same weight away again, to
# keys that had next to none, and O becomes a mixture of values that the head had not asked for. "Little,
# for the first token says nothing about a far sentence" is the wrong answer: it mistakes weight for
# meaning. Keeping the first few tokens beside the last ones repairs most of it; that is what the paper on
# attention sinks found.
# </details>
#
# ## Further reading
#
# - Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
# - Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
#   2023.
# - `python -m fa2_numba --plot maps.png`: attention maps of any head, with the words.
# - Before: [11, is it fast, and how do I know?](11_measure.ipynb) Next: [13, what does Hopper
#   change?](13_hopper.ipynb)

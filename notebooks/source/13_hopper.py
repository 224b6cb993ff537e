# %% [markdown]
# # 13. FA3: what does Hopper change?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | say who loads, multiplies and waits in FlashAttention-3; read a pipeline's parities; predict which product hides which softmax |
# | You need | lessons 03 (barriers), 07 (who owns which numbers) and 09 (tensor cores) |
# | Minutes | 40 |
# | Symbols | *warpgroup*, four warps; *stage*, room for one tile in shared memory; *phase*, what a barrier waits for once |
#
# FlashAttention-1 splits K among the warps, FlashAttention-2 Q. On a Hopper GPU (H100, H200) the products became so
# fast that everything else shows: loading, waiting, exponentials. FlashAttention-3 splits the *work*: some warps load,
# others compute, and they hardly ever wait for each other. All of it runs here, in the simulator.

# %% tags=["setup"]
import numpy as np

from fa2_numba import simulate
from fa2_numba.device.mbarrier import Phases
from fa2_numba.hopper_config import choose_hopper_tiles
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.roles import draw_roles
from fa2_numba.lessons.kernels.pipeline import CHUNK, THREADS, first_pipeline, make_pipeline
from fa2_numba.lessons.roles import Durations, record_calls, schedule, simulated_limits
from fa2_numba.rung_diff import diff_rungs

# %% [markdown]
# ## Predict
#
# 1. In `fa2_tensor_core` each warp computes S, then the softmax, then P V. What do the tensor cores do during the
#    softmax, if no other block is there?
# 2. One thread loads tiles for all others, ahead of time, into a ring of two stages. How does it learn that a stage may
#    be overwritten? How do the others learn that a tile is there?
# 3. Two warpgroups, each with its own rows of Q, use the same tensor cores. Should both multiply at the same time?
#
# ## Run it wrong
#
# A small pipeline: one thread, the *producer*, copies chunks of 32 numbers into a ring of stages, and a warp, the
# *consumer*, doubles them. Each stage has two barriers in shared memory, `full` and `empty`. Such an *mbarrier* counts
# arrivals, and bytes that copies bring; when all are there its phase is complete, and the next begins. Phases are told
# apart by their parity, 0, 1, 0, 1, ... Chunk `number` goes to stage `number % stages`, and changes parity with every
# round: so both wait for `number // stages % 2`. Do they?

# %%
x = np.arange(4 * CHUNK, dtype=np.float32)
out = np.full_like(x, np.nan)
try:
    simulate(make_pipeline(first_pipeline, stages=2), progress=False)[1, THREADS](x, out)
except Exception as refusal:
    print(f"{type(refusal).__name__}: {refusal}")

# %% [markdown]
# Nobody moves. The producer waits until somebody has emptied a stage that was never full, and the consumer waits for
# the producer. A fresh barrier is in phase 0, and the phase before that counts as complete:

# %%
barrier = Phases(1)
print("phase 0 complete:", barrier.is_complete(0), " phase 1 complete:", barrier.is_complete(1))
barrier.arrive()
print("phase 0 complete:", barrier.is_complete(0), " phase 1 complete:", barrier.is_complete(1))

# %% [markdown]
# What the producer must wait for instead is your exercise.
#
# ## Look
#
# The rung `fa3_hopper` has such rings for tiles of Q, of K and of V. Its producer is one thread; its consumers
# are warpgroups of 64 query rows each. The simulator runs it, and each warpgroup's calls are written down: copies, products,
# barriers, waits. The simulator knows no time, so the chart gives each step a made-up duration, in a GPU's proportions.

# %%
print(Durations())
variants = {
    "one consumer, in order": {"num_consumers": 1, "overlap": False},
    "one consumer, with overlap": {"num_consumers": 1},
    "two consumers, with overlap": {},
}
runs = {title: schedule(record_calls(192, **flags)) for title, flags in variants.items()}
draw_roles(runs)

# %% [markdown]
# Read from the top. *In order*: products wait for the softmax, and the softmax for products; the tensor cores rest half of
# the time. *With overlap*: `wgmma`, Hopper's product, is asynchronous. It is issued, and read later. So the consumer issues S of
# the *next* tile before P V of this one, and computes the softmax of that S while P V runs. *Two consumers*: one's
# softmax runs beside the other's products, and the tensor cores hardly rest. That is your third
# prediction: they take turns.

# %%
in_order, overlap, two = runs.values()
assert in_order.hidden() == 0 < overlap.hidden() < two.hidden()
assert in_order.busy < overlap.busy < two.busy
for title, run in runs.items():
    print(f"{title:28} {run.hidden():4.0%} of softmax beside products")

# %% [markdown]
# The top row, copies, is the producer: it is always ahead, by as many tiles as there are stages. With one stage it cannot be:

# %%
one_stage = schedule(record_calls(192, stages=1))
print(f"1 stage: {one_stage.span:g} units, 2 stages: {two.span:g}")
assert one_stage.span > 1.3 * two.span

# %% [markdown]
# ## Understand
#
# | | FlashAttention-1 | FlashAttention-2 | FlashAttention-3 |
# |---|---|---|---|
# | split among warps | K and V | Q | the work: load, compute |
# | a number crosses warps | partial rows, in every tile | never | never; tiles cross from producer to consumers |
# | all threads wait together | several times a tile | twice a tile | never, after the start |
# | tile of K arrives by | loads of all threads | `cp.async` of all threads | one copy, by the Tensor Memory Accelerator |
# | products | in order | in order | asynchronous, beside the softmax |
# | registers | alike | alike | few for the producer, many for consumers |
#
# The step from one to the other is the largest of the ladder:

# %%
diff = diff_rungs("fa2_tensor_core", "fa3_hopper")
print(f"{diff.changed} lines changed")

# %% [markdown]
# What is the same says more: mask, softmax, and who owns which element of S, P and O. P is still in registers
# just where the next product wants it.
#
# *Who waits for whom.* The producer waits for `empty`, a consumer for `full`, for its turn, and for its own products.
# Everything else is order within one warpgroup. Registers are moved at the start:

# %%
for head_dim in (64, 128):
    c = choose_hopper_tiles(head_dim, simulated_limits())
    print(
        f"head dim {head_dim}: {c.num_consumers} consumers of {c.consumer_registers} registers a "
        f"thread, a producer of {c.producer_registers}; {c.stages} stages, "
        f"{c.shared_bytes:,} bytes of shared memory"
    )

# %% [markdown]
# *Asynchronous means that somebody must wait.* A product reads shared memory after the line that issues it. A stage that
# is given back too early is overwritten under its hands; a P that is changed too early is multiplied half. A GPU shows
# wrong numbers, sometimes. The simulator lets copies land and products run as late as they may, and as early
# (`early=True`), and refuses what depends on it.
#
# The chart cannot say what turns are worth: its tensor cores take products in the order they come, which is one
# after the other anyway. In an exploratory version of this kernel, on an H200, head dim 128, overlap brought
# 580 to 667 TFLOP/s, and turns 653 to 667.
#
# ## Exercise
#
# ### The parities of a ring
#
# Write `cursor(number, stages, producer)` for the pipeline above: number and stages are int, producer is True or
# False. It returns two int: the stage of chunk `number`, and the parity that the producer waits for at `empty`, or the
# consumer at `full`, before it touches that stage. About 3 lines.
#
# A worked example, 2 stages:
#
# | chunk | stage | consumer waits for `full` | producer waits for `empty` |
# |---|---|---|---|
# | 0 | 0 | 0 | 1 (complete from the start) |
# | 1 | 1 | 0 | 1 |
# | 2 | 0 | 1 | 0 (chunk 0 was read) |
# | 3 | 1 | 1 | 0 |
# | 4 | 0 | 0 | 1 |
#
# Stuck? `hint("13.parity", 1)`, then 2, then 3.


# %% answer="13.parity"
def cursor(number, stages, producer):
    ### BEGIN SOLUTION
    lap = number // stages
    return number % stages, (lap + producer) % 2
    ### END SOLUTION


# %% check="13.parity"
check("13.parity", cursor)

# %% [markdown]
# ## Question
#
# A consumer has 64 rows of Q and up to 240 registers a thread. Why not one consumer with 128 rows, and
# half as many loads of K and V from shared memory?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Registers, first: with head dim 128, O takes 64 registers a thread for 64 rows, S for 128 keys another 64, and P 32. For
# 128 rows that is 320, and 255 are the limit. And then one consumer's softmax would have only its own P V to hide behind, as
# in the middle chart. "Because wgmma has 64 rows" is the common wrong answer: two of them
# make 128. That it costs more reads of K and V is true. Shared memory just keeps up.
# </details>
#
# ## Further reading
#
# - Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024, section 3.
# - `fa2_numba/kernels/fa3_hopper.py`: the kernel; `device/mbarrier.py`, `tma.py`, `wgmma.py`: its instructions, each with
#   its meaning; `lessons/roles.py`: the model of time.
# - Before: [12, what does a real model attend to?](12_real_heads.ipynb) This was the last lesson; the
#   [README](../README.md) has the rest of the package.

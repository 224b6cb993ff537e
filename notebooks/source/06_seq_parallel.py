# %% [markdown]
# # 06. FA2, step 2: why does one head leave the GPU idle?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | say how many blocks a grid has and where they run; give every query tile a block; predict how much of a GPU a grid uses |
# | You need | lessons 00 (grid, block) and 05 (`fa2_fewer_flops`) |
# | Minutes | 40 |
# | Symbols | B batches, H heads, N rows of Q and of K; BLOCK_M rows of a query tile |
#
# A GPU consists of *multiprocessors*, an H200 of 132. A block runs on one of them, from its first line to its last,
# and no other one can help it. So a grid with fewer blocks than there are multiprocessors leaves some with
# nothing to do, however long the blocks take.

# %% tags=["setup"]
import numpy as np
from numba import cuda

from fa2_numba.config import TileConfig
from fa2_numba.lessons.draw import H200_COMPUTE_CAPABILITY, REGISTERS, TIMELINE_RUNGS
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.flops import run_rung
from fa2_numba.lessons.figures.grids import (
    draw_lengths,
    draw_used,
    measured_timelines,
    picture_of,
    record_timelines,
)
from fa2_numba.lessons.figures.textbook_roofline import recorded
from fa2_numba.lessons.kernels.grid import block_number
from fa2_numba.lessons.occupancy import blocks_per_multiprocessor
from fa2_numba.lessons.timeline import measured_costs, schedule, tile_costs
from fa2_numba.problem import Problem
from fa2_numba.rung_diff import diff_rungs

# %% [markdown]
# ## Predict
#
# 1. `fa2_fewer_flops` has one block for each head. 16 heads on the 132 multiprocessors of an H200: how many have
#    work? And if the sequence is twice as long?
# 2. With one block for each tile of 64 queries instead, how many blocks do 16 heads of 4,096 tokens make?
# 3. 264 blocks, all equally long, fill two places on each of 132 multiprocessors. How much longer do 265 take?
#
# ## Run it wrong
#
# Slow first, and small: 2 heads of 96 tokens in tiles of 16. The simulator counts what each block did.

# %%
small, problem = TileConfig(16, 16, 16, num_warps=2), Problem(1, 2, 2, 96, 96, 16)
reports = {rung: run_rung(rung, problem, small) for rung in ("fa2_fewer_flops", "fa2_seq_parallel")}
for rung, report in reports.items():
    costs = measured_costs(report)
    print(f"{rung:16} {len(costs):2} blocks, {costs[0]:9,} FLOPs each, {costs.sum():,} in all")

# %% [markdown]
# The same work, to the last operation, in 2 blocks or in 12. The simulator runs blocks one after the other. A GPU
# does not: say it has 8 multiprocessors, and each takes a block as soon as it is free.

# %%
for rung, report in reports.items():
    timeline = schedule(measured_costs(report), multiprocessors=8, slots=1)
    busy = timeline.mean_utilisation.multiprocessors
    print(f"{rung:16} ends after {timeline.span:9,.0f} FLOPs; {busy:.0%} of multiprocessors busy")

# %% [markdown]
# With a block a head, 6 of the 8 stand still. No line of the kernel is slow; the launch is.
#
# ## Look
#
# The same on a GPU as large as an H200, 16 heads without a mask, at three lengths. Time counts the key tiles that a
# block visits. A column has one time axis, so that the two grids can be compared.

# %%
tile, lengths = TileConfig(64, 64, 64), (256, 1024, 4096)
draw_lengths(lengths, heads=16, config=tile, multiprocessors=132)

# %% [markdown]
# Above: 16 blocks, 16 multiprocessors, 12 %. A longer sequence makes the blocks longer, not more. Below,
# the sequence makes blocks. **A block for each query tile: parallelism over the sequence.** That is a model of how
# a GPU hands out blocks. Here is the truth. In these two launches on an H200, 16 causal heads of 4,096
# tokens, each block noted where it ran, when it began and when it ended:

# %%
measured = measured_timelines()
labelled = {TIMELINE_RUNGS[rung]: timeline for rung, timeline in measured.items()}
picture_of(labelled, "Measured on an NVIDIA H200: 16 causal heads of 4,096 tokens.")

# %%
slow, fast = measured.values()
print(
    f"{slow.blocks} blocks {slow.span:.1f} ms, {fast.blocks:,} blocks {fast.span:.1f} ms: ", end=""
)
print(f"{slow.span / fast.span:.0f} times as fast")

# %% [markdown]
# Where there is a GPU, here is the same on yours:

# %%
on_gpu = record_timelines(heads=16, seqlen=4096) if cuda.is_available() else None
picture_of(on_gpu, "Measured on this machine: 16 causal heads.") if on_gpu else None

# %% [markdown]
# ## Understand
#
# What did it take? The loop over query tiles is gone, and its index comes from the grid:

# %%
diff_rungs("fa2_fewer_flops", "fa2_seq_parallel")

# %% [markdown]
# So few lines were enough because step 1 had swapped the loops. Passes of a loop can become blocks if
# none needs what another one makes. Query tiles need nothing of each other: each has its own rows of Q, its own
# m, l and O, and only reads K and V. In FlashAttention-1 the outer loop runs over key tiles, and each pass changes
# all of O. Blocks made of those would have to merge their results.
#
# What does it cost? K and V are now read by several blocks that run at the same time, but not more often: each
# query tile read them before, too.

# %%
for name in ("global_load_bytes", "global_store_bytes", "matmul_flops", "other_flops"):
    before, after = (getattr(report, name) for report in reports.values())
    assert before == after
    print(f"{name:18} {before:9,} in both")

# %% [markdown]
# ### Places for blocks
#
# A multiprocessor holds several blocks at once if it has registers, shared memory and threads for all of them. A
# place for a block is called a *slot* here. For these two rungs an H200's multiprocessor has

# %%
for rung, registers in REGISTERS.items():
    room = blocks_per_multiprocessor(
        registers, tile.sliced_k_shared_bytes, tile.num_threads, H200_COMPUTE_CAPABILITY
    )
    assert room.blocks == measured[rung].slots
    print(f"{rung}: {room}")

# %% [markdown]
# Two on each of 132: 264 blocks run at once. That is a *wave*; then comes the next. If blocks are equally long,
# waves are, too, and the last one may be nearly empty. On the right this is drawn for 1 to 1,000 blocks, by the model.
# On the left, what it says of an H200 over N, with a causal mask, and what was measured:

# %%
many = [64 * n for n in (*range(1, 33), *range(36, 65, 4), *range(80, 257, 16))]
draw_used(many, heads=(16, 1), config=tile, most_blocks=1000)

# %%
for blocks in (264, 265, 528):
    timeline = schedule(np.ones(blocks), multiprocessors=132, slots=2, unit="waves")
    used = timeline.mean_utilisation.slots
    print(f"{blocks} blocks: waves {timeline.span:.0f}, slots used {used:.0%}")

# %% [markdown]
# One block more, and it takes twice as long: that was your third prediction. With many waves it matters less.
#
# - *One head alone* needs a long sequence even so. The dash-dotted curve ends at N = 16,384: 256 blocks, room for
#   all at once, and still 74 % busy on average, for under a causal mask the early ones are soon done.
# - *Causal blocks are not equally long.* Late query tiles see more keys, and they come last in this grid. That is why the
#   measured run ends in a ragged edge. Handed out the other way round, long ones first, they end more evenly:

# %%
costs = tile_costs(tile, heads=16, seqlen_q=4096, seqlen_k=4096, causal=True)
for order, sorted_costs in (("as they are", costs), ("long ones first", costs[::-1])):
    busy = schedule(sorted_costs, 132, 2).mean_utilisation.multiprocessors
    print(f"{order:15} {busy:.0%} of multiprocessors busy")

# %% [markdown]
# - *Many heads need none of this.* Measured on an H200, without a mask, head dim 64:

# %%
records = [one for one in recorded("ladder")["records"] if not one["causal"]]
for one in (one for one in records if one["name"] == "fa2_fewer_flops"):
    heads, n = one["batch"] * one["heads"], one["seqlen"]
    (other,) = (
        x for x in records if x["name"] == "fa2_seq_parallel" and x["seqlen"] == one["seqlen"]
    )
    faster = one["ms"] / other["ms"]
    print(
        f"{heads:3} heads of {n:6,}: {heads:3} or {heads * n // 64:5,} blocks, "
        f"{one['ms']:7.1f} or {other['ms']:4.1f} ms, {faster:.3g} times as fast"
    )

# %% [markdown]
# But long sequences usually come in small batches, with few heads in all, for both take memory. That is the case
# that needed a second dimension of the grid.
#
# Two blocks on one multiprocessor share its arithmetic units. "Busy" says that there is work, not how fast it is
# done; the model therefore predicts shares, not milliseconds.
#
# ## Exercise
#
# ### Choose the grid
#
# Write `tile_grid(batches, heads, seqlen_q, block_m)`, all int. It returns the grid, one block for each query tile of each head of
# each batch, and a kernel in which every block finds out whose rows it has. About 4 lines.
#
# The kernel's argument `owner_gmem` is (batches, seqlen_q, heads) int32. A block writes its number into all rows of its
# tile. That loop is given: it wants `batch`, `head` and `first_row`. A grid has one to three dimensions, (x, y, z);
# x can be 2,147,483,647 long, y and z only 65,535.
#
# A worked example: 1 batch, 2 heads, 4 rows, tiles of 2. Four blocks, and the grid (2, 2), for instance. With
# heads in x, block (1, 0) is number 1 and has rows 0 and 1 of head 1:
#
# | row | head 0 | head 1 |
# |---|---|---|
# | 0 | 0 | 1 |
# | 1 | 0 | 1 |
# | 2 | 2 | 3 |
# | 3 | 2 | 3 |
#
# Stuck? `hint("06.grid", 1)`, then 2, then 3.


# %% answer="06.grid"
def tile_grid(batches, heads, seqlen_q, block_m):
    ### BEGIN SOLUTION
    grid = (batches * heads, -(-seqlen_q // block_m))
    ### END SOLUTION

    @cuda.jit
    def claim(owner_gmem):
        ### BEGIN SOLUTION
        batch = cuda.blockIdx.x // heads
        head = cuda.blockIdx.x % heads
        first_row = cuda.blockIdx.y * block_m
        ### END SOLUTION
        for row in range(first_row + cuda.threadIdx.x, first_row + block_m, cuda.blockDim.x):
            if row < seqlen_q:
                owner_gmem[batch, row, head] = block_number()

    return grid, claim


# %% check="06.grid"
check("06.grid", tile_grid)

# %% [markdown]
# ### Predict how much of a GPU it uses
#
# Write `share_used(blocks, multiprocessors, slots)`, three positive int. All blocks take equally long; `slots` of them run
# at once on a multiprocessor. A free multiprocessor gets a block before a busy one gets a second. Return two numbers
# from 0 to 1, averages over the whole run: the share of multiprocessors that have at least one block,
# and the share of slots that have one. About 5 lines.
#
# A worked example: 10 blocks, 4 multiprocessors, 2 slots each.
#
# | | blocks | multiprocessors busy | slots filled |
# |---|---|---|---|
# | wave 1 | 8 | 4 of 4 | 8 of 8 |
# | wave 2 | 2 | 2 of 4 | 2 of 8 |
# | average | | 6 / 8 = 0.75 | 10 / 16 = 0.625 |
#
# Stuck? `hint("06.utilisation", 1)`, then 2, then 3.


# %% answer="06.utilisation"
def share_used(blocks, multiprocessors, slots):
    ### BEGIN SOLUTION
    at_once = multiprocessors * slots
    waves = -(-blocks // at_once)
    last = blocks - (waves - 1) * at_once
    busy = (waves - 1) * multiprocessors + min(last, multiprocessors)
    return busy / (waves * multiprocessors), blocks / (waves * at_once)
    ### END SOLUTION


# %% check="06.utilisation"
check("06.utilisation", share_used)

# %% [markdown]
# ## Question
#
# A language model writes the next word: one query row in each of 16 heads, against 100,000 keys. How many blocks does
# the grid of `fa2_seq_parallel` have? Is the GPU busy?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Sixteen blocks: one query tile a head, with one row in it. So 116 of the 132 multiprocessors of an H200 idle while
# sixteen walk through 100,000 keys each. "Busy, because the sequence is long" is the common wrong answer. The grid
# runs over queries, and there is only one. To use the length of K and V one would have to give key tiles
# to different blocks. Then each block has an m, an l and an O of its own keys, and somebody has to merge
# them, as lesson 02 merges parts of a row. Kernels for decoding do that.
# </details>
#
# ## Further reading
#
# - FlashAttention-2 paper, section 3.2.
# - `fa2_numba/lessons/timeline.py` and `occupancy.py`: the model; `stamps.py`: how blocks note where and when they ran.
# - Before: [05, which FLOPs are not matmul?](05_fewer_flops.ipynb). Next: [07, who owns which
#   numbers?](07_split_q.ipynb)

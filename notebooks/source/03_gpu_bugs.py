# %% [markdown]
# # 03. Where do GPU bugs hide?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | find a race in a kernel whose answers are right; give the reason for each barrier; repair three broken kernels |
# | You need | lesson 00: grid, block, thread, warp |
# | Minutes | 40 |
# | Symbols | none; `tile` is shared memory |
#
# The threads of a block have memory in common, *shared memory*: near, fast and small. A tile that all of
# them need is loaded once and read by all. Who writes before whom is nobody's promise, unless the kernel
# has a *barrier*: `cuda.syncthreads()` lets no thread of the block go on before all have come to it.
#
# Three kinds of bug live there, and they have one thing in common: a test can pass.

# %% tags=["setup"]
import numpy as np
from numba import cuda, float32

from fa2_numba import simulate
from fa2_numba.constants import NEG_INF
from fa2_numba.kernels import standard
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.accesses import record
from fa2_numba.lessons.figures.races import draw_race_timelines
from fa2_numba.lessons.kernels.bugs import (
    MAX_THREADS,
    differences,
    differences_divergent,
    differences_racy,
    maxima_without_tail,
    reverse_tiles_racy,
)
from fa2_numba.lessons.show import expected, show_source
from fa2_numba.simulator import BarrierError, RaceError, UninitialisedReadError

# %% [markdown]
# This kernel, run by one block, is meant to give the differences between neighbours. Each thread puts its
# number where its right neighbour finds it:

# %%
show_source(differences_racy)

# %% [markdown]
# ## Predict
#
# Give it the squares 0, 1, 4, 9, ..., 49 and 8 threads; right are 0, 1, 3, 5, ..., 13.
#
# 1. What comes out if the threads run one after the other, thread 0 first, each to its end?
# 2. And thread 7 first?
# 3. You test it once, and the answer is right. What do you know now?
#
# ## Run it wrong
#
# With `checks=False` the simulator looks for no mistakes. `seed=None`, the default, runs the threads in
# the order of their numbers (until the first barrier, if there is one):

# %%
source = np.arange(8, dtype=np.float32) ** 2
right = np.diff(source, prepend=np.float32(0))


def run_racy(seed):
    target = np.full(8, np.nan, np.float32)
    simulate(differences_racy, checks=False, seed=seed)[1, 8](source, target)
    return target


print(run_racy(None), "right" if np.array_equal(run_racy(None), right) else "wrong")

# %% [markdown]
# A seed shuffles the order in which threads run. Here is one, and how many of a hundred go wrong:

# %%
print(run_racy(1), "right" if np.array_equal(run_racy(1), right) else "wrong")
print(sum(not np.array_equal(run_racy(seed), right) for seed in range(100)), "of 100 are wrong")

# %% [markdown]
# (`nan`, not a number, is what the simulator leaves in shared memory until somebody writes there. With
# thread 7 first, then 6 and so on, all but the first are `nan`: no left neighbour has written yet.) The kernel is broken, and
# the order of the numbers, the one that everybody tries first, does not show it.
#
# With checks, which are on unless you turn them off, the simulator refuses that order too:

# %%
with expected(RaceError):
    simulate(differences_racy)[1, 8](source, np.full(8, np.nan, np.float32))

# %% [markdown]
# The read came after the write. Nothing had made it come after the write.
#
# ## Look
#
# Two orders of the broken kernel, and one with a barrier between writing and reading. Each row is an
# element of `tile`; go along a row, and see whether a barrier stands between the write and the read:

# %%
target = np.full(8, np.nan, np.float32)
runs = {
    "no barrier, in index order": record(simulate(differences_racy)[1, 8], source, target),
    "no barrier, seed 1": record(simulate(differences_racy, seed=1)[1, 8], source, target),
    "with a barrier, seed 1": record(simulate(differences, seed=1)[1, 8], source, target),
}
draw_race_timelines(runs)

# %%
assert np.array_equal(target, right)
show_source(differences, "tile[t] = own", "target[t]")

# %% [markdown]
# ## Understand
#
# On the left and in the middle the same seven pairs race. In the middle three reads are too early, on the
# left none, by luck.
#
# **A race** is two threads at one address, at least one of them writing, and no barrier between. That is
# a property of the kernel, not of a run, so a run with the right answer does not disprove it. The
# simulator looks for exactly that, and finds it in whatever order the threads happen to run. (In shared
# memory, that is; races in global memory it does not see. And atomic additions to one address, lesson 10, do
# not race with each other.)
#
# So each barrier has a reason, and there are two:
#
# - *Read after write*: what I read, another one has written. The barrier comes after the write.
# - *Write after read*: what I overwrite, another one may still have to read. The barrier comes before the
#   write.
#
# A loop over tiles has both. In the last kernel of `standard` (lesson 01), a block takes one tile of V
# after the other:

# %%
show_source(standard.make_values, "for n_block", "accumulate_values(O_reg")

# %% [markdown]
# Why not a barrier after every line? Because at each of them every warp waits for the slowest. A report
# counts them:

# %%
print(simulate(differences)[1, 8](source, target).barriers, "barrier")

# %% [markdown]
# The other two bugs come from the end of an array, where a block has more threads than elements:
#
# - **A divergent barrier**: some threads of the block never come to it, or come to another one. CUDA
#   promises nothing then; a GPU may wait for ever, or go on as if all had been there.
# - **An uninitialised tail**: elements of shared memory that no thread has written are read all the same.
#   On a GPU there is what was left behind, perhaps by another kernel; if it happens to be a harmless
#   number, the answer is right.
#
# | bug | why a test passes | the simulator says |
# |---|---|---|
# | race | the order was a lucky one | `RaceError` |
# | divergent barrier | the size was a multiple of the block | `BarrierError` |
# | uninitialised tail | what was left behind did no harm | `UninitialisedReadError` |
#
# Where there is a GPU, launch the racy kernel a thousand times on two warps. A warp mostly moves
# together, which hides races within it; between warps anything goes. Whatever this prints, the kernel is
# wrong, and another GPU or the next version of the compiler may print something else:

# %%
if cuda.is_available():
    answer, wrong = cuda.device_array(64, np.float32), 0
    for launch in range(1000):
        # Another input each time: what the launch before left in shared memory is not right now.
        squares = (np.arange(64, dtype=np.float32) + launch) ** 2
        differences_racy[1, 64](cuda.to_device(squares), answer)
        right = np.diff(squares, prepend=np.float32(0))
        wrong += not np.array_equal(answer.copy_to_host(), right)
    print(wrong, "of 1000 launches gave a wrong answer")

# %% [markdown]
# ## Exercise
#
# Three broken kernels to repair. `check` runs yours with all checks on, on several sizes and under several
# orders of the threads, and counts barriers: more than needed are wrong, too.
# In all of them `source` and `target` are float32, and a block has at most `MAX_THREADS`, 64, threads.
#
# ### A race
#
# One block reverses an array tile by tile through `tile`, to which each number is written once; a tile has as
# many elements as the block has threads.
# `source` and `target` are (size,), and size is a multiple of the threads. With 4 threads, 1 2 3 4 5 6 7 8
# becomes 4 3 2 1 8 7 6 5. This one is right for one tile:

# %%
show_source(reverse_tiles_racy)

# %%
numbers = np.arange(1, 9, dtype=np.float32)
reversed_numbers = np.full(8, np.nan, np.float32)
simulate(reverse_tiles_racy)[1, 8](numbers, reversed_numbers)
print("one tile: ", reversed_numbers)
simulate(reverse_tiles_racy, checks=False)[1, 4](numbers, reversed_numbers)
print("two tiles:", reversed_numbers)

# %% [markdown]
# Repair it: `reverse_tiles(source, target)`, about 5 lines to write. Stuck? `hint("03.race", 1)`, then 2,
# then 3.


# %% answer="03.race"
@cuda.jit
def reverse_tiles(source, target):
    tile = cuda.shared.array(MAX_THREADS, float32)
    t, threads = cuda.threadIdx.x, cuda.blockDim.x
    ### BEGIN SOLUTION
    for first in range(0, source.size, threads):
        tile[t] = source[first + t]
        # Each thread reads what another one has written.
        cuda.syncthreads()
        target[first + t] = tile[threads - 1 - t]
        # The next tile overwrites what slower threads still read.
        cuda.syncthreads()
    ### END SOLUTION


# %% check="03.race"
check("03.race", reverse_tiles)

# %% [markdown]
# ### A divergent barrier
#
# The differences once more, now with several blocks and any size. The first element of each block stays
# as it is, so that blocks need nothing of each other. With 2 blocks of 4 threads, the 6 numbers 0 1 4 9 16
# 25 become 0 1 3 5 16 9.

# %%
show_source(differences_divergent)

# %%
squares = np.arange(6, dtype=np.float32) ** 2
with expected(BarrierError):
    simulate(differences_divergent)[2, 4](squares, np.full(6, np.nan, np.float32))

# %% [markdown]
# Repair it: `block_differences(source, target)`, both (size,), blocks x threads at least size. Each
# number of `source` is to be read once. About 8 lines to write. Stuck? `hint("03.divergence", 1)`, then 2,
# then 3.


# %% answer="03.divergence"
@cuda.jit
def block_differences(source, target):
    tile = cuda.shared.array(MAX_THREADS, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    ### BEGIN SOLUTION
    own = float32(0.0)
    if i < source.size:
        own = source[i]
        tile[t] = own
    # Each thread reads what its neighbour has written.
    cuda.syncthreads()
    if i < source.size:
        if t > 0:
            own -= tile[t - 1]
        target[i] = own
    ### END SOLUTION


# %% check="03.divergence"
check("03.divergence", block_differences)

# %% [markdown]
# ### An uninitialised tail
#
# The largest number of each block: in each step the lower half of the threads takes the larger one of two
# elements, until one is left. The number of threads is a power of 2. For 3 blocks of 4 threads and the 6
# numbers -5 -3 -6 -4 -2 -1:
#
# | `tile` | block 0 | block 1 | block 2 |
# |---|---|---|---|
# | loaded | -5 -3 -6 -4 | -2 -1 and nothing | nothing |
# | after 1 step | -5 -3 | -2 -1 | |
# | after 2 steps | -3 | -1 | |
#
# The largest number of none is -inf, `NEG_INF` here; so attention's row maximum m begins, too.

# %%
show_source(maxima_without_tail)

# %%
numbers = np.array([-5, -3, -6, -4, -2, -1], np.float32)
maxima = np.full(2, np.nan, np.float32)
simulate(maxima_without_tail, checks=False)[2, 4](numbers, maxima)
print("two blocks, no checks:", maxima)
with expected(UninitialisedReadError):
    simulate(maxima_without_tail)[2, 4](numbers, maxima)

# %% [markdown]
# Without checks the answer is right: what nothing has written is `nan` here, and this `max` happens to
# keep the number beside it. Repair it: `block_maxima(source, target)`, `source` (size,), `target` (blocks,). About 12 lines to write.
# Stuck? `hint("03.tail", 1)`, then 2, then 3.


# %% answer="03.tail"
@cuda.jit
def block_maxima(source, target):
    tile = cuda.shared.array(MAX_THREADS, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    ### BEGIN SOLUTION
    if i < source.size:
        tile[t] = source[i]
    else:
        tile[t] = NEG_INF
    # Each thread reads what another one has written.
    cuda.syncthreads()
    half = cuda.blockDim.x // 2
    while half > 0:
        if t < half:
            tile[t] = max(tile[t], tile[t + half])
        # The next step reads the maxima of this one.
        cuda.syncthreads()
        half = half // 2
    if t == 0:
        target[cuda.blockIdx.x] = tile[0]
    ### END SOLUTION


# %% check="03.tail"
check("03.tail", block_maxima)

# %% [markdown]
# ## Question
#
# Somebody takes one barrier out of a kernel. It is 3 % faster, and a thousand runs on a GPU give the right
# answer. What do you say?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Ask what the barrier was for. If another thread's write, or its read, was what it waited for, the kernel
# races now, and the runs do not matter. "A thousand runs are right, so it fails less often than once in a
# thousand" is wrong: the runs are not a thousand independent tries. One GPU, one compiler and one size
# give nearly the same timing again and again, and with another one it may fail always. What proves
# something is the reason, or a tool that looks for races rather than for wrong answers: the simulator's
# checks, or on a GPU `compute-sanitizer --tool racecheck`.
# </details>
#
# ## Further reading
#
# - CUDA C++ Programming Guide, "Synchronization Functions" and "Memory Fence Functions".
# - Compute Sanitizer documentation: on a GPU racecheck and synccheck look for the first two; initcheck for the
#   third, but in global memory only.
# - Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI 2009: the idea
#   behind `fa2_numba/simulator/regions.py`.
# - FlashAttention-2 paper, section 3.3: partial results that warps exchange through shared memory, and the
#   barriers this takes.
# - Before: [02, can softmax be done in one pass?](02_online_softmax.ipynb). Next: [04, what does
#   FlashAttention-1 do?](04_flash_attention_1.ipynb)

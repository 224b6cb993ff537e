# %% [markdown]
# # 00. What is a kernel, and does my machine run one?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | say what grid, block, warp and lane are; run a kernel without a GPU; guard the end of an array |
# | You need | Python and NumPy; no CUDA, no GPU |
# | Minutes | 25 |
# | Symbols | none yet |
#
# A GPU runs one function in thousands of threads at once. That function is a *kernel*. Here kernels are
# Python functions: Numba compiles them for a GPU, and our simulator runs the same functions, thread by
# thread, on any machine. First see what yours has.

# %% tags=["setup"]
import numpy as np
from numba import cuda

from fa2_numba import Stepper, simulate
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures import draw_threads, follow
from fa2_numba.lessons.kernels.first import copy_without_tail, double
from fa2_numba.lessons.show import expected, show_source
from fa2_numba.simulator import OutOfBoundsError

# %%
print("A GPU is here." if cuda.is_available() else "No GPU: the simulator runs the kernels.")

# %% [markdown]
# Whoever launches a kernel says how many *blocks* there are (the *grid*) and how many *threads* each
# block has. `kernel[2, 64](...)` starts 2 blocks of 64 threads. Every thread runs the same lines; only
# its number differs:

# %%
show_source(copy_without_tail)

# %% [markdown]
# `cuda.grid(1)` is the number of the thread among all threads of all blocks: block times threads a block,
# plus thread. So thread 5 of block 1 with 64 threads a block is number 69.
#
# ## Predict
#
# An array has 10 elements, and a block has 4 threads. How many blocks must the launch have? And what do
# the threads do that are too many?
#
# ## Run it wrong
#
# Three blocks are enough, twelve threads. Run the kernel above with them:

# %%
source, target = np.arange(10, dtype=np.float32), np.full(10, np.nan, np.float32)
with expected(OutOfBoundsError):
    simulate(copy_without_tail)[3, 4](source, target)

# %% [markdown]
# Threads 10 and 11 read past the end. The simulator refuses that and says who did it, and where. A GPU
# does not: it reads whatever lies behind the array, or ends the program, and which of the two may change
# from one day to the next.
#
# ## Look
#
# A kernel that doubles an array asks first whether its thread has an element:

# %%
show_source(double)

# %% [markdown]
# Run it with 2 blocks of 64 threads over 100 elements, and stop each block where its threads are about
# to write. On a GPU, 32 neighbouring threads of a block make a *warp*: they execute a statement
# together, and a thread's place among them is its *lane*.

# %%
source, target = np.arange(100, dtype=np.float32), np.full(100, np.nan, np.float32)
statement = "target[i] = 2 * source[i]"
stepper = Stepper(simulate(double)[2, 64], source, target)
draw_threads(follow(stepper, statement, blocks=2, threads=64), statement)

# %%
assert (target == 2 * source).all()

# %% [markdown]
# ## Understand
#
# - Blocks are independent: the simulator runs one after the other, a GPU as many at once as it has room
#   for. Nothing tells a block what another one is doing.
# - The 28 threads without an element still exist. They ask, and leave; the warp they are in goes on for
#   the 4 lanes that have one.
# - The simulator counts while it runs. A *request* is one instruction of a warp; it asks for up to 32
#   numbers at once:

# %%
report = simulate(double)[2, 64](source, target)
print(report.global_load_requests, "requests read", report.global_load_bytes, "bytes")

# %% [markdown]
# Four warps, but three requests of 32 and one of 4 make four: 100 numbers of 4 bytes are 400 bytes.
#
# Where there is a GPU, the very same function runs there, compiled:

# %%
if cuda.is_available():
    on_gpu = cuda.to_device(source)
    double[2, 64](on_gpu, on_gpu)
    assert (on_gpu.copy_to_host() == 2 * source).all()
    print("The GPU agrees with the simulator.")

# %% [markdown]
# ## Exercise
#
# Write `copy_with_tail(source, target)`, a kernel that copies an array and may be launched with more
# threads than there are elements. `source` and `target` are (size,) float32. About 3 lines.
#
# A worked example, 4 elements and 2 blocks of 4 threads:
#
# | thread | 0 | 1 | 2 | 3 | 4 to 7 |
# |---|---|---|---|---|---|
# | reads | `source[0]` | `source[1]` | `source[2]` | `source[3]` | nothing |
# | writes | `target[0]` | `target[1]` | `target[2]` | `target[3]` | nothing |
#
# Stuck? `hint("00.copy", 1)`, then 2, then 3.


# %% answer="00.copy"
@cuda.jit
def copy_with_tail(source, target):
    ### BEGIN SOLUTION
    i = cuda.grid(1)
    if i < source.size:
        target[i] = source[i]
    ### END SOLUTION


# %% check="00.copy"
check("00.copy", copy_with_tail)

# %% [markdown]
# ## Question
#
# A launch over 1000 elements uses blocks of 256 threads. How many warps does it start, and how many of
# them have nothing to do?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# Four blocks of 8 warps are 32. Elements end at thread 999, in warp 31 (threads 992 to 1023), so every
# warp has something to do; the last one for 8 of its lanes. "Thirty-two, and one is idle" mistakes a
# warp that is partly idle for one that is not needed: a GPU spends a whole warp on 8 numbers.
# </details>
#
# ## Further reading
#
# - Numba documentation, "Writing CUDA Kernels".
# - `fa2_numba/simulator`: how a kernel runs without a GPU.
# - Next: [01, why is textbook attention slow?](01_textbook.ipynb)

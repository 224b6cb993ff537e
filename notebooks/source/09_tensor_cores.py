# %% [markdown]
# # 09. What shape is a tensor core?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | put matrices into the registers of a warp as a tensor core wants them; find bank conflicts; swizzle a tile |
# | You need | lessons 00 and 07 |
# | Minutes | 45 |
# | Symbols | C += A B: A (16 x 16) and B (16 x 8) in 16 bits, C (16 x 8) in float32 |
#
# So far a thread multiplied numbers. A *tensor core* multiplies matrices: one instruction, `mma`, which the 32
# lanes of a warp execute together, is C += A B for a 16 x 16 A and a 16 x 8 B, 2048 multiply-adds. No lane
# holds a whole matrix. Each holds a *fragment*: four registers with two 16-bit elements each of A, two of B,
# four float32 of C.

# %% tags=["setup"]
import numpy as np
from numba import cuda

from fa2_numba import flash_attn_func, simulate
from fa2_numba.device import device_function
from fa2_numba.device.layouts import a_matrix_row, ac_element, b_element
from fa2_numba.device.ptx import pack_float16
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.figures.banks import (
    came_right,
    draw_banks,
    draw_mma_fragments,
    new_tile,
    read_tile,
)
from fa2_numba.lessons.kernels.fragments import (
    NARROW,
    in_memory_order,
    make_multiply,
    make_read_tile,
    row_major,
    swizzled,
)
from fa2_numba.lessons.show import show_source
from fa2_numba.testing import random_qkv

# %% [markdown]
# ## Predict
#
# 1. A has 256 elements, so each lane holds 8. Which 8 would you give to lane 5, if you were the hardware?
# 2. C has 128 elements, 4 a lane. After S = Q Kᵀ, S is a C; for O = P V, P has to be an A. What would you
#    wish for?
#
# ## Run it wrong
#
# The obvious guess: memory order, eight elements in a row for each lane. This kernel takes the guess as
# `a_element`; what `ac_place` says of B and C is right. `pack_float16` makes one 32-bit register of two
# numbers. The zeros behind each array of registers say where in it a matrix begins.

# %%
show_source(in_memory_order)
show_source(make_multiply, "def multiply", "C[row, col]")

# %%
A = np.arange(256, dtype=np.float32).reshape(16, 16)
B = np.eye(16, 8, dtype=np.float32)  # A B is the left half of A


def multiply(a_element):
    C = np.full((16, 8), np.nan, np.float32)
    simulate(make_multiply(a_element), progress=False)[1, 32](A, B, C)
    return C


C = multiply(in_memory_order)
print("row 0 of C:", C[0], "must be", (A @ B)[0])
print(f"{(A @ B == C).mean():.0%} of C are right")

# %% [markdown]
# No error, no NaN: numbers that look like numbers. A tensor core cannot know what you meant to put into a
# register.
#
# ## Look
#
# This is where it looks for them. The figure is drawn from the functions by which the kernels of this
# package know who holds what, and by which the simulator carries out `mma`. (That hardware agrees is checked
# further down, where there is a GPU.)

# %%
draw_mma_fragments()

# %%
# Lane 1's first register: elements 8 and 9 by the guess, taken for columns 2 and 3 of row 0.
assert [8 * 1, 8 * 1 + 1] == C[0, 2:4].tolist() and ac_element(1, 0, 0) == (0, 2)
assert (multiply(ac_element) == A @ B).all()
show_source(ac_element)
print("lane 5 holds of A:", [ac_element(5, i, j) for i in range(2) for j in range(4)])
print("lane 5 holds of B:", [b_element(5, i, 0) for i in range(4)])

# %% [markdown]
# ## Understand
#
# - The wrong row can be read now. The guess put elements 8 and 9 of A into lane 1's first register, and
#   `mma` took them for columns 2 and 3 of row 0, which is where they turned up in C.
# - Four lanes share a row of A; a lane has two neighbours of it, then two more 8 columns further. Its second
#   row is 8 further down. B lies like A transposed: four lanes share a column.
# - **A and C lie alike.** The S that Q Kᵀ leaves in registers as a C is, once its exponentials are taken and
#   rounded to 16 bits, the A of P V: `ac_element` is one function for both. P goes from one product to the
#   next without leaving its lane. **Registers have geometry**, and this one is a gift.
# - A row of S is spread over four lanes, so its maximum takes two shuffles; over a warp it would take five.
#
# How do fragments get into registers? Not one element at a time, as above. `ldmatrix` loads four 8 x 8
# matrices at once: each of the 32 lanes points to one of their rows in shared memory, 8 elements, a *chunk* of
# 16 bytes, and every lane gets its pairs. For an A, lanes 0 to 7 point to the first matrix, 8 to 15 to the one
# below, 16 to 31 to the two on the right. (For S = Q Kᵀ the B is Kᵀ, and B lies as A does, transposed: K is
# loaded as it stands. V is turned on its side by a variant of the instruction.)

# %%
print("lane: (row, chunk) it points to:", {lane: a_matrix_row(lane) for lane in (0, 1, 8, 16)})
show_source(make_read_tile, "for piece in range", "out[piece")

# %% [markdown]
# Shared memory is 32 banks side by side, each of which gives 4 bytes at a time. Eight lanes that read eight
# chunks want 128 bytes: all banks once, if each chunk lies in banks of its own. A tile with rows of 64
# elements has rows of 128 bytes, so all rows begin in bank 0, and chunk 2 of eight rows lies in the same
# four banks. The lanes wait for each other: *bank conflicts*. The simulator counts them, as times that a
# read had to be repeated:

# %%
for order in (row_major, swizzled):
    report, right = read_tile(order)
    assert report.shared_store_replays == 0  # all conflicts are of reads
    print(f"{order.__name__:10} {report.bank_conflicts:4} conflicts, elements right: {right}")

# %%
draw_banks({"row by row": row_major, "swizzled": swizzled}, chunk=2)

# %% [markdown]
# On the left eight lanes want the same four banks: seven repetitions for each 8 x 8 matrix, and the 16
# matrices of the tile make 112. On the right each row keeps its chunks in another order: chunk c of row r
# lies at place c xor (r mod 8). That is a *swizzle*. It takes no more memory, and no step of its own; writer
# and reader must only agree:

# %%
show_source(swizzled)

# %% [markdown]
# The copy into shared memory is free of conflicts in both: it writes whole rows, and a row fills all banks in
# any order. And this is the whole kernel, on 128 queries and 64 keys of head dim 64: its two products have
# 2 x 128 x 64 x 64 multiply-adds, 2048 for each `mma`.

# %%
q, k, v = random_qkv(1, 128, 64, 1, 1, 64, np.float16)
_, report = flash_attn_func(q, k, v, rung="fa2_tensor_core", machine="simulator", report=True)
assert report.tensor_core_instructions == 2 * 128 * 64 * 64 / 2048
print(report.tensor_core_instructions, "mma,", report.matrix_loads, "ldmatrix,", end=" ")
print(report.bank_conflicts, "bank conflicts")

# %% [markdown]
# Where there is a GPU with these instructions (Ampere and newer), they do the same there:

# %%
if cuda.is_available() and cuda.get_current_device().compute_capability >= (8, 0):
    C = cuda.device_array((16, 8), np.float32)
    make_multiply(ac_element)[1, 32](cuda.to_device(A), cuda.to_device(B), C)
    assert (C.copy_to_host() == A @ B).all()
    for order in (row_major, swizzled):
        words, out = new_tile()
        on_gpu = cuda.to_device(out)
        make_read_tile(order)[1, 32](cuda.to_device(words), on_gpu)
        assert came_right(words, on_gpu.copy_to_host())
    print("The GPU's mma and ldmatrix agree with the simulator's.")

# %% [markdown]
# ## Exercise
#
# **First, fragments.** Write `load_fragments(A, B, A_reg, B_reg)`, which every lane of a warp calls: A (16, 16)
# and B (16, 8) are float32 in global memory, and A_reg (2, 2) and B_reg (2, 1), uint32, are the lane's
# registers, to be filled as the figure shows. `pack_float16(x, y)` rounds two numbers to 16 bits and makes
# one register of them, the first in the lower half. Write the rows and columns yourself, without
# `ac_element`; read each element once. `device_function` makes it one that kernels can call. About 8 lines.
#
# A worked example: lane 5 is in row 5 // 4 = 1, and second among the four that share it.
#
# | register | holds |
# |---|---|
# | `A_reg[0, 0]` | A[1, 2], A[1, 3] |
# | `A_reg[1, 0]` | A[9, 2], A[9, 3] |
# | `A_reg[0, 1]` | A[1, 10], A[1, 11] |
# | `A_reg[1, 1]` | A[9, 10], A[9, 11] |
# | `B_reg[0, 0]` | B[2, 1], B[3, 1] |
# | `B_reg[1, 0]` | B[10, 1], B[11, 1] |
#
# Stuck? `hint("09.load_fragments", 1)`, then 2, then 3.


# %% answer="09.load_fragments"
@device_function
def load_fragments(A, B, A_reg, B_reg):
    lane = cuda.threadIdx.x
    ### BEGIN SOLUTION
    for i in range(2):
        row = lane // 4 + 8 * i
        for j in range(2):
            col = 2 * (lane % 4) + 8 * j
            A_reg[i, j] = pack_float16(A[row, col], A[row, col + 1])
    for i in range(2):
        row, col = 2 * (lane % 4) + 8 * i, lane // 4
        B_reg[i, 0] = pack_float16(B[row, col], B[row + 1, col])
    ### END SOLUTION


# %% check="09.load_fragments"
check("09.load_fragments", load_fragments)

# %% [markdown]
# **Then, a swizzle of your own.** With head dim 32 a row has only 4 chunks, 64 bytes, and two rows lie side by
# side in a line of the banks. Here is the worked example, row by row: chunk 2 of eight rows lies in 8 of the
# 32 banks.

# %%
draw_banks({"row by row": row_major}, chunk=2, row_chunks=NARROW)

# %% [markdown]
# Write `place(row, chunk)`: where in its row, 0 to 3, a chunk (0 to 3) of a row (0 to 15) is kept, so that no
# `ldmatrix` has a bank conflict. Each chunk of a row needs a place of its own. The swizzle of wide rows does
# not fit; there are many that do, and yours need not be the package's. One line.
#
# To look at what you have: `draw_banks({"mine": place}, chunk=2, row_chunks=NARROW)`.
#
# Stuck? `hint("09.swizzle", 1)`, then 2, then 3.


# %% answer="09.swizzle"
def place(row, chunk):
    ### BEGIN SOLUTION
    return chunk ^ (row // 2 % 4)
    ### END SOLUTION


# %% check="09.swizzle"
check("09.swizzle", place)

# %% [markdown]
# ## Question
#
# Instead of swizzling, one can make each row of 128 bytes 16 bytes longer. Does that avoid the conflicts of
# `ldmatrix`, too? What does it cost?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# It does: with rows of 9 chunks, row r begins r chunks further on, so chunk c of eight rows lies at c + r,
# modulo 8 in eight different groups of banks. It costs an eighth more shared memory, and with it perhaps a
# block on each multiprocessor. "No, for 16 bytes are only four banks of 32" is the common wrong answer: four
# banks are exactly what one chunk needs. `fa2_split_q` pads, each row of Q and K by one number;
# `fa2_tensor_core` swizzles.
# </details>
#
# ## Further reading
#
# - PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix".
# - `fa2_numba/device/layouts.py` and `swizzle.py`: the functions of this lesson, as the kernels use them.
# - FlashAttention-2 paper, section 3.1, on why matrix products are worth so much more than other operations.
# - Before: [08, which tiles can be skipped?](08_masks_and_heads.ipynb). Next: [10, how do gradients come back
#   without P?](10_backward.ipynb)

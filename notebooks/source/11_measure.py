# %% [markdown]
# # 11. Is it fast, and how do I know?
#
# ## Before you start
#
# | | |
# |---|---|
# | You will | list what spoils a measurement; read bars and a roofline critically; write a benchmark that others can believe |
# | You need | lessons 01 and 06 |
# | Minutes | 40 |
# | Symbols | ms, milliseconds of one forward pass; TFLOP/s, 10¹² operations of the two matrix products a second |
#
# The lessons before said that one kernel is faster than another. How would one know? A GPU is a bad witness:
# it answers before it has worked, it runs at other speeds at other times, and it is kind to whoever multiplies
# zeros. Most of you have no GPU here, so we measure a *model* of one, which has these habits; the code is what
# you would write for a real one, and there are real numbers, from an H200, further down.

# %% tags=["setup"]
import numpy as np
from numba import cuda

from fa2_numba import flash_attn_func
from fa2_numba.lessons.exercises import check, hint
from fa2_numba.lessons.fake_gpu import FakeGpu, FakeKernel
from fa2_numba.lessons.figures.speeds import draw_orders, draw_speeds, run_orders, speeds
from fa2_numba.lessons.figures.textbook_roofline import (
    H200_TB_PER_SECOND,
    draw_roofline,
    measured_dots,
    recorded,
)
from fa2_numba.lessons.show import show_source

# %% [markdown]
# ## Predict
#
# 1. You look at the clock, launch a kernel that takes 2 ms, and look at the clock again. What do you see?
# 2. You measure a kernel 30 times, and then another one 30 times. The GPU's clock goes up and down by 10 % over
#    half a second. By how much can the ratio of the two be wrong?
# 3. Of 30 runs two were disturbed by somebody else and took four times as long. What do they do to the mean,
#    what to the median?
#
# ## Run it wrong
#
# The first try, on the model. `launch` is what `kernel[grid, block](...)` is on a GPU:

# %%
gpu, kernel = FakeGpu(seed=7), FakeKernel("mine", milliseconds=2.0)
x = gpu.normal()
for attempt in range(3):
    before = gpu.seconds()
    gpu.launch(kernel, x)
    print(f"attempt {attempt}: {1000 * (gpu.seconds() - before):8.3f} ms")

# %% [markdown]
# The first run takes 300 ms and the others 5 microseconds, and neither has to do with the kernel. The first
# launch *compiles*. The others only put the kernel into a queue, and the host goes on; the GPU has hardly
# begun. One has to wait for it:

# %%
gpu.synchronize()
for attempt in range(3):
    before = gpu.seconds()
    gpu.launch(kernel, x)
    gpu.synchronize()
    print(f"attempt {attempt}: {1000 * (gpu.seconds() - before):8.3f} ms")

# %% [markdown]
# Better, and still wrong: each is much longer than 2 ms. A GPU that had nothing to do has a low clock, and
# needs some time of work to raise it.
#
# ## Look
#
# Two kernels on the model, one in truth 1.2 times as slow as the other. Left: 60 runs of the one, then 60 of the
# other; right: in turns. Dashed are the medians.

# %%
draw_orders(run_orders(seed=6, rounds=60))

# %% [markdown]
# Both were compiled before. The first runs are cold all the same: the clock is still low. Then clocks wander, slowly: whoever runs first meets one GPU and whoever runs second
# another. In turns, both meet the same. A few points are far above all others, disturbed runs; they would pull
# a mean, and do nothing to a median.
#
# Now real numbers: what `bench/` measured on an H200, all kernels of a panel in turns, in one run. Lines at the
# ends show the fastest and the slowest run.

# %%
runs = {
    "CUDA cores, float32\n4 x 32 heads of 2048": speeds("ladder", seqlen=2048, causal=False),
    "tensor cores, float16\n8 x 32 heads of 2048": speeds(
        "forward", seqlen=2048, head_dim=64, dtype="float16", causal=False
    ),
}
draw_speeds(runs)

# %%
for name in ("ladder", "forward"):
    found = recorded(name)
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    print(f"{name}: {found['gpu']}, driver {found['driver']}, {found['date']}; {versions}")

# %% [markdown]
# D is 64, without a mask, forward. Each panel has an axis of its own: they are different problems and different
# runs, and no bar of the left one may be divided by one of the right.
#
# What could they reach at best? The roofline of lesson 01, for the fastest rung of either panel, at all lengths
# that were measured:

# %%
matmul = recorded("forward")["matmul_tflops"]["float16"]
draw_roofline(
    {
        "fa2_split_q, float32": measured_dots("ladder", "fa2_split_q", "float32"),
        "fa2_tensor_core, float16": measured_dots("forward", "fa2_tensor_core", "float16"),
    },
    H200_TB_PER_SECOND,
    {"float16 on tensor cores (measured, a large matrix product)": matmul},
    "Head dim 64, no mask, on an H200. Filled: measured. Hollow: what HBM alone would allow.",
    ("S and P, once each way: D / 4", 64 / 4),
)

# %% [markdown]
# ## Understand
#
# **Compare in one run or not at all.** The same kernel on the same GPU gives another number on another day;
# what lasts is the ratio to a peer that was measured in turns with it, beside a ceiling such as a large matrix
# product. So a number that can be believed comes with its peers, its spread, GPU, driver, versions and date.
# The ratios of the right panel:

# %%
by_name = {
    speed.name: speed.tflops for speed in runs["tensor cores, float16\n8 x 32 heads of 2048"]
}
ours = by_name["fa2_tensor_core"]
for peer in ("torch_flash", "torch_cudnn", "fa1_tensor_core"):
    print(f"fa2_tensor_core / {peer}: {ours / by_name[peer]:.2f}")
print(f"share of what a large matrix product reaches: {ours / matmul:.0%}")

# %% [markdown]
# What spoils a measurement, and what helps:
#
# | what | what it does | what helps |
# |---|---|---|
# | launches return at once | times of some microseconds | events, or synchronise before the clock |
# | first launch compiles, clocks rise | times too long | unmeasured runs before |
# | clocks wander, others use the GPU | ratios off | take turns |
# | disturbed runs | a mean too high | median, and show the spread |
# | zeros or constants as input | less power, higher clocks | random input |
# | a result nobody looks at | a kernel that computes nothing is fast | compare with the oracle first |
# | the L2 cache holds the input | memory looks faster | larger input, or flush between runs |
#
# The last two our model does not have; `bench/` has both. For work of your own take
# `cupyx.profiler.benchmark`, `torch.utils.benchmark` or `triton.testing.do_bench`, which do most of it, and
# take turns yourself.
#
# Where there is a GPU, here are two rungs on it, by the rules (Numba's events are CUDA's):

# %%
if cuda.is_available():
    rng = np.random.default_rng(0)
    q, k, v = (cuda.to_device(rng.standard_normal((4, 2048, 16, 64), np.float32)) for _ in range(3))
    rungs = ("fa2_seq_parallel", "fa2_split_q")
    times = {rung: [] for rung in rungs}
    for attempt in range(30):
        for rung in rungs:
            start, stop = cuda.event(), cuda.event()
            start.record()
            flash_attn_func(q, k, v, rung=rung)
            stop.record()
            stop.synchronize()
            if attempt >= 10:
                times[rung].append(cuda.event_elapsed_time(start, stop))
    medians = {rung: np.median(taken) for rung, taken in times.items()}
    print({rung: f"{ms:.2f} ms" for rung, ms in medians.items()})

# %% [markdown]
# ## Exercise
#
# Write `compare(gpu, mine, peer)`: the milliseconds of two kernels on a `FakeGpu`, measured so that others can
# believe them. Return a pair, (ms of mine, ms of peer). What the GPU offers, as CuPy and CUDA do:
#
# | call | is |
# |---|---|
# | `gpu.launch(kernel, x)` | a launch; returns at once |
# | `gpu.normal()`, `gpu.zeros()` | input x of random numbers, of zeros |
# | `gpu.seconds()` | the host's clock |
# | `gpu.synchronize()` | wait until all that was launched is done |
# | `event = gpu.event()`, `event.record()`, `event.synchronize()` | a mark in the queue; wait for it |
# | `gpu.elapsed_ms(start, stop)` | milliseconds between two events, once both are over |
#
# Clocks need about 0.1 s of work to rise; kernels take 1 to 2 ms. `check` tries your function on several GPUs
# whose clocks wander differently. A time may be off by as much as clocks wander, 10 %, the ratio by 3 %. About
# 12 lines.
#
# A worked example, four measured runs of each, in ms; the third of mine was disturbed:
#
# | | 1 | 2 | 3 | 4 | mean | median |
# |---|---|---|---|---|---|---|
# | mine | 1.9 | 2.0 | 8.1 | 2.1 | 3.5 | 2.05 |
# | peer | 1.0 | 1.0 | 1.1 | 1.1 | 1.05 | 1.05 |
#
# Stuck? `hint("11.compare", 1)`, then 2, then 3.


# %% answer="11.compare"
def compare(gpu, mine, peer):
    ### BEGIN SOLUTION
    x = gpu.normal()
    for _ in range(50):
        gpu.launch(mine, x)
        gpu.launch(peer, x)
    times = {mine: [], peer: []}
    for _ in range(30):
        for kernel in (mine, peer):
            start, stop = gpu.event(), gpu.event()
            start.record()
            gpu.launch(kernel, x)
            stop.record()
            stop.synchronize()
            times[kernel].append(gpu.elapsed_ms(start, stop))
    return np.median(times[mine]), np.median(times[peer])
    ### END SOLUTION


# %% check="11.compare"
check("11.compare", compare)

# %% [markdown]
# ## Question
#
# A paper says that a kernel reaches 300 TFLOP/s. Yours reached 330 yesterday, on the same kind of GPU. What do
# you know?
#
# <details><summary>Answer, and a common wrong one</summary>
#
# That the two are of the same order, and no more. Another driver, another cooling, other clocks, another way
# to count operations of a causal mask may each be worth 10 %. "Mine is 1.1 times as fast" is the wrong answer,
# and the most common sentence in this field. Run the paper's kernel beside yours, in turns, and give the ratio
# you see.
# </details>
#
# ## Further reading
#
# - `bench/README.md`: how the numbers above were measured; `bench/timing.py` is short.
# - FlashAttention-2 paper, section 4: what was measured there, and how operations are counted.
# - Before: [10, how do gradients come back without P?](10_backward.ipynb) Next: [12, what does a real model
#   attend to?](12_real_heads.ipynb)

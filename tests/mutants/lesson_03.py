"""Kernels repaired in part, in the wrong place, or with too much."""

from . import Mutant

BARRIER = "cuda.syncthreads()"
LAST = "overwrites what slower threads still read.\n        cuda.syncthreads()"
FIRST = "has written.\n        cuda.syncthreads()"
NEIGHBOUR = "its neighbour has written.\n    cuda.syncthreads()"
STEP = "maxima of this one.\n        cuda.syncthreads()"

MUTANTS = {
    "03.race": (
        Mutant("as it was", ((LAST, ""),), "RaceError"),
        Mutant("only the other barrier", ((FIRST, ""),), "RaceError"),
        Mutant(
            "a barrier after every line",
            (("tile[t] = source[first + t]", f"{BARRIER}\n        tile[t] = source[first + t]"),),
            "values are right, but .* 3 barriers .* must be at most 2.* wait for the slowest",
        ),
        Mutant(
            "barriers of a warp",
            ((LAST, "overwrites.\n        cuda.syncwarp()"),),
            "RaceError",
        ),
        Mutant(
            "its partner from HBM",
            (("tile[threads - 1 - t]", "source[first + threads - 1 - t]"),),
            "64 bytes are read .* must be 32",
        ),
        Mutant(
            "one off", (("tile[threads - 1 - t]", "tile[threads - t]"),), "UninitialisedReadError"
        ),
        Mutant(
            "reverses all, not each tile",
            (("target[first + t]", "target[source.size - threads - first + t]"),),
            "target .* wrong in 16 of 24",
        ),
    ),
    "03.divergence": (
        Mutant(
            "as it was",
            (("    # Each thread reads what its neighbour has written.\n    c", "        c"),),
            "BarrierError: barrier that some threads of the block never reach",
        ),
        Mutant(
            "leaves early",
            (
                (
                    "    own = float32(0.0)",
                    "    own = float32(0.0)\n    if i >= source.size:\n        return",
                ),
            ),
            "BarrierError.*have left the kernel",
        ),
        Mutant(
            "a barrier in each branch",
            ((NEIGHBOUR, f"x\n        {BARRIER}\n    else:\n        {BARRIER}"),),
            "BarrierError: divergent barrier",
        ),
        Mutant("no barrier", ((NEIGHBOUR, ""),), "RaceError"),
        Mutant(
            "two barriers",
            ((NEIGHBOUR, f"{NEIGHBOUR}\n    {BARRIER}"),),
            "2 barriers .* must be at most 1",
        ),
        Mutant(
            "the neighbour from HBM",
            (("own -= tile[t - 1]", "own -= source[i - 1]"),),
            "60 bytes are read .* must be 32",
        ),
        Mutant("over the edge of the block", (("if t > 0:", "if True:"),), "out of bounds .*tile"),
    ),
    "03.tail": (
        Mutant(
            "as it was",
            (("    else:\n        tile[t] = NEG_INF\n", ""),),
            "UninitialisedReadError",
        ),
        Mutant(
            "zeros", (("tile[t] = NEG_INF", "tile[t] = float32(0.0)"),), r"at \(1,\) 0, must be -2"
        ),
        Mutant(
            "the last element again",
            (("tile[t] = NEG_INF", "tile[t] = source[source.size - 1]"),),
            "bytes are read .* must be 52",
        ),
        Mutant(
            "barrier for the lower half only",
            ((STEP, f"maxima.\n            {BARRIER}"),),
            "BarrierError",
        ),
        Mutant("no barrier between steps", ((STEP, ""),), "RaceError"),
        Mutant(
            "one barrier more",
            (("    if t == 0:", f"    {BARRIER}\n    if t == 0:"),),
            "5 barriers .* must be at most 4",
        ),
        Mutant(
            "forgets the top", (("while half > 0", "while half > 1"),), "target .*wrong in 1 of 1"
        ),
    ),
}

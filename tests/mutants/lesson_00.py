"""Wrong copies."""

from . import Mutant

MUTANTS = {
    "00.copy": (
        Mutant("no guard", (("if i < source.size:", "if True:"),), "out of bounds .* source"),
        Mutant("one too many", (("i < source", "i <= source"),), "out of bounds .* source"),
        Mutant("one too few", (("source.size", "source.size - 1"),), "target .*wrong in 1 of 8"),
        Mutant("lanes only", (("cuda.grid(1)", "cuda.threadIdx.x"),), "wrong in 6 of 10"),
        Mutant("adds", (("= source[i]", "= source[i] + 1"),), r"at \(0,\) 2, must be 1"),
        Mutant(
            "clamped: reads the last element again",
            (("if i < source.size:", "i = min(i, source.size - 1)\n    if True:"),),
            "bytes written .* must be 40",
        ),
    ),
}

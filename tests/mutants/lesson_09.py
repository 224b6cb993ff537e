"""Wrong fragments, and tiles whose banks collide."""

from . import Mutant

SWIZZLE = "chunk ^ (row // 2 % 4)"

MUTANTS = {
    "09.load_fragments": (
        Mutant(
            "in memory order",
            (
                ("row = lane // 4 + 8 * i\n", "row = lane // 2\n"),
                ("col = 2 * (lane % 4) + 8 * j\n", "col = 8 * (lane % 2) + 4 * i + 2 * j\n"),
            ),
            r"of 128 registers of A .* A_reg\[0, 1\] of lane 0 holds A\[0, 2\], A\[0, 3\]",
        ),
        Mutant(
            "columns of A apart",
            (("col = 2 * (lane % 4) + 8 * j\n", "col = lane % 4 + 8 * j\n"),),
            r"holds A\[0, 1\], A\[0, 2\], must hold A\[0, 2\], A\[0, 3\]",
        ),
        Mutant(
            "registers of A right before down",
            (("A_reg[i, j] = pack", "A_reg[j, i] = pack"),),
            r"64 of 128 registers of A .* A_reg\[0, 1\] of lane 0 holds A\[8, 0\]",
        ),
        Mutant(
            "the pair the wrong way round",
            (("(A[row, col], A[row, col + 1])", "(A[row, col + 1], A[row, col])"),),
            r"128 of 128 .* holds A\[0, 1\], A\[0, 0\], must hold A\[0, 0\], A\[0, 1\]",
        ),
        Mutant(
            "only the upper half of A",
            (("row = lane // 4 + 8 * i\n", "row = lane // 4\n"),),
            r"A_reg\[1, 0\] of lane 0 holds A\[0, 0\], A\[0, 1\], must hold A\[8, 0\]",
        ),
        Mutant(
            "B as A lies",
            (("(B[row, col], B[row + 1, col])", "(B[col, row % 8], B[col, (row + 1) % 8])"),),
            "of 64 registers of B",
        ),
        Mutant(
            "another order of k, in A and B alike",
            (
                ("col = 2 * (lane % 4) + 8 * j\n", "col = 4 * (lane % 4) + 2 * j\n"),
                ("row, col = 2 * (lane % 4) + 8 * i,", "row, col = 4 * (lane % 4) + 2 * i,"),
            ),
            "registers of A .* The product is right all the same",
        ),
        Mutant(
            "half of B",
            (("B_reg[i, 0] = pack", "B_reg[0, 0] = pack"),),
            "refuses .* B_reg",
        ),
        Mutant(
            "elements read again",
            (("(A[row, col], A[row, col + 1])", "(A[row, col], A[row, col + 1] + 0 * A[row, 0])"),),
            "bytes read .* must be 1536",
        ),
    ),
    "09.swizzle": (
        Mutant("as they come", ((SWIZZLE, "chunk"),), "24 bank conflicts.*both lie in banks"),
        Mutant("that of wide rows", ((SWIZZLE, "chunk ^ (row % 8)"),), "each of 0 to 3 once"),
        Mutant("cut to four", ((SWIZZLE, "chunk ^ (row % 4)"),), "8 bank conflicts: must be 0"),
        Mutant("every fourth row", ((SWIZZLE, "chunk ^ (row // 4 % 4)"),), "bank conflicts: must"),
        Mutant("two places", ((SWIZZLE, "chunk ^ (row // 2 % 2)"),), "bank conflicts: must be 0"),
        Mutant(
            "right for eight rows only",
            ((SWIZZLE, "chunk ^ (row // 2 % 4) if row < 8 else chunk"),),
            "12 bank conflicts: must be 0.*chunk 0 of row 8 and of row 10",
        ),
        Mutant("out of the row", ((SWIZZLE, "chunk + row // 2"),), "each of 0 to 3 once"),
        Mutant("not a permutation", ((SWIZZLE, "chunk & (row // 2 % 4)"),), "overwrites another"),
        Mutant("fractions", ((SWIZZLE, "(chunk + row / 2) % 4"),), "must be integers"),
    ),
}

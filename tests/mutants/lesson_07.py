"""Wrong turns on the way from sliced-K to split-Q."""

from . import Mutant

KEPT = """m_reg[i] = m
                partial_smem[row, lane] = O_reg[i]"""

MUTANTS = {
    "07.split_q": (
        Mutant(
            "keeps the exchange of O",
            (
                (
                    "    for first_key in range",
                    "    partial_smem = cuda.shared.array((ROWS, HEAD_DIM), float32)\n"
                    "    for first_key in range",
                ),
                ("m_reg[i] = m", KEPT),
            ),
            "O is right, but the number of bytes stored in shared memory .*partial O",
        ),
        Mutant(
            "keeps a barrier a row",
            (
                (
                    "                m_reg[i] = m",
                    "                m_reg[i] = m\n            cuda.syncthreads()",
                ),
            ),
            "O is right, but the number of barriers .* is 4: must be 2 at most",
        ),
        Mutant(
            "no barrier after loading",
            (
                (
                    "        # Each warp reads what both warps have loaded.\n"
                    "        cuda.syncthreads()\n",
                    "",
                ),
            ),
            "simulator refuses",
        ),
        Mutant(
            "no barrier before loading",
            (
                (
                    "        # A slower warp may still read the tiles before.\n"
                    "        cuda.syncthreads()\n",
                    "",
                ),
            ),
            "simulator refuses .*RaceError",
        ),
        Mutant(
            "rows of the wrong warp",
            (("row = WARP_ROWS * warp + i", "row = WARP_ROWS * (WARPS - 1 - warp) + i"),),
            r"O\[query, head, column\] .*wrong in 128 of 128",
        ),
        Mutant(
            "the first warp's rows in every warp",
            (("row = WARP_ROWS * warp + i", "row = i"),),
            "wrong in 64 of 128",
        ),
        Mutant(
            "still its own slice only",
            (("range(0, KEYS, SLICE)", "range(SLICE * warp, SLICE * warp + 1)"),),
            r"O\[query, head, column\] .*wrong in",
        ),
        Mutant("sums a lane instead of a warp", (("warp_sum(p)", "p"),), "wrong in 128 of 128"),
        Mutant(
            "a maximum over too few lanes",
            (("warp_max(s)", "max(s, cuda.shfl_xor_sync(0xFFFFFFFF, s, 1))"),),
            "wrong in",
        ),
        Mutant("no maximum", (("max(m_reg[i], warp_max(s))", "float32(0.0)"),), "wrong in"),
        Mutant("O is not rescaled", (("rescale * O_reg[i] +", "O_reg[i] +"),), "wrong in"),
        Mutant("l is not rescaled", (("rescale * l_reg[i] +", "l_reg[i] +"),), "wrong in"),
        Mutant("keys past the end", (("seqlen_k - first_key", "KEYS"),), "1 queries, 5 keys"),
        Mutant("not divided by l", ((" / l_reg[i]", ""),), "wrong in"),
        Mutant("no guard", (("row < O.shape[0] and ", ""),), "out of bounds"),
        Mutant(
            "O goes to global memory twice",
            (
                (
                    "O[row, head, lane] = O_reg[i] / l_reg[i]",
                    "O[row, head, lane] = O_reg[i]\n"
                    "            O[row, head, lane] = O_reg[i] / l_reg[i]",
                ),
            ),
            "O is right, but the number of bytes written to global memory .*once, at the end",
        ),
    ),
}

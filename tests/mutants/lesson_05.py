"""Kernels that divide too often, too early, or forget what they put off."""

from . import Mutant

MUTANTS = {
    "05.normalise_last": (
        Mutant(
            "still in the loop",
            (
                ("o = rescale * O_reg[d]", "o = old * O_reg[d]"),
                ("O_reg[d] = o\n", "O_reg[d] = o / l\n"),
                ("l = rescale * l\n", "l = old = rescale * l\n"),
                ("O_reg[d] / l\n", "O_reg[d]\n"),
            ),
            r"values are right, but .* divisions \(9 queries, 16 keys.*after its last tile",
        ),
        Mutant(
            "divides at both places",
            (("O_reg[d] = o\n", "O_reg[d] = o / l\n"),),
            r"O \(4 queries, 8 keys, 4 threads\) is wrong",
        ),
        Mutant("never divides", (("O_reg[d] / l\n", "O_reg[d]\n"),), r"O \(4 queries, 8 keys"),
        Mutant(
            "O not rescaled",
            (("o = rescale * O_reg[d]", "o = O_reg[d]"),),
            r"O \(9 queries, 16 keys, 16 threads\) is wrong",
        ),
        Mutant(
            "O multiplied by the old l, as if it were divided",
            (
                ("o = rescale * O_reg[d]", "o = rescale * l_old * O_reg[d]"),
                ("l = rescale * l\n", "l_old = l\n                l = rescale * l\n"),
            ),
            r"O \(9 queries, 16 keys",
        ),
        Mutant(
            "l not rescaled",
            (("l = rescale * l\n", "l = l\n"),),
            r"LSE \(9 queries, 16 keys, 16 threads\) is wrong",
        ),
        Mutant(
            "rescaled the wrong way round",
            (("math.exp(m - m_new)", "math.exp(m_new - m)"),),
            r"LSE \(4 queries, 8 keys",
        ),
        Mutant("m stays", (("m = m_new", "m = max(m, NEG_INF)"),), r"LSE \(4 queries, 8 keys"),
        Mutant(
            "the factor anew for every d",
            (("o = rescale * O_reg[d]", "o = math.exp(m - m_new) * O_reg[d]"),),
            "values are right, but .* calls of exp and log .*one a tile to rescale by",
        ),
        Mutant(
            "no maximum: scores of hundreds",
            (
                ("math.exp(m - m_new)", "float32(1.0)"),
                ("math.exp(S_reg[j] - m_new)", "math.exp(S_reg[j])"),
                ("= m + math.log(l)", "= math.log(l)"),
            ),
            r"\(7 queries, 43 keys, 8 threads\) is wrong",
        ),
        Mutant(
            "the exponentials twice",
            (("o += S_reg[j] * V_smem[j, d]", "o += math.exp(math.log(S_reg[j])) * V_smem[j, d]"),),
            "values are right, but .* calls of exp and log",
        ),
        Mutant(
            "O waits in HBM",
            (
                (
                    "o = rescale * O_reg[d]",
                    "o = rescale * (O_gmem[row, d] if first_key else l - l)",
                ),
                ("O_reg[d] = o\n", "O_gmem[row, d] = o\n"),
                ("O_reg[d] / l\n", "O_gmem[row, d] / l\n"),
            ),
            "values are right, but .* bytes are read from HBM .* written once",
        ),
        Mutant(
            "divides p and multiplies l back",
            (
                (
                    "o += S_reg[j] * V_smem[j, d]",
                    "o += (S_reg[j] / l) * V_smem[j, d]",
                ),
                ("O_reg[d] = o\n", "O_reg[d] = o * l\n"),
                ("o = rescale * O_reg[d]", "o = rescale * O_reg[d] / l"),
            ),
            "values are right, but .* divisions",
        ),
        Mutant("LSE without m", (("= m + math.log(l)", "= math.log(l)"),), r"LSE \(4 queries"),
        Mutant(
            "whole tiles: sums stale keys",
            (
                ("for j in range(keys):  # FA2 Alg. 1 line 9", "for j in range(KEYS):"),
                ("for j in range(keys):  # FA2 Alg. 1 line 10", "for j in range(KEYS):"),
            ),
            r"\(13 queries, 21 keys, 5 threads\) is wrong|uninitialised|RaceError",
        ),
    ),
}

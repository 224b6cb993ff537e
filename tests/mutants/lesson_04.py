"""Inner loops that forget a factor, a tail, or what a byte costs."""

from . import Mutant

MUTANTS = {
    "04.tiled": (
        Mutant("no scale", (("softmax_scale * s", "s"),), "m, the row maximum .*wrong"),
        Mutant(
            "this tile's maximum only",
            (("m_new = m_old", "m_new = float32(-math.inf)"),),
            r"m, the row maximum \(9 queries, 16 keys",
        ),
        Mutant(
            "l not rescaled",
            (("l_new = rescale * l_old", "l_new = l_old"),),
            r"l \(9 queries, 16 keys",
        ),
        Mutant(
            "O not rescaled",
            (("o = rescale * l_old * O_gmem", "o = l_old * O_gmem"),),
            r"O \(9 queries, 16 keys",
        ),
        Mutant(
            "O not multiplied with the old l",
            (("o = rescale * l_old * O_gmem", "o = rescale * O_gmem"),),
            r"O \(9 queries, 16 keys",
        ),
        Mutant("O not divided", (("= o / l_new", "= o"),), r"O \(4 queries, 8 keys"),
        Mutant(
            "forgets what was there",
            (("o = rescale * l_old * O_gmem[row, d]", "o = float32(0.0)"),),
            r"O \(9 queries, 16 keys",
        ),
        Mutant(
            "no maximum at all",
            (("m_new = max(m_new, S_reg[j])", "m_new = float32(0.0)"),),
            "m, the row maximum .*wrong",
        ),
        Mutant(
            "whole tiles: sums stale keys",
            (
                ("for j in range(keys):  # FA1 Alg. 1 line 9", "for j in range(KEYS):"),
                ("for j in range(keys):  # FA1 Alg. 1 lines", "for j in range(KEYS):  # lines"),
            ),
            r"\(13 queries, 21 keys, 5 threads\) is wrong",
        ),
        Mutant(
            "O goes to HBM for every key",
            (
                ("o = rescale * l_old * O_gmem[row, d]", "O_gmem[row, d] *= rescale * l_old"),
                ("o += S_reg[j] * V_smem[j, d]", "O_gmem[row, d] += S_reg[j] * V_smem[j, d]"),
                ("O_gmem[row, d] = o / l_new", "O_gmem[row, d] /= l_new"),
            ),
            "values are right, but .* bytes are read from HBM .* belongs into registers",
        ),
        Mutant(
            "Q from HBM for every key",
            (("s += Q_reg[d]", "s += Q_gmem[row, d]"),),
            "values are right, but .* bytes are read from HBM",
        ),
        Mutant("m stays", (("= m_new, l_new", "= m_old, l_new"),), "m, the row maximum .*wrong"),
        Mutant(
            "keys for values", (("* V_smem[j, d]", "* K_smem[j, d]"),), r"O \(4 queries, 8 keys"
        ),
    ),
}

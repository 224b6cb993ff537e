"""Wrong ways to merge two parts of a softmax."""

from . import Mutant

MUTANTS = {
    "02.merge": (
        Mutant(
            "nothing is rescaled",
            (
                ("alpha = np.exp(m_a - safe)", "alpha = np.ones_like(m_a)"),
                ("beta = np.exp(m_b - safe)", "beta = np.ones_like(m_b)"),
            ),
            "l .* is wrong",
        ),
        Mutant(
            "only the first part",
            (("beta = np.exp(m_b - safe)", "beta = 1 + 0 * l_b"),),
            "l .*wrong",
        ),
        Mutant(
            "the factor upside down",
            (("np.exp(m_a - safe)", "np.exp(safe - m_a)"),),
            "l .* is wrong",
        ),
        Mutant(
            "no guard",
            (("np.where(np.isneginf(m), 0, m)", "m"),),
            "rows that see no key.* is NaN in row 0: neither -inf",
        ),
        Mutant("o is forgotten", (("alpha[:, None] * o_a", "o_a"),), "o .* is wrong"),
        Mutant(
            "o is divided", (("return m, l, o", "return m, l, o / l[:, None]"),), "o .* is wrong"
        ),
        Mutant("the first maximum", (("np.maximum(m_a, m_b)", "m_a"),), "m .* is wrong"),
        Mutant(
            "a maximum of all rows",
            (("np.maximum(m_a, m_b)", "np.full_like(m_a, max(m_a.max(), m_b.max()))"),),
            "m .* is wrong",
        ),
        Mutant(
            "the second part is never larger",
            (("np.maximum(m_a, m_b)", "np.where(np.isneginf(m_a), m_b, m_a)"),),
            "m .the worked example.* is wrong",
        ),
        Mutant(
            "l only where both see keys",
            (("l = alpha * l_a + beta * l_b", "l = (alpha * l_a + beta * l_b) * (l_a * l_b > 0)"),),
            "l .0 keys and 12.* is wrong",
        ),
        Mutant(
            "no maximum",
            (("np.where(np.isneginf(m), 0, m)", "np.zeros_like(m)"),),
            "10000|l .* is wrong",
        ),
        Mutant("in place", (("o = alpha", "o_a *= 1.5\n    o = alpha"),), "changes the arrays"),
        Mutant("two of three", (("return m, l, o", "return m, l"),), "must be a tuple .m, l, o."),
    )
}

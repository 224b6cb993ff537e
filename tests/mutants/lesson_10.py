"""Gradients that forget D, a factor, the mask, or that others add too."""

from . import Mutant

MUTANTS = {
    "10.row_sums": (
        Mutant(
            "products in float16",
            (("dO.astype(np.float32) * O.astype(np.float32)", "(dO * O).astype(np.float32)"),),
            "float16, shape .*few digits left",
        ),
        Mutant(
            "sums in float16",
            (("dO.astype(np.float32) * O.astype(np.float32)", "dO * O"),),
            "float16, shape .*few digits left",
        ),
        Mutant("layout of O", ((".swapaxes(1, 2)", ""),), r"shape \(2, 3, 2\): .*layout of lse"),
        Mutant("over the queries", (("axis=-1", "axis=1"),), "has shape .*the sum over d"),
        Mutant("over the heads", (("axis=-1", "axis=2"),), "has shape .*the sum over d"),
        Mutant("a mean", (("products.sum", "products.mean"),), r"at \(0, 0, 0\) 2.5, must be 10"),
        Mutant("dO squared", (("* O.astype", "* dO.astype"),), "D .*O all 1.* is wrong"),
        Mutant(
            "float64",
            (("products.sum(axis=-1)", "products.astype(np.float64).sum(axis=-1)"),),
            "D is float64 .*must be float32",
        ),
    ),
    "10.gradients": (
        Mutant("without D", (("dP - D[:, None]", "dP"),), "dQ .*comes out if D is left out"),
        Mutant(
            "D of the columns",
            (("D[:, None]", "D[None, :]"),),
            "dQ against finite differences .*is wrong",
        ),
        Mutant(
            "lse of the columns",
            (("lse[:, None]", "lse[None, :]"),),
            "dV against finite differences .*is wrong",
        ),
        Mutant("D outside", (("P * (dP - D[:, None])", "P * dP - D[:, None]"),), "dQ .*is wrong"),
        Mutant("dQ without scale", (("dQ += scale * (", "dQ += ("),), "dQ .*if scale is left out"),
        Mutant("dK without scale", (("dK += scale * (", "dK += ("),), "dK .*if scale is left out"),
        Mutant(
            "scale in dS too",
            (("dS = P * (", "dS = scale * P * ("),),
            "dQ .*if scale is in it twice",
        ),
        Mutant("S without scale", (("S = scale * (Q @ K.T)", "S = Q @ K.T"),), "dV .*is wrong"),
        Mutant("no mask", ((", where=seen", ""),), "dV .*7 queries, 4 keys.*causal.* is wrong"),
        Mutant(
            "-inf - (-inf)",
            (
                (
                    "np.exp(S - lse[:, None], out=P, where=seen)",
                    "np.exp(np.where(seen, S, -np.inf) - lse[:, None], out=P)",
                ),
            ),
            r"7 queries, 4 keys.*causal.*NaN.*-inf - \(-inf\) is NaN",
        ),
        Mutant(
            "softmax of the tile",
            (("dV += P.T", "P /= P.sum(axis=1, keepdims=True)\n    dV += P.T"),),
            "dV .*3 queries, 5 keys.* is wrong",
        ),
        Mutant(
            "the tile's own row sum for D",
            (("D[:, None]", "(P * dP).sum(axis=1, keepdims=True)"),),
            "dQ .*3 queries, 5 keys.* is wrong",
        ),
        Mutant("written, not added", (("dV += P.T", "dV[:] = P.T"),), "dV .*3 queries.* is wrong"),
        Mutant(
            "a new array",
            (("dV += P.T @ dO", "dV = dV + P.T @ dO"),),
            "dV .*nothing is added in place",
        ),
        Mutant(
            "returned",
            (("dK += scale * (dS.T @ Q)", "dK = dK + scale * (dS.T @ Q)\n    return dQ, dK, dV"),),
            "returns a tuple: must return nothing",
        ),
        Mutant(
            "scales Q where it lies",
            (("S = scale * (Q @ K.T)", "Q *= scale\n    S = Q @ K.T"),),
            "Q was changed",
        ),
        Mutant("P for dS in dK", (("(dS.T @ Q)", "(P.T @ Q)"),), "dK .*is wrong"),
        Mutant("S for P in dV", (("dV += P.T", "dV += S.T"),), "dV .*is wrong"),
        Mutant("not transposed", (("P.T @ dO", "P @ dO"),), "dV .*is wrong"),
    ),
}

"""Wrong ways to find the head that looks at the first key most."""

from . import Mutant

MUTANTS = {
    "12.sink_head": (
        Mutant(
            "scores alone", (("np.exp(s[sees] - lse[h][sees])", "s[sees]"),), "head is .*must be 2"
        ),
        Mutant("no lse", (("s[sees] - lse[h][sees]", "s[sees]"),), "head is .*must be 2"),
        Mutant("no scale", ((" * q.shape[2] ** -0.5", ""),), "share is|head is"),
        Mutant("heads dealt out", (("h // group", "h % k.shape[1]"),), "head is|share is"),
        Mutant("empty rows", (("np.isfinite(lse[h])", "np.ones(len(q), bool)"),), "see no key"),
        Mutant(
            "a mean over all queries",
            ((".mean()", ".sum() / len(q)"),),
            "share is .*queries that see no key",
        ),
        Mutant("the last key", (("k[0, h", "k[-1, h"),), "head is|share is"),
        Mutant("the largest weight", ((".mean()", ".max()"),), "head is|share is"),
        Mutant("the least", (("np.argmax", "np.argmin"),), "head is"),
        Mutant(
            "a share alone",
            (("return head, float(shares[head])", "return head"),),
            "must be .head, share.",
        ),
        Mutant(
            "builds P",
            (("s = q[:, h] @ k[0, h // group]", "s = (q[:, h] @ k[:, h // group].T)[:, 0]"),),
            "takes .* MiB",
        ),
    )
}

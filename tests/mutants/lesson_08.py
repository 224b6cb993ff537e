"""Wrong loop bounds and head maps."""

from . import Mutant

MUTANTS = {
    "08.loop_bounds": (
        Mutant(
            "top-left alignment",
            (("row + 1 + seqlen_k - seqlen_q", "row + 1"),),
            "number of tiles visited, .*causal=True.*must be",
        ),
        Mutant(
            "aligned the wrong way round",
            (("row + 1 + seqlen_k - seqlen_q", "row + 1 + seqlen_q - seqlen_k"),),
            "tiles visited, .*causal=True",
        ),
        Mutant(
            "the row itself hidden",
            (("row + 1 + seqlen_k", "row + seqlen_k"),),
            "keys would be lost",
        ),
        Mutant("negative", (("max(0, ", "int("),), "tiles visited, .*is -1: must be 0"),
        Mutant(
            "past the last key",
            (
                (
                    "max(0, min(seqlen_k, row + 1 + seqlen_k - seqlen_q))",
                    "max(0, row + 1 + seqlen_k - seqlen_q)",
                ),
            ),
            "tiles visited",
        ),
        Mutant("rounded down", (("-(-most // block_n)", "most // block_n"),), "keys would be lost"),
        Mutant(
            "no mask at the end", (("fewest // block_n", "-(-fewest // block_n)"),), "see hidden"
        ),
        Mutant("all are masked", (("fewest // block_n", "0"),), "first tile to mask.*cost time"),
        Mutant(
            "the mask of the last row",
            ((", keys(first_row)", ", keys(first_row + block_m - 1)"),),
            "rows would see hidden keys",
        ),
        Mutant("causal always", (("if not causal:", "if False:"),), "causal=False"),
        Mutant(
            "a row too far", (("block_m - 1)", "block_m)"),), "time would be lost on hidden tiles"
        ),
        Mutant("one number", ((", fewest // block_n", ""),), "must be .tiles visited, first"),
    ),
    "08.head_map": (
        Mutant("dealt out", (("head // (heads // kv_heads)", "head % kv_heads"),), "0, 0, 1, 1"),
        Mutant("modulo", (("head // (", "head % ("),), "must be"),
        Mutant("no groups", (("head // (heads // kv_heads)", "head"),), "is 1: must be 0"),
        Mutant("by kv_heads", (("(heads // kv_heads)", "kv_heads"),), "must be"),
        Mutant(
            "a fraction",
            (("head // (heads // kv_heads)", "head * kv_heads / heads"),),
            "is a float: must be an int",
        ),
        Mutant("a float", (("head // (", "float(head) // ("),), "is a float: must be an int"),
    ),
}

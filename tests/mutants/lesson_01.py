"""Wrong predictions of bytes."""

from . import Mutant

MUTANTS = {
    "01.predict_bytes": (
        Mutant("S read once", (("4 * scores", "2 * scores"),), "bytes read .* S 27648 read"),
        Mutant("no tiles: Q read once", (("q * tiles_n", "q"),), "bytes read .*must be 64512"),
        Mutant("K and V once", (("2 * kv * tiles_m", "2 * kv"),), "bytes read .*must be 64512"),
        Mutant("only K", (("2 * kv", "kv"),), "bytes read .*V 9216 read"),
        Mutant(
            "tiles swapped",
            (("q * tiles_n + 2 * kv * tiles_m", "q * tiles_m + 2 * kv * tiles_n"),),
            "bytes read .seqlen_q=37, .* must be",
        ),
        Mutant(
            "the last tile forgotten",
            (("-(-seqlen_q // block_m)", "seqlen_q // block_m"),),
            "bytes read .seqlen_q=37, .* must be",
        ),
        Mutant(
            "rows past the end too",
            (("seqlen_q * seqlen_k", "tiles_m * block_m * tiles_n * block_n"),),
            "bytes read .seqlen_q=37, .* must be",
        ),
        Mutant("no LSE", (("+ q + seqlen_q", "+ q"),), "bytes written .*LSE 0 read, 192 written"),
        Mutant("P not written", (("2 * scores", "scores"),), "bytes written .*P 9216 read, 9216"),
        Mutant(
            "numbers, not bytes",
            (("4 * read, 4 * written", "read, written"),),
            "is 16128: must be 64512",
        ),
        Mutant("the sum alone", (("4 * read, 4 * written", "4 * (read + written)"),), "must be .b"),
    ),
}

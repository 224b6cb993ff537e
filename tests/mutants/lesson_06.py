"""Grids that lose rows or collide, and shares that forget the last wave."""

from . import Mutant

MUTANTS = {
    "06.grid": (
        Mutant(
            "a block a head",
            (("(batches * heads, -(-seqlen_q // block_m))", "(batches * heads,)"),),
            r"grid \(1,\) has 1 blocks .*must be 2.*rows would have no block",
        ),
        Mutant(
            "the last tile forgotten",
            (("-(-seqlen_q // block_m)", "seqlen_q // block_m"),),
            r"has 12 blocks \(batches=2, heads=3, seqlen_q=10.*must be 18",
        ),
        Mutant(
            "one tile too many",
            (("-(-seqlen_q // block_m)", "seqlen_q // block_m + 1"),),
            "must be 2.*blocks would have no rows",
        ),
        Mutant(
            "a block a row",
            (("-(-seqlen_q // block_m)", "seqlen_q"),),
            r"has 8 blocks .*blocks would have no rows",
        ),
        Mutant(
            "batch and head swapped",
            (
                ("batch = cuda.blockIdx.x // heads", "batch = cuda.blockIdx.x % heads"),
                ("head = cuda.blockIdx.x % heads", "head = cuda.blockIdx.x // heads"),
            ),
            "out of bounds|never written",
        ),
        Mutant(
            "counts batches where heads are meant",
            (
                ("batch = cuda.blockIdx.x // heads", "batch = cuda.blockIdx.x // batches"),
                ("head = cuda.blockIdx.x % heads", "head = cuda.blockIdx.x % batches"),
            ),
            "out of bounds|never written",
        ),
        Mutant(
            "batches forgotten",
            (("batch = cuda.blockIdx.x // heads", "batch = 0"),),
            "rows 0 to 3 of head 0 of batch 1: 4 of 4 never written",
        ),
        Mutant(
            "the tile is taken for its first row",
            (("cuda.blockIdx.y * block_m", "cuda.blockIdx.y"),),
            "rows 0 to 3 of head 0 of batch 0: written by blocks 0, 1 .*must be one block",
        ),
        Mutant(
            "every block takes the first tile",
            (("cuda.blockIdx.y * block_m", "0"),),
            "rows 4 to 7 of head 0 of batch 0: 4 of 4 never written",
        ),
        Mutant(
            "heads in y",
            (
                (
                    "(batches * heads, -(-seqlen_q // block_m))",
                    "(-(-seqlen_q // block_m), batches * heads)",
                ),
                ("batch = cuda.blockIdx.x // heads", "batch = cuda.blockIdx.y // heads"),
                ("head = cuda.blockIdx.x % heads", "head = cuda.blockIdx.y % heads"),
                ("cuda.blockIdx.y * block_m", "cuda.blockIdx.x * block_m"),
            ),
            "131,072 blocks in y .*at most 65,535.*belongs into x",
        ),
        Mutant("no kernel", (("return grid, claim", "return grid"),), r"must be \(grid, kernel\)"),
        Mutant(
            "a fraction of a tile",
            (("-(-seqlen_q // block_m)", "seqlen_q / block_m"),),
            "must be one to three positive integers",
        ),
    ),
    "06.utilisation": (
        Mutant(
            "no last wave: all are full",
            (("waves = -(-blocks // at_once)", "waves = blocks / at_once"),),
            "share of slots, share_used.blocks=1, multiprocessors=1, slots=2., is 1.0: must be 0.5",
        ),
        Mutant(
            "whole waves only",
            (("waves = -(-blocks // at_once)", "waves = max(1, blocks // at_once)"),),
            "The share of .* Waves: 2; blocks in the last one: 1;",
        ),
        Mutant(
            "slots forgotten",
            (("at_once = multiprocessors * slots", "at_once = multiprocessors"),),
            "The share of .*slots=2",
        ),
        Mutant(
            "the last wave fills a multiprocessor first",
            (("min(last, multiprocessors)", "-(-last // slots)"),),
            "share of multiprocessors.*multiprocessors with one of them: 2",
        ),
        Mutant(
            "the last wave is on all multiprocessors",
            (("min(last, multiprocessors)", "multiprocessors"),),
            "share of multiprocessors.*multiprocessors with one of them: 1",
        ),
        Mutant(
            "the last wave has more blocks than multiprocessors",
            (("min(last, multiprocessors)", "last"),),
            "share of multiprocessors.* is 2.0: must be 1",
        ),
        Mutant(
            "counts, not shares",
            (("return busy / (waves * multiprocessors)", "return busy"),),
            "share of multiprocessors",
        ),
        Mutant(
            "one number",
            ((", blocks / (waves * at_once)", ""),),
            r"must be \(of multiprocessors, of slots\)",
        ),
    ),
}

"""The ladder and the papers: every rung has its file, every cited step exists and is cited."""

import io
import re
import tokenize
from pathlib import Path

import numpy as np
import pytest

import fa2_numba
from fa2_numba import RUNGS
from fa2_numba.config import DeviceLimits, TileConfig
from fa2_numba.constants import SHARED_BYTES_PER_BLOCK
from fa2_numba.device.sliced_k import swizzle
from fa2_numba.ladder import choose_backward_rung
from fa2_numba.paper import PAPER_STEPS

KERNELS = Path(fa2_numba.__file__).parent / "kernels"
PARTS_OF = {
    "standard": {"backward_parts"},
    "fa2_split_q": {"backward_parts"},
    "fa2_tensor_core": {"fa2_tensor_core_backward_parts", "fa2_tensor_core_backward_dq"},
}
"""Rung with a backward pass -> the files of kernels beside its own."""

ALGORITHM_OF = {"fa1": "FA1 Alg. 1", "fa2": "FA2 Alg. 1"}
CITATION = re.compile(r"(FA\d Alg\. \d) lines? (\d+(?:(?:, | and )\d+)*)")


def cited_steps(source):
    """(algorithm, line) of every citation in a comment."""
    steps = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            for algorithm, lines in CITATION.findall(token.string):
                steps |= {(algorithm, int(line)) for line in re.findall(r"\d+", lines)}
    return steps


def test_auto_takes_a_backward_pass_that_fits_the_device():
    turing = DeviceLimits((7, 5), SHARED_BYTES_PER_BLOCK[7, 5])
    chosen = {d: choose_backward_rung("auto", "float16", d, turing).name for d in (128, 129, 256)}
    assert chosen == {128: "fa2_tensor_core", 129: "fa2_split_q", 256: "fa2_split_q"}
    assert choose_backward_rung("auto", "float32", 64, turing).name == "fa2_split_q"
    assert choose_backward_rung("fa2_tensor_core", "float16", 256, turing).name == "fa2_tensor_core"


def test_a_rung_is_a_file_of_its_name():
    files = {path.stem for path in KERNELS.glob("*.py")} - {"__init__"}
    backward = {f"{name}_backward" for name, rung in RUNGS.items() if rung.plan_backward}
    assert files == set(RUNGS) | backward.union(*PARTS_OF.values())
    assert all(rung.name == name for name, rung in RUNGS.items())


@pytest.mark.parametrize("rung", RUNGS)
def test_cited_lines_are_in_the_table_and_all_of_the_table_is_cited(rung):
    cited = cited_steps((KERNELS / f"{rung}.py").read_text())
    known = {(algorithm, line) for algorithm, steps in PAPER_STEPS.items() for line in steps}
    assert cited <= known
    algorithm = ALGORITHM_OF.get(rung.partition("_")[0])
    expected = {(algorithm, line) for line in PAPER_STEPS.get(algorithm, {})}
    assert expected <= cited


@pytest.mark.parametrize("rung", PARTS_OF)
def test_a_backward_pass_cites_its_algorithm_too(rung):
    files = {f"{rung}_backward"} | PARTS_OF[rung]
    cited = set().union(*(cited_steps((KERNELS / f"{name}.py").read_text()) for name in files))
    steps = {("FA2 Alg. 2", line) for line in PAPER_STEPS["FA2 Alg. 2"]}
    assert cited <= steps
    assert cited == steps or not rung.startswith("fa2")


def test_citations_are_read_from_comments():
    source = "x = 1  # FA2 Alg. 1 line 9: why\n# FA2 Alg. 1 lines 13, 15\n'FA1 Alg. 1 line 5'\n"
    assert cited_steps(source) == {("FA2 Alg. 1", n) for n in (9, 13, 15)}


def test_the_maps_in_the_docstrings_are_those_of_the_tiles():
    """Which rows (split-Q) and keys (sliced-K) a warp owns, with the tiles of 64 x 64 x 64."""
    config = TileConfig(64, 64, 64)
    rows = config.block_m // config.num_warps
    keys = config.block_n // config.num_warps
    split_q, sliced_k, backward = (
        (KERNELS / f"{name}.py").read_text()
        for name in ("fa2_split_q", "fa1_sliced_k", "fa2_split_q_backward")
    )
    for warp in range(config.num_warps):
        first, last = warp * rows, (warp + 1) * rows - 1
        assert f"warp {warp}   |  rows {first:3} .. {last} of S, O" in split_q
        first, last = warp * keys, (warp + 1) * keys - 1
        assert f"|{first:2} -{last:3} |" in sliced_k
        assert f"warp {warp}   |  rows {first:3} .. {last} of S^T, dS^T, dK, dV" in backward


def test_partial_outputs_meet_no_bank_conflict():
    """Lanes that store (8 rows x 4 columns) and sum (2 rows x 16 columns) hit 32 banks."""
    lane = np.arange(32)
    for first_row in range(0, 64, 8):
        for first_col in range(0, 16, 4):
            r, c = first_row + lane // 4, first_col + lane % 4
            assert len(set((16 * r + swizzle.py_func(r, c)) % 32)) == 32
    for first_row in range(0, 64, 2):
        r, c = first_row + lane // 16, lane % 16
        assert len(set((16 * r + swizzle.py_func(r, c)) % 32)) == 32
        assert sorted(swizzle.py_func(r, c)[:16]) == list(range(16))


def test_rungs_share_one_choice_of_tiles():
    """No rung picks tiles of its own: `plan_forward` is given them."""
    for rung in RUNGS:
        assert "choose_tiles" not in (KERNELS / f"{rung}.py").read_text()

"""The command line of the main job: all of it is checked before any work starts."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fa2_numba.arrays import DTYPES
from fa2_numba.data import LAYERS
from fa2_numba.ladder import RUNGS
from fa2_numba.launch import gpu_available

ALL_TOKENS = 256
HEADS = (1, 2, 3, 6, 9)
"""Whole groups of three query heads that share a key-value head, or a part of the first group."""

BUDGET_SECONDS = 75
"""What all rungs together may take in the simulator by default: about a minute."""

SECONDS_PER_TILE = 2.0
"""What a rung takes to simulate one head's 64 x 64 scores (D = 64) with all checks on: measured 1.6
to 2.4 on one core of a 2-core machine, 1.1 of fa2_tensor_core. (fa1_tensor_core has key tiles that
64 keys do not fill: it takes 4.6.)"""

EPILOG = """\
commands, each with a --help of its own:
  doctor                what is installed, which machine is used, what to fix
  diff A [B]            what changes from A to B, or to A from the rung below it
  grade FILE            points for the course's exercises in a notebook or file
  release FILE... --to FOLDER
                        lessons without their solutions, for students

Exit status: 0 if every rung passes, 1 if one fails, 2 for bad options."""

TILE_TOKENS = 64
SIMULATED_HEADS = 3


@dataclass(frozen=True)
class Options:
    """What to run, every default filled in.

    rungs: ids from the bottom of the ladder to its top; tokens, heads: the slice of the data;
    machine: "gpu" or "simulator"; json: records instead of tables; plot: a file to write.
    """

    rungs: tuple[str, ...]
    tokens: int
    heads: int
    layer: int
    machine: str
    dtype: str
    json: bool
    plot: Path | None


def parse(argv: Sequence[str]) -> Options:
    """Read the arguments; ends the process with status 2 and one line of reason if they are bad."""
    parser = _parser()
    given = parser.parse_args(argv)
    rungs = _select_rungs(parser, given.rung, given.dtype)
    if given.machine == "gpu" and not gpu_available():
        parser.error("--machine gpu: no GPU here; `python -m fa2_numba doctor` says why")
    if given.plot is not None:
        _check_plot(parser, given.plot)
    on_gpu = given.machine != "simulator" and gpu_available()
    heads = given.heads or (HEADS[-1] if on_gpu else SIMULATED_HEADS)
    return Options(
        rungs=rungs,
        tokens=given.tokens or (ALL_TOKENS if on_gpu else affordable_tokens(len(rungs), heads)),
        heads=heads,
        layer=given.layer,
        machine="gpu" if on_gpu else "simulator",
        dtype=given.dtype,
        json=given.json,
        plot=given.plot,
    )


def affordable_tokens(rungs: int, heads: int) -> int:
    """The longest sequence, in whole tiles, that so many rungs simulate within the budget.

    >>> affordable_tokens(3, 3), affordable_tokens(1, 3), affordable_tokens(9, 9)
    (128, 192, 64)
    """
    lengths = range(ALL_TOKENS, TILE_TOKENS, -TILE_TOKENS)
    fits = (n for n in lengths if estimate_seconds(rungs, n, heads) <= BUDGET_SECONDS)
    return next(fits, TILE_TOKENS)


def estimate_seconds(rungs: int, tokens: int, heads: int) -> float:
    """About how long so many rungs take in the simulator, one after the other.

    >>> estimate_seconds(3, 128, 3)
    72.0
    """
    tiles = -(-tokens // TILE_TOKENS)
    return rungs * heads * tiles**2 * SECONDS_PER_TILE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fa2_numba",
        usage="%(prog)s [OPTION ...]\n       %(prog)s COMMAND ...",
        description="Run every rung of the ladder on the Q, K and V of a language model that\n"
        "reads Alice in Wonderland, check each against exact attention, and show where\n"
        "the heads look.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rung",
        type=_rung_ids,
        action="extend",
        metavar="ID[,ID...]",
        help=f"which rungs, may be repeated (default: all): {', '.join(RUNGS)}",
    )
    parser.add_argument(
        "--tokens",
        type=_token_count,
        metavar="N",
        help=f"the first N of {ALL_TOKENS} tokens (default: all of them on a GPU; in the simulator "
        "what takes about a minute)",
    )
    parser.add_argument(
        "--heads",
        type=int,
        choices=HEADS,
        help="query heads, three of which share a key-value head (default: 9 on a GPU, else "
        f"{SIMULATED_HEADS})",
    )
    parser.add_argument(
        "--layer", type=int, choices=LAYERS, default=LAYERS[-1], help="default: %(default)s"
    )
    parser.add_argument(
        "--machine",
        choices=("auto", "gpu", "simulator"),
        default="auto",
        help="default: auto, the GPU if there is one",
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float16", help="default: float16"
    )
    parser.add_argument("--json", action="store_true", help="print records instead of tables")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="save the attention maps (.png, .svg, .pdf ...)"
    )
    return parser


def _rung_ids(text: str) -> list[str]:
    for rung in (ids := [part.strip() for part in text.split(",")]):
        if rung not in RUNGS:
            raise argparse.ArgumentTypeError(f"{rung!r} must be one of {', '.join(RUNGS)}")
    return ids


def _token_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= ALL_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 1 to {ALL_TOKENS}")
    return int(text)


def _select_rungs(
    parser: argparse.ArgumentParser, asked: list[str] | None, dtype: str
) -> tuple[str, ...]:
    """The rungs asked for in the ladder's order, or all that take the dtype."""
    for rung in asked or ():
        if dtype not in RUNGS[rung].dtypes:
            parser.error(f"--rung {rung}: takes {', '.join(RUNGS[rung].dtypes)}, not {dtype}")
    wanted = RUNGS if asked is None else asked
    return tuple(name for name in RUNGS if name in wanted and dtype in RUNGS[name].dtypes)


def _check_plot(parser: argparse.ArgumentParser, file: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install -e ".[notebooks]"')
    from fa2_numba.demo.plot import file_types

    if not file.parent.is_dir():
        parser.error(f"--plot {file}: there is no folder {file.parent}")
    if file.is_dir():
        parser.error(f"--plot {file}: is a folder")
    if file.suffix.removeprefix(".").lower() not in file_types():
        parser.error(f"--plot {file}: the name must end in one of .{', .'.join(file_types())}")

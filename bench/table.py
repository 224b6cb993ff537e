"""`python -m bench table`: write the README's tables of times from the recorded results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import backward_summary, forward_summary
from bench.plot import FOLDER

PAGE = Path(__file__).parents[1] / "README.md"
WRITERS = {"forward": forward_summary.write_table, "backward": backward_summary.write_table}
"""File of results -> what writes its table between its markers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables; 2 if a file is missing, cannot be read, or has no place for one."""
    parser = argparse.ArgumentParser(prog="python -m bench table", description=__doc__)
    option = parser.add_argument
    option("page", type=Path, nargs="?", default=PAGE, help="default: the README")
    option("--folder", type=Path, default=FOLDER, help="of the results; default: the H200's")
    options = parser.parse_args(argv)
    for name, write in WRITERS.items():
        file = options.folder / f"{name}.json"
        try:
            write(file, options.page)
        except (OSError, KeyError, TypeError, ValueError) as error:
            print(f"error: {file} into {options.page}: {error}", file=sys.stderr)
            return 2
        print(f"{options.page}: {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

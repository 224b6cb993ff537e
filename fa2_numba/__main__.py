"""`python -m fa2_numba` runs every rung on real Q, K, V.

`... diff` shows what a rung changes against another, `... doctor` looks for what is wrong, `grade`
and `release` serve the course's exercises.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "diff": "fa2_numba.rung_diff",
    "doctor": "fa2_numba.doctor",
    "grade": "fa2_numba.lessons.grader",
    "release": "fa2_numba.lessons.release",
}
"""Command -> module whose `main(argv)` runs it. Without a command the demo runs."""
NOTEBOOK_MODULES = ("jupytext", "nbclient", "nbformat")
"""Of the extra `notebooks`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, or the demo; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    module = "fa2_numba.demo.run"
    if arguments and arguments[0] in COMMANDS:
        module = COMMANDS[arguments.pop(0)]
    elif arguments and not arguments[0].startswith("-"):
        known = ", ".join(COMMANDS)
        print(f"error: no command {arguments[0]!r}: must be one of {known}", file=sys.stderr)
        return 2
    try:
        command = import_module(module)
    except (ImportError, AttributeError) as error:
        # So fails Numba where it does not fit NumPy; the doctor knows what to do.
        advice = "`python -m fa2_numba doctor` says what to do"
        if getattr(error, "name", None) in NOTEBOOK_MODULES:
            advice = 'pip install "fa2_numba[notebooks]"'
        print(f"error: {error}; {advice}", file=sys.stderr)
        return 2
    return command.main(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

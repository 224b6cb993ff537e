"""`python -m bench COMMAND`: measure, compare and draw."""

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

COMMANDS = {
    "run": "time every rung and its peers: forward, backward and both",
    "ladder": "time the CUDA-core rungs in float32",
    "ceilings": "measure what the GPU reaches at best",
    "host_time": "measure what a call costs the host",
    "stamps": "record when and where blocks run",
    "ncu": "let Nsight Compute count what kernels do",
    "train_gpt": "train a small GPT with three attentions",
    "compare": "say what became faster or slower between two files",
    "plot": "draw the recorded results as SVG files",
    "roofline": "draw every rung below what the GPU reaches",
    "table": "write the README's tables from the recorded results",
}
MODULES = {"ncu": "counters"}
"""Command -> the module whose `main(argv)` runs it, where that has another name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0] in COMMANDS:
        return _module(arguments[0]).main(arguments[1:]) or 0
    lines = [f"  {name:10} {what}" for name, what in COMMANDS.items()]
    usage = "\n".join(["usage: python -m bench COMMAND ...", *lines])
    if arguments in (["-h"], ["--help"]):
        print(usage)
        return 0
    wrong = f"no command {arguments[0]!r}" if arguments else "no command"
    print(f"error: {wrong}: must be one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _module(command: str) -> ModuleType:
    return import_module(f"bench.{MODULES.get(command, command)}")


if __name__ == "__main__":
    raise SystemExit(main())

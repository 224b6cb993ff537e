"""From a running frame to words: file, line, source text, and the name a value was stored under."""

import dis
import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType

MARKER = "__simulated_by_fa2_numba__"
"""A key of the globals of every retargeted function: tells kernel frames from the simulator's."""

HIDDEN = "__counted_"
"""How names begin that counting adds to a kernel; no message shows them."""

Place = tuple[CodeType, int]
"""An instruction: its code object, and where it stands in it."""


def kernel_frame() -> FrameType:
    """The innermost frame that belongs to the simulated kernel or one of its device functions."""
    frame = sys._getframe(1)
    while MARKER not in frame.f_globals:
        frame = frame.f_back
    return frame


def kernel_place() -> Place:
    """The instruction of the kernel, or of a device function, that runs now."""
    frame = kernel_frame()
    return frame.f_code, frame.f_lasti


def call_chain() -> tuple[Place, ...]:
    """Where the current thread stands: its kernel frames, innermost first."""
    chain = []
    frame = kernel_frame()
    while frame is not None:
        if MARKER in frame.f_globals:
            chain.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(chain)


def line_number(code: CodeType, lasti: int) -> int:
    """The source line of the instruction at `lasti`."""
    for start, end, line in code.co_lines():
        if start <= lasti < end and line is not None:
            return line
    return code.co_firstlineno


def describe_line(code: CodeType, lasti: int) -> str:
    """`file.py:12: source text` of the instruction at `lasti`."""
    return describe_source_line(code.co_filename, line_number(code, lasti))


def describe_source_line(filename: str, line: int) -> str:
    """The same for a line of a file."""
    text = linecache.getline(filename, line).strip()
    return f"{Path(filename).name}:{line}: {text}" if text else f"{filename}:{line}"


def stored_name(code: CodeType, lasti: int) -> str | None:
    """The variable that takes the call at `lasti`: `K` in `K = cuda.shared.array(...)`."""
    for instruction in dis.get_instructions(code):
        if instruction.offset > lasti:
            name = instruction.argval if instruction.opname.startswith("STORE_") else None
            name = name[0] if isinstance(name, tuple) else name
            return None if name is None or name.startswith(HIDDEN) else name
    return None


def ranges(numbers: list[int]) -> str:
    """`0-3, 7` for [0, 1, 2, 3, 7].

    >>> ranges([7, 0, 1, 2, 3])
    '0-3, 7'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)

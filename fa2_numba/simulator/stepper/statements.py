"""The statements of a kernel, and which of them a caller means."""

from __future__ import annotations

import ast
import linecache
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType

from fa2_numba.simulator.retarget import SimulatedModule
from fa2_numba.simulator.source import MARKER

Target = int | str | tuple[str, int]
"""A line of the kernel's file, text that stands in the statement, or (end of a path, line)."""

Statement = tuple[str, int]
"""File name, and the line that the statement begins on."""


class Statements:
    """The statements of a retargeted kernel and of the device functions that it calls."""

    def __init__(self, kernel: FunctionType) -> None:
        self.kernel = kernel
        self._starts: dict[str, dict[int, int]] = {}

    def at(self, filename: str, line: int) -> Statement:
        """The innermost statement that the line belongs to."""
        if filename not in self._starts:
            self._starts[filename] = statement_starts("".join(linecache.getlines(filename)))
        return filename, self._starts[filename].get(line, line)

    def first(self) -> Statement:
        """The statement that every thread executes first."""
        code = self.kernel.__code__
        lines = (line for *_, line in code.co_lines() if line and line > code.co_firstlineno)
        return self.at(code.co_filename, next(lines, code.co_firstlineno))

    def meant_by(self, target: Target) -> set[Statement]:
        """The statements that `target` names; refuses one that names none of this kernel."""
        if isinstance(target, str):
            text = target.strip()
            lines = self._lines if text else ()
            found = {self.at(*line) for line in lines if text in linecache.getline(*line)}
        else:
            file, line = (
                target if isinstance(target, tuple) else (self.kernel.__code__.co_filename, target)
            )
            found = {
                self.at(name, line) for name in self.files if ends_with(name, file)
            }.intersection(self.at(*each) for each in self._lines)
        if not found:
            files = ", ".join(sorted(Path(name).name for name in self.files))
            raise ValueError(
                f"{target!r}: no statement of kernel {self.kernel.__name__} or of its device "
                f"functions, which are in {files}. A target is a line of the kernel's own file, "
                'a piece of source text, or ("file.py", line)'
            )
        return found

    @property
    def files(self) -> set[str]:
        """The files that they are in."""
        return {name for name, _ in self._lines}

    @cached_property
    def _lines(self) -> set[Statement]:
        return {
            (code.co_filename, line)
            for code in reachable_codes(self.kernel)
            for *_, line in code.co_lines()
            if line and line > code.co_firstlineno
        }


def ends_with(filename: str, end: str) -> bool:
    """Whether the last parts of a file's path are those of `end`.

    >>> [ends_with("a/tiles.py", end) for end in ("tiles.py", "a/tiles.py", "les.py", "")]
    [True, True, False, False]
    """
    parts = Path(end).parts
    return bool(parts) and Path(filename).parts[-len(parts) :] == parts


def statement_starts(source: str) -> dict[int, int]:
    """Line -> first line of the innermost statement there; no lines for what is not Python.

    >>> statement_starts("if x:\\n    y = f(\\n        1)\\n")
    {1: 1, 2: 2, 3: 2}
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    starts = {}
    for node in ast.walk(tree):  # outer statements come before inner ones
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
            starts.update(dict.fromkeys(range(node.lineno, last + 1), node.lineno))
    return starts


def reachable_codes(kernel: FunctionType) -> list[CodeType]:
    """The code of a retargeted kernel and of the device functions that it names."""
    found, to_visit = {}, [kernel]
    while to_visit:
        function = to_visit.pop()
        is_device = isinstance(function, FunctionType) and MARKER in function.__globals__
        if is_device and id(function) not in found:
            found[id(function)] = function.__code__
            to_visit += _named_by(function)
    return list(found.values())


def _named_by(function: FunctionType) -> list[object]:
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    values += function.__globals__.values()
    modules = [value for value in values if isinstance(value, SimulatedModule)]
    names = function.__code__.co_names
    return values + [getattr(module, name, None) for module in modules for name in names]

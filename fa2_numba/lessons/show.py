"""What lessons print: sources, and the errors that they run into on purpose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import dedent

from numba.cuda.dispatcher import CUDADispatcher


def show_source(function: Callable, first: str = "", last: str = "") -> None:
    """Print the source of a kernel or function, or of it the lines from `first` to `last`."""
    plain = function.py_func if isinstance(function, CUDADispatcher) else function
    lines = inspect.getsource(plain).splitlines()
    start = _index(lines, first, 0)
    end = _index(lines, last, start) if last else len(lines) - 1
    print(dedent("\n".join(lines[start : end + 1])))


@contextmanager
def expected(kind: type[Exception]) -> Iterator[None]:
    """Print the error that the lines inside end with; AssertionError if they do not."""
    try:
        yield
    except kind as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError(f"expected: {kind.__name__}")


def _index(lines: list[str], text: str, start: int) -> int:
    for number in range(start, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(f"{text!r}: must be in the source")

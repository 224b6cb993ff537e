"""Compiled kernels on disk, so that a new process need not compile them again.

Numba's own cache would not do: among a kernel's helpers it looks at those in the closure only, so
that a change of one that the kernel finds among its module's names leaves the old code in use.
Here a kernel's key holds the text of every file that the package's kernels are made of.

FA2_NUMBA_CACHE_DIR names the folder (by default fa2_numba in the user's cache folder); 0 or nothing
turns the cache off. What cannot be written is compiled again next time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType

import numba
import numba_cuda
from numba import cuda
from numba.cuda import types
from numba.cuda.cudadrv import nvvm
from numba.cuda.dispatcher import CUDADispatcher

FOLDER_VARIABLE = "FA2_NUMBA_CACHE_DIR"
PACKAGE = Path(__file__).parent
SOURCES = ("kernels/*.py", "device/*.py", "*config.py", "*_plan.py", "constants.py", "errors.py")
DIGEST_BYTES = hashlib.sha256().digest_size


def folder() -> Path | None:
    """Where compiled kernels are kept, None where the cache is off."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen not in ("", "0") else None
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "fa2_numba"
    try:
        return Path.home() / ".cache" / "fa2_numba"
    except RuntimeError:  # a user without a home
        return None


def key_of(
    kernel: CUDADispatcher, signature: tuple[types.Type, ...], compute_capability: tuple[int, int]
) -> str | None:
    """What a compiled kernel is kept under: all that its machine code depends on.

    None where that is not known: of kernels from outside this package, and once a source file has
    changed under the running program, which may or may not have loaded it anew.
    """
    function = kernel.py_func
    is_ours = (function.__module__ or "").startswith("fa2_numba.kernels.")
    if not is_ours or _sources() != SOURCES_AT_IMPORT:
        return None
    how = signature, compute_capability, kernel.targetoptions, _versions()
    parts = ingredients(function), *how, SOURCES_AT_IMPORT
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return f"{function.__name__}-{digest}"


def ingredients(function: FunctionType) -> tuple:
    """The function's name and what its factory gave it: constants by value, helpers likewise."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = ((name, cell.cell_contents) for name, cell in cells)
    return function.__name__, *(
        (name, ingredients(value.py_func) if isinstance(value, CUDADispatcher) else repr(value))
        for name, value in values
    )


def load(key: str | None) -> tuple[str, bytes] | None:
    """The entry point's name and the cubin kept under a key; None without any, or if damaged."""
    if (path := _path(key)) is None:
        return None
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, payload = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if digest != _digest(key, payload):
        return None
    entry, _, cubin = payload.partition(b"\0")
    return entry.decode(), cubin


def store(key: str | None, entry: str, cubin: bytes) -> None:
    """Keep a compiled kernel, if there is a place for it."""
    if (path := _path(key)) is None:
        return
    payload = entry.encode() + b"\0" + cubin
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _digest(key, payload) + payload)


def _write(path: Path, content: bytes) -> None:
    """Write a file at once: other processes see all of it or nothing."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def _path(key: str | None) -> Path | None:
    place = folder()
    return place / f"{key}.cubin" if key and place else None


def _digest(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + payload).digest()


def _sources() -> tuple[tuple[str, str], ...]:
    """Name and digest of every file that decides what a kernel does, as they are now."""
    files = sorted(path for pattern in SOURCES for path in PACKAGE.glob(pattern))
    return tuple(
        (str(path.relative_to(PACKAGE)), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in files
    )


@cache
def _versions() -> tuple:
    """Versions of what compiles kernels."""
    toolkit = cuda.runtime.get_version()
    return numba_cuda.__version__, numba.__version__, toolkit, nvvm.NVVM().get_ir_version()


SOURCES_AT_IMPORT = _sources()

"""House rules that a linter does not know, checked over the package's own source, all of it.

Each rule is a function from source text to a list of complaints, and each is tried on a snippet
that breaks it, so that no rule can pass because it looks at nothing.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fa2_numba"
BARRIERS = {"syncthreads", "syncthreads_count", "syncthreads_and", "syncthreads_or", "syncwarp"}
MAX_KERNEL_FILE_LINES = 300
MAX_FUNCTION_LINES = 80
MAX_SHARED_LINES = 5
RUNGS_FOLDER = PurePath("fa2_numba/kernels")
SKIPPED_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING}

# The bracketed dots keep this file from breaking its own rule.
MACHINE_PATH = re.compile(
    r"(?<![\w./:~$}-])/(?:home|root|work|Users|opt|mnt|srv|tmp|var)/[\w.]|\b[A-Z]:[\\]+\w"
)
REGISTRY_HOST = re.compile(
    r"\b(?:pypi[.]org|pythonhosted[.]org|npmjs[.](?:org|com)|pypi[.]nvidia[.]com|nvcr[.]io"
    r"|anaconda[.]org|download[.]pytorch[.]org|proxy[.]golang[.]org|deb[.]debian[.]org|crates[.]io)"
)


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (PACKAGE / folder).rglob("*.py"))


def tokens_of(source: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source).readline))


def functions_of(source: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]


def defines_a_function(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.FunctionDef) for node in ast.walk(function) if node != function)


def complaints(files: list[Path], rule) -> list[str]:
    """Apply a rule to files, of which there must be some."""
    assert files
    return [f"{path.relative_to(ROOT)}:{c}" for path in files for c in rule(path.read_text())]


# (a) A barrier says which thread would race without it.


def called_name(call: ast.Call) -> str | None:
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def uncommented_barriers(source: str) -> list[str]:
    comments = [token for token in tokens_of(source) if token.type == tokenize.COMMENT]
    commented = {token.start[0] for token in comments}
    alone = {token.start[0] for token in comments if not token.line[: token.start[1]].strip()}
    barriers = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and called_name(node) in BARRIERS
    ]
    return [
        f"{node.lineno}: {called_name(node)} without its reason"
        for node in barriers
        if node.lineno - 1 not in alone
        and not commented.intersection(range(node.lineno, node.end_lineno + 1))
    ]


def test_every_barrier_has_its_reason():
    assert complaints(python_files("kernels", "device"), uncommented_barriers) == []


def test_a_barrier_without_a_reason_is_found():
    source = "x = 1  # of another line\ncuda.syncthreads()\nsyncwarp(mask)\n"
    assert [c.split(":")[0] for c in uncommented_barriers(source)] == ["2", "3"]
    assert uncommented_barriers("# K is read below\ncuda.syncthreads()\n") == []
    assert uncommented_barriers("cuda.syncthreads_or(\n    x,\n)  # K is read below\n") == []


# (b) Numbers with a meaning are named once, in constants.py.


def magic_numbers(source: str) -> list[str]:
    found = []
    tokens = tokens_of(source)
    for before, token in zip(tokens, tokens[1:], strict=False):
        negative = before.string == "-" and before.end == token.start
        if token.type == tokenize.NUMBER and is_magic(token.string, negative):
            found.append(f"{token.start[0]}: {'-' * negative}{token.string}")
    return found


def is_magic(number: str, negative: bool) -> bool:
    text = number.lower().replace("_", "")
    if negative and re.fullmatch(r"1e.*|[\d.]+e\+?\d+", text):
        return True  # a finite stand-in for minus infinity
    is_integer = re.fullmatch(r"\d+|0x[\da-f]+", text)
    return text.startswith("1.44") or bool(is_integer and int(text, 0) == 0xFFFFFFFF)


def test_numbers_with_a_meaning_are_in_constants():
    files = [path for path in python_files(".") if path != PACKAGE / "constants.py"]
    assert complaints(files, magic_numbers) == []


@pytest.mark.parametrize(
    "text", ["1.4426950408889634", "0xffffffff", "0xFFFF_FFFF", "-1e6", "-1e-9"]
)
def test_a_magic_number_is_found(text):
    assert magic_numbers(f"y = 2\nx = f({text})\n") == [f"2: {text}"]


def test_text_and_plain_numbers_are_not_magic():
    assert magic_numbers('"""1.44, -1e6."""\nx = 1e-3 - 0xFF  # 0xffffffff\n') == []


# (c) Files and functions fit the eye.


def long_functions(source: str, factories_may: bool) -> list[str]:
    return [
        f"{function.lineno}: {function.name} has {length} lines"
        for function in functions_of(source)
        if (length := function.end_lineno - function.lineno + 1) > MAX_FUNCTION_LINES
        and not (factories_may and defines_a_function(function))
    ]


def test_functions_are_short():
    kernels = python_files("kernels")
    others = [path for path in python_files(".") if path not in kernels]
    assert complaints(kernels, lambda source: long_functions(source, True)) == []
    assert complaints(others, lambda source: long_functions(source, False)) == []


def test_kernel_files_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in python_files("kernels")}
    assert lengths
    assert {name: n for name, n in lengths.items() if n > MAX_KERNEL_FILE_LINES} == {}


def test_a_long_function_is_found():
    body = "    x = 1\n" * 80
    assert long_functions("def f():\n" + body, True) == ["1: f has 81 lines"]
    factory = "def f():\n    def kernel():\n        pass\n" + body
    assert long_functions(factory, True) == []
    assert long_functions(factory, False) == ["1: f has 83 lines"]
    assert long_functions("def f():\n" + body[:-10], True) == []


# (d) A kernel does not know which machine runs it.


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield every identifier that a node itself holds, as a reader would see it."""
    for _, value in ast.iter_fields(node):
        values = value if isinstance(value, list) else [value]
        yield from (text for text in values if isinstance(text, str))


def simulator_awareness(source: str) -> list[str]:
    tree = ast.parse(source)
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp)]
    tested = {id(node) for test in tests for node in ast.walk(test)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        for name in names_in(node):
            if "simulat" in name.lower() and not (states_meaning(node) and id(node) not in tested):
                found.append(f"{getattr(node, 'lineno', 0)}: {name}")
    return found


def states_meaning(node: ast.AST) -> bool:
    """Tell whether a node is the attribute by which an instruction states its NumPy meaning."""
    name = node.arg if isinstance(node, ast.keyword) else getattr(node, "attr", None)
    return name == "simulated"


def test_kernels_do_not_know_the_simulator():
    assert complaints(python_files("kernels", "device"), simulator_awareness) == []


@pytest.mark.parametrize(
    "source",
    [
        "if simulated:\n    pass\n",
        "if config.simulated:\n    pass\n",
        "x = 1 if op.simulated else 2\n",
        "from fa2_numba.simulator import engine\n",
        "def f(in_simulator):\n    pass\n",
        "is_SIMULATED = 1\n",
        "def simulate_mma():\n    pass\n",
    ],
)
def test_a_kernel_that_knows_the_simulator_is_found(source):
    assert [c.split(":")[0] for c in simulator_awareness(source)] == ["1"]


def test_an_instruction_may_state_its_meaning():
    source = '"""Runs in the simulator."""\nop.simulated = meaning\nbuild(simulated=meaning)\n'
    assert simulator_awareness(source) == []


# (e) Nothing in the repository depends on, or tells of, one machine.


def repository_texts() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each text file that git tracks or would track."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in content:
            yield name, content.decode()


def machine_traces(text: str) -> list[str]:
    return [
        f"{number}: {match[0]}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in (MACHINE_PATH, REGISTRY_HOST)
        for match in pattern.finditer(line)
    ]


def test_files_name_no_machine_path_and_no_registry():
    texts = dict(repository_texts())
    assert "pyproject.toml" in texts
    assert [f"{name}:{c}" for name, text in texts.items() for c in machine_traces(text)] == []


@pytest.mark.parametrize(
    "text", ["{}home/me/x", 'open("{}tmp/x")', "C:{}Users", "https://pypi{}org/simple"]
)
def test_a_trace_of_a_machine_is_found(text):
    separator = {"h": ".", "C": "\\"}.get(text[0], "/")
    assert len(machine_traces("\n" + text.format(separator))) == 1


def test_relative_paths_and_devices_are_no_trace():
    assert machine_traces("#!/usr/bin/env bash\npytest </dev/null\nshared/work/x $HOME/tmp/x") == []


# (f) One glossary names every constant that a kernel is built with.


def factory_constants(source: str) -> set[str]:
    """Find the ALL_CAPS names assigned in functions that define a function."""
    assigned = {
        node.id
        for factory in functions_of(source)
        if defines_a_function(factory)
        for node in ast.walk(factory)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return {name for name in assigned if re.fullmatch(r"[A-Z][A-Z0-9_]*", name)}


def glossary_names(readme: str) -> set[str]:
    """Find the names in the first column of the table under the heading Glossary.

    >>> sorted(glossary_names("## Glossary\\n| `BLOCK_M`, `D` | rows of S |\\n## X\\n| `Y` | |"))
    ['BLOCK_M', 'D']
    """
    section = re.search(r"^## Glossary$(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\|([^|]*)\|", section[1] if section else "", re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_factory_constant_is_in_the_glossary():
    files = python_files("kernels", "device")
    names = set().union(*(factory_constants(path.read_text()) for path in files))
    assert names, "no factory assigns a constant"
    readme = ROOT / "README.md"
    assert sorted(names - glossary_names(readme.read_text() if readme.is_file() else "")) == []


def test_factory_constants_are_found():
    source = (
        "TOP = 1\ndef factory(config):\n    BLOCK_M, rows = config\n    HEAD_DIM: int = 64\n"
        "    def kernel(q):\n        WARP_ROWS = 1\ndef plain():\n    OTHER = 2\n"
    )
    assert factory_constants(source) == {"BLOCK_M", "HEAD_DIM", "WARP_ROWS"}
    readme = (
        "# R\n| `OTHER` | |\n## Glossary\n\n| name | is |\n|--|--|\n| `BLOCK_M` | `HEAD_DIM` |\n"
    )
    assert glossary_names(readme) == {"BLOCK_M"}
    assert glossary_names("# R\n| `BLOCK_M` | |\n") == set()


# (g) No passage stands twice.


def code_lines(source: str) -> list[tuple[int, str]]:
    """List the lines of code with their numbers.

    Left out: blanks, comments, imports, docstrings, and the parameter lists of functions, since
    functions of one family share their options by design.
    """
    left_out = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.FunctionDef):
            left_out.update(range(node.lineno, node.body[0].lineno))
    lines: dict[int, str] = {}
    for token in tokens_of(source):
        number = token.start[0]
        if token.type not in SKIPPED_TOKENS and token.string.strip() and number not in left_out:
            lines[number] = f"{lines.get(number, '')} {token.string}"
    return sorted(lines.items())


def repeated_passages(sources: dict[str, str]) -> list[str]:
    """Report where a passage longer than MAX_SHARED_LINES stands a second time."""
    length = MAX_SHARED_LINES + 1
    first_seen: dict[tuple[str, ...], tuple[str, int, int]] = {}
    found, last = [], None
    for name, source in sources.items():
        lines = code_lines(source)
        for start in range(len(lines) - length + 1):
            window = tuple(text for _, text in lines[start : start + length])
            number = lines[start][0]
            original, first, line = first_seen.setdefault(window, (name, start, number))
            is_copy = original != name or first + length <= start
            # Neighbouring rungs repeat each other: each file reads from top to bottom, and the few
            # lines that differ are the lesson.
            are_rungs = {PurePath(name).parent, PurePath(original).parent} == {RUNGS_FOLDER}
            is_copy = is_copy and not (are_rungs and original != name)
            offset = (name, original, start - first) if is_copy else None
            if offset and offset != last:
                found.append(f"{name}:{number} repeats {original}:{line}")
            last = offset
    return found


def test_no_passage_stands_twice():
    files = python_files(".")
    assert files
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    assert repeated_passages(sources) == []


def test_a_repeated_passage_is_found_once():
    passage = "".join(f"x{i} = {i}\n" for i in range(8))
    indented = "def f():\n" + "".join(f"\n    # why\n    x{i}  =  {i}\n" for i in range(8))
    assert repeated_passages({"a": passage, "b": indented}) == ["b:4 repeats a:1"]
    assert repeated_passages({"a": passage + "y = 1\n" + passage}) == ["a:10 repeats a:1"]


def test_only_different_rungs_may_repeat_each_other():
    passage = "".join(f"x{i} = {i}\n" for i in range(8))
    a, b, verb = "fa2_numba/kernels/a.py", "fa2_numba/kernels/b.py", "fa2_numba/device/a.py"
    assert repeated_passages({a: passage, b: passage}) == []
    assert len(repeated_passages({a: passage + "y = 1\n" + passage})) == 1
    assert len(repeated_passages({verb: passage, a: passage})) == 1
    assert len(repeated_passages({verb: passage, a: passage, b: passage})) == 2


def test_short_repeats_and_imports_are_allowed():
    passage = "".join(f"x{i} = {i}\n" for i in range(5))
    imports = "from a import (\n    b,\n    c,\n    d,\n    e,\n    f,\n    g,\n)\n"
    assert repeated_passages({"a": passage, "b": passage + "y = 1\n"}) == []
    assert repeated_passages({"a": imports, "b": imports}) == []
    assert repeated_passages({"a": "x += 1\n" * 9}) == []

"""Counting float32 arithmetic: a kernel is compiled again with a call in place of each operator.

`a + b` becomes the call of a function that adds and counts if the sum is a float32. In-place adding
of a product, `acc += a * b`, is a step of a matrix product, and so is `cuda.fma`; all else is other
arithmetic. The kernels here write their matrix products that way and nothing else, so the split is
measured from what runs. Indices are not looked at: they are integers.
"""

from __future__ import annotations

import ast
import linecache
import math
import operator
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType

import numpy as np

from fa2_numba.simulator.values import SIMULATED_MATH, fma, fmax, fmin

OPERATIONS = (
    "multiply_adds",
    "additions",
    "multiplications",
    "divisions",
    "maxima",
    "special_calls",
)
"""What is tallied, in this order: how often each was done, by all threads together."""
MULTIPLY_ADDS, ADDITIONS, MULTIPLICATIONS, DIVISIONS, MAXIMA, SPECIAL_CALLS = range(len(OPERATIONS))

SPECIAL_FUNCTIONS = (
    "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh asin acos atan "
    "asinh acosh atanh hypot atan2 pow erf erfc gamma lgamma"
).split()
"""Functions of `math` that are more than an add or a multiply on a GPU."""

HOOK = "__counted_{}__"
OPERATORS = {
    ast.Add: (operator.add, ADDITIONS),
    ast.Sub: (operator.sub, ADDITIONS),
    ast.Mult: (operator.mul, MULTIPLICATIONS),
    ast.Div: (operator.truediv, DIVISIONS),
    ast.FloorDiv: (operator.floordiv, DIVISIONS),
    ast.Mod: (operator.mod, DIVISIONS),
    ast.Pow: (operator.pow, SPECIAL_CALLS),
}
MULTIPLY_ADD = HOOK.format("MultiplyAdd")
TARGET, INDEX = HOOK.format("target"), HOOK.format("index")


class NoSourceError(Exception):
    """The source of a function is not there, so its operators cannot be found."""

    def __init__(self, function: FunctionType, why: str) -> None:
        super().__init__(
            f"the source of {function.__name__}, {function.__code__.co_filename}, {why}"
        )


def counted_code(function: FunctionType) -> CodeType:
    """The code of `function` with its operators replaced by calls of the hooks of `make_hooks`.

    Raises NoSourceError if the source cannot be had, or is not what the function was compiled from.
    """
    code = function.__code__
    source = "".join(linecache.getlines(code.co_filename, function.__globals__))
    if not source:
        raise NoSourceError(function, "cannot be read")
    try:
        pairs = _compiled_twice(code.co_filename, source)
    except SyntaxError as error:
        raise NoSourceError(function, f"is no plain Python ({error})") from error
    for original, counted in pairs:
        if _same(original, code):
            return counted
    raise NoSourceError(function, "has changed since it was compiled")


@lru_cache(maxsize=64)
def _compiled_twice(filename: str, source: str) -> list[tuple[CodeType, CodeType]]:
    """Every function's code, as it stands and with hooks for operators."""
    plain, hooked = ast.parse(source), _HookOperators().visit(ast.parse(source))
    modules = (
        compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)
        for tree in (plain, hooked)
    )
    return list(zip(*map(_inner_codes, modules), strict=True))


def _inner_codes(code: CodeType) -> list[CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [found for constant in inner for found in (constant, *_inner_codes(constant))]


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects are one function, and do the same."""
    names = "co_firstlineno co_qualname co_code co_names co_varnames co_freevars co_cellvars"
    if any(getattr(one, name) != getattr(other, name) for name in names.split()):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(
        _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else repr(a) == repr(b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


class _HookOperators(ast.NodeTransformer):
    """Puts a call in place of every operator outside of indices."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.value = self.visit(node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) not in OPERATORS:
            return node
        return _call(_hook_name(node.op), [node.left, node.right], node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | list[ast.AST]:
        if type(node.op) not in OPERATORS:
            return self.generic_visit(node)
        before = []
        old, new = node.target, node.target
        if isinstance(node.target, ast.Subscript):
            # The array and the index are evaluated once, as `a[i] += b` does.
            before = [
                _assign(ast.Name(TARGET, ast.Store()), self.visit(node.target.value), node),
                _assign(ast.Name(INDEX, ast.Store()), node.target.slice, node),
            ]
            parts = ast.Name(TARGET, ast.Load()), ast.Name(INDEX, ast.Load())
            old, new = (ast.Subscript(*parts, context) for context in (ast.Load(), ast.Store()))
        elif isinstance(node.target, ast.Name):
            old = ast.Name(node.target.id, ast.Load())
        else:
            return self.generic_visit(node)
        return [*before, _assign(new, self._result(node, old), node)]

    def _result(self, node: ast.AugAssign, old: ast.expr) -> ast.expr:
        value = node.value
        product = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult)
        if product and isinstance(node.op, ast.Add):
            factors = [self.visit(value.left), self.visit(value.right)]
            return _call(MULTIPLY_ADD, [old, *factors], node)
        return _call(_hook_name(node.op), [old, self.visit(value)], node)


def _hook_name(operation: ast.operator) -> str:
    return HOOK.format(type(operation).__name__)


def _call(name: str, arguments: list[ast.expr], at: ast.AST) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), arguments, []), at)


def _assign(target: ast.expr, value: ast.expr, at: ast.AST) -> ast.stmt:
    return ast.copy_location(ast.Assign([target], value), at)


def make_hooks(tallies: list[int]) -> dict[str, Callable]:
    """What counted code calls, by name; `tallies` are the numbers of OPERATIONS so far."""
    float32 = np.float32

    def counting(compute: Callable, tally: int) -> Callable:
        def hook(a: object, b: object) -> object:
            result = compute(a, b)
            if type(result) is float32:
                tallies[tally] += 1
            return result

        return hook

    def multiply_add(total: object, a: object, b: object) -> object:
        result = total + a * b
        if type(result) is float32:
            tallies[MULTIPLY_ADDS] += 1
        return result

    hooks = {_hook_name(kind()): counting(*rule) for kind, rule in OPERATORS.items()}
    return hooks | {MULTIPLY_ADD: multiply_add}


class CountedMath:
    """The `math` module inside a counted kernel."""

    def __init__(self, functions: dict[str, Callable]) -> None:
        vars(self).update(functions)

    def __getattr__(self, name: str) -> object:
        return getattr(SIMULATED_MATH, name)


def counted_functions(tallies: list[int]) -> tuple[dict[str, Callable], Callable, dict]:
    """The functions of `math`, `cuda.fma`, and the built-in `max` and `min`, as they count."""

    def special(function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            tallies[SPECIAL_CALLS] += 1
            return function(*arguments)

        return call

    def extremum(function: Callable) -> Callable:
        def call(*values: object) -> object:
            result = function(*values)
            if isinstance(result, np.float32):
                tallies[MAXIMA] += len(values if len(values) > 1 else values[0]) - 1
            return result

        return call

    def multiply_add(a: object, b: object, c: object) -> object:
        result = fma(a, b, c)
        if isinstance(result, np.float32):
            tallies[MULTIPLY_ADDS] += 1
        return result

    functions = {name: special(getattr(SIMULATED_MATH, name)) for name in SPECIAL_FUNCTIONS}
    return functions, multiply_add, {"max": extremum(fmax), "min": extremum(fmin)}


def counted_meanings(functions: dict[str, Callable]) -> dict[int, object]:
    """The counted functions of `math` by what they stand for."""
    return {id(math): CountedMath(functions)} | {
        id(getattr(math, name)): function for name, function in functions.items()
    }

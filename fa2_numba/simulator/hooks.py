"""A kernel compiled once more, with calls of hooks where it computes and where it loops.

`a + b` becomes the call of a function that adds and can count. A loop tells in every iteration
which one it is. Only the function itself is changed, as its source stands in its file; that the
source is what the function was compiled from is checked by compiling it unchanged too.
"""

from __future__ import annotations

import ast
import linecache
import warnings
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType

from fa2_numba.simulator.source import HIDDEN

ADD, SUB, MULTIPLY, DIVIDE, POWER = (f"{HIDDEN}{name}" for name in "add sub mul div pow".split())
POWERS = f"{HIDDEN}powers"
"""a ** n of an n written out, which a compiler makes multiplications."""
MULTIPLY_ADD = f"{HIDDEN}multiply_add"
FLOOR_DIVIDE, REMAINDER = f"{HIDDEN}floordiv", f"{HIDDEN}mod"
ENTER, ITERATE, LEAVE = (f"{HIDDEN}{name}" for name in "enter iterate leave".split())
OPERATORS = {
    ast.Add: ADD,
    ast.Sub: SUB,
    ast.Mult: MULTIPLY,
    ast.Div: DIVIDE,
    ast.FloorDiv: FLOOR_DIVIDE,
    ast.Mod: REMAINDER,
    ast.Pow: POWER,
}
TARGET, INDEX = f"{HIDDEN}target", f"{HIDDEN}index"


class NoSourceError(Exception):
    """The source of a function is not there, so nothing can be hooked into it."""

    def __init__(self, function: FunctionType, why: str) -> None:
        file = function.__code__.co_filename
        super().__init__(f"the source of {function.__name__}, {file}, {why}")


def hooked_code(function: FunctionType) -> CodeType:
    """The code of `function` with calls of the hooks above, which must be among its globals.

    Raises NoSourceError if the source cannot be had, or is not what the function was compiled from.
    """
    code = function.__code__
    source = "".join(linecache.getlines(code.co_filename, function.__globals__))
    if not source:
        raise NoSourceError(function, "cannot be read")
    place = code.co_qualname, code.co_firstlineno
    try:
        plain, hooked = (
            _codes_at(code.co_filename, source, *place, hooks) for hooks in (False, True)
        )
    except (SyntaxError, ValueError, RecursionError) as error:
        raise NoSourceError(function, f"does not compile ({error})") from error
    for original, changed in zip(plain, hooked, strict=False):
        if _same(original, code):
            return changed
    raise NoSourceError(function, "has changed since it was compiled")


@lru_cache(maxsize=256)
def _codes_at(
    filename: str, source: str, qualname: str, line: int, hooks: bool
) -> tuple[CodeType, ...]:
    """The functions of that name that begin in that line, with or without hooks."""
    # A notebook's cell may await; the file's own warnings have been shown when it was imported.
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = compile(source, filename, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        if hooks:
            _hook_functions_at(line, tree)
        module = compile(tree, filename, "exec", flags, dont_inherit=True)
    place = qualname, line
    return tuple(
        code for code in _inner_codes(module) if (code.co_qualname, code.co_firstlineno) == place
    )


def _inner_codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner_codes(constant)


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects do the same."""
    names = "co_code co_names co_varnames co_freevars co_cellvars"
    if any(getattr(one, name) != getattr(other, name) for name in names.split()):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(
        _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else repr(a) == repr(b)
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


def _hook_functions_at(line: int, tree: ast.Module) -> None:
    """Change the functions and lambdas that begin in one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _first_line(node) == line:
            hook = _Hook()
            changed = [hook.visit(statement) for statement in node.body]
            node.body = [part for parts in changed for part in _listed(parts)]
            ast.fix_missing_locations(node)
        elif isinstance(node, ast.Lambda) and node.lineno == line:
            node.body = _Hook().visit(node.body)
            ast.fix_missing_locations(node)


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


class _Hook(ast.NodeTransformer):
    """Puts calls in place of operators, and into loops."""

    def __init__(self) -> None:
        self.loops = 0

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.value, node.slice = self.visit(node.value), self._index(node.slice)
        return node

    def _index(self, index: ast.expr) -> ast.expr:
        """Arithmetic on float32 can only stand in an index that a call makes an integer."""
        calls = any(isinstance(part, ast.Call) for part in ast.walk(index))
        return self.visit(index) if calls else index

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        # What Python computes when it compiles stays so: it is a literal.
        if _is_literal(node) or type(node.op) not in OPERATORS:
            return self.generic_visit(node)
        name = _hook_name(node.op, node.right)
        return _call(name, [self.visit(node.left), self.visit(node.right)], node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | list[ast.AST]:
        target = node.target
        if type(node.op) not in OPERATORS or isinstance(target, ast.Attribute):
            return self.generic_visit(node)
        if isinstance(target, ast.Name):
            return _assign(target, self._updated(node, _load(target.id)), node)
        # The array and the index are evaluated once, as `a[i] += b` does.
        old, new = (
            ast.Subscript(_load(TARGET), _load(INDEX), context)
            for context in (ast.Load(), ast.Store())
        )
        return [
            _assign(_store(TARGET), self.visit(target.value), node),
            _assign(_store(INDEX), self._index(target.slice), node),
            _assign(new, self._updated(node, old), node),
        ]

    def _updated(self, node: ast.AugAssign, old: ast.expr) -> ast.expr:
        value = node.value
        product = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult)
        if product and isinstance(node.op, ast.Add) and not _is_literal(value):
            factors = [self.visit(value.left), self.visit(value.right)]
            return _call(MULTIPLY_ADD, [old, *factors], node)
        return _call(_hook_name(node.op, value), [old, self.visit(value)], node)

    def visit_For(self, node: ast.For) -> list[ast.AST]:
        return self._loop(node)

    def visit_While(self, node: ast.While) -> list[ast.AST]:
        return self._loop(node)

    def _loop(self, node: ast.For | ast.While) -> list[ast.AST]:
        """Remember where the thread was, count the iterations, and be there again afterwards."""
        self.loops += 1
        outer, count = f"{HIDDEN}outer{self.loops}", f"{HIDDEN}count{self.loops}"
        self.generic_visit(node)
        iterate = _call(ITERATE, [_load(outer), _load(count)], node)
        node.body.insert(0, _assign(_store(count), iterate, node))
        if node.orelse:
            node.orelse.insert(0, _statement(_call(LEAVE, [_load(outer)], node)))
        return [
            _assign(_store(outer), _call(ENTER, [], node), node),
            _assign(_store(count), ast.copy_location(ast.Constant(0), node), node),
            node,
            _statement(_call(LEAVE, [_load(outer)], node)),
        ]


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_literal(node.left) and _is_literal(node.right)
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def _hook_name(operation: ast.operator, right: ast.expr) -> str:
    whole = isinstance(right, ast.Constant) and type(right.value) is int and right.value > 0
    return POWERS if isinstance(operation, ast.Pow) and whole else OPERATORS[type(operation)]


def _listed(node: ast.AST | list[ast.AST]) -> list[ast.AST]:
    return node if isinstance(node, list) else [node]


def _load(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _store(name: str) -> ast.expr:
    return ast.Name(name, ast.Store())


def _call(name: str, arguments: list[ast.expr], at: ast.AST) -> ast.expr:
    return ast.copy_location(ast.Call(_load(name), arguments, []), at)


def _assign(target: ast.expr, value: ast.expr, at: ast.AST) -> ast.stmt:
    return ast.copy_location(ast.Assign([target], value), at)


def _statement(value: ast.expr) -> ast.stmt:
    return ast.copy_location(ast.Expr(value), value)

"""What the operators and functions of a counted kernel do: compute, and count float32 results.

In-place adding of a product, `acc += a * b`, is a step of a matrix product, and so is `cuda.fma`;
all else is other arithmetic. The kernels here write their matrix products that way and nothing
else, so the split is measured from what runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import numpy as np

from fa2_numba.simulator import hooks
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

BINARY = {
    hooks.ADD: (operator.add, ADDITIONS),
    hooks.SUB: (operator.sub, ADDITIONS),
    hooks.MULTIPLY: (operator.mul, MULTIPLICATIONS),
    hooks.DIVIDE: (operator.truediv, DIVISIONS),
    hooks.FLOOR_DIVIDE: (operator.floordiv, DIVISIONS),
    hooks.REMAINDER: (operator.mod, DIVISIONS),
    hooks.POWER: (operator.pow, SPECIAL_CALLS),
}

SPECIAL_FUNCTIONS = (
    "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh asin acos atan "
    "asinh acosh atanh hypot atan2 pow erf erfc gamma lgamma"
).split()
"""Functions of `math` that are more than an add or a multiply on a GPU."""


def counting(function: Callable, tally: int, tallies: list[int]) -> Callable:
    """`function`, counted where its result is a float32."""
    float32 = np.float32

    def call(*arguments: object) -> object:
        result = function(*arguments)
        if type(result) is float32:
            tallies[tally] += 1
        return result

    return call


def operator_hooks(tallies: list[int]) -> dict[str, Callable]:
    """What hooked code calls in place of operators, by name."""
    float32 = np.float32

    def binary(compute: Callable, tally: int) -> Callable:
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

    def powers(a: object, n: int) -> object:
        result = a**n
        if type(result) is float32:
            # By squaring: one multiplication a bit, and one more for each further bit that is set.
            tallies[MULTIPLICATIONS] += n.bit_length() + n.bit_count() - 2
        return result

    by_name = {name: binary(*rule) for name, rule in BINARY.items()}
    return by_name | {hooks.MULTIPLY_ADD: multiply_add, hooks.POWERS: powers}


def extremum(function: Callable, tallies: list[int]) -> Callable:
    """`max` or `min`: one comparison for each number after the first."""

    def call(*values: object) -> object:
        result = function(*values)
        if type(result) is np.float32:
            tallies[MAXIMA] += len(values if len(values) > 1 else values[0]) - 1
        return result

    return call


class CountedMath:
    """The `math` module inside a counted kernel; `functions` by name are those that count."""

    def __init__(self, tallies: list[int]) -> None:
        self.functions = {
            name: counting(getattr(SIMULATED_MATH, name), SPECIAL_CALLS, tallies)
            for name in SPECIAL_FUNCTIONS
        }
        vars(self).update(self.functions)

    def __getattr__(self, name: str) -> object:
        return getattr(SIMULATED_MATH, name)


def counted_meanings(tallies: list[int]) -> dict[int, object]:
    """What the counted functions stand for, by the identity of the real ones."""
    counted = CountedMath(tallies)
    return {id(math): counted} | {
        id(getattr(math, name)): function for name, function in counted.functions.items()
    }


def counted_builtins(tallies: list[int]) -> dict[str, Callable]:
    """`max` and `min` as they count."""
    return {"max": extremum(fmax, tallies), "min": extremum(fmin, tallies)}


def counted_fma(tallies: list[int]) -> Callable:
    """`cuda.fma` as it counts."""
    return counting(fma, MULTIPLY_ADDS, tallies)

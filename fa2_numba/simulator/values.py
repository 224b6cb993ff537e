"""What numbers mean inside a simulated kernel: Numba's types and casts, rounding as on a GPU.

Numba computes integers narrower than 64 bits in 64 bits, so a simulated integer is a Python int;
floating-point numbers are NumPy scalars, which round after every operation as the hardware does.

One known limit: where an integer meets a floating-point number, the result is not rounded as on a
GPU. Compiled Numba makes float64 of `float32 * int` and of `int / int`. Here a Python int, and the
Python float that `int / int` gives, yield to the NumPy type they meet, so that `float32 * int` and
`float32 * (int / int)` are float32. To round alike on both, a kernel in float32 converts its
integers: `x * float32(i)`, `float32(i) / float32(n)`.
"""

import builtins
import math
from collections.abc import Callable
from fractions import Fraction
from functools import reduce

import ml_dtypes
import numpy as np
from numba.cuda import libdevice, types


class IntegerCast:
    """A Numba integer type as a kernel uses it: `int32(x)` wraps; also the dtype of an array.

    >>> IntegerCast(np.int32)(2**31)
    -2147483648
    >>> IntegerCast(np.uint16)(-1)
    65535
    """

    def __init__(self, scalar: type) -> None:
        self.dtype = np.dtype(scalar)
        self.name = self.dtype.name
        self._modulus = 1 << (8 * self.dtype.itemsize)
        self._largest = int(np.iinfo(scalar).max)

    def __call__(self, value: object = 0) -> int | np.uint64:
        """`value` truncated toward zero and wrapped into the type's range."""
        wrapped = int(value) % self._modulus
        if self.name == "uint64":
            return np.uint64(wrapped)
        return wrapped - self._modulus if wrapped > self._largest else wrapped

    def __repr__(self) -> str:
        return self.name


_INTEGERS = {
    name: IntegerCast(getattr(np, name))
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}

int32 = _INTEGERS["int32"]

NUMBA_TYPES = {
    types.float16: np.float16,
    types.float32: np.float32,
    types.float64: np.float64,
    types.bfloat16: ml_dtypes.bfloat16,
    types.boolean: np.bool_,
} | {getattr(types, name): cast for name, cast in _INTEGERS.items()}
"""What a Numba scalar type becomes when a kernel calls it or names it as an array's dtype."""

NUMPY_INTEGERS = {getattr(np, name): cast for name, cast in _INTEGERS.items()}


def numpy_dtype(dtype: object) -> np.dtype:
    """The NumPy dtype of whatever a kernel passed as `dtype` (Numba type, NumPy type, cast)."""
    if isinstance(dtype, IntegerCast):
        return dtype.dtype
    if isinstance(dtype, types.Type):
        return np.dtype(numpy_dtype(NUMBA_TYPES[dtype]))
    return np.dtype(dtype)


def cast_to(dtype: np.dtype) -> Callable:
    """The conversion that storing into an array of `dtype` does."""
    return NUMPY_INTEGERS.get(dtype.type, dtype.type)


def scalar_value(value: object) -> object:
    """A literal, argument or global as the compiled kernel would type it.

    A Python float must become a float64, which it is for Numba: NumPy would give way to a float32
    (`float32(0.1) * 0.1` is a float64 product in a kernel).
    """
    if isinstance(value, np.integer) and not isinstance(value, np.uint64):
        return int(value)
    if type(value) is float:
        return np.float64(value)
    if type(value) is tuple:
        return tuple(map(scalar_value, value))
    return value


def fma(a: np.floating, b: np.floating, c: np.floating) -> np.floating:
    """a*b + c with one rounding, as `fma.rn` does.

    In float32 the product is exact in float64; the sum is rounded to odd there, so that the
    final rounding to float32 is the only one (Boldo and Melquiond, 2008).

    >>> float(fma(np.float32(1 + 2**-12), np.float32(1 - 2**-12), np.float32(-1)))
    -5.960464477539063e-08
    """
    kind = np.result_type(a, b, c).type
    if kind is np.float64:
        return np.float64(_fma_float64(float(a), float(b), float(c)))
    product, addend = float(a) * float(b), float(c)
    total = product + addend
    if math.isfinite(total):
        back = total - product
        error = (product - (total - back)) + (addend - back)
        if error != 0.0 and not int(np.float64(total).view(np.int64)) & 1:
            total = math.nextafter(total, math.copysign(math.inf, error))
    return kind(total)


def _fma_float64(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact) if exact else a * b + c
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def fmax(*values: object) -> object:
    """`max` as the hardware computes it: a NaN loses against a number."""
    if len(values) != 2:
        return reduce(fmax, values if len(values) > 1 else values[0])
    a, b = values
    if a != a:
        return b
    return b if b > a else a


def fmin(*values: object) -> object:
    """`min` as the hardware computes it: a NaN loses against a number."""
    if len(values) != 2:
        return reduce(fmin, values if len(values) > 1 else values[0])
    a, b = values
    if a != a:
        return b
    return b if b < a else a


def _result_type(x: object) -> type:
    return type(x) if isinstance(x, (np.float32, np.float16)) else np.float64


def _rounded(function: Callable, fallback: Callable) -> Callable:
    """`function` in float64, rounded to its argument's type; infinities and NaN, not exceptions."""

    def rounded(x, *others):
        try:
            value = function(x, *others)
        except (OverflowError, ValueError):
            value = fallback(*(np.float64(y) for y in (x, *others)))
        return _result_type(x)(value)

    rounded.__name__ = function.__name__
    return rounded


class SimulatedMath:
    """The `math` module inside a kernel: results have the argument's type and may be inf or NaN."""

    _UNLIKE_NUMPY = {"pow": np.power, "gamma": None, "lgamma": None, "erf": None, "erfc": None}
    _ROUNDED = (
        "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh asin acos atan "
        "asinh acosh atanh fabs hypot copysign fmod atan2 pow erf erfc gamma lgamma"
    ).split()
    _NUMPY_NAMES = {f"a{name}": f"arc{name}" for name in "sin cos tan sinh cosh tanh tan2".split()}

    def __init__(self) -> None:
        for name in self._ROUNDED:
            numpy_name = self._NUMPY_NAMES.get(name, name)
            fallback = self._UNLIKE_NUMPY.get(name) or getattr(np, numpy_name, lambda *_: math.nan)
            setattr(self, name, _rounded(getattr(math, name), fallback))

    def __getattr__(self, name: str) -> object:
        return scalar_value(getattr(math, name))


def _bits(value: object, of: type, to: type) -> object:
    return of(value).view(to)


def _unknown(name: str) -> Callable:
    def refuse(*_: object) -> None:
        raise NotImplementedError(f"the simulator does not know libdevice.{name}")

    return refuse


LIBDEVICE = {stub: _unknown(name) for name, stub in vars(libdevice).items() if callable(stub)} | {
    libdevice.int_as_float: lambda i: np.float32(_bits(int32(i), np.int32, np.float32)),
    libdevice.float_as_int: lambda x: int(_bits(x, np.float32, np.int32)),
}
"""The libdevice functions by their Numba stub: those that kernels here use, and refusals."""

SIMULATED_MATH = SimulatedMath()
BUILTINS = vars(builtins) | {"max": fmax, "min": fmin, "float": np.float64}

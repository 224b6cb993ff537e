"""Between the dtype arrays are stored in and the float32 the CUDA-core kernels compute in.

A bfloat16 array reaches a kernel as its bits (uint16): a bfloat16 is the upper half of a float32.
"""

from numba.cuda import libdevice
from numba.cuda.types import float16, float32, int32, uint16, uint32

from fa2_numba.device import device_function

BITS_DROPPED = 16
ROUND_HALF = 0x7FFF
QUIET_NAN = 0x7FC0


@device_function
def _to_float32(x):
    return float32(x)


@device_function
def _float32_to_float16(x):
    return float16(x)


@device_function
def _bfloat16_to_float32(bits):
    return libdevice.int_as_float(int32(uint32(bits) << BITS_DROPPED))


@device_function
def _float32_to_bfloat16(x):
    if x != x:
        return uint16(QUIET_NAN)
    bits = uint32(libdevice.float_as_int(x))
    # Adding just under half, and one more if the kept part is odd, rounds half to even.
    odd = (bits >> BITS_DROPPED) & 1
    return uint16((bits + ROUND_HALF + odd) >> BITS_DROPPED)


TO_FLOAT32 = {
    "float32": _to_float32,
    "float16": _to_float32,
    "bfloat16": _bfloat16_to_float32,
}
"""dtype name -> device function from a stored element to float32."""

FROM_FLOAT32 = {
    "float32": _to_float32,
    "float16": _float32_to_float16,
    "bfloat16": _float32_to_bfloat16,
}
"""dtype name -> device function from float32 to a stored element, rounding to nearest even."""

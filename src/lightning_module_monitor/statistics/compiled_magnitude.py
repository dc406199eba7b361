"""The largest magnitude of a tensor's elements in one pass, as machine code; see ``statistics/compiled.py``.

Without its sign, what a floating number's bits say as an integer is in the order of the magnitudes: finite numbers, infinity, NaN.
So the largest integer tells all of it, in any precision, and nothing is converted.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from lightning_module_monitor.statistics.compiled_vectors import pointer


@njit("int64(int64, int64)", cache=True)
def largest_of_four_bytes(address: int, num_elements: int) -> int:
    """The largest of ``num_elements`` magnitudes that lie one after the other from ``address`` on: bits of a float32."""
    bits = carray(pointer(address), num_elements, np.int32)
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return int(largest)


@njit("int64(int64, int64)", cache=True)
def largest_of_two_bytes(address: int, num_elements: int) -> int:
    """Likewise, bits of a float16 or bfloat16."""
    bits = carray(pointer(address), num_elements, np.int16)
    largest = np.int16(0)
    for i in range(bits.size):
        largest = max(largest, np.int16(bits[i] & np.int16(0x7FFF)))
    return int(largest)

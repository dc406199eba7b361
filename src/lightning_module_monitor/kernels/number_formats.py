"""The floating formats that trainings are cast to: what of a float32 becomes zero there, and what is beyond the largest number."""

from __future__ import annotations

from typing import NamedTuple


class NumberFormat(NamedTuple):
    """The limits of a cast to a format, which rounds to the nearest number, and between two of them to the even one."""

    smallest: float
    """The smallest subnormal number. A magnitude of at most half of it becomes zero."""
    largest: float
    """The largest finite number."""
    beyond: float
    """The magnitude where rounding leaves the finite numbers: halfway between the largest and what would follow it."""
    is_beyond_rounded_away: bool = True
    """Whether ``beyond`` itself rounds away; in a format whose largest number is even it is rounded to that number."""


NUMBER_FORMATS = {
    "float16": NumberFormat(2.0**-24, 65504.0, 65520.0),
    "bfloat16": NumberFormat(2.0**-133, (2 - 2.0**-7) * 2.0**127, (2 - 2.0**-8) * 2.0**127),
    "float8_e4m3fn": NumberFormat(2.0**-9, 448.0, 464.0, is_beyond_rounded_away=False),
    "float8_e5m2": NumberFormat(2.0**-16, 57344.0, 61440.0),
}
"""By the name that torch gives them. ``float8_e4m3fn`` has no infinity: torch casts what is beyond to its largest number from 2.12 on, and
to NaN before. Sources: IEEE 754-2019, and "FP8 formats for deep learning" (arXiv 2209.05433)."""

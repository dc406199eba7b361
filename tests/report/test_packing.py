"""Numbers as the page holds them: what is lost, and what is not."""

from __future__ import annotations

import base64
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_module_monitor.keys import Key
from lightning_module_monitor.report.payload import ABSENT_BITS, FEWEST_COLUMNS, MAX_NUMBERS, Payload, condense, pack
from lightning_module_monitor.sinks.store.matrices import Table


def unpack(text: str) -> NDArray[np.float32]:
    """The inverse, written again as data.js does it: the upper three bytes of little-endian float32."""
    upper = np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, 3)
    return np.pad(upper, ((0, 0), (1, 0))).view("<f4")[:, 0]


def table(values: NDArray[np.float64], is_recorded: NDArray[np.bool_] | None = None) -> Table:
    """A table of these values at steps 0, 10, ..."""
    recorded = np.ones(values.shape, bool) if is_recorded is None else is_recorded
    sites = tuple(f"site{row}" for row in range(len(values)))
    return Table(Key("activation", "", "rms"), sites, np.arange(values.shape[1]) * 10, values, recorded)


def test_numbers_keep_four_digits_and_what_is_not_finite_stays() -> None:
    """A relative error of 2^-16; NaN, infinities, zeros and signs as they were; a value that was not recorded differs from NaN."""
    numbers = np.random.default_rng(0).normal(size=1000) * 10.0 ** np.arange(-30, 30).repeat(17)[:1000]
    np.testing.assert_allclose(unpack(pack(numbers)), numbers, rtol=2.0**-16)
    odd = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, -1e300, 1e-300, 5.0])
    back = unpack(pack(odd, np.array([True] * 8 + [False])))
    np.testing.assert_array_equal(back[:5], odd[:5])
    assert np.signbit(back[1])
    np.testing.assert_allclose(back[5:7], [3.4e38, -3.4e38], rtol=1e-3)
    assert back[7] == 0
    assert back.view(np.uint32)[8] == ABSENT_BITS
    assert back.view(np.uint32)[4] != ABSENT_BITS


def test_a_column_stands_for_several_steps_by_its_largest_magnitude() -> None:
    """Spikes survive, and NaN before them; each column has its first and last step; the last column may have fewer steps."""
    values = np.array([[1.0, -9.0, 2.0, 3.0, 4.0], [0.0, math.nan, 5.0, 1e9, 0.0], [7.0, 8.0, 9.0, 1.0, 1.0]])
    recorded = np.array([[True] * 5, [True] * 5, [True, True, False, False, True]])
    condensed, last_steps = condense(table(values, recorded), max_columns=3)
    assert condensed.steps.tolist() == [0, 20, 40]
    assert last_steps.tolist() == [10, 30, 40]
    np.testing.assert_array_equal(condensed.values[:2], [[-9.0, 3.0, 4.0], [math.nan, 1e9, 0.0]])
    assert condensed.values[2, 0] == 8.0
    assert condensed.is_recorded.tolist() == [[True] * 3, [True] * 3, [True, False, True]]
    same, _ = condense(table(values), max_columns=5)
    np.testing.assert_array_equal(same.values, values)


@pytest.mark.parametrize(("num_series", "num_steps"), [(10, 1000), (7000, 1000), (20_000, 1000)])
def test_a_large_run_gives_a_page_of_bounded_size(num_series: int, num_steps: int) -> None:
    """All numbers together stay within the budget, at four bytes of text each: 20 MB at most beside plotly's 5."""
    sites = min(num_series, 200)
    payload = Payload(num_series, 0)
    packed = payload.table(table(np.random.default_rng(0).lognormal(size=(sites, num_steps))))
    columns = len(payload.lists()[packed["first"]])
    assert num_series * columns <= max(MAX_NUMBERS, num_series * FEWEST_COLUMNS)
    assert len(packed["data"]) == 4 * sites * columns
    assert columns == {10: 1000, 7000: 334, 20_000: 143}[num_series]

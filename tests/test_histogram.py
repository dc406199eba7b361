"""The bins of every histogram."""

from __future__ import annotations

import numpy as np
import torch
from helpers.textbook import histogram

from lightning_module_monitor.histogram import EDGES, LABELS, NUM_BINS, NUM_COUNTS, Histogram


def test_edges_are_powers_of_two_of_both_signs() -> None:
    """They ascend, are finite and symmetric; W&B takes at most 512 bins."""
    assert EDGES.shape == (NUM_BINS + 1,)
    assert NUM_BINS == 261
    assert np.isfinite(EDGES).all()
    assert (np.diff(EDGES) > 0).all()
    np.testing.assert_array_equal(EDGES, -EDGES[::-1])
    np.testing.assert_array_equal(np.log2(EDGES[132:-1]), np.arange(-64, 65))


def test_labels_say_what_is_counted() -> None:
    """One for each place, in the order of the values."""
    assert len(LABELS) == NUM_COUNTS == len(set(LABELS))
    for value, label in {
        -np.inf: "-inf", -1e38: "(-inf, -2^64]", -2.0**64: "(-inf, -2^64]", -1.0: "(-2^1, -2^0]", -1e-30: "(-2^-64, 0)", -0.0: "0",
        2.0**-65: "(0, 2^-64)", 2.0**-64: "[2^-64, 2^-63)", 1.0: "[2^0, 2^1)", 1.5: "[2^0, 2^1)", 2.0: "[2^1, 2^2)",
        2.0**64: "[2^64, inf)", np.inf: "inf", np.nan: "nan",
    }.items():  # fmt: skip
        row = histogram(torch.tensor([value])).row
        assert LABELS[int(row.argmax())] == label


def test_a_histogram_tells_its_parts() -> None:
    """Finite elements by bin, the others by what they are; the empty bins at the ends can be left away."""
    one = histogram(torch.tensor([1.0, 1.5, 0.0, -3.0, float("nan"), float("inf"), float("inf")]))
    assert one.counts.sum() == 4
    assert one.nonfinite == {"-inf": 0, "inf": 2, "nan": 1}
    counts, edges = one.occupied()
    assert (edges[0], edges[-1]) == (-4.0, 2.0)
    assert (counts[0], counts[-1], counts.sum()) == (1, 2, 4)
    assert len(edges) == len(counts) + 1
    nothing = histogram(torch.tensor([float("nan")]))
    assert len(nothing.occupied()[0]) == 0
    assert (one + one).row.tolist() == (2 * one.row).tolist()
    assert one == Histogram(one.row.copy()) != nothing
    assert hash(one) == hash(Histogram(one.row.copy()))
